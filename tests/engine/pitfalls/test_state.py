"""Tensors that a forward reads and writes: statistics, weights, windows, masks, in any order."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import (
    WAYS,
    Call,
    Way,
    assert_exact,
    assert_trains,
    module,
    net,
    rows,
    state_of,
    train_by,
)


def test_a_tensor_of_a_closure_moves_once() -> None:
    def program(call: Call) -> Any:
        linear, total = nn.Linear(4, 4), torch.ones(4)

        def function(x: Tensor) -> Tensor:
            total.add_(1)
            return torch.tanh(linear(x) * total)

        for _ in range(3):
            call(function, *rows()).sum().backward()
        return total, state_of(linear)

    assert_exact(program)


class Renormalized(nn.BatchNorm1d):
    """A norm of the user's, whose output depends on the statistics that it moves."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (self.running_var + 1).sqrt() + self.running_mean


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_of_the_users_sees_its_statistics_as_they_were(training: bool) -> None:
    assert_trains(lambda: net(Renormalized(4).train(training)))


class Turning(nn.Module):
    """Works with the statistics of a norm of torch's without a call that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.norm.running_var.fill_(9)


class ByTheFlag(Turning):
    def forward(self, x: Tensor) -> Tensor:
        self.norm.training = False
        y = self.norm(self.linear(x))
        self.norm.training = True
        return self.norm(y)


class ByName(Turning):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.norm.get_buffer("running_var").clone()


class ByAnAlias(Turning):
    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm.running_var.detach()
        before = self.linear(x) * seen
        return (self.norm(before) * seen[1:2]).tanh()


class ByACopy(Turning):
    def forward(self, x: Tensor) -> Tensor:
        return copy.deepcopy(self.norm).eval()(self.norm(self.linear(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [ByTheFlag, ByName, ByAnAlias, ByACopy])
def test_statistics_that_a_function_reads_are_as_they_were(kind: type[Turning], way: Way) -> None:
    assert_trains(kind, way=way)


class Clipped(nn.Module):
    """Clips its weights before it uses them, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return torch.tanh(self.linear(x)).exp()


