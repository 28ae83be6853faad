"""What autograd saves inside of a segment: handles for what a replay makes, the rest as it is."""

import functools
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo._torch import (
    PROXY_MODE,
    DisableTorchDispatch,
    FakeTensor,
    current_backward,
    current_node,
    get_dispatch_mode,
    is_graph_kept,
    queue_callback,
    sequence_number,
    top_saved_tensors_hooks,
    will_run,
)
from zoo.engine.operands import (
    PLAIN,
    REPLACED,
    Original,
    Outside,
    Reference,
    Value,
    View,
    check_history,
    check_version,
    counted,
    detached,
    fingerprint,
    has_own_storage,
    no_tensor,
    original_of,
    read,
    read_memory,
    roles_of,
)
from zoo.engine.operator_effects import name_of_kernel
from zoo.engine.recording import Recording, Segment, storage_of, thread
from zoo.engine.replay import Scheduled, outside_of, replay, schedule, without_modes
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
        "__weakref__", "base", "counter", "filled", "fingerprint", "has_history", "is_copy",
        "is_written", "kept", "original", "reference", "segment", "sequence", "tensor", "value",
        "version", "view", "was_result",
    )  # fmt: skip

    def __init__(self, segment: Segment, reference: Reference, tensor: Tensor) -> None:
        self.segment = segment
        # read more often than a property allows
        self.reference, self.value = reference, reference.value
        self.fingerprint = fingerprint(tensor)
        self.version = tensor._version
        # which operation of autograd's saved it
        self.sequence = sequence_number()
        self.has_history, self.was_result = roles_of(tensor, self.sequence)
        # of a result autograd has the memory, whatever the tensor is given
        self.original: Callable[[], Tensor | None]
        if self.was_result:
            self.original = weakref.ref(tensor)
        else:
            self.original = original_of(tensor, tensor.untyped_storage())
        # shares the version of the tensor, once that is written or somebody has it; and where it is
        self.counter: Tensor | None = None
        self.view: View | None = None
        # of a view what it is one of, which has the same version
        self.base: Callable[[], Tensor | None] = no_tensor
        if (base := tensor._base) is not None:
            self.base = weakref.ref(base)
            self.view = reference if type(reference) is View else View(tensor)
        self.is_written = False
        self.is_copy = False  # what was saved is a value that a replay inside of the forward made
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
        if made_by is None or made_by._sequence_nr() != self.sequence - 1:
            return False
        base: Any = original._base
        return base is None or hasattr(made_by, "apply") or _is_just_written(base, made_by)

    def keep(self) -> None:
        """Keeps the tensor after all, which is there: it is about to be read."""
        original = self.original()
        if original is None:
            original = self._as_of_base()
        assert original is not None, "who reads it has it"
        self.kept = found = outside(original)
        # since which autograd minds a write
        found.version = self.version
        found.has_history, found.is_result = self.has_history, self.was_result
        self.segment.recording.hold(found)

    def _as_of_base(self) -> Tensor | None:
        """Returns the view that it was, of a base which somebody has."""
        base = self.base()
        if base is None or self.view is None:
            return None
        with DisableTorchDispatch():
            return self.view.on(detached(base))

    def move_to(self, segment: Segment) -> None:
        """Makes it one of another segment of the same recording."""
        self.segment = segment
        segment.handles.append(weakref.ref(self))

    def before_write(self) -> None:
        """Is told that a kernel is about to write the storage of the tensor."""
        original = self.original()
        there = self.base() if original is None else original
        if self.is_copy:
            # in the baseline it is the memory that is written
            self.is_written = True
        elif there is None:
            # nobody has it any more, but what it was detached to may have its version
            self.is_written = self.counter is None
        elif self.counter is None and type(there) is not FakeTensor:
            self.counter = counter_of(there)
            if original is not None:
                self.view = View(original)
            elif type(self.fingerprint) is bytes:
                # after this nothing tells whether code that torch does not see wrote it before
                view = self._as_of_base()
                self.is_written = view is not None and self.fingerprint != read(view)

    def lose(self, storage: Any) -> None:
        """Is told that the storage of the tensor is about to be written unrecorded."""
        original = self.original()
        there = self.base() if original is None else original
        # `Tensor.data` may have given it other memory
        if there is not None and storage_of(there) is storage:
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
            is_there = storage_of(original) is self.value.home()
            if self.fingerprint is not None and original._version == self.version and is_there:
                # code that torch does not see may have written it since
                self.fingerprint = fingerprint(original)
        elif not (type(self.original) is Original and self.original.is_replaced):
            self.original = no_tensor
        reference, value = self.reference, self.value
        if value.after is None or self.counter is None or self.counter._version != self.version:
            return
        while value.after is not None:
            value = value.after
        view = reference if type(reference) is View else self.view
        assert view is not None, "it is noted with the version"
        view.value = self.value = value
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
        if type(self.original) is Original and self.original.is_replaced:
            # by numbers that are gone with it
            raise RecomputeError(REPLACED)
        with self.segment.recording.lock:
            if self.tensor is None and not self.is_written:
                if torch.is_grad_enabled() and top_saved_tensors_hooks(False) is None:
                    _warn_of_graph()
                around = thread.replaying
                try:
                    # the kernels ran outside of a vmap that is around the backward
                    without_modes(fill, self)
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
        reference, tensor = self.reference, self.value.made
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
        value = self.value
        makers = (node for node in self.segment.recording.nodes if node.index == value.node)
        kernel = next(makers).kernel
        # one with keys holds another
        operator = name_of_kernel(getattr(kernel, "kernel", kernel))
        return TensorDescription(operator, tuple(tensor.shape), tensor.dtype, tensor.device)

    def _as_it_is(self, replayed: Tensor) -> Tensor:
        """Returns the tensor itself where somebody has it: what torch does not see may write it.

        Where somebody has its memory alone and other numbers are there now, it cannot be opened.
        """
        original, home = self.original(), self.value.home()
        if original is not None:
            is_here = storage_of(original) is home or not self.is_result
            return detached(original) if is_here and type(original) is not FakeTensor else replayed
        if home is not None and type(self.fingerprint) is bytes and self.fingerprint:
            start, size = replayed.storage_offset() * replayed.itemsize, replayed.nbytes
            if start + size <= home.nbytes():
                self.is_written = self.fingerprint != read_memory(home.data_ptr() + start, size)
        return replayed


