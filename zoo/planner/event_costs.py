"""What steps use and cost, from the events of a training step and the operators where they begin.

Nothing is run. A step's forward has the events between two cuts; its backward those of the autograd
nodes that its operators made, the latest first. Both are counted for the step alone, with nothing
of other steps but their storages: it frees none of these, and a saved tensor exists until its node
has run.

A segment begins at a cut and holds the state there. So that planning is faster, a cut between two
operators is left out where another one is as good:

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
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zoo.planner.costs import StepCosts
from zoo.planner.step_events import (
    AT_END,
    Allocated,
    Event,
    Freed,
    Gradient,
    KernelRun,
    Released,
    Saved,
    StepEvents,
    Viewed,
)

Storages = frozenset[int]


@dataclass(slots=True)
class StorageUses:
    """The storages that operators read, write and make.

    Those in `keeps` they make or write in a way that no replay repeats.
    """

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    makes: set[int] = field(default_factory=set)
    keeps: set[int] = field(default_factory=set)


def storages_used(events: Iterable[tuple[int, Event]]) -> defaultdict[int, StorageUses]:
    """Returns what the operators, or steps, of these numbers use; nothing of one without events."""
    uses: defaultdict[int, StorageUses] = defaultdict(StorageUses)
    for number, event in events:
        if type(event) is Allocated:
            uses[number].makes.add(event.storage)
        elif type(event) is Viewed:
            uses[number].reads.add(event.storage)
        elif type(event) is KernelRun:
            of_number = uses[number]
            of_number.reads |= event.reads
            of_number.writes |= event.writes
            of_number.keeps |= event.keeps
    return uses


@dataclass(frozen=True)
class Outline:
    """The steps of a plan that a training step is cut into.

    Attributes:
        names: the names of the steps, in order.
        blocks: for each step the number of the block that it belongs to.
        whole: the steps that are each worth a segment: several kernels without a cut between.
        events: those of forward and backward.
        specs: the different kernel calls, as `KernelSpec` or None, by their numbers in the events.
        cuts: the first operator of each step, and that of the loss if there is one.
        lines: "file:line" of the code that each step begins with; "" if unknown.
        shapes: the shapes of the tensors that the last kernel of each step returned.
        parameters: numbers of the model's parameters that each step uses.
        dry_step: runs a `DryStep` of the model, and returns its log or a `FailedCall`; None where
            there is no such step.
    """

    names: tuple[str, ...]
    blocks: tuple[int, ...]
    whole: frozenset[int]
    events: StepEvents
    specs: Sequence[Any]
    cuts: tuple[int, ...]
    lines: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    parameters: tuple[frozenset[int], ...]
    dry_step: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def step_of(self, operator: int) -> int:
        """Returns the number of the step that an operator belongs to; behind the last, the loss."""
        return max(bisect.bisect_right(self.cuts, operator) - 1, 0)

    def without_loss(self) -> "Outline":
        """Returns the steps of the model alone."""
        if len(self.cuts) == len(self):
            return self
        # a dry step has the loss
        events = self.events.before(self.cuts[-1])
        return replace(self, events=events, cuts=self.cuts[:-1], dry_step=None)


class Rates(NamedTuple):
    """Costs of kernels that events lack: seconds, and bytes of workspace by the call's number."""

    seconds: Callable[[KernelRun], float] = lambda _: 0.0
    workspaces: Sequence[int] = ()

    def workspace(self, kernel: KernelRun) -> int:
        """Returns the bytes that a kernel takes beside its arguments and results."""
        return self.workspaces[kernel.number] if self.workspaces else 0


