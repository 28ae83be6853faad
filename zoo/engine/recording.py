"""Records the kernels of a forward, so that the backward can replay them: rematerialization.

`torch.utils.checkpoint` recomputes a segment by running its Python again, which must then find
everything as it was. Here the user's Python runs once. A dispatch mode below autograd writes down
each kernel, and each tensor that autograd saves becomes a handle, a note of how to make it:

    kernel        node: the operator, its arguments, what it made and wrote
    storage       a value for each of its versions; a write makes the next one
    tensor        a reference: a value and a geometry (sizes, strides, offset, dtype)
    view          no node: another geometry

A value that no node of this recording made comes from outside (a parameter, an input, what foreign
code wrote, a result of another process) and is held by reference, with the version that it had; a
copy is taken before a kernel writes over what a replay may read. So what cannot be known costs
memory and never changes a number.
"""

import bisect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from zoo.engine.fingerprint import constant_of, is_still
from zoo.engine.generators import Draws, draws_of
from zoo.engine.modes import KernelMode
from zoo.engine.operators import (
    KNOWN,
    STATISTICS,
    TRAINING,
    Effects,
    Settings,
    effects_of,
    read_settings,
)
from zoo.errors import RecomputeError

# bytes of a tensor without history that is copied when it is read: a program may change it between
# forward and backward, where plain training does not mind
SMALL = 1 << 14
# a tuple, not a union, which Python would make anew for each argument of each kernel
SEQUENCES = (list, tuple)
# arguments without tensors, which most are
ATOMS = {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout}
NONE: list[Any] = []
NOTHING: dict[str, Any] = {}
# tensors whose storage is their own; any other kind is taken apart by its own dispatch
PLAIN = {Tensor, Parameter, FakeTensor}


class Thread(threading.local):
    """What is under way on this thread."""

    segment: Optional["Segment"] = None
    # what opens and closes segments between kernels, while it does
    conductor: Any = None
    replaying = False
    # says where in the program the code is that runs now, where somebody wants to know
    observer: Callable[[], Any] | None = None
    # where the kernel that is replayed now was called
    origin: Any = None
    # the backward that opened segments here last, and which they are
    backward = -1
    opened: list[weakref.ref["Segment"]]


thread = Thread()


class Geometry:
    """Where in its storage a tensor lies."""

    __slots__ = ("conjugate", "dtype", "negative", "offset", "sizes", "strides")

    def __init__(self, tensor: Tensor) -> None:
        self.sizes, self.strides = tensor.size(), tensor.stride()
        self.offset, self.dtype = tensor.storage_offset(), tensor.dtype
        self.negative = tensor.is_neg()
        self.conjugate = self.dtype.is_complex and tensor.is_conj()

    def on(self, base: Tensor) -> Tensor:
        """Returns the tensor of this geometry on the storage of another."""
        if base.dtype is self.dtype and not (self.negative or self.dtype.is_complex):
            return base.as_strided(self.sizes, self.strides, self.offset)
        return self.of_storage(base.untyped_storage(), base.device)

    def of_storage(self, storage: Any, device: torch.device) -> Tensor:
        """Returns the tensor of this geometry on a storage."""
        found = torch.empty(0, dtype=self.dtype, device=device)
        found.set_(storage, self.offset, self.sizes, self.strides)
        if self.conjugate:
            found = torch._conj(found)
        return torch._neg_view(found) if self.negative else found


