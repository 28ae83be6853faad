"""Hooks for the tensors that autograd saves in a segment: `pack` to handles, `unpack` by replays.

The first handle that a backward unpacks replays its segment, after the segments around it: an inner
segment starts from values that the replay of the outer one makes (`inputs`). A backward inside of
the forward asks only for saved tensors of its own operations. External tensors are kept.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import Node

from zoo._torch import (
    PROXY_MODE,
    FakeTensor,
    current_backward,
    current_node,
    get_dispatch_mode,
    is_graph_kept,
    is_traceable_wrapper_subclass as is_wrapper,
    queue_callback,
    sequence_number,
    top_saved_tensors_hooks,
    tracer_modes,
    will_run,
)
from zoo.engine.devices import release_draws
from zoo.engine.operands import REPLACED, External, Value, external_of
from zoo.engine.recording import Recording
from zoo.engine.replay import external_tensors, kernels_in, replay, schedule, without_modes
from zoo.engine.replay_check import CHECKS
from zoo.engine.segments import Handle, Scheduled, Segment, thread
from zoo.engine.sharded import freed_modules
from zoo.engine.storages import Storages
from zoo.engine.tensor_state import (
    PLAIN,
    Original,
    check_history,
    check_version,
    detached,
    detached_by_class,
    has_own_storage,
    roles_of,
    take_apart,
    version_check_of,
)
from zoo.errors import RecomputeError

_log = logging.getLogger("zoo")
WRITTEN = (
    "a tensor that this gradient needs was changed in place after it was saved. Change a copy."
)
# saved external tensors, by the ids of the tensors that `pending_reads` follows
SAVED: dict[int, list[weakref.ref[External]]] = {}


class PackedWrapper:
    """A saved wrapper subclass, flattened into tensors that are packed one by one."""

    __slots__ = ("make", "packed", "version_check")

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], object]) -> None:
        self.version_check = version_check_of(tensor)
        parts, self.make = take_apart(tensor)
        # not a device mesh, nor the offsets of a nested tensor, whose identity stands for its sizes
        self.packed = {n: pack(part) if _has_gradient(part) else part for n, part in parts.items()}

    def unpack(self) -> Tensor:
        """Rebuilds the tensor; raises as `unpack`."""
        if self.version_check is not None:
            check_version(*self.version_check)
        parts = self.packed.items()
        tensor: Tensor = self.make({n: unpack(p) if isinstance(p, Packed) else p for n, p in parts})
        return tensor


class KeptWrapper:
    """A saved tensor whose class has its own `__torch_dispatch__` and cannot be flattened.

    Its kernels are recorded, and what it is made of is its own business, so that it is kept whole.
    """

    __slots__ = ("tensor", "version_check")

    def __init__(self, tensor: Tensor) -> None:
        _warn_of_kept(type(tensor))
        self.version_check = version_check_of(tensor)
        _, is_result = roles_of(tensor, sequence_number())
        # autograd holds the memory of a result, without the node that holds this
        self.tensor = detached_by_class(tensor) if is_result else tensor

    def unpack(self) -> Tensor:
        """Returns the tensor; raises as `unpack`."""
        if self.version_check is not None:
            check_version(*self.version_check)
        return self.tensor


@functools.cache
def _warn_of_kept(kind: type) -> None:
    """Warns once of a class whose saved tensors are kept."""
    _log.warning(
        "%s has its own __torch_dispatch__ and no __tensor_flatten__, so that what autograd saves "
        "of it inside of a segment is kept, not recomputed: define both __tensor_flatten__ and "
        "__tensor_unflatten__",
        kind.__name__,
    )


def _has_gradient(part: object) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())


def is_in_graph() -> bool:
    """Returns whether `make_fx` is tracing, as higher-order operators do each time they are called.

    It knows fake tensors by their identity, so that no others may take their place.
    """
    return get_dispatch_mode(PROXY_MODE) is not None


class GraphTensor:
    """A saved tensor of a graph that is being traced."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        """Returns the tensor itself."""
        return self.tensor


# what `pack` returns
Packed = External | Handle | PackedWrapper | KeptWrapper | GraphTensor


def detached_external(tensor: Tensor) -> External:
    """Packs a tensor that is saved outside of all segments, without the program's graph."""
    external = external_of(tensor)
    external.detach_graph(detached)
    return external


