"""State outside of buffers: counters and iterators, which Python keeps, since it runs once."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.training import WAYS, Call, Way, assert_exact, assert_trains, gradients, rows


class Scheduled(nn.Module):
    """Scales by what a counter says; subclasses keep the counter elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.start()

    def start(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) / (1 + self.count()))


class Counting(Scheduled):
    """Counts and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return torch.tanh(self.linear(x))


class InAnArray(Scheduled):
    def start(self) -> None:
        self.array = numpy.zeros(2)

    def count(self) -> int:
        self.array += 1
        return int(self.array[0])


class InATensor(Scheduled):
    def start(self) -> None:
        self.tensor = torch.zeros(2)

    def count(self) -> int:
        self.tensor += 1
        return int(self.tensor[0])


@pytest.mark.parametrize("place", [Counting, Scheduled, InAnArray, InATensor])
@pytest.mark.parametrize("way", WAYS)
def test_a_counter_used_as_a_schedule(place: type[nn.Module], way: Way) -> None:
    """counters and schedules in attributes | count twice; another branch | once

    torch.utils.checkpoint's docs: other behavior in the backward 'due to a global variable'.
    """
    assert_trains(place, way=way)


@pytest.mark.parametrize(
    "make", [lambda: (number for number in range(9)), lambda: itertools.cycle([1, 2])]
)
@pytest.mark.parametrize("way", WAYS)
def test_an_iterator_that_cannot_be_copied(make: Callable[[], Iterator[int]], way: Way) -> None:
    """iterators and generators | advance twice | once"""

    class Iterating(Scheduled):
        def start(self) -> None:
            self.numbers = make()

        def count(self) -> int:
            return next(self.numbers)

    assert_trains(Iterating, way=way)


steps_taken = 0


def test_a_counter_outside_of_any_module() -> None:
    """counters in globals and closures | count twice; another branch | once

    The same warning: a variable of a closure, of the file, of a function.
    """

    def program(call: Call) -> Any:
        global steps_taken
        steps_taken, calls, linear = 0, 0, nn.Linear(4, 4)

        def function(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
            nonlocal calls
            global steps_taken
            calls, steps_taken = calls + 1, steps_taken + 1
            seen.append(1)
            return torch.tanh(linear(x) / (1 + calls + steps_taken + len(seen)))

        sum(call(function, *rows()).sum() for _ in range(3)).backward()
        return gradients(linear), calls, steps_taken, function.__defaults__

    assert_exact(program)
