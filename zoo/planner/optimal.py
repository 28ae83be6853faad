"""The plan of least time for a budget in bytes, among all nested plans.

A table is made once for a chain and answers for every budget. Grids divide the memory of plain
training, a third of it, a ninth and so on into equal levels; from them plans are traced for some
hundreds of budgets and simulated. What a budget gets is the best of those that keep to it: a
larger budget never gets a slower plan.

With a resolution of one byte (small numbers, as in tests) there is one grid and nothing is rounded.
In chains of more than `FLAT` steps, long segments begin and end at cuts; see `layout`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zoo.errors import BudgetError
from zoo.plan import Plan
from zoo.planner.costs import StepCosts
from zoo.planner.grid import Bytes, Grid
from zoo.planner.layout import Layout, lay_out
from zoo.planner.simulate import simulate
from zoo.planner.trace import trace

FLAT = 150  # steps of a chain in which every state is a cut
FEW = 128  # cuts to which others are added
MANY = 400  # cuts, at most; segments nest about as deep, and plans to `zoo.plan.DEEPEST`
NEAR = 12  # steps of a segment that begins and ends anywhere
ENTRIES = 2 * 10**8  # values in a grid


class Point(NamedTuple):
    """A plan, the peak bytes of its activations, and the seconds that it runs again."""

    peak: int
    recomputed_seconds: float
    plan: Plan


class Table:
    """Plans of least time for a chain, for every budget.

    levels: amounts of memory for which a grid knows the least time; None for each whole number of
        bytes, which makes the plans optimal and only suits small numbers.
    cuts: states where long segments may begin and end; by default all in a short chain.
    plans: about how many plans are traced.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        levels: int | None = 500,
        cuts: Collection[int] | None = None,
        plans: int | None = None,
    ) -> None:
        layout = lay_out(costs, default_cuts(costs) if cuts is None else cuts, NEAR)
        keep_all = Plan.keep_all(len(costs))
        self.baseline = simulate(keep_all, costs).peak
        if levels is None:
            traced = _traced_exactly(layout, self.baseline)
        else:
            levels = min(levels, max(50, ENTRIES // layout.entries))
            plans = plans or max(160, min(400, 40_000 // max(len(costs), 1)))
            traced = _traced(layout, self.baseline, levels, plans)
        self._points = _undominated([keep_all, *traced], costs)

    @property
    def least(self) -> int:
        """The least peak, in bytes."""
        return self._points[0].peak

    def plan(self, budget: int) -> Plan:
        """Returns the plan of least recomputed seconds whose peak is at most a budget in bytes.

        Of plans of equal time, that of fewer operations is chosen, then that of less memory.

        Raises:
            BudgetError: every plan needs more.
        """
        found = [point for point in self._points if point.peak <= budget]
        if not found:
            raise BudgetError(
                f"the activations need at least {self.least} bytes; the budget is {budget} bytes; "
                f"keeping everything takes {self.baseline} bytes"
            )
        return found[-1].plan

    def plan_within(self, seconds: float) -> Plan:
        """Returns the plan of least peak that runs at most so many seconds again."""
        return next(p.plan for p in self._points if p.recomputed_seconds <= max(seconds, 0.0))

    def frontier(self) -> list[Point]:
        """Returns the plans without the dominated ones, by rising peak and falling seconds."""
        faster = (
            point
            for before, point in pairwise(self._points)
            if point.recomputed_seconds < before.recomputed_seconds
        )
        return [self._points[0], *faster]


def optimal(costs: StepCosts, budget: int) -> Plan:
    """Returns the plan of least recomputed seconds whose simulated peak is at most a budget.

    For several budgets of one chain, make a `Table`.

    Raises:
        BudgetError: every plan needs more.
    """
    return Table(costs).plan(budget)


def least(costs: StepCosts) -> Plan:
    """Returns the plan of least peak, in a fraction of a `Table`'s time.

    What decides whether something fits a grid knows to the byte at any number of levels.
    """
    layout = lay_out(costs, default_cuts(costs), NEAR)
    baseline = simulate(Plan.keep_all(len(costs)), costs).peak
    grid = Grid(layout, np.unique(np.array([0, baseline], np.int64)))
    return trace(grid, min(grid.least, baseline))


def frontier(costs: StepCosts) -> list[Point]:
    """Returns the best plans of a chain, by rising peak and falling seconds."""
    return Table(costs).frontier()


def default_cuts(costs: StepCosts) -> list[int]:
    """Chooses the states where long segments begin and end.

    These are all states of a short chain; else those between blocks, where there are few of them or
    long ones also the smallest state inside, and where there are very many only some.
    """
    steps = len(costs)
    if steps <= FLAT:
        return list(range(steps + 1))
    edges = [k for k in range(1, steps) if costs.blocks[k] != costs.blocks[k - 1]]
    cuts = [0, *edges[:: len(edges) // MANY + 1], steps]
    sizes = [costs.bytes_of(live) for live in costs.live]
    while len(cuts) <= FEW or (
        len(cuts) <= MANY and max(stop - start for start, stop in pairwise(cuts)) > 2 * NEAR
    ):
        finer = _finer(cuts, sizes, MANY - len(cuts))
        if finer == cuts:
            break
        cuts = finer
    return cuts


def _finer(cuts: Sequence[int], sizes: Sequence[int], most: int) -> list[int]:
    """Adds the smallest state about the middle between any two cuts, unless these are close.

    It adds `most` of them, where cuts are farthest from each other.
    """
    found = set(cuts)
    longest = sorted(pairwise(cuts), key=lambda pair: pair[0] - pair[1])
    for start, stop in longest[:most]:
        if stop - start > 2:
            margin = max((stop - start) // 4, 1)
            inner = range(start + margin, stop - margin + 1)
            found.add(min((sizes[k], abs(start + stop - 2 * k), k) for k in inner)[2])
    return sorted(found)


def _traced(layout: Layout, baseline: int, levels: int, plans: int) -> Iterator[Plan]:
    """Traces plans from a grid, more closely where memory is small."""
    grid = Grid(layout, _amounts(0, baseline, levels))
    for budget in _amounts(min(grid.least, baseline), baseline, plans):
        yield trace(grid, int(budget))


def _amounts(first: int, last: int, count: int) -> Bytes:
    """Returns whole numbers between two, both included, closer together where they are small."""
    found = np.ceil(np.linspace(first**0.5, last**0.5, count) ** 2).astype(np.int64)
    return np.unique(np.clip([first, *found, last], first, last))


def _traced_exactly(layout: Layout, baseline: int) -> Iterator[Plan]:
    grid = Grid(layout, np.arange(baseline + 1), exact=True)
    for budget in grid.budgets():
        yield trace(grid, budget)


def _undominated(plans: Iterable[Plan], costs: StepCosts) -> list[Point]:
    """Simulates plans and leaves out those that are no better than one of less memory."""
    found = []
    for plan in dict.fromkeys(plans):
        result = simulate(plan, costs)
        time = (result.recomputed_seconds, result.recomputed_flops)
        found.append((result.peak, time, plan))
    points: list[Point] = []
    least = None
    for peak, time, plan in sorted(found, key=lambda entry: entry[:2]):
        if least is None or time < least:
            least = time
            points.append(Point(peak, time[0], plan))
    return points