def costs_of(
    events: StepEvents,
    cuts: Sequence[int],
    blocks: Sequence[int],
    rates: Rates = Rates(),  # noqa: B008  (it is immutable)
    updates: Mapping[Any, int] | None = None,
    *,
    accumulates: bool = False,
) -> StepCosts:
    """Returns the costs of the steps; each begins at the operator of its cut.

    `blocks` has the number of each step's block. `updates` are the bytes that an optimizer
    allocates to update a parameter, by its form; if given, the optimizer steps in the backward
    and frees each gradient. With `accumulates` each gradient is freed when it has been added to
    that of earlier backwards, which is not counted.
    """
    steps = _Steps(events, cuts)
    numbers = range(len(cuts))
    backward = _Backward(steps, rates, updates, accumulates)
    kernels = [[event for event in part if type(event) is KernelRun] for part in steps.forward]
    early = [
        [event for event in part[:end] if type(event) is KernelRun]
        for part, end in zip(steps.forward, steps.until, strict=True)
    ]
    of_nodes = [[e for e in part if type(e) is KernelRun] for part in steps.backward[:-1]]
    return StepCosts(
        sizes=tuple(steps.sizes),
        live=tuple(steps.live),
        saved=tuple(steps.saved),
        forward=tuple(steps.peak(number, None, rates) for number in numbers),
        forward_until_saved=tuple(steps.peak(n, steps.until[n], rates) for n in numbers),
        backward=tuple(backward.peak(number) for number in numbers),
        gradients=backward.gradients,
        flops=tuple(sum(kernel.flops for kernel in calls) for calls in kernels),
        flops_until_saved=tuple(sum(kernel.flops for kernel in calls) for calls in early),
        seconds=tuple(sum(map(rates.seconds, calls)) for calls in kernels),
        seconds_until_saved=tuple(sum(map(rates.seconds, calls)) for calls in early),
        seconds_backward=tuple(sum(map(rates.seconds, calls)) for calls in of_nodes),
        blocks=tuple(blocks),
        parameter_gradients=backward.parameter_gradients,
        gradients_made=tuple(map(steps.gradients_made, numbers)),
    )


class _Steps:
    """The events of each step, and its storages."""

    def __init__(self, events: StepEvents, cuts: Sequence[int]) -> None:
        self.events, self.cuts, self.count = events, cuts, len(cuts)
        self.sizes = events.sizes
        self.gradients = {
            e.storage for run in events.backward for e in run.events if type(e) is Gradient
        }
        self.forward: list[list[Event]] = [[] for _ in cuts]
        of_steps = [(self.step_of(operator), event) for operator, event in events.forward]
        for step, event in of_steps:
            self.forward[step].append(event)
        used = storages_used(of_steps)
        self.uses = [used[step] for step in range(self.count)]
        # the last entry has the events before the first autograd node
        self.backward: list[list[Event]] = [[] for _ in (*cuts, None)]
        for run in events.backward:
            self.backward[self.step_of(run.operator)].extend(run.events)
        self.maker = {s: number for number, uses in enumerate(self.uses) for s in uses.makes}
        left_out = events.inputs | self.gradients
        self.saved: list[Storages] = [
            frozenset(event.storage for event in part if type(event) is Saved) - left_out
            for part in self.forward
        ]
        self.until = list(map(_until_saved, self.forward))
        self.live = self._live()

    def step_of(self, operator: int) -> int:
        """Returns the step of an operator; `AT_END` is behind the last step."""
        return (
            self.count
            if operator == AT_END
            else max(bisect.bisect_right(self.cuts, operator) - 1, 0)
        )

    def _live(self) -> list[Storages]:
        """Returns for each state the storages that later steps read; for the last one, the loss."""
        last = {s: number for number, uses in enumerate(self.uses) for s in uses.reads}
        last_step = self.uses[-1].makes if self.uses else set()
        ends = self.events.ends or self.events.outputs & last_step
        last.update(dict.fromkeys(ends, self.count))
        live: list[set[int]] = [set() for _ in range(self.count + 1)]
        for storage, end in last.items():
            if (first := self.maker.get(storage)) is None or storage in self.events.casts:
                continue
            for state in range(first + 1, end + 1):
                live[state].add(storage)
        return list(map(frozenset, live))

    def peak(self, number: int, end: int | None, rates: Rates) -> int:
        """Returns the most new bytes in a step's forward, or in its events before `end`."""
        made, saved, sizes = self.uses[number].makes, self.saved[number], self.sizes
        total = most = 0
        for event in self.forward[number][:end]:
            if type(event) is Allocated:
                if event.storage not in self.gradients:
                    total += sizes[event.storage]
            elif type(event) is Freed:
                if event.storage in made and event.storage not in saved:
                    total -= sizes[event.storage]
            elif type(event) is KernelRun:
                most = max(most, total + rates.workspace(event))
            most = max(most, total)
        return most

    def gradients_made(self, number: int) -> int:
        """Returns the bytes of parameters' gradients that a step's forward makes."""
        return sum(self.sizes[storage] for storage in self.uses[number].makes & self.gradients)


