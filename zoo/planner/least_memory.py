"""The plan of least peak memory that recomputes no step more than once: `checkpoint=True`.

Such a plan is a sequence of segments and kept steps. For a given peak, paths through the n + 1
states are searched. A path to state i has a label: the storages of state i that its items hold, and
the bytes that they hold in addition. Nothing else can matter later, since a storage in two states
is in all states between them. A label is dropped if another could hold the same for fewer bytes.

    segment [i, j)   holds live(i); its backward needs  need(i, j)  above the bytes held
    kept step i      holds saved(i); needs bytes in its forward, and later in its backward

Paths do not count outputs of the model, which the caller holds under every plan. The least peak for
which a path reaches the end is found by bisection, to a thousandth. If all steps can be kept within
it, since gradients decide the peak, they are. A second search within that peak looks for the path
that recomputes the fewest operations. It extends few labels of a state, from those that hold least
to those that recompute least, by few segments: the longest, and those that recompute no operations;
so it may miss the best path. A third search keeps steps of these segments where that fits, since
steps without operations take time, too.

Of 2,000 steps there are two million segments, and hundreds of thousands fit. So their bytes are
computed as sums of numbers, not from sets; and a search gets few of them. A segment holds its first
state, wherever it ends. So of two ends within a peak the later one is enough if no state from the
earlier to the later end is cheaper to hold, and both share the same storages with the first state.
A tensor that several steps save and that is in no state counts for each of them.

Source: the dynamic programs of Feng and Huang 2018 (arXiv:1808.00079) and Kusumoto et al. 2019
(arXiv:1905.11722), here over tuple states with shared storage.
"""

import functools
import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Optional

from zoo.planner.costs import StepCosts, least_possible, simulate
from zoo.planner.plan import LARGEST, Item, Plan, falling

Storages = frozenset[int]

# labels of a state that the second search extends; twice as many improve hardly any plan
MOST = 8
# from a first step and the free bytes: the ends of segments to try and the bytes that they need
Ends = Callable[[int, int], Iterable[tuple[int, int]]]

# the ends of a segment that the second search tries; with 8, plans of five deep models recompute
# 0 to 3 % more operations
FEW = 16


class PathLabel(NamedTuple):
    """A path to a state."""

    beside: int  # bytes that it holds in addition to `storages`
    recomputed: int  # operations
    storages: Storages  # the storages of the state that it holds
    peak: int
    steps: range  # the steps of its last item: one kept step or a segment
    is_kept: bool
    before: Optional["PathLabel"]

    def items(self) -> list["PathLabel"]:
        """Returns the labels of the path, the one of its first item first."""
        labels = [self]
        while labels[-1].before is not None:
            labels.append(labels[-1].before)
        return labels[-2::-1]


Labels = list[PathLabel]
# selects from a state's labels those to extend by a kept step and those to extend by a segment
Narrow = Callable[[Labels, int, StepCosts], tuple[Labels, Labels]]


def least_memory(costs: StepCosts) -> Plan:
    """Returns a plan of least peak that recomputes no step twice, and few operations."""
    least, everything = least_possible(costs), Plan.keep_all(len(costs))
    if simulate(everything, costs).peak <= least + least // 1000:
        return everything
    plan, peak = _uniform(costs)
    beside_outputs, outputs = _beside_outputs(costs), costs.bytes_of(costs.held_until_end)
    # the lower bound is tried first: with large gradients it is reached
    low = middle = least - outputs
    high = peak - outputs
    segments = FittingSegments(costs, beside_outputs, high)
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
    same = functools.partial(segments.one_end, stops)
    with_kept_steps = _path(_counting(beside_outputs, scale, 1), high, _by_arithmetic, same)
    if with_kept_steps is not None and with_kept_steps.recomputed // scale <= best.recomputed:
        best = with_kept_steps
    items: list[Item] = []
    for label in best.items():
        items += label.steps if label.is_kept else (tuple(label.steps),)
    return Plan(items)


def _uniform(costs: StepCosts) -> tuple[Plan, int]:
    """Returns a plan of equal segments and its peak: the best of 1, 2, 4, ... steps each."""
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
    """Returns the costs without the outputs; in the forward an output counts once it is made."""
    outputs = costs.bytes_of(costs.held_until_end)
    by_step = (costs.bytes_of(present & costs.held_until_end) for present in costs.present)
    return replace(
        costs,
        live=tuple(live - costs.held_until_end for live in costs.live),
        saved=tuple(saved - costs.held_until_end for saved in costs.saved),
        forward=tuple(
            allocated + made_before - outputs
            for allocated, made_before in zip(costs.forward, by_step, strict=True)
        ),
        held_until_end=frozenset(),
    )