def pack(tensor: Tensor) -> Packed:
    """Packs a tensor that autograd saves on this thread."""
    kind = type(tensor)
    if kind is FakeTensor and is_in_graph():
        return GraphTensor(tensor)
    if kind not in PLAIN and not has_own_storage(kind):
        return PackedWrapper(tensor, pack) if is_wrapper(tensor) else KeptWrapper(tensor)
    segment = thread.segment
    refer = detached_external if segment is None else segment.recording.storages.refer
    reference = refer(tensor)
    if segment is None or isinstance(reference, External):
        assert isinstance(reference, External), "outside of segments all is external"
        has_history, is_result = roles_of(tensor, sequence_number())
        if segment is not None and reference.is_result and not is_result:
            # autograd holds the memory of a result, but an argument itself
            reference = external_of(tensor)
            segment.recording.storages.hold(reference)
        reference.has_history |= has_history
        reference.is_result |= is_result
        if thread.conductor is not None:
            thread.conductor.note_saved(reference)
        if SAVED and (references := SAVED.get(id(tensor))) is not None:
            references.append(weakref.ref(reference))
        return reference
    handle, storages = Handle(segment, reference, tensor), segment.recording.storages
    value = handle.value
    saved = weakref.ref(handle)
    segment.handles.append(saved)
    if storages.is_replayed and (latest := storages.value_of(tensor)) is not value:
        assert latest is not None, "all else is external"
        handle.is_copy, latest.saved = True, (*latest.saved, saved)
        storages.saved[id(tensor)] = latest
    else:
        storages.saved[id(tensor)] = value
    value.saved = (*value.saved, saved)
    return handle


def refuse_hooks(packed: object) -> None:
    """Raises RecomputeError if the program registers hooks of its own for a packed tensor."""
    if isinstance(packed, Packed):
        raise RecomputeError(
            "`register_hooks` of one saved tensor (`grad_fn._raw_saved_...`) inside of a segment: "
            "what a segment saves has hooks already, which recompute it. Use "
            "torch.autograd.graph.saved_tensors_hooks around that operation, or call it outside of "
            "the segment."
        )


def unpack(packed: Packed) -> Tensor:
    """Returns a saved tensor.

    Raises:
        RecomputeError: it was changed in place since.
    """
    if torch.compiler.is_compiling():
        # compiled autograd traces the backward, and calls what is left out of the graph as it runs
        return torch.compiler.disable(unpack)(packed)  # type: ignore[no-any-return]
    return unpack_handle(packed) if type(packed) is Handle else packed.unpack()


def unpack_handle(handle: Handle) -> Tensor:
    """Returns a saved tensor, replayed if it is not there.

    Raises:
        RecomputeError: it, or something that it is made from, was changed in place since.
    """
    if handle.external is not None:
        return handle.external.unpack()
    if handle.version_counter is not None:
        check_version(handle.version_counter, handle.version)
    if handle.has_history:
        check_history(handle.original())
    if type(handle.original) is Original and handle.original.is_replaced:
        # the other memory is gone with it
        raise RecomputeError(REPLACED)
    with handle.segment.recording.lock:
        if handle.tensor is None and not handle.is_written:
            if torch.is_grad_enabled() and top_saved_tensors_hooks(False) is None:
                warn_of_graph()
            _check_modes(handle.segment.recording)
            around = thread.replaying
            try:
                # the kernels ran outside of a vmap that is around the backward
                without_modes(replay_for, handle)
            finally:
                # once more, where an interrupt has cut it short
                thread.replaying = around
                if not around and thread.segment is None:
                    release_draws()
        if handle.is_written:
            raise RecomputeError(WRITTEN)
        tensor = handle.tensor
        assert tensor is not None, "a replay makes the tensor of every living handle"
        if tensor._version != handle.replayed_version:
            check_version(tensor, handle.replayed_version)
        if current_backward() == -1:
            clear(handle.segment)
        elif is_graph_kept():
            handle.tensor = None
        return tensor


def _check_modes(recording: Recording) -> None:
    """Raises RecomputeError if a mode is there now that would make other tensors of a replay."""
    before, now = recording.tracer_modes, tracer_modes()
    new = [m for m, earlier in zip(now, before, strict=True) if m not in (None, earlier)]
    if new:
        raise RecomputeError(
            f"the backward runs in a {type(new[0]).__name__}, whose tensors have no numbers, and "
            "the forward of this segment ran outside of it. Run both inside of the mode, or both "
            "outside"
        )


