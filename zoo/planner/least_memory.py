"""The plan of least peak memory in which no step runs more than twice: `checkpoint=True`.

Such a plan is a row of segments and kept steps. For a given peak, paths through the n + 1 states
are searched: a path to state i is a label, the bytes that its items hold and which of the storages
in state i are among them. Only those can matter later, since a storage in two states is in all
states between them. A label is dropped when another could hold what it holds for fewer bytes.

    segment [i, j)   holds live(i); its turn needs  need(i, j)  beside what is held
    kept step i      holds saved(i); its turn needs its forward, and later its backward

The least peak for which a path reaches the end is found by bisection, to a thousandth. Afterwards
segments whose backward leaves room are kept instead, the most arithmetic first: that costs no peak.

Source: the dynamic programs of Feng and Huang 2018 (arXiv:1808.00079) and Kusumoto et al. 2019
(arXiv:1905.11722), here over tuple states with shared storage.
"""

from collections.abc import Iterator
from typing import NamedTuple, Optional

from zoo.plan import Item, Plan, indices
from zoo.planner.costs import StepCosts
from zoo.planner.simulate import simulate


class Segment(NamedTuple):
    """A segment up to step `stop` - 1: the bytes that its turn needs, the storages it shares."""

    stop: int
    need: int
    shared: frozenset[int]


class Label(NamedTuple):
    """A path to a state: bytes held, which of the state's storages are held, the last item."""

    held: int
    storages: frozenset[int]
    start: int
    kept: bool
    before: Optional["Label"]


def least_memory(costs: StepCosts) -> Plan:
    """Returns the plan of least peak in which no step runs more than twice. No timing is used."""
    ceiling = min(simulate(plan, costs).peak for plan in _uniform(len(costs)))
    segments = [list(_segments_from(costs, start, ceiling)) for start in range(len(costs))]
    low, high = 0, ceiling
    best = _path(costs, segments, high)
    while high - low > high // 1000:
        middle = (low + high) // 2
        path = _path(costs, segments, middle)
        if path is None:
            low = middle + 1
        else:
            best, high = path, middle
    assert best is not None, "one of the uniform plans reaches the ceiling"
    return _keep_what_is_free(_items(best, len(costs)), costs)


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
        yield Segment(step + 1, need, shared)


def _path(costs: StepCosts, segments: list[list[Segment]], peak: int) -> Label | None:
    """Finds a path to the end within a peak, None when there is none."""
    labels: list[list[Label]] = [[] for _ in range(len(costs) + 1)]
    labels[0] = [Label(0, frozenset(), 0, False, None)]
    for start in range(len(costs)):
        live, saved = costs.live[start], costs.saved[start]
        cheapest: tuple[int, Label] | None = None
        for label in labels[start]:
            whole = label.held + costs.bytes_of(live - label.storages)
            if cheapest is None or whole < cheapest[0]:
                cheapest = (whole, label)
            held = label.held + costs.bytes_of(saved - label.storages)
            turn = held + costs.gradients[start + 1] + costs.backward[start]
            if max(whole + costs.forward[start], turn) <= peak:
                storages = (label.storages | saved) & costs.live[start + 1]
                _offer(labels[start + 1], Label(held, storages, start, True, label), costs)
        if cheapest is not None:
            whole, label = cheapest
            for stop, need, shared in segments[start]:
                if whole + need <= peak:
                    _offer(labels[stop], Label(whole, shared, start, False, label), costs)
    return min(labels[-1], key=lambda label: label.held, default=None)


def _offer(labels: list[Label], offer: Label, costs: StepCosts) -> None:
    """Adds a label unless another could hold what it holds for no more bytes."""
    for label in labels:
        if label.held <= offer.held:
            missing = offer.storages - label.storages
            if not missing or label.held + costs.bytes_of(missing) <= offer.held:
                return
    labels[:] = [
        label
        for label in labels
        if offer.held + costs.bytes_of(label.storages - offer.storages) > label.held
    ]
    labels.append(offer)


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
