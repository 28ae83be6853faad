"""Training programs of several modules, each planned by an option of its own or by none."""

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.pairs.kinds import batch
from tests.training import assert_same
from zoo._torch import FakeTensor

# "least" is the least budget that a refusal reports
OPTIONS: tuple[Any, ...] = (True, "blocks", "cheap", 2, "least")
PRECISIONS = (torch.float32, torch.bfloat16)
STEPS = 3
# returns the loss of a step of the modules
Step = Callable[[Sequence[nn.Module], int], Tensor]


def in_precision(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Returns the autocast of a data type; none for float32."""
    return torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)


def one_behind_the_other(modules: Sequence[nn.Module], step: int) -> Tensor:
    x = batch(step)
    for module in modules:
        x = module(x)
    return x.float().square().mean()


def least_budget(modules: nn.ModuleList, number: int, loss_of: Step) -> int:
    """Returns the bytes that one of the modules needs, as the refusal of its first step says."""
    copies = copy.deepcopy(modules)
    zoo.checkpoint(copies[number], memory_budget=8, optimizer="sgd")
    with pytest.raises(zoo.BudgetError, match="needs at least") as refused:
        loss_of([*copies], 0)
    assert refused.value.least is not None
    return refused.value.least


def train(
    makes: Sequence[Callable[[], nn.Module]],
    options: Sequence[Any],
    dtype: torch.dtype,
    loss_of: Step = one_behind_the_other,
) -> list[Any]:
    """Returns what a training leaves: losses, gradients and states after each step."""
    torch.manual_seed(0)
    modules = nn.ModuleList(make() for make in makes)
    with in_precision(dtype):
        budgets = {
            number: least_budget(modules, number, loss_of)
            for number, option in enumerate(options)
            if option == "least"
        }
    for number, (module, option) in enumerate(zip(modules, options, strict=True)):
        if number in budgets:
            zoo.checkpoint(module, memory_budget=budgets[number], optimizer="sgd")
        elif option is not None:
            zoo.checkpoint(module, option)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(modules.parameters(), 0.1, momentum=0.9)
    left: list[Any] = []
    for step in range(STEPS):
        with in_precision(dtype):
            loss = loss_of([*modules], step)
        loss.backward()
        gradients = [p.grad for p in modules.parameters() if p.grad is not None]
        assert all(type(gradient) is Tensor for gradient in gradients)
        optimizer.step()
        left += [loss.detach(), *(gradient.clone() for gradient in gradients)]
        optimizer.zero_grad()
        left += [value.clone() for value in modules.state_dict().values()]
    return [*left, torch.get_rng_state()]


def assert_plans_change_nothing(
    makes: Sequence[Callable[[], nn.Module]],
    options: Sequence[Any],
    dtype: torch.dtype,
    loss_of: Step = one_behind_the_other,
) -> None:
    """Asserts that modules train to the same bits by their options, and that no fake is left."""
    expected = train(makes, [None] * len(makes), dtype, loss_of)
    with quiet(), no_fakes_left():
        found = train(makes, options, dtype, loss_of)
    assert_same(found, expected)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what plans say of models so small that nothing is saved."""
    log = logging.getLogger("zoo")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def no_fakes_left() -> Iterator[None]:
    """Asserts that neither the program nor a plan holds a fake tensor that was made inside."""
    # all that the collector knows: parameters, gradients, attributes, saved tensors and handles
    before = set(map(id, _fakes()))
    yield
    if not before.issuperset(map(id, _fakes())):
        # the frames of a refused first step
        gc.collect()
    assert before.issuperset(map(id, _fakes()))


def _fakes() -> list[FakeTensor]:
    return [found for found in gc.get_objects() if type(found) is FakeTensor]
