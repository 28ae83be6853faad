"""Opens and closes segments between the kernels of a forward, as a plan says.

A plan of a model's forward names ranges of its sequence of operators. The forward runs as it is
written; a dispatch mode counts its operators (`recompute.segment` is one segment around a block):

    kernels     0  1  2 | 3  4  5 | 6  7 | 8 ...
    plan        (  step 0  step 1  ) step 2 ...
    segments    open 0 ............ close 6

The plan holds as long as the operators are those of the traced branch. From the first other one
(control flow) until the forward enters a block that the branch knows, each block of the model is a
segment. So it is to the end of the forward once an operator returns more than the plan has room
for, whatever decided its size: an argument, an attribute or data. That changes what is kept, never
what is computed.

A forward by a plan that recomputes nothing runs without the mode. For a budget the blocks of the
model tell whether it is the one that was planned for: by the bytes of their arguments, and by the
number of operations that autograd has seen so far. From the first block at which it is another one,
the mode is there. What differs inside of a block alone is seen by a forward that has the mode
whatever comes: the first by a plan, the 8th, and each 64th after it.
"""

import bisect
import itertools
import math
import operator
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.autograd import forward_ad

from zoo._torch import (
    Args,
    Kwargs,
    Operator,
    PyTree,
    are_functorch_transforms_active,
    are_saved_tensors_hooks_enabled,
    dispatch_modes,
    is_tracing,
    sequence_number,
    top_saved_tensors_hooks,
)
from zoo.engine.devices import release_draws
from zoo.engine.dispatch_keys import kernel_of
from zoo.engine.host_memory import HostMemory, Offloading
from zoo.engine.operands import External
from zoo.engine.operator_effects import (
    DETACH,
    EFFECTS,
    NUMBERS,
    bytes_returned,
    is_counted,
    with_tensors,
)
from zoo.engine.recompute import HOOKS, is_packing, leave_hooks, records
from zoo.engine.recorder import Recorder
from zoo.engine.replay import without_modes
from zoo.engine.saved_tensors import prune
from zoo.engine.segments import Handle, Segment, thread
from zoo.engine.storages import hold_readers
from zoo.engine.tensor_state import alive, has_own_storage, parts_of, storage_of
from zoo.planner.plan import Item, Plan

T = TypeVar("T")
# numbers of the segments around a kernel, the outermost first
Path = tuple[int, ...]
# operators that return less than 1 / SMALL_PART of the mean do not decide whether a plan has room
SMALL_PART = 16
# the forward by a plan that recomputes nothing that has the mode, and after how many the next has
LOOK, PERIOD = 8, 64
# the path of a block of the model, and which call of it
Visit = tuple[str, int]


class Arrival(NamedTuple):
    """A forward at the beginning of a block, or with an empty name at its end."""

    block: str
    number: int  # operations that autograd has seen
    size: int  # bytes of the block's arguments, or of the forward's outputs


