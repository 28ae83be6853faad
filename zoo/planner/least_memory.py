"""The plan of least peak memory that recomputes no step more than once: `checkpoint=True`.

Such a plan is a row of segments and kept steps. For a given peak, paths through the n + 1 states
are searched: a path to state i is a label, the bytes that its items hold and which of the storages
in state i are among them. Only those can matter later, since a storage in two states is in all
states between them. A label is dropped when another could hold the same for fewer bytes.

    segment [i, j)   holds live(i); its backward needs  need(i, j)  beside the bytes held
    kept step i      holds saved(i); needs bytes in its forward, and later in its backward

The least peak for which a path reaches the end is found by bisection, to a thousandth. A second
search within that peak looks for the path that recomputes the fewest operations. It extends at most
`MOST` labels of a state, those that hold or recompute the least, so it may miss the best path.
Then segments are kept while the peak allows it, those of the most operations first.

Source: the dynamic programs of Feng and Huang 2018 (arXiv:1808.00079) and Kusumoto et al. 2019
(arXiv:1905.11722), here over tuple states with shared storage.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from zoo.planner.costs import StepCosts, simulate
from zoo.planner.plan import Item, Plan, thinned

Storages = frozenset[int]
# where a segment ends, the bytes that its recomputation and backward need, the storages of the
# state there that it holds, and the operations of its recomputation
Segment = tuple[int, int, Storages, int]

# labels of a state that the second search extends; twice as many improve hardly any plan
MOST = 8


class Label(NamedTuple):
    """A path to a state: bytes held, which of the state's storages are held, the last item."""

    held: int
    recomputed_flops: int
    storages: Storages
    steps: range
    kept: bool
    before: Optional["Label"]


Labels = list[Label]
# of a state's labels, those to extend by a kept step and those to extend by a segment
Narrow = Callable[[Labels, int, StepCosts], tuple[Labels, Labels]]


def least_memory(costs: StepCosts) -> Plan:
    """Returns a plan of least peak that recomputes no step more than once, and few operations."""
    ceiling = min(simulate(plan, costs).peak for plan in _uniform(len(costs)))
    segments = [list(_segments_from(costs, start, ceiling)) for start in range(len(costs))]
    low, high = 0, ceiling
    best = _path(costs, segments, high, _by_bytes)
    while high - low > high // 1000:
        middle = (low + high) // 2
        path = _path(costs, segments, middle, _by_bytes)
        if path is None:
            low = middle + 1
        else:
            best, high = path, middle
    assert best is not None, "one of the uniform plans reaches the ceiling"
    plan = _keep_within_peak(best, costs)
    cheaper = _path(costs, segments, simulate(plan, costs).peak, _by_arithmetic)
    if cheaper is None:
        return plan
    other = _keep_within_peak(cheaper, costs)
    return min(plan, other, key=lambda plan: simulate(plan, costs).recomputed_flops)


def _uniform(steps: int) -> Iterator[Plan]:
    """Yields plans of segments of 1, 2, 4, ... steps."""
    for power in range(max(steps, 1).bit_length()):
        starts = range(0, steps, 2**power)
        yield Plan([tuple(range(start, min(start + 2**power, steps))) for start in starts])


def _segments_from(costs: StepCosts, start: int, ceiling: int) -> Iterator[Segment]:
    """Yields the segments that begin at a step, up to the length where none fits a ceiling."""
    base = costs.live[start]
    held: set[int] = set(base)
    kept = 0  # bytes saved so far in the recomputation
    through = 0  # largest need of the recomputation whose last step does not stop early
    behind = 0  # largest need of the backwards
    shared = base
    flops = 0
    for step in range(start, len(costs)):
        live = costs.live[step]
        handed = costs.bytes_of(live - base if shared else live) + costs.forward[step]
        before = kept + costs.bytes_of(live - held)
        stopped = max(through, before + costs.forward_until_saved[step])
        through = max(through, before + costs.forward[step], handed)
        kept += costs.bytes_of(costs.saved[step] - held)
        if kept > ceiling:
            return
        held |= costs.saved[step]
        gradient = costs.gradients[step + 1]
        behind = max(behind, kept + gradient + costs.backward[step])
        # a storage that left the state does not come back
        shared = shared and base & costs.live[step + 1]
        need = max(stopped + gradient, handed, behind)
        yield step + 1, need, shared, flops + costs.flops_until_saved[step]
        flops += costs.flops[step]


