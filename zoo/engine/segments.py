"""Segments (ranges of recorded kernels) and handles (their saved tensors, which replays make).

A segment holds the one around it, a recording its kernels, and kernels their values; no reference
goes the other way, so that all is freed without the garbage collector.
"""

import bisect
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Optional, Protocol, final

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node

from zoo._torch import Args, DisableTorchDispatch, FakeTensor, PyTree, sequence_number
from zoo.engine.devices import PACKED_SIZE
from zoo.engine.operands import External, Reference, Value, View, external_of
from zoo.engine.operator_effects import name_of_kernel
from zoo.engine.recording import RecordedKernel, Recording
from zoo.engine.replay_check import OTHER_NUMBERS, SampleComparison, TensorDescription
from zoo.engine.tensor_state import (
    Original,
    alive,
    detached,
    gone,
    original_of,
    roles_of,
    storage_of,
)
from zoo.engine.unseen_writes import fingerprint, read, read_in
from zoo.errors import RecomputeError

# hooks for saved tensors
Pack = Callable[[Tensor], object]
Unpack = Callable[[PyTree], Tensor]
# what a replay does in turn: calls a recorded kernel, or drops a value that nothing reads any more
Scheduled = RecordedKernel | Value


class BackwardListener(Protocol):
    """Brings storages back from the host (`host_memory.Offloading`)."""

    def before_backward(self, item: int) -> None:
        """Called before the backward of an item of a plan."""


class Segment:
    """Recorded kernels whose results are not kept: a whole recording, or a range inside of one."""

    def __init__(self, parent: Optional["Segment"]) -> None:
        self.parent = parent
        self.recording: Recording = (
            Recording(thread.observer) if parent is None else parent.recording
        )
        self.first = self.recording.count
        self.end: int | None = None
        self.drawn = 0  # bytes that kernels drew on the CPU
        self.handles: list[weakref.ref[Handle]] = []  # in the order of their operations
        self._inner: Sequence[weakref.ref[Segment]] = ()
        # the schedule of a replay for all handles, and their number; handles of inner segments
        # count, so that it is never mistaken for the schedule of this segment's own
        self.scheduled: list[Scheduled] = []
        self.scheduled_for = -1
        # tensors that the replay of the enclosing segment made for this one, and their versions
        self.inputs: dict[Value, tuple[Tensor, int]] | None = None
        # what its forward has copied to the host, and the number of this segment there
        self.offloading: tuple[BackwardListener, int] | None = None
        if parent is None:
            SEGMENTS.add(weakref.ref(self, _drop_segment))
        else:
            parent._inner = (*parent._inner, weakref.ref(self))

    def count_draw(self, written: list[Tensor]) -> bool:
        """Counts the bytes that a kernel draws; returns whether all fit in the size of a state."""
        if len(written) != 1 or not written[0].is_cpu:
            return False
        self.drawn += written[0].nbytes
        return self.drawn <= PACKED_SIZE

    def living(self) -> list["Handle"]:
        """Returns this segment's own handles that a backward may still open."""
        return [
            handle
            for reference in self.handles
            if (handle := reference()) is not None
            and handle.external is None
            and not handle.is_written
            and handle.segment is self
        ]

    def inner(self) -> list["Segment"]:
        """Returns the segments directly inside of this one that have or may get handles."""
        return alive(self._inner)

    def all_handles(self) -> list["Handle"]:
        """Returns the handles of this segment and of all inner segments."""
        handles = self.living()
        for part in self.inner():
            handles += part.all_handles()
        return handles

    def makes(self, value: Value) -> bool:
        """Returns whether a kernel of this segment or of an inner one made a value."""
        return self.first <= value.made_at and (self.end is None or value.made_at < self.end)

    def backwards(self, wanted: Collection[Value]) -> Iterator[RecordedKernel]:
        """Yields the kernels of this segment and of all inner ones, the last one first.

        It begins with the last that made a wanted value: of segments in segments, hundreds deep,
        others are many.
        """
        kernels = self.recording.kernels
        position = len(kernels)
        end = max((value.made_at for value in wanted), default=-1) + 1
        if self.end is not None:
            end = min(end, self.end)
        if position and kernels[-1].index >= end:
            position = bisect.bisect_left(kernels, end, key=lambda kernel: kernel.index)
        while position and kernels[position - 1].index >= self.first:
            position -= 1
            yield kernels[position]


