"""What autograd saves inside of a segment: handles for what a replay makes, the rest as it is."""

import functools
import logging
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo._torch import (
    DisableTorchDispatch,
    FakeTensor,
    current_backward,
    is_graph_kept,
    queue_callback,
    sequence_number,
    top_saved_tensors_hooks,
)
from zoo.engine.operands import (
    Outside,
    Reference,
    Value,
    View,
    check_history,
    check_version,
    counted,
    detached,
    fingerprint,
    has_history,
    read,
    read_memory,
)
from zoo.engine.operator_effects import name_of_kernel
from zoo.engine.recording import Segment, has_own_storage, storage_of, thread
from zoo.engine.replay import outside_of, replay, schedule, without_modes
from zoo.engine.replay_check import CHECKS, OTHER_NUMBERS, SampleComparison, TensorDescription
from zoo.engine.sharded import freed_modules
from zoo.errors import RecomputeError

_log = logging.getLogger("zoo")
WRITTEN = (
    "a tensor that this gradient needs was changed in place after it was saved. Change a copy."
)


# what stands for saved tensors from outside, by the ids of tensors of which somebody wants to know
SAVED: dict[int, list[weakref.ref[Outside]]] = {}


class Handle:
    """A saved tensor that is not kept: the first one that is opened replays its segment.

    Autograd saves tensors by reference. So one that is written after it was saved is refused where
    its version tells, as in the baseline, and else (`Tensor.data` has a version of its own, and
    some kernels declare no write) it has the numbers that were written last.
    """

    __slots__ = (
        "__weakref__", "counter", "filled", "fingerprint", "has_history", "is_written", "kept",
        "original", "reference", "segment", "sequence", "tensor", "version", "view",
    )  # fmt: skip

    def __init__(self, segment: Segment, reference: Reference, tensor: Tensor) -> None:
        self.segment = segment
        self.reference = reference
        self.fingerprint = fingerprint(tensor)
        self.original = weakref.ref(tensor)
        self.version = tensor._version
        # which operation of autograd's saved it
        self.sequence = sequence_number()
        self.has_history = has_history(tensor, self.sequence)
        # shares the version of the tensor, once that is written or somebody has it; and where it is
        self.counter: Tensor | None = None
        self.view: View | None = None
        self.is_written = False
        self.tensor: Tensor | None = None
        self.filled = 0  # the version of that
        self.kept: Outside | None = None

    @property
    def is_result(self) -> bool:
        """Whether the operation that made the tensor saved it; asked while somebody has it."""
        original = self.original()
        # of a view whose base was written since, which cannot be opened, autograd makes the history
        # anew when it is asked for: a node that comes earlier in the backward, or an error
        if original is None or original._version != self.version:
            return False
        made_by: Any = original.grad_fn
        return made_by is not None and made_by._sequence_nr() == self.sequence - 1

    def keep(self) -> None:
        """Keeps the tensor after all, which is there: it is about to be read."""
        original = self.original()
        assert original is not None, "who reads it has it"
        self.kept = kept(original)
        # since which autograd minds a write
        self.kept.version = self.version

    def move_to(self, segment: Segment) -> None:
        """Makes it one of another segment of the same recording."""
        self.segment = segment
        segment.handles.append(weakref.ref(self))

    def before_write(self) -> None:
        """Is told that a kernel is about to write the storage of the tensor."""
        original = self.original()
        if original is None:
            # nobody has it any more, but a base or another view may have its version
            self.is_written = self.counter is None
        elif self.counter is None and type(original) is not FakeTensor:
            self.counter, self.view = counter_of(original), View(original)

    def lose(self) -> None:
        """Is told that the storage of the tensor is about to be written unrecorded."""
        original = self.original()
        # `Tensor.data` may have given it other memory
        if original is not None and storage_of(original) is self.reference.value.home():
            self.keep()
        else:
            self.is_written = True

    def look_for_writes(self) -> None:
        """Looks at the end of the forward whether the tensor was written after it was saved."""
        original = self.original()
        if original is not None:
            recording = self.segment.recording
            recording.look_for_replaced(original, recording.made(original))
            if self.kept is not None:
                return
            self.before_write()
            # a write that counts is refused where this one is opened, and only there
            if self.fingerprint is not None and original._version == self.version:
                # code that torch does not see may have written it since
                self.fingerprint = fingerprint(original)
        reference = self.reference
        value = reference.value
        if value.after is None or self.counter is None or self.counter._version != self.version:
            return
        while value.after is not None:
            value = value.after
        view = reference if type(reference) is View else self.view
        assert view is not None, "it is noted with the version"
        view.value = value
        self.reference, self.fingerprint = view, None

    def unpack(self) -> Tensor:
        """Returns the tensor, replayed if it is not there.

        Raises:
            RecomputeError: it, or something that it is made from, was changed in place since.
        """
        if self.kept is not None:
            return self.kept.unpack()
        if self.counter is not None:
            check_version(self.counter, self.version)
        if self.has_history:
            check_history(self.original())
        with self.segment.recording.lock:
            if self.tensor is None and not self.is_written:
                if torch.is_grad_enabled() and top_saved_tensors_hooks(False) is None:
                    _warn_of_graph()
                around = thread.replaying
                try:
                    # the kernels ran outside of a vmap that is around the backward
                    with without_modes():
                        fill(self.segment)
                finally:
                    # once more, where an interrupt has cut it short
                    thread.replaying = around
            if self.is_written:
                raise RecomputeError(WRITTEN)
            tensor = self.tensor
            assert tensor is not None, "a replay fills every living handle"
            if tensor._version != self.filled:
                check_version(tensor, self.filled)
            if current_backward() == -1:
                clear(self.segment)
            elif is_graph_kept():
                self.tensor = None
            return tensor

    def fill(self) -> SampleComparison | None:
        """Takes the tensor out of a replay; returns what is left to compare, on its device."""
        reference = self.reference
        tensor = reference.value.made
        assert tensor is not None, "a replay makes what its handles want"
        # autograd gives it its history again; before that a view of it has none
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
        self.filled = tensor._version
        return compared

    def _described(self, tensor: Tensor) -> TensorDescription:
        """Says what a replayed tensor is, for the error if it has other numbers."""
        value = self.reference.value
        makers = (node for node in self.segment.recording.nodes if node.index == value.node)
        kernel = next(makers).kernel
        # one with keys holds another
        operator = name_of_kernel(getattr(kernel, "kernel", kernel))
        return TensorDescription(operator, tuple(tensor.shape), tensor.dtype, tensor.device)

    def _as_it_is(self, replayed: Tensor) -> Tensor:
        """Returns the tensor itself where somebody has it: what torch does not see may write it.

        Where somebody has its memory alone and other numbers are there now, it cannot be opened.
        """
        original, home = self.original(), self.reference.value.home()
        if original is not None:
            is_here = storage_of(original) is home or not self.is_result
            return detached(original) if is_here and type(original) is not FakeTensor else replayed
        if home is not None and type(self.fingerprint) is bytes and self.fingerprint:
            start, size = replayed.storage_offset() * replayed.itemsize, replayed.nbytes
            if start + size <= home.nbytes():
                self.is_written = self.fingerprint != read_memory(home.data_ptr() + start, size)
        return replayed


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), DisableTorchDispatch():
        return torch.empty((), dtype=dtype, device=device)


