"""State outside of buffers: counters, logs, caches, wherever Python keeps them."""

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.training import WAYS, Call, Way, assert_exact, assert_trains, gradients, rows


class Scheduled(nn.Module):
    """Scales by what a counter says; subclasses keep the counter in different places."""

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


Pair = collections.namedtuple("Pair", "log other")


@dataclasses.dataclass
class Progress:
    calls: int = 0
    log: list[int] = dataclasses.field(default_factory=list)


class InAnObject(Scheduled):
    def start(self) -> None:
        self.progress = Progress()

    def count(self) -> int:
        self.progress.calls += 1
        self.progress.log.append(self.progress.calls)
        return len(self.progress.log)


class InAList(Scheduled):
    def start(self) -> None:
        self.log: list[int] = []

    def count(self) -> int:
        self.log.append(len(self.log))
        return len(self.log)


class InALongList(InAList):
    def start(self) -> None:
        self.log = [0] * 100


class InADictOfLists(Scheduled):
    def start(self) -> None:
        self.log: dict[str, list[int]] = {"calls": []}

    def count(self) -> int:
        self.log["calls"].append(1)
        self.log.setdefault("more", []).append(1)
        return len(self.log["calls"])


class InADefaultDict(Scheduled):
    def start(self) -> None:
        self.log: dict[str, int] = collections.defaultdict(int)

    def count(self) -> int:
        self.log["calls"] += 1
        return self.log["calls"]


class InACounter(InADefaultDict):
    def start(self) -> None:
        self.log = collections.Counter()


class InADeque(Scheduled):
    def start(self) -> None:
        self.log = collections.deque([1, 2, 3])

    def count(self) -> int:
        self.log.rotate(1)
        return self.log[0]


class InASet(Scheduled):
    def start(self) -> None:
        self.log: set[int] = set()

    def count(self) -> int:
        self.log.add(len(self.log))
        return len(self.log)


class InAnIterator(Scheduled):
    def start(self) -> None:
        self.numbers = itertools.count(1)

    def count(self) -> int:
        return next(self.numbers)


class InAnIteratorOfSteps(InAnIterator):
    def start(self) -> None:
        self.numbers = itertools.count(1.5, 0.1)  # type: ignore[assignment]


class InAListIterator(InAnIterator):
    def start(self) -> None:
        self.numbers = iter([3, 1, 2, 5, 4])  # type: ignore[assignment]


class InARangeIterator(InAnIterator):
    def start(self) -> None:
        self.numbers = iter(range(3, 40))  # type: ignore[assignment]


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


class InItsClass(Scheduled):
    calls = 0

    def start(self) -> None:
        type(self).calls = 0

    def count(self) -> int:
        type(self).calls += 1
        return type(self).calls


class InAnObjectOfItsClass(Scheduled):
    progress = Progress()

    def start(self) -> None:
        type(self).progress = Progress()

    count = InAnObject.count


class InTheClassOfAnObject(Scheduled):
    class Total:
        calls = 0

        def __call__(self) -> int:
            type(self).calls += 1
            return self.calls

    def start(self) -> None:
        self.total = self.Total()
        self.Total.calls = 0

    def count(self) -> int:
        return self.total()


class InAFullWindow(Scheduled):
    def start(self) -> None:
        self.window = collections.deque([0] * 100, maxlen=100)

    def count(self) -> int:
        self.window.append(self.window[-1] + 1)
        return self.window[-1]


class InALongDict(Scheduled):
    def start(self) -> None:
        self.counts = dict.fromkeys(range(100), 0)

    def count(self) -> int:
        self.counts[3] += 1
        return self.counts[3]


class InAnOrder(Scheduled):
    """As the cache of what was used last keeps it."""

    def start(self) -> None:
        self.recent = collections.OrderedDict.fromkeys([1, 2, 3])

    def count(self) -> int:
        self.recent.move_to_end(next(iter(self.recent)))
        return next(iter(self.recent))


class InAListOfANamedTuple(InAList):
    def start(self) -> None:
        self.pair = Pair([], 0)

    def count(self) -> int:
        self.pair.log.append(1)
        return len(self.pair.log)


class InAPrivateAttribute(Scheduled):
    def start(self) -> None:
        self._calls = 0

    def count(self) -> int:
        self._calls += 1
        return self._calls


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class InASlot(Scheduled):
    def start(self) -> None:
        self.slots = Slotted()

    def count(self) -> int:
        self.slots.number += 1
        return self.slots.number


class InTheTableOfAModule(Scheduled):
    """Finds it by a name that stands in no code."""

    def start(self) -> None:
        self.table = vars(__import__(__name__, fromlist=["totals"]))["tot" + "als"]
        self.table["calls"] = 0

    def count(self) -> int:
        self.table["calls"] += 1
        return self.table["calls"]


PLACES = [
    InASlot, InTheTableOfAModule,
    Scheduled, InAnObject, InAList, InALongList, InADictOfLists, InADefaultDict, InACounter,
    InADeque, InASet, InAFullWindow, InALongDict, InAnOrder, InAListOfANamedTuple,
    InAnObjectOfItsClass, InTheClassOfAnObject, InAnArray, InATensor, InItsClass,
    InAPrivateAttribute,
    InAnIterator, InAnIteratorOfSteps, InAListIterator, InARangeIterator,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_counter_counts_once(way: Way) -> None:
    """The docs of torchgpipe and fairscale have the user ask whether a run is the second one."""
    assert_trains(Counting, way=way)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_a_counter_used_as_a_schedule(place: type[nn.Module], way: Way) -> None:
    """torch.utils.checkpoint's docs: other behavior in the backward 'due to a global variable'."""
    assert_trains(place, way=way)


ITERATORS = [
    lambda: (number for number in range(9)),
    lambda: map(abs, range(9)),
    lambda: itertools.cycle([1, 2]),
    lambda: itertools.count(numpy.float64(1.5)),
]


@pytest.mark.parametrize("make", ITERATORS)
@pytest.mark.parametrize("way", WAYS)
def test_an_iterator_that_cannot_be_copied(make: Callable[[], Any], way: Way) -> None:
    class Iterating(InAnIterator):
        def start(self) -> None:
            self.numbers = make()

    assert_trains(Iterating, way=way)


steps_taken = 0
totals = {"calls": 0}


@pytest.mark.parametrize("place", ["closure", "global", "global dict", "default", "function"])
def test_a_counter_outside_of_any_module(place: str) -> None:
    """The same warning: a variable of a closure, of the file, of a function."""

    def program(call: Call) -> Any:
        global steps_taken
        steps_taken, totals["calls"], calls = 0, 0, 0
        linear = nn.Linear(4, 4)

        def count() -> None:
            nonlocal calls
            global steps_taken  # noqa: PLW0603
            calls += place == "closure"
            steps_taken += place == "global"
            totals["calls"] += place == "global dict"
            function.calls += place == "function"

        def function(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
            count()
            seen.extend([1] * (place == "default"))
            total = calls + steps_taken + totals["calls"] + function.calls + len(seen)
            return torch.tanh(linear(x) / (1 + total))

        function.calls = 0
        sum(call(function, *rows()).sum() for _ in range(3)).backward()
        return gradients(linear), calls, steps_taken, totals, function.calls, function.__defaults__

    assert_exact(program)
