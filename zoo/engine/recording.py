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

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.engine.fingerprint import constant_of, is_still
from zoo.engine.generators import Draws, draws_of
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
# tensors whose storage is their own; any other kind is taken apart by its own dispatch
# a tuple, not a union, which Python would make anew for each argument of each kernel
SEQUENCES = (list, tuple)
NONE: list[Tensor] = []
NOTHING: dict[str, Any] = {}
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

    def now(self) -> Tensor:
        """Returns the tensor in a replay that has made its value."""
        made = self.value.made
        assert made is not None, "a replay makes what a node reads before the node"
        found = self.geometry.on(made)
        return found.requires_grad_() if self.trains else found


class Outside:
    """One version of a storage that comes from outside; `copy` is taken before it is written."""

    __slots__ = ("copy", "read")

    def __init__(self) -> None:
        self.read = False
        self.copy: Any = None


class OutsideReference:
    """A tensor of a value from outside, and the version that it had."""

    __slots__ = ("geometry", "tensor", "value", "version")

    def __init__(self, value: Outside, tensor: Tensor) -> None:
        self.value = value
        self.tensor = tensor
        # as it was, where a kernel may resize it
        self.geometry: Geometry | None = None
        try:
            self.version = tensor._version
        except RuntimeError:
            # a tensor made in inference mode has none
            self.version = 0

    def cut(self) -> None:
        """Lets go of the tensor's graph."""
        if self.tensor.grad_fn is not None:
            self.tensor = detached(self.tensor).requires_grad_(self.tensor.requires_grad)

    def now(self) -> Tensor:
        """Returns the tensor as the forward read it.

        Raises:
            RecomputeError: it was changed in place since.
        """
        if self.value.copy is not None and not isinstance(self.tensor, FakeTensor):
            geometry = self.geometry or Geometry(self.tensor)
            return geometry.of_storage(self.value.copy, self.tensor.device)
        check_version(self.tensor, self.version)
        return self.tensor


# what stands for a tensor that a recorded kernel made, and for any tensor
Reference = Value | View
AnyReference = Reference | OutsideReference


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
    if type(tensor) is FakeTensor:
        return tensor.detach()
    with (
        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
        torch._C._DisableTorchDispatch(),
    ):
        return tensor.detach()


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
    if now != version:
        raise RecomputeError(
            f"a tensor {tuple(tensor.shape)} that this gradient needs was changed in place after "
            f"it was used (version {version}, now {now}). Change it after the backward, or change "
            "a copy."
        )


class Node:
    """One recorded kernel: how to call it, what it made (`outs`) and wrote (`writes`)."""

    __slots__ = ("args", "draws", "index", "kwargs", "operator", "origin", "outs", "reads",
                 "settings", "writes")  # fmt: skip

    def __init__(self, operator: Any, index: int, settings: Settings, draws: Draws | None) -> None:
        self.operator = operator
        self.index = index
        self.settings = settings
        self.draws = draws
        self.reads: list[Value] = []
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] | None = None
        self.outs: list[Value | None] = []
        self.writes: list[Write] | None = None
        # where it was called, where somebody wants to know
        self.origin: Any = None


class Write:
    """An argument that a kernel writes, and its next version; None for one from outside."""

    __slots__ = ("after", "scratch", "target")

    def __init__(self, target: AnyReference) -> None:
        self.target = target
        self.after: Value | None = None
        # in a replay what the kernel writes in its place
        self.scratch: Tensor | None = None


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
        self.handles: list[weakref.ref[Any]] = []
        self.inner: list[weakref.ref[Segment]] = []
        # what a replay for all that was saved would run
        self.scheduled: tuple[set[Value], list[Any]] | None = None
        # what the replay of the enclosing segment has made for this one
        self.given: dict[Value, Tensor] | None = None
        if parent is not None:
            parent.inner.append(weakref.ref(self))

    def makes(self, value: Value) -> bool:
        """Says whether a node of this segment, or of one inside, made a value."""
        return self.first <= value.node and (self.end is None or value.node < self.end)

    def backwards(self) -> Iterator[Node]:
        """Yields the nodes of this segment and of those inside, the last one first."""
        for node in reversed(self.recording.nodes):
            if node.index < self.first:
                return
            if self.end is None or node.index < self.end:
                yield node

    def close(self) -> None:
        """Ends the range."""
        self.end = self.recording.count


