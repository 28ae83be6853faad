"""From the values of a grid to a plan, counting exact bytes: it keeps to its budget.

Nothing is stored about which choice led to a value but where a segment ends; the others are two,
and compared again.
"""

import bisect
import math
from collections.abc import Iterator

from zoo.plan import DEEPEST, Item, Plan
from zoo.planner.grid import Grid
from zoo.planner.layout import FIRST_RUN, Row


def trace(grid: Grid, budget: int) -> Plan:
    """Returns the plan that the values lead to from a budget of at least `grid.least` bytes.

    Where it would nest deeper than a plan may, the innermost segments are not divided further: it
    then takes more, as its simulation says.
    """
    return Plan(tuple(_Trace(grid).items(0, 0, FIRST_RUN, budget)))


class _Trace:
    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.layout = grid.layout
        self.costs = grid.layout.costs
        self.amounts: list[int] = grid.amounts.tolist()

    def items(self, state: int, number: int, end: int, free: int, depth: int = 1) -> Iterator[Item]:
        """Yields the items of a run from a state, in one of its rows, to an end.

        `depth` is that of the segments among them.
        """
        last = len(self.costs) if end == FIRST_RUN else end
        while state < last:
            place = self.layout.places[state]
            row = place.rows[number]
            keep = self.keep(state, end, row, free)
            left = free - row.missing
            if keep <= self.value(state, place.own, end, left):
                cut, chosen = math.inf, -1
            else:
                cut, chosen = self.segment(state, end, left, keep)
            if keep <= cut:
                yield state
                state, number, free = state + 1, row.following, free - row.grown
            else:
                stop = place.stops[chosen]
                inner = self.items(state, place.own, stop, left, depth + 1)
                yield tuple(inner if depth < DEEPEST else range(state, stop))
                state, number, free = stop, place.after[chosen], left

    def value(self, state: int, number: int, end: int, free: int) -> float:
        """Returns the seconds from a state on, infinite where something does not fit."""
        part, column = self.grid.parts[state][number], self.layout.column(state, end)
        need = int(part.needs[column])
        if free < need:
            return math.inf
        upper = bisect.bisect_left(self.amounts, free)
        values = part.values[column]
        if upper == len(self.amounts):
            return float(values[-1])
        above, amount = float(values[upper]), self.amounts[upper]
        if amount == free:
            return above
        lower, below = self.amounts[upper - 1], float(values[upper - 1])
        if lower < need:
            lower, below = need, float(part.at_need[column])
        return above + (below - above) * ((amount - free) / (amount - lower))

    def keep(self, step: int, end: int, row: Row, free: int) -> float:
        """Returns the seconds from a state on when its step is kept."""
        costs, rest = self.costs, free - row.grown
        beside = free - row.missing
        if end != FIRST_RUN:
            beside -= costs.gradients[end]
        last = step + 1 == end
        forward = costs.forward_until_saved[step] if last else costs.forward[step]
        if beside < forward or rest < costs.gradients[step + 1] + costs.backward[step]:
            return math.inf
        if last:
            return float(self.grid.until_saved[step])
        seconds = 0.0 if end == FIRST_RUN else float(self.grid.seconds[step])
        return seconds + self.value(step + 1, row.following, end, rest)

    def segment(self, start: int, end: int, free: int, keep: float) -> tuple[float, int]:
        """Returns the seconds from a state on that starts with a segment, and the stop's number.

        Those stops are tried that are best for a little less and a little more memory; all, where
        these do not fit and the step cannot be kept.
        """
        level = max(bisect.bisect_right(self.amounts, free) - 1, 0)
        column = self.layout.column(start, end)
        choices = self.grid.choices[start][column, level : level + 2].tolist()
        found = [
            (self.started(start, number, end, free), number)
            for number in sorted({*choices})
            if number >= 0
        ]
        best = min(found, default=(math.inf, -1))
        if min(best[0], keep) < math.inf:
            return best
        stops = self.layout.places[start].stops
        before = len(stops) if end == FIRST_RUN else bisect.bisect_left(stops, end)
        return min((self.started(start, number, end, free), number) for number in range(before))

    def started(self, start: int, number: int, end: int, free: int) -> float:
        """Returns the seconds from a state on that starts with the segment to a stop."""
        place, way = self.layout.places[start], self.grid.starts[start]
        gradient, again = 0, 0.0
        if end != FIRST_RUN:
            gradient, again = self.costs.gradients[end], float(way.seconds[number])
        if free < int(way.through[number]) + gradient:
            return math.inf
        turn = self.value(start, place.own, place.stops[number], free)
        return again + turn + self.value(place.stops[number], place.after[number], end, free)
