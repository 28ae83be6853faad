"""The plans of least time for every budget in bytes, among all nested plans.

Plans are traced from the values of a dynamic program (`dp_table`) for some hundreds of budgets and
simulated; of these the best are kept. In chains of more than `FLAT` steps, long segments begin and
end at cuts; see `search_space`.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zoo.planner.costs import StepCosts
from zoo.planner.dp_table import Bytes, DPTable
from zoo.planner.plan import Plan
from zoo.planner.search_space import SearchSpace
from zoo.planner.simulate import simulate

FLAT = 150  # steps of a chain in which every state is a cut
FEW = 128  # cuts to which others are added
MANY = 400  # cuts, at most; segments nest about as deep, and plans to `zoo.plan.DEEPEST`
NEAR = 12  # steps of a segment that begins and ends anywhere
ENTRIES = 2 * 10**8  # values in a table


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
    plans: int | None = None,
) -> list[Point]:
    """Returns the best plans, by rising peak and falling seconds of recomputation.

    Of plans of equal peak and time, that of fewer operations is chosen.

    Args:
        costs: those of the chain.
        levels: amounts of memory for which the least time is known; None for each whole number of
            bytes, which makes the plans optimal and only suits small numbers, as in tests.
        cuts: states where long segments may begin and end; by default all in a short chain.
        plans: about how many plans are traced.
    """
    space = SearchSpace(costs, default_cuts(costs) if cuts is None else cuts, NEAR)
    keep_all = Plan.keep_all(len(costs))
    baseline = simulate(keep_all, costs).peak
    if levels is None:
        table = DPTable(space, np.arange(baseline + 1), exact=True)
        budgets = table.budgets()
    else:
        entries = sum(len(rows) * space.columns(k) for k, rows in enumerate(space.rows))
        levels = min(levels, max(50, ENTRIES // entries))
        plans = plans or max(160, min(400, 40_000 // max(len(costs), 1)))
        table = DPTable(space, _amounts(0, baseline, levels))
        budgets = _amounts(min(table.least, baseline), baseline, plans).tolist()
    found = []
    for plan in dict.fromkeys([keep_all, *map(table.plan, budgets)]):
        result = simulate(plan, costs)
        found.append((result.peak, result.recomputed_seconds, result.recomputed_flops, plan))
    points: list[Point] = []
    for peak, seconds, _, plan in sorted(found, key=lambda entry: entry[:3]):
        if not points or seconds < points[-1].recomputed_seconds:
            points.append(Point(peak, seconds, plan))
    return points


def least(costs: StepCosts) -> Plan:
    """Returns the plan of least peak, in a fraction of the time of `frontier`.

    What decides whether something fits is known to the byte at any number of levels.
    """
    baseline = simulate(Plan.keep_all(len(costs)), costs).peak
    space = SearchSpace(costs, default_cuts(costs), NEAR)
    table = DPTable(space, np.unique(np.array([0, baseline], np.int64)))
    return table.plan(min(table.least, baseline))


def default_cuts(costs: StepCosts) -> list[int]:
    """Chooses the states where long segments begin and end.

    These are all states of a short chain; else those between blocks, of very many only some, and
    where there are few or long ones also the smallest state about the middle between two.
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

    while len(cuts) <= FEW or (
        len(cuts) <= MANY and max(stop - start for start, stop in pairwise(cuts)) > 2 * NEAR
    ):
        # those first that are farthest from each other
        gaps = sorted(pairwise(cuts), key=lambda gap: gap[0] - gap[1])[: MANY - len(cuts)]
        added = [middle(start, stop) for start, stop in gaps if stop - start > 2]
        if not added:
            break
        cuts = sorted([*cuts, *added])
    return cuts


def _amounts(first: int, last: int, count: int) -> Bytes:
    """Returns whole numbers between two, both included, closer together where they are small."""
    found = np.ceil(np.linspace(first**0.5, last**0.5, count) ** 2).astype(np.int64)
    return np.unique(np.clip([first, *found, last], first, last))