class Recording:
    """The kernels of an outermost segment, and while it is open the storages that it met."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.count = 0
        self.settings = read_settings()
        self.storages: dict[int, tuple[weakref.ref[Any], Value | Outside]] = {}
        self.outside: list[OutsideReference] = []
        # whether the backward runs inside of the forward, and replays
        self.replaying = False
        self.observer = thread.observer
        self.lock = threading.RLock()

    def read_settings(self) -> Settings:
        """Returns what is set now, the same object while nothing changes."""
        now = read_settings()
        if now != self.settings:
            self.settings = now
        return self.settings

    def find(self, storage: Any) -> Value | Outside | None:
        """Returns the value that a storage has now; None for one that was not met."""
        found = self.storages.get(id(storage))
        # another storage may have come to lie where one was freed
        return found[1] if found is not None and found[0]() is storage else None

    def put(self, storage: Any, value: Value | Outside) -> None:
        """Notes the value that a storage has now."""
        self.storages[id(storage)] = weakref.ref(storage), value

    def made(self, tensor: Tensor) -> Value | None:
        """Returns the value of a tensor whose storage a recorded kernel made."""
        value = self.find(storage_of(tensor))
        return value if type(value) is Value else None

    def read(self, tensor: Tensor) -> AnyReference:
        """Returns the reference of a tensor as it is now."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            storage = None
        found = self.storages.get(id(storage))
        value = found[1] if found is not None and found[0]() is storage else None
        if type(value) is Value:
            counter = tensor._version
            if value.counter is None:
                value.counter = counter
            if value.counter == counter and (value.blank is None or is_still(tensor, value.blank)):
                base = value.base
                if base is not None and base() is tensor and value.trains is tensor.requires_grad:
                    return value
                reference = _reference(value, tensor)
                if reference is not None:
                    return reference
            # written by code that no mode sees, so known only as it is now
            value = None
        return self._read_outside(tensor, storage, value)

    def _read_outside(self, tensor: Tensor, storage: Any, value: Any) -> "OutsideReference":
        if value is None:
            value = Outside()
            if storage is not None and is_plain(tensor):
                self.put(storage, value)
        if not value.read:
            value.read = True
            if tensor.is_leaf and not tensor.requires_grad and is_small(storage, tensor):
                value.copy = _copied(storage, tensor)
        reference = OutsideReference(value, tensor)
        self.outside.append(reference)
        return reference

    def before_write(self, tensor: Tensor) -> None:
        """Copies a storage from outside that is about to be written, if it was read before."""
        storage = storage_of(tensor)
        value = self.find(storage)
        if type(value) is Outside and value.read:
            if value.copy is None:
                value.copy = _copied(storage, tensor)
            self.put(storage, Outside())

    def forget(self, tensor: Tensor) -> None:
        """Has a storage count as coming from outside from now on."""
        self.storages.pop(id(storage_of(tensor)), None)

    def close(self, nodes: list[Node]) -> None:
        """Ends the recording and keeps these nodes of it."""
        self.nodes = nodes
        for found in self.outside:
            found.cut()
        self.outside, self.storages = [], {}


def _reference(value: Value, tensor: Tensor) -> Reference | None:
    base = value.base
    if base is not None and base() is tensor:
        if value.trains is None:
            value.trains = tensor.requires_grad
        if value.trains is tensor.requires_grad:
            return value
    return View(value, tensor) if is_plain(tensor) else None


def is_small(storage: Any, tensor: Tensor) -> bool:
    """Says whether a storage is worth a copy, to be safe from a program that changes it."""
    if storage is None or storage.nbytes() > SMALL or not is_plain(tensor):
        return False
    return not (isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter))


