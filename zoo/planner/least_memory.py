"""The plan of least peak memory in which no step runs more than twice: `checkpoint=True`.

Such a plan is a row of segments and kept steps. For a given peak, paths through the n + 1 states
are searched: a path to state i is a label, the bytes that its items hold and which of the storages
in state i are among them. Only those can matter later, since a storage in two states is in all
states between them. A label is dropped when another could hold what it holds for fewer bytes.

    segment [i, j)   holds live(i); its turn needs  need(i, j)  beside what is held
    kept step i      holds saved(i); its turn needs its forward, and later its backward

The least peak for which a path reaches the end is found by bisection, to a thousandth. A second
search within that peak looks for the path that recomputes least arithmetic. It goes on from at most
`MOST` labels of a state, those that hold or recompute the least, so a path may be missed that
recomputes less. Segments whose backward leaves room are kept instead, the most arithmetic first:
that costs no peak.

Source: the dynamic programs of Feng and Huang 2018 (arXiv:1808.00079) and Kusumoto et al. 2019
(arXiv:1905.11722), here over tuple states with shared storage.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from zoo.planner.costs import StepCosts
from zoo.planner.plan import Item, Plan
from zoo.planner.simulate import simulate
from zoo.planner.subsample import thinned

Storages = frozenset[int]
# where a segment ends, the bytes that its turn needs, what it holds of the state there, and the
# operations of its recomputation
Segment = tuple[int, int, Storages, int]

# labels of a state that the second search goes on from; twice as many find hardly more
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
# of a state's labels, those that a kept step is to follow and those that a segment is
Narrow = Callable[[Labels, int, StepCosts], tuple[Labels, Labels]]


def least_memory(costs: StepCosts) -> Plan:
    """Returns a plan of least peak in which no step runs more than twice: of those, a cheap one.

    What is cheap is counted in operations, not timed.
    """
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
    plan = _keep_what_is_free(best, costs)
    cheaper = _path(costs, segments, simulate(plan, costs).peak, _by_arithmetic)
    if cheaper is None:
        return plan
    other = _keep_what_is_free(cheaper, costs)
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
    through = 0  # largest need of the recomputation, the last step run in full
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
                found = Label(held, label.recomputed_flops, storages, step, True, label)
                labels[start + 1].append(found)
        for label in cut:
            whole = label.held + costs.bytes_of(live - label.storages)
            for stop, need, shared, flops in segments[start]:
                if whole + need <= peak:
                    again = label.recomputed_flops + flops
                    found = Label(whole, again, shared, range(start, stop), False, label)
                    labels[stop].append(found)
    return min(labels[-1], key=lambda label: (label.recomputed_flops, label.held), default=None)


def _by_bytes(labels: Labels, start: int, costs: StepCosts) -> tuple[Labels, Labels]:
    """Keeps a step after all labels that may hold least; begins a segment after that which does."""
    best: Labels = []
    for label in sorted(labels, key=lambda label: label.held):
        if all(
            other.held + costs.bytes_of(label.storages - other.storages) > label.held
            for other in best
        ):
            best.append(label)
    return best, _front(best, costs.live[start], costs)[:1]


def _by_arithmetic(labels: Labels, start: int, costs: StepCosts) -> tuple[Labels, Labels]:
    """Goes on after few labels, from those that then hold least to those that recompute least."""
    return (
        thinned(_front(labels, costs.saved[start], costs), MOST),
        thinned(_front(labels, costs.live[start], costs), MOST),
    )


def _front(labels: Labels, also: Storages, costs: StepCosts) -> Labels:
    """Returns the labels of which none holds less, with some storages also, and recomputes less."""

    def bytes_and_flops(label: Label) -> tuple[int, int]:
        return label.held + costs.bytes_of(also - label.storages), label.recomputed_flops

    best: Labels = []
    for label in sorted(labels, key=bytes_and_flops):
        if not best or label.recomputed_flops < best[-1].recomputed_flops:
            best.append(label)
    return best


def _keep_what_is_free(path: Label, costs: StepCosts) -> Plan:
    """Makes a plan of a path, and keeps the segments whose backward leaves room for that."""
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
        # what is kept is there in the turns of all later items; most segments fail by this alone
        later = max(turns[number + 1 :], default=0)
        if (
            later + _growth(labels, number, costs) <= before.peak
            and simulate(plan_of(kept | {number}), costs).peak <= before.peak
        ):
            kept.add(number)
            turns[number] = 0
    return plan_of(kept)


def _growth(labels: Labels, number: int, costs: StepCosts) -> int:
    """Returns how many bytes more are held, at the least, when a segment is kept."""
    steps = labels[number].steps
    beside = [*labels[max(number - 1, 0) : number], *labels[number + 1 : number + 2]]
    elsewhere = {
        storage
        for label in beside
        for step in label.steps
        for storage in costs.saved[step] | costs.live[step]
    }
    saved = frozenset().union(*(costs.saved[step] for step in steps))
    before = costs.live[steps[0]]
    return costs.bytes_of(saved - before - elsewhere) - costs.bytes_of(before - saved)