class Value:
    """One version of a storage that a recorded kernel made.

    It refers to the tensor that the kernel left, too: `base`, while that lives; `made` is it again,
    in a replay. Some kernels do more for a tensor that `trains`, one that requires a gradient.
    """

    __slots__ = ("after", "base", "blank", "counter", "made", "node", "saved", "trains")

    def __init__(self, node: int, base: Tensor, counter: int | None) -> None:
        self.node = node
        self.base: weakref.ref[Tensor] | None = weakref.ref(base)
        self.counter = counter
        # the number that fills it until something else is written
        self.blank: bytes | None = None
        self.after: Value | None = None
        # what autograd saved of it, to be told when it is written
        self.saved: list[weakref.ref[Any]] | None = None
        self.trains: bool | None = None
        self.made: Tensor | None = None

    @property
    def value(self) -> "Value":
        """The value that this refers to."""
        return self

    def now(self) -> Tensor:
        """Returns the tensor in a replay that has made it."""
        found = self.made
        assert found is not None, "a replay makes what a node reads before the node"
        if found.requires_grad is not self.trains:
            found.requires_grad_(bool(self.trains))
        return found


class View:
    """A tensor of a recorded value that lies elsewhere in its storage."""

    __slots__ = ("geometry", "trains", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value = value
        self.geometry = Geometry(tensor)
        self.trains = tensor.requires_grad

    def make_room(self) -> None:
        """Gives the storage in a replay the size that a kernel gave it in the forward."""
        made, lies = self.value.made, self.geometry
        assert made is not None, "a replay makes what a node writes before the node"
        steps = zip(lies.sizes, lies.strides, strict=True)
        last = lies.offset + sum((size - 1) * stride for size, stride in steps)
        needed = (last + 1) * lies.dtype.itemsize
        if made.untyped_storage().nbytes() < needed:
            made.untyped_storage().resize_(int(needed))

    def now(self) -> Tensor:
        """Returns the tensor in a replay that has made its value."""
        made = self.value.made
        assert made is not None, "a replay makes what a node reads before the node"
        found = self.geometry.on(made)
        return found.requires_grad_() if self.trains else found


class Outside:
    """A tensor from outside as it is, with the check that plain training makes, too."""

    __slots__ = ("copy", "earlier", "geometry", "home", "is_read", "tensor", "version")

    def __init__(
        self, tensor: Tensor, home: Any = None, earlier: Optional["Outside"] = None
    ) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        # its storage, and while the recording is open another tensor of that
        self.home, self.earlier = home, earlier
        # whether a kernel has read it
        self.is_read = False
        # its storage before a kernel wrote it, and where it lay there
        self.copy: Any = None
        self.geometry: Geometry | None = None

    def hold(self, copy: Any) -> None:
        """Has a replay read a copy of the storage."""
        self.copy, self.geometry = copy, Geometry(self.tensor)

    def copy_of_another(self) -> Any:
        """Returns the copy that a replay reads for another tensor of the storage."""
        found = self.earlier
        while found is not None and found.copy is None:
            found = found.earlier
        return None if found is None else found.copy

    def cut(self) -> None:
        """Lets go of the tensor's graph."""
        if not self.tensor.is_leaf:
            self.tensor = detached(self.tensor).requires_grad_(self.tensor.requires_grad)

    def unpack(self) -> Tensor:
        """Returns the tensor, which autograd saved.

        Raises:
            RecomputeError: it was changed in place since.
        """
        check_version(self.tensor, self.version)
        return self.tensor

    def now(self) -> Tensor:
        """Returns the tensor as the forward read it.

        Raises:
            RecomputeError: it was changed in place since.
        """
        if self.geometry is not None and not isinstance(self.tensor, FakeTensor):
            with torch._C._DisableTorchDispatch():
                return self.geometry.of_storage(self.copy, self.tensor.device)
        return self.unpack()


class Blank:
    """Memory that a kernel writes and nobody reads."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tensor.size(), tensor.dtype, tensor.device

    def now(self) -> Tensor:
        """Returns such memory."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


class Listed:
    """An argument that is a list with references in it."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def now(self) -> list[Any]:
        """Returns the list in a replay that has made what it refers to."""
        return [part.now() if type(part) in REFERENCES else part for part in self.parts]


# what stands for a tensor that a recorded kernel made, and for any tensor
Reference = Value | View
AnyReference = Reference | Outside


# what a thread's dispatch is outside of all modes
_KEYS = torch._C.DispatchKey
_INCLUDED = torch._C.DispatchKeySet(_KEYS.BackendSelect) | torch._C.DispatchKeySet(
    _KEYS.ADInplaceOrView
)
_EXCLUDED = torch._C.DispatchKeySet(_KEYS.AutocastCPU)


def detached(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph that shares its version, wherever this is called.

    Below autograd, where dispatch modes are, `Tensor.detach` gives the result a version of its own.
    """
    with (
        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
        torch._C._DisableTorchDispatch(),
    ):
        found = tensor.detach()
    if isinstance(tensor, FakeTensor):
        return FakeTensor(tensor.fake_mode, found, tensor.fake_device)
    return found


def version_of(tensor: Tensor) -> int:
    """Returns the version of a tensor, 0 where there is none."""
    try:
        return tensor._version
    except RuntimeError:
        # a tensor made in inference mode has none
        return 0


def check_version(tensor: Tensor, version: int) -> None:
    """Refuses a tensor that was changed in place since it had this version.

    Raises:
        RecomputeError: it was.
    """
    now = version_of(tensor)
    # a fake tensor has no numbers, and FSDP2 gives its parameters other versions
    if now != version and type(tensor) is not FakeTensor:
        raise RecomputeError(
            f"a tensor {tuple(tensor.shape)} that this gradient needs was changed in place after "
            f"it was used (version {version}, now {now}). Change it after the backward, or change "
            "a copy."
        )


class Node:
    """One recorded kernel: how to call it, what it made (`outs`) and wrote (`writes`)."""

    __slots__ = ("args", "draws", "index", "kwargs", "operator", "origin", "outs", "reads",
                 "results", "settings", "writes")  # fmt: skip

    def __init__(self, operator: Any, index: int, settings: Settings, draws: Draws | None) -> None:
        self.operator = operator
        self.index = index
        self.settings = settings
        self.draws = draws
        self.reads: list[Value] = []
        self.args: list[Any] = NONE
        self.kwargs: dict[str, Any] | None = None
        # a value for each result, None for one that is no new storage; and all values, written too
        self.outs: list[Value | None] = NONE
        self.results: list[Value] = NONE
        self.writes: list[Write] | None = None
        # where it was called, where somebody wants to know
        self.origin: Any = None


class Write:
    """An argument that a kernel writes, and its next version; None for one from outside."""

    __slots__ = ("after", "scratch", "target")

    def __init__(self, target: AnyReference, tensor: Tensor) -> None:
        self.target = target
        self.after: Value | None = None
        # the tensor while the kernel runs, in a replay what the kernel writes in its place
        self.scratch: Tensor | None = tensor

    def now(self) -> Tensor | None:
        """Returns what a replay has the kernel write."""
        return self.scratch


NO_TARGETS: dict[int, Write] = {}
# what has a tensor, or a list of them, for a replay
REFERENCES = {Value, View, Outside, Blank, Listed, Write}


class Segment:
    """A range of nodes whose results are not kept: a whole recording, or a range inside of one.

    A segment holds what encloses it, a recording its nodes, and nodes their values; nothing holds
    the other way round, so that all is freed without the garbage collector.
    """

    __slots__ = ("__weakref__", "end", "first", "given", "handles", "inner", "parent", "recording",
                 "scheduled")  # fmt: skip

    def __init__(self, parent: Optional["Segment"]) -> None:
        self.parent = parent
        self.recording: Recording = Recording() if parent is None else parent.recording
        self.first = self.recording.count
        self.end: int | None = None
        self.handles: list[weakref.ref[Any]] = []
        self.inner: list[weakref.ref[Segment]] = []
        # what a replay for all that was saved would run, and for how many handles that is
        self.scheduled: tuple[int, list[Any]] | None = None
        # what the replay of the enclosing segment has made for this one
        self.given: dict[Value, Tensor] | None = None
        if parent is not None:
            parent.inner.append(weakref.ref(self))

    def makes(self, value: Value) -> bool:
        """Says whether a node of this segment, or of one inside, made a value."""
        return self.first <= value.node and (self.end is None or value.node < self.end)

    def backwards(self) -> Iterator[Node]:
        """Yields the nodes of this segment and of those inside, the last one first."""
        nodes = self.recording.nodes
        place = len(nodes)
        if self.end is not None:
            place = bisect.bisect_left(nodes, self.end, key=lambda node: node.index)
        while place and nodes[place - 1].index >= self.first:
            place -= 1
            yield nodes[place]

    def close(self) -> None:
        """Ends the range."""
        self.end = self.recording.count


class Recording:
    """The kernels of an outermost segment, and while it is open the storages that it met."""

    __slots__ = ("count", "known", "lock", "nodes", "observer", "outside", "replaying", "saved",
                 "settings", "storages")  # fmt: skip

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.count = 0
        self.settings = read_settings()
        # what each storage is now: a value, or one from outside and the latest tensor of it, if any
        self.storages: dict[int, tuple[weakref.ref[Any], Value | Outside | None]] = {}
        # tensors from outside, and by their ids those that are as they were read
        self.outside: list[Outside] = []
        self.known: dict[int, Outside] = {}
        # values of tensors that autograd saved, by the ids of these
        self.saved: dict[int, Value] = {}
        # whether the backward runs inside of the forward, and replays
        self.replaying = False
        self.observer = thread.observer
        self.lock = threading.RLock()

    def settings_for(self, effects: Effects) -> Settings:
        """Returns what is set now, the same object while nothing changes that a kernel heeds."""
        known = self.settings
        if (
            effects.chosen
            or torch.get_default_dtype() is not known[0]
            or torch.get_num_threads() != known[1]
        ):
            now = read_settings()
            if now != known:
                self.settings = now
        return self.settings

    def find(self, storage: Any) -> Value | Outside | None:
        """Returns what a storage is now; None for one that no kernel met."""
        found = self.storages.get(id(storage))
        # another storage may have come to lie where one was freed
        return found[1] if found is not None and found[0]() is storage else None

    def made(self, tensor: Tensor) -> Value | None:
        """Returns the value of a tensor whose storage a recorded kernel made."""
        value = self.find(storage_of(tensor))
        return value if type(value) is Value else None

    def read(self, tensor: Tensor) -> AnyReference:
        """Returns the reference of a tensor that a kernel is about to read."""
        found = self.refer(tensor)
        if type(found) is Outside and not found.is_read:
            found.is_read = True
            if tensor.is_leaf and not tensor.requires_grad and is_small(tensor):
                known = found.copy_of_another()
                found.hold(_copied(tensor.untyped_storage(), tensor) if known is None else known)
        return found

    def refer(self, tensor: Tensor) -> AnyReference:
        """Returns the reference of a tensor as it is now."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return self._refer_outside(tensor, None, None)
        known = self.storages.get(id(storage))
        value = known[1] if known is not None and known[0]() is storage else None
        if type(value) is Value:
            counter = tensor._version
            if value.counter is None:
                value.counter = counter
            if value.counter == counter and (value.blank is None or is_still(tensor, value.blank)):
                base = value.base
                if base is not None and base() is tensor and value.trains is tensor.requires_grad:
                    return value
                self._look_for_replaced(tensor, value)
                found = _reference(value, tensor)
                return self._refer_outside(tensor, None, None) if found is None else found
            # written by code that no mode sees, so known only as it is now
            value = None
        else:
            self._look_for_replaced(tensor, None)
        return self._refer_outside(tensor, storage, value)

    def look_for_replaced(self, tensor: Tensor) -> None:
        """Keeps what autograd saved of a tensor that has other memory at the end of a forward."""
        value = self.find(storage_of(tensor))
        self._look_for_replaced(tensor, value if type(value) is Value else None)

    def _look_for_replaced(self, tensor: Tensor, value: Value | None) -> None:
        """Keeps what autograd saved of a tensor that `Tensor.data` has given other memory since.

        Of an operation's argument autograd has the tensor itself, and in its backward the numbers
        that are there then; of its result the memory.
        """
        saved = self.saved.get(id(tensor))
        known = saved
        while known is not None and known is not value:
            known = known.after
        if saved is None or known is not None:
            return
        for reference in saved.saved or ():
            handle = reference()
            if handle is not None and handle.original() is tensor and not handle.is_result:
                handle.keep()

    def _refer_outside(self, tensor: Tensor, storage: Any, latest: Any) -> Outside:
        home = None if storage is None else weakref.ref(storage)
        found = self.known.get(id(tensor))
        # `Tensor.data` may have given it another storage
        if found is not None and found.home is home and found.version == version_of(tensor):
            return found
        found = self.known[id(tensor)] = Outside(tensor, home, latest)
        self.outside.append(found)
        if home is not None:
            self.storages[id(storage)] = home, found
        return found

    def before_write(self, tensor: Tensor) -> None:
        """Copies a storage from outside that is about to be written, if it was read before."""
        storage = storage_of(tensor)
        latest = self.find(storage)
        if type(latest) is not Outside:
            return
        copy, reader = None, cast(Outside | None, latest)
        while reader is not None:
            if reader.is_read and reader.copy is None and is_plain(reader.tensor):
                copy = _copied(storage, tensor) if copy is None else copy
                reader.hold(copy)
            self.known.pop(id(reader.tensor), None)
            reader = reader.earlier
        self.storages[id(storage)] = weakref.ref(storage), None

    def forget(self, tensor: Tensor) -> None:
        """Has a storage count as coming from outside from now on."""
        self.storages.pop(id(storage_of(tensor)), None)

    def close(self, nodes: list[Node]) -> None:
        """Ends the recording and keeps these nodes of it."""
        self.nodes = nodes
        self.storages.clear()
        for found in self.outside:
            found.earlier = None
            if not found.tensor.is_leaf:
                found.cut()
        self.outside.clear()
        self.known.clear()
        self.saved.clear()


def _reference(value: Value, tensor: Tensor) -> Reference | None:
    base = value.base
    if base is not None and base() is tensor:
        trains = tensor.requires_grad
        if value.trains is trains:
            return value
        if value.trains is None:
            value.trains = trains
            return value
    return View(value, tensor) if is_plain(tensor) else None


def is_small(tensor: Tensor) -> bool:
    """Says whether a storage is worth a copy, to be safe from a program that changes it."""
    if isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter):
        return False
    return is_plain(tensor) and bool(tensor.untyped_storage().nbytes() <= SMALL)


def _copied(storage: Any, tensor: Tensor) -> Any:
    if isinstance(tensor, FakeTensor):
        # it has no numbers that could change
        return storage
    with torch._C._DisableTorchDispatch():
        return storage.clone()


def storage_of(tensor: Tensor) -> Any:
    """Returns the storage of a tensor; None for one that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def has_own_storage(kind: type) -> bool:
    """Says whether tensors of a class are no wrappers, which their own dispatch takes apart."""
    if kind in PLAIN:
        return True
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:  # type: ignore[attr-defined]
        return False
    PLAIN.add(kind)  # type: ignore[arg-type]
    return True


def is_plain(tensor: Tensor) -> bool:
    """Says whether a tensor is sizes, strides and an offset in its storage, and nothing more."""
    return (
        has_own_storage(type(tensor))
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_inference())
        and not tensor._is_zerotensor()
    )


