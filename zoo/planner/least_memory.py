"""The plan of least peak memory in which no step runs more than twice: `checkpoint=True`.

Such a plan is a row of segments. Segment [i, j) needs, beside what the segments before it hold, the
bytes `need(i, j)` when its backward comes; it adds the storages of state i that state h, where the
segment before it starts, does not hold. A storage in two states is in all states between them, so
what is held at i depends on h alone, and shortest paths find the optimum:

    held(j) = least over i of  held(i) + bytes(live(j) - live(i))
              where            held(i) + need(i, j) <= peak

The least peak for which a path reaches the end is found by bisection. Afterwards segments whose
backward leaves room are kept instead, the most arithmetic first: that costs no peak.

Source: the dynamic programs of Feng and Huang 2018 (arXiv:1808.00079) and Kusumoto et al. 2019
(arXiv:1905.11722), here over tuple states with shared storage.
"""

from collections.abc import Iterator
from typing import NamedTuple

from zoo.plan import Item, Plan
from zoo.planner.costs import StepCosts
from zoo.planner.simulate import simulate


class Segment(NamedTuple):
    """Steps start..stop-1 as a segment: bytes it needs for its turn, bytes it leaves held."""

    start: int
    stop: int
    need: int
    added: int


def least_memory(costs: StepCosts) -> Plan:
    """Returns the plan of least peak in which no step runs more than twice. No timing is used."""
    steps = len(costs)
    singles = [Segment(i, i + 1, _need_of_one(costs, i), 0) for i in range(steps)]
    ceiling = min(simulate(plan, costs).peak for plan in _uniform(steps))
    by_start = [list(_segments_from(costs, start, ceiling)) for start in range(steps)]
    low = max((single.need for single in singles), default=0)
    high = max(ceiling, low)
    best = _cut(by_start, high)
    while low < high:
        middle = (low + high) // 2
        cut = _cut(by_start, middle)
        if cut is None:
            low = middle + 1
        else:
            best, high = cut, middle
    assert best is not None, "one of the uniform plans reaches the ceiling"
    return _keep_what_is_free(best, costs)


def _uniform(steps: int) -> Iterator[Plan]:
    length = 1
    while length <= max(steps, 1):
        starts = range(0, steps, length)
        yield Plan([tuple(range(start, min(start + length, steps))) for start in starts])
        length *= 2


def _segments_from(costs: StepCosts, start: int, ceiling: int) -> Iterator[Segment]:
    base = costs.live[start]
    held: set[int] = set(base)
    kept = 0  # bytes saved so far in the second run
    through = 0  # largest need of the second run, the last step run in full
    behind = 0  # largest need of the backwards
    for step in range(start, len(costs)):
        handed = costs.bytes_of(costs.live[step] - base)
        before = kept + costs.bytes_of(costs.live[step] - held)
        stopped = before + costs.forward_until_saved[step]
        through_before, through = through, max(through, before + costs.forward[step])
        fresh = costs.saved[step] - held
        kept += costs.bytes_of(fresh)
        held |= fresh
        behind = max(behind, kept + costs.gradients[step + 1] + costs.backward[step])
        if kept > ceiling:
            return
        need = max(
            max(through_before, stopped) + costs.gradients[step + 1],
            handed + costs.forward[step],
            behind,
        )
        added = costs.bytes_of(costs.live[step + 1] - base)
        yield Segment(start, step + 1, need, added)


def _need_of_one(costs: StepCosts, step: int) -> int:
    return next(iter(_segments_from(costs, step, costs.bytes_of(costs.saved[step])))).need


def _cut(by_start: list[list[Segment]], peak: int) -> list[Segment] | None:
    """Finds segments that cover the chain within a peak, holding the least at each boundary."""
    steps = len(by_start)
    held: list[int | None] = [0] + [None] * steps
    arrived: list[Segment | None] = [None] * (steps + 1)
    for start, segments in enumerate(by_start):
        here = held[start]
        if here is None:
            continue
        for segment in segments:
            if here + segment.need > peak:
                continue
            total, known = here + segment.added, held[segment.stop]
            if known is None or total < known:
                held[segment.stop], arrived[segment.stop] = total, segment
    path: list[Segment] = []
    while (stop := path[-1].start if path else steps) > 0:
        segment = arrived[stop]
        if segment is None:
            return None
        path.append(segment)
    return path[::-1]


def _keep_what_is_free(segments: list[Segment], costs: StepCosts) -> Plan:
    groups = [tuple(range(segment.start, segment.stop)) for segment in segments]
    peak = simulate(Plan(groups), costs).peak
    kept: set[int] = set()
    weight = [sum(costs.flops[step] for step in group) for group in groups]
    for number in sorted(range(len(groups)), key=lambda number: (-weight[number], -number)):
        if simulate(_plan(groups, kept | {number}), costs).peak <= peak:
            kept.add(number)
    return _plan(groups, kept)


def _plan(groups: list[tuple[int, ...]], kept: set[int]) -> Plan:
    items: list[Item] = []
    for number, group in enumerate(groups):
        items += group if number in kept else [group]
    return Plan(items)