class Decaying(Clipped):
    """Writes something else each time, before it reads or after."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.decay()
        y = torch.tanh(self.linear(x.detach())) * x
        if self.late:
            self.decay()
        return y

    @torch.no_grad()
    def decay(self) -> None:
        self.linear.weight.mul_(0.5)


class DecayingLate(Decaying):
    late = True


class Taught(nn.Module):
    """Has a teacher whose weights are a moving average of its own, moved before it is read."""

    after = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.linear).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.after:
            self.average()
        y = self.linear(x).tanh() * self.teacher(x.detach())
        if self.after:
            self.average()
        return y

    @torch.no_grad()
    def average(self) -> None:
        for mean, weight in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            mean.mul_(0.9).add_(weight, alpha=0.1)


class TaughtLate(Taught):
    after = True


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", [Clipped, Decaying, DecayingLate, Taught, TaughtLate])
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_writes_weights(way: Way, kind: type[nn.Module], frozen: bool) -> None:
    """weights that the forward writes | written twice | once"""
    assert_trains(lambda: net(kind().requires_grad_(not frozen)), way=way)


class Reading(nn.Module):
    """Holds what the forwards below read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.window = torch.arange(1.0, 9.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale(x)).exp()

    def scale(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OfStatistics(Reading):
    def scale(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.norm.running_var.sqrt() + self.norm.running_mean


class OfEvalInside(Reading):
    def scale(self, x: Tensor) -> Tensor:
        y = self.norm.eval()(x)
        return self.norm.train()(x) + y


class OfWeightsThroughData(Reading):
    def scale(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.5)
        return torch.tanh(self.linear(x))


class OfASlidingWindow(Reading):
    def scale(self, x: Tensor) -> Tensor:
        self.window = self.window[1:]
        return self.window[:4]


class OfAnAttributeThroughData(Reading):
    def scale(self, x: Tensor) -> Tensor:
        self.window.data.mul_(2)
        return self.window[:4]


class OfAQueue(Reading):
    """Writes a row of a memory bank after it compares with all rows, as contrastive learning."""

    def scale(self, x: Tensor) -> Tensor:
        bank = self.window.view(2, 4)
        near = torch.softmax((x[:, None] - bank).square().sum(2), 1) @ bank.clone()
        with torch.no_grad():
            bank[0].copy_(x.mean(0))
        return near


MOVING = [
    OfStatistics, OfEvalInside, OfWeightsThroughData, OfASlidingWindow, OfAnAttributeThroughData,
    OfAQueue,
]  # fmt: skip


@pytest.mark.parametrize("kind", MOVING)
def test_state_that_is_read_where_it_moves(kind: type[nn.Module]) -> None:
    assert_exact(lambda call: train_by(call, kind(), rows, module, 2))


class Tagged(Tensor):
    """A tensor of a class of the user's."""


@pytest.mark.parametrize("kind", [Tensor, Tagged])
def test_a_small_buffer_that_moves_in_every_step(kind: type[Tensor]) -> None:
    def program(call: Call) -> Any:
        model = nn.Linear(4, 4)
        model.register_buffer("total", torch.ones(4).as_subclass(kind))

        def function(x: Tensor) -> Tensor:
            model.total.add_(1)
            return torch.tanh(model(x) * model.total.as_subclass(Tensor)).exp()

        for _ in range(3):
            call(function, *rows()).sum().backward()
        return state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("grows", [True, False])
def test_a_buffer_replaced_between_two_steps(grows: bool) -> None:
    """As `load_state_dict(assign=True)` does; it has the version that the first had."""

    def program(call: Call) -> Any:
        model = nn.Linear(4, 4)
        model.register_buffer("total", None)

        def function(x: Tensor) -> Tensor:
            model.total.add_(1)
            return torch.tanh(model(x) * model.total.as_subclass(Tensor).sum()).exp()

        for step in range(3):
            model.total = torch.full((4 + step * grows,), 0.1 * step).as_subclass(Tagged)
            call(function, *rows()).sum().backward()
        return state_of(model)

    assert_exact(program)


class Table(nn.Module):
    """Looks things up in a big buffer, which it may move."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.rand(100_000, 4))
        self.moves = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.table[1]
        if self.moves:
            self.table.mul_(0.5)
        return torch.tanh(y * self.table[0]).exp()


def test_a_big_buffer_that_moves_in_every_second_step() -> None:
    def program(call: Call) -> Any:
        model = Table()
        for step in range(4):
            model.moves = step % 2 == 0
            call(model, *rows()).sum().backward()
        return state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("size", [4, 30_000])
def test_a_buffer_that_the_user_changes_before_the_backward(size: int) -> None:
    """The baseline does not read it any more. A small one is copied, a big one refused."""

    def program(call: Call) -> Any:
        model, (x,) = nn.Tanh(), rows()
        model.register_buffer("shift", torch.zeros(size, 4))
        loss = call(lambda x: model(x + model.shift[0]).exp(), x).sum()
        model.shift.add_(1)
        loss.backward()
        return x.grad, model.shift

    if size == 4:
        assert_exact(program)
    else:
        with pytest.raises(zoo.RecomputeError, match=r"a tensor \(4,\) .*changed in place"):
            program(zoo.recompute)


def of_numbers(number: int) -> Tensor:
    return torch.full((4,), float(number))


def of_bits(number: int) -> Tensor:
    return torch.arange(4) % number == 0


def of_a_view(number: int) -> Tensor:
    return (torch.arange(8.0) * number)[::2]


def of_a_common_number(number: int) -> Tensor:
    return torch.tensor(float(number)).expand(6, 4)


@pytest.mark.parametrize("make", [of_numbers, of_bits, of_a_view, of_a_common_number])
def test_a_mask_that_is_another_one_in_each_call(make: Callable[[int], Tensor]) -> None:
    """Ends with a product with what has no history: nothing else shows what it was."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(4, 4), 1

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) * make(self.calls)

    assert_trains(Masked)


@pytest.mark.parametrize("write", [Tensor.zero_, Tensor.neg_])
def test_a_mask_of_an_input_that_is_written_after_it(write: Callable[[Tensor], Tensor]) -> None:
    def program(call: Call) -> Any:
        weight, x = torch.rand(4, requires_grad=True), torch.rand(4) + 1

        def function(x: Tensor) -> Tensor:
            mask = x > 0
            write(x)
            return weight * mask

        call(function, x).sum().backward()
        return weight.grad, x

    assert_exact(program)


class Transposed(nn.Module):
    """Keeps another view of the same memory from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turned = nn.Linear(4, 4), torch.randn(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.turned = self.turned.t()
        return (self.linear(x) @ self.turned).tanh().sin()


@pytest.mark.parametrize("way", WAYS)
def test_another_view_of_the_same_memory_in_each_call(way: Way) -> None:
    assert_trains(Transposed, way=way)


def test_not_a_number_is_written_as_it_is() -> None:
    """In-place ReLU at the start of a segment leaves it."""

    def program(call: Call) -> Any:
        x = torch.tensor([torch.nan, 1.0, -1.0, torch.inf])
        weight = torch.ones(4, requires_grad=True)
        call(lambda x: (torch.relu_(x) * weight).sin().exp(), x).sum().backward()
        return weight.grad, x

    assert_exact(program)
