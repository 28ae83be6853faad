"""Records the kernels of a forward, so that the backward can replay them: rematerialization.

`torch.utils.checkpoint` recomputes a segment by running its Python again, which must then find
everything as it was. Here the user's Python runs once. A dispatch mode below autograd writes down
each kernel, and each tensor that autograd saves becomes a handle, a note of how to make it:

    kernel        a node of the recording: the operator, its arguments, what it made and wrote
    storage       a value for each of its versions; a write makes the next one
    tensor        a reference: a value and a geometry (sizes, strides, offset, dtype)
    view          no node: another geometry

A value that no node of this recording made comes from outside (a parameter, an input, what foreign
code wrote, a result of another process) and is held by reference, with the version that it had; a
copy is taken before a kernel writes over what a replay may read. So what cannot be known costs
memory and never changes a number.
"""

import bisect
import ctypes
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Parameter

from zoo._torch import (
    DisableTorchDispatch,
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    pytree,
)
from zoo.engine.devices import (
    PACKED_SIZE,
    Draws,
    Kept,
    LastDraw,
    PackedState,
    draws_of,
    indexed,
    is_same_state,
)
from zoo.engine.dispatch_keys import kernel_of, with_present_keys
from zoo.engine.kernel_settings import DENORMAL, ONE, Settings, read_settings
from zoo.engine.operands import (
    REFERENCES,
    Apart,
    Blank,
    Listed,
    Outside,
    Reference,
    ReplayedCopy,
    Sparse,
    Value,
    View,
    Write,
    alive,
    bytes_of,
    counted,
    detach_here,
    detached,
    fill,
    filled_empty,
    has_own_storage,
    is_plain,
    memory_of,
    new_mark,
    no_tensor,
    parts_of,
    parts_of_wrapper,
    read_storage,
    sample,
    version_of,
)
from zoo.engine.operator_effects import (
    KNOWN,
    STATISTICS,
    TRAINING,
    Effects,
    effects_of,
    notice_python_kernels,
)

# bytes of a tensor without history that is copied when it is read: a program may change it between
# forward and backward, where the baseline does not mind
SMALL = 1 << 14
SEQUENCES = {list, tuple}
# arguments without tensors, which most are
ATOMS = {int, float, bool, type(None), str, torch.dtype, torch.layout}
# sparse layouts whose products on the CPU read them as they are
BY_ROWS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr}


class Thread(threading.local):
    """What is under way on this thread."""

    segment: Optional["Segment"] = None
    recorder: Optional["Recorder"] = None  # the mode that records, of one segment after the other
    conductor: Any = None  # what opens and closes segments between kernels, while it does
    replaying = False
    paused: tuple[Any, ...] = ()  # zoo's hooks for saved tensors, while a program disables all
    # says where in the program the code is that runs now, where somebody wants to know
    observer: Callable[[], Any] | None = None
    origin: Any = None  # where the kernel that is replayed now was called
    # the backward that opened segments here last, and which they are
    backward = -1
    opened: list[weakref.ref["Segment"]]
    # the backward inside of a forward that was last here, and the first operation that it runs
    inside = (-1, 0)


thread = Thread()


# the outermost segments that somebody may still open
SEGMENTS: set[weakref.ref["Segment"]] = set()
_drop_segment = SEGMENTS.discard


class Node:
    """One recorded kernel: how to call it, what it made and wrote."""

    # in slots and all set, since a default of a class takes long to read
    __slots__ = (
        "args", "draws", "follows", "index", "is_kept", "kernel", "kwargs", "origin", "outs",
        "reads", "results", "settings", "writes",
    )  # fmt: skip

    def __init__(self, kernel: Any, index: int, settings: Settings, args: Sequence[Any]) -> None:
        self.kernel, self.index, self.settings = kernel, index, settings
        self.args = list(args)
        self.kwargs: dict[str, Any] | None = None
        self.reads: list[Value] = []
        # for each result; None for one that is no new storage
        self.outs: Sequence[Value | None] = ()
        self.writes: Sequence[Write] = ()
        self.results: Sequence[Value] = ()  # all that it made or wrote
        self.draws: Kept | tuple[()] = ()
        self.follows: Sequence[Node] = ()  # kernels that leave random streams as it found them
        self.is_kept = False  # it cannot be replayed, so that its results come from outside
        self.origin: Any = None  # where it was called, where somebody wants to know


