"""Optimal plans: least seconds of recomputation for every budget, by dynamic programming.

V(i, t, H, m) is the least time for the rest of a run from state i to state t, while H of the
storages in live(i) are held and m bytes are free. The run is the recomputation of a segment that
ends at t, with its backwards, or the original forward. F(i, t, m) is V when all of live(i) is held:
the recomputation and the backwards of the segment [i, t).

    keep step i      seconds(i) + V(i + 1, t, H', m - bytes(saved(i) - H))
    hold the state   F(i, t, m - bytes(live(i) - H)), where a segment can start
    cut [i, j)       seconds(i ... j - 1) + F(i, j, m) + V(j, t, live(i) & live(j), m)

V is the minimum of the choices whose bytes fit in m. In the original forward nothing is recomputed,
and the seconds above are 0. The last step of a recomputation stops early. A recomputation that ends
with a segment is not considered: its items in place of the segment do the same work in no more
memory.

Outputs that the caller holds, and storages that only the forward holds, are not counted here. Here
each segment holds the whole state that it starts from until its backward is over, and recomputes
all of its steps. `simulate`, which judges the plans, counts what a segment needs of both.

Bytes are exact where they decide whether something fits: `needs` holds the least m of each entry,
`at_need` the seconds there. Other seconds are known at given amounts, which are denser where they
are small, and interpolated between. Rounding bytes instead would waste a large part of the budget
on a hundred small items rounded up; or items rounded down to nothing would always be chosen. If
the amounts are all integers nothing is interpolated, and the values are exact.

Equal layers are solved once: in a run of equal parts of p steps, each with `grown` bytes of
gradients more than the next one, V(i + p, t + p, H, m) is V(i, t, H, m + grown).

Plans are traced back from the values for 40 to 400 budgets (fewer for more steps), or for those
around one, and simulated; the best are kept.

Source: the recurrence of rotor (Beaumont et al. 2019, arXiv:1911.13214), here for tuple states with
shared storages and early stop.
"""

import bisect
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zoo.errors import Interrupted
from zoo.planner.costs import Simulation, StepCosts, simulate
from zoo.planner.least_memory import least_memory
from zoo.planner.plan import DEEPEST, Item, Plan, falling
from zoo.planner.search_space import Entries, SearchSpace, StateRow, search_spaces

VALUES = 5 * 10**7  # the most in a table, unless that leaves fewer than `FEW` amounts
FEW = 100
BESIDE = 8  # plans that are traced back on either side of one
LONGEST = 1000  # the most steps for which `least_memory` is as fast as a table
AT_ONCE = 2**18  # values of segments that are compared at once
PAYMENTS = 4096  # the size of the cache of `_around`
NEVER = 1e30  # seconds of what does not fit; a sum of a few is finite
NO_BYTES = 2**60
Seconds = NDArray[Any]
Bytes = NDArray[np.int64]
# yields items, and may show their name and how many are done
Each = Callable[[str, Collection[Any]], Iterable[Any]]


class SimulatedPlan(NamedTuple):
    """A plan and its costs."""

    plan: Plan
    result: Simulation

    @property
    def peak(self) -> int:
        """The peak bytes of its activations."""
        return self.result.peak

    @property
    def recomputed_seconds(self) -> float:
        """The seconds of its recomputation."""
        return self.result.recomputed_seconds


def frontier(
    costs: StepCosts,
    *,
    levels: int | None = 500,
    cuts: Collection[int] | None = None,
    each: Each = lambda _, items: items,
) -> list[SimulatedPlan]:
    """Returns the best plans, by rising peak and falling seconds of recomputation.

    Arguments and errors are those of `PlanSearch` and its `all`.
    """
    return PlanSearch(costs, levels=levels, cuts=cuts, each=each).all()


