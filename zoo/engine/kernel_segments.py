"""Segments that are ranges of the kernels of a forward, whatever Python calls them.

A plan of a model's forward names ranges of its sequence of operators. The forward runs as it is
written; a dispatch mode counts its kernels and opens and closes segments between them:

    kernels     0  1  2 | 3  4  5 | 6  7 | 8 ...
    plan        (  step 0  step 1  ) step 2 ...
    segments    open 0 ............ close 6

As long as the operators are those of the script, the plan holds. From the first that is another
(control flow) until the forward comes to a known one again, each block of the model is a segment
of its own; so it is to the end of the forward from the first that returns more than its plan has
room for, whatever decided its size: an argument, an attribute or data. What is kept then differs,
and never what is computed.
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
from typing import Self, TypeVar

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
from zoo.engine.operands import External
from zoo.engine.operator_effects import makes_dropout_state
from zoo.engine.recompute import HOOKS, leave_hooks, records
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
# operators that return less than this part of the mean do not decide whether a plan has room
SMALL_PART = 16
# a block of the model by its path, and which call of it
Visit = tuple[str, int]


@dataclass(eq=False)
class Script:
    """The operators of a forward in order, and the segments that a plan makes of them.

    Attributes:
        operators: all that the forward dispatches, views and questions included.
        boundaries: for each step the index of its first operator; the first is 0.
        plan: which steps are segments.
        visits: where the blocks of the model begin.
        sizes: bytes that each operator returned.
        room: how many times as much each may return under this plan.
    """

    operators: Sequence[Operator]
    boundaries: Sequence[int]
    plan: Plan
    visits: dict[Visit, int]
    sizes: Sequence[int] = ()
    room: float = math.inf

    def __post_init__(self) -> None:
        sizes = self.sizes or [0] * len(self.operators)
        least = max(1, sum(sizes) // (SMALL_PART * max(1, len(sizes))))
        self.limits = [self.room * max(size, least) for size in sizes]
        self.total = sum(self.limits)
        # the segments around each step, by the index of its first operator
        paths = _paths(self.plan, (), itertools.count())
        self.switches = dict(zip(self.boundaries, paths, strict=False))

    def serves(self, operators: Sequence[Operator], sizes: Mapping[int, int]) -> bool:
        """Returns whether a forward may go by the plan that began with these operators.

        `sizes` has bytes that they returned, by their indices.
        """
        count = len(operators)
        return [*self.operators[:count]] == [*operators] and all(
            size <= self.limits[index] for index, size in sizes.items() if index < count
        )

    def path_at(self, index: int) -> Path:
        """Returns the segments around an operator."""
        return self.switches[self.boundaries[bisect.bisect_right(self.boundaries, index) - 1]]


def fastest(
    scripts: Iterable[Script], operators: Sequence[Operator], sizes: Mapping[int, int]
) -> Script | None:
    """Returns the script of least room that serves a forward; None if none does."""
    by_room = sorted(scripts, key=lambda script: script.total)
    return next((script for script in by_room if script.serves(operators, sizes)), None)


def bytes_returned(result: PyTree) -> int:
    """Returns the bytes of the tensors that an operator returned."""
    if isinstance(result, Tensor):
        return result.numel() * result.itemsize
    return sum(map(bytes_returned, result)) if isinstance(result, tuple | list) else 0


def _paths(items: Sequence[Item], around: Path, numbers: Iterator[int]) -> Iterator[Path]:
    """Yields for each step the segments around it."""
    for item in items:
        if isinstance(item, int):
            yield around
        else:
            yield from _paths(item, (*around, next(numbers)), numbers)


class Conductor(Recorder):
    """Opens and closes segments between the kernels of one forward.

    It goes by the first of some scripts until the operators, or their sizes, are those of another.

    Attributes:
        synchronized: whether the operators so far are those of the script.
        lost: whether they ever were not.
        outgrown: whether an operator returned more than the script has room for.
        sizes: bytes that operators returned, by their indices, where a script limits them.
        operators: those that came, where there is no script.
        visits: the indices at which blocks of the model began.
        hooks: for tensors that autograd saves: those of the engine, or others around them.
    """

    def __init__(
        self, scripts: Sequence[Script], hooks: AbstractContextManager[object] = HOOKS
    ) -> None:
        super().__init__()
        self.hooks = hooks
        self.scripts = scripts
        self.script = scripts[0] if scripts else None
        self.synchronized, self.lost = bool(scripts), not scripts
        self.outgrown, self.sizes = False, dict[int, int]()
        self._is_limited = any(script.room < math.inf for script in scripts)
        self.operators: list[Operator] = []
        self.visits: dict[Visit, int] = {}
        # the next operator, the segments around the one before, and the blocks that run
        self.index, self.path, self.depth = 0, Path(), 0
        self._counts: Counter[str] = Counter()
        # by the ids of storages what closed segments read and saved of them
        self._readers: defaultdict[int, list[weakref.ref[External]]] = defaultdict(list)
        self._saved: defaultdict[int, list[weakref.ref[Handle]]] = defaultdict(list)
        self._sequence = -1
        # the arguments of a switch that waits for the forward's own thread
        self._waiting: tuple[Path, bool] | None = None

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel, in the segment that it belongs to."""
        # fake tensors dispatch looks at what they are, which no real one does
        is_look = getattr(func, "namespace", "") == "prim"
        if is_look or thread.replaying or not all(map(has_own_storage, types)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        # what one forward does and the next does not is in no script
        is_counted = not makes_dropout_state(func, args, kwargs or {})
        if is_counted:
            self._advance(func)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if is_counted and self._is_limited and self.synchronized:
            self._measure(out)
        if thread.conductor is self:
            self._sequence = sequence_number()
        return out

    def before_write(self, tensor: Tensor) -> None:
        """Called before a kernel writes a tensor, which earlier segments may have read.

        They get a copy: the forward may write until it ends, as for a moving average. What autograd
        saved is kept as it is: without a segment it would have what is written.
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
        """Counts an operator, and switches to the segments that it belongs to."""
        index, script = self.index, self.script
        self.index = index + 1
        if script is None:
            self.operators.append(func)
        elif self.synchronized:
            is_other = index >= len(script.operators) or script.operators[index] is not func
            if is_other or self.outgrown:
                self._switch_scripts([*script.operators[:index], func])
            elif index in script.switches:
                self._switch_segments(script.switches[index])
        if self._waiting is not None:
            self._switch_segments(*self._waiting)

    def _measure(self, result: PyTree) -> None:
        """Notes what an operator returned; from the next one on a script with room is needed."""
        index = self.index - 1
        self.sizes[index] = size = bytes_returned(result)
        if self.script is not None and size > self.script.limits[index]:
            self.outgrown = True

    def _switch_scripts(self, operators: Sequence[Operator]) -> None:
        """Goes on by another script that serves these operators; where there is none, by blocks."""
        script = fastest(self.scripts, operators, self.sizes)
        if script is not None:
            self.script, self.outgrown = script, False
            self._switch_segments(script.path_at(self.index - 1), fresh=True)
            return
        self.synchronized, self.lost = False, True
        self._switch_segments((-1,) if self.depth else ())

    def enter(self, block: str) -> None:
        """Called before a block of the model runs."""
        visit = block, self._counts[block]
        self._counts[block] += 1
        self.depth += 1
        if self.script is None:
            self.visits[visit] = self.index
        else:
            known = self.script.visits.get(visit)
            is_elsewhere = known != self.index or not self.synchronized
            if known is not None and is_elsewhere and not self.outgrown:
                self.index, self.synchronized = known, True
                self._switch_segments(self.script.path_at(known), fresh=True)
        if not self.synchronized:
            self._switch_segments((-1,), fresh=True)

    def leave(self) -> None:
        """Called after a block of the model ran."""
        self.depth -= 1
        if not self.synchronized:
            self._switch_segments(())

    def _switch_segments(self, path: Path, fresh: bool = False) -> None:
        """Closes and opens segments until those of a path are open; all of them anew if fresh.

        A backward inside of the forward runs on a thread of the device, which has the modes of the
        forward's thread and not its segments: a switch there waits until the forward goes on.
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
        for _ in path[shared:]:
            thread.segment = Segment(thread.segment)
        if shared and thread.segment is not None:
            for handle in pending:
                handle.move_to(thread.segment)
        self.path = path
        self.recording = None if thread.segment is None else thread.segment.recording

    def _close(self) -> None:
        """Closes the innermost segment."""
        part = thread.segment
        assert part is not None, "a path has a segment for each number"
        part.end, thread.segment = part.recording.count, part.parent
        if part.parent is None:
            read = [one for one in part.recording.storages.externals if one.is_read]
            prune(part)
            for found in read:
                if (home := found.home()) is not None:
                    self._readers[id(home)].append(weakref.ref(found))
            for handle in part.all_handles():
                home = handle.value.home()
                if home is not None:
                    self._saved[id(home)].append(weakref.ref(handle))

    def _pending(self) -> list[Handle]:
        """Returns what the operation saved that is about to run its kernel in another segment.

        Autograd saves an operation's inputs before its kernel runs, and numbers operations first.
        Of a write to a view it numbers more, before it saves the result, which may be gone already.
        """
        assert thread.segment is not None
        handles = [one for one in thread.segment.living() if one.sequence > self._sequence]
        return [handle for handle in handles if handle.original() is not None]

    def run(self, function: Callable[[], T]) -> T:
        """Runs a forward; whatever interrupts it, and where, the thread is left as it was."""
        try:
            with self:
                return function()
        finally:
            self._leave()

    def __enter__(self) -> Self:
        thread.conductor = self
        super().__enter__()
        self.hooks.__enter__()
        if self.script is not None:
            self._switch_segments(self.script.switches.get(0, ()))
        return self

    def __exit__(self, *raised: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Ends the forward, unless it has ended: an interrupt may have cut the end short."""
        if thread.conductor is not self:
            return
        leave_hooks()
        if self in dispatch_modes():
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.recording = None
        # not by the path, which is not that of the segments where a turn was interrupted
        while thread.segment is not None:
            self._close()
        thread.conductor = None


def conducts() -> bool:
    """Returns whether a forward that begins now may be cut into segments."""
    hooks = top_saved_tensors_hooks(False)
    return records() and hooks is None and thread.segment is None and thread.conductor is None


def reason_for_plain() -> str | None:
    """Returns why a forward that records gradients goes without its plan; None where it should."""
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
        "them off, or call zoo.recompute inside of them, which hands them each tensor"
    )