def _counting(costs: StepCosts, scale: int, step: int) -> StepCosts:
    """Returns costs with scaled operations, plus `step` operations for each step."""
    return replace(
        costs,
        flops=tuple(flops * scale + step for flops in costs.flops),
        flops_until_saved=tuple(flops * scale + step for flops in costs.flops_until_saved),
    )


def _path(costs: StepCosts, peak: int, narrow: Narrow, ends: Ends) -> PathLabel | None:
    """Finds a path to the end within a peak; None if there is none."""
    sizes = [costs.bytes_of(live) for live in costs.live]
    done = [0, *itertools.accumulate(costs.flops)]
    labels: list[Labels] = [[] for _ in costs.live]
    labels[0] = [PathLabel(0, 0, frozenset(), 0, range(0), False, None)]
    for start, (live, after) in enumerate(itertools.pairwise(costs.live)):
        by_step, by_segment = narrow(labels[start], start, costs)
        shared: dict[int, tuple[Storages, int]] = {}
        for label in by_segment:
            whole, before = label.beside + sizes[start], label.recomputed - done[start]
            for stop, need in ends(start, peak - whole):
                recomputed = before + done[stop - 1] + costs.flops_until_saved[stop - 1]
                other = labels[stop][-1] if labels[stop] else None
                # the segment with the earlier start holds no more of this state
                if other and other.beside <= label.beside and other.recomputed <= recomputed:
                    continue
                if stop not in shared:
                    storages = live & costs.live[stop]
                    shared[stop] = storages, costs.bytes_of(storages)
                storages, size = shared[stop]
                top, steps = max(label.peak, whole + need), range(start, stop)
                after_it = PathLabel(whole - size, recomputed, storages, top, steps, False, label)
                labels[stop].append(after_it)
        backward = costs.gradients[start + 1] + costs.backward[start]
        for label in by_step:
            storages = label.storages | costs.saved[start]
            total = label.beside + costs.bytes_of(storages)
            top = max(label.beside + sizes[start] + costs.forward[start], total + backward)
            if top <= peak:
                storages &= after
                beside, top = total - costs.bytes_of(storages), max(label.peak, top)
                step = range(start, start + 1)
                after_it = PathLabel(beside, label.recomputed, storages, top, step, True, label)
                labels[start + 1].append(after_it)
    return min(labels[-1], key=operator.attrgetter("recomputed", "peak"), default=None)


def _by_bytes(labels: Labels, start: int, costs: StepCosts) -> tuple[Labels, Labels]:
    """Extends all labels that may hold least by a kept step; the one that does by a segment."""
    best: Labels = []
    first: dict[Storages, PathLabel] = {}
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
    """Extends few labels, from those that hold least to those that recompute least."""
    saved = costs.saved[start]
    sizes = {s: costs.bytes_of(s | saved) for s in {label.storages for label in labels}}
    return (
        _front(labels, lambda label: (label.beside + sizes[label.storages], label.recomputed)),
        _front(labels, operator.itemgetter(0, 1)),
    )


