"""What the forward looks at may change: it is the model's own forward that runs."""

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.tracing.models import Net, UNet
from tests.training import assert_same, images, train
from zoo.tracing import isolated_trace, planned_forward
from zoo.tracing.tracer import Tracer

LIMIT = 1.0
SCALE = 1.0


class Settings(nn.Module):
    """Looks at an attribute, an object, a global, a flag of a child and its argument's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.rate = 0.5
        self.config = SimpleNamespace(act="relu", inner=SimpleNamespace(sign=1))
        self.both = nn.Sequential(nn.Tanh(), nn.Identity())
        self.order = [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.rate * LIMIT * self.order[0]
        x = self._act(x) * self.config.inner.sign + self.both(x)
        if self.second.training:
            x = self.second(x)
        return x.sum(1) if x.shape[0] > 3 else x

    def _act(self, x: Tensor) -> Tensor:
        return getattr(F, self.config.act)(x) * SCALE


def set_global(model: Any) -> None:
    global LIMIT  # noqa: PLW0603
    LIMIT += 1.0


def set_global_of_a_helper(model: Any) -> None:
    global SCALE  # noqa: PLW0603
    SCALE += 1.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda model: setattr(model, "rate", 0.1),
    "object": lambda model: setattr(model.config, "act", "gelu"),
    "list": lambda model: model.order.insert(0, 5),
    "object in an object": lambda model: setattr(model.config.inner, "sign", -1),
    "global": set_global,
    "global of a helper": set_global_of_a_helper,
    "forward of a row": lambda model: setattr(model.both, "forward", torch.sigmoid),
    "flag of a child": lambda model: model.second.eval(),
    "child": lambda model: setattr(model, "second", nn.Linear(6, 6)),
    "hook": lambda model: model.second.register_forward_hook(lambda m, a, out: out * 3),
    "forward of a child": lambda model: setattr(model.second, "forward", torch.sigmoid),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_forward_looks_at_may_change(what: str) -> None:
    model, x = zoo.checkpoint(Settings(), "cheap"), torch.rand(4, 4, 6)
    before = model(x)
    torch.manual_seed(1)
    CHANGES[what](model)
    after = model(x)
    torch.testing.assert_close(after, zoo.uncheckpoint(model)(x), rtol=0, atol=0)
    assert not torch.equal(before, after)


def test_other_shapes_types_and_keywords_are_those_of_the_model() -> None:
    model = zoo.checkpoint(Settings(), "cheap")
    assert model(torch.rand(3, 4, 6)).shape == (3, 4, 6)
    assert model(torch.rand(4, 4, 6)).shape == (4, 6)
    net = zoo.checkpoint(UNet(), "cheap")
    inputs = images(2, size=16), torch.ones(1)
    small, large = net(*inputs)["logits"], net(*inputs, scale=2.0)["logits"]
    torch.testing.assert_close(2 * small, large, rtol=0, atol=0)


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Returns a list that gets each model that is traced from now on."""
    traced: list[nn.Module] = []

    def tracer(model: nn.Module) -> Tracer:
        traced.append(model)
        return Tracer(model)

    monkeypatch.setattr(isolated_trace, "Tracer", tracer)
    return traced


def test_of_too_many_kinds_the_one_that_was_used_longest_ago_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planned_forward, "MOST_KINDS", 2)
    traced, model = count_traces(monkeypatch), zoo.checkpoint(Settings(), "cheap")
    for count in (2, 5, 2, 11, 2):
        model(torch.rand(count, 4, 6))
    assert len(traced) == 3


def test_autocast_is_a_kind_of_its_own() -> None:
    def mixed(model: nn.Module) -> Callable[..., Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return forward

    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    zoo.checkpoint(model, "blocks")(images())
    model.load_state_dict(plain.state_dict())
    one, other = (train(m, lambda: [images()], forward=mixed(m)) for m in (model, plain))
    assert_same(one, other)


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
        plans.append(planned_forward.patched_forward(model).latest)
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


class Counting(Net):
    """Counts its calls and computes with the count."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Logging(Net):
    """Notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(tuple(x.shape))
        return super().forward(x) * len(self.log)


class Averaging(Net):
    """Writes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return super().forward(x - self.mean)


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


@pytest.mark.parametrize("kind", [Lucky, Counting, Logging, Averaging])
def test_code_that_decides_by_what_no_tensor_tells_is_exact(kind: type[Net]) -> None:
    plain = kind()
    model = zoo.checkpoint(copy.deepcopy(plain))
    random.seed(0)
    one = train(model, lambda: [images()])
    random.seed(0)
    assert_same(one, train(plain, lambda: [images()]))
    assert getattr(model, "calls", 0) == getattr(plain, "calls", 0)


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


TOTAL: dict[str, int] = {}


class Global(Net):
    """Counts in a global."""

    def forward(self, x: Tensor) -> Tensor:
        TOTAL["calls"] = TOTAL.get("calls", 0) + 1
        return super().forward(x)


def test_the_forward_runs_once_in_each_step() -> None:
    model = zoo.checkpoint(Global())
    TOTAL.clear()
    model(images()).sum().backward()
    assert TOTAL == {"calls": 1}