@final
class Handle:
    """A saved tensor that is not kept: the first one that a backward opens replays its segment.

    Autograd saves tensors by reference. So a tensor that is written after it was saved is refused
    if its version tells, as in the baseline; otherwise (`Tensor.data` has a version of its own, and
    some kernels declare no write) the backward reads the numbers that were written last.
    """

    __slots__ = (
        "__weakref__", "base", "external", "fingerprint", "has_history", "is_copy", "is_written",
        "original", "reference", "replayed_version", "segment", "sequence", "tensor", "value",
        "version", "version_counter", "view", "was_result",
    )  # fmt: skip

    def __init__(self, segment: Segment, reference: Reference, tensor: Tensor) -> None:
        self.segment = segment
        # `value` is read too often for a property
        self.reference, self.value = reference, (value := reference.value)
        self.fingerprint = fingerprint(tensor)
        self.version = tensor._version
        # the number of the autograd operation that saved it
        self.sequence, base = sequence_number(), tensor._base
        # as `roles_of`, without asking for the history, for which torch makes an object of Python
        self.has_history = self.was_result = False
        if base is not None or value.sequence < 0:
            self.has_history, self.was_result = roles_of(tensor, self.sequence)
        elif reference.requires_grad:
            self.was_result = value.sequence == self.sequence
            self.has_history = not (self.was_result or tensor.is_leaf)
        # autograd holds the memory of a result, even if the tensor is given other memory
        self.original: Callable[[], Tensor | None]
        if self.was_result:
            self.original = weakref.ref(tensor)
        else:
            self.original = original_of(tensor, tensor.untyped_storage())
        # once the tensor is written: a tensor that shares its version counter; and its geometry
        self.version_counter: Tensor | None = None
        self.view: View | None = None
        # the base of a view, which shares its version counter
        self.base: Callable[[], Tensor | None] = gone
        if base is not None:
            self.base = weakref.ref(base)
            self.view = reference if type(reference) is View else View(tensor)
        self.is_written = False
        self.is_copy = False  # its value was recomputed by a replay inside of the forward
        self.tensor: Tensor | None = None  # the replayed tensor
        self.replayed_version = 0
        self.external: External | None = None  # set if the tensor is kept after all

    @property
    def is_result(self) -> bool:
        """Whether the operation that made the tensor saved it; known while the tensor exists."""
        original = self.original()
        # asking for the history of a view whose base was written since, which cannot be opened,
        # makes autograd regenerate it: a node that comes earlier in the backward, or an error
        if original is None or original._version != self.version:
            return False
        if (made_by := original.grad_fn) is None:
            return False
        is_function = hasattr(made_by, "apply")
        # the forward of a function may have made autograd nodes between its own and this
        if made_by._sequence_nr() != self.sequence - 1 and not (is_function and self.was_result):
            return False
        base = original._base
        return base is None or is_function or _is_just_written(base, made_by)

    def keep_if_replaced(self, tensor: Tensor) -> None:
        """Keeps the tensor if it is this one, whose memory the program has replaced.

        Autograd holds an operation's argument itself, so that its backward reads the numbers that
        are there then; it holds the memory of a result.
        """
        if self.original() is tensor and not self.is_result:
            self.keep()

    def keep(self) -> None:
        """Keeps the tensor after all, which still exists."""
        original = self.original()
        if original is None:
            original = self._as_of_base()
        assert original is not None, "the reader holds the tensor"
        # autograd refuses writes since then
        self._hold(original).version = self.version

    def _hold(self, tensor: Tensor) -> External:
        """Holds a tensor of the memory in the place of a replay."""
        self.external = external = external_of(tensor)
        external.has_history, external.is_result = self.has_history, self.was_result
        self.segment.recording.storages.hold(external)
        return external

    def _keep_memory(self) -> None:
        """Keeps the memory that the baseline saves, of which the saved tensor was one or is a copy.

        Where that is gone, the handle cannot be opened.
        """
        source = self.segment.recording.storages.still_there(self.value)
        self.is_written = source is None
        if source is not None:
            self._hold(self.reference.on(source) if type(self.reference) is View else source)

    def _as_of_base(self) -> Tensor | None:
        """Returns the saved view made again from its base, if that still exists."""
        base = self.base()
        if base is None or self.view is None:
            return None
        with DisableTorchDispatch():
            return self.view.on(detached(base))

    def move_to(self, segment: Segment) -> None:
        """Moves this handle to another segment of the same recording."""
        self.segment = segment
        segment.handles.append(weakref.ref(self))

    def before_write(self) -> None:
        """Called before a recorded kernel writes the storage of the tensor."""
        original = self.original()
        alias = self.base() if original is None else original
        if self.is_copy or (alias is None and self.version_counter is None):
            self._keep_memory()
        elif alias is not None and self.version_counter is None:
            self.version_counter = version_counter_of(alias)
            if original is not None:
                self.view = View(original)
            elif type(self.fingerprint) is bytes:
                # the last chance to notice an earlier write by code that torch does not see
                view = self._as_of_base()
                self.is_written = view is not None and self.fingerprint != read(view)

    def mark_external(self, storage: UntypedStorage) -> None:
        """Called before the storage of the tensor is written unrecorded: the tensor is kept."""
        original = self.original()
        alias = self.base() if original is None else original
        # `Tensor.data` may have given it other memory
        if alias is not None and storage_of(alias) is storage:
            self.keep()
        else:
            self.is_written = True

    def look_for_writes(self) -> None:
        """Checks at the end of the forward whether the tensor was written after it was saved."""
        original = self.original()
        if original is not None:
            storages = self.segment.recording.storages
            storages.look_for_replaced(original, storages.value_of(original))
            if self.external is not None:
                return
            self.before_write()
            # a write that counts a version is refused only when a backward opens this handle
            is_there = storage_of(original) is self.value.home()
            if self.fingerprint is not None and original._version == self.version and is_there:
                # code that torch does not see may have written it since
                self.fingerprint = fingerprint(original)
        elif not (type(self.original) is Original and self.original.is_replaced):
            self.original = gone
        reference, value = self.reference, self.value
        if (
            value.after is None
            or self.version_counter is None
            or self.version_counter._version != self.version
        ):
            return
        while value.after is not None:
            value = value.after
        view = reference if type(reference) is View else self.view
        assert view is not None, "it is noted with the version"
        view.value = self.value = value
        self.reference, self.fingerprint = view, None

    def take_replayed(self) -> SampleComparison | None:
        """Takes the tensor out of a replay; returns a comparison that its device is yet to make."""
        reference, tensor = self.reference, self.value.replayed
        assert tensor is not None, "a replay makes what its handles want"
        assert type(tensor) is not FakeTensor or self.fingerprint is None, "it has numbers"
        # autograd restores its history; until then a view of it has none
        if tensor.requires_grad:
            tensor.requires_grad_(False)
        if type(reference) is View:
            tensor = reference.on(tensor)
        before, compared = self.fingerprint, None
        if isinstance(before, Tensor):
            compared = SampleComparison(self._described(tensor), tensor, before)
        elif before is not None and before != read(tensor):
            raise RecomputeError(f"a replayed tensor {self._described(tensor)} {OTHER_NUMBERS}")
        self.tensor = tensor = self._as_it_is(tensor)
        self.replayed_version = tensor._version
        return compared

    def _described(self, tensor: Tensor) -> TensorDescription:
        """Describes a replayed tensor for the error that it has other numbers."""
        value = self.value
        kernels = self.segment.recording.kernels
        function = next(kernel.function for kernel in kernels if kernel.index == value.made_at)
        # a KernelWithKeys holds the kernel itself
        operator = name_of_kernel(getattr(function, "kernel", function))
        return TensorDescription(operator, tuple(tensor.shape), tensor.dtype, tensor.device)

    def _as_it_is(self, replayed: Tensor) -> Tensor:
        """Returns the original tensor if it exists: code that torch does not see may write it.

        If only its memory still exists and holds other numbers now, the handle cannot be opened.
        """
        original, home = self.original(), self.value.home()
        if original is not None:
            is_here = storage_of(original) is home or not self.is_result
            return detached(original) if is_here else replayed
        if home is not None and type(self.fingerprint) is bytes and self.fingerprint:
            present = read_in(home, replayed)
            self.is_written = present is not None and self.fingerprint != present
        elif home is not None and self.value.after is None and self.value.blank:
            # it has no gradient, but NumPy may share its memory
            self.is_written = not self.value.is_untouched(home)
        return replayed


