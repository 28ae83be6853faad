"""What the forward looks at may change: it is the model's own forward that runs."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.tracing.models import Net, UNet
from tests.training import assert_same, images, train
from zoo.profiling.step_recorder import StepRecorder
from zoo.tracing import isolated_trace
from zoo.tracing.plan_cache import PlanCache
from zoo.tracing.planned_forward import patched_forward

pytestmark = pytest.mark.usefixtures("without_fork")


class Summing(nn.Module):
    """Sums the rows of more than three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)))
        return x.sum(1) if x.shape[0] > 3 else x


def test_other_shapes_types_and_keywords_are_those_of_the_model() -> None:
    model = zoo.checkpoint(Summing(), "cheap")
    assert model(torch.rand(3, 4, 6)).shape == (3, 4, 6)
    assert model(torch.rand(4, 4, 6)).shape == (4, 6)
    net = zoo.checkpoint(UNet(), "cheap")
    inputs = images(2, size=16), torch.ones(1)
    small, large = net(*inputs)["logits"], net(*inputs, scale=2.0)["logits"]
    torch.testing.assert_close(2 * small, large, rtol=0, atol=0)


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Returns a list that gets each model that is traced from now on."""
    traced: list[nn.Module] = []

    def recorder(model: nn.Module, *inputs: Any, **options: Any) -> StepRecorder:
        traced.append(model)
        return StepRecorder(model, *inputs, **options)

    monkeypatch.setattr(isolated_trace, "StepRecorder", recorder)
    return traced


def test_of_too_many_kinds_the_one_that_was_used_longest_ago_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlanCache, "most_kinds", 2)
    traced, model = count_traces(monkeypatch), zoo.checkpoint(Summing(), "cheap")
    for count in (2, 5, 2, 11, 2):
        model(torch.rand(count, 4, 6))
    assert len(traced) == 3


class OfANumber(Net):
    """Makes its own images."""

    def forward(self, size: Any) -> Tensor:
        return super().forward(images() if isinstance(size, int) else size)


@pytest.mark.parametrize("make", [images, lambda: 2])
def test_a_budget_is_kept_to_under_autocast_that_came_later(make: Callable[[], Any]) -> None:
    model = zoo.checkpoint(OfANumber(), memory_budget="64MiB")
    plans = []
    for enabled in (False, True, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(make())
        plans.append(patched_forward(model).latest)
    without, first, second, again = plans
    assert first is second
    assert "aten._to_copy.default" not in map(str, without.operators)
    assert "aten._to_copy.default" in map(str, first.operators)
    assert again is without


class Lucky(Net):
    """Skips blocks by Python's dice, or by its own."""

    dice: Any = random

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.dice.random() < 0.5:
                x = block(x)
        return self.fc(x.mean((2, 3)))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Custom(Net):
    """Has a derivative of its own, which no torch function shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Doubling.apply(x))


def test_a_plan_of_ones_own_is_for_one_path_of_a_forward_and_others_are_exact() -> None:
    plain = Lucky()
    plain.dice = random.Random(0)
    plan = zoo.plan(plain, images(), max_overhead=0.5).plan
    # the first forward takes the path that was planned for
    model = zoo.checkpoint(copy.deepcopy(plain), plan)
    one = train(model, lambda: [images()], steps=6)
    assert_same(one, train(plain, lambda: [images()], steps=6))


class Shortened(Net):
    """Leaves out blocks from its third call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc((self.blocks if self.calls < 3 else self.blocks[:1])(x).mean((2, 3)))  # type: ignore[no-any-return]


def test_a_later_path_of_fewer_blocks_than_segments_is_exact() -> None:
    plain = Shortened()
    model = zoo.checkpoint(copy.deepcopy(plain), 5)
    one = train(model, lambda: [images()], steps=6)
    assert_same(one, train(plain, lambda: [images()], steps=6))


def test_a_derivative_of_ones_own_is_kept() -> None:
    plain = Custom()
    model = zoo.checkpoint(copy.deepcopy(plain))

    def batch() -> list[Tensor]:
        return [images().requires_grad_()]

    assert_same(train(model, batch), train(plain, batch))