class PlanSearch:
    """The best plans of some steps; each is traced back when it is asked for.

    Of plans with equal peak and time, the one with the fewest operations is chosen.

    Args:
        levels: amounts of memory for which the least time is computed; None for every number of
            bytes, which makes the plans optimal but only suits small numbers, as in tests.
        cuts: states where long segments may begin and end; by default all of a few steps.
        each: shows progress.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        levels: int | None = 500,
        cuts: Collection[int] | None = None,
        each: Each = lambda _, items: items,
    ) -> None:
        self.costs, self.levels, self.each = costs, levels, each
        keep_all = Plan.keep_all(len(costs))
        # those of other tables, and of any ends
        self._others = {plan: simulate(plan, costs) for plan in (keep_all, *_of_any_ends(costs))}
        self._baseline = self._others[keep_all].peak
        self._table: DPTable | None = None
        self._budgets: list[int] = []
        self._traced: dict[int, SimulatedPlan] = {}  # by the number of the budget
        for space in search_spaces(costs) if cuts is None else [SearchSpace(costs, cuts)]:
            if self._table is not None:
                # two tables would take twice the memory
                self._others |= dict(self.all())
                self._traced, self._table = {}, None
            self._table = self._table_of(space)

    def _table_of(self, space: SearchSpace) -> "DPTable":
        """Solves a search space, and chooses the budgets of its plans."""
        most, each = self._baseline, self.each
        if self.levels is None:
            table = DPTable(space, np.arange(most + 1), exact=True, each=each)
            budgets = table.budgets()
        else:
            count = min(self.levels, max(FEW, VALUES // Entries(space).count))
            table = DPTable(space, _amounts(0, most, count), each=each)
            budgets = _amounts(min(table.least, most), most, _count_of_plans(len(self.costs)))
        self._budgets = budgets.tolist()
        return table

    def all(self) -> list[SimulatedPlan]:
        """Returns the best plans, by rising peak and falling seconds of recomputation.

        Raises:
            Interrupted: by Ctrl-C, with the best of those found so far.
        """
        return self._found(self.each("plans for budgets", range(len(self._budgets))))

    def around(self, fits: Callable[[SimulatedPlan], bool]) -> list[SimulatedPlan]:
        """Returns the best plans found so far, after a look where the last one that fits is.

        `fits` holds for low peaks. Of plans near that one, some may be better.

        Raises:
            Interrupted: as `all` does.
        """

        def numbers() -> Iterator[int]:
            low, high = 0, len(self._budgets)
            while low < high:
                middle = (low + high) // 2
                yield middle
                low, high = (middle + 1, high) if fits(self._traced[middle]) else (low, middle)
            near = range(max(low - BESIDE, 0), min(low + BESIDE, len(self._budgets)))
            yield from self.each("plans for budgets", near)

        return self._found(numbers())

    def _found(self, numbers: Iterable[int]) -> list[SimulatedPlan]:
        assert self._table is not None, "there is a search space at least"
        try:
            for number in numbers:
                if number not in self._traced:
                    plan = self._table.plan(self._budgets[number])
                    self._traced[number] = SimulatedPlan(plan, simulate(plan, self.costs))
        except KeyboardInterrupt:
            raise Interrupted("interrupted", self._best()) from None
        return self._best()

    def _best(self) -> list[SimulatedPlan]:
        order = attrgetter("peak", "recomputed_seconds", "result.recomputed_flops")
        plans = {**self._others, **dict(self._traced.values())}
        return falling(
            starmap(SimulatedPlan, plans.items()), order, attrgetter("recomputed_seconds")
        )


def least(costs: StepCosts) -> Plan:
    """Returns the plan of least peak, in a fraction of the time of `frontier`.

    Whether something fits is exact at any number of levels.
    """
    baseline = simulate(Plan.keep_all(len(costs)), costs).peak
    tables = (DPTable(space, _amounts(0, baseline, 2)) for space in search_spaces(costs))
    plans = [table.plan(min(table.least, baseline)) for table in tables]
    return min([*plans, *_of_any_ends(costs)], key=lambda plan: simulate(plan, costs).peak)


def _of_any_ends(costs: StepCosts) -> list[Plan]:
    """Returns a plan whose long segments begin and end anywhere, not at cuts; none if too long."""
    return [least_memory(costs)] if len(costs) <= LONGEST else []


def _count_of_plans(steps: int) -> int:
    """Returns for how many budgets plans are traced back."""
    steps = max(steps, 1)
    return max(min(400, 100_000 // steps), min(160, 160_000 // steps), 40)


def _amounts(first: int, last: int, count: int) -> Bytes:
    """Returns integers from `first` to `last`, both included, denser where they are small."""
    amounts = np.ceil(np.linspace(first**0.5, last**0.5, count) ** 2).astype(np.int64)
    return np.unique(np.clip([first, *amounts, last], first, last))


def _around(amounts: Bytes, dtype: type, paid: int) -> tuple[Bytes, Bytes, Seconds]:
    """Returns the amounts around each amount less `paid` bytes, and the share of the lower one."""
    left = amounts - paid
    upper = np.minimum(amounts.searchsorted(left), len(left) - 1)
    lower = np.maximum(upper - 1, 0)
    width = np.maximum(amounts[upper] - amounts[lower], 1)
    share = np.clip((amounts[upper] - left) / width, 0, 1)
    return lower, upper, share.astype(dtype)


class Values(NamedTuple):
    """V for some entries."""

    seconds: Seconds  # (..., entries, amounts), `NEVER` if so much free memory does not suffice
    needs: Bytes  # the least memory that suffices
    at_need: Seconds  # the seconds with just that

    def of(self, entries: slice) -> "Values":
        """Returns views of the values of some entries."""
        return Values(*(values[entries] for values in self))

    def lower_needs(self, needs: Bytes, seconds: Seconds) -> None:
        """Takes lower needs, and fewer seconds at equal needs."""
        less = (needs < self.needs) | ((needs == self.needs) & (seconds < self.at_need))
        self.needs[less], self.at_need[less] = needs[less], seconds[less]


class SegmentCosts(NamedTuple):
    """The costs of the segments that begin at a state, by the state where they stop."""

    stops: Bytes  # the states, rising
    rows: Bytes  # the numbers of the rows there
    seconds: NDArray[np.float64]  # until the stop
    through: Bytes  # peak bytes above the state until the stop


class DPTable:
    """V of all steps at some amounts of free memory, the first of which is 0.

    Time is cubic and memory quadratic in the number of cuts, both linear in the amounts. Only the
    best end of a segment is stored with a value; tracing back a plan compares the choices again,
    with exact bytes.
    """

    def __init__(
        self,
        space: SearchSpace,
        amounts: Bytes,
        *,
        exact: bool = False,
        each: Each = lambda _, items: items,
    ) -> None:
        self.space, self.costs, self.amounts = space, space.costs, amounts
        self.type = np.float64 if exact else np.float32
        costs = self.costs
        # operations break ties between plans of equal time
        weight = 1e-9 * (sum(costs.seconds) or 1.0) / (sum(costs.flops) or 1)
        self.seconds = np.array(costs.seconds) + weight * np.array(costs.flops)
        tie_break = weight * np.array(costs.flops_until_saved)
        self.until_saved = np.array(costs.seconds_until_saved) + tie_break
        # at the end of the forward there is no gradient
        self.gradients = np.array([*costs.gradients, 0], np.int64)
        self.segments = list(self._segments())
        self.entries = entries = Entries(space)
        self.levels = np.arange(len(amounts))
        # a cached method would hold the table in a reference cycle
        self.around = functools.lru_cache(PAYMENTS)(functools.partial(_around, amounts, self.type))
        seconds = np.full((entries.count, len(amounts)), NEVER, self.type)
        needs = np.full(entries.count, NO_BYTES, np.int64)
        self.values = Values(seconds, needs, np.full(entries.count, NEVER, self.type))
        self.choices = np.full((entries.own_count, len(amounts)), -1, np.int16)
        self.whole, _, _ = entries.locate(0, 0, space.forward)  # the entry of all plans
        end, _, _ = entries.locate(len(costs), 0, space.forward)
        for array in self.values:
            array[end:] = 0
        for state, low, high in each("searching plans", list(entries.in_order())):
            ends = entries.ends(state, low, high)
            if ends.size:
                self._solve(state, ends)
        self.amount_list: list[int] = amounts.tolist()

    @property
    def least(self) -> int:
        """The least peak of all plans, in bytes."""
        return self.values.needs.item(self.whole)

    def budgets(self) -> Bytes:
        """Returns the amounts at which the least time falls, rising."""
        seconds = self.values.seconds[self.whole]
        budgets: Bytes = self.amounts[1:][seconds[1:] < seconds[:-1]]
        return budgets

    def plan(self, budget: int) -> Plan:
        """Traces back the plan for a budget of at least `least` bytes.

        If it would nest deeper than `DEEPEST`, the innermost segments are not divided further, and
        the plan takes more, as its simulation shows.
        """
        return Plan(tuple(self._items(0, 0, self.space.forward, budget)))

    def _segments(self) -> Iterator[SegmentCosts]:
        costs = self.costs
        sizes = np.array([costs.bytes_of(live) for live in costs.live[:-1]], np.int64)
        worked = sizes + np.array(costs.forward, np.int64)
        last = costs.last_states()
        for state, stops in enumerate(self.space.stops[:-1]):
            ends, rows = np.array(stops, np.int64).T
            beside = worked[state : stops[-1][0]].copy()
            for storage in costs.live[state]:
                beside[: last[storage] + 1 - state] -= costs.sizes[storage]
            index = ends - state - 1
            seconds = np.cumsum(self.seconds[state : stops[-1][0]])[index]
            yield SegmentCosts(ends, rows, seconds, np.maximum.accumulate(beside)[index])

    def _solve(self, state: int, ends: Bytes) -> None:
        """Finds the values of a state in all of its rows for successive ends."""
        rows, spans = self.space.rows[state], []
        # rows by the additional bytes that are held when the step is kept
        by_growth: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            first, own_first, _ = self.entries.locate(state, number, ends.item(0))
            spans.append(slice(first, first + len(ends)))
            by_growth.setdefault(row.grown, []).append(number)
        for numbers in by_growth.values():
            self._keep(state, numbers, ends)
        number = self.space.own[state]
        own = self.values.of(spans[number])
        choices = self.choices[own_first : own_first + len(ends)]
        for part in self._parts(state, ends):
            last = self.segments[state].stops[part][-1]
            behind = slice(int(ends.searchsorted(last, "right")), None)
            if ends[behind].size:
                self._offer_segments(state, part, ends[behind], own.of(behind), choices[behind])
        # first, the rest of the state may be held
        entries = np.arange(spans[number].start, spans[number].stop)
        after = functools.cache(functools.partial(self._read, entries))
        for row, span in zip(rows, spans, strict=True):
            if row.missing:
                with_state, values = after(row.missing), self.values.of(span)
                np.minimum(values.seconds, with_state.seconds, out=values.seconds)
                values.lower_needs(with_state.needs, with_state.at_need)

    def _parts(self, state: int, ends: Bytes) -> Iterator[slice]:
        """Yields ranges of stops to offer at once: those in one copy, or a single end.

        The values of an end are final when all segments that stop before it have been offered.
        """
        entries, stops = self.entries, self.segments[state].stops
        before = int(stops.searchsorted(ends.item(0)))
        early = stops[:before]
        moved = np.where(entries.limit[early] >= ends.item(-1), entries.moved[early], 0)
        own = early <= entries.limit.item(state)
        edges = np.flatnonzero((moved[1:] != moved[:-1]) | (own[1:] != own[:-1])) + 1
        most = max(AT_ONCE // (len(ends) * len(self.amounts)), 1)
        for start, stop in pairwise([0, *edges.tolist(), before]):
            for first in range(start, stop, most):
                yield slice(first, min(first + most, stop))
        for number in range(before, int(stops.searchsorted(ends.item(-1)))):
            yield slice(number, number + 1)

    def _keep(self, step: int, numbers: list[int], ends: Bytes) -> None:
        """Fills the values of rows of a state with the costs of keeping its step.

        In all of these rows keeping the step holds the same additional bytes.
        """
        costs, entries, rows = self.costs, self.entries, self.space.rows[step]
        last = int(ends.item(0) == step + 1)
        grown = rows[numbers[0]].grown
        seconds = np.full(len(ends), self.seconds[step], self.type)
        forward = self.gradients[ends] + costs.forward[step]
        if last:
            seconds[0] = self.until_saved[step]
            forward[0] += costs.forward_until_saved[step] - costs.forward[step]
        if ends.item(-1) == self.space.forward:
            seconds[-1] = 0
        missing = np.array([rows[number].missing for number in numbers], np.int64)
        needs = forward + missing[:, None]
        np.maximum(needs, grown + costs.gradients[step + 1] + costs.backward[step], out=needs)
        values = Values(
            np.zeros((*needs.shape, len(self.amounts)), self.type),
            needs,
            np.zeros(needs.shape, self.type),
        )
        if len(ends) > last:
            after = np.array([rows[number].following for number in numbers])[:, None]
            following, more = entries.find(step + 1, after, ends[last:])
            rest = self._read(following, grown - more)
            np.maximum(needs[:, last:], rest.needs, out=needs[:, last:])
            values.seconds[:, last:] = rest.seconds
            values.at_need[:, last:] = self._at(following, needs[:, last:] - grown + more)
        values.seconds[:] += seconds[:, None]
        values.at_need[:] += seconds
        values.seconds[self.levels < self.amounts.searchsorted(needs)[..., None]] = NEVER
        positions, _ = entries.find(step, np.array(numbers)[:, None], ends)
        for array, new in zip(self.values, values, strict=True):
            array[positions] = new

    def _offer_segments(
        self, state: int, part: slice, ends: Bytes, own: Values, choices: NDArray[np.int16]
    ) -> None:
        """Lowers the values of a state to the costs of starting with one of some segments."""
        stops, rows, run, through = (values[part, None] for values in self.segments[state])
        after, more_after = self.entries.find(stops, rows, ends)
        inner_entries, more_inside = self.entries.find(state, self.space.own[state], stops)
        rest, inner = self._read(after, -more_after), self._read(inner_entries, -more_inside)
        # in the original forward nothing is recomputed
        recomputed = (run * (ends != self.space.forward)).astype(self.type)
        seconds = rest.seconds
        seconds += inner.seconds
        seconds += recomputed[..., None]
        moment = through + self.gradients[ends]
        needs = np.maximum(rest.needs, inner.needs)
        late = (moment > needs).nonzero()
        if late[0].size:
            some = seconds[late]
            some[self.levels < self.amounts.searchsorted(moment[late])[:, None]] = NEVER
            seconds[late] = some
        for number, offered in enumerate(seconds, part.start):
            better = offered < own.seconds
            np.copyto(own.seconds, offered, where=better)
            np.copyto(choices, np.int16(number), where=better)
        np.maximum(needs, moment, out=needs)
        lowest = np.minimum.reduce(needs)
        number, end = ((needs == lowest) & (lowest <= own.needs)).nonzero()
        if end.size:
            free = needs[number, end]
            both = np.array([after[number, end], inner_entries[number, 0]])
            at_need = self._at(both, np.array([free + more_after, free + more_inside]))
            fewest = np.full(len(ends), NEVER, self.type)
            np.minimum.at(fewest, end, at_need[0] + at_need[1] + recomputed[number, end])
            own.lower_needs(lowest, fewest)

    def _read(self, entries: NDArray[Any], paid: int) -> Values:
        """Returns the values of entries after `paid` bytes are spent."""
        seconds, needs, at_need = (values[entries] for values in self.values)
        if not paid:
            return Values(seconds, needs, at_need)
        lower, upper, share = self.around(paid)
        moved = seconds.take(upper, axis=-1)
        if share.any():
            below = seconds.take(lower, axis=-1)
            below -= moved
            below *= share
            moved += below
        # between an entry's need and the next amount
        edge = (upper == self.amounts.searchsorted(needs)[..., None]).nonzero()
        if edge[0].size:
            moved[edge] = self._at(entries[edge[:-1]], self.amounts[edge[-1]] - paid)
        return Values(moved, needs + paid, at_need)

    def _at(self, entries: NDArray[Any], free: Bytes) -> Seconds:
        """Returns the seconds of each entry with so much memory free."""
        upper = np.minimum(self.amounts.searchsorted(free), len(self.amounts) - 1)
        lower, needs = np.maximum(upper - 1, 0), self.values.needs[entries]
        below, above = self.values.seconds[entries, lower], self.values.seconds[entries, upper]
        least = self.amounts[lower] < needs
        start = np.where(least, needs, self.amounts[lower])
        below = np.where(least, self.values.at_need[entries], below)
        share = (self.amounts[upper] - free) / np.maximum(self.amounts[upper] - start, 1)
        seconds = above + (below - above) * np.maximum(share, 0)
        return np.where(free < needs, NEVER, seconds).astype(self.type)

    def _items(
        self, state: int, number: int, end: int, free: int, depth: int = 1
    ) -> Iterator[Item]:
        """Yields the items of a run from a state in one of its rows, its segments `depth` deep."""
        space = self.space
        while state < min(end, len(self.costs)):
            row = space.rows[state][number]
            keep = self._seconds_kept(state, end, row, free)
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
        """Returns the seconds from a state on; infinite if something does not fit."""
        entry, _, grown = self.entries.locate(state, number, end)
        free += grown
        need = self.values.needs.item(entry)
        if free < need:
            return math.inf
        upper = bisect.bisect_left(self.amount_list, free)
        seconds = self.values.seconds[entry]
        if upper == len(self.amount_list):
            return float(seconds[-1])
        above, amount = float(seconds[upper]), self.amount_list[upper]
        if amount == free:
            return above
        lower, below = self.amount_list[upper - 1], float(seconds[upper - 1])
        if lower < need:
            lower, below = need, float(self.values.at_need[entry])
        return above + (below - above) * ((amount - free) / (amount - lower))

    def _seconds_kept(self, step: int, end: int, row: StateRow, free: int) -> float:
        """Returns the seconds from a state on when its step is kept."""
        costs, rest = self.costs, free - row.grown
        last = step + 1 == end
        forward = costs.forward_until_saved[step] if last else costs.forward[step]
        beside = free - row.missing - self.gradients.item(end)
        if beside < forward or rest < costs.gradients[step + 1] + costs.backward[step]:
            return math.inf
        if last:
            return self.until_saved.item(step)
        seconds = 0.0 if end == self.space.forward else self.seconds.item(step)
        return seconds + self._value(step + 1, row.following, end, rest)

    def _best_segment(self, start: int, end: int, free: int, keep: float) -> tuple[float, int]:
        """Returns the least seconds from a state on when a segment starts there, and its stop.

        Candidates are the best stops of the amounts just below and above, or all stops if those do
        not fit and the step cannot be kept.
        """
        _, position, grown = self.entries.locate(start, self.space.own[start], end)
        level = max(bisect.bisect_right(self.amount_list, free + grown) - 1, 0)
        near = {*self.choices[position, level : level + 2].tolist()} - {-1}
        best = min((self._segment(start, n, end, free) for n in near), default=(math.inf, -1))
        if min(best[0], keep) < math.inf:
            return best
        before = sum(stop < end for stop, _ in self.space.stops[start])
        return min(self._segment(start, number, end, free) for number in range(before))

    def _segment(self, start: int, number: int, end: int, free: int) -> tuple[float, int]:
        """Returns the seconds from a state on if a segment to a stop starts there, and the stop."""
        stop, after = self.space.stops[start][number]
        segments = self.segments[start]
        if free < segments.through.item(number) + self.gradients.item(end):
            return math.inf, number
        recomputation = 0.0 if end == self.space.forward else segments.seconds.item(number)
        inner = self._value(start, self.space.own[start], stop, free)
        return recomputation + inner + self._value(stop, after, end, free), number
