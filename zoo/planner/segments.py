"""The segments of a chain for a search of plans: the bytes that each needs, and where they end.

A chain of 2,000 steps has two million segments, and hundreds of thousands fit. So their bytes are
sums of numbers, no sets; and a search is given few of them. A segment holds the same wherever it
ends, the state that it begins with. So of two ends within a peak the later one is enough where no
state from the one to the other is cheaper to hold than its own, and each shares the same storages
with the first state.

A tensor that is saved by several steps and in no state counts for each of them.
"""

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping

from zoo.planner.costs import StepCosts
from zoo.planner.plan import LARGEST

# for a first step and free bytes, the ends of segments to try and the bytes that they need
Ends = Callable[[int, int], Iterable[tuple[int, int]]]

# with 8, plans of five deep models recompute 0 to 3 % more operations; with 12, as with either
FEW = 16


class Segments:
    """The segments that fit a ceiling: the bytes that they need, and which of their ends matter.

    `beside_outputs` are the costs without the outputs, which the caller holds under every plan. A
    segment holds the state that it begins with as these have it.
    """

    def __init__(self, costs: StepCosts, beside_outputs: StepCosts, ceiling: int) -> None:
        # by first step and length, and the least that one of that length or longer needs
        self.needs = list(_needs(costs, beside_outputs, ceiling))
        self.least = [_least_from(needs) for needs in self.needs]
        last, live = _last_states(beside_outputs), beside_outputs.live
        # by state, for each of its storages the last state that has it, in order
        self.lasts = [sorted({last[storage] for storage in storages}) for storages in live]
        # by state, the last one before it that has fewer bytes
        self.smaller: list[int] = []
        sizes = list(map(costs.bytes_of, live))
        for state, size in enumerate(sizes):
            before = state - 1
            while before >= 0 and sizes[before] >= size:
                before = self.smaller[before]
            self.smaller.append(before)
        # by first step the end of the longest segment that recomputes no operations, else the next
        self.free = list(range(1, len(costs) + 1))
        for start in reversed(range(len(costs) - 1)):
            if costs.flops[start] == costs.flops_until_saved[start + 1] == 0:
                self.free[start] = self.free[start + 1]

    def ends(self, start: int, slack: int, limit: int = LARGEST) -> Iterator[tuple[int, int]]:
        """Yields the ends that matter up to a limit, the last one first, and what they need.

        Two states share the same storages with the first one, unless one of these is needed by the
        earlier state for the last time.
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
        """Yields few of the last ends, and of those that recompute no operations; all of few."""
        longest = bisect_right(self.least[start], slack)
        if longest < FEW:
            needs = enumerate(self.needs[start][:longest], start + 1)
            yield from ((stop, need) for stop, need in needs if need <= slack)
        else:
            yield from itertools.islice(self.ends(start, slack), FEW)
            yield from itertools.islice(self.ends(start, slack, self.free[start]), FEW)

    def ends_among(self, stops: Mapping[int, int]) -> Ends:
        """Returns what yields one end for some first steps, where the segment fits."""

        def ends(start: int, slack: int) -> Iterator[tuple[int, int]]:
            needs = self.needs[start]
            length = stops.get(start, LARGEST) - start
            if length <= len(needs) and needs[length - 1] <= slack:
                yield stops[start], needs[length - 1]

        return ends


def _last_states(costs: StepCosts) -> dict[int, int]:
    return {storage: state for state, live in enumerate(costs.live) for storage in live}


def _needs(costs: StepCosts, beside_outputs: StepCosts, ceiling: int) -> Iterator[list[int]]:
    """Yields for each step what the segments need that begin there, up to where none fits.

    The bytes of a step are those of a segment that holds nothing before it begins. As the start
    moves on, they lose the storages of its state.
    """
    steps, live, saved = range(len(costs)), costs.live, costs.saved
    last = _last_states(costs)
    first_saved = {storage: step for step in reversed(steps) for storage in saved[step]}
    held: frozenset[int] = frozenset()
    unsaved, new = [], []
    for step in steps:
        unsaved.append(costs.bytes_of(live[step] - held))
        new.append(costs.bytes_of(saved[step] - held))
        held = (held | saved[step]) & live[step + 1]
    states = map(costs.bytes_of, beside_outputs.live)
    handed = list(map(operator.add, states, beside_outputs.forward))
    turns = list(map(operator.add, costs.gradients[1:], costs.backward))
    fixed = turns, costs.forward, costs.forward_until_saved, costs.gradients[1:]
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
        rows = zip(*(row[start:] for row in (handed, unsaved, new, *fixed)), strict=False)
        yield list(_needs_from(rows, ceiling))


def _needs_from(rows: Iterable[tuple[int, ...]], ceiling: int) -> Iterator[int]:
    """Yields what a segment needs that ends with the first step, the second, and so on."""
    kept = 0  # bytes saved so far in the recomputation
    through = 0  # largest need of the recomputation whose last step does not stop early
    behind = 0  # largest need of the backwards
    for handed, unsaved, new, turn, forward, until_saved, gradient in rows:
        before = kept + unsaved
        kept += new
        # comparisons: calls of `max` would take most of the time
        if kept + turn > behind:
            behind = kept + turn
            if behind > ceiling:
                return
        stopped = before + until_saved
        need = (stopped if stopped > through else through) + gradient
        need = need if need > behind else behind
        yield need if need > handed else handed
        worked = before + forward
        through = through if through > worked else worked


def _least_from(numbers: list[int]) -> list[int]:
    """Returns for each number the least of it and those that follow."""
    least = numbers[-1:]
    for number in numbers[-2::-1]:
        least.append(number if number < least[-1] else least[-1])
    return least[::-1]