def _copied(storage: Any, tensor: Tensor) -> Any:
    if isinstance(tensor, FakeTensor):
        # of the same size, and there is nothing in it
        return torch.empty_like(tensor).untyped_storage()
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


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the kernels of an outermost segment."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets a compiled block inside of a segment stay compiled; what it saves is kept."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Has torch not import its compiler to keep it away from here, where it is off anyway."""
        return False

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
        settings = recording.settings
        if (
            effects.chosen
            or torch.get_default_dtype() is not settings[0]
            or torch.get_num_threads() != settings[1]
        ):
            settings = recording.read_settings()
        node = Node(func, recording.count, settings, None)
        if effects.empty:
            return self._run_empty(node, effects, args, kwargs)
        self._encode(node, args, kwargs)
        out = func(*args, **kwargs)
        self._note_results(out, node, effects)
        return out

    def _run_empty(self, node: Node, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what makes memory without content: its replay reads nothing, not even a model."""
        out = node.operator(*args, **kwargs)
        node.operator = torch.ops.aten.empty_strided.default
        node.args = [tuple(out.shape), tuple(out.stride())]
        node.kwargs = {"dtype": out.dtype, "device": out.device}
        self._note_results(out, node, effects)
        return out

    def _run(self, func: Any, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what does more than to make its results."""
        if effects.opaque:
            return self._run_opaque(func, effects, args, kwargs)
        if effects.reshapes:
            return self._run_reshape(func, args, kwargs)
        draws = draws_of(args, kwargs) if effects.seeded else None
        if effects.seeded and draws is None:
            return self._run_opaque(func, effects, args, kwargs)
        recording = self.recording
        written = written_by(effects, args, kwargs) if effects.writes else NONE
        if written and not effects.makes and not any(map(recording.made, written)):
            # all that it writes comes from outside and is there
            return self._run_outside(func, written, args, kwargs)
        node = Node(func, recording.count, recording.read_settings(), draws)
        if written:
            self._encode_targets(args, kwargs, written, node)
        elif effects.norm and args[TRAINING]:
            self._encode_norm(args, node)
        else:
            self._encode(node, args, kwargs)
        out = func(*args, **kwargs)
        self._note_results(out, node, effects)
        if written:
            self._note_writes(written, node)
            if effects.lists:
                # kernels of lists count no version below a mode
                torch.autograd.graph.increment_version(written)
        return out

    def _encode_norm(self, args: Any, node: Node) -> None:
        """Encodes a norm that updates running statistics: it writes them and reads none."""
        for tensor in args[STATISTICS]:
            if tensor is not None:
                self.recording.before_write(tensor)
        self._encode(node, (*args[:3], None, None, *args[TRAINING:]), NOTHING)

    def _run_outside(self, func: Any, written: list[Tensor], args: Any, kwargs: Any) -> Any:
        for tensor in written:
            self.recording.before_write(tensor)
        out = func(*args, **kwargs)
        if effects_of(func).lists:
            torch.autograd.graph.increment_version(written)
        return out

    def _run_opaque(self, func: Any, effects: Effects, args: Any, kwargs: Any) -> Any:
        """Runs what is no kernel of torch's: what it writes comes from outside from now on."""
        written = written_by(effects, args, kwargs)
        out = self._run_outside(func, written, args, kwargs)
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

    def _encode(self, node: Node, args: Any, kwargs: Any) -> None:
        """Notes the arguments of a kernel, with references in the place of tensors."""
        read, encoded, reads = self.recording.read, node.args, node.reads
        for value in args:
            if isinstance(value, Tensor):
                found: Any = read(value)
                kind = type(found)
                if kind is Value:
                    reads.append(found)
                elif kind is View:
                    reads.append(found.value)
                encoded.append(found)
            elif isinstance(value, SEQUENCES):
                encoded.append(self._encoded(value, node, {}))
            else:
                encoded.append(value)
        if kwargs:
            node.kwargs = {name: self._encoded(value, node, {}) for name, value in kwargs.items()}

    def _encoded(self, value: Any, node: Node, targets: dict[int, Write]) -> Any:
        if isinstance(value, Tensor):
            # a target that is given a second time is only read there
            if (target := targets.pop(id(value), None)) is not None:
                return target
            found = self.recording.read(value)
            if not isinstance(found, OutsideReference):
                node.reads.append(found.value)
            return found
        if isinstance(value, SEQUENCES):
            return [self._encoded(part, node, targets) for part in value]
        return value

    def _encode_targets(self, args: Any, kwargs: Any, written: list[Tensor], node: Node) -> None:
        """Notes the arguments of a kernel that writes some of them."""
        targets = {id(tensor): self._target(tensor, node) for tensor in written}
        node.writes = list(targets.values())
        node.args = [self._encoded(value, node, targets) for value in args]
        if kwargs:
            node.kwargs = {
                name: self._encoded(value, node, targets) for name, value in kwargs.items()
            }
        for tensor in written:
            self.recording.before_write(tensor)

    def _target(self, tensor: Tensor, node: Node) -> Write:
        made = self.recording.made(tensor)
        found = None if made is None else _reference(made, tensor)
        if found is None:
            target = self.recording.read(tensor)
            if isinstance(target, OutsideReference) and is_plain(tensor):
                target.geometry = Geometry(tensor)
            return Write(target)
        assert made is not None
        node.reads.append(made)
        for saved in made.saved or ():
            if (handle := saved()) is not None:
                handle.before_write()
        return Write(found)

    def _note_results(self, out: Any, node: Node, effects: Effects) -> None:
        recording, new = self.recording, False
        for tensor in (out,) if isinstance(out, Tensor) else flat(out):
            value = None
            if isinstance(tensor, Tensor):
                storage = storage_of(tensor)
                if storage is not None and recording.find(storage) is None:
                    value = Value(node.index, tensor, tensor._version)
                    if effects.blank and storage.nbytes() > 0:
                        value.blank = b"" if effects.empty else constant_of(tensor)
                    recording.storages[id(storage)] = weakref.ref(storage), value
                    new = True
            node.outs.append(value)
        if new or node.writes:
            if recording.observer is not None:
                node.origin = recording.observer()
            recording.nodes.append(node)
            recording.count += 1

    def _note_writes(self, written: list[Tensor], node: Node) -> None:
        """Notes the next version of each storage that the kernel wrote and a recorded one made."""
        assert node.writes is not None
        distinct = {id(tensor): tensor for tensor in written}.values()
        for write, tensor in zip(node.writes, distinct, strict=True):
            if isinstance(write.target, OutsideReference):
                continue
            write.after = Value(node.index, tensor, None)
            write.target.value.after = write.after
            self.recording.put(storage_of(tensor), write.after)


def flat(out: Any) -> list[Any]:
    """Returns the results of a kernel, of which some may be lists, in one list."""
    if not isinstance(out, SEQUENCES):
        return [out]
    return [leaf for part in out for leaf in flat(part)]


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