def _front(labels: Labels, key: Callable[[PathLabel], tuple[int, int]]) -> Labels:
    """Returns at most `MOST` labels of the Pareto front of bytes and operations, evenly spread."""
    front = falling(labels, key, operator.attrgetter("recomputed"))
    if len(front) <= MOST:
        return front
    most, least = front[0].recomputed, front[-1].recomputed
    parts: dict[int, PathLabel] = {}
    for label in front:
        parts.setdefault((most - label.recomputed) * (MOST - 1) // (most - least), label)
    return list(parts.values())


class FittingSegments:
    """The segments that fit a ceiling: the bytes that they need, and which of their ends matter.

    A segment holds the state that it begins with as `beside_outputs` has it.
    """

    def __init__(self, costs: StepCosts, beside_outputs: StepCosts, ceiling: int) -> None:
        # by first step and length; and the least bytes of a segment of that length or longer
        self.needs = list(_needs(costs, beside_outputs, ceiling))
        self.least = [_least_from(needs) for needs in self.needs]
        last, live = beside_outputs.last_states(), beside_outputs.live
        # by state: the last states that have its storages, in order
        self.lasts = [sorted({last[storage] for storage in storages}) for storages in live]
        # by state: the last earlier state with fewer bytes
        self.smaller: list[int] = []
        sizes = list(map(costs.bytes_of, live))
        for state, size in enumerate(sizes):
            before = state - 1
            while before >= 0 and sizes[before] >= size:
                before = self.smaller[before]
            self.smaller.append(before)
        # by first step: the end of the longest segment without operations, else the next state
        self.free = list(range(1, len(costs) + 1))
        for start in reversed(range(len(costs) - 1)):
            if costs.flops[start] == costs.flops_until_saved[start + 1] == 0:
                self.free[start] = self.free[start + 1]

    def ends(self, start: int, slack: int, limit: int = LARGEST) -> Iterator[tuple[int, int]]:
        """Yields the ends that matter up to a limit, the last one first, and their bytes.

        Two states share the same storages with the first one, unless the earlier of them is the
        last state that has one of these.
        """
        needs, lasts = self.needs[start], self.lasts[start]
        stop = min(start + bisect_right(self.least[start], slack), limit)
        while stop > start:
            need = needs[stop - start - 1]
            if need > slack:
                stop -= 1
                continue
            yield stop, need
            before = bisect_left(lasts, stop)
            stop = max(self.smaller[stop], lasts[before - 1] if before else 0)

    def few_ends(self, start: int, slack: int) -> Iterator[tuple[int, int]]:
        """Yields a few of the last ends, and of those without operations; or all if few."""
        longest = bisect_right(self.least[start], slack)
        if longest < FEW:
            needs = enumerate(self.needs[start][:longest], start + 1)
            yield from ((stop, need) for stop, need in needs if need <= slack)
        else:
            yield from itertools.islice(self.ends(start, slack), FEW)
            yield from itertools.islice(self.ends(start, slack, self.free[start]), FEW)

    def one_end(
        self, stops: Mapping[int, int], start: int, slack: int
    ) -> Iterator[tuple[int, int]]:
        """Yields the end in `stops` for a first step, if that segment fits."""
        needs, length = self.needs[start], stops.get(start, LARGEST) - start
        if length <= len(needs) and needs[length - 1] <= slack:
            yield stops[start], needs[length - 1]


def _needs(costs: StepCosts, beside_outputs: StepCosts, ceiling: int) -> Iterator[list[int]]:
    """Yields for each first step the bytes of its segments, up to the length at which none fits.

    The bytes of a step are those of a segment that holds nothing before it begins. As the start
    advances, the storages of its state are subtracted.
    """
    steps, live, saved = range(len(costs)), costs.live, costs.saved
    last = costs.last_states()
    first_saved = {storage: step for step in reversed(steps) for storage in saved[step]}
    earlier: frozenset[int] = frozenset()
    unsaved, new, own = [], [], []
    for step in steps:
        unsaved.append(costs.bytes_of(live[step] - earlier))
        new.append(costs.bytes_of(saved[step] - earlier))
        own.append(costs.bytes_of(saved[step] - earlier - costs.held_until_end))
        earlier = (earlier | saved[step]) & live[step + 1]
    states = map(costs.bytes_of, beside_outputs.live)
    handed = list(map(operator.add, states, beside_outputs.forward))
    backwards = list(map(operator.add, costs.gradients[1:], costs.backward))
    fixed = backwards, costs.forward, costs.forward_until_saved, costs.gradients[1:]
    for start in steps:
        for storage in live[start] - (live[start - 1] if start else frozenset()):
            size, save = costs.sizes[storage], first_saved.get(storage, len(costs))
            is_held = storage in beside_outputs.live[start]
            for step in steps[start : last[storage] + 1]:
                if is_held:
                    handed[step] -= size
                if step <= save:
                    unsaved[step] -= size
            if save < len(costs):
                new[save] -= size
                own[save] -= size if storage not in costs.held_until_end else 0
        rows = zip(*(row[start:] for row in (handed, unsaved, new, own, *fixed)), strict=False)
        yield list(_needs_from(rows, ceiling))


def _needs_from(rows: Iterable[tuple[int, ...]], ceiling: int) -> Iterator[int]:
    """Yields the bytes of the segment that ends with the first step, the second, and so on."""
    saved = 0  # bytes saved so far in the recomputation
    left = 0  # these bytes without outputs, which the caller holds
    through = 0  # peak of the recomputation if its last step does not stop early
    behind = 0  # peak of the backwards
    for handed, unsaved, new, own, backward, forward, until_saved, gradient in rows:
        before = saved + unsaved
        saved += new
        left += own
        # comparisons, since calls of `max` would take most of the time
        if left + backward > behind:
            behind = left + backward
            if behind > ceiling:
                return
        stopped = before + until_saved
        need = (stopped if stopped > through else through) + gradient
        need = need if need > behind else behind
        yield need if need > handed else handed
        worked = before + forward
        through = through if through > worked else worked


def _least_from(numbers: list[int]) -> list[int]:
    """Returns the minimum of each number and all that follow it."""
    least = numbers[-1:]
    for number in numbers[-2::-1]:
        least.append(number if number < least[-1] else least[-1])
    return least[::-1]