def _until_saved(events: Sequence[Event]) -> int:
    """Returns how many events a recomputation needs until the last tensor is saved.

    A tensor may be saved before its own kernel writes it, as dropout saves its mask.
    """
    last = max((n for n, event in enumerate(events) if type(event) is Saved), default=-1)
    waiting = {
        event.storage for event in events[: last + 1] if type(event) is Saved and event.is_blank
    }
    for number in range(last + 1, len(events)):
        event = events[number]
        if type(event) is KernelRun and not waiting.isdisjoint(event.writes):
            last = number
            waiting -= event.writes
    return last + 1


class _Backward:
    """The bytes of each step's backward, and those of gradients between two of them."""

    def __init__(
        self,
        steps: _Steps,
        rates: Rates,
        updates: Mapping[Any, int] | None,
        accumulates: bool,
    ) -> None:
        self.steps, self.rates, self.updates = steps, rates, updates
        self.keeps_gradients = updates is None and not accumulates
        sizes, gradients = steps.sizes, steps.gradients
        # gradients of one storage are freed with the last of them
        self.last: dict[int, int] = {}
        for part in steps.backward:
            for event in part:
                if type(event) is Gradient:
                    self.last[event.storage] = id(event)
        self.first_saved: dict[int, int] = {}
        for number, saved in reversed([*enumerate(steps.saved)]):
            self.first_saved.update(dict.fromkeys(saved, number))
        used = sum(sizes[storage] for storage in gradients)
        trained = sum(steps.events.trained)
        others = 0 if accumulates else max(trained - used, 0)
        alive = set[int]()
        # bytes alive: without the gradients of parameters, and of these
        totals = [0, others]

        def note(storage: int, *, is_alive: bool) -> None:
            if is_alive != (storage in alive):
                alive.symmetric_difference_update((storage,))
                totals[storage in gradients] += sizes[storage] if is_alive else -sizes[storage]

        of_states, of_parameters = [], []
        for number in range(steps.count, -1, -1):
            for event in steps.backward[number]:
                if type(event) is Allocated or (type(event) is Released and event.lives_on):
                    note(event.storage, is_alive=True)
                elif type(event) is Freed or (type(event) is Gradient and self.frees(event)):
                    note(event.storage, is_alive=False)
            # gradients that the forward of the step before made exist as well
            for storage in steps.uses[number - 1].makes & gradients if number else ():
                note(storage, is_alive=True)
            of_states.append(totals[0])
            of_parameters.append(min(totals[1], trained))
        self.gradients = tuple(reversed(of_states))
        self.parameter_gradients = tuple(reversed(of_parameters))

    def frees(self, gradient: Gradient) -> bool:
        """Returns whether a gradient is freed when it is complete."""
        return not self.keeps_gradients and self.last[gradient.storage] == id(gradient)

    def peak(self, number: int) -> int:
        """Returns the peak of a step's backward, above its saved tensors and incoming gradient."""
        steps, sizes = self.steps, self.steps.sizes
        part = steps.backward[number]
        ends = {e.storage: n for n, e in enumerate(part) if type(e) is Released}
        total = most = 0
        for position, event in enumerate(part):
            if type(event) is Allocated:
                total += sizes[event.storage]
            elif type(event) is Freed:
                total -= sizes[event.storage]
            elif type(event) is Released:
                if (
                    not event.lives_on
                    and ends[event.storage] == position
                    and self._is_last(event.storage, number)
                ):
                    total -= sizes[event.storage]
            elif type(event) is Gradient:
                if self.updates is not None:
                    most = max(most, total + self.updates.get(event.form, 0))
                if self.frees(event):
                    total -= sizes[event.storage]
            elif type(event) is KernelRun:
                most = max(most, total + self.rates.workspace(event))
            most = max(most, total)
        return most

    def _is_last(self, storage: int, number: int) -> bool:
        """Returns whether the step's last autograd node to release a saved storage frees it."""
        steps = self.steps
        if storage not in steps.saved[number]:
            return False
        if storage in steps.events.casts:
            return self.first_saved[storage] == number
        return storage not in steps.live[number]


