"""What autograd saves inside of a segment: handles for what a replay makes, the rest as it is.

The first handle that a backward opens replays its segment, and before it those around it: a segment
inside of a segment starts from values that the replay of the outer one makes (`inputs`). A backward
inside of the forward asks for the saved tensors of its own operations alone.
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
    will_run,
)
from zoo.engine.operands import REPLACED, External, Value, external_of
from zoo.engine.replay import external_tensors, replay, schedule, without_modes
from zoo.engine.replay_check import CHECKS
from zoo.engine.segments import Handle, Scheduled, Segment, thread
from zoo.engine.sharded import freed_modules
from zoo.engine.storages import Storages
from zoo.engine.tensor_state import (
    PLAIN,
    Original,
    check_history,
    check_version,
    counted,
    detached,
    has_own_storage,
    roles_of,
    take_apart,
)
from zoo.errors import RecomputeError

_log = logging.getLogger("zoo")
WRITTEN = (
    "a tensor that this gradient needs was changed in place after it was saved. Change a copy."
)
# what stands for saved external tensors, by the ids of the tensors that `pending_reads` follows
SAVED: dict[int, list[weakref.ref[External]]] = {}


class Opaque:
    """A tensor of a class of its own, taken apart into tensors that are packed one by one."""

    __slots__ = ("counted", "make", "packed")

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], object]) -> None:
        self.counted = counted(tensor)
        parts, self.make = take_apart(tensor)
        # a mesh of devices may be among them; and offsets, which identify the sizes of a tensor
        self.packed = {n: pack(part) if _has_gradient(part) else part for n, part in parts.items()}

    def unpack(self) -> Tensor:
        """Puts the tensor together again; raises as `unpack`."""
        if self.counted is not None:
            check_version(*self.counted)
        parts = self.packed.items()
        made: Tensor = self.make({n: unpack(p) if isinstance(p, Packed) else p for n, p in parts})
        return made


def _has_gradient(part: object) -> TypeGuard[Tensor]:
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


# what stands for a saved tensor
Packed = External | Handle | Opaque | InGraph


def kept(tensor: Tensor) -> External:
    """Returns what stands for a tensor as it is, to be saved outside of all segments."""
    external = external_of(tensor)
    external.detach_graph(detached)
    return external


def pack(tensor: Tensor) -> Packed:
    """Returns what stands for a tensor that autograd saves on this thread."""
    kind = type(tensor)
    if kind is FakeTensor and is_in_graph():
        return InGraph(tensor)
    if kind not in PLAIN and not has_own_storage(kind) and is_wrapper(tensor):
        return Opaque(tensor, pack)
    segment = thread.segment
    reference = kept(tensor) if segment is None else segment.recording.storages.refer(tensor)
    if segment is None or isinstance(reference, External):
        assert isinstance(reference, External), "all that is kept is external"
        has_history, is_result = roles_of(tensor, sequence_number())
        if segment is not None and reference.is_result and not is_result:
            # of the same tensor autograd has the memory as a result, and itself as an argument
            reference = external_of(tensor)
            segment.recording.storages.hold(reference)
        reference.has_history |= has_history
        reference.is_result |= is_result
        if SAVED and (noted := SAVED.get(id(tensor))) is not None:
            noted.append(weakref.ref(reference))
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
    """Raises RecomputeError where a tensor that was packed here is to have hooks of its own."""
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
    return unpack_handle(packed) if type(packed) is Handle else packed.unpack()


def unpack_handle(handle: Handle) -> Tensor:
    """Returns a saved tensor, replayed if it is not there.

    Raises:
        RecomputeError: it, or something that it is made from, was changed in place since.
    """
    if handle.kept is not None:
        return handle.kept.unpack()
    if handle.counter is not None:
        check_version(handle.counter, handle.version)
    if handle.has_history:
        check_history(handle.original())
    if type(handle.original) is Original and handle.original.is_replaced:
        # by numbers that are gone with it
        raise RecomputeError(REPLACED)
    with handle.segment.recording.lock:
        if handle.tensor is None and not handle.is_written:
            if torch.is_grad_enabled() and top_saved_tensors_hooks(False) is None:
                _warn_of_graph()
            around = thread.replaying
            try:
                # the kernels ran outside of a vmap that is around the backward
                without_modes(fill, handle)
            finally:
                # once more, where an interrupt has cut it short
                thread.replaying = around
        if handle.is_written:
            raise RecomputeError(WRITTEN)
        tensor = handle.tensor
        assert tensor is not None, "a replay fills every living handle"
        if tensor._version != handle.filled:
            check_version(tensor, handle.filled)
        if current_backward() == -1:
            clear(handle.segment)
        elif is_graph_kept():
            handle.tensor = None
        return tensor


@functools.cache
def _warn_of_graph() -> None:
    """Says once that a backward makes a graph, which keeps what the backward reads."""
    _log.warning(
        "this backward makes a graph (create_graph=True), which keeps all that the backward reads: "
        "what is recomputed stays in memory until that graph is freed, so that checkpointing saves "
        "little, and a memory budget, which counts no such graph, may be exceeded. Leave "
        "create_graph out where no gradient of gradients is needed"
    )


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

    def inputs_of(self, segment: Segment) -> set[Value]:
        """Returns the values that an inner segment's replay takes from the segment around it."""
        parts = (part for part in segment.inner() if part.inputs is None)
        goals = goals_of(self.waiting(segment)).union(*map(self.inputs_of, parts))
        inputs = {value for value in goals if not segment.makes(value)}
        there = AvailableValues(segment.recording.storages, {})
        for kernel, _ in schedule(segment.backwards(), goals, there):
            inputs.update(value for value in kernel.reads if value.made_at < segment.first)
        return inputs

    def has_inputs(self, segment: Segment) -> bool:
        """Returns whether a segment has what it starts from, as a replay around it left that.

        A backward may write what it saved, which is the same memory; and for another backward
        inside of the forward the replay around it left something else.
        """
        given = segment.inputs
        if given is None or any(tensor._version != made for tensor, made in given.values()):
            return False
        return self.operations is None or self.inputs_of(segment) <= given.keys()