def counter_of(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory of its own that shares the version counter of this one."""
    found = detached(tensor)
    with DisableTorchDispatch():
        found.data = _nothing(tensor.dtype, tensor.device).expand(tensor.shape)
    return found


class Opaque:
    """A tensor of a class of its own, taken apart into tensors that are packed one by one."""

    __slots__ = ("context", "counted", "kind", "names", "packed", "sizes", "strides")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any]) -> None:
        self.counted = counted(tensor)
        self.names, self.context = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in self.names]
        # a mesh of devices may be among them; and offsets, which identify the sizes of a tensor
        self.packed = [pack(part) if _has_gradient(part) else part for part in parts]
        self.kind = type(tensor)
        self.sizes, self.strides = tensor.size(), tensor.stride()

    def unpack(self) -> Tensor:
        """Puts the tensor together again; raises as `Handle.unpack`."""
        if self.counted is not None:
            check_version(*self.counted)
        parts = {
            name: packed.unpack() if isinstance(packed, PACKED) else packed
            for name, packed in zip(self.names, self.packed, strict=True)
        }
        found: Tensor = self.kind.__tensor_unflatten__(
            parts, self.context, self.sizes, self.strides
        )
        return found


@functools.cache
def _warn_of_graph() -> None:
    """Says once that a backward makes a graph, which keeps what the backward reads."""
    _log.warning(
        "this backward makes a graph (create_graph=True), which keeps all that the backward reads: "
        "what is recomputed stays in memory until that graph is freed, so that checkpointing saves "
        "little, and a memory budget, which counts no such graph, may be exceeded. Leave "
        "create_graph out where no gradient of gradients is needed"
    )


def _has_gradient(part: Any) -> bool:
    return isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())


PACKED = Outside | Handle | Opaque


def kept(tensor: Tensor) -> Outside:
    """Returns a tensor as it is, to be saved outside of all segments."""
    found = Outside(tensor)
    found.cut()
    return found


def pack(tensor: Tensor) -> Any:
    """Returns what stands for a tensor that autograd saves on this thread."""
    if not has_own_storage(type(tensor)) and hasattr(tensor, "__tensor_flatten__"):
        return Opaque(tensor, pack)
    segment = thread.segment
    reference = kept(tensor) if segment is None else segment.recording.refer(tensor)
    if segment is None or isinstance(reference, Outside):
        assert isinstance(reference, Outside), "all that is kept is from outside"
        if has_history(tensor, sequence_number()):
            reference.original = weakref.ref(tensor)
        if SAVED and (noted := SAVED.get(id(tensor))) is not None:
            noted.append(weakref.ref(reference))
        return reference
    value = reference.value
    handle = Handle(segment, reference, tensor)
    found = weakref.ref(handle)
    segment.handles.append(found)
    segment.recording.saved[id(tensor)] = value
    value.saved = (*value.saved, found)
    return handle


# returns the tensor that something packed stands for
unpack: Callable[[Any], Tensor] = operator.methodcaller("unpack")


def given_to(segment: Segment) -> set[Value]:
    """Returns the values that an inner segment's replay takes from the segment around it."""
    parts = (part for part in segment.inner() if part.given is None)
    goals = goals_of(waiting_in(segment)).union(*map(given_to, parts))
    found = {value for value in goals if not segment.makes(value)}
    for node, _ in schedule(segment.backwards(), goals, ()):
        found.update(value for value in node.reads if value.node < segment.first)
    return found


def waiting_in(segment: Segment) -> list[Handle]:
    """Returns the handles of a segment itself that a replay is yet to fill."""
    return [handle for handle in segment.living() if handle.tensor is None]


def goals_of(handles: list[Handle]) -> set[Value]:
    """Returns the values that handles refer to."""
    return {handle.reference.value for handle in handles}


def fill(segment: Segment) -> None:
    """Replays a segment, and before it those around it whose results it needs."""
    waiting = [segment]
    while (around := waiting[-1].parent) is not None and not _is_given(waiting[-1]):
        waiting[-1].given = None
        waiting.append(around)
    for part in reversed(waiting):
        _fill(part)
    backward = current_backward()
    if backward != -1:
        if thread.backward != backward:
            thread.backward, thread.opened = backward, []
            queue_callback(functools.partial(_end_backward, backward, thread.opened))
        thread.opened.append(weakref.ref(waiting[-1]))


def _is_given(segment: Segment) -> bool:
    """Says whether a segment has what it starts from, as a replay around it left that.

    A backward may write what it saved, which is the same memory.
    """
    given = segment.given
    return given is not None and all(tensor._version == made for tensor, made in given.values())


def _fill(segment: Segment) -> None:
    given = segment.given or {}
    waiting = waiting_in(segment)
    needs = {part: given_to(part) for part in segment.inner() if part.given is None}
    if segment.scheduled_for == len(waiting):
        found = segment.scheduled
    else:
        goals = goals_of(waiting).union(*needs.values())
        found = schedule(segment.backwards(), goals, given)
    for value, (tensor, _) in given.items():
        value.take(tensor)
    sharded, around = freed_modules(outside_of(found)), thread.replaying
    try:
        for module in sharded:
            module.unshard()
        # a forward around this backward neither records nor counts what follows
        thread.replaying = True
        replay(found)
        compared = [one for handle in waiting if (one := handle.fill()) is not None]
        if compared and CHECKS:
            CHECKS[-1].compare(compared)
        for part, values in needs.items():
            there = [(value, value.made) for value in values]
            part.given = {value: (made, made._version) for value, made in there if made is not None}
        if not _is_graph_kept():
            segment.given = None
    finally:
        thread.replaying = around
        made = [value for node, _ in found for value in node.results]
        for value in (*made, *given):
            value.made = None
        for module in sharded:
            module.reshard()


def _is_graph_kept() -> bool:
    running = current_backward() != -1
    return running and bool(is_graph_kept())


def clear(segment: Segment) -> None:
    """Drops what a replay left and nobody took."""
    for handle in segment.living():
        handle.tensor = None
    for part in segment.inner():
        part.given = None
        clear(part)


def _end_backward(backward: int, segments: list[weakref.ref[Segment]]) -> None:
    """Drops what was replayed for a backward and not taken."""
    for reference in segments:
        if (segment := reference()) is not None:
            with segment.recording.lock:
                clear(segment)
    if CHECKS:
        CHECKS[-1].end_backward(backward)


def prune(segment: Segment) -> None:
    """Ends a forward: drops the nodes that no handle needs, and with them what they read."""
    handles = segment.all_handles()
    # a forward may turn to another segment inside of a vmap around a backward of its own
    with without_modes():
        for handle in handles:
            handle.look_for_writes()
        found = schedule(segment.backwards(), goals_of(handles), ())
        segment.recording.close([node for node, _ in found])
    segment.scheduled, segment.scheduled_for = found, len(handles)
