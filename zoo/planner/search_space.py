"""The search space of the dynamic program: segments, sets of held storages, and equal parts.

n steps have n + 1 states; a segment [i, j) starts at state i and ends at state j. Of
up to `FLAT` steps these may be any two states. Of more, long segments begin and
end at *cuts*, which are some of the states; segments of at most `NEAR` steps may be anywhere:

    states    0   1   2   3   4   5   6   7   8
    cuts      |               |               |
    segments          [-----------)               near
              [-------------------------------)   from cut to cut

Of the storages that a plan holds at state i only those in live(i) matter later: a storage in two
states is in all states between. There are few such sets, known without a budget: the *rows* of a
state.

Equal parts in a row, such as the layers of a transformer, are solved once: a *run* is a part of
`period` steps and its repetitions, up to a state `stop`; the last repetition may be incomplete. Two
parts are equal if their steps cost the same, their states and saved tensors are the same sets of
storages except for the storages' numbers, and all gradients of the later one are smaller by the
same bytes, since the backward has made fewer of the parameters' gradients there.

    states     0   1   2   3   4   5   6   7   8   9
                   start   |       |       |   stop
    run            a   b   a   b   a   b   a   b
"""

import math
import operator
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zoo.planner.costs import StepCosts

Storages = frozenset[int]
FLAT = 150  # the most steps of which every state is a cut
FEW = 64  # so few cuts get others added
MANY = 400  # the most cuts; segments nest about as deep, and plans to `planner.plan.DEEPEST`
# the most entries of a search space of default cuts, and the most storages that its rows name
ENTRIES, STORAGES = 10**6, 5 * 10**6
FEWEST = 16  # with fewer cuts a search space is not worth its time, if there is another
NEAR = 12  # the most steps of a segment that begins and ends anywhere
LASTING = 4 * NEAR  # a storage of more states may count as always held
TRIED = 8  # the later states that are tried as the start of the next part
PARTS = 6  # the fewest parts of a run: with few, solving few ends at a time takes longer


class StateRow(NamedTuple):
    """A set of storages that can be held at a state."""

    missing: int  # bytes of the state's other storages, which are held when a segment starts here
    grown: int  # additional bytes that are held when the step that starts here is kept
    following: int  # the number of the next state's row when that step is kept


class Run(NamedTuple):
    """Equal parts in a row; each state after the first part is a copy of one in it."""

    start: int
    period: int
    stop: int
    grown: int  # bytes by which the gradients of a part exceed those of the next one


class _TooLarge(Exception):
    """The rows of a search space name too many storages."""