def _is_just_written(base: Any, made_by: Any) -> bool:
    """Says whether the history of a view was made anew since an operation wrote the view.

    Not as that of an argument whose base was written: between what wrote the base and the first
    node of that history is the operation then that reads the view.
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


def is_in_graph() -> bool:
    """Returns whether fake tensors stand for those of a graph that is being written.

    `make_fx` knows them by their identity, so that no others may take their place. Higher-order
    operators write a graph of what they call, each time that they are called.
    """
    return get_dispatch_mode(PROXY_MODE) is not None


class InGraph:
    """A saved tensor that is in a graph."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        """Returns the tensor itself."""
        return self.tensor


PACKED = Outside | Handle | Opaque | InGraph


def outside(tensor: Tensor) -> Outside:
    """Returns what stands for a tensor as it is."""
    storage = storage_of(tensor)
    return Outside(tensor, None if storage is None else weakref.ref(storage))


def kept(tensor: Tensor) -> Outside:
    """Returns what stands for a tensor as it is, to be saved outside of all segments."""
    found = outside(tensor)
    found.cut(detached)
    return found


def pack(tensor: Tensor) -> Any:
    """Returns what stands for a tensor that autograd saves on this thread."""
    kind = type(tensor)
    if kind is FakeTensor and is_in_graph():
        return InGraph(tensor)
    if kind not in PLAIN and not has_own_storage(kind) and hasattr(tensor, "__tensor_flatten__"):
        return Opaque(tensor, pack)
    segment = thread.segment
    reference = kept(tensor) if segment is None else segment.recording.refer(tensor)
    if segment is None or isinstance(reference, Outside):
        assert isinstance(reference, Outside), "all that is kept is from outside"
        has_history, is_result = roles_of(tensor, sequence_number())
        if segment is not None and reference.is_result and not is_result:
            # of the same tensor autograd has the memory as a result, and itself as an argument
            reference = outside(tensor)
            segment.recording.hold(reference)
        reference.has_history |= has_history
        reference.is_result |= is_result
        if SAVED and (noted := SAVED.get(id(tensor))) is not None:
            noted.append(weakref.ref(reference))
        return reference
    handle, recording = Handle(segment, reference, tensor), segment.recording
    value = handle.value
    found = weakref.ref(handle)
    segment.handles.append(found)
    if recording.is_replayed and (latest := recording.made(tensor)) is not value:
        assert latest is not None, "all else is from outside"
        handle.is_copy, latest.saved = True, (*latest.saved, found)
        recording.saved[id(tensor)] = latest
    else:
        recording.saved[id(tensor)] = value
    value.saved = (*value.saved, found)
    return handle


def refuse_hooks(packed: Any) -> None:
    """Raises RecomputeError where a tensor that was packed here is to have hooks of its own."""
    if isinstance(packed, PACKED):
        raise RecomputeError(
            "`register_hooks` of one saved tensor (`grad_fn._raw_saved_...`) inside of a segment: "
            "what a segment saves has hooks already, which recompute it. Use "
            "torch.autograd.graph.saved_tensors_hooks around that operation, or call it outside of "
            "the segment."
        )


# returns the tensor that something packed stands for
unpack: Callable[[Any], Tensor] = operator.methodcaller("unpack")


class Request:
    """Which saved tensors a replay makes: all that wait, or those of some operations of autograd's.

    A backward inside of the forward asks for those of its own operations. Others wait for a
    backward to come, and to make them in each one would take the square of the time.
    """

    def __init__(self, handle: Handle | None, operations: range | None) -> None:
        self.handle, self.operations = handle, operations

    def waiting(self, segment: Segment) -> list[Handle]:
        """Returns the handles of a segment that ask for their tensors."""
        if self.operations is not None:
            segment.handles = [one for one in segment.handles if one() is not None]
        found = waiting_in(segment)
        if self.operations is None:
            return found
        asks = (one is self.handle or one.sequence - 1 in self.operations for one in found)
        return [*itertools.compress(found, asks)]

    def given_to(self, segment: Segment) -> set[Value]:
        """Returns the values that an inner segment's replay takes from the segment around it."""
        parts = (part for part in segment.inner() if part.given is None)
        goals = goals_of(self.waiting(segment)).union(*map(self.given_to, parts))
        found = {value for value in goals if not segment.makes(value)}
        for node, _ in schedule(segment.backwards(), goals, AvailableValues(segment.recording, {})):
            found.update(value for value in node.reads if value.node < segment.first)
        return found

    def is_given(self, segment: Segment) -> bool:
        """Returns whether a segment has what it starts from, as a replay around it left that.

        A backward may write what it saved, which is the same memory; and for another backward
        inside of the forward the replay around it left something else.
        """
        given = segment.given
        if given is None or any(tensor._version != made for tensor, made in given.values()):
            return False
        return self.operations is None or self.given_to(segment) <= given.keys()


