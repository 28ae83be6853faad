"""The plan of least peak memory that recomputes no step more than once: `checkpoint=True`.

Such a plan is a row of segments and kept steps. For a given peak, paths through the n + 1 states
are searched: a path to state i is a label, which of the storages in state i its items hold and the
bytes that they hold beside these. Only that can matter later, since a storage in two states is in
all states between them. A label is dropped when another could hold the same for fewer bytes.

    segment [i, j)   holds live(i); its backward needs  need(i, j)  beside the bytes held
    kept step i      holds saved(i); needs bytes in its forward, and later in its backward

Outputs of the chain are left out of what a path holds: the caller holds them under every plan. The
least peak for which a path reaches the end is found by bisection, to a thousandth. Where all steps
can be kept within it, as gradients take most, they are. A second search within that peak looks for
the path that recomputes the fewest operations. It extends few labels of a state, from those that
hold least to those that recompute least, by few segments, the longest and those that recompute no
operations; so it may miss the best path. A third search keeps what it can of these segments, since
steps without operations take time, too.

Source: the dynamic programs of Feng and Huang 2018 (arXiv:1808.00079) and Kusumoto et al. 2019
(arXiv:1905.11722), here over tuple states with shared storage.
"""

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Optional

from zoo.planner.costs import StepCosts, least_possible, simulate
from zoo.planner.plan import Item, Plan
from zoo.planner.segments import Ends, Segments

Storages = frozenset[int]

# labels of a state that the second search extends; twice as many improve hardly any plan
MOST = 8


class Label(NamedTuple):
    """A path to a state: the bytes that it holds `beside` those `storages` of the state it holds.

    Its peak and what it recomputes are of all items, the steps are those of the last one.
    """

    beside: int
    recomputed: int
    storages: Storages
    peak: int
    steps: range
    kept: bool
    before: Optional["Label"]

    def items(self) -> list["Label"]:
        """Returns the labels of the path, the one of its first item first."""
        labels = [self]
        while labels[-1].before is not None:
            labels.append(labels[-1].before)
        return labels[-2::-1]


Labels = list[Label]
# of a state's labels, those to extend by a kept step and those to extend by a segment
Narrow = Callable[[Labels, int, StepCosts], tuple[Labels, Labels]]


def least_memory(costs: StepCosts) -> Plan:
    """Returns a plan of least peak that recomputes no step more than once, and few operations."""
    low = middle = least_possible(costs)  # tried first: where gradients are large it is reached
    everything = Plan.keep_all(len(costs))
    if simulate(everything, costs).peak <= low + low // 1000:
        return everything
    plan, high = _uniform(costs)
    beside_outputs = _beside_outputs(costs)
    outputs = costs.bytes_of(costs.returned)
    low, middle, high = low - outputs, middle - outputs, high - outputs
    segments = Segments(costs, beside_outputs, high)
    best = None
    while high - low > (high + outputs) // 1000:
        path = _path(_counting(beside_outputs, 0, 0), middle, _by_bytes, segments.ends)
        if path is None:
            low = middle + 1
        else:
            best, high = path, path.peak
        middle = (low + high) // 2
    best = _path(beside_outputs, high, _by_arithmetic, segments.few_ends) or best
    if best is None:
        return plan
    stops = {label.steps.start: label.steps.stop for label in best.items()}
    scale = len(costs) + 1
    counting, same = _counting(beside_outputs, scale, 1), segments.ends_among(stops)
    kept = _path(counting, high, _by_arithmetic, same)
    if kept is not None and kept.recomputed // scale <= best.recomputed:
        best = kept
    items: list[Item] = []
    for label in best.items():
        items += label.steps if label.kept else (tuple(label.steps),)
    return Plan(items)


def _uniform(costs: StepCosts) -> tuple[Plan, int]:
    """Returns a plan of equal segments and its peak: of 1, 2, 4, ... steps until more need more."""
    steps = range(len(costs))
    best: tuple[Plan, int] | None = None
    for length in (2**power for power in range(len(costs).bit_length() or 1)):
        plan = Plan([tuple(steps[start : start + length]) for start in steps[::length]])
        peak = simulate(plan, costs).peak
        if best and peak > best[1]:
            break
        best = plan, peak
    assert best is not None
    return best


