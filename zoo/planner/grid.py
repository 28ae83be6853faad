"""Least seconds that must be run again, for every part of a chain and every amount of memory.

V(i, t, H, m) is the least for the rest of a run that has come to state i and ends at state t, while
H of the storages in live(i) are held and m bytes are free. The run is the second run of a segment
that ends at t, with its backwards, or the first run. F(i, t, m) is V where all of live(i) is held:
the whole turn of the segment [i, t).

    keep step i      seconds(i) + V(i + 1, t, H', m - bytes(saved(i) - H))
    hold the state   F(i, t, m - bytes(live(i) - H)), from where one can
    cut [i, j)       seconds(i ... j - 1) + F(i, j, m) + V(j, t, live(i) & live(j), m)

The least of these for which the bytes of the moment fit in what is free. In the first run nothing
is run again, and those seconds are 0. A step that is the last of a second run stops early. A second
run that ends with a segment is not looked at: it hands that one over without running it, and with
the segment's items in its place it does the same work in no more memory.

Bytes are exact where they decide whether something fits: `needs` holds the least m of each entry,
`at_need` the seconds there. Other seconds are known at given amounts, closer together where they
are small, and interpolated between. Rounding instead would not do: a hundred small items rounded up
waste a large part of the budget, and rounded to the nearest some are free, and those get chosen.
Where the amounts are all integers nothing is interpolated, and the values are exact.

Source: the recurrence of rotor (Beaumont et al. 2019, arXiv:1911.13214), here for tuple states with
shared storages and early stop.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zoo.planner.layout import Layout, Row

Seconds = NDArray[Any]
Bytes = NDArray[np.int64]


class Part(NamedTuple):
    """V for one row of a state, with an entry for every end.

    values: seconds for each amount of free memory, infinite where it does not suffice.
    needs: the least memory that suffices.
    at_need: seconds with just that.
    """

    values: Seconds
    needs: Bytes
    at_need: Seconds

    def block(self, entries: slice | NDArray[np.intp]) -> "Part":
        """Returns some of the entries."""
        return Part(self.values[entries], self.needs[entries], self.at_need[entries])


class Start(NamedTuple):
    """What it takes to run from a state to each stop: seconds, and most bytes beside the state.

    gradients: bytes of the gradient in hand for each end; in the first run there is none.
    second_run: for each end, 1; for the first run 0.
    """

    seconds: NDArray[np.float64]
    through: Bytes
    gradients: Bytes
    second_run: NDArray[np.int8]


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
        self.starts = [self._start(state) for state in range(len(costs))]
        self.choices = [np.empty((0, 0), np.int16)] * len(costs)
        done = np.zeros((1, len(amounts)), self.type)
        end = Part(done, np.zeros(1, np.int64), np.zeros(1, self.type))
        self.parts = [[end] * len(place.rows) for place in layout.places]
        for state in reversed(range(len(costs))):
            self._solve(state)

    @property
    def least(self) -> int:
        """The least peak of all plans, in bytes."""
        return int(self.parts[0][0].needs[-1])

    def budgets(self) -> list[int]:
        """Returns the amounts from which on less time is needed, rising."""
        whole = self.parts[0][0].values[-1]
        lower = np.flatnonzero(whole[1:] < whole[:-1]) + 1
        return [int(amount) for amount in self.amounts[lower]]

    def _start(self, state: int) -> Start:
        costs, stops = self.layout.costs, self.layout.places[state].stops
        live, steps = costs.live[state], range(state, stops[-1])
        beside = [costs.forward[k] + costs.bytes_of(costs.live[k] - live) for k in steps]
        index = np.array(stops) - state - 1
        ends = self.layout.ends(state)[:-1]
        return Start(
            np.cumsum(self.seconds[state : stops[-1]])[index],
            np.maximum.accumulate(np.array(beside, np.int64))[index],
            np.array([*(costs.gradients[end] for end in ends), 0], np.int64),
            np.array([1] * len(ends) + [0], np.int8),
        )

    def _solve(self, state: int) -> None:
        place = self.layout.places[state]
        parts = [self._keep(state, row) for row in place.rows]
        own = parts[place.own]
        self.choices[state] = np.full(own.values.shape, -1, np.int16)
        for number in range(len(place.stops)):
            self._offer_segment(state, number, own)
        for row, part in zip(place.rows, parts, strict=True):
            if row.missing:
                _lower(part, self._paid(own, row.missing))
        self.parts[state] = parts

    def _keep(self, step: int, row: Row) -> Part:
        """Returns the part of a state's row when its step is kept."""
        costs, layout = self.layout.costs, self.layout
        last = layout.column(step, step + 1)
        seconds = np.full(layout.places[step].columns, self.seconds[step], self.type)
        seconds[last], seconds[-1] = self.until_saved[step], 0
        needs = self.starts[step].gradients + (costs.forward[step] + row.missing)
        needs[last] += costs.forward_until_saved[step] - costs.forward[step]
        np.maximum(needs, row.grown + costs.gradients[step + 1] + costs.backward[step], out=needs)
        values = np.zeros((len(seconds), len(self.amounts)), self.type)
        part = Part(values, needs, seconds.copy())
        following = self.parts[step + 1][row.following]
        for here, there in layout.later(step, step + 1):
            rest = following.block(there)
            np.maximum(needs[here], row.grown + rest.needs, out=needs[here])
            values[here] = self._moved(rest, row.grown)
            part.at_need[here] += self._at(rest, needs[here] - row.grown)
        values += seconds[:, None]
        self._close(part)
        return part

    def _offer_segment(self, start: int, number: int, part: Part) -> None:
        """Lowers the values of a state by what it costs to start with a segment."""
        layout, way = self.layout, self.starts[start]
        stop = layout.places[start].stops[number]
        column = layout.column(start, stop)
        turn = part.block(slice(column, column + 1))
        following = self.parts[stop][layout.places[start].after[number]]
        for here, there in layout.later(start, stop):
            rest, now = following.block(there), part.block(here)
            again = (way.seconds[number] * way.second_run[here]).astype(self.type)
            moment = way.through[number] + way.gradients[here]
            needs = np.maximum(rest.needs, turn.needs)
            values = rest.values + turn.values
            values += again[:, None]
            for late in np.flatnonzero(moment > needs):
                values[late, : self.amounts.searchsorted(moment[late])] = np.inf
            better = values < now.values
            np.copyto(now.values, values, where=better)
            np.copyto(self.choices[start][here], np.int16(number), where=better)
            np.maximum(needs, moment, out=needs)
            lower = np.flatnonzero(needs <= now.needs)
            if lower.size:
                free = needs[lower]
                seconds = self._at(rest.block(lower), free) + self._at(turn, free) + again[lower]
                _lower_needs(now, lower, free, seconds)

    def _paid(self, part: Part, paid: int) -> Part:
        """Returns a part for those who have yet to pay so many bytes."""
        found = Part(self._moved(part, paid), part.needs + paid, part.at_need)
        self._close(found)
        return found

    def _at(self, part: Part, free: Bytes) -> Seconds:
        """Returns the seconds of each entry, or of the only one, with memory that suffices."""
        entry = np.arange(len(part.needs))
        upper = np.minimum(self.amounts.searchsorted(free), len(self.amounts) - 1)
        lower = np.maximum(upper - 1, 0)
        least = self.amounts[lower] < part.needs
        start = np.where(least, part.needs, self.amounts[lower])
        below = np.where(least, part.at_need, part.values[entry, lower])
        share = (self.amounts[upper] - free) / np.maximum(self.amounts[upper] - start, 1)
        # infinity times zero: above the last amount, or exactly at an amount
        with np.errstate(invalid="ignore"):
            below = np.where(share > 0, share * below, 0)
            above = np.where(share < 1, (1 - share) * part.values[entry, upper], 0)
        return np.asarray(below + above, self.type)

    def _moved(self, part: Part, paid: int) -> Seconds:
        """Returns the values for those who have yet to pay so many bytes.

        They mean nothing where the memory does not suffice: the caller closes these.
        """
        if not paid:
            return part.values.copy()
        left = self.amounts - paid
        upper = self.amounts.searchsorted(left)
        lower = np.maximum(upper - 1, 0)
        width = np.maximum(self.amounts[upper] - self.amounts[lower], 1)
        share = ((self.amounts[upper] - left) / width).astype(self.type)
        moved = np.take(part.values, upper, axis=1)
        if not share[left >= 0].any():
            return moved
        with np.errstate(invalid="ignore"):
            moved *= 1 - share
            moved += np.take(part.values, lower, axis=1) * share
        whole = share == 0
        moved[:, whole] = part.values[:, upper[whole]]
        # where a value has an upper neighbor but no lower one, what is needed stands in for it
        first = self.amounts.searchsorted(part.needs)
        index = np.minimum(upper.searchsorted(first), len(left) - 1)
        found = np.flatnonzero((upper[index] == first) & (left[index] >= part.needs))
        moved[found, index[found]] = self._at(part.block(found), left[index[found]])
        return moved

    def _close(self, part: Part) -> None:
        """Shuts the amounts that are less than what is needed."""
        first = self.amounts.searchsorted(part.needs)
        part.values[np.arange(len(self.amounts)) < first[:, None]] = np.inf


def _lower(part: Part, other: Part) -> None:
    """Takes what is better of another part into a part."""
    np.minimum(part.values, other.values, out=part.values)
    _lower_needs(part, np.arange(len(part.needs)), other.needs, other.at_need)


def _lower_needs(part: Part, entries: NDArray[np.intp], needs: Bytes, seconds: Seconds) -> None:
    """Takes lower needs, and fewer seconds at equal needs, into some entries of a part."""
    same = (needs == part.needs[entries]) & (seconds < part.at_need[entries])
    less = same | (needs < part.needs[entries])
    part.needs[entries[less]] = needs[less]
    part.at_need[entries[less]] = seconds[less]


def _weighed(seconds: Sequence[float], flops: Sequence[int], weight: float) -> NDArray[np.float64]:
    return np.array(seconds, np.float64) + weight * np.array(flops, np.float64)
