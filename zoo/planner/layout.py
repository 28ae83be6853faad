"""Which segments a table considers, and which storages can be held where: before any budget.

A chain of n steps has n + 1 states; a segment [i, j) starts at state i and ends at state j. In a
chain of a hundred steps any two states will do. In a longer one, long segments begin and end at
*cuts*, some of the states; between two cuts, any two states will do:

    states    0   1   2   3   4   5   6   7   8
    cuts      |               |               |
    segments      [-------)                       between two cuts
              [-------------------------------)   from cut to cut
                      [-----------------------)   from anywhere to a cut, as the last item of a
                                                  second run, which hands it over

While a plan is worked through from left to right, what matters at state i of all that is held is
which of the storages in live(i) are among it: a storage in two states is in all states between.
Those sets are few, and known without a budget: the *rows* of a state.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from zoo.planner.costs import StepCosts

Held = frozenset[int]


class Row(NamedTuple):
    """A set of storages that can be held at a state.

    missing: bytes of the state's other storages, which are held when a segment starts here.
    grown: bytes that are held besides when the step that starts here is kept.
    following: the number of the next state's row when that step is kept.
    """

    missing: int
    grown: int
    following: int


@dataclass(frozen=True)
class Layout:
    """The segments and rows of a chain.

    Attributes:
        costs: the chain's, without the storages of no bytes.
        ends: for each state, where a segment that starts there may end as the last of its run.
        stops: how many of these, from the first, are open to any segment, not only to the last.
        rows: for each state, the sets of its storages that can be held there.
        own: for each state, the number of the row in which all of it is held.
        after: for each state and stop, the number of the stop's row after that segment.
    """

    costs: StepCosts
    ends: tuple[tuple[int, ...], ...]
    stops: tuple[int, ...]
    rows: tuple[tuple[Row, ...], ...]
    own: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]

    @property
    def entries(self) -> int:
        """The number of pairs of a row and an end of its state."""
        return sum(
            len(rows) * (len(ends) + 1) for rows, ends in zip(self.rows, self.ends, strict=True)
        )


def lay_out(costs: StepCosts, cuts: Collection[int]) -> Layout:
    """Lists the segments and rows of a chain for the given cuts; its ends are cuts anyway.

    Row 0 of state 0 is that in which nothing is held.
    """
    steps = len(costs)
    costs = _without_empty(costs)
    order = sorted({0, steps, *cuts})
    ends: list[tuple[int, ...]] = [() for _ in range(steps + 1)]
    stops = [0] * (steps + 1)
    for place, (start, stop) in enumerate(zip(order, order[1:], strict=False)):
        for state in range(start, stop):
            ends[state] = (*range(state + 1, stop), *order[place + 1 :])
            stops[state] = len(ends[state]) if state == start else stop - state
    held = _held(costs, ends, stops)
    live = costs.live
    return Layout(
        costs,
        tuple(ends),
        tuple(stops),
        tuple(
            tuple(_row(costs, held, state, found) for found in held[state])
            for state in range(steps + 1)
        ),
        tuple(held[state][live[state]] for state in range(steps + 1)),
        tuple(
            tuple(held[end][live[state] & live[end]] for end in ends[state][: stops[state]])
            for state in range(steps + 1)
        ),
    )


def _held(costs: StepCosts, ends: list[tuple[int, ...]], stops: list[int]) -> list[dict[Held, int]]:
    """Numbers the sets of storages that can be held at each state."""
    held: list[dict[Held, int]] = [{} for _ in costs.live]
    held[0][frozenset()] = 0
    for state, live in enumerate(costs.live):
        held[state].setdefault(live, len(held[state]))
        for end in ends[state][: stops[state]]:
            held[end].setdefault(live & costs.live[end], len(held[end]))
        if state < len(costs):
            for found in held[state]:
                kept = (found | costs.saved[state]) & costs.live[state + 1]
                held[state + 1].setdefault(kept, len(held[state + 1]))
    return held


def _row(costs: StepCosts, held: list[dict[Held, int]], state: int, found: Held) -> Row:
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
