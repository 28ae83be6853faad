"""Optimal plans: least seconds of recomputation for every budget, by dynamic programming.

V(i, t, H, m) is the least for the rest of a run that has come to state i and ends at state t, while
H of the storages in live(i) are held and m bytes are free. The run is the recomputation of a
segment that ends at t, with its backwards, or the original forward. F(i, t, m) is V where all of
live(i) is held: the recomputation and the backwards of the segment [i, t).

    keep step i      seconds(i) + V(i + 1, t, H', m - bytes(saved(i) - H))
    hold the state   F(i, t, m - bytes(live(i) - H)), where a segment can start
    cut [i, j)       seconds(i ... j - 1) + F(i, j, m) + V(j, t, live(i) & live(j), m)

V is the least of these for which the bytes of the moment fit in m. In the forward nothing is
recomputed, and those seconds are 0. The last step of a recomputation stops early. A recomputation
that ends with a segment is not considered: it hands that one over without running it, and with the
items of the segment in its place it does the same work in no more memory.

Bytes are exact where they decide whether something fits: `needs` holds the least m of each entry,
`at_need` the seconds there. Other seconds are known at given amounts, closer together where they
are small, and interpolated between. To round bytes instead would waste a large part of the budget
on a hundred small items rounded up, or make some of them free, and those get chosen. Where the
amounts are all integers nothing is interpolated, and the values are exact.

Plans are traced from the values for some hundreds of budgets and simulated; the best are kept.

Source: the recurrence of rotor (Beaumont et al. 2019, arXiv:1911.13214), here for tuple states with
shared storages and early stop.
"""

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zoo.errors import Interrupted
from zoo.planner.costs import Simulation, StepCosts, simulate
from zoo.planner.plan import DEEPEST, Item, Plan
from zoo.planner.search_space import Row, SearchSpace

ENTRIES = 2 * 10**8  # values in a table
Seconds = NDArray[Any]
Bytes = NDArray[np.int64]
# yields items, and may show how many of them are done, by what they are
Each = Callable[[str, Collection[Any]], Iterable[Any]]


def _silently(_: str, items: Collection[Any]) -> Iterable[Any]:
    return items


class Point(NamedTuple):
    """A plan, the peak bytes of its activations, and the seconds of its recomputation."""

    peak: int
    recomputed_seconds: float
    plan: Plan


