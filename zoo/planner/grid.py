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

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zoo.plan import Item, Plan
from zoo.planner.layout import Layout, Row

Values = NDArray[Any]  # seconds, (ends of a state and the first run, amounts of memory)
Bytes = NDArray[np.int64]


class Start(NamedTuple):
    """What it takes to run from a state to each stop: seconds, and most bytes beside the state.

    gradients: bytes of the gradient in hand for each end; in the first run there is none.
    """

    seconds: NDArray[np.float64]
    through: Bytes
    gradients: Bytes


class Part(NamedTuple):
    """V for one row of a state, each with an entry for every end and the first run."""

    values: Values
    needs: Bytes
    at_need: Values  # seconds with just what is needed


class Grid:
    """The values of a chain at some amounts of free memory, the first of which is 0.

    Time is cubic and memory quadratic in the number of cuts, both linear in the amounts.
    """

    def __init__(self, layout: Layout, amounts: Bytes, exact: bool = False) -> None:
        self.layout = layout
        self.amounts = amounts
        self.type = np.float64 if exact else np.float32
        costs = layout.costs
        # operations decide between plans of equal times
        weight = 1e-9 * (sum(costs.seconds) or 1.0) / (sum(costs.flops) or 1)
        self.seconds = _weighed(costs.seconds, costs.flops, weight)
        self.until_saved = _weighed(costs.seconds_until_saved, costs.flops_until_saved, weight)
        self.parts: list[list[Part]] = [[] for _ in costs.live]
        self.choices: list[NDArray[np.int16]] = []
        self.starts: list[Start] = []
        done = np.zeros((1, len(amounts)), self.type)
        end = Part(done, np.zeros(1, np.int64), np.zeros(1, self.type))
        self.parts[-1] = [end for _ in layout.rows[-1]]
        for state in reversed(range(len(costs))):
            self._solve(state)
        self.choices.reverse()
        self.starts.reverse()

    @property
    def least(self) -> int:
        """The least peak of all plans, in bytes."""
        return int(self.parts[0][0].needs[-1])

    def budgets(self) -> list[int]:
        """Returns the amounts from which on less time is needed, rising."""
        whole = self.parts[0][0].values[-1]
        lower = np.flatnonzero(whole[1:] < whole[:-1]) + 1
        return [int(amount) for amount in self.amounts[lower]]

    def trace(self, budget: int) -> Plan:
        """Returns the plan that the values lead to from a budget that is not below `least`."""
        return Plan(_Trace(self).first_run(budget))

    def _solve(self, state: int) -> None:
        layout = self.layout
        self.starts.append(self._start(state))
        parts = [self._keep(state, row) for row in layout.rows[state]]
        own = parts[layout.own[state]]
        self.choices.append(np.full(own.values.shape, -1, np.int16))
        for place in range(layout.stops[state]):
            self._offer_segment(state, place, own)
        for row, part in zip(layout.rows[state], parts, strict=True):
            if row.missing:
                handed = Part(self._moved(own, row.missing), own.needs + row.missing, own.at_need)
                self._close(handed)
                _lower(part, handed)
        self.parts[state] = parts

    def _start(self, state: int) -> Start:
        costs = self.layout.costs
        stops = self.layout.ends[state][: self.layout.stops[state]]
        live, steps = costs.live[state], range(state, stops[-1])
        beside = [costs.forward[k] + costs.bytes_of(costs.live[k] - live) for k in steps]
        places = np.array(stops) - state - 1
        return Start(
            np.cumsum(self.seconds[state : stops[-1]])[places],
            np.maximum.accumulate(np.array(beside, np.int64))[places],
            np.array([*(costs.gradients[end] for end in self.layout.ends[state]), 0], np.int64),
        )

    def _keep(self, step: int, row: Row) -> Part:
        """Returns the part of a state's row when its step is kept."""
        costs = self.layout.costs
        count = len(self.layout.ends[step])
        rest = _last(self.parts[step + 1][row.following], count)
        seconds = np.full(count + 1, self.seconds[step], self.type)
        seconds[0], seconds[-1] = self.until_saved[step], 0
        values = np.zeros((count + 1, len(self.amounts)), self.type)
        values[1:] = self._moved(rest, row.grown)
        values += seconds[:, None]
        needs = self.starts[-1].gradients + (costs.forward[step] + row.missing)
        needs[0] += costs.forward_until_saved[step] - costs.forward[step]
        backward = costs.gradients[step + 1] + costs.backward[step]
        np.maximum(needs, row.grown + backward, out=needs)
        np.maximum(needs[1:], row.grown + rest.needs, out=needs[1:])
        seconds[1:] += self._at(rest, needs[1:] - row.grown)
        part = Part(values, needs, seconds)
        self._close(part)
        return part

    def _offer_segment(self, start: int, place: int, part: Part) -> None:
        """Lowers the values of a state by what it costs to start with a segment."""
        layout = self.layout
        stop, row = layout.ends[start][place], layout.after[start][place]
        seconds, through, gradients = self.starts[-1]
        rest = _last(self.parts[stop][row], len(part.needs) - place - 1)
        turn = Part(*(found[place : place + 1] for found in part))
        later = Part(*(found[place + 1 :] for found in part))
        again = self.type(seconds[place])
        offered = rest.values + (turn.values + again)
        offered[-1] = rest.values[-1] + turn.values[0]
        needs = np.maximum(rest.needs, turn.needs)
        moment = through[place] + gradients[place + 1 :]
        for late in np.flatnonzero(moment > needs):
            offered[late, : self.amounts.searchsorted(moment[late])] = np.inf
        np.maximum(needs, moment, out=needs)
        better = offered < later.values
        np.copyto(later.values, offered, where=better)
        np.copyto(self.choices[-1][place + 1 :], np.int16(place), where=better)
        lower = np.flatnonzero(needs <= later.needs)
        if lower.size:
            free = needs[lower]
            at_need = self._at(_entries(rest, lower), free) + self._at(turn, free)
            at_need += np.where(lower < len(needs) - 1, again, 0)
            less = (free < later.needs[lower]) | (at_need < later.at_need[lower])
            later.needs[lower[less]], later.at_need[lower[less]] = free[less], at_need[less]

    def _at(self, part: Part, free: Bytes) -> Values:
        """Returns the seconds of each entry (or the only one) with so much memory, enough for it."""
        entry = np.arange(len(part.needs))  # one entry is meant for all
        upper = np.minimum(self.amounts.searchsorted(free), len(self.amounts) - 1)
        lower = np.maximum(upper - 1, 0)
        above, below = part.values[entry, upper], part.values[entry, lower]
        start = np.maximum(self.amounts[lower], part.needs)
        below = np.where(self.amounts[lower] < part.needs, part.at_need, below)
        share = (self.amounts[upper] - free) / np.maximum(self.amounts[upper] - start, 1)
        share = np.clip(share, 0, 1)
        with np.errstate(invalid="ignore"):
            below = np.where(share > 0, share * below, 0)
            above = np.where(share < 1, (1 - share) * above, 0)
        return np.asarray(below + above, self.type)

    def _moved(self, part: Part, paid: int) -> Values:
        """Returns the values for those who have yet to pay so many bytes."""
        if not paid:
            return part.values.copy()
        amounts = self.amounts
        left = amounts - paid
        upper = amounts.searchsorted(left)
        lower = np.maximum(upper - 1, 0)
        share = (amounts[upper] - left) / np.maximum(amounts[upper] - amounts[lower], 1)
        lower[share == 0] = upper[share == 0]
        share = share.astype(self.type)
        moved = np.take(part.values, upper, axis=1)
        if share.any():
            # infinity times zero: below what is needed, where the caller shuts what comes out
            with np.errstate(invalid="ignore"):
                moved *= 1 - share
                moved += np.take(part.values, lower, axis=1) * share
            # where there is an upper neighbor but no lower one, what is needed stands in for it
            first = amounts.searchsorted(part.needs)
            place = upper.searchsorted(first)
            found = np.flatnonzero(place < len(amounts))
            found = found[
                (upper[place[found]] == first[found]) & (left[place[found]] >= part.needs[found])
            ]
            moved[found, place[found]] = self._at(_entries(part, found), left[place[found]])
        moved[:, left < 0] = np.inf
        return moved

    def _close(self, part: Part) -> None:
        """Shuts the amounts that are less than what is needed."""
        first = self.amounts.searchsorted(part.needs)
        part.values[np.arange(len(self.amounts)) < first[:, None]] = np.inf


