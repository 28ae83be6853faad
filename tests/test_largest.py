"""The largest size that keeps to a budget: by what real training steps at it and beyond it take."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.training import Residuals, assert_same, everything, images
from zoo.chain import Chain
from zoo.errors import ArgumentError, BudgetError, InputError, PlanError
from zoo.largest import Largest, largest
from zoo.measure.rehearsal import rehearse

sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
on_paper = functools.partial(largest, optimizer=sgd, device="cpu", verify=False)


def scores(output: Any, *_: Any) -> Tensor:
    return output.square().mean()


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


gpt2 = functools.partial(
    zoo.gpt2_small, depth=2, width=64, heads=4, vocabulary=300, chunk_tokens=32
)
lstm = functools.partial(zoo.lstm, vocabulary=300, embedding=64, hidden=64, chunk_steps=16)

# the model, what makes its inputs of a size, its loss, and the size to be found
Case = tuple[Callable[[], Chain], Callable[[int], Any], Any, int]
CASES: dict[str, Case] = {
    "resnet": (
        functools.partial(zoo.resnet18, classes=10),
        lambda size: meta(size, 3, 64, 64),
        scores,
        3,
    ),
    "preactivation": (
        functools.partial(zoo.resnet110, classes=10),
        lambda size: meta(size, 3, 16, 16),
        scores,
        3,
    ),
    "densenet": (
        functools.partial(zoo.densenet100, classes=10),
        lambda size: meta(size, 3, 16, 16),
        scores,
        3,
    ),
    "vit": (zoo.vit_tiny_patch16, lambda size: meta(size, 3, 224, 224), scores, 2),
    "gpt2": (gpt2, lambda size: (tokens(size, 64), tokens(size, 64)), None, 3),
    "lstm": (lstm, lambda size: (tokens(64, size), None, tokens(64, size)), None, 3),
    "lstm, longer": (lstm, lambda size: (tokens(size, 4), None, tokens(size, 4)), None, 70),
    "gpt2, longer": (gpt2, lambda size: (tokens(2, size), tokens(2, size)), None, 70),
    "vnet": (zoo.vnet, lambda size: meta(size, 1, 16, 16, 16), scores, 2),
}


def real_peak(case: Case, size: int, checkpoint: Any) -> int:
    """Measures a real step at a size."""
    build, make, loss, _ = case
    made = make(size)
    made = made if isinstance(made, tuple) else (made,)
    inputs = [value if value is None else torch.zeros_like(value, device="cpu") for value in made]
    return rehearse(zoo.checkpoint(build(), checkpoint), inputs, sgd, loss)


QUICK = ("resnet", "vit", "gpt2", "lstm, longer")


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [*((name, False) for name in CASES), *((name, True) for name in QUICK)],
)
def test_real_steps_keep_to_the_budget_up_to_the_size_found(name: str, checkpoint: bool) -> None:
    build, make, loss, size = case = CASES[name]
    fits, too_large = (real_peak(case, some, checkpoint) for some in (size, size + 1))
    found = zoo.largest(
        build(),
        vary=make,
        memory_budget=(fits + too_large) // 2,
        checkpoint=checkpoint,
        optimizer=sgd,
        loss=loss,
    )
    assert found.size == size
    assert found.measured_peak == fits