class SearchSpace:
    """The segments and rows of a model's steps, each list with an entry for every state.

    The values of a state are known for its *ends*, the next `near` states and all later cuts. There
    a recomputation ends, or the original forward, whose end is `forward`. States of repeated parts
    have equal rows, in the same order. The rows may name `room` storages in all.
    """

    def __init__(
        self,
        costs: StepCosts,
        cuts: Collection[int],
        near: int = NEAR,
        room: float = math.inf,
    ) -> None:
        steps, self.near, self.room = len(costs), near, room
        self.costs = costs = _without_empty(costs)
        self.forward = steps + 1  # not a state
        self.cuts = (*sorted({0, steps, *cuts}), self.forward)
        cut_set = frozenset(self.cuts)
        # for each state, the number of each set of storages
        numbering: list[dict[Storages, int]] = [{} for _ in costs.live]
        self._number(numbering[0], frozenset())
        ends = []
        for state, live in enumerate(costs.live):
            later = self.cuts[bisect_right(self.cuts, state) : -1]
            chosen = later if state in cut_set else later[:1]
            ends.append(sorted({*range(state + 1, min(state + near, steps) + 1), *chosen}))
            self._number(numbering[state], live)
            for end in ends[-1]:
                self._number(numbering[end], live & costs.live[end])
        self._follow(numbering)
        self.repeats = runs_of(costs, cut_set)
        if self.repeats:
            self._complete(numbering)
        # the number of each state's row in which all of the state is held
        self.own = [numbers[live] for numbers, live in zip(numbering, costs.live, strict=True)]
        # the states where a segment may end before its run does, each with its row's number there
        self.stops = [
            [(end, numbering[end][live & costs.live[end]]) for end in of_state]
            for of_state, live in zip(ends, costs.live, strict=True)
        ]
        # in row 0 of state 0 nothing is held
        self.rows = [
            [self._row(state, storages, numbering) for storages in numbers]
            for state, numbers in enumerate(numbering)
        ]

    def _follow(self, numbering: list[dict[Storages, int]]) -> None:
        """Adds the sets that follow others when steps are kept."""
        for state, saved in enumerate(self.costs.saved):
            for storages in numbering[state]:
                self._number(numbering[state + 1], (storages | saved) & self.costs.live[state + 1])

    def _complete(self, numbering: list[dict[Storages, int]]) -> None:
        """Adds to each part of a run the sets of other parts, and what follows them."""
        costs, count = self.costs, 0
        while count != (count := sum(map(len, numbering))):
            for run in self.repeats:
                for first in range(run.start, run.start + run.period):
                    copies = range(first, run.stop, run.period)
                    names = {state: in_order(costs.live[state], costs) for state in copies}
                    sets = dict.fromkeys(
                        frozenset(n for n, name in enumerate(order) if name in storages)
                        for state, order in names.items()
                        for storages in numbering[state]
                    )
                    for state, order in names.items():
                        numbering[state] = {
                            frozenset(order[n] for n in positions): number
                            for number, positions in enumerate(sets)
                        }
            self._follow(numbering)

    def _number(self, numbers: dict[Storages, int], storages: Storages) -> None:
        if storages not in numbers:
            numbers[storages] = len(numbers)
            self.room -= len(storages) + 1
            if self.room < 0:
                raise _TooLarge

    def _row(self, state: int, storages: Storages, rows: Sequence[dict[Storages, int]]) -> StateRow:
        costs = self.costs
        missing = costs.bytes_of(costs.live[state] - storages)
        if state == len(costs):
            return StateRow(missing, 0, 0)
        saved = costs.saved[state]
        following = rows[state + 1][(storages | saved) & costs.live[state + 1]]
        return StateRow(missing, costs.bytes_of(saved - storages), following)


