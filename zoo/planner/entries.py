"""Where the values of the dynamic program lie in its table, and in which order they are found.

An entry is of a state, a row and an end. The entries of a row are in the order of its ends. Within
a run of equal parts there are entries for the states of the first part only: one of a later part
with an end in the run is that of its copy in the first, with the end as many steps earlier. The
memory that it leaves free is more by the gradients that the later part has not got.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zoo.planner.search_space import SearchSpace

Numbers = NDArray[np.int64]


class Entries:
    """The entries of a search space; states, rows and ends may be arrays.

    Attributes:
        count: the number of entries.
        own_count: of those, the number that are of rows in which all of the state is held.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        states = len(space.rows)
        self.cuts = np.array(space.cuts, np.int64)
        self.near = np.array(space.near, np.int64)
        self.passed = self.cuts.searchsorted(self.near, "right")
        self.order = np.zeros(space.forward + 1, np.int64)
        self.order[self.cuts] = np.arange(len(self.cuts))
        # of a copy: how many steps it is behind its first one, up to which end, and more free bytes
        self.moved, self.limit, self.grown = np.zeros((3, states), np.int64)
        for run in space.repeats:
            for number, part in enumerate(range(run.start, run.stop, run.period)):
                copies = slice(part, min(part + run.period, run.stop))
                if number:
                    self.moved[copies], self.limit[copies] = part - run.start, run.stop
                    self.grown[copies] = number * run.grown
        every = np.arange(states)
        # ends that are near, less the cuts that are passed or near
        self.offset = self.near - every - self.passed
        inner = self.cuts.searchsorted(self.limit, "right") + self.offset
        inner = np.where(self.limit <= self.near, self.limit - every, inner)
        skipped = np.where(self.moved > 0, inner, 0)
        width = len(self.cuts) + self.offset - skipped
        rows = np.array(list(map(len, space.rows)), np.int64)
        stops, own_stops = np.cumsum(width * rows), np.cumsum(width)
        self.count, self.own_count = int(stops[-1]), int(own_stops[-1])
        self.first, self.own_first = stops - width * rows - skipped, own_stops - width - skipped
        self.width = width

    def column(self, states: Any, ends: Any) -> Any:
        """Returns how many known ends of a state are before one."""
        near = ends <= self.near[states]
        return np.where(near, ends - states - 1, self.offset[states] + self.order[ends])

    def find(self, states: Any, rows: Any, ends: Any, is_copy: bool) -> Any:
        """Returns the entries of states, which are those of their copies in a first part or not."""
        moved = self.moved[states] if is_copy else 0
        states, ends = states - moved, ends - moved
        return self.first[states] + rows * self.width[states] + self.column(states, ends)

    def place(self, state: int, row: int, end: int) -> tuple[int, int, int]:
        """Returns an entry, its place among those of the state's own row, and its memory.

        That is by how many bytes more are free there.
        """
        is_copy = end <= self.limit.item(state)
        grown = self.grown.item(state) if is_copy else 0
        moved = self.moved.item(state) if is_copy else 0
        state, end = state - moved, end - moved
        if end <= self.near.item(state):
            column = end - state - 1
        else:
            column = self.offset.item(state) + self.order.item(end)
        entry = self.first.item(state) + row * self.width.item(state) + column
        return entry, self.own_first.item(state) + column, grown

    def ends(self, state: int, low: int, high: int) -> Numbers:
        """Returns the known ends of a state from behind `low` up to `high`."""
        near = self.near.item(state)
        first, last = self.cuts.searchsorted((max(low, near), high), "right")
        inner = np.arange(max(low, state) + 1, min(high, near) + 1)
        return np.concatenate([inner, self.cuts[first:last]])

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Yields states and ranges of ends: what their entries need comes before."""
        low = 0
        for run in self.space.repeats:
            for state in reversed(range(run.start)):
                yield state, low, run.start
            for part in range(run.start, run.stop, run.period):
                high = min(part + run.period, run.stop)
                for state in reversed(range(run.start, run.start + run.period)):
                    yield state, part, high
            for state in reversed(range(run.start)):
                yield state, run.start, run.stop
            low = run.stop
        forward = self.space.forward
        for state in reversed(range(forward - 1)):
            yield state, low, forward