class Recorder(KernelMode):
    """Writes down the kernels of an outermost segment."""

    # what a compiled block saves is kept
    keeps_compiled = True

    def __init__(self, recording: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a kernel and records it."""
        if types and not all(map(has_own_storage, types)):
            # its own dispatch takes it apart, and the parts come here again
            return NotImplemented
        effects = KNOWN.get(func) or effects_of(func)
        recording = self.recording
        if kwargs is None:
            kwargs = NOTHING
        if effects.ignored or recording.replaying:
            return func(*args, **kwargs)
        if not effects.simple:
            return self._run(func, effects, args, kwargs)
        node = Node(func, recording.count, recording.settings_for(effects), None)
        self._encode(node, args, kwargs)
        out = func(*args, **kwargs)
        self._note_results(out, node, effects)
        return out

    def _run(self, func: Any, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what does more than to make its results."""
        if effects.opaque:
            return self._run_opaque(func, effects, args, kwargs)
        if effects.reshapes:
            return self._run_reshape(func, args, kwargs)
        if effects.empty:
            return self._run_empty(func, effects, args, kwargs)
        draws = draws_of(args, kwargs) if effects.seeded else None
        if effects.seeded and draws is None:
            return self._run_opaque(func, effects, args, kwargs)
        recording = self.recording
        written = written_by(effects, args, kwargs)
        if written and not effects.makes and not any(map(recording.made, written)):
            # all that it writes comes from outside and is there
            return self._run_outside(func, effects, written, args, kwargs)
        node = Node(func, recording.count, recording.settings_for(effects), draws)
        is_norm = effects.norm and args[TRAINING]
        given = self._without_statistics(args) if is_norm else args
        self._encode(node, given, kwargs, self._targets(written, node))
        for tensor in written:
            recording.before_write(tensor)
        out = func(*args, **kwargs)
        self._note_results(out, node, effects)
        if effects.lists:
            # kernels of lists count no version below a mode
            torch.autograd.graph.increment_version(written)
        return out

    def _without_statistics(self, args: Any) -> Any:
        """Returns the arguments of a norm that updates running statistics and reads none.

        Statistics of another data type choose another kernel, which gets scratch memory for them.
        """
        scratch: list[Any] = []
        for tensor in args[STATISTICS]:
            if tensor is not None:
                self.recording.before_write(tensor)
            is_alike = tensor is None or tensor.dtype is args[0].dtype
            scratch.append(None if is_alike else Blank(tensor))
        return (*args[:3], *scratch, *args[TRAINING:])

    def _run_outside(
        self, func: Any, effects: Effects, written: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        for tensor in written:
            self.recording.before_write(tensor)
        out = func(*args, **kwargs)
        if effects.lists:
            torch.autograd.graph.increment_version(written)
        return out

    def _run_opaque(self, func: Any, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what is no kernel of torch's: what it writes comes from outside from now on."""
        written = written_by(effects, args, kwargs)
        out = self._run_outside(func, effects, written, args, kwargs)
        for tensor in written:
            self.recording.forget(tensor)
        return out

    def _run_reshape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs what changes the geometry of a tensor in place, or gives it another storage."""
        value = self.recording.made(args[0])
        if value is not None:
            value.base = None
        if func._schema.name == "aten::resize_":
            self.recording.forget(args[0])
        return func(*args, **kwargs)

    def _run_empty(self, func: Any, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what makes memory without content: its replay reads nothing, not even a model."""
        out = func(*args, **kwargs)
        if out.layout is torch.strided:
            recording = self.recording
            empty = torch.ops.aten.empty_strided.default
            node = Node(empty, recording.count, recording.settings, None)
            node.args = [out.size(), out.stride()]
            node.kwargs = {"dtype": out.dtype, "device": out.device}
            self._note_results(out, node, effects)
        return out

    def _encode(
        self, node: Node, args: Any, kwargs: Any, targets: dict[int, Write] = NO_TARGETS
    ) -> None:
        """Notes the arguments of a kernel, with references in the place of tensors."""
        read, reads = self.recording.read, node.reads
        node.args = encoded = list(args)
        for place, value in enumerate(args):
            if type(value) in ATOMS:
                continue
            if targets or not isinstance(value, Tensor):
                encoded[place] = self._encoded(value, node, targets)
                continue
            encoded[place] = found = read(value)
            if type(found) is Value:
                reads.append(found)
            elif type(found) is View:
                reads.append(found.value)
        if kwargs:
            node.kwargs = {
                name: self._encoded(value, node, targets) for name, value in kwargs.items()
            }

    def _encoded(self, value: Any, node: Node, targets: dict[int, Write]) -> Any:
        if isinstance(value, Tensor):
            # a target that is given a second time is only read there
            if targets and (target := targets.pop(id(value), None)) is not None:
                return target
            found = self.recording.read(value)
            if type(found) is Value:
                node.reads.append(found)
            elif type(found) is View:
                node.reads.append(found.value)
            return found
        if isinstance(value, SEQUENCES):
            parts = [self._encoded(part, node, targets) for part in value]
            return Listed(parts) if any(type(part) in REFERENCES for part in parts) else value
        return value

    def _targets(self, written: list[Tensor], node: Node) -> dict[int, Write]:
        """Notes what a kernel is about to write."""
        if not written:
            return NO_TARGETS
        targets = {id(tensor): self._target(tensor, node) for tensor in written}
        node.writes = list(targets.values())
        return targets

    def _target(self, tensor: Tensor, node: Node) -> Write:
        made = self.recording.made(tensor)
        found = None if made is None else _reference(made, tensor)
        if found is None:
            return Write(self.recording.read(tensor), tensor)
        assert made is not None
        node.reads.append(made)
        for saved in made.saved or ():
            if (handle := saved()) is not None:
                handle.before_write()
        return Write(found, tensor)

    def _note_results(self, out: Any, node: Node, effects: Effects) -> None:
        recording = self.recording
        if effects.makes:
            if isinstance(out, Tensor):
                node.outs = outs = [self._note_result(out, node, effects)]
            else:
                node.outs = outs = [self._note_result(part, node, effects) for part in flat(out)]
            node.results = cast(list[Value], outs) if all(outs) else list(filter(None, outs))
        if node.writes:
            self._note_writes(node)
        elif not node.results:
            return
        if recording.observer is not None:
            node.origin = recording.observer()
        recording.nodes.append(node)
        recording.count += 1

    def _note_result(self, tensor: Any, node: Node, effects: Effects) -> Value | None:
        """Returns the value of a result; None for one that is no tensor or no new storage."""
        storage = storage_of(tensor) if isinstance(tensor, Tensor) else None
        if storage is None:
            return None
        storages = self.recording.storages
        known = storages.get(id(storage))
        if known is not None and known[0]() is storage:
            return None
        value = Value(node.index, tensor, tensor._version)
        if effects.blank and storage.nbytes() > 0:
            value.blank = b"" if effects.empty else constant_of(tensor)
        storages[id(storage)] = weakref.ref(storage), value
        return value

    def _note_writes(self, node: Node) -> None:
        """Notes the next version of each storage that the kernel wrote and a recorded one made."""
        for write in node.writes or ():
            tensor, write.scratch = write.scratch, None
            if isinstance(write.target, Outside) or tensor is None:
                continue
            value = write.after = Value(node.index, tensor, None)
            write.target.value.after = value
            storage = storage_of(tensor)
            self.recording.storages[id(storage)] = weakref.ref(storage), value
            node.results = [*node.results, value]


def flat(out: Any) -> list[Any]:
    """Returns the results of a kernel, of which some may be lists, in one list."""
    if not isinstance(out, SEQUENCES):
        return [out]
    found: list[Any] = []
    for part in out:
        if isinstance(part, SEQUENCES):
            found += flat(part)
        else:
            found.append(part)
    return found


def written_by(effects: Effects, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that a kernel writes, as far as that is known."""
    found: list[Tensor] = []
    for position, name in effects.writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