class Segment:
    """A range of nodes whose results are not kept: a whole recording, or a range inside of one.

    A segment holds what encloses it, a recording its nodes, and nodes their values; nothing holds
    the other way round, so that all is freed without the garbage collector.
    """

    def __init__(self, parent: Optional["Segment"]) -> None:
        self.parent = parent
        self.recording: Recording = Recording() if parent is None else parent.recording
        self.first = self.recording.count
        self.end: int | None = None
        self.drawn = 0  # bytes that kernels drew on the CPU
        self.handles: list[weakref.ref[Any]] = []  # in the order of their operations
        self._inner: Sequence[weakref.ref[Segment]] = ()
        # what a replay for all that was saved would run, and for how many handles that is; those of
        # segments inside count, so that it is never taken for what this one alone needs
        self.scheduled: list[Any] = []
        self.scheduled_for = -1
        # what the replay of the enclosing segment has made for this one, and the versions of that
        self.given: dict[Value, tuple[Tensor, int]] | None = None
        if parent is None:
            SEGMENTS.add(weakref.ref(self, _drop_segment))
        else:
            parent._inner = (*parent._inner, weakref.ref(self))

    def count_draw(self, written: list[Tensor]) -> bool:
        """Counts the bytes that a kernel draws; returns whether all take fewer than a state."""
        if len(written) != 1 or not written[0].is_cpu:
            return False
        self.drawn += written[0].nbytes
        return self.drawn <= PACKED_SIZE

    def living(self) -> list[Any]:
        """Returns the handles of this segment itself that somebody may still open."""
        return [
            handle
            for reference in self.handles
            if (handle := reference()) is not None
            and handle.kept is None
            and not handle.is_written
            and handle.segment is self
        ]

    def inner(self) -> list["Segment"]:
        """Returns the segments directly inside of this one that somebody may still ask for."""
        return alive(self._inner)

    def all_handles(self) -> list[Any]:
        """Returns the handles of this segment and of those inside."""
        found = self.living()
        for part in self.inner():
            found += part.all_handles()
        return found

    def makes(self, value: Value) -> bool:
        """Says whether a node of this segment, or of one inside, made a value."""
        return self.first <= value.node and (self.end is None or value.node < self.end)

    def backwards(self) -> Iterator[Node]:
        """Yields the nodes of this segment and of those inside, the last one first."""
        nodes = self.recording.nodes
        place = len(nodes)
        if self.end is not None and place and nodes[-1].index >= self.end:
            place = bisect.bisect_left(nodes, self.end, key=lambda node: node.index)
        while place and nodes[place - 1].index >= self.first:
            place -= 1
            yield nodes[place]