def _beside_outputs(costs: StepCosts) -> StepCosts:
    """Returns the costs without the outputs, which the caller holds under every plan.

    During the forward an output counts once an earlier step has made it.
    """
    outputs = costs.bytes_of(costs.returned)
    made = (costs.bytes_of(present & costs.returned) for present in costs.present)
    return replace(
        costs,
        live=tuple(live - costs.returned for live in costs.live),
        saved=tuple(saved - costs.returned for saved in costs.saved),
        forward=tuple(
            allocated + made_before - outputs
            for allocated, made_before in zip(costs.forward, made, strict=True)
        ),
        returned=frozenset(),
    )


def _counting(costs: StepCosts, scale: int, step: int) -> StepCosts:
    """Returns costs that count operations at a scale, and so many for each step."""
    return replace(
        costs,
        flops=tuple(flops * scale + step for flops in costs.flops),
        flops_until_saved=tuple(flops * scale + step for flops in costs.flops_until_saved),
    )


def _path(costs: StepCosts, peak: int, narrow: Narrow, ends: Ends) -> Label | None:
    """Finds a path to the end within a peak, None when there is none."""
    sizes = [costs.bytes_of(live) for live in costs.live]
    done = [0, *itertools.accumulate(costs.flops)]
    labels: list[Labels] = [[] for _ in costs.live]
    labels[0] = [Label(0, 0, frozenset(), 0, range(0), False, None)]
    for start, (live, after) in enumerate(itertools.pairwise(costs.live)):
        kept, cut = narrow(labels[start], start, costs)
        shared: dict[int, tuple[Storages, int]] = {}
        for label in cut:
            whole, before = label.beside + sizes[start], label.recomputed - done[start]
            for stop, need in ends(start, peak - whole):
                recomputed = before + done[stop - 1] + costs.flops_until_saved[stop - 1]
                other = labels[stop][-1] if labels[stop] else None
                # the segment of an earlier start holds none of the state that this one does not
                if other and other.beside <= label.beside and other.recomputed <= recomputed:
                    continue
                if stop not in shared:
                    storages = live & costs.live[stop]
                    shared[stop] = storages, costs.bytes_of(storages)
                storages, size = shared[stop]
                top, steps = max(label.peak, whole + need), range(start, stop)
                after_it = Label(whole - size, recomputed, storages, top, steps, False, label)
                labels[stop].append(after_it)
        turn = costs.gradients[start + 1] + costs.backward[start]
        for label in kept:
            storages = label.storages | costs.saved[start]
            held = label.beside + costs.bytes_of(storages)
            top = max(label.beside + sizes[start] + costs.forward[start], held + turn)
            if top <= peak:
                storages &= after
                beside, top = held - costs.bytes_of(storages), max(label.peak, top)
                step = range(start, start + 1)
                after_it = Label(beside, label.recomputed, storages, top, step, True, label)
                labels[start + 1].append(after_it)
    return min(labels[-1], key=operator.attrgetter("recomputed", "peak"), default=None)


def _by_bytes(labels: Labels, start: int, costs: StepCosts) -> tuple[Labels, Labels]:
    """Extends all labels that may hold least by a kept step; by a segment that which does."""
    best: Labels = []
    first: dict[Storages, Label] = {}
    for label in sorted(labels, key=operator.attrgetter("beside", "peak")):
        first.setdefault(label.storages, label)
    for label in first.values():
        if all(
            other.beside + costs.bytes_of(other.storages - label.storages) > label.beside
            for other in best
        ):
            best.append(label)
    return best, best[:1]


def _by_arithmetic(labels: Labels, start: int, costs: StepCosts) -> tuple[Labels, Labels]:
    """Extends few labels, from those that then hold least to those that recompute least."""
    saved = costs.saved[start]
    sizes = {held: costs.bytes_of(held | saved) for held in {label.storages for label in labels}}
    return (
        _front(labels, lambda label: (label.beside + sizes[label.storages], label.recomputed)),
        _front(labels, operator.itemgetter(0, 1)),
    )


def _front(labels: Labels, key: Callable[[Label], tuple[int, int]]) -> Labels:
    """Returns of the Pareto front of bytes and operations at most `MOST`, evenly by operations."""
    front: Labels = []
    for label in sorted(labels, key=key):
        if not front or label.recomputed < front[-1].recomputed:
            front.append(label)
    if len(front) <= MOST:
        return front
    most, least = front[0].recomputed, front[-1].recomputed
    parts: dict[int, Label] = {}
    for label in front:
        parts.setdefault((most - label.recomputed) * (MOST - 1) // (most - least), label)
    return list(parts.values())