EVERYTHING = Request(None, None)


def request_of(handle: Handle) -> Request:
    """Returns what the backward that opens a handle needs of its segment, and of those around."""
    if not handle.segment.recording.storages.is_open:
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


def first_operation(node: Node) -> int:
    """Returns the number of the earliest operation that the running backward comes to."""
    first, seen, waiting = node._sequence_nr(), {node}, [node]
    while waiting:
        node = waiting.pop()
        nexts = [one for one, _ in node.next_functions if one is not None and _is_run(one)]
        # of what comes before the tensors that gradients are asked for nothing runs
        if nexts:
            first = min(first, node._sequence_nr())
        waiting += (one for one in nexts if one not in seen)
        seen.update(nexts)
    return first


def _is_run(node: Node) -> bool:
    try:
        return will_run(node)
    except RuntimeError:
        # asked about a leaf that `autograd.grad` is asked for, which saves nothing
        return True


class AvailableValues(Container[Value]):
    """The values that need not be replayed: those given, and what the forward still has.

    Attributes:
        found: the latter that a schedule asked for, with their tensors.
    """

    def __init__(self, storages: Storages, given: Mapping[Value, object]) -> None:
        self.storages = storages if storages.is_open else None
        self.given = given
        self.found: dict[Value, Tensor] = {}

    def __contains__(self, value: object) -> bool:
        if value in self.given or value in self.found:
            return True
        if self.storages is None or not isinstance(value, Value):
            return False
        tensor = self.storages.still_there(value)
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
    while (around := waiting[-1].parent) is not None and not request.has_inputs(waiting[-1]):
        waiting[-1].inputs = None
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
    given = segment.inputs or {}
    waiting = request.waiting(segment)
    needs = {part: request.inputs_of(part) for part in segment.inner() if part.inputs is None}
    if segment.scheduled_for == len(waiting):
        _replay(segment, segment.scheduled, waiting, needs, {})
        return
    goals = goals_of(waiting).union(*needs.values())
    there = AvailableValues(segment.recording.storages, given)
    scheduled = schedule(segment.backwards(), goals, there)
    try:
        _replay(segment, scheduled, waiting, needs, there.found)
    except RecomputeError:
        if not there.found:
            raise
        # code that torch does not see may have written what is there
        _replay(segment, schedule(segment.backwards(), goals, given), waiting, needs, {})


def _replay(
    segment: Segment,
    scheduled: list[Scheduled],
    waiting: list[Handle],
    needs: dict[Segment, set[Value]],
    alive: dict[Value, Tensor],
) -> None:
    """Replays kernels, on what is alive, and gives results to handles and inner segments."""
    given, storages = segment.inputs or {}, segment.recording.storages
    for value, (tensor, _) in given.items():
        value.take(tensor)
    for value, tensor in alive.items():
        value.take(tensor)
    sharded, around = freed_modules(external_tensors(scheduled)), thread.replaying
    try:
        for module in sharded:
            module.unshard()
        # a forward around this backward neither records nor counts what follows
        thread.replaying = True
        replay(scheduled)
        compared = [one for handle in waiting if (one := handle.fill()) is not None]
        if compared and CHECKS:
            CHECKS[-1].compare(compared)
        for part, values in needs.items():
            there = [(value, value.replayed) for value in values]
            part.inputs = {
                value: (made, made._version) for value, made in there if made is not None
            }
        if storages.is_open:
            storages.begin_replay()
            for handle in waiting:
                assert handle.tensor is not None, "it is filled"
                storages.note_copy(handle.value, handle.tensor)
        if not _is_graph_kept():
            segment.inputs = None
    finally:
        thread.replaying = around
        made = [value for kernel, _ in scheduled for value in kernel.results]
        for value in (*made, *given, *alive):
            value.replayed = None
        for module in sharded:
            module.reshard()


def _is_graph_kept() -> bool:
    return current_backward() != -1 and is_graph_kept()


def clear(segment: Segment) -> None:
    """Drops what a replay left and no backward took."""
    for handle in segment.living():
        handle.tensor = None
    for part in segment.inner():
        part.inputs = None
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
    """Ends a forward: drops the kernels that no handle needs, and with them what they read."""
    # a forward may turn to another segment inside of a vmap around a backward of its own
    without_modes(_prune, segment)


def _prune(segment: Segment) -> None:
    handles = segment.all_handles()
    for handle in handles:
        handle.look_for_writes()
    scheduled = schedule(segment.backwards(), goals_of(handles), ())
    segment.recording.close([kernel for kernel, _ in scheduled])
    if segment.recording.storages.is_replayed:
        # for a backward that asked for less than all, and may not have ended
        clear(segment)
    segment.scheduled, segment.scheduled_for = scheduled, len(handles)
