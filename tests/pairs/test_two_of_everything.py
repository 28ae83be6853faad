"""Two of what is otherwise tested alone: optimizers, offloading, threads, plans in plans."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.pairs.kinds import KINDS, batch
from tests.pairs.programs import STEPS, assert_plans_change_nothing, one_behind_the_other, quiet
from tests.training import assert_same

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")
# without dropout, whose masks threads would draw in any order
PAIRS = [("lstm", "gru"), ("convolution", "norms"), ("cells", "function"), ("embedding", "lstm")]
Put = Callable[[nn.Module], Any]
BUDGET = {"memory_budget": "1MiB", "optimizer": "sgd"}


def modules_of(pair: Sequence[str]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(KINDS[kind]() for kind in pair)


def train(modules: nn.ModuleList, makes_optimizers: bool) -> list[Tensor]:
    """Trains two modules in a row by an optimizer of each; returns losses and states."""
    optimizers = [torch.optim.Adam(module.parameters()) for module in modules]
    if makes_optimizers:
        for module, optimizer in zip(modules, optimizers, strict=True):
            zoo.optimizer_in_backward(module, optimizer)
    left = []
    for step in range(STEPS):
        loss = one_behind_the_other([*modules], step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        left += [loss.detach(), *(value.clone() for value in modules.state_dict().values())]
    return left


@pytest.mark.parametrize("option", [{}, {"checkpoint": "blocks"}, BUDGET])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_optimizers_in_one_backward(pair: Sequence[str], option: dict[str, Any]) -> None:
    modules = modules_of(pair)
    others = copy.deepcopy(modules)
    with quiet():
        for module in modules:
            zoo.checkpoint(module, **option)
        assert_same(train(modules, True), train(others, False))


@pytest.mark.parametrize("option", [{}, {"checkpoint": "blocks"}, {"checkpoint": 2}, BUDGET])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_modules_whose_segments_lie_on_the_host(
    pair: Sequence[str], option: dict[str, Any]
) -> None:
    modules = modules_of(pair)
    others = copy.deepcopy(modules)
    with quiet():
        for module in modules:
            zoo.checkpoint(module, **option, offload=True)
        assert_same(train(modules, False), train(others, False))


@pytest.mark.parametrize("option", [{}, {"checkpoint": "cheap"}, BUDGET])
def test_two_pairs_in_two_threads(option: dict[str, Any]) -> None:
    """All four modules are planned at the same time."""
    pairs = [modules_of(pair) for pair in PAIRS]
    expected = [train(copy.deepcopy(modules), False) for modules in pairs]
    with quiet(), ThreadPoolExecutor(len(pairs)) as executor:
        for module in (module for modules in pairs for module in modules):
            zoo.checkpoint(module, **option)
        found = executor.map(train, pairs, [False] * len(pairs))
        assert_same([*found], expected)


class Around(nn.Module):
    """A module with a plan of its own, in one that has another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.inner = KINDS["linear"](), KINDS[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)) + x


@pytest.mark.parametrize("inner", [True, "blocks"])
@pytest.mark.parametrize("outer", [True, "blocks", 2])
def test_a_plan_in_a_plan_behind_a_plan(outer: Any, inner: Any) -> None:
    def make() -> nn.Module:
        return Around("lstm")

    def loss_of(modules: Sequence[nn.Module], step: int) -> Tensor:
        front, around = modules
        if hasattr(around.forward, "option") and step == 0:
            zoo.checkpoint(around.inner, inner)
        return around(front(batch(step))).square().mean()

    makes = [KINDS["gru"], make]
    assert_plans_change_nothing(makes, [True, outer], torch.float32, loss_of)