EVERYTHING = Request(None, None)


def request_of(handle: Handle) -> Request:
    """Returns what the backward that opens a handle needs of its segment, and of those around."""
    if not handle.segment.recording.is_open:
        return EVERYTHING
    backward, node = current_backward(), current_node()
    if backward == -1:
        return Request(handle, range(0))
    if node is None:
        return EVERYTHING
    known, first = thread.inside
    if known != backward or handle.sequence <= first:
        first = first_operation(node)
        thread.inside = backward, first
    return Request(handle, range(first, node._sequence_nr() + 1))


def first_operation(node: Any) -> int:
    """Returns the number of the first operation that the running backward comes to from a node."""
    first, seen, waiting = node._sequence_nr(), {node}, [node]
    while waiting:
        node = waiting.pop()
        nexts = [one for one, _ in node.next_functions if one is not None and _is_run(one)]
        # of what comes before the tensors that gradients are asked for nothing runs
        if nexts:
            first = min(first, node._sequence_nr())
        waiting += (one for one in nexts if one not in seen)
        seen.update(nexts)
    return int(first)


def _is_run(node: Any) -> bool:
    try:
        return bool(will_run(node))
    except RuntimeError:
        # asked about a leaf that `autograd.grad` is asked for, which saves nothing
        return True


class AvailableValues(Container[Value]):
    """The values that need not be replayed: those given, and what the forward still has.

    Attributes:
        found: the latter that a schedule asked for, with their tensors.
    """

    def __init__(self, recording: Recording, given: Mapping[Value, Any]) -> None:
        self.recording = recording if recording.is_open else None
        self.given = given
        self.found: dict[Value, Tensor] = {}

    def __contains__(self, value: Any) -> bool:
        if value in self.given or value in self.found:
            return True
        tensor = None if self.recording is None else self.recording.still_there(value)
        if tensor is not None:
            self.found[value] = tensor
        return tensor is not None