@functools.cache
def warn_of_graph() -> None:
    """Warns once that a backward makes a graph, which keeps what the backward reads."""
    _log.warning(
        "this backward makes a graph (create_graph=True), which keeps all that the backward reads: "
        "what is recomputed stays in memory until that graph is freed, so that checkpointing saves "
        "little, and a memory budget, which counts no such graph, may be exceeded. Leave "
        "create_graph out where no gradient of gradients is needed"
    )


class Request:
    """The saved tensors that a replay makes: all that wait, or those of some autograd operations.

    A backward inside of the forward asks for those of its own operations. The others wait for a
    later backward: to make them in each would take quadratic time.
    """

    def __init__(self, handle: Handle | None, operations: range | None) -> None:
        self.handle, self.operations = handle, operations

    def waiting(self, segment: Segment) -> list[Handle]:
        """Returns the handles of a segment that ask for their tensors."""
        if self.operations is not None:
            segment.handles = [ref for ref in segment.handles if ref() is not None]
        handles = waiting_in(segment)
        if self.operations is None:
            return handles
        asks = (h is self.handle or h.sequence - 1 in self.operations for h in handles)
        return [*itertools.compress(handles, asks)]

    def inputs_of(self, segment: Segment) -> set[Value]:
        """Returns the values that an inner segment's replay takes from the segment around it."""
        parts = (part for part in segment.inner() if part.inputs is None)
        goals = goals_of(self.waiting(segment)).union(*map(self.inputs_of, parts))
        inputs = {value for value in goals if not segment.makes(value)}
        there = AvailableValues(segment.recording.storages, {})
        for kernel in kernels_in(schedule(segment.backwards(goals), goals, there)):
            inputs.update(value for value in kernel.reads() if value.made_at < segment.first)
        return inputs

    def has_inputs(self, segment: Segment) -> bool:
        """Returns whether a segment has its inputs, unwritten, from a replay of the one around it.

        A backward may write a saved tensor, which is the same memory; and the replay for another
        backward inside of the forward left other inputs.
        """
        inputs = segment.inputs
        if inputs is None or any(tensor._version != version for tensor, version in inputs.values()):
            return False
        return self.operations is None or self.inputs_of(segment) <= inputs.keys()


EVERYTHING = Request(None, None)


def request_of(handle: Handle) -> Request:
    """Returns the request of the backward that opens a handle, to its segment and those around."""
    if not handle.segment.recording.storages.is_open:
        return EVERYTHING
    backward, node = current_backward(), current_node()
    if backward == -1:
        return Request(handle, range(0))
    if node is None:
        return EVERYTHING
    last, first = thread.inside
    if last != backward or handle.sequence <= first:
        first = first_operation(node)
        thread.inside = backward, first
    return Request(handle, range(first, node._sequence_nr() + 1))


def first_operation(node: Node) -> int:
    """Returns the number of the earliest operation that the running backward reaches."""
    first, seen, waiting = node._sequence_nr(), {node}, [node]
    while waiting:
        node = waiting.pop()
        nexts = [n for n, _ in node.next_functions if n is not None and _is_run(n)]
        # nodes before the tensors whose gradients are asked for do not run
        if nexts:
            first = min(first, node._sequence_nr())
        waiting += (n for n in nexts if n not in seen)
        seen.update(nexts)
    return first


def _is_run(node: Node) -> bool:
    try:
        return will_run(node)
    except RuntimeError:
        # asked about a leaf that `autograd.grad` is asked for, which saves nothing
        return True


class AvailableValues(Container[Value]):
    """Values that need not be replayed: a segment's inputs, and those that the forward still holds.

    Attributes:
        reused: the latter that a schedule asked for, with their tensors.
    """

    def __init__(self, storages: Storages, inputs: Mapping[Value, object]) -> None:
        self.storages = storages if storages.is_open else None
        self.inputs = inputs
        self.reused: dict[Value, Tensor] = {}

    def __contains__(self, value: object) -> bool:
        if value in self.inputs or value in self.reused:
            return True
        if self.storages is None or not isinstance(value, Value):
            return False
        tensor = self.storages.still_there(value)
        if tensor is not None:
            self.reused[value] = tensor
        return tensor is not None


def waiting_in(segment: Segment) -> list[Handle]:
    """Returns a segment's own handles that have no replayed tensor yet."""
    return [handle for handle in segment.living() if handle.tensor is None]


def goals_of(handles: Iterable[Handle]) -> set[Value]:
    """Returns the values of handles."""
    return {handle.value for handle in handles}