class Entries:
    """The indices of the dynamic program's values in its table, and the order of computing them.

    An entry has a state, a row and an end. The entries of a row are in the order of their ends.
    In a run of equal parts only the states of the first part have entries: an entry of a later part
    with an end in the run is that of its copy in the first, with the end as many steps earlier. It
    has more free memory, by the gradients that do not exist yet in the later part.

    There are `count` entries, of which `own_count` have rows in which all of the state is held.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        states = len(space.rows)
        every = np.arange(states)
        self.cuts = np.array(space.cuts, np.int64)
        # the last of the near ends, which may be cuts
        self.near = np.minimum(every + space.near, states - 1)
        self.order = np.zeros(space.forward + 1, np.int64)
        self.order[self.cuts] = np.arange(len(self.cuts))
        # a copy's distance in steps to the first, its last end, and its additional free bytes
        self.moved, self.limit, self.grown = np.zeros((3, states), np.int64)
        for run in space.repeats:
            for number, part in enumerate(range(run.start, run.stop, run.period)[1:], 1):
                copies = slice(part, min(part + run.period, run.stop))
                self.moved[copies], self.limit[copies] = part - run.start, run.stop
                self.grown[copies] = number * run.grown
        # near ends, less the cuts that are passed or near
        self.offset = self.near - every - self.cuts.searchsorted(self.near, "right")
        inner = self.cuts.searchsorted(self.limit, "right") + self.offset
        inner = np.where(self.limit <= self.near, self.limit - every, inner)
        skipped = np.where(self.moved > 0, inner, 0)
        width = len(self.cuts) + self.offset - skipped
        rows = np.array(list(map(len, space.rows)), np.int64)
        stops, own_stops = np.cumsum(width * rows), np.cumsum(width)
        self.count, self.own_count = int(stops[-1]), int(own_stops[-1])
        self.first, self.own_first = stops - width * rows - skipped, own_stops - width - skipped
        self.width = width

    def find(self, states: Any, rows: Any, ends: Any) -> tuple[Any, int]:
        """Returns entries, and the additional free bytes there.

        States, rows and ends may be arrays if all entries are in the same part of a run or in none.
        """
        first, grown = np.ravel(states)[0], 0
        if np.ravel(ends)[-1] <= self.limit[first]:
            moved, grown = self.moved[first], self.grown.item(first)
            states, ends = states - moved, ends - moved
        near = ends <= self.near[states]
        columns = np.where(near, ends - states - 1, self.offset[states] + self.order[ends])
        return self.first[states] + rows * self.width[states] + columns, grown

    def locate(self, state: int, row: int, end: int) -> tuple[int, int, int]:
        """Returns an entry, its index among those of own rows, and its additional free bytes."""
        grown, column = 0, end - state - 1
        if end <= self.limit.item(state):
            moved, grown = self.moved.item(state), self.grown.item(state)
            state, end = state - moved, end - moved
        if end > self.near.item(state):
            column = self.offset.item(state) + self.order.item(end)
        entry = self.first.item(state) + row * self.width.item(state) + column
        return entry, self.own_first.item(state) + column, grown

    def ends(self, state: int, low: int, high: int) -> NDArray[np.int64]:
        """Returns the known ends of a state above `low` and up to `high`."""
        near = self.near.item(state)
        first, last = self.cuts.searchsorted((max(low, near), high), "right")
        inner = np.arange(max(low, state) + 1, min(high, near) + 1)
        return np.concatenate([inner, self.cuts[first:last]])

    def in_order(self) -> Iterator[tuple[int, int, int]]:
        """Yields states and ranges of ends, after those that their entries depend on."""
        low = 0
        for run in self.space.repeats:
            for state in reversed(range(run.start)):
                yield state, low, run.start
            for part, high in pairwise([*range(run.start, run.stop, run.period), run.stop]):
                for state in reversed(range(run.start, run.start + run.period)):
                    yield state, part, high
            for state in reversed(range(run.start)):
                yield state, run.start, run.stop
            low = run.stop
        for state in reversed(range(self.space.forward - 1)):
            yield state, low, self.space.forward


def _without_empty(costs: StepCosts) -> StepCosts:
    def some(sets: Iterable[Storages]) -> tuple[Storages, ...]:
        return tuple(frozenset(s for s in storages if costs.sizes[s]) for storages in sets)

    return replace(costs, live=some(costs.live), saved=some(costs.saved))


def search_spaces(costs: StepCosts) -> Iterator[SearchSpace]:
    """Yields a search space of at most about `ENTRIES` entries; two if one would be larger.

    A recurrent network, whose outputs of all times stay until its end, has a row at a state for
    nearly each earlier segment, and would take many GB. Then one space has fewer cuts, and between
    other states shorter segments or none; in the other one storages of many states are always held.
    """
    counts = Counter(storage for live in costs.live for storage in live)
    lasting = frozenset(storage for storage, count in counts.items() if count > LASTING)
    space = _fitting(costs, FEWEST if lasting else 1)
    if space is not None:
        yield space
    if lasting and (space is None or space.near < NEAR):
        smaller = _fitting(_always_held(costs, lasting), 1)
        assert smaller is not None, "with so few cuts any space is taken"
        yield smaller


def _fitting(costs: StepCosts, fewest: int) -> SearchSpace | None:
    """Returns a search space of at most about `ENTRIES` entries, or None if it has too few cuts."""
    most, near = MANY, NEAR
    while most >= fewest:
        cuts = default_cuts(costs, most)
        try:
            space = SearchSpace(costs, cuts, near, STORAGES if most > 1 else math.inf)
        except _TooLarge:
            share = 0.5
        else:
            # the entries grow with more than the square of the cuts
            share = math.sqrt(ENTRIES / Entries(space).count)
            if share >= 1 or most == 1:
                return space
        most = max(min(int(len(cuts) * share), most - 1), 1)
        near = int(near * share)
    return None


def _always_held(costs: StepCosts, lasting: Storages) -> StepCosts:
    """Returns costs in which no plan chooses whether some storages are held: with the gradients.

    Every segment that starts while one is in the state holds it, so that nearly all plans do.
    """
    sizes = (costs.bytes_of(live & lasting) for live in costs.live)
    return replace(
        costs,
        live=tuple(live - lasting for live in costs.live),
        saved=tuple(saved - lasting for saved in costs.saved),
        gradients=tuple(map(operator.add, costs.gradients, sizes)),
    )


def default_cuts(costs: StepCosts, most: int = MANY) -> list[int]:
    """Chooses about `most` states at most, where long segments begin and end.

    These are all states of a few steps; else those between blocks, or some of them if they are
    very many. If they are few or far apart, the smallest state near the middle of two is added.
    """
    steps = len(costs)
    if steps <= min(FLAT, most):
        return list(range(steps + 1))
    edges = [k for k in range(1, steps) if costs.blocks[k] != costs.blocks[k - 1]]
    cuts = [0, *edges[:: len(edges) // most + 1], steps]
    sizes = [costs.bytes_of(live) for live in costs.live]

    def middle(start: int, stop: int) -> int:
        margin = max((stop - start) // 4, 1)
        inner = range(start + margin, stop - margin + 1)
        return min(inner, key=lambda k: (sizes[k], abs(start + stop - 2 * k), k))

    while (widest := max(stop - start for start, stop in pairwise(cuts))) > 2 * NEAR or (
        len(cuts) <= FEW and widest > 2
    ):
        # all gaps of about the widest, so that equal blocks are cut alike
        gaps = [gap for gap in pairwise(cuts) if gap[1] - gap[0] > max(widest // 2, 2)]
        if len(cuts) + len(gaps) > most:
            break
        cuts = sorted([*cuts, *(middle(start, stop) for start, stop in gaps)])
    return cuts


def runs_of(costs: StepCosts, marked: Container[int]) -> list[Run]:
    """Returns runs that do not overlap, in order; copies of a marked state are marked."""
    keys = list(_keys(costs, marked))
    live, saved = ([in_order(s, costs) for s in sets] for sets in (costs.live, costs.saved))
    steps_of_key = defaultdict[Hashable, list[int]](list)
    for step, key in enumerate(keys):
        steps_of_key[key].append(step)

    def run_of(start: int, period: int) -> Run:
        """Returns the longest run of this start and period; a short one if nothing repeats."""
        grown = costs.gradients[start + 1] - costs.gradients[start + 1 + period]
        is_same = _Renaming()
        state, other = start, start + period
        while (
            other < len(costs)
            and keys[state] == keys[other]
            and is_same(live[state], live[other])
            and is_same(saved[state], saved[other])
            and costs.gradients[state + 1] - costs.gradients[other + 1] == grown
        ):
            state, other = state + 1, other + 1
        # segments that end at a state depend on whether it is marked, not on its storages
        while state > start and (state in marked) != (other in marked):
            state, other = state - 1, other - 1
        return Run(start, period, other, grown)

    runs: list[Run] = []
    start = 0
    while start < len(costs):
        same = steps_of_key[keys[start]]
        after = bisect_right(same, start)
        periods = (other - start for other in same[after : after + TRIED])
        tried = (
            run_of(start, period)
            for period in periods
            # with fewer parts it would not be a run
            if (last := start + (PARTS - 1) * period) < len(keys) and keys[last] == keys[start]
        )
        longest = max(tried, key=lambda run: (run.stop, -run.period), default=None)
        if longest is None or longest.stop - start < PARTS * longest.period:
            start += 1
        else:
            runs.append(longest)
            start = longest.stop
    return runs


class _Renaming:
    """Maps the storages of one part to those of another, one to one."""

    def __init__(self) -> None:
        self.to_other: dict[int, int] = {}
        self.to_first: dict[int, int] = {}

    def __call__(self, some: Iterable[int], others: Iterable[int]) -> bool:
        """Returns whether these storages, in order, are mapped to each other, or can be."""
        to, back = self.to_other, self.to_first
        return all(
            to.setdefault(first, other) == other and back.setdefault(other, first) == first
            for first, other in zip(some, others, strict=True)
        )


def in_order(storages: Collection[int], costs: StepCosts) -> list[int]:
    """Sorts storages so that those of equal parts have the same positions.

    By size first: the input of the first layer may be older than storages that all layers share.
    """
    return sorted(storages, key=lambda storage: (costs.sizes[storage], storage))


def _keys(costs: StepCosts, marked: Container[int]) -> Iterator[Hashable]:
    peaks = costs.forward, costs.forward_until_saved, costs.backward
    work = costs.flops, costs.flops_until_saved, costs.seconds, costs.seconds_until_saved

    def sizes(storages: Collection[int]) -> tuple[int, ...]:
        return tuple(sorted(map(costs.sizes.__getitem__, storages)))

    for step, numbers in enumerate(zip(*peaks, *work, strict=True)):
        yield numbers, sizes(costs.live[step]), sizes(costs.saved[step]), step in marked
