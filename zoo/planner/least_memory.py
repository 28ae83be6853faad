"""The plan of least peak memory in which no step runs more than twice: `checkpoint=True`.

Such a plan is a row of segments and kept steps. For a given peak, paths through the n + 1 states
are searched: a path to state i is a label, the bytes that its items hold and which of the storages
in state i are among them. Only those can matter later, since a storage in two states is in all
states between them. A label is dropped when another could hold what it holds for fewer bytes.

    segment [i, j)   holds live(i); its turn needs  need(i, j)  beside what is held
    kept step i      holds saved(i); its turn needs its forward, and later its backward

The least peak for which a path reaches the end is found by bisection, to a thousandth. A second
search within that peak looks for the path that runs least arithmetic again. It goes on from at most
`MOST` labels of a state, those that hold or run again the least, so a path may be missed that runs
less. Segments whose backward leaves room are kept instead, the most arithmetic first: that costs
no peak.

Source: the dynamic programs of Feng and Huang 2018 (arXiv:1808.00079) and Kusumoto et al. 2019
(arXiv:1905.11722), here over tuple states with shared storage.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from zoo.plan import Item, Plan, indices
from zoo.planner.costs import StepCosts
from zoo.planner.simulate import simulate
from zoo.planner.thinned import thinned

Storages = frozenset[int]

# labels of a state that the second search goes on from; twice as many find hardly more
MOST = 8


class Segment(NamedTuple):
    """A segment up to step `stop` - 1: the bytes that its turn needs, the storages it shares.

    `flops` are what it runs again.
    """

    stop: int
    need: int
    shared: Storages
    flops: int


class Label(NamedTuple):
    """A path to a state: bytes held, which of the state's storages are held, the last item.

    `flops` are what its segments run again.
    """

    held: int
    flops: int
    storages: Storages
    start: int
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
    plan = _keep_what_is_free(_items(best, len(costs)), costs)
    cheaper = _path(costs, segments, simulate(plan, costs).peak, _by_arithmetic)
    if cheaper is None:
        return plan
    other = _keep_what_is_free(_items(cheaper, len(costs)), costs)
    return min(plan, other, key=lambda plan: simulate(plan, costs).recomputed_flops)


def _uniform(steps: int) -> Iterator[Plan]:
    length = 1
    while length <= max(steps, 1):
        starts = range(0, steps, length)
        yield Plan([tuple(range(start, min(start + length, steps))) for start in starts])
        length *= 2


def _segments_from(costs: StepCosts, start: int, ceiling: int) -> Iterator[Segment]:
    """Yields the segments that begin at a step, up to the length where none fits a ceiling."""
    base = costs.live[start]
    held: set[int] = set(base)
    kept = 0  # bytes saved so far in the second run
    through = 0  # largest need of the second run, the last step run in full
    behind = 0  # largest need of the backwards
    shared = base
    again = 0  # arithmetic of the second run
    for step in range(start, len(costs)):
        live = costs.live[step]
        handed = costs.bytes_of(live - base if shared else live)
        before = kept + costs.bytes_of(live - held)
        stopped = max(through, before + costs.forward_until_saved[step])
        through = max(through, before + costs.forward[step], handed + costs.forward[step])
        fresh = costs.saved[step] - held
        kept += costs.bytes_of(fresh)
        held |= fresh
        behind = max(behind, kept + costs.gradients[step + 1] + costs.backward[step])
        if kept > ceiling:
            return
        need = max(stopped + costs.gradients[step + 1], handed + costs.forward[step], behind)
        # a storage that left the state does not come back
        shared = shared and base & costs.live[step + 1]
        yield Segment(step + 1, need, shared, again + costs.flops_until_saved[step])
        again += costs.flops[step]


def _path(
    costs: StepCosts, segments: list[list[Segment]], peak: int, narrow: Narrow
) -> Label | None:
    """Finds a path to the end within a peak, None when there is none."""
    labels: list[Labels] = [[] for _ in range(len(costs) + 1)]
    labels[0] = [Label(0, 0, frozenset(), 0, False, None)]
    for start in range(len(costs)):
        live, saved = costs.live[start], costs.saved[start]
        kept, cut = narrow(labels[start], start, costs)
        for label in kept:
            whole = label.held + costs.bytes_of(live - label.storages)
            held = label.held + costs.bytes_of(saved - label.storages)
            turn = held + costs.gradients[start + 1] + costs.backward[start]
            if max(whole + costs.forward[start], turn) <= peak:
                storages = (label.storages | saved) & costs.live[start + 1]
                labels[start + 1].append(Label(held, label.flops, storages, start, True, label))
        for label in cut:
            whole = label.held + costs.bytes_of(live - label.storages)
            for stop, need, shared, flops in segments[start]:
                if whole + need <= peak:
                    again = label.flops + flops
                    labels[stop].append(Label(whole, again, shared, start, False, label))
    return min(labels[-1], key=lambda label: (label.flops, label.held), default=None)


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
    """Goes on after few labels, from those that then hold least to those that run least again."""
    return (
        thinned(_front(labels, costs.saved[start], costs), MOST),
        thinned(_front(labels, costs.live[start], costs), MOST),
    )


def _front(labels: Labels, also: Storages, costs: StepCosts) -> Labels:
    """Returns the labels of which none holds less, with some storages also, and runs less again."""
    held = [label.held + costs.bytes_of(also - label.storages) for label in labels]
    best: Labels = []
    for number in sorted(
        range(len(labels)), key=lambda number: (held[number], labels[number].flops)
    ):
        if not best or labels[number].flops < best[-1].flops:
            best.append(labels[number])
    return best


def _items(label: Label, stop: int) -> list[Item]:
    items: list[Item] = []
    while label.before is not None:
        items.append(label.start if label.kept else tuple(range(label.start, stop)))
        stop, label = label.start, label.before
    return items[::-1]


def _keep_what_is_free(items: list[Item], costs: StepCosts) -> Plan:
    before = simulate(Plan(items), costs)
    weights = {
        number: sum(costs.flops[step] for step in indices(item))
        for number, item in enumerate(items)
        if isinstance(item, tuple)
    }
    turns = list(before.turns)
    kept: set[int] = set()
    for number in sorted(weights, key=lambda number: (-weights[number], -number)):
        # what is kept is there in the turns of all later items; most segments fail by this alone
        later = max(turns[number + 1 :], default=0)
        if (
            later + _growth(items, number, costs) <= before.peak
            and simulate(_plan(items, kept | {number}), costs).peak <= before.peak
        ):
            kept.add(number)
            turns[number] = 0
    return _plan(items, kept)


def _growth(items: list[Item], number: int, costs: StepCosts) -> int:
    """Returns how many bytes more are held, at the least, when a segment is kept."""
    steps = list(indices(items[number]))
    elsewhere = {
        storage
        for other in (number - 1, number + 1)
        if 0 <= other < len(items)
        for step in indices(items[other])
        for storage in costs.saved[step] | costs.live[step]
    }
    saved = frozenset().union(*(costs.saved[step] for step in steps))
    before = costs.live[steps[0]]
    return costs.bytes_of(saved - before - elsewhere) - costs.bytes_of(before - saved)


def _plan(items: list[Item], kept: set[int]) -> Plan:
    flat: list[Item] = []
    for number, item in enumerate(items):
        flat += item if number in kept and isinstance(item, tuple) else (item,)
    return Plan(flat)
