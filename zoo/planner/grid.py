"""Least seconds that must be run again, for every part of a chain and every amount of memory.

V(i, t, H, m) is the least for the rest of a run that has come to state i and ends at state t, while
H of the storages in live(i) are held and m bytes are free. The run is the second run of a segment
that ends at t with its backwards, or the first run (a last column). F(i, t, m) is V where all of
live(i) is held: the whole turn of the segment [i, t).

    keep step i         seconds(i) + V(i + 1, t, H', m - bytes(saved(i) - H))
    hand the rest over  F(i, t, m - bytes(live(i) - H))
    start with [i, j)   seconds(i ... j - 1) + F(i, j, m) + V(j, t, live(i) & live(j), m)

The least of these for which the bytes of the moment fit in what is free. A second run that is not
at its start needs no segment but the last: that one is handed over, and starts with the segment.
Kept last steps stop early; in the first run nothing is run again, and nothing is handed over.

Bytes are exact where they decide whether something fits: `needs` holds the least m for each entry.
Values are known at multiples of a step of so many bytes; between two of these they are interpolated
rather than rounded, since rounding the bytes of a hundred small items up would waste a large part
of the budget, and rounding them down or to the nearest would make some of them free, and those the
program would choose. With a step of one byte there is nothing to interpolate: the values are exact.

`trace` follows the values from a budget in bytes, counts exactly, and so always honours it.

Source: the recurrence of rotor (Beaumont et al. 2019, arXiv:1911.13214), here for tuple states with
shared storages and early stop.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zoo.plan import Item, Plan
from zoo.planner.layout import Layout, Row

Values = NDArray[Any]  # seconds, (ends of a state and the first run, amounts of memory)
Bytes = NDArray[np.int64]


class Start(NamedTuple):
    """What it takes to run from a state to each stop: seconds, and most bytes beside the state."""

    seconds: NDArray[np.float64]
    through: Bytes


class Grid:
    """The values of a chain at `levels` multiples of `step` bytes, from 0.

    Time is cubic and memory quadratic in the number of cuts, both linear in the levels.
    """

    def __init__(self, layout: Layout, step: int, levels: int) -> None:
        self.layout = layout
        self.step = step
        self.levels = levels
        self.type = np.float64 if step == 1 else np.float32
        costs = layout.costs
        # operations decide between plans of equal times
        weight = 1e-9 * (sum(costs.seconds) or 1.0) / (sum(costs.flops) or 1)
        self.seconds = _weighed(costs.seconds, costs.flops, weight)
        self.until_saved = _weighed(costs.seconds_until_saved, costs.flops_until_saved, weight)
        self.values: list[list[Values]] = [[] for _ in costs.live]
        self.needs: list[list[Bytes]] = [[] for _ in costs.live]
        self.choices: list[NDArray[np.int16]] = []
        self.starts: list[Start] = []
        last = len(costs)
        self.values[last] = [np.zeros((1, levels), self.type) for _ in layout.rows[last]]
        self.needs[last] = [np.zeros(1, np.int64) for _ in layout.rows[last]]
        for state in reversed(range(last)):
            self._solve(state)
        self.choices.reverse()
        self.starts.reverse()

    @property
    def least(self) -> int:
        """The least peak of all plans, in bytes."""
        return int(self.needs[0][0][-1])

    def budgets(self) -> list[int]:
        """Returns the multiples of the step from which on less time is needed, rising."""
        whole = self.values[0][0][-1]
        lower = np.flatnonzero(whole[1:] < whole[:-1]) + 1
        return [self.step * int(level) for level in lower]

    def trace(self, budget: int) -> Plan:
        """Returns the plan that the values lead to from a budget that is not below `least`."""
        return Plan(_Trace(self).first_run(budget))

    def _solve(self, state: int) -> None:
        layout = self.layout
        self.starts.append(self._start(state))
        kept = [self._keep(state, row) for row in layout.rows[state]]
        values, needs = kept[layout.own[state]]
        self.choices.append(np.full(values.shape, -1, np.int16))
        for place in range(layout.stops[state]):
            self._offer_segment(state, place, values, needs)
        for (missing, _, _), (other, other_needs) in zip(layout.rows[state], kept, strict=True):
            if missing:
                handed = self._moved(values, needs, missing)
                self._close(handed, needs + missing)
                np.minimum(other, handed, out=other)
                np.minimum(other_needs, needs + missing, out=other_needs)
        self.values[state] = [found for found, _ in kept]
        self.needs[state] = [found for _, found in kept]

    def _start(self, state: int) -> Start:
        costs = self.layout.costs
        stops = self.layout.ends[state][: self.layout.stops[state]]
        live, steps = costs.live[state], range(state, stops[-1])
        beside = [costs.forward[k] + costs.bytes_of(costs.live[k] - live) for k in steps]
        places = np.array(stops) - state - 1
        return Start(
            np.cumsum(self.seconds[state : stops[-1]])[places],
            np.maximum.accumulate(np.array(beside, np.int64))[places],
        )

    def _gradients(self, state: int) -> Bytes:
        """Returns the bytes of the gradient in hand for each end; in the first run there is none."""
        gradients = self.layout.costs.gradients
        return np.array([*(gradients[end] for end in self.layout.ends[state]), 0], np.int64)

    def _keep(self, step: int, row: Row) -> tuple[Values, Bytes]:
        """Returns the values and needs of a state in a row when its step is kept."""
        costs = self.layout.costs
        count = len(self.layout.ends[step])
        rest = self.values[step + 1][row.following][-count:]
        rest_needs = self.needs[step + 1][row.following][-count:]
        values = np.empty((count + 1, self.levels), self.type)
        values[0] = self.until_saved[step]
        values[1:] = self._moved(rest, rest_needs, row.grown)
        values[1:-1] += self.type(self.seconds[step])
        needs = self._gradients(step) + (costs.forward[step] + row.missing)
        needs[0] += costs.forward_until_saved[step] - costs.forward[step]
        backward = costs.gradients[step + 1] + costs.backward[step]
        np.maximum(needs, row.grown + backward, out=needs)
        np.maximum(needs[1:], row.grown + rest_needs, out=needs[1:])
        self._close(values, needs)
        return values, needs

    def _offer_segment(self, start: int, place: int, values: Values, needs: Bytes) -> None:
        """Lowers the values of a state by what it costs to start with a segment."""
        layout = self.layout
        stop, row = layout.ends[start][place], layout.after[start][place]
        seconds, through = self.starts[-1]
        count = len(values) - place - 1
        rest, rest_needs = self.values[stop][row][-count:], self.needs[stop][row][-count:]
        offered = rest + (values[place] + self.type(seconds[place]))
        offered[-1] = rest[-1] + values[place]
        fits = np.maximum(rest_needs, needs[place])
        moment = through[place] + self._gradients(start)[-count:]
        for late in np.flatnonzero(moment > fits):
            offered[late, : -(-int(moment[late]) // self.step)] = np.inf
        later = slice(place + 1, None)
        np.minimum(needs[later], np.maximum(fits, moment), out=needs[later])
        better = offered < values[later]
        np.copyto(values[later], offered, where=better)
        np.copyto(self.choices[-1][later], np.int16(place), where=better)

    def _moved(self, values: Values, needs: Bytes, paid: int) -> Values:
        """Returns the values for those who have yet to pay so many bytes."""
        moved = np.full(values.shape, np.inf, self.type)
        down, part = divmod(paid, self.step)
        stop = self.levels - down
        if stop <= 0:
            return moved
        if not part:
            moved[:, down:] = values[:, :stop]
            return moved
        share = self.type(part / self.step)
        inner = moved[:, down + 1 :]
        np.multiply(values[:, 1:stop], 1 - share, out=inner)
        inner += values[:, : stop - 1] * share
        # where only the upper of two neighbors exists, it stands for both
        first = -(-needs // self.step)
        found = np.flatnonzero((first >= 1) & (first < stop))
        moved[found, first[found] + down] = values[found, first[found]]
        return moved

    def _close(self, values: Values, needs: Bytes) -> None:
        """Shuts the levels that are below what is needed."""
        first = -(-needs // self.step)
        values[np.arange(self.levels) < first[:, None]] = np.inf


class _Trace:
    """Follows the values of a grid with exact bytes.

    Ends are numbered from the last, the first run's being -1, so that a number means the same end
    at every state.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.layout = grid.layout
        self.costs = grid.layout.costs

    def first_run(self, free: int) -> list[Item]:
        """Returns the items of a whole plan."""
        items: list[Item] = []
        state, number = 0, 0
        while state < len(self.costs):
            row = self.layout.rows[state][number]
            keep = self.keep(state, -1, row, free)
            cut, place = self.segment(state, -1, free - row.missing, keep)
            if keep <= cut:
                items.append(state)
                state, number, free = state + 1, row.following, free - row.grown
            else:
                free -= row.missing
                items.append(self.turn(state, self.end(state, place), free))
                number = self.layout.after[state][place]
                state = self.layout.ends[state][place]
        return items

    def turn(self, state: int, end: int, free: int) -> tuple[Item, ...]:
        """Returns the items of the segment from a state to an end."""
        last = self.layout.ends[state][end + 1 if end < -1 else len(self.layout.ends[state]) - 1]
        items: list[Item] = []
        row = self.layout.rows[state][self.layout.own[state]]
        keep = self.keep(state, end, row, free)
        cut, place = self.segment(state, end, free, keep)
        if keep <= cut:
            items.append(state)
            state, number, free = state + 1, row.following, free - row.grown
        else:
            items.append(self.turn(state, self.end(state, place), free))
            number = self.layout.after[state][place]
            state = self.layout.ends[state][place]
        while state < last:
            row = self.layout.rows[state][number]
            handed = self.value(state, self.layout.own[state], end, free - row.missing)
            if handed < self.keep(state, end, row, free):
                return (*items, self.turn(state, end, free - row.missing))
            items.append(state)
            state, number, free = state + 1, row.following, free - row.grown
        return tuple(items)

    def end(self, state: int, place: int) -> int:
        """Numbers an end of a state from the last."""
        return place - len(self.layout.ends[state]) - 1

    def value(self, state: int, number: int, end: int, free: int) -> float:
        """Returns the seconds from a state on, infinite where something does not fit."""
        grid = self.grid
        if free < grid.needs[state][number][end]:
            return np.inf
        level, part = divmod(free, grid.step)
        values = grid.values[state][number][end]
        if level >= grid.levels - 1:
            return float(values[-1])
        lower, upper = float(values[level]), float(values[level + 1])
        if lower == np.inf or not part:
            return lower if not part else upper
        return lower + (upper - lower) * (part / grid.step)

    def keep(self, step: int, end: int, row: Row, free: int) -> float:
        """Returns the seconds from a state on when its step is kept."""
        costs, ends = self.costs, self.layout.ends[step]
        rest = free - row.grown
        if rest < costs.gradients[step + 1] + costs.backward[step]:
            return np.inf
        beside = free - row.missing
        if end == -1:
            fits = beside >= costs.forward[step]
            return self.value(step + 1, row.following, end, rest) if fits else np.inf
        beside -= costs.gradients[ends[end + 1]]
        if end == -len(ends) - 1:
            fits = beside >= costs.forward_until_saved[step]
            return float(self.grid.until_saved[step]) if fits else np.inf
        if beside < costs.forward[step]:
            return np.inf
        return float(self.grid.seconds[step]) + self.value(step + 1, row.following, end, rest)

    def segment(self, start: int, end: int, free: int, keep: float) -> tuple[float, int]:
        """Returns the seconds from a state on that starts with a segment, and the segment's end.

        Those ends are tried that are best for a little less and a little more memory; all, where
        these do not fit and the step cannot be kept.
        """
        level = min(max(free, 0) // self.grid.step, self.grid.levels - 1)
        choices = self.grid.choices[start][end, level : level + 2].tolist()
        found = [
            (self.started(start, place, end, free), place) for place in {*choices} if place >= 0
        ]
        best = min(found, default=(np.inf, -1))
        if min(best[0], keep) < np.inf:
            return best
        open_ends = min(self.layout.stops[start], len(self.layout.ends[start]) + 1 + end)
        return min((self.started(start, place, end, free), place) for place in range(open_ends))

    def started(self, start: int, place: int, end: int, free: int) -> float:
        """Returns the seconds from a state on that starts with the segment to an end."""
        stop, row = self.layout.ends[start][place], self.layout.after[start][place]
        seconds, through = self.grid.starts[start]
        turn = self.value(start, self.layout.own[start], self.end(start, place), free)
        rest = self.value(stop, row, end, free)
        if end == -1:
            return turn + rest if free >= through[place] else np.inf
        gradient = self.costs.gradients[self.layout.ends[start][end + 1]]
        if free < through[place] + gradient:
            return np.inf
        return turn + rest + float(seconds[place])


def _weighed(seconds: Sequence[float], flops: Sequence[int], weight: float) -> NDArray[np.float64]:
    return np.array(seconds, np.float64) + weight * np.array(flops, np.float64)