def useful_cuts(
    events: StepEvents, cuts: Sequence[int], within: Sequence[tuple[str, ...]]
) -> list[int]:
    """Returns the numbers of the cuts to keep; a cut is the first operator of a step.

    `within` has for each cut the modules that run there, outermost first.
    """
    numbers = list(range(len(cuts)))
    for rule in (_in_row, _beside_better):
        steps = _StepStates(events, [cuts[number] for number in numbers])
        is_left_out = rule(steps, [within[number] for number in numbers])
        numbers = [n for n, left_out in zip(numbers, is_left_out, strict=True) if not left_out]
    return numbers


class _StepStates:
    """The steps between cuts, and the bytes of the state that each begins with."""

    def __init__(self, events: StepEvents, cuts: Sequence[int]) -> None:
        steps = _Steps(events, cuts)
        self.uses, count = steps.uses, steps.count
        kernels = [[e for e in part if type(e) is KernelRun] for part in steps.forward]
        self.flops = [sum(kernel.flops for kernel in part) for part in kernels]
        self.saves = [any(type(event) is Saved for event in part) for part in steps.forward]
        saved = {event.storage for _, event in events.forward if type(event) is Saved}
        # the steps of which autograd nodes run, and whether one allocates
        self.with_nodes = {steps.step_of(run.operator) for run in events.backward}
        self.allocates = [any(type(e) is Allocated for e in part) for part in steps.backward]
        # whether a step makes nothing but casts of weights that autocast holds
        self.casts = [bool(uses.makes) and uses.makes <= events.casts for uses in self.uses]
        # bytes alive from a step on; bytes that it reads last, in all and without saved ones
        self.begun, self.ended, self.ended_unsaved = [0] * count, [0] * count, [0] * count
        last = {storage: step for step, uses in enumerate(self.uses) for storage in uses.reads}
        last |= dict.fromkeys(events.outputs | events.ends, count)
        for storage, step in steps.maker.items():
            end, size = last.get(storage, step), events.sizes[storage]
            if end == step or storage in events.casts:
                continue
            self.begun[step] += size
            if end < count:
                self.ended[end] += size
                self.ended_unsaved[end] += 0 if storage in saved else size
        self.live = [0]
        for begun, ended in zip(self.begun, self.ended, strict=True):
            self.live.append(self.live[-1] + begun - ended)

    def is_passive(self, step: int) -> bool:
        """Returns whether the backward has nothing to do with a step."""
        return not (self.saves[step] or step in self.with_nodes)


def _in_row(steps: _StepStates, within: Sequence[tuple[str, ...]]) -> list[bool]:
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


def _beside_better(steps: _StepStates, within: Sequence[tuple[str, ...]]) -> list[bool]:
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
        made, uses = steps.uses[before].makes, steps.uses[step]
        is_read = not made.isdisjoint(uses.reads)
        is_same = within[step] == within[before]
        is_cast = steps.casts[before] and is_same
        overwrites = not made.isdisjoint(uses.writes)
        left_out[step] = (
            (shrinks and stays) or (adds and is_read and is_same) or is_cast or overwrites
        )
    return left_out