class Recording:
    """The kernels of an outermost segment, and while it is open the storages that it met."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.count = 0
        self.is_open = True
        self.is_replayed = False  # whether that was while it was open
        self.settings: Settings | None = None
        # what each storage is now: a value, or one from outside and the latest tensor of it
        self.storages: dict[int, Value | Outside] = {}
        # tensors from outside, and by their ids those that are as they were read
        self.outside: list[Outside] = []
        self.known: dict[int, Outside] = {}
        # values of tensors that autograd saved, by the ids of these
        self.saved: dict[int, Value] = {}
        # by the ids of random streams
        self.last_draws: dict[int, LastDraw] = {}
        self.observer = thread.observer
        self.lock = threading.RLock()

    def settings_for(self, effects: Effects) -> Settings:
        """Returns what is set now, the same object while nothing changes that a kernel heeds."""
        known, heeded = self.settings, effects.heeded
        if (
            known is not None
            and torch.get_default_dtype() is known[0]
            and torch.get_num_threads() == known[1]
            and (DENORMAL * ONE == 0) is known[2]
            and (heeded is None or heeded.are_in(known))
        ):
            return known
        now = read_settings()
        if known is None or now != known:
            self.settings = known = now
        return known

    def find(self, storage: Any) -> Value | Outside | None:
        """Returns what a storage is now; None for one that no kernel met."""
        found = self.storages.get(id(storage))
        # another storage may have come to lie where one was freed
        return found if found is not None and found.home() is storage else None

    def made(self, tensor: Tensor) -> Value | None:
        """Returns the value of a tensor whose storage a recorded kernel made."""
        value = self.find(storage_of(tensor))
        return value if isinstance(value, Value) else None

    def still_there(self, value: Value) -> Tensor | None:
        """Returns a tensor that has a value still; None where none is known or it was written.

        What would be recorded as a read of the value may be read in its place.
        """
        home = value.home()
        if home is None or self.storages.get(id(home)) is not value:
            return None
        if not _is_untouched(value, home):
            return None
        base, shared = value.base(), value.shared
        if base is not None and storage_of(base) is home and self._has_version(value, base):
            return detached(base)
        if shared is None:
            return None
        for tensor in alive(shared.references):
            is_here = storage_of(tensor) is home and type(tensor) is not FakeTensor
            if is_here and self._has_version(value, tensor):
                with DisableTorchDispatch():
                    return shared.geometry.on(detached(tensor))
        return None

    def begin_replay(self) -> None:
        """Called at a replay inside of the forward, whose graphs are gone before that ends."""
        if not self.is_replayed:
            self.is_replayed = True
            for found in self.outside:
                found.cut(detached)

    def note_copy(self, value: Value, tensor: Tensor) -> None:
        """Marks what a replay has made of a value: reads of it count as reads of the value."""
        storage = storage_of(tensor)
        if self.find(storage) is None:
            self.storages[id(storage)] = ReplayedCopy(value, storage, tensor)

    def note_detach(self, tensor: Tensor) -> None:
        """Notes where a value lies in memory that another tensor is about to share."""
        if (value := self.made(tensor)) is not None:
            value.share(None)
            if value.blank is None and tensor.is_cpu and type(tensor) is not FakeTensor:
                # which gives it to NumPy and DLPack
                value.blank = sample(storage_of(tensor)) or None

    def refer(self, tensor: Tensor) -> Reference | Outside:
        """Returns the reference of a tensor as it is now."""
        try:
            storage, version = tensor.untyped_storage(), tensor._version
        except (NotImplementedError, RuntimeError):
            # none has a version that was made in inference mode
            return self._refer_outside(tensor, None, None)
        found = self.storages.get(id(storage))
        # another storage may have come to lie where one was freed
        if found is None or found.home() is not storage:
            found = None
        elif isinstance(found, Value):
            # mostly nothing was written unseen, and no tensor of the storage has a version apart
            if (
                found.counter == version
                and found.apart is None
                and not found.is_empty
                and (found.blank is None or (found.blank and found.blank == read_storage(storage)))
            ):
                if found.trains is tensor.requires_grad and found.base() is tensor:
                    return found
                if id(tensor) not in self.saved and (made := _reference(found, tensor)) is not None:
                    return made
            return self._refer_value(tensor, storage, found)
        elif (
            (found.tensor is tensor or found.is_of(tensor))
            and found.version == version
            and id(tensor) not in self.saved
            and (found.sample is None or found.is_as_read())
        ):
            return found
        if id(tensor) in self.saved:
            self.look_for_replaced(tensor, None)
        return self._refer_outside(tensor, storage, found)

    def _refer_value(self, tensor: Tensor, storage: Any, value: Value) -> Reference | Outside:
        if self._has_version(value, tensor) and _is_untouched(value, storage):
            if id(tensor) in self.saved:
                self.look_for_replaced(tensor, value)
            found = _reference(value, tensor)
            return self._refer_outside(tensor, None, None) if found is None else found
        # written by code that no mode sees, so known only as it is now
        if value.handles() and self._has_version(value, tensor):
            # autograd, which saved it, has what was written
            self.lose(tensor)
        return self._refer_outside(tensor, storage, None)

    def target(self, tensor: Tensor, effects: Effects) -> Value | None:
        """Returns the value that a kernel is about to write; None for what is known only as it is.

        Code that no mode sees may have written into memory that is made to be written. Where that
        cannot be looked at, a kernel that reads memory without content says so.
        """
        value, storage = self.made(tensor), storage_of(tensor)
        if value is None:
            return None
        for handle in value.handles():
            handle.before_write()
        if value.readers:
            hold_readers(value.readers, storage, tensor)
        if value.blank:
            is_known = value.blank == sample(storage)
        else:
            is_known = value.blank is None or not value.is_empty or effects.overwrites
        is_known &= type(value) is not ReplayedCopy
        if is_known and self._has_version(value, tensor):
            return value
        self.lose(tensor)
        return None

    def lose(self, tensor: Tensor) -> None:
        """Has a storage count as coming from outside; what is saved of it is kept."""
        value = self.made(tensor)
        if value is not None:
            self.forget(tensor)
        while value is not None:
            hold_readers(value.readers, storage_of(tensor), tensor)
            for handle in value.handles():
                handle.lose(storage_of(tensor))
            value = None if value.before is None else value.before()

    def reshape(self, value: Value, tensor: Tensor) -> None:
        """Is told that a tensor is about to get another geometry, which leaves what is in memory.

        Autograd counts a version after the kernel, as for one that writes.
        """
        for handle in value.handles():
            handle.before_write()
        if self._has_version(value, tensor):
            _holder(value, tensor).counter = None
        value.base = no_tensor

    def _has_version(self, value: Value, tensor: Tensor) -> bool:
        """Says whether a tensor has the version with which recorded kernels left its storage."""
        holder, counter = _holder(value, tensor), version_of(tensor)
        if holder.counter is None:
            holder.counter = counter
        if holder.counter == counter:
            return True
        whole = value.base()
        if counter or holder is not value or whole is None or version_of(whole) != value.counter:
            return False
        # by `Tensor.data` or `detach`, which nobody has written since
        value.set_apart(tensor, counter)
        return True

    def written(self, before: Value, tensor: Tensor, node: int) -> Value:
        """Returns the next version of a storage, of which a kernel wrote a tensor."""
        storage, holder = storage_of(tensor), _holder(before, tensor)
        value = Value(node, storage, tensor, None if holder is before else before.counter)
        if holder is not before:
            holder.counter = None
        is_part = tensor.nbytes < storage.nbytes()
        if before.blank and (is_part or not (before.is_empty or tensor.requires_grad)):
            # the rest may yet be written by code that nobody sees, or all that has no gradient
            value.blank = sample(storage)
        value.before, value.apart = weakref.ref(before), before.apart
        before.after = self.storages[id(storage)] = value
        return value

    def _refer_outside(self, tensor: Tensor, storage: Any, latest: Any) -> Outside:
        home = None if storage is None else weakref.ref(storage)
        found = self.known.get(id(tensor))
        if (
            found is not None
            and found.is_of(tensor)
            # `Tensor.data` may have given it another storage
            and found.home is home
            and found.version == version_of(tensor)
            and not found.is_copied
            and found.is_as_read()
        ):
            return found
        parts: list[Tensor] = []
        if home is None:
            if tensor.is_inference():
                # autograd never saves it and no node reads it
                return Outside(tensor)
            # a fake one has no numbers that could change
            parts = [] if isinstance(tensor, FakeTensor) else parts_of(tensor)
        found = (
            Sparse(tensor, [*map(self._refer_part, parts)])
            if parts
            else Outside(tensor, home, latest)
        )
        self.known[id(tensor)] = found
        self.outside.append(found)
        if self.is_replayed:
            found.cut(detached)
        if home is not None:
            self.storages[id(storage)] = found
        return found

    def _refer_part(self, tensor: Tensor) -> Outside:
        """Returns what stands for a part of a sparse tensor, whose storage may be another's."""
        storage = tensor.untyped_storage()
        latest = self.find(storage)
        found = Outside(
            tensor, weakref.ref(storage), latest if isinstance(latest, Outside) else None
        )
        found.is_read = True
        self.outside.append(found)
        if isinstance(latest, Value):
            latest.readers = [*latest.readers, found]
        else:
            self.storages[id(storage)] = found
        return found

    def look_for_replaced(self, tensor: Tensor, value: Value | None) -> None:
        """Keeps what autograd saved of a tensor that `Tensor.data` has given other memory since.

        Of an operation's argument autograd has the tensor itself, and in its backward the numbers
        that are there then; of its result the memory.
        """
        saved = known = self.saved.get(id(tensor))
        while known is not None and known is not value:
            known = known.after
        if saved is None or known is not None:
            return
        for reference in saved.saved:
            handle = reference()
            if handle is not None and handle.original() is tensor and not handle.is_result:
                handle.keep()

    def before_read(self, found: Outside) -> None:
        """Copies a tensor from outside that a kernel reads for the first time, if it is small."""
        found.is_read = True
        tensor = found.tensor
        # what is computed with a weight has a gradient, and is compared when it is replayed
        if type(tensor) is not Parameter or not (tensor.requires_grad and torch.is_grad_enabled()):
            found.sample = bytes_of(tensor)
        if not tensor.requires_grad and is_small(tensor):
            # one copy for all tensors of a storage, as long as nobody writes it
            of_version = (
                other
                for other in earlier_of(found)
                if other.version == found.version and other.is_as_read()
            )
            copy = next((other.copy for other in of_version if other.copy is not None), None)
            found.hold(_copied(tensor.untyped_storage(), tensor) if copy is None else copy)
        elif found.home is not None and type(tensor) is not FakeTensor:
            found.memory = memory_of(tensor)

    def before_write(self, tensor: Tensor) -> None:
        """Copies a storage from outside that is about to be written, if it was read before.

        One that a recorded kernel made comes from outside from then on.
        """
        storage = storage_of(tensor)
        if storage is None:
            for part in parts_of(tensor):
                self.before_write(part)
            return
        latest = self.find(storage)
        if isinstance(latest, Value):
            self.lose(tensor)
        if type(latest) is not Outside:
            return
        # mostly there is one, and no kernel read it
        if latest.is_read or latest.earlier is not None:
            hold_readers(earlier_of(latest), storage, tensor)
        for reader in earlier_of(latest):
            tensor_of = reader.tensor if reader.original is None else reader.original()
            self.known.pop(id(tensor_of), None)
        self.forget(tensor)

    def forget(self, tensor: Tensor) -> None:
        """Has a storage count as coming from outside from now on."""
        self.storages.pop(id(storage_of(tensor)), None)

    def hold(self, found: Outside) -> None:
        """Holds the very tensor while the recording is open: it may get other memory yet."""
        if self.is_open:
            self.outside.append(found)
        else:
            found.cut(detached)

    def close(self, nodes: list[Node]) -> None:
        """Ends the recording and keeps these nodes of it."""
        self.nodes, self.is_open = nodes, False
        detach = detach_here()
        for found in self.outside:
            found.earlier = None
            found.cut(detach)
        # so that fewer objects wait for the backward
        for node in nodes:
            for value in node.results:
                value.base, value.saved = no_tensor, ()
                if value.home() is None:
                    value.home = no_tensor
        del self.outside, self.storages, self.known, self.saved, self.last_draws