def _is_just_written(base: Tensor, made_by: Node) -> bool:
    """Returns whether a view's history was regenerated because an operation wrote the view.

    An argument whose base was written has one, too; then the operation that reads the view comes
    between the one that wrote the base and the first autograd node of the history.
    """
    written_by, behind = base.grad_fn, made_by.next_functions
    while written_by is not None and behind and behind[0][0] is not None:
        if behind[0][0] is written_by:
            return bool(made_by._sequence_nr() == written_by._sequence_nr() + 1)
        made_by = behind[0][0]
        behind = made_by.next_functions
    return False


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), DisableTorchDispatch():
        return torch.empty((), dtype=dtype, device=device)


def version_counter_of(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory of its own that shares the version counter of this one."""
    version_counter = detached(tensor)
    with DisableTorchDispatch():
        if isinstance(tensor, FakeTensor):
            nothing = _nothing(tensor.dtype, torch.device("meta")).expand(tensor.shape)
            version_counter.data = FakeTensor(tensor.fake_mode, nothing, tensor.fake_device)
        else:
            version_counter.data = _nothing(tensor.dtype, tensor.device).expand(tensor.shape)
    return version_counter


class BlockListener(Protocol):
    """Opens and closes segments between kernels (`kernel_segments.Conductor`)."""

    def enter(self, block: str, args: Args = ()) -> None:
        """Called before a block of the model runs."""

    def leave(self) -> None:
        """Called after a block of the model ran."""

    def note_saved(self, external: External) -> None:
        """Called when an external tensor is saved."""


class Thread(threading.local):
    """The engine's state on this thread."""

    segment: Segment | None = None
    conductor: BlockListener | None = None
    replaying = False
    # zoo's saved-tensor hooks, while a program disables all such hooks
    paused: tuple[tuple[Pack, Unpack], ...] = ()
    # returns the source location of the code that runs now
    observer: Callable[[], object] | None = None
    origin: object = None  # where the kernel that is replayed now was called
    # the latest backward on this thread that opened segments, and these segments
    backward = -1
    opened: list[weakref.ref[Segment]]
    # the latest backward inside of a forward, and the first operation that it runs
    inside = (-1, 0)


thread = Thread()
# the outermost segments that a backward may still open
SEGMENTS: set[weakref.ref[Segment]] = set()
_drop_segment = SEGMENTS.discard
