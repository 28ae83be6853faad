"""Bytes of an optimizer: its state, and what a step of it allocates.

It steps on fake parameters, so that Adam's two copies of a large model are counted and not made.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import DataDependentOutputException, FakeTensorMode
from zoo.errors import ArgumentError
from zoo.optimizer.independence import step_alone
from zoo.profiling.allocator_events import tensors_in
from zoo.profiling.fake_tensors import FakeTensorFixes
from zoo.profiling.kernel_costs import UpdateBytes
from zoo.profiling.step_profile import AllocationMode

# steps after which no optimizer does anything for the first time: RAdam rectifies from its sixth on
LATE = 1000

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of an optimizer: its state, and the most that a step allocates beside it.

    `updates` are those of a step for one parameter, by its shape and type, where the optimizer
    steps in the backward; None where it does not.
    """

    state: int = 0
    step: int = 0
    updates: UpdateBytes | None = None


def check_maker(make: object) -> None:
    """Raises ArgumentError unless `make` can be called: an optimizer itself cannot."""
    if not callable(make):
        raise ArgumentError(
            "optimizer= makes an optimizer, such as torch.optim.AdamW or a function of the "
            f"parameters; got {type(make).__name__ if hasattr(make, 'step') else repr(make)}"
        )


def is_optimizer(value: object) -> bool:
    """Says whether a value steps, and has groups of parameters and a state, as torch's have."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "step", None))
        and isinstance(getattr(value, "state", None), Mapping)
        and isinstance(getattr(value, "param_groups", None), list)
    )


def made_by(make: MakeOptimizer, parameters: list[Any]) -> torch.optim.Optimizer:
    """Returns the optimizer that `make` makes of parameters.

    Raises:
        ArgumentError: it makes none, or does not take a list of parameters.
    """
    check_maker(make)
    try:
        found = make(parameters)
    except TypeError as error:
        raise ArgumentError(
            f"optimizer= is called with a list of parameters, which it does not take: {error}"
        ) from error
    if not is_optimizer(found):
        raise ArgumentError(
            f"optimizer= made no optimizer but a value of type {type(found).__name__}; return one, "
            "as lambda parameters: torch.optim.SGD(parameters, lr=0.1) does"
        )
    return found


def optimizer_bytes(
    make: MakeOptimizer | None, parameters: Iterable[Tensor], in_backward: bool = False
) -> OptimizerBytes:
    """Counts the bytes of the optimizer that `make` builds for these parameters; None is no state.

    With `in_backward` it steps for each parameter as soon as the gradient is complete.

    Raises:
        ArgumentError: it makes none, or its step needs more than gradients: a closure, or numbers
            in them.
    """
    if make is None:
        return OptimizerBytes(updates={} if in_backward else None)
    check_maker(make)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FakeTensorFixes(mode):
        # made anew: a fake of a parameter shares its version, which a graph may have noted
        fakes = [nn.Parameter(torch.empty_like(p)) for p in parameters if p.requires_grad]
        if not fakes:
            return OptimizerBytes()
        optimizer = made_by(make, fakes)
        for fake in fakes:
            fake.grad = torch.empty_like(fake)
        try:
            optimizer.step()
            for kept in optimizer.state.values():
                if isinstance(kept, dict) and "step" in kept:
                    kept["step"] += LATE
            updates = _update_bytes(optimizer) if in_backward else None
            step = 0 if in_backward else _allocated(optimizer.step)
        except (DataDependentOutputException, TypeError, RuntimeError) as error:
            raise ArgumentError(
                f"{type(optimizer).__name__} cannot step on fake tensors ({error}). Pass "
                "optimizer= one of like state, or None and take its bytes off the budget."
            ) from error
        state = {id(t): t.untyped_storage().nbytes() for t in tensors_in(optimizer.state)}
    return OptimizerBytes(sum(state.values()), step, updates)


def _update_bytes(optimizer: torch.optim.Optimizer) -> UpdateBytes:
    """Counts the bytes of a step for one parameter, for each shape and type."""
    found: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    for group in optimizer.param_groups:
        forms = {(tuple(p.shape), p.dtype): p for p in group["params"]}
        for form, parameter in forms.items():
            step = functools.partial(step_alone, optimizer, group, parameter)
            found[form] = max(found.get(form, 0), _allocated(step))
    return found


def _allocated(step: Callable[[], Any]) -> int:
    with AllocationMode() as allocations:
        step()
    return int(allocations.curve().peak())