def _is_untouched(value: Value, storage: Any) -> bool:
    """Says whether memory that is made to be written has what recorded kernels left there."""
    if value.is_empty:
        return False
    return value.blank is None or (value.blank != b"" and value.blank == sample(storage))


def _reference(value: Value, tensor: Tensor) -> Reference | None:
    if value.base() is tensor:
        trains = tensor.requires_grad
        if value.trains is None:
            value.trains = trains
        if value.trains is trains:
            return value
    if not is_plain(tensor):
        return None
    if value.shared is not None or (value.trains is None and value.base() is None):
        value.share(tensor)
    view = View(tensor)
    view.value, view.trains = value.value, tensor.requires_grad
    return view


def _holder(value: Value, tensor: Tensor) -> Value | Apart:
    """Returns what holds the version of a tensor in the storage of a value."""
    if value.apart is not None:
        for one in (tensor, tensor._base):
            apart = value.apart.get(id(one))
            if apart is not None and apart.tensor() is one:
                return apart
    return value


def earlier_of(found: Outside | None) -> Iterator[Outside]:
    """Yields what stands for tensors of one storage from outside, the latest first."""
    while found is not None:
        yield found
        found = found.earlier


def hold_readers(readers: Iterable[Outside], storage: Any, tensor: Tensor) -> None:
    """Has those that a kernel read have a copy of their storage, which is about to be written."""
    copy = None
    for reader in readers:
        reader.look_for_other_memory()
        if reader.copy is storage:
            reader.copy = copy = _copied(storage, tensor) if copy is None else copy
        # one that code which no mode sees wrote since is not as it was read
        is_still_there = reader.version == version_of(reader.tensor) and reader.is_as_read()
        # `Tensor.data` may have given it other memory
        is_still_there &= storage_of(reader.tensor) is storage
        if reader.is_read and reader.copy is None and is_still_there and is_plain(reader.tensor):
            copy = _copied(storage, tensor) if copy is None else copy
            reader.hold(copy)