@dataclass(eq=False)
class PlannedBranch:
    """One branch of a forward, traced: its operators in order, and the segments of a plan for it.

    Attributes:
        operators: all that the forward dispatches, views and queries of metadata included.
        boundaries: for each step the index of its first operator; the first is 0.
        plan: which steps are segments.
        visits: index of the operator at which each call of a block begins.
        sizes: bytes that each operator returned.
        room: how many times these bytes each may return under this plan.
        offloads: the steps of which the host holds, where offloading is on, what they save, or what
            the segment starts from that begins with them.
        has_backward: whether a backward runs within the forward.
        holds: bytes that it holds until its backward; `casts`: until an autocast around it is left.
        peak: bytes at the peak of a step; 0 if they are not known.
        arrivals: where a forward by this plan was at each block, once known.
        forwards: how many began by this plan, if it recomputes nothing.
    """

    operators: Sequence[Operator]
    boundaries: Sequence[int]
    plan: Plan
    visits: dict[Visit, int]
    sizes: Sequence[int] = ()
    room: float = math.inf
    offloads: frozenset[int] = frozenset()
    has_backward: bool = False
    holds: int = 0
    casts: int = 0
    peak: int = 0
    arrivals: Sequence[Arrival] = ()
    forwards: int = 0

    def __post_init__(self) -> None:
        sizes = self.sizes or [0] * len(self.operators)
        least = max(1, sum(sizes) // (SMALL_PART * max(1, len(sizes))))
        self.limits = [self.room * max(size, least) for size in sizes]
        self.total = sum(self.limits)
        # the segments around each step
        self.paths = [*_paths(self.plan, (), itertools.count())]
        before = [Path(), *self.paths]
        # those that begin or end at an operator, by its index
        self.switches = {
            start: path
            for start, path, other in zip(self.boundaries, self.paths, before, strict=False)
            # between kept steps, too, storages are copied out
            if path != other or (self.offloads and not path)
        }

    def serves(self, operators: Sequence[Operator], sizes: Mapping[int, int]) -> bool:
        """Returns whether the plan fits a forward that began with these operators.

        `sizes` are the bytes that they returned, by index.
        """
        count = len(operators)
        return [*self.operators[:count]] == [*operators] and all(
            size <= self.limits[index] for index, size in sizes.items() if index < count
        )

    @property
    def keeps_all(self) -> bool:
        """Whether the plan recomputes nothing."""
        return not any(self.paths)

    def is_looked_at(self) -> bool:
        """Counts a forward that begins; returns whether it has the mode whatever comes."""
        self.forwards += 1
        return self.forwards % PERIOD == LOOK

    def step_at(self, index: int) -> int:
        """Returns the step of an operator."""
        return bisect.bisect_right(self.boundaries, index) - 1

    def path_at(self, index: int) -> Path:
        """Returns the segments around an operator."""
        return self.paths[self.step_at(index)]


def fastest_branch(
    branches: Iterable[PlannedBranch], operators: Sequence[Operator], sizes: Mapping[int, int]
) -> PlannedBranch | None:
    """Returns the branch of least room that serves a forward; None if none does."""
    by_room = sorted(branches, key=lambda branch: branch.total)
    return next((branch for branch in by_room if branch.serves(operators, sizes)), None)


def _paths(items: Sequence[Item], around: Path, numbers: Iterator[int]) -> Iterator[Path]:
    """Yields for each step the segments around it."""
    for item in items:
        if isinstance(item, int):
            yield around
        else:
            yield from _paths(item, (*around, next(numbers)), numbers)


class Conductor(Recorder):
    """Opens and closes segments between the kernels of one forward.

    It follows the first branch until the operators, or their sizes, are those of another.

    Attributes:
        synchronized: whether the operators so far are those of the branch.
        lost: whether they ever were not.
        outgrown: whether an operator returned more than the branch has room for.
        sizes: bytes that operators returned, by index, if a branch limits them; where they are not
            those that were traced.
        operators: those dispatched so far, if there is no branch.
        path_hash: of the operators since they are those of no branch.
        visits: as in `PlannedBranch`, if there is no branch.
        hooks: saved-tensor hooks of the forward: the engine's, or others that wrap them.
        offloading: what the host holds until the backward, if `host` does.
    """

    def __init__(
        self,
        branches: Sequence[PlannedBranch],
        hooks: AbstractContextManager[object] = HOOKS,
        host: HostMemory | None = None,
    ) -> None:
        super().__init__()
        self.offloading = None if host is None else Offloading(host)
        self.hooks = hooks
        # outside of segments autograd saves as it does without hooks; but other hooks see all that
        # it saves, as what is offloaded does, and a backward has to the end those that were there
        # when it began
        has_backward = any(branch.has_backward for branch in branches)
        self._pauses_hooks = hooks is HOOKS and host is None and not has_backward
        self.branches = branches
        self.branch = branches[0] if branches else None
        self.synchronized, self.lost = bool(branches), not branches
        self.outgrown, self.sizes = False, dict[int, int]()
        self._is_limited = any(branch.room < math.inf for branch in branches)
        self.operators: list[Operator] = []
        self.path_hash = 0
        self.visits: dict[Visit, int] = {}
        # the next operator, the segments around the one before, and the blocks that run
        self.index, self.path, self.depth = 0, Path(), 0
        self._counts: Counter[str] = Counter()
        # what closed segments read and saved of each storage, by its id
        self._readers: defaultdict[int, list[weakref.ref[External]]] = defaultdict(list)
        self._saved: defaultdict[int, list[weakref.ref[Handle]]] = defaultdict(list)
        self._sequence = -1
        self._start, self._arrivals = sequence_number(), list[Arrival]()
        # a branch that recomputes nothing and whose blocks can tell where the forward is
        first = branches[0] if branches else None
        self._kept = first if first is not None and first.keeps_all and first.visits else None
        # whether the forward runs without the mode; several paths only operators tell apart
        self._watches = self._kept is not None and (
            not self._kept.is_looked_at()
            and host is None
            and bool(self._kept.arrivals)
            and all(branch.operators is self._kept.operators for branch in branches)
        )
        self._modes = 0  # how many modes there were when the forward began
        # external tensors that the operation whose kernel comes next has saved, if some may leave
        self._saved_ahead: list[External] = []
        # the arguments of a switch that waits for the forward's own thread
        self._waiting: tuple[Path, bool] | None = None

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel, in the segment that it belongs to."""
        if self.recording is None and func is DETACH and not types:
            return func._op(*args, **(kwargs or {}))
        if self.recording is None and not types and self._is_expected(func):
            effects = EFFECTS.get(id(func))
            if args and type(args[0]) in NUMBERS:
                args = with_tensors(func, args)
            if effects is not None and (effects.ignored or effects.simple):
                # between segments, where nothing but a write matters
                self.index += 1
                kwargs = kwargs or {}
                function = func._op if effects.ignored else kernel_of(func, effects, args, kwargs)
                out = function(*args, **kwargs)
                if self._is_limited:
                    self._measure(out)
                return out
        # queries of metadata, which fake tensors dispatch and real ones do not
        is_query = getattr(func, "namespace", "") == "prim"
        if is_query or thread.replaying or not all(map(has_own_storage, types)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        counts = is_counted(func, args, kwargs or {})
        if counts:
            self._advance(func)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if counts and self._is_limited and self.synchronized:
            self._measure(out)
        if thread.conductor is self:
            self._sequence = sequence_number()
            if self._saved_ahead and self.offloading is not None:
                self.offloading.add(self._saved_ahead)
                self._saved_ahead.clear()
        return out

    def before_write(self, tensor: Tensor) -> None:
        """Called before a kernel writes a tensor, which earlier segments may have read.

        They get a copy: the forward may write until it ends, as for a moving average. A saved
        tensor is kept as it is, and sees the write as in the baseline.
        """
        storage = storage_of(tensor)
        if storage is not None:
            self._keep_late(tensor, storage)
        for part in parts_of(tensor):
            self._keep_late(part, part.untyped_storage())
        super().before_write(tensor)

    def _keep_late(self, tensor: Tensor, storage: UntypedStorage) -> None:
        """Keeps what closed segments read and saved of a storage that is about to be written."""
        for handle in alive(self._saved.pop(id(storage), ())):
            if handle.value.home() is storage:
                without_modes(handle.mark_external, storage)
        readers = alive(self._readers.pop(id(storage), ()))
        readers = [reader for reader in readers if reader.home() is storage]
        hold_readers(readers, storage, tensor)

    def _advance(self, func: Operator) -> None:
        """Counts an operator, and switches to its segments."""
        index, branch = self.index, self.branch
        self.index = index + 1
        if branch is None:
            self.operators.append(func)
        elif self.synchronized:
            is_other = index >= len(branch.operators) or branch.operators[index] is not func
            if is_other:
                # of another path, whatever the size of what came before
                self.outgrown = False
            if is_other or self.outgrown:
                self._switch_branches([*branch.operators[:index], func])
            elif index in branch.switches:
                self._switch_segments(branch.switches[index], at=index)
        if self.lost and branch is not None:
            self.path_hash = hash((self.path_hash or index, id(func)))
        if self._waiting is not None:
            self._switch_segments(*self._waiting)

    def _is_expected(self, func: Operator) -> bool:
        """Returns whether an operator is the next one of the branch, and no segment begins."""
        branch, index = self.branch, self.index
        return (
            branch is not None
            and self.synchronized
            and not (self.outgrown or thread.replaying)
            and index not in branch.switches
            and index < len(branch.operators)
            and branch.operators[index] is func
            and self._waiting is None
            and self.offloading is None
        )

    def _measure(self, result: PyTree) -> None:
        """Notes the bytes that an operator returned, and whether the branch had room for them."""
        index, branch = self.index - 1, self.branch
        assert branch is not None, "its operators are followed"
        size = bytes_returned(result)
        if size != branch.sizes[index]:
            self.sizes[index] = size
            self.outgrown |= size > branch.limits[index]

    def sizes_returned(self) -> dict[int, int]:
        """Returns the bytes that operators returned, by index; none if no branch limits them."""
        if self.branch is None or not self._is_limited:
            return {}
        return {**dict(enumerate(self.branch.sizes[: self.index])), **self.sizes}

    def _switch_branches(self, operators: Sequence[Operator]) -> None:
        """Switches to another branch that serves these operators; if there is none, to blocks."""
        sizes = self.sizes_returned()
        branch = fastest_branch(self.branches, operators, sizes)
        if branch is not None:
            self.branch, self.sizes, self.outgrown = branch, sizes, False
            at = self.index - 1
            self._switch_segments(branch.path_at(at), fresh=True, at=at)
            return
        self.synchronized, self.lost = False, True
        self._switch_segments((-1,) if self.depth else ())

    def enter(self, block: str, args: Args = ()) -> None:
        """Called before a block of the model runs."""
        if self._kept is not None:
            self._arrive(self._kept, block, args)
        visit = block, self._counts[block]
        self._counts[block] += 1
        self.depth += 1
        if self._watches:
            return
        if self.branch is None:
            self.visits[visit] = self.index
        else:
            start = self.branch.visits.get(visit)
            is_elsewhere = start != self.index or not self.synchronized
            if start is not None and is_elsewhere and not self.outgrown:
                self.index, self.synchronized = start, True
                self._switch_segments(self.branch.path_at(start), fresh=True)
        if not self.synchronized:
            self._switch_segments((-1,), fresh=True)

    def _arrive(self, kept: PlannedBranch, block: str, values: PyTree) -> None:
        """Notes where the forward is; if no mode is there, compares with where it should be."""
        # the program's function modes are not to see this
        size = without_modes(bytes_returned, values)
        arrival = Arrival(block, sequence_number() - self._start, size)
        self._arrivals.append(arrival)
        if not self._watches:
            return
        number, known = len(self._arrivals) - 1, kept.arrivals
        expected = known[number] if number < len(known) else None
        if expected is None or arrival[:2] != expected[:2]:
            self.synchronized, self.lost = False, True
        elif arrival.size > expected.size:
            # what a block makes of them may grow faster: from here on each kernel is looked at
            roomy = [b for b in self.branches if b.room * expected.size >= arrival.size]
            self.branch = min(roomy, key=lambda branch: branch.room, default=kept)
            self.outgrown = self.lost = not roomy
            self.synchronized = bool(roomy)
        else:
            return
        # modes and hooks of the program end before those that begin now, or are not there yet
        is_free = top_saved_tensors_hooks(False) is None and len(dispatch_modes()) == self._modes
        if block and is_free:
            self._watches = False
            self._begin()

    def leave(self) -> None:
        """Called after a block of the model ran."""
        self.depth -= 1
        if not self.synchronized:
            self._switch_segments(())

    def note_saved(self, external: External) -> None:
        """Notes what autograd saves: ahead of the kernel that comes next, or after the last one."""
        if self.offloading is None:
            return
        if sequence_number() > self._sequence:
            self._saved_ahead.append(external)
        else:
            self.offloading.add([external])

    def _switch_segments(self, path: Path, fresh: bool = False, at: int | None = None) -> None:
        """Closes and opens segments until those of a path are open; `fresh` reopens all of them.

        `at` is the operator that comes next.

        A backward inside of the forward runs on the device's thread, which has the modes of the
        forward's thread but not its segments: a switch there waits until the forward goes on.
        """
        fresh = fresh or (self._waiting is not None and self._waiting[1])
        self._waiting = None if thread.conductor is self else (path, fresh)
        if self._waiting is not None:
            return
        same = itertools.takewhile(bool, map(operator.eq, self.path, path))
        shared = 0 if fresh else len(list(same))
        pending = self._pending() if len(self.path) > shared else []
        if not shared and pending:
            for handle in pending:
                without_modes(handle.keep)
        for _ in self.path[shared:]:
            self._close()
        if self.offloading is not None and not shared:
            self.offloading.begin(self._is_offloaded(self.index if at is None else at))
            # kept for the operation whose kernel comes next
            self._saved_ahead += filter(None, (handle.external for handle in pending))
        for _ in path[shared:]:
            thread.segment = Segment(thread.segment)
        if shared and thread.segment is not None:
            for handle in pending:
                handle.move_to(thread.segment)
        self.path = path
        self.recording = None if thread.segment is None else thread.segment.recording
        if self._pauses_hooks:
            self._set_hooks()

    def _set_hooks(self) -> None:
        """Has the engine's hooks in force inside of segments, unless those of the program are."""
        if self.recording is None:
            if is_packing():
                self.hooks.__exit__(None, None, None)
        elif top_saved_tensors_hooks(False) is None and are_saved_tensors_hooks_enabled():
            self.hooks.__enter__()

    def _is_offloaded(self, index: int) -> bool:
        """Returns whether the host shall hold what the item that begins with an operator holds."""
        if self.branch is None:
            return True
        if self.synchronized:
            return self.branch.step_at(index) in self.branch.offloads
        return bool(self.branch.offloads)

    def _close(self) -> None:
        """Closes the innermost segment."""
        segment = thread.segment
        assert segment is not None, "a path has a segment for each number"
        segment.end, thread.segment = segment.recording.count, segment.parent
        if segment.parent is None:
            references = [
                weakref.ref(one) for one in segment.recording.storages.externals if one.is_read
            ]
            prune(segment)
            # without those that only kernels read which no replay calls
            read = alive(references)
            if self.offloading is not None:
                self.offloading.end(segment, read)
            for external in read:
                if (home := external.home()) is not None:
                    self._readers[id(home)].append(weakref.ref(external))
            for handle in segment.all_handles():
                home = handle.value.home()
                if home is not None:
                    self._saved[id(home)].append(weakref.ref(handle))

    def _pending(self) -> list[Handle]:
        """Returns the handles saved by the operation whose kernel is about to run in a new segment.

        Autograd numbers an operation and saves its inputs before its kernel runs. For a write to a
        view it numbers several before it saves the result, which may be gone already.
        """
        assert thread.segment is not None
        handles = [handle for handle in thread.segment.living() if handle.sequence > self._sequence]
        return [handle for handle in handles if handle.original() is not None]

    def run(self, function: Callable[[], T]) -> T:
        """Runs a forward; restores the thread's state even after an interrupt."""
        try:
            with self:
                outputs = function()
                if self._kept is not None:
                    self._arrive(self._kept, "", outputs)
        finally:
            self._leave()
        if self._kept is self.branch is not None and not (self.lost or self.sizes):
            self.branch.arrivals = self._arrivals
        return outputs

    def __enter__(self) -> Self:
        thread.conductor, self._modes = self, len(dispatch_modes())
        if not self._watches:
            self._begin()
        return self

    def _begin(self) -> None:
        """Begins to look at each kernel."""
        super().__enter__()
        if not self._pauses_hooks:
            self.hooks.__enter__()
        if self.branch is not None:
            self._switch_segments(self.branch.switches.get(self.index, ()))

    def __exit__(self, *raised: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Ends the forward unless it has ended; `run` repeats an end that was interrupted."""
        if thread.conductor is not self:
            return
        leave_hooks()
        if self in dispatch_modes():
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.recording = None
        # not `self.path`, which may differ from the open segments if a switch was interrupted
        while thread.segment is not None:
            self._close()
        thread.conductor = None
        release_draws()
        if self.offloading is not None:
            self.offloading.copy_out()


def conducts() -> bool:
    """Returns whether a forward that begins now may have segments."""
    hooks = top_saved_tensors_hooks(False)
    return records() and hooks is None and thread.segment is None and thread.conductor is None


def reason_for_plain() -> str | None:
    """Returns why a forward that records gradients cannot follow its plan; None where it should."""
    if not torch.is_grad_enabled() or is_tracing():
        return None
    if thread.segment is not None or thread.conductor is not None:
        return None
    if are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a transform of torch.func or forward-mode derivatives are around it"
    if not are_saved_tensors_hooks_enabled():
        return "hooks for saved tensors are disabled around it, and a plan works by them"
    return (
        "hooks for saved tensors, such as save_on_cpu, are around it and decide what is kept. Take "
        "them off; offload=True has the host hold what segments start from"
    )
