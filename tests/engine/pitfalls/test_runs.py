"""What tells the runs apart: zoo.remember and zoo.is_recomputing."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.engine.pitfalls.program import (
    WAYS,
    Way,
    rows,
)

Log = list[Any]


class Outside(nn.Module):
    """Scales by numbers of the operating system, which nobody can seed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.numbers: Callable[[], Tensor] = lambda: torch.tensor([*os.urandom(4)]) / 256.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = zoo.remember(self.numbers)
        return torch.tanh(self.linear(x) * self.seen)


@pytest.mark.parametrize("way", WAYS)
def test_remembered_numbers_are_those_of_the_first_run(way: Way) -> None:
    """zoo.remember, also in a segment of a segment: the gradient is that of the numbers seen."""
    model = Outside()
    (x,) = rows()
    output = way(zoo.recompute, model, x)
    seen = model.seen
    output.square().sum().backward()
    model.numbers = lambda: seen
    (twin,) = rows()
    twin.data = x.data
    found = x.grad, model.linear.weight.grad.clone()
    model.zero_grad()
    way(lambda function, *inputs: function(*inputs), model, twin).square().sum().backward()
    assert torch.equal(found[0], twin.grad)
    assert torch.equal(found[1], model.linear.weight.grad)


def test_remembered_functions_are_called_once_in_the_forward() -> None:
    """zoo.remember: twice in one segment, in nested segments, with values of any kind."""
    calls: list[str] = []
    seen: list[Any] = []

    class Asking:
        def ask(self, name: str) -> dict[str, Any]:
            return zoo.remember(lambda: calls.append(name) or {"n": len(calls), "t": torch.ones(2)})

        def inner(self, x: Tensor) -> Tensor:
            found = self.ask("inner")
            seen.append(found["n"])
            return (x * found["n"]).sin()

        def outer(self, x: Tensor) -> Tensor:
            first, second = self.ask("a"), self.ask("b")
            return zoo.recompute(self.inner, (x * first["n"]).sin() * second["n"]).exp().sin()

    x = torch.rand(3).requires_grad_()
    zoo.recompute(Asking().outer, x).sum().backward()
    assert len(calls) == 3
    (gradient,) = torch.autograd.grad((((x * 1).sin() * 2) * 3).sin().exp().sin().sum(), x)
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("flag", [True, False])
def test_a_remembered_tensor_needs_a_gradient_as_it_did(flag: bool) -> None:
    """Without its history: a second run saves what the first saved."""

    def function(x: Tensor) -> Tensor:
        return (x * zoo.remember(lambda: torch.full((3,), 2.0).requires_grad_(flag))).sin()

    x = torch.rand(3).requires_grad_()
    zoo.recompute(function, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(function(x).sum(), x)[0])


def test_a_remembered_tensor_that_was_changed_is_refused() -> None:
    found, x = Answers(), torch.rand(3).requires_grad_()
    found.note(torch.ones(3))
    loss = zoo.recompute(lambda x: (x + zoo.remember(found.first)).sin().exp(), x).sum()
    found.first().add_(1)
    with pytest.raises(zoo.RecomputeError, match="changed in place"):
        loss.backward()


def test_an_empty_memory_is_refused() -> None:
    """A second run that asks more often than the first cannot be answered."""
    more: list[int] = []

    def function(x: Tensor) -> Tensor:
        for _ in range(2 if zoo.is_recomputing() else 1):
            x = x * zoo.remember(lambda: more.append(1) or 2.0)
        return x.exp().sin()

    loss = zoo.recompute(function, torch.rand(3).requires_grad_()).sum()
    with pytest.raises(zoo.RecomputeError, match="remember"):
        loss.backward()


class Answers:
    """Notes what is_recomputing says, on an object that no second run can give back."""

    def __init__(self) -> None:
        entries: Log = []
        self.answers = entries
        self.note = entries.append
        self.first = lambda: entries[0]


@pytest.mark.parametrize("way", WAYS)
def test_is_recomputing_tells_the_runs_apart(way: Way) -> None:
    """torchgpipe and fairscale: False in the first run, True in the second, False outside."""
    seen = Answers()
    layer = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        seen.note(zoo.is_recomputing())
        return torch.tanh(layer(x)).exp()

    model = nn.Module()
    model.forward = forward  # type: ignore[assignment]
    loss = way(zoo.recompute, model, *rows()).sum()
    assert not zoo.is_recomputing()
    loss.backward()
    assert not zoo.is_recomputing()
    assert seen.answers[0] is False
    assert len(seen.answers) >= 2
    assert all(seen.answers[1:])


def test_is_recomputing_is_false_in_a_forward_inside_of_a_backward() -> None:
    """A hook of a gradient that runs a segment of its own; and after an error."""
    seen = Answers()

    def inner(x: Tensor) -> Tensor:
        seen.note(zoo.is_recomputing())
        return x.exp().sin()

    x, other = torch.rand(3).requires_grad_(), torch.rand(3).requires_grad_()
    y = x * 1

    def hook(gradient: Tensor) -> None:
        zoo.recompute(inner, other)

    y.register_hook(hook)
    zoo.recompute(lambda y: y.exp().sin(), y).sum().backward()
    assert seen.answers == [False]