def frontier(
    costs: StepCosts,
    *,
    levels: int | None = 500,
    cuts: Collection[int] | None = None,
    each: Each = _silently,
) -> list[Point]:
    """Returns the best plans, by rising peak and falling seconds of recomputation.

    Of plans of equal peak and time, that of fewer operations is chosen.

    Args:
        costs: those of the chain.
        levels: amounts of memory for which the least time is known; None for each whole number of
            bytes, which makes the plans optimal and only suits small numbers, as in tests.
        cuts: states where long segments may begin and end; by default all in a short chain.
        each: shows progress.

    Raises:
        Interrupted: by Ctrl-C while plans are traced, with the best of those that were.
    """
    space = SearchSpace(costs, cuts)
    keep_all = Plan.keep_all(len(costs))
    baseline = simulate(keep_all, costs).peak
    if levels is None:
        table = DPTable(space, np.arange(baseline + 1), exact=True, each=each)
        budgets = table.budgets()
    else:
        entries = sum(len(rows) * space.columns(k) for k, rows in enumerate(space.rows))
        table = DPTable(
            space, _amounts(0, baseline, min(levels, max(50, ENTRIES // entries))), each=each
        )
        plans = max(160, min(400, 40_000 // max(len(costs), 1)))
        budgets = _amounts(min(table.least, baseline), baseline, plans).tolist()
    found = {keep_all: simulate(keep_all, costs)}
    try:
        for plan in map(table.plan, each("plans for budgets", budgets)):
            if plan not in found:
                found[plan] = simulate(plan, costs)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", _best(found)) from None
    return _best(found)


def _best(plans: Mapping[Plan, Simulation]) -> list[Point]:
    """Returns the plans that no other is better than, by rising peak."""
    candidates = [
        (result.peak, result.recomputed_seconds, result.recomputed_flops, plan)
        for plan, result in plans.items()
    ]
    points: list[Point] = []
    for peak, seconds, _, plan in sorted(candidates, key=lambda entry: entry[:3]):
        if not points or seconds < points[-1].recomputed_seconds:
            points.append(Point(peak, seconds, plan))
    return points


def least(costs: StepCosts) -> Plan:
    """Returns the plan of least peak, in a fraction of the time of `frontier`.

    Whether something fits is known to the byte at any number of levels.
    """
    baseline = simulate(Plan.keep_all(len(costs)), costs).peak
    table = DPTable(SearchSpace(costs), np.unique(np.array([0, baseline], np.int64)))
    return table.plan(min(table.least, baseline))


def _amounts(first: int, last: int, count: int) -> Bytes:
    """Returns whole numbers between two, both included, closer together where they are small."""
    amounts = np.ceil(np.linspace(first**0.5, last**0.5, count) ** 2).astype(np.int64)
    return np.unique(np.clip([first, *amounts, last], first, last))


class Values(NamedTuple):
    """V for one row of a state and every end.

    seconds: (ends, amounts), infinite where an amount of free memory does not suffice.
    needs: the least memory that suffices.
    at_need: seconds with just that.
    """

    seconds: Seconds
    needs: Bytes
    at_need: Seconds

    def of(self, ends: slice | NDArray[np.intp]) -> "Values":
        """Returns the values of some ends."""
        return Values(self.seconds[ends], self.needs[ends], self.at_need[ends])


class DPTable:
    """V of a chain at some amounts of free memory, the first of which is 0.

    Time is cubic and memory quadratic in the number of cuts, both linear in the amounts. Of the
    choices that led to a value only the best end of a segment is stored; tracing back a plan
    compares the choices anew, with exact bytes.
    """

    def __init__(
        self, space: SearchSpace, amounts: Bytes, exact: bool = False, each: Each = _silently
    ) -> None:
        self.space, self.costs, self.amounts = space, space.costs, amounts
        self.type = np.float64 if exact else np.float32
        costs = self.costs
        # operations break ties between plans of equal times
        weight = 1e-9 * (sum(costs.seconds) or 1.0) / (sum(costs.flops) or 1)
        self.seconds = np.array(costs.seconds) + weight * np.array(costs.flops, np.float64)
        self.until_saved = np.array(costs.seconds_until_saved) + weight * np.array(
            costs.flops_until_saved, np.float64
        )
        # there is no gradient at the end of the forward
        self.gradients = (*costs.gradients, 0)
        self.runs = [self._runs_from(state) for state in range(len(costs))]
        self.choices = [np.empty((0, 0), np.int16)] * len(costs)
        done = np.zeros((1, len(amounts)), self.type)
        end = Values(done, np.zeros(1, np.int64), np.zeros(1, self.type))
        self.values = [[end] * len(rows) for rows in space.rows]
        for state in each("states", range(len(costs))[::-1]):
            self._solve(state)
        self.amount_list: list[int] = amounts.tolist()

    @property
    def least(self) -> int:
        """The least peak of all plans, in bytes."""
        return int(self.values[0][0].needs[-1])

    def budgets(self) -> list[int]:
        """Returns the amounts at which the least time falls, rising."""
        whole = self.values[0][0].seconds[-1]
        lower = np.flatnonzero(whole[1:] < whole[:-1]) + 1
        return [int(amount) for amount in self.amounts[lower]]

    def plan(self, budget: int) -> Plan:
        """Returns the plan that the values lead to from a budget of at least `least` bytes.

        Where it would nest deeper than `DEEPEST`, the innermost segments are not divided further:
        the plan then takes more, as its simulation shows.
        """
        return Plan(tuple(self._items(0, 0, self.space.forward, budget)))

    def _runs_from(self, state: int) -> list[tuple[float, int]]:
        """Returns for each stop the seconds until it and the most bytes beside the state."""
        costs, live = self.costs, self.costs.live[state]
        index = np.array([stop for stop, _ in self.space.stops[state]]) - state - 1
        steps = range(state, state + 1 + int(index[-1]))
        beside = [costs.forward[k] + costs.bytes_of(costs.live[k] - live) for k in steps]
        seconds = np.cumsum(self.seconds[steps.start : steps.stop])[index]
        through = np.maximum.accumulate(np.array(beside, np.int64))[index]
        return list(zip(seconds.tolist(), through.tolist(), strict=True))

    def _solve(self, state: int) -> None:
        ends = self.space.ends(state)
        gradients = np.array([self.gradients[end] for end in ends], np.int64)
        recomputes = np.array([end != self.space.forward for end in ends])
        rows = self.space.rows[state]
        of_rows = [self._keep(state, row, gradients) for row in rows]
        own = of_rows[self.space.own[state]]
        self.choices[state] = np.full(own.seconds.shape, -1, np.int16)
        for number in range(len(self.space.stops[state])):
            self._offer_segment(state, number, own, gradients, recomputes)
        for row, values in zip(rows, of_rows, strict=True):
            if row.missing:
                # the rest of the state may be held first
                seconds = self._paid(own, row.missing)
                held = self._closed(Values(seconds, own.needs + row.missing, own.at_need))
                np.minimum(values.seconds, held.seconds, out=values.seconds)
                _lower_needs(values, np.arange(len(ends)), held.needs, held.at_need)
        self.values[state] = of_rows

    def _keep(self, step: int, row: Row, gradients: Bytes) -> Values:
        """Returns the values of a state's row when its step is kept."""
        costs, space = self.costs, self.space
        last = space.column(step, step + 1)
        seconds = np.full(len(gradients), self.seconds[step], self.type)
        seconds[last], seconds[-1] = self.until_saved[step], 0
        needs = gradients + (costs.forward[step] + row.missing)
        needs[last] += costs.forward_until_saved[step] - costs.forward[step]
        np.maximum(needs, row.grown + costs.gradients[step + 1] + costs.backward[step], out=needs)
        zeros = np.zeros((len(seconds), len(self.amounts)), self.type)
        values = Values(zeros, needs, seconds.copy())
        following = self.values[step + 1][row.following]
        for here, there in space.later(step, step + 1):
            rest = following.of(there)
            np.maximum(needs[here], row.grown + rest.needs, out=needs[here])
            values.seconds[here] = self._paid(rest, row.grown)
            values.at_need[here] += self._at(rest, needs[here] - row.grown)
        values.seconds[:] += seconds[:, None]
        return self._closed(values)

    def _offer_segment(
        self, start: int, number: int, own: Values, gradients: Bytes, recomputes: NDArray[np.bool_]
    ) -> None:
        """Lowers the values of a state by what it costs to start with a segment."""
        stop, row = self.space.stops[start][number]
        run, through = self.runs[start][number]
        column = self.space.column(start, stop)
        turn = own.of(slice(column, column + 1))
        following = self.values[stop][row]
        for here, there in self.space.later(start, stop):
            rest, now = following.of(there), own.of(here)
            recomputation = (run * recomputes[here]).astype(self.type)
            moment = through + gradients[here]
            needs = np.maximum(rest.needs, turn.needs)
            seconds = rest.seconds + turn.seconds
            seconds += recomputation[:, None]
            for late in np.flatnonzero(moment > needs):
                seconds[late, : self.amounts.searchsorted(moment[late])] = np.inf
            better = seconds < now.seconds
            np.copyto(now.seconds, seconds, where=better)
            np.copyto(self.choices[start][here], np.int16(number), where=better)
            np.maximum(needs, moment, out=needs)
            lower = np.flatnonzero(needs <= now.needs)
            if lower.size:
                free = needs[lower]
                at_need = self._at(rest.of(lower), free) + self._at(turn, free)
                at_need += recomputation[lower]
                _lower_needs(now, lower, free, at_need)

    def _at(self, values: Values, free: Bytes) -> Seconds:
        """Returns the seconds of each end, or of the only one, with memory that suffices."""
        entry = np.arange(len(values.needs))
        upper = np.minimum(self.amounts.searchsorted(free), len(self.amounts) - 1)
        lower = np.maximum(upper - 1, 0)
        least = self.amounts[lower] < values.needs
        start = np.where(least, values.needs, self.amounts[lower])
        below = np.where(least, values.at_need, values.seconds[entry, lower])
        share = (self.amounts[upper] - free) / np.maximum(self.amounts[upper] - start, 1)
        # infinity times zero: above the last amount, or exactly at an amount
        with np.errstate(invalid="ignore"):
            below = np.where(share > 0, share * below, 0)
            above = np.where(share < 1, (1 - share) * values.seconds[entry, upper], 0)
        return np.asarray(below + above, self.type)

    def _paid(self, values: Values, paid: int) -> Seconds:
        """Returns the seconds at each amount less `paid` bytes, undefined if that is too little."""
        if not paid:
            return values.seconds.copy()
        left = self.amounts - paid
        upper = self.amounts.searchsorted(left)
        lower = np.maximum(upper - 1, 0)
        width = np.maximum(self.amounts[upper] - self.amounts[lower], 1)
        share = ((self.amounts[upper] - left) / width).astype(self.type)
        moved = np.take(values.seconds, upper, axis=1)
        if not share[left >= 0].any():
            return moved
        with np.errstate(invalid="ignore"):
            moved *= 1 - share
            moved += np.take(values.seconds, lower, axis=1) * share
        whole = share == 0
        moved[:, whole] = values.seconds[:, upper[whole]]
        # where a value has an upper neighbor but no lower one, the need takes its place
        first = self.amounts.searchsorted(values.needs)
        index = np.minimum(upper.searchsorted(first), len(left) - 1)
        ends = np.flatnonzero((upper[index] == first) & (left[index] >= values.needs))
        moved[ends, index[ends]] = self._at(values.of(ends), left[index[ends]])
        return moved

    def _closed(self, values: Values) -> Values:
        """Makes the seconds infinite at amounts below what is needed."""
        first = self.amounts.searchsorted(values.needs)
        values.seconds[np.arange(len(self.amounts)) < first[:, None]] = np.inf
        return values

    def _items(
        self, state: int, number: int, end: int, free: int, depth: int = 1
    ) -> Iterator[Item]:
        """Yields the items of a run from a state in one of its rows, its segments `depth` deep."""
        space = self.space
        while state < min(end, len(self.costs)):
            row = space.rows[state][number]
            keep = self._kept(state, end, row, free)
            left = free - row.missing
            cut, chosen = math.inf, -1
            if keep > self._value(state, space.own[state], end, left):
                cut, chosen = self._best_segment(state, end, left, keep)
            if keep <= cut:
                yield state
                state, number, free = state + 1, row.following, free - row.grown
            else:
                stop, after = space.stops[state][chosen]
                inner = self._items(state, space.own[state], stop, left, depth + 1)
                yield tuple(inner if depth < DEEPEST else range(state, stop))
                state, number, free = stop, after, left

    def _value(self, state: int, number: int, end: int, free: int) -> float:
        """Returns the seconds from a state on, infinite where something does not fit."""
        values, column = self.values[state][number], self.space.column(state, end)
        need = int(values.needs[column])
        if free < need:
            return math.inf
        upper = bisect.bisect_left(self.amount_list, free)
        seconds = values.seconds[column]
        if upper == len(self.amount_list):
            return float(seconds[-1])
        above, amount = float(seconds[upper]), self.amount_list[upper]
        if amount == free:
            return above
        lower, below = self.amount_list[upper - 1], float(seconds[upper - 1])
        if lower < need:
            lower, below = need, float(values.at_need[column])
        return above + (below - above) * ((amount - free) / (amount - lower))

    def _kept(self, step: int, end: int, row: Row, free: int) -> float:
        """Returns the seconds from a state on when its step is kept."""
        costs, rest = self.costs, free - row.grown
        last = step + 1 == end
        forward = costs.forward_until_saved[step] if last else costs.forward[step]
        beside = free - row.missing - self.gradients[end]
        if beside < forward or rest < costs.gradients[step + 1] + costs.backward[step]:
            return math.inf
        if last:
            return float(self.until_saved[step])
        seconds = 0.0 if end == self.space.forward else float(self.seconds[step])
        return seconds + self._value(step + 1, row.following, end, rest)

    def _best_segment(self, start: int, end: int, free: int, keep: float) -> tuple[float, int]:
        """Returns the least seconds from a state on when a segment starts there, and its stop.

        Candidates are the best stops of the amounts just below and above, or all where those do
        not fit and the step cannot be kept.
        """
        level = max(bisect.bisect_right(self.amount_list, free) - 1, 0)
        column = self.space.column(start, end)
        near = self.choices[start][column, level : level + 2].tolist()
        stops = sorted({number for number in near if number >= 0})
        best = min(
            ((self._segment(start, number, end, free), number) for number in stops),
            default=(math.inf, -1),
        )
        if min(best[0], keep) < math.inf:
            return best
        before = range(sum(stop < end for stop, _ in self.space.stops[start]))
        return min((self._segment(start, number, end, free), number) for number in before)

    def _segment(self, start: int, number: int, end: int, free: int) -> float:
        """Returns the seconds from a state on when the segment to a stop starts there."""
        stop, after = self.space.stops[start][number]
        seconds, through = self.runs[start][number]
        if free < through + self.gradients[end]:
            return math.inf
        recomputation = 0.0 if end == self.space.forward else seconds
        turn = self._value(start, self.space.own[start], stop, free)
        return recomputation + turn + self._value(stop, after, end, free)


def _lower_needs(values: Values, ends: NDArray[np.intp], needs: Bytes, seconds: Seconds) -> None:
    """Takes lower needs, and fewer seconds at equal needs, into the values of some ends."""
    same = (needs == values.needs[ends]) & (seconds < values.at_need[ends])
    less = same | (needs < values.needs[ends])
    values.needs[ends[less]] = needs[less]
    values.at_need[ends[less]] = seconds[less]