def _path(
    costs: StepCosts, segments: list[list[Segment]], peak: int, narrow: Narrow
) -> Label | None:
    """Finds a path to the end within a peak, None when there is none."""
    labels: list[Labels] = [[] for _ in range(len(costs) + 1)]
    labels[0] = [Label(0, 0, frozenset(), range(0), False, None)]
    for start in range(len(costs)):
        live, saved = costs.live[start], costs.saved[start]
        kept, cut = narrow(labels[start], start, costs)
        for label in kept:
            whole = label.held + costs.bytes_of(live - label.storages)
            held = label.held + costs.bytes_of(saved - label.storages)
            turn = held + costs.gradients[start + 1] + costs.backward[start]
            if max(whole + costs.forward[start], turn) <= peak:
                storages = (label.storages | saved) & costs.live[start + 1]
                step = range(start, start + 1)
                after = Label(held, label.recomputed_flops, storages, step, True, label)
                labels[start + 1].append(after)
        for label in cut:
            whole = label.held + costs.bytes_of(live - label.storages)
            for stop, need, shared, flops in segments[start]:
                if whole + need <= peak:
                    recomputed = label.recomputed_flops + flops
                    after = Label(whole, recomputed, shared, range(start, stop), False, label)
                    labels[stop].append(after)
    return min(labels[-1], key=lambda label: (label.recomputed_flops, label.held), default=None)


def _by_bytes(labels: Labels, start: int, costs: StepCosts) -> tuple[Labels, Labels]:
    """Extends all labels that may hold least by a kept step; by a segment that which does."""
    best: Labels = []
    for label in sorted(labels, key=lambda label: label.held):
        if all(
            other.held + costs.bytes_of(label.storages - other.storages) > label.held
            for other in best
        ):
            best.append(label)
    return best, _front(best, costs.live[start], costs)[:1]


def _by_arithmetic(labels: Labels, start: int, costs: StepCosts) -> tuple[Labels, Labels]:
    """Extends few labels, from those that then hold least to those that recompute least."""
    return (
        thinned(_front(labels, costs.saved[start], costs), MOST),
        thinned(_front(labels, costs.live[start], costs), MOST),
    )


def _front(labels: Labels, also: Storages, costs: StepCosts) -> Labels:
    """Returns the Pareto front of bytes held, `also` among them, and operations recomputed."""

    def bytes_and_flops(label: Label) -> tuple[int, int]:
        return label.held + costs.bytes_of(also - label.storages), label.recomputed_flops

    best: Labels = []
    for label in sorted(labels, key=bytes_and_flops):
        if not best or label.recomputed_flops < best[-1].recomputed_flops:
            best.append(label)
    return best


def _keep_within_peak(path: Label, costs: StepCosts) -> Plan:
    """Makes a plan of a path, and keeps the segments that raise no peak when they are kept."""
    labels = [path]
    while labels[-1].before is not None:
        labels.append(labels[-1].before)
    labels = labels[-2::-1]
    kept = {number for number, label in enumerate(labels) if label.kept}

    def plan_of(kept: set[int]) -> Plan:
        items: list[Item] = []
        for number, label in enumerate(labels):
            items += label.steps if number in kept else (tuple(label.steps),)
        return Plan(items)

    before = simulate(plan_of(kept), costs)
    flops = {
        number: sum(costs.flops[step] for step in label.steps)
        for number, label in enumerate(labels)
        if not label.kept
    }
    turns = list(before.turns)
    for number in sorted(flops, key=lambda number: (-flops[number], -number)):
        # kept tensors are there in the backwards of all later items: most segments fail by this
        later = max(turns[number + 1 :], default=0)
        if (
            later + _growth(labels, number, costs) <= before.peak
            and simulate(plan_of(kept | {number}), costs).peak <= before.peak
        ):
            kept.add(number)
            turns[number] = 0
    return plan_of(kept)


def _growth(labels: Labels, number: int, costs: StepCosts) -> int:
    """Returns a lower bound of the additional bytes that a segment holds when it is kept."""
    steps = labels[number].steps
    beside = [*labels[max(number - 1, 0) : number], *labels[number + 1 : number + 2]]
    neighbors = [costs.saved[step] | costs.live[step] for label in beside for step in label.steps]
    saved = frozenset().union(*(costs.saved[step] for step in steps))
    before = costs.live[steps[0]]
    new = saved.difference(before, *neighbors)
    return costs.bytes_of(new) - costs.bytes_of(before - saved)