def waiting_in(segment: Segment) -> list[Handle]:
    """Returns the handles of a segment itself that a replay is yet to fill."""
    return [handle for handle in segment.living() if handle.tensor is None]


def goals_of(handles: Iterable[Handle]) -> set[Value]:
    """Returns the values that handles want."""
    return {handle.value for handle in handles}


def fill(handle: Handle) -> None:
    """Replays the segment of a handle, and before it those around it whose results it needs."""
    request = request_of(handle)
    waiting = [handle.segment]
    while (around := waiting[-1].parent) is not None and not request.is_given(waiting[-1]):
        waiting[-1].given = None
        waiting.append(around)
    for part in reversed(waiting):
        _fill(part, request)
    backward = current_backward()
    if backward != -1:
        if thread.backward != backward:
            thread.backward, thread.opened = backward, []
            queue_callback(functools.partial(_end_backward, backward, thread.opened))
        thread.opened.append(weakref.ref(waiting[-1]))


def _fill(segment: Segment, request: Request) -> None:
    given, recording = segment.given or {}, segment.recording
    waiting = request.waiting(segment)
    needs = {part: request.given_to(part) for part in segment.inner() if part.given is None}
    if segment.scheduled_for == len(waiting):
        _replay(segment, segment.scheduled, waiting, needs, {})
        return
    goals = goals_of(waiting).union(*needs.values())
    there = AvailableValues(recording, given)
    found = schedule(segment.backwards(), goals, there)
    try:
        _replay(segment, found, waiting, needs, there.found)
    except RecomputeError:
        if not there.found:
            raise
        # code that torch does not see may have written what is there
        _replay(segment, schedule(segment.backwards(), goals, given), waiting, needs, {})


def _replay(
    segment: Segment,
    found: list[Scheduled],
    waiting: list[Handle],
    needs: dict[Segment, set[Value]],
    alive: dict[Value, Tensor],
) -> None:
    """Replays nodes, on what is alive, and gives the results to handles and inner segments."""
    given, recording = segment.given or {}, segment.recording
    for value, (tensor, _) in given.items():
        value.take(tensor)
    for value, tensor in alive.items():
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
        if recording.is_open:
            recording.begin_replay()
            for handle in waiting:
                assert handle.tensor is not None, "it is filled"
                recording.note_copy(handle.value, handle.tensor)
        if not _is_graph_kept():
            segment.given = None
    finally:
        thread.replaying = around
        made = [value for node, _ in found for value in node.results]
        for value in (*made, *given, *alive):
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
    # a forward may turn to another segment inside of a vmap around a backward of its own
    without_modes(_prune, segment)


def _prune(segment: Segment) -> None:
    handles = segment.all_handles()
    for handle in handles:
        handle.look_for_writes()
    found = schedule(segment.backwards(), goals_of(handles), ())
    segment.recording.close([node for node, _ in found])
    if segment.recording.is_replayed:
        # for a backward that asked for less than all, and may not have ended
        clear(segment)
    segment.scheduled, segment.scheduled_for = found, len(handles)
