"""What a training step by a plan takes, from the log of a dry step: one of fake tensors.

A dry step is run by the engine itself, with the plan in force (`tracing.dry_steps`). Its log has
the life of each storage and the kernels that ran; nothing that the engine does is written down
here.

    forward     made 3 (4 MiB), ran 0, made 4 (4 MiB), ran 1, freed 3
    the end     of the forward
    backward    made 5 (4 MiB, replayed), ran 0 (replayed), made 6, ran 2, gradient 6, freed 5

Storages are numbers. Those of parameters, buffers and the model's inputs are not in the log, since
they are there all the time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zoo.planner.costs import BACKWARD, FORWARD, RECOMPUTE
from zoo.planner.plan import Plan
from zoo.planner.step_events import Freed, Gradient


class DryStep(NamedTuple):
    """A dry step to run.

    Attributes:
        plan: of the model, without its loss.
        cuts: the first operator of each step of the plan.
        offloads: the first steps of the items that lie on the host until the backward.
        holds_outputs: whether a variable holds what the model returns until the backward is over.
        leaves_autocast: whether the backward runs outside of an autocast that is around the model.
    """

    plan: Plan
    cuts: Sequence[int]
    offloads: frozenset[int] = frozenset()
    holds_outputs: bool = True
    leaves_autocast: bool = True


class There(NamedTuple):
    """A storage was there before, which is counted elsewhere until it is freed: of a buffer."""

    storage: int
    bytes: int


class Made(NamedTuple):
    """A storage was allocated, by a replay or not."""

    storage: int
    bytes: int
    is_replayed: bool


class Ran(NamedTuple):
    """A kernel ran: the number of its call in the trace, -1 for none of these.

    `operator` is that of the forward which ran it, or made the autograd node that did. `reads` are
    the storages that it took in the forward.
    """

    kernel: int
    operator: int
    is_replayed: bool
    reads: tuple[int, ...] = ()


class Returned(NamedTuple):
    """The program holds a storage until the backward is over: of an output or the loss."""

    storage: int


class OnHost(NamedTuple):
    """The most bytes that lay on the host at a time."""

    bytes: int


class AutocastLeft(NamedTuple):
    """The forward and the loss are over, and an autocast around them is left, if there is one."""


class ForwardEnd(NamedTuple):
    """The backward begins."""


Row = OnHost | There | Made | Freed | Gradient | Ran | Returned | AutocastLeft | ForwardEnd


@dataclass(frozen=True)
class KernelRates:
    """What kernels cost, by the numbers of their calls: bytes of workspace, seconds and flops."""

    workspaces: Sequence[int]
    seconds: Sequence[float]
    flops: Sequence[int]

    def workspace(self, kernel: int) -> int:
        """Returns the bytes that a kernel takes beside its arguments and results."""
        return self.workspaces[kernel] if 0 <= kernel < len(self.workspaces) else 0


@dataclass(frozen=True)
class Gradients:
    """How the gradients of parameters live.

    Attributes:
        bytes: of all that the step makes.
        updates: bytes that an optimizer in the backward takes for a parameter, by its form; None
            for an optimizer after it.
        accumulates: whether each is added to that of earlier backwards, which is counted elsewhere.
    """

    bytes: int
    updates: Mapping[Any, int] | None = None
    accumulates: bool = False

    @property
    def are_kept(self) -> bool:
        """Whether they live to the end of the step."""
        return self.updates is None and not self.accumulates


@dataclass(frozen=True)
class StepBytes:
    """The bytes of a training step at its peak, by what they are, beside what is always there.

    Attributes:
        phase: FORWARD, RECOMPUTE or BACKWARD.
        operator: as in `Ran`, at the peak.
        kept: made by the forward and held for the backward or by the program.
        recomputed: made by replays.
        gradients: of parameters, those that are complete.
        between: other tensors that kernels pass on.
        work: workspace of the kernel that runs.
        held: what the program holds when the backward is over, but for gradients.
        returned: outputs and the loss, at the peak; `remaining`: what the model keeps longer, at
            the peak, also of the step before; `unread`: what only variables of the forward hold and
            no kernel of the forward reads after the peak.
        on_host: the most bytes on the host at a time.
        between_passes: made by the forward and there when the backward begins.
        casts: of weights, beside these, which an autocast holds until it is left before.
        in_backward: the peak of the backward alone.
        activations: the peak without gradients of parameters.
        seconds, flops: of all kernels that are replayed.
    """

    phase: str
    operator: int
    kept: int
    recomputed: int
    gradients: int
    between: int
    work: int
    held: int
    activations: int
    seconds: float
    flops: int
    returned: int = 0
    remaining: int = 0
    unread: int = 0
    on_host: int = 0
    between_passes: int = 0
    casts: int = 0
    in_backward: int = 0

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return self.kept + self.recomputed + self.gradients + self.between + self.work


def bytes_of_step(
    log: Sequence[Row],
    rounding: Callable[[int], int],
    rates: KernelRates,
    gradients: Gradients,
) -> StepBytes:
    """Returns what a step takes; `rounding` counts the bytes of a storage as an allocator does."""
    walk = _Walk(log, rounding, rates, gradients)
    for walk.position, row in enumerate(log):
        walk.pass_on(row)
    return walk.result()


class _Walk:
    """Counts what is alive, row by row."""

    def __init__(
        self,
        log: Sequence[Row],
        rounding: Callable[[int], int],
        rates: KernelRates,
        gradients: Gradients,
    ) -> None:
        self.log, self.rounding, self.rates, self.gradients = log, rounding, rates, gradients
        # gradients in one storage are freed with the last of them
        self.waiting = Counter(row.storage for row in log if type(row) is Gradient)
        ends = (index for index, row in enumerate(log) if type(row) is ForwardEnd)
        freed = (row.storage for row in log[: next(ends, 0)] if type(row) is Freed)
        self.freed_in_forward = frozenset(freed)
        of_parameters = (row for row in log if type(row) is Made and row.storage in self.waiting)
        made = sum(rounding(row.bytes) for row in of_parameters)
        self.sizes: dict[int, int] = {}
        # bytes alive, by what they are
        self.alive = {"kept": 0, "recomputed": 0, "gradients": 0, "between": 0}
        if not gradients.accumulates:
            # of parameters that the step does not use
            self.alive["gradients"] = max(gradients.bytes - made, 0)
        self.kinds: dict[int, str] = {}
        self.total = self.alive["gradients"]
        self.phase, self.operator = FORWARD, 0
        self.peak = self.activations = -1
        self.between_passes = self.casts = self.in_backward = 0
        # the row at which the peak is
        self.position = self.peak_at = 0
        self.at_peak: tuple[str, int, dict[str, int], int] = (FORWARD, 0, {**self.alive}, 0)
        self.seconds, self.flops = 0.0, 0
        self.look(0)

    def pass_on(self, row: Row) -> None:
        """Counts a row."""
        if type(row) is Made:
            self.make(row)
        elif type(row) is Freed:
            self.free(row.storage)
        elif type(row) is Ran:
            self.run(row)
        elif type(row) is Gradient:
            self.complete(row)
        elif type(row) is There:
            # what takes its place counts, and this no longer
            self.sizes[row.storage], self.kinds[row.storage] = self.rounding(row.bytes), "kept"
        elif type(row) is AutocastLeft:
            self.casts = self.total
        elif type(row) is ForwardEnd:
            self.phase = BACKWARD
            self.between_passes = self.total - self.alive["gradients"]
            self.casts = max(0, self.casts - self.total)

    def make(self, row: Made) -> None:
        kind = "recomputed" if row.is_replayed else "between"
        if self.phase is FORWARD and row.storage not in self.freed_in_forward:
            kind = "kept"
        self.kinds[row.storage] = kind
        self.sizes[row.storage] = size = self.rounding(row.bytes)
        self.alive[kind] += size
        self.total += size
        self.look(0)

    def free(self, storage: int) -> None:
        if (size := self.sizes.pop(storage, None)) is not None:
            self.alive[self.kinds.pop(storage)] -= size
            self.total -= size

    def run(self, row: Ran) -> None:
        self.operator = row.operator
        if row.is_replayed:
            self.phase = RECOMPUTE
        elif self.phase is RECOMPUTE:
            self.phase = BACKWARD
        if row.kernel >= 0:
            if row.is_replayed:
                self.seconds += self.rates.seconds[row.kernel]
                self.flops += self.rates.flops[row.kernel]
            self.look(self.rates.workspace(row.kernel))

    def complete(self, row: Gradient) -> None:
        self.waiting[row.storage] -= 1
        if (size := self.sizes.get(row.storage)) is not None:
            self.alive[self.kinds[row.storage]] -= size
            self.alive["gradients"] += size
            self.kinds[row.storage] = "gradients"
        if self.gradients.updates is not None:
            self.look(self.gradients.updates.get(row.form, 0))
        if not self.gradients.are_kept and not self.waiting[row.storage]:
            self.free(row.storage)

    def look(self, work: int) -> None:
        """Notes the bytes of a moment."""
        total = self.total + work
        if self.phase is not FORWARD:
            self.in_backward = max(self.in_backward, total)
        self.activations = max(self.activations, total - self.alive["gradients"])
        if total > self.peak:
            self.peak, self.peak_at = total, self.position
            self.at_peak = self.phase, self.operator, {**self.alive}, work

    def result(self) -> StepBytes:
        phase, operator, alive, work = self.at_peak
        held = self.total - self.alive["gradients"]
        begin = next((n for n, row in enumerate(self.log) if type(row) is Ran), 0)
        earlier = {row.storage for row in self.log[:begin] if type(row) is Made}
        returned = {row.storage for row in self.log if type(row) is Returned}
        others = {number for number, kind in self.kinds.items() if kind != "gradients"}
        remaining = (others | earlier) - returned
        later = [row for row in self.log[self.peak_at :] if type(row) is Ran]
        read = {storage for row in later for storage in row.reads}
        unread = self.freed_in_forward - read - remaining
        there = self.sizes_at_peak()

        def bytes_of(storages: Iterable[int]) -> int:
            return sum(there.get(storage, 0) for storage in storages)

        return StepBytes(
            phase=phase,
            operator=operator,
            **alive,
            work=work,
            held=held,
            activations=self.activations,
            seconds=self.seconds,
            flops=self.flops,
            returned=bytes_of(returned),
            remaining=bytes_of(remaining),
            unread=bytes_of(unread) if phase is FORWARD else 0,
            on_host=sum(row.bytes for row in self.log if type(row) is OnHost),
            between_passes=self.between_passes,
            casts=self.casts,
            in_backward=self.in_backward,
        )

    def sizes_at_peak(self) -> dict[int, int]:
        """Returns the bytes of the storages that are alive at the peak.

        A second walk finds them: to copy them at each new peak takes quadratic time.
        """
        again = _Walk(self.log, self.rounding, self.rates, self.gradients)
        for row in self.log[: self.peak_at]:
            if type(row) is not Ran:
                again.pass_on(row)
        for row in self.log[self.peak_at : self.peak_at + 1]:
            if type(row) is Made:
                again.make(row)
        return again.sizes