def _entries(part: Part, entries: NDArray[np.intp]) -> Part:
    return Part(*(found[entries] for found in part))


def _last(part: Part, count: int) -> Part:
    return Part(*(found[-count:] for found in part))


def _lower(part: Part, other: Part) -> None:
    """Takes what is better of another part into a part."""
    np.minimum(part.values, other.values, out=part.values)
    same = (other.needs == part.needs) & (other.at_need < part.at_need)
    less = same | (other.needs < part.needs)
    np.copyto(part.needs, other.needs, where=less)
    np.copyto(part.at_need, other.at_need, where=less)


class _Trace:
    """Follows the values of a grid with exact bytes.

    Ends are numbered from the last, the first run's being -1, so that a number means the same end
    at every state.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.layout = grid.layout
        self.costs = grid.layout.costs
        self.amounts: list[int] = grid.amounts.tolist()

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
        part = self.grid.parts[state][number]
        need = int(part.needs[end])
        if free < need:
            return np.inf
        upper = bisect.bisect_left(self.amounts, free)
        values = part.values[end]
        if upper >= len(self.amounts):
            return float(values[-1])
        above, amount = float(values[upper]), self.amounts[upper]
        if amount == free:
            return above
        lower = self.amounts[upper - 1]
        below = float(values[upper - 1])
        if lower < need:
            lower, below = need, float(part.at_need[end])
        return above + (below - above) * ((amount - free) / (amount - lower))

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
        level = max(bisect.bisect_right(self.amounts, free) - 1, 0)
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
        seconds, through, _ = self.grid.starts[start]
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