def replay_for(handle: Handle) -> None:
    """Replays a handle's segment, after those around it whose results it needs."""
    request = request_of(handle)
    waiting = [handle.segment]
    while (around := waiting[-1].parent) is not None and not request.has_inputs(waiting[-1]):
        waiting[-1].inputs = None
        waiting.append(around)
    for part in reversed(waiting):
        _replay_segment(part, request)
    backward = current_backward()
    if backward != -1:
        if thread.backward != backward:
            thread.backward, thread.opened = backward, []
            queue_callback(functools.partial(_end_backward, backward, thread.opened))
        thread.opened.append(weakref.ref(waiting[-1]))


def _replay_segment(segment: Segment, request: Request) -> None:
    if segment.offloading is not None:
        offloading, number = segment.offloading
        offloading.before_backward(number)
    inputs = segment.inputs or {}
    waiting = request.waiting(segment)
    needs = {part: request.inputs_of(part) for part in segment.inner() if part.inputs is None}
    if segment.scheduled_for == len(waiting):
        _replay_kernels(segment, segment.scheduled, waiting, needs, {})
        return
    goals = goals_of(waiting).union(*needs.values())
    there = AvailableValues(segment.recording.storages, inputs)
    scheduled = schedule(segment.backwards(goals), goals, there)
    try:
        _replay_kernels(segment, scheduled, waiting, needs, there.reused)
    except RecomputeError:
        if not there.reused:
            raise
        # code that torch does not see may have written a reused tensor
        _replay_kernels(
            segment, schedule(segment.backwards(goals), goals, inputs), waiting, needs, {}
        )


def _replay_kernels(
    segment: Segment,
    scheduled: list[Scheduled],
    waiting: list[Handle],
    needs: dict[Segment, set[Value]],
    reused: dict[Value, Tensor],
) -> None:
    """Replays kernels and hands the results to handles and inner segments."""
    inputs, storages = segment.inputs or {}, segment.recording.storages
    for value, (tensor, _) in inputs.items():
        value.take(tensor)
    for value, tensor in reused.items():
        value.take(tensor)
    sharded, around = freed_modules(external_tensors(scheduled)), thread.replaying
    try:
        for module in sharded:
            module.unshard()
        # a forward around this backward neither records nor counts what follows
        thread.replaying = True
        replay(scheduled)
        comparisons = [*filter(None, [handle.take_replayed() for handle in waiting])]
        if comparisons and CHECKS:
            CHECKS[-1].compare(comparisons)
        for part, values in needs.items():
            tensors = [(value, value.replayed) for value in values]
            part.inputs = {
                value: (tensor, tensor._version) for value, tensor in tensors if tensor is not None
            }
        if storages.is_open:
            storages.begin_replay()
            for handle in waiting:
                assert handle.tensor is not None, "it was replayed"
                storages.note_copy(handle.value, handle.tensor)
        if not is_graph_kept():
            segment.inputs = None
    finally:
        thread.replaying = around
        results = [value for kernel in kernels_in(scheduled) for value in kernel.results]
        for value in (*results, *inputs, *reused):
            value.replayed = None
        for module in sharded:
            module.reshard()


def clear(segment: Segment) -> None:
    """Drops replayed tensors that no backward took."""
    for handle in segment.living():
        handle.tensor = None
    for part in segment.inner():
        part.inputs = None
        clear(part)


def _end_backward(backward: int, segments: list[weakref.ref[Segment]]) -> None:
    """Drops tensors replayed for a backward that did not take them."""
    for reference in segments:
        if (segment := reference()) is not None:
            with segment.recording.lock:
                clear(segment)
    if CHECKS:
        CHECKS[-1].end_backward(backward)


def prune(segment: Segment) -> None:
    """Ends a forward: drops the kernels that no handle needs, with the tensors that they read."""
    # a forward may switch segments inside of a vmap around a backward of its own
    without_modes(_prune, segment)


def _prune(segment: Segment) -> None:
    segment.recording.storages.look_at_detached()
    handles = segment.all_handles()
    for handle in handles:
        handle.look_for_writes()
    goals = goals_of(handles)
    scheduled = schedule(segment.backwards(goals), goals, ())
    segment.recording.close([*kernels_in(scheduled)])
    if segment.recording.storages.is_replayed:
        # for a backward that asked for less than all, and may not have ended
        clear(segment)
    segment.scheduled, segment.scheduled_for = scheduled, len(handles)
