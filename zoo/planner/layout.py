"""Which segments a grid considers, and which storages can be held where: before any budget.

A chain of n steps has n + 1 states; a segment [i, j) starts at state i and ends at state j. In a
chain of a hundred steps any two states will do. In a longer one, long segments begin and end at
*cuts*, some of the states; those of at most `near` steps may be anywhere:

    states    0   1   2   3   4   5   6   7   8
    cuts      |               |               |
    segments          [-----------)               near
              [-------------------------------)   from cut to cut

While a plan is worked through from left to right, what matters at state i of all that is held is
which of the storages in live(i) are among it: a storage in two states is in all states between.
Those sets are few, and known without a budget: the *rows* of a state.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zoo.planner.costs import StepCosts

FIRST_RUN = -1  # stands in for an end: the run that is no segment's

Held = frozenset[int]
Numbered = list[dict[Held, int]]


class Row(NamedTuple):
    """A set of storages that can be held at a state.

    missing: bytes of the state's other storages, which are held when a segment starts here.
    grown: bytes that are held besides when the step that starts here is kept.
    following: the number of the next state's row when that step is kept.
    """

    missing: int
    grown: int
    following: int


class Place(NamedTuple):
    """What can be done at a state.

    Attributes:
        inner: ends of near segments that are no cuts; then come, for the grid, all later cuts and
            the first run.
        cuts: the number of later cuts.
        stops: where a segment may end that is not the last of its run.
        after: for each stop, the number of its row after that segment.
        rows: the sets of storages that can be held.
        own: the number of the row in which all of the state is held.
    """

    inner: tuple[int, ...]
    cuts: int
    stops: tuple[int, ...]
    after: tuple[int, ...]
    rows: tuple[Row, ...]
    own: int

    @property
    def columns(self) -> int:
        """The number of ends, the first run included."""
        return len(self.inner) + self.cuts + 1


@dataclass(frozen=True)
class Layout:
    """The segments and rows of a chain.

    costs: the chain's, without the storages of no bytes.
    cuts: the cuts in order, from state 0 to the last.
    cuts_until: for each state, how many cuts there are up to there, itself included.
    places: what can be done at each state. Row 0 of state 0 is that in which nothing is held.
    """

    costs: StepCosts
    cuts: tuple[int, ...]
    cuts_until: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def entries(self) -> int:
        """The number of pairs of a row and an end."""
        return sum(len(place.rows) * place.columns for place in self.places)

    def ends(self, state: int) -> tuple[int, ...]:
        """Returns the ends that are known at a state, in the order of a grid's columns."""
        place = self.places[state]
        return (*place.inner, *self.cuts[len(self.cuts) - place.cuts :], FIRST_RUN)

    def column(self, state: int, end: int) -> int:
        """Returns the number of an end at a state."""
        place = self.places[state]
        if end == FIRST_RUN:
            return place.columns - 1
        until = self.cuts_until
        if until[end] > until[end - 1]:
            return len(place.inner) + until[end] - until[state] - 1
        return end - state - 1 - (until[end] - until[state])

    def later(self, state: int, stop: int) -> list[tuple[slice, slice]]:
        """Returns which columns of a state are those of which columns of a later one."""
        here, there = self.places[state], self.places[stop]
        first = stop - state - (self.cuts_until[stop] - self.cuts_until[state])
        inner = max(len(here.inner) - first, 0)
        rest = there.cuts + 1
        if inner == len(there.inner) and here.cuts == there.cuts:
            return [(slice(here.columns - inner - rest, None), slice(None))]
        blocks = [(slice(here.columns - rest, None), slice(there.columns - rest, None))]
        if inner:
            blocks.append((slice(first, first + inner), slice(inner)))
        return blocks


def lay_out(costs: StepCosts, cuts: Collection[int], near: int) -> Layout:
    """Lists the segments and rows of a chain; its first and last state are cuts anyway."""
    steps = len(costs)
    costs = _without_empty(costs)
    order = sorted({0, steps, *cuts})
    found = frozenset(order)
    until = [1]
    for state in range(1, steps + 1):
        until.append(until[-1] + (state in found))
    stops: list[Sequence[int]] = []
    for state in range(steps + 1):
        close = range(state + 1, min(state + near, steps) + 1)
        far = order[until[state] :] if state in found else order[until[state] :][:1]
        stops.append(sorted({*close, *far}))
    held = _held(costs, stops)
    places = [
        Place(
            tuple(
                end for end in range(state + 1, min(state + near, steps) + 1) if end not in found
            ),
            len(order) - until[state],
            tuple(stops[state]),
            tuple(held[stop][costs.live[state] & costs.live[stop]] for stop in stops[state]),
            tuple(_row(costs, held, state, row) for row in held[state]),
            held[state][costs.live[state]],
        )
        for state in range(steps + 1)
    ]
    return Layout(costs, tuple(order), tuple(until), tuple(places))


def _held(costs: StepCosts, stops: Sequence[Sequence[int]]) -> Numbered:
    """Numbers the sets of storages that can be held at each state."""
    held: Numbered = [{} for _ in costs.live]
    held[0][frozenset()] = 0
    for state, live in enumerate(costs.live):
        held[state].setdefault(live, len(held[state]))
        for stop in stops[state]:
            held[stop].setdefault(live & costs.live[stop], len(held[stop]))
        if state < len(costs):
            for found in held[state]:
                kept = (found | costs.saved[state]) & costs.live[state + 1]
                held[state + 1].setdefault(kept, len(held[state + 1]))
    return held


def _row(costs: StepCosts, held: Numbered, state: int, found: Held) -> Row:
    missing = costs.bytes_of(costs.live[state] - found)
    if state == len(costs):
        return Row(missing, 0, 0)
    saved = costs.saved[state]
    following = held[state + 1][(found | saved) & costs.live[state + 1]]
    return Row(missing, costs.bytes_of(saved - found), following)


def _without_empty(costs: StepCosts) -> StepCosts:
    def some(sets: Iterable[Held]) -> tuple[Held, ...]:
        return tuple(frozenset(s for s in found if costs.sizes[s]) for found in sets)

    return StepCosts(**{**vars(costs), "live": some(costs.live), "saved": some(costs.saved)})
