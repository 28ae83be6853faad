"""Runs the steps of a chain so that nothing of it shows afterwards: see also `scratch`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zoo.chain import HOOKS, Outline
from zoo.measure.scratch import on_scratch


@contextlib.contextmanager
def untouched(chain: nn.Module, outline: Outline) -> Iterator[None]:
    """Lets the steps run without hooks; afterwards all that they reach is as it was."""
    before = {module: dict(vars(module)) for module in chain.modules()}
    hooks = {p: p._backward_hooks for p in chain.parameters() if p._backward_hooks}
    try:
        for module in before:
            for name in HOOKS:
                setattr(module, name, {})
        for parameter in hooks:
            parameter._backward_hooks = None
        with on_scratch(outline.steps):
            yield
    finally:
        for parameter, own in hooks.items():
            parameter._backward_hooks = own
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Keeps fake casts of real weights out of autocast's cache."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def scratch(buffer: Tensor | None, fake: Callable[[Tensor], Any]) -> Any:
    """Stands in for a buffer by what `fake` makes of it.

    A counter stays a number, since some layers compute with it.
    """
    if buffer is None:
        return None
    if buffer.ndim == 0 and buffer.device.type in ("cpu", "meta"):
        with unset_fake_temporarily():
            return torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.clone()
    return fake(buffer)
