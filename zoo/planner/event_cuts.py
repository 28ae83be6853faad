"""Leaves out cuts between operators that no plan gains by, so that planning is faster.

A segment begins at a cut and holds the state there. A cut is left out where another one is as good:

    the step between two cuts                           left out    since the other cut
    saves and allocates nothing, such as x + y, and     before it   holds no more; what follows it
    and behind it no more is alive                                  recomputes less
    has no gradient, such as a random mask              behind it   holds less
    casts a weight, which autocast holds                behind it   is as good: a replay casts, too
    writes what the step before made                    before it   holds no copy of it

Among steps without gradients, such as those of a metric, a cut is kept only where less is alive
than at both ends of their row. Cuts between modules stay, where a block may begin.
"""

import bisect
from collections.abc import Container, Sequence

from zoo.planner.step_events import AT_END, Allocated, KernelRun, Saved, StepEvents, Viewed


def useful_cuts(
    events: StepEvents, cuts: Sequence[int], within: Sequence[tuple[str, ...]]
) -> list[int]:
    """Returns the numbers of the cuts to keep; a cut is the first operator of a step.

    `within` has for each cut the modules that run there, outermost first.
    """
    numbers = list(range(len(cuts)))
    for rule in (_in_row, _beside_better):
        steps = _StepUses(events, [cuts[number] for number in numbers])
        is_left_out = rule(steps, [within[number] for number in numbers])
        numbers = [n for n, left_out in zip(numbers, is_left_out, strict=True) if not left_out]
    return numbers


class _StepUses:
    """What each step makes, uses and saves, and the bytes of the state that it begins with."""

    def __init__(self, events: StepEvents, cuts: Sequence[int]) -> None:
        count = len(cuts)
        self.allocated: list[set[int]] = [set() for _ in cuts]
        self.used: list[set[int]] = [set() for _ in cuts]
        self.written: list[set[int]] = [set() for _ in cuts]
        self.flops, self.saves = [0] * count, [False] * count
        # whether an autograd node of the step runs, and whether one allocates
        self.has_nodes, self.allocates = [False] * count, [False] * count
        # bytes alive from a step on; bytes that it reads last, in all and without saved ones
        self.begun, self.ended, self.ended_unsaved = [0] * count, [0] * count, [0] * count

        def step_of(operator: int) -> int:
            return max(bisect.bisect_right(cuts, operator) - 1, 0)

        saved = set[int]()
        for operator, event in events.forward:
            step = step_of(operator)
            if isinstance(event, Allocated):
                self.allocated[step].add(event.storage)
            elif isinstance(event, Viewed):
                self.used[step].add(event.storage)
            elif isinstance(event, KernelRun):
                self.used[step] |= event.reads
                self.written[step] |= event.writes
                self.flops[step] += event.flops
            elif isinstance(event, Saved):
                self.saves[step] = True
                saved.add(event.storage)
        for run in events.backward:
            if run.operator != AT_END:
                step = step_of(run.operator)
                self.has_nodes[step] = True
                self.allocates[step] |= any(isinstance(event, Allocated) for event in run.events)
        # whether a step makes nothing but casts of weights that autocast holds
        self.casts = [bool(storages) and storages <= events.casts for storages in self.allocated]
        self._count(events, saved)
        self.live = [0]
        for begun, ended in zip(self.begun, self.ended, strict=True):
            self.live.append(self.live[-1] + begun - ended)

    def _count(self, events: StepEvents, saved: Container[int]) -> None:
        count = len(self.allocated)
        last = {storage: step for step, used in enumerate(self.used) for storage in used}
        last |= dict.fromkeys(events.outputs | events.ends, count)
        for step, storages in enumerate(self.allocated):
            for storage in storages - events.casts:
                end, size = last.get(storage, step), events.sizes[storage]
                if end == step:
                    continue
                self.begun[step] += size
                if end < count:
                    self.ended[end] += size
                    self.ended_unsaved[end] += 0 if storage in saved else size

    def is_passive(self, step: int) -> bool:
        """Returns whether the backward has nothing to do with a step."""
        return not (self.saves[step] or self.has_nodes[step])


def _in_row(steps: _StepUses, within: Sequence[tuple[str, ...]]) -> list[bool]:
    """Leaves out cuts inside a row of passive steps of one module."""
    passive = list(map(steps.is_passive, range(len(within))))
    continues = [
        passive[step] and passive[step - 1] and within[step] == within[step - 1]
        for step in range(1, len(within))
    ]
    left_out = [False] * len(within)
    start = 0
    for step, goes_on in enumerate([*continues, False], 1):
        if not goes_on:
            least = min(steps.live[start], steps.live[step])
            for inner in range(start + 1, step):
                left_out[inner] = steps.live[inner] >= least
            start = step
    return left_out


def _beside_better(steps: _StepUses, within: Sequence[tuple[str, ...]]) -> list[bool]:
    """Leaves out cuts before a step behind which less is alive, and behind a step that adds."""
    left_out = [False] * len(within)
    for step in range(1, len(within)):
        before, live = step - 1, steps.live
        is_free = not (steps.saves[step] or steps.allocates[step] or steps.ended_unsaved[before])
        # the reader of a cast joins its step, which begins with the cast
        is_free = is_free and not steps.casts[step]
        shrinks = is_free and steps.begun[step] <= steps.ended_unsaved[step]
        # no module begins with the step
        stays = within[before][: len(within[step])] == within[step]
        adds = steps.is_passive(before) and not steps.flops[before] and live[before] < live[step]
        is_read = not steps.allocated[before].isdisjoint(steps.used[step])
        is_same = within[step] == within[before]
        is_cast = steps.casts[before] and is_same
        overwrites = not steps.allocated[before].isdisjoint(steps.written[step])
        left_out[step] = (
            (shrinks and stays) or (adds and is_read and is_same) or is_cast or overwrites
        )
    return left_out
