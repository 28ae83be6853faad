"""The search space of the dynamic program: its segments, and sets of storages that can be held.

A chain of n steps has n + 1 states; a segment [i, j) starts at state i and ends at state j. In a
chain of up to `FLAT` steps any two states will do. In a longer one, long segments begin and end at
*cuts*, some of the states; those of at most `NEAR` steps may be anywhere:

    states    0   1   2   3   4   5   6   7   8
    cuts      |               |               |
    segments          [-----------)               near
              [-------------------------------)   from cut to cut

Of all storages that a plan holds at state i only those in live(i) matter later: a storage in two
states is in all states between. Those sets are few and known without a budget: the *rows* of a
state.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from zoo.planner.costs import StepCosts

Storages = frozenset[int]
FLAT = 150  # steps of a chain in which every state is a cut
FEW = 128  # cuts to which others are added
MANY = 400  # cuts, at most; segments nest about as deep, and plans to `planner.plan.DEEPEST`
NEAR = 12  # steps of a segment that begins and ends anywhere


class Row(NamedTuple):
    """A set of storages that can be held at a state.

    missing: bytes of the state's other storages, which are held when a segment starts here.
    grown: bytes that are held besides when the step that starts here is kept.
    following: the number of the next state's row when that step is kept.
    """

    missing: int
    grown: int
    following: int


class SearchSpace:
    """The segments and rows of a chain, each list with an entry for every state.

    A run is the recomputation of a segment and ends where that does, or the original forward, whose
    end is `forward`.

    Attributes:
        costs: the chain's, without the storages of no bytes.
        forward: n + 1, which is no state.
        cuts: the cuts in order, 0 and n among them, and then `forward`.
        inner: ends of near segments that are no cuts. Columns are these, then all later cuts.
        stops: where a segment may end before its run does, each with the number of its row then.
        rows: the sets of storages that can be held. In row 0 of state 0 nothing is.
        own: the number of the row in which all of the state is held.
    """

    def __init__(self, costs: StepCosts, cuts: Collection[int] | None = None) -> None:
        steps = len(costs)
        cuts = default_cuts(costs) if cuts is None else cuts
        self.costs = costs = _without_empty(costs)
        self.forward = steps + 1
        self.cuts = (*sorted({0, steps, *cuts}), self.forward)
        self.first_cut = [bisect_right(self.cuts, state) for state in range(steps + 1)]
        self.inner: list[tuple[int, ...]] = []
        self.stops: list[list[tuple[int, int]]] = []
        self.rows: list[list[Row]] = []
        self.own: list[int] = []
        # of each state, a number for each set of storages, in order of first use
        held = [defaultdict[Storages, int](itertools.count().__next__) for _ in costs.live]
        known = frozenset(self.cuts)
        _ = held[0][frozenset()]
        for state, live in enumerate(costs.live):
            near_ends = range(state + 1, min(state + NEAR, steps) + 1)
            later_cuts = self.cuts[self.first_cut[state] : -1]
            ends = {*near_ends, *(later_cuts if state in known else later_cuts[:1])}
            self.inner.append(tuple(end for end in near_ends if end not in known))
            self.own.append(held[state][live])
            self.stops.append([(end, held[end][live & costs.live[end]]) for end in sorted(ends)])
            self.rows.append([self._row(state, storages, held) for storages in held[state]])

    def _row(self, state: int, storages: Storages, held: Sequence[dict[Storages, int]]) -> Row:
        costs = self.costs
        missing = costs.bytes_of(costs.live[state] - storages)
        if state == len(costs):
            return Row(missing, 0, 0)
        saved = costs.saved[state]
        following = held[state + 1][(storages | saved) & costs.live[state + 1]]
        return Row(missing, costs.bytes_of(saved - storages), following)

    def columns(self, state: int) -> int:
        """Returns the number of ends that are known at a state."""
        return len(self.inner[state]) + len(self.cuts) - self.first_cut[state]

    def ends(self, state: int) -> tuple[int, ...]:
        """Returns the ends that are known at a state, in the order of columns."""
        return (*self.inner[state], *self.cuts[self.first_cut[state] :])

    def column(self, state: int, end: int) -> int:
        """Returns the number of an end at a state."""
        cut = bisect_left(self.cuts, end)
        passed = cut - self.first_cut[state]
        if self.cuts[cut] == end:
            return len(self.inner[state]) + passed
        return end - state - 1 - passed

    def later(self, state: int, stop: int) -> list[tuple[slice, slice]]:
        """Returns which columns of a state are those of which columns of a later one."""
        cuts = slice(self.first_cut[stop] - len(self.cuts), None)
        passed = bisect_right(self.inner[state], stop)
        count = len(self.inner[state]) - passed
        inner = [(slice(passed, passed + count), slice(count))] if count else []
        return [(cuts, cuts), *inner]


def _without_empty(costs: StepCosts) -> StepCosts:
    def some(sets: Iterable[Storages]) -> tuple[Storages, ...]:
        return tuple(frozenset(s for s in storages if costs.sizes[s]) for storages in sets)

    return replace(costs, live=some(costs.live), saved=some(costs.saved))


def default_cuts(costs: StepCosts) -> list[int]:
    """Chooses the states where long segments begin and end.

    These are all states of a short chain; else those between blocks, of very many only some. If
    they are few or far apart, the smallest state near the middle between two is added.
    """
    steps = len(costs)
    if steps <= FLAT:
        return list(range(steps + 1))
    edges = [k for k in range(1, steps) if costs.blocks[k] != costs.blocks[k - 1]]
    cuts = [0, *edges[:: len(edges) // MANY + 1], steps]
    sizes = [costs.bytes_of(live) for live in costs.live]

    def middle(start: int, stop: int) -> int:
        margin = max((stop - start) // 4, 1)
        inner = range(start + margin, stop - margin + 1)
        return min(inner, key=lambda k: (sizes[k], abs(start + stop - 2 * k), k))

    while len(cuts) <= FEW or (
        len(cuts) <= MANY and max(stop - start for start, stop in pairwise(cuts)) > 2 * NEAR
    ):
        # the widest gaps first
        gaps = sorted(pairwise(cuts), key=lambda gap: gap[0] - gap[1])[: MANY - len(cuts)]
        added = [middle(start, stop) for start, stop in gaps if stop - start > 2]
        if not added:
            break
        cuts = sorted([*cuts, *added])
    return cuts
