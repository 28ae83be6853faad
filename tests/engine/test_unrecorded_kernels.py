"""Where no segment is open, nothing stands between a program and its kernels but what must."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import assert_same, gradients, needs_numpy
from zoo._torch import dispatch_modes, top_saved_tensors_hooks
from zoo.engine.segments import thread
from zoo.planner.plan import Plan
from zoo.tracing.planned_forward import patched_forward

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")


class Block(nn.Module):
    """A residual block that notes the modes and hooks around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)
        self.around: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hooks = top_saved_tensors_hooks(False)
        self.around = [*dispatch_modes(), *([] if hooks is None else [hooks])]
        return x + self.second(self.first(x).tanh())


class Varied(nn.Module):
    """Blocks on a batch that the program may enlarge; it may leave the last ones out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.times, self.depth, self.scaled, self.named = 1, 4, False, False

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(self.times, 1)
        if self.scaled:
            x = x * self.blocks[0].second.bias
        for block in self.blocks[: self.depth]:
            x = block(x=x) if self.named else block(x)
        return x.square().sum()


def trained(model: nn.Module, x: Tensor) -> dict[str, Any]:
    model.zero_grad()
    model(x).backward()
    return gradients(model)


@needs_numpy
@pytest.mark.parametrize("is_own", [True, False])
def test_a_plan_that_keeps_all_has_neither_mode_nor_hooks(is_own: bool) -> None:
    model, x = Varied(), torch.randn(512, 8)
    expected = trained(model, x)
    steps = len([*zoo.plan(model, x, memory_budget="1GiB").plan.flatten()])
    options = {"checkpoint": Plan(range(steps))} if is_own else {"memory_budget": "1GiB"}
    zoo.checkpoint(model, **options)
    trained(model, x)
    assert_same(trained(model, x), expected)
    assert [block.around for block in model.blocks] == [[]] * 4
    assert thread.conductor is None


def with_change(
    change: dict[str, Any], budget: str, *, named: bool = False
) -> tuple[Varied, Any, list[bool]]:
    """Returns a trained model that has changed, its input, and which blocks had a mode then."""
    model, x = Varied(), torch.randn(512, 8)
    model.named = named
    other = copy.deepcopy(model)
    zoo.checkpoint(model, memory_budget=budget)
    for _ in range(2):
        trained(model, x)
    for either in (model, other):
        vars(either).update(change)
    expected = trained(other, x)
    assert_same(trained(model, x), expected)
    around = [bool(block.around) for block in model.blocks[: model.depth]]
    assert_same(trained(model, x), expected)
    return model, x, around


@needs_numpy
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("change", [{"times": 4}, {"times": 90}, {"scaled": True}])
def test_from_the_first_block_of_another_forward_on_each_kernel_is_looked_at(
    change: dict[str, Any], named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, around = with_change(change, "3MiB", named=named)
    assert all(around)
    assert any("larger tensors" in said for said in caplog.messages) is (change == {"times": 90})
    if change == {"times": 4}:
        # a known plan had room, and the next smaller ones go without the mode again
        model.times = 1
        trained(model, x), trained(model, x)
        assert not model.blocks[0].around


@needs_numpy
def test_a_block_that_is_left_out_is_seen_at_the_end() -> None:
    model, _, around = with_change({"depth": 3}, "1GiB")
    assert not any(around)
    # its own plan was made, and of two paths only the kernels tell which it is
    assert model.blocks[0].around


class Inner(Block):
    """A block whose tensors inside, or whose operations, the program may change."""

    times, activation = 1, staticmethod(torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        self.around = [*dispatch_modes()]
        hidden = self.activation(self.first(x.repeat(self.times, 1)))
        return x + self.second(hidden).view(self.times, *x.shape).mean(0)


def inner(budget: str) -> tuple[Varied, Tensor]:
    model, x = Varied(), torch.randn(128, 8)
    model.blocks = nn.ModuleList(Inner() for _ in range(4))
    return zoo.checkpoint(model, memory_budget=budget), x


@needs_numpy
@pytest.mark.parametrize("after", [2, 20])
@pytest.mark.parametrize("change", [{"times": 30}, {"activation": torch.relu}])
def test_a_change_inside_of_a_block_is_planned_for_soon(change: dict[str, Any], after: int) -> None:
    model, x = inner("2MiB")
    for _ in range(after):
        trained(model, x)
    before, is_larger = zoo.plan_of(model), "times" in change
    for block in model.blocks:
        vars(block).update(change)
    expected = trained(zoo.uncheckpoint(copy.deepcopy(model)), x)
    for _ in range(74 - after):
        assert_same(trained(model, x), expected)
    [kind] = patched_forward(model).cache.kinds.values()
    paths = {tuple(branch.operators) for branch in kind.branches}
    assert (zoo.plan_of(model) != before, len(paths)) == (is_larger, 1 if is_larger else 2)


@needs_numpy
def test_few_forwards_of_a_plan_that_keeps_all_look_at_each_kernel() -> None:
    model, x = inner("1GiB")
    numbers = []
    for number in range(1, 257):
        trained(model, x)
        numbers += [number] if model.blocks[0].around else []
    assert numbers == [1, 8, 72, 136, 200]


@needs_numpy
def test_an_error_in_a_block_leaves_no_mode() -> None:
    model, x = Varied(), torch.randn(512, 8)
    zoo.checkpoint(model, memory_budget="1GiB")
    for _ in range(2):
        trained(model, x)
    model.scaled, model.blocks[1].second = True, nn.Linear(3, 8)
    with pytest.raises(RuntimeError, match="shapes"):
        model(x)
    assert model.blocks[0].around
    assert (thread.conductor, thread.segment, top_saved_tensors_hooks(False)) == (None, None, None)
    assert not dispatch_modes()


def test_between_segments_autograd_saves_without_hooks() -> None:
    model, x = Varied(), torch.randn(512, 8)
    expected = trained(model, x)
    zoo.checkpoint(model, 2)
    trained(model, x)
    assert_same(trained(model, x), expected)
    # of two segments the last is kept, from the first kernel of the third block on
    assert [len(block.around) for block in model.blocks] == [2, 2, 2, 1]