def is_small(tensor: Tensor) -> bool:
    """Says whether a storage is worth a copy, to be safe from a program that changes it."""
    if _is_parameter(tensor) or _is_parameter(tensor._base):
        return False
    return is_plain(tensor) and bool(tensor.untyped_storage().nbytes() <= SMALL)


def _is_parameter(tensor: Tensor | None) -> bool:
    # asked for this class, `isinstance` runs Python
    return tensor is not None and type(tensor) is not Tensor and isinstance(tensor, Parameter)


def _copied(storage: Any, tensor: Tensor) -> Any:
    if isinstance(tensor, FakeTensor):
        # it has no numbers that could change
        return storage
    if not tensor.is_cpu:
        with DisableTorchDispatch():
            return storage.clone()
    # a third of the time of `clone`, which goes through tensors
    copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    ctypes.memmove(copy.data_ptr(), storage.data_ptr(), storage.nbytes())
    return copy


def storage_of(tensor: Tensor) -> Any:
    """Returns the storage of a tensor; None for one that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


class KernelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each kernel, and higher-order operators too.

    Where a kind of it says so, a compiled block inside stays compiled: it is one operator then.
    """

    supports_higher_order_operators = True
    keeps_compiled = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Says to torch whether compiled blocks stay compiled."""
        return cls.keeps_compiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Has torch not import its compiler to keep it away from here, where it is off anyway."""
        return False


