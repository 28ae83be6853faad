"""Sets of items to offload that are worth simulating with a plan.

An item is a segment, which offloads what it starts from, or a kept step, which offloads what it
saves; a set has the first step of each of its items. All sets would be 2 to the number of items.
Tried is what a copy engine has time for, and more and less of it; and what lies idle the longest,
also as much of it as a host budget allows.
"""

import bisect
import math
from collections.abc import Iterator
from itertools import accumulate

from zoo.planner.costs import CopyRate, StepCosts, simulate
from zoo.planner.plan import Plan, first_step

Items = frozenset[int]
# how busy copies may be, as a share of the time of the forward's kernels
LOADS = 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0
# up to which share of the forward items leave: the last ones come back at once
ENDS = 1.0, 0.75
# shares of all bytes, those first that are the longest on the host
SHARES = 0.125, 0.25, 0.5, 0.75
# simulations for one plan
COUNT = len(LOADS) * len(ENDS) + len(SHARES) + 3


def segments_of(plan: Plan) -> Items:
    """Returns all segments."""
    return frozenset(first_step(item) for item in plan if isinstance(item, tuple))


def choices(
    plan: Plan, costs: StepCosts, steps: int, copies: CopyRate, host_budget: int | None = None
) -> set[Items]:
    """Returns sets of items of the first `steps` steps, without the empty one."""
    firsts = [*map(first_step, plan)]
    sizes = simulate(plan, costs, offloads=firsts, steps=steps).on_host
    items = [first for first in firsts if sizes[first]]
    # when the forward of each step begins
    times = [0.0, *accumulate(costs.seconds)]
    found = {segments_of(plan), frozenset(items), *_longest(items, sizes, times, host_budget)}
    for end in ENDS:
        early = [first for first in items if times[first] <= end * times[-1]]
        found.update(_paced(early, sizes, times, copies.bytes_per_second * load) for load in LOADS)
    return found - {frozenset()}


def _paced(items: list[int], sizes: tuple[int, ...], times: list[float], rate: float) -> Items:
    """Chooses each item that comes when the copies of those before it are done."""
    chosen, free = set(), -math.inf
    for first in items:
        if times[first] >= free:
            chosen.add(first)
            free = times[first] + sizes[first] / rate
    return frozenset(chosen)


def _longest(
    items: list[int], sizes: tuple[int, ...], times: list[float], host_budget: int | None
) -> Iterator[Items]:
    """Yields the items of most bytes times seconds until the end of the forward."""
    order = sorted(items, key=lambda first: sizes[first] * (times[-1] - times[first]), reverse=True)
    total, sums = sum(sizes), [*accumulate(sizes[first] for first in order)]
    for share in SHARES:
        count = bisect.bisect_right(sums, share * total)
        yield frozenset(order[:count])
    if host_budget is not None:
        chosen, free = set(), host_budget
        for first in order:
            if sizes[first] <= free:
                chosen.add(first)
                free -= sizes[first]
        yield frozenset(chosen)
