"""State in places where programs keep it, wherever the code leads."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import WAYS, Call, Way, assert_exact, assert_trains, rows, state_of

settings = types.ModuleType("settings_of_a_program")
settings.scale = 1.0  # type: ignore[attr-defined]
sys.modules[settings.__name__] = settings


class Parent(nn.Module):
    """Keeps a moving buffer on a child without a forward."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(4, 4), nn.Module()
        self.average.register_buffer("total", torch.ones(4))

    def first(self, x: Tensor) -> Tensor:
        self.average.total += 1
        return self.linear(x) * self.average.total


class ThroughSuper(Parent):
    def first(self, x: Tensor) -> Tensor:
        return super().first(x).tanh().sin()


class ThroughChildren(Parent):
    def first(self, x: Tensor) -> Tensor:
        for child in self.children():
            for buffer in child.buffers():
                buffer.add_(1)
                x = x * buffer
        return self.linear(x).tanh().sin()


class ThroughTheClassOfItsParent(Parent):
    def first(self, x: Tensor) -> Tensor:
        Parent.calls += 1
        return (self.linear(x) * self.calls).tanh().sin()


class ThroughAModule(Parent):
    def first(self, x: Tensor) -> Tensor:
        settings.scale += 1  # type: ignore[attr-defined]
        return (self.linear(x) * settings.scale).tanh().sin()


KINDS = [ThroughSuper, ThroughChildren, ThroughTheClassOfItsParent, ThroughAModule]


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_as_a_segment(kind: type[Parent]) -> None:
    """The steps of a chain are methods of its blocks; these reach more than they name."""

    def program(call: Call) -> Any:
        Parent.calls, settings.scale = 0, 1.0  # type: ignore[attr-defined]
        model, (x,) = kind(), rows()
        for _ in range(2):
            call(model.first, x).sum().backward()
        return x.grad, state_of(model), Parent.calls, settings.scale  # type: ignore[attr-defined]

    assert_exact(program)


def test_a_variable_that_is_none_at_first() -> None:
    """A cache that the first call fills."""

    def program(call: Call) -> Any:
        linear, (x,), cache = nn.Linear(4, 4), rows(), None

        def function(x: Tensor) -> Tensor:
            nonlocal cache
            scale = 2.0 if cache is None else 3.0
            cache = 1
            return (linear(x).tanh() * scale).sin()

        call(function, x).sum().backward()
        return x.grad, cache

    assert_exact(program)


class Turning(nn.Module):
    """Keeps another view of the same memory from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turned = nn.Linear(4, 4), torch.randn(4, 4)
        self.many = [1.0] * 100

    def forward(self, x: Tensor) -> Tensor:
        self.turned = self.turned.t()
        self.many[0] += 1
        return (self.linear(x) @ self.turned * self.many[0]).tanh().sin()


@pytest.mark.parametrize("way", WAYS)
def test_a_view_and_a_long_list(way: Way) -> None:
    """Equal storage and version, equal length: only the look and the entries tell."""
    assert_trains(Turning, way=way)


class OwnNorm(nn.BatchNorm1d):
    """A norm of the user's, whose forward is torch's."""


def test_a_subclass_of_a_norm() -> None:
    assert_trains(lambda: nn.Sequential(nn.Linear(4, 4), OwnNorm(4), nn.Tanh()))


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "once"])
def test_an_acting_hook_that_is_gone_at_the_backward(kind: str) -> None:
    def program(call: Call) -> Any:
        model, (x,) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), rows()
        if kind == "pre-hook":
            handle = model[0].register_forward_pre_hook(lambda m, xs: (xs[0] * 2,))
        else:
            handle = model[0].register_forward_hook(
                lambda m, xs, y: (handle.remove() if kind == "once" else None, y * 2)[1]
            )
        output = call(model, x)
        handle.remove()
        output.sin().sum().backward()
        return x.grad, state_of(model), len(model[0]._forward_hooks)

    assert_exact(program)


def test_a_hook_registered_in_the_forward_is_registered_once() -> None:
    def program(call: Call) -> Any:
        linear, (x,) = nn.Linear(4, 4), rows()
        linear.register_forward_hook(lambda *seen: None)

        def function(x: Tensor) -> Tensor:
            linear.register_forward_hook(lambda *seen: None)
            return linear(x).sin()

        output = call(function, x)
        after = len(linear._forward_hooks)
        output.sum().backward()
        return after, len(linear._forward_hooks), x.grad

    assert_exact(program)