class Recorder(KernelMode):
    """Records the kernels of an outermost segment, and runs others as they are."""

    # what a compiled block saves is kept
    keeps_compiled = True

    def __init__(self, recording: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __enter__(self) -> Any:
        notice_python_kernels()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a kernel and records it."""
        if types and not all(map(has_own_storage, types)):
            # its own dispatch takes it apart, and the parts come here again
            self.note_wrappers(args, kwargs)
            return NotImplemented
        effects = KNOWN.get(id(func)) or effects_of(func)
        if kwargs is None:
            kwargs = {}
        recording = self.recording
        if effects.ignored:
            if effects.detaches and recording is not None:
                recording.note_detach(args[0])
            return func._op(*args, **kwargs)
        if thread.replaying:
            return with_present_keys(func, args, kwargs)(*args, **kwargs)
        if recording is not None and not effects.simple:
            return self._run(func, effects, args, kwargs)
        # not the operator, which is a Python function that calls this
        kernel = kernel_of(func, effects, args, kwargs)
        if recording is None:
            # between the segments of a plan
            written = [*written_by(effects, args, kwargs), *statistics_of(effects, args).values()]
            return self._run_outside(kernel, effects, written, args, kwargs)
        node = Node(kernel, recording.count, recording.settings_for(effects), args)
        self._encode(node, kwargs)
        out = node.kernel(*args, **kwargs)
        if not node.is_kept:
            self._append(node, effects, out)
        return out

    def note_wrappers(self, args: Any, kwargs: Any) -> None:
        """Has parts of wrappers from outside refused where the wrapper was written since."""
        if self.recording is None or thread.replaying:
            return
        for wrapper in filter(is_traceable_wrapper_subclass, pytree.tree_leaves((args, kwargs))):
            for part in parts_of_wrapper(wrapper):
                found = self.recording.refer(part)
                if isinstance(found, Outside):
                    found.wrapper = counted(wrapper)

    def before_write(self, tensor: Tensor) -> None:
        """Is told that a kernel is about to write a tensor from outside."""
        self.recording.before_write(tensor)

    def _run(self, func: Any, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what does more than to make its results."""
        if effects.reshapes:
            # another geometry, or another storage, which counts as a version
            if (value := self.recording.made(args[0])) is not None:
                self.recording.reshape(value, args[0])
            else:
                self.before_write(args[0])
            if func._schema.name == "aten::resize_":
                self.recording.forget(args[0])
            return func(*args, **kwargs)
        if effects.empty:
            return self._run_empty(func, effects, args, kwargs)
        recording = self.recording
        kernel = kernel_of(func, effects, args, kwargs)
        written = written_by(effects, args, kwargs)
        keeps, segment = effects.keeps_results(args, kwargs), thread.segment
        if segment is not None and effects.seeded and not (keeps or effects.makes):
            keeps = segment.count_draw(written)
        draws = draws_of(args, kwargs) if effects.seeded and not keeps else None
        if keeps or (effects.seeded and draws is None):
            return self._run_outside(kernel, effects, written, args, kwargs)
        values = [recording.target(tensor, effects) for tensor in written]
        # all that it writes comes from outside and is there
        is_there = bool(written) and not effects.makes and not any(values)
        # or it may read what it wrote, of which each argument has a copy in a replay
        if is_there or (None in values and _is_given_twice(written, values, args, kwargs)):
            return self._run_outside(kernel, effects, written, args, kwargs)
        targets = [*zip(written, values, strict=True)]
        node = Node(kernel, recording.count, recording.settings_for(effects), args)
        given = kwargs
        if written:
            given = self._put_writes(node, effects, targets, kwargs)
        elif statistics := statistics_of(effects, args):
            self._leave_out_statistics(node, statistics)
        self._encode(node, given)
        if node.is_kept:
            return self._run_outside(kernel, effects, written, args, kwargs)
        outside = [tensor for tensor, value in targets if value is None]
        out = self._run_outside(kernel, effects, outside, args, kwargs)
        if draws:
            self._note_draws(node, draws)
        self._append(node, effects, out)
        return out

    def _note_draws(self, node: Node, draws: Draws) -> None:
        """Notes the states that a kernel found, but for those that one before it left."""
        segment, last_draws = thread.segment, self.recording.last_draws
        node.draws, node.follows = found, follows = [], []
        for stream, state in draws:
            after = stream.get_state()
            if is_same_state(after, state):
                continue
            last = last_draws.get(id(stream))
            if (
                last is not None
                and segment is not None
                and last.node.index >= segment.first
                and is_same_state(last.state, state)
            ):
                follows.append(last.node)
            else:
                found.append((stream, PackedState(state, stream.device)))
            last_draws[id(stream)] = LastDraw(stream, node, after)

    def _run_outside(
        self, kernel: Any, effects: Effects, outside: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Runs a kernel that writes tensors which come from outside, at least from now on."""
        for tensor in outside:
            self.before_write(tensor)
        out = kernel(*args, **kwargs)
        if effects.lists:
            # below a mode a kernel of lists does not count the versions that it makes
            torch.autograd.graph.increment_version(written_by(effects, args, kwargs))
        return out

    def _run_empty(self, func: Any, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what makes memory without content: its replay reads nothing, not even a model."""
        out = func._op(*args, **kwargs)
        # a norm on the CPU reserves no bytes, which to record would cost more than to keep
        if out.layout is torch.strided and (out.dtype is not torch.uint8 or out.numel()):
            mark = new_mark()
            fill(out.untyped_storage(), mark)
            settings = self.recording.settings_for(effects)
            layout = out.size(), out.stride(), mark
            node = Node(filled_empty, self.recording.count, settings, layout)
            node.kwargs = {"dtype": out.dtype, "device": out.device}
            self._append(node, effects, out)
        return out

    def _leave_out_statistics(self, node: Node, statistics: dict[int, Tensor]) -> None:
        """Has the replay of a norm update no running statistics, which it does not read.

        Statistics of another data type choose another kernel, which gets scratch memory for them.
        """
        for place, tensor in statistics.items():
            self.before_write(tensor)
            is_alike = tensor.dtype is node.args[0].dtype
            node.args[place] = None if is_alike else Blank(tensor)

    def _encode(self, node: Node, kwargs: Any) -> None:
        """Puts references in the place of tensors among the arguments of a kernel."""
        args = node.args
        for place, value in enumerate(args):
            if type(value) not in ATOMS:
                args[place] = self._encoded(value, node)
        if kwargs:
            node.kwargs = {name: self._encoded(value, node) for name, value in kwargs.items()}

    def _encoded(self, value: Any, node: Node) -> Any:
        if isinstance(value, Tensor):
            found = self.recording.refer(value)
            if type(found) is Value:
                node.reads.append(found)
            elif type(found) is View:
                node.reads.append(found.value)
            else:
                if type(found) is Sparse and not (value.is_cpu and value.layout in BY_ROWS):
                    # products with it add by atomics, or convert it and count that as a write
                    node.is_kept = True
                if not found.is_read and value.is_inference():
                    # it may be written later, and nothing would tell
                    node.is_kept = True
                elif not found.is_read:
                    self.recording.before_read(found)
                elif found.sample is None and not torch.is_grad_enabled():
                    # the first time it was with a gradient
                    found.sample = bytes_of(found.tensor)
            return found
        if type(value) is torch.device:
            # another device may be the current one in a replay
            return indexed(value)
        if type(value) in SEQUENCES and not ATOMS.issuperset(map(type, value)):
            parts = [self._encoded(part, node) for part in value]
            return Listed(parts) if any(type(part) in REFERENCES for part in parts) else value
        return value

    def _put_writes(
        self,
        node: Node,
        effects: Effects,
        targets: list[tuple[Tensor, Value | None]],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Puts a Write in the place of each target; returns the keyword arguments with them."""
        writes = {id(tensor): self._target(node, tensor, value) for tensor, value in targets}
        node.writes = list(writes.values())
        kwargs = {**kwargs}
        for position, name in effects.writes:
            is_positional = position < len(node.args)
            holder: Any = node.args if is_positional else kwargs
            key: Any = position if is_positional else name
            given = node.args[position] if is_positional else kwargs.get(name)
            if isinstance(given, Tensor):
                holder[key] = writes[id(given)]
            elif given is not None:
                holder[key] = [writes.get(id(part), part) for part in given]
        return kwargs

    def _target(self, node: Node, tensor: Tensor, value: Value | None) -> Write:
        reference = None if value is None else _reference(value, tensor)
        if value is None or reference is None:
            return Write(self._encoded(tensor, node), tensor)
        node.reads.append(value)
        return Write(reference, tensor)

    def _append(self, node: Node, effects: Effects, out: Any) -> None:
        """Notes what a kernel made and wrote, and the kernel where that is anything."""
        recording = self.recording
        if effects.makes:
            trains = torch.is_grad_enabled() and _trains(node.args)
            if isinstance(out, Tensor):
                value = self._note_result(out, node, effects, trains)
                node.outs = node.results = () if value is None else (value,)
            else:
                parts = flat(out)
                node.outs = outs = [self._note_result(one, node, effects, trains) for one in parts]
                node.results = [value for value in outs if value is not None]
        for write in node.writes:
            tensor, write.scratch = write.scratch, None
            if not isinstance(write.target, Outside) and tensor is not None:
                write.after = recording.written(write.target.value, tensor, node.index)
                node.results = [*node.results, write.after]
        if node.results or node.writes:
            if recording.observer is not None:
                node.origin = recording.observer()
            recording.nodes.append(node)
            recording.count += 1

    def _note_result(self, tensor: Any, node: Node, effects: Effects, trains: bool) -> Value | None:
        """Returns the value of a result; None for one that no replay makes, or no new storage.

        `trains` says whether a gradient may flow through the kernel.
        """
        try:
            storage, version = tensor.untyped_storage(), tensor._version
        except (AttributeError, NotImplementedError, RuntimeError):
            return None
        storages = self.recording.storages
        found = storages.get(id(storage))
        if found is not None and found.home() is storage:
            if isinstance(found, Value):
                found.set_apart(tensor, version)
            return None
        value = Value(node.index, storage, tensor, version)
        storages[id(storage)] = value
        if effects.blank and storage.nbytes() > 0:
            value.is_empty = effects.empty
            if not isinstance(tensor, FakeTensor):
                value.blank = sample(storage)
        elif (
            tensor.is_cpu
            and type(tensor) is not FakeTensor
            and not tensor._is_zerotensor()
            and not (trains and (tensor.is_floating_point() or tensor.is_complex()))
        ):
            # NumPy and DLPack give it away as it is
            value.blank = read_storage(storage) or None
        return value


def _trains(given: Iterable[Any]) -> bool:
    """Returns whether one of the arguments of a kernel requires a gradient."""
    for value in given:
        kind = type(value)
        if kind is Value or kind is View:
            trains = value.trains
        elif kind is Outside:
            trains = value.tensor.requires_grad
        else:
            trains = kind is Write or kind is Sparse
            trains = trains or (kind is Listed and _trains(value.parts))
        if trains:
            return True
    return False


def flat(out: Any) -> Sequence[Any]:
    """Returns the results of a kernel, of which some may be lists, in one sequence."""
    if type(out) not in SEQUENCES:
        return (out,)
    is_flat = SEQUENCES.isdisjoint(map(type, out))
    return (*out,) if is_flat else [part for parts in out for part in flat(parts)]


def written_by(effects: Effects, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that a kernel writes, as far as that is known."""
    if effects.foreign:
        leaves = pytree.tree_leaves((args, kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found: list[Tensor] = []
    rate = effects.dropping
    if rate is not None and not all(args[rate : rate + 2]):
        return found
    for position, name in effects.writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _is_given_twice(
    written: list[Tensor], values: Sequence[Value | None], args: Any, kwargs: Any
) -> bool:
    """Says whether memory from outside that a kernel writes is also that of another argument."""
    leaves = pytree.tree_leaves((args, kwargs))
    storages = Counter(id(storage_of(leaf)) for leaf in leaves if isinstance(leaf, Tensor))
    outside = (tensor for tensor, value in zip(written, values, strict=True) if value is None)
    return any(storages[id(storage_of(tensor))] > 1 for tensor in outside)


def statistics_of(effects: Effects, args: Any) -> dict[int, Tensor]:
    """Returns by their places the running statistics that a norm updates, in training alone."""
    if not (effects.norm and args[TRAINING]):
        return {}
    return {place: args[place] for place in STATISTICS if args[place] is not None}
