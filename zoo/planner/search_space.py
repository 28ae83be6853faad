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

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from zoo.planner.costs import StepCosts
from zoo.planner.repeats import in_order, runs_of

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
    end is `forward`. Known ends of a state are the next `NEAR` states and all later cuts. States of
    repeated parts have equal rows, in the same order.

    Attributes:
        costs: the chain's, without the storages of no bytes.
        forward: n + 1, which is no state.
        cuts: the cuts in order, 0 and n among them, and then `forward`.
        near: the last of the near ends, which may be cuts or not.
        repeats: the runs of equal parts.
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
        self.near = [min(state + NEAR, steps) for state in range(steps + 1)]
        known = frozenset(self.cuts)
        self.repeats = runs_of(costs, known)
        # of each state, a number for each set of storages
        held: list[dict[Storages, int]] = [{} for _ in costs.live]
        _number(held[0], frozenset())
        ends = []
        for state, live in enumerate(costs.live):
            later = self.cuts[bisect_right(self.cuts, state) : -1]
            chosen = later if state in known else later[:1]
            ends.append(sorted({*range(state + 1, self.near[state] + 1), *chosen}))
            _number(held[state], live)
            for end in ends[-1]:
                _number(held[end], live & costs.live[end])
        self._complete(held)
        self.own = [numbers[live] for numbers, live in zip(held, costs.live, strict=True)]
        self.stops = [
            [(end, held[end][live & costs.live[end]]) for end in of_state]
            for of_state, live in zip(ends, costs.live, strict=True)
        ]
        self.rows = [
            [self._row(state, storages, held) for storages in numbers]
            for state, numbers in enumerate(held)
        ]

    def _complete(self, held: list[dict[Storages, int]]) -> None:
        """Adds the sets that follow others, and to each part of a run what the other parts hold."""
        costs, count = self.costs, 0
        while count != (count := sum(map(len, held))):
            for state, saved in enumerate(costs.saved):
                for storages in held[state]:
                    _number(held[state + 1], (storages | saved) & costs.live[state + 1])
            for run in self.repeats:
                for first in range(run.start, run.start + run.period):
                    names = [in_order(costs.live[state], costs) for state in run.copies(first)]
                    ranks = [{name: rank for rank, name in enumerate(of)} for of in names]
                    copies = list(zip(names, ranks, run.copies(first), strict=True))
                    sets = dict.fromkeys(
                        frozenset(rank[storage] for storage in storages)
                        for _, rank, state in copies
                        for storages in held[state]
                    )
                    for of, _, state in copies:
                        held[state] = {
                            frozenset(of[rank] for rank in places): number
                            for number, places in enumerate(sets)
                        }

    def _row(self, state: int, storages: Storages, held: Sequence[dict[Storages, int]]) -> Row:
        costs = self.costs
        missing = costs.bytes_of(costs.live[state] - storages)
        if state == len(costs):
            return Row(missing, 0, 0)
        saved = costs.saved[state]
        following = held[state + 1][(storages | saved) & costs.live[state + 1]]
        return Row(missing, costs.bytes_of(saved - storages), following)

    def ends(self, state: int) -> tuple[int, ...]:
        """Returns the ends that are known at a state, in order."""
        near = self.near[state]
        return (*range(state + 1, near + 1), *self.cuts[bisect_right(self.cuts, near) :])


def _number(numbers: dict[Storages, int], storages: Storages) -> None:
    numbers.setdefault(storages, len(numbers))


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

    while (widest := max(stop - start for start, stop in pairwise(cuts))) > 2 * NEAR or (
        len(cuts) <= FEW and widest > 2
    ):
        # all of about the widest, so that equal blocks are cut alike
        gaps = [gap for gap in pairwise(cuts) if gap[1] - gap[0] > max(widest // 2, 2)]
        if len(cuts) + len(gaps) > MANY:
            break
        cuts = sorted([*cuts, *(middle(start, stop) for start, stop in gaps)])
    return cuts
