"""Other libraries' own activation checkpointing: how it is switched on and off.

    timm            model.set_grad_checkpointing()
    transformers    model.activation_checkpointing_enable(), named gradient_... before 5.24
    torchvision     the flag memory_efficient of a DenseNet's layers
    MONAI, others   the flags use_checkpoint and with_cp of blocks

A model that checkpoints itself gets no plan: everything would run three times.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from zoo.errors import ArgumentError

# arguments of a class that become flags of its modules, which may be changed later
ARGUMENTS = ("memory_efficient", "use_checkpoint", "with_cp")
# flags that are true while a module checkpoints itself
FLAGS = ("grad_checkpointing", "gradient_checkpointing", *ARGUMENTS)


@dataclass(frozen=True)
class Switch:
    """A model's own checkpointing: `words` are what turns it on, `turn(on)` turns it on or off."""

    words: str
    turn: Callable[[bool], object]


def switch_of(model: nn.Module) -> Switch | None:
    """Returns the switch of a model's own checkpointing, which it leaves off; None without one."""
    switch = _switch_of(model)
    try:
        if switch is not None:
            switch.turn(True)
            switch.turn(False)
    except Exception:
        # models of timm and transformers have the method and may refuse it
        return None
    return switch


def _switch_of(model: Any) -> Switch | None:
    if hasattr(model, "set_grad_checkpointing"):
        return Switch("set_grad_checkpointing()", model.set_grad_checkpointing)
    if name := transformers_method(model, "enable"):
        return Switch(f"{name}()", lambda on: turn_transformers(model, on))
    for flag in ARGUMENTS:
        if modules := [module for module in model.modules() if flag in vars(module)]:
            return Switch(f"{flag}=True", partial(_set, modules, flag))
    return None


def _set(modules: Iterable[nn.Module], flag: str, value: bool) -> None:
    for module in modules:
        setattr(module, flag, value)


def turn_transformers(model: Any, on: bool = True, **settings: Any) -> None:
    """Turns a transformers model's checkpointing on, with settings such as every_n_layers, or off.

    Without reentrant backwards, older versions' default, which skip what no input's gradient needs.
    """
    if on:
        method = getattr(model, transformers_method(model, "enable"))
        method({"use_reentrant": False}, **settings)
    else:
        getattr(model, transformers_method(model, "disable"))()


def transformers_method(model: Any, verb: str) -> str:
    """Returns the name of the method that enables or disables it; "" for other models."""
    names = (f"{kind}_checkpointing_{verb}" for kind in ("activation", "gradient"))
    return next((name for name in names if hasattr(model, name)), "")


def check_switches(model: nn.Module) -> None:
    """Raises ArgumentError if a model's own checkpointing is on: everything would run three times.

    `torch.utils.checkpoint`, which the models call, also updates running statistics twice.
    """
    for path, module in model.named_modules():
        for flag in FLAGS:
            if vars(module).get(flag) is True:
                where = f"{path}.{flag}" if path else flag
                raise ArgumentError(
                    f"{type(model).__name__} checkpoints itself ({where} is True). Turn that off "
                    f"by {_way_off(model, flag)}; then zoo.checkpoint takes its place"
                )


def _way_off(model: nn.Module, flag: str) -> str:
    if flag == "grad_checkpointing":
        return "model.set_grad_checkpointing(False)"
    if flag == "gradient_checkpointing":
        name = transformers_method(model, "disable") or "gradient_checkpointing_disable"
        return f"model.{name}()"
    return f"building it with {flag}=False"
