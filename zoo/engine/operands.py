"""What stands for a tensor among the arguments of a recorded kernel, and makes it in a replay.

Value      a storage as a recorded kernel left it, in the geometry of the tensor that it made
View       another tensor of a value
Outside    a tensor that no recorded kernel made, held as it is or as a copy
Sparse     one of these that consists of others: indices and values
Write      an argument that the kernel writes
Blank      memory that a kernel writes and nobody reads
Listed     a list with references in it

A tensor that was written after it was saved is noticed by its version. What writes without counting
a version is noticed by a fingerprint, a few bytes spread over the tensor: a replay calls the same
kernels on the same bytes, so it can differ only where code that torch does not see wrote into a
tensor, or where a kernel is not deterministic, and then most of the tensor differs. On the CPU,
where reading memory waits for nothing, each has one; elsewhere `replay_check` has samples.
"""

import contextlib
import ctypes
import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zoo._torch import (
    OFFSET_OF_STORAGE_POINTER,
    DisableTorchDispatch,
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    ForceDispatchKeyGuard,
    conj,
    count_dispatch_modes,
    disabled_torch_dispatch,
    is_key_excluded,
    neg_view,
)
from zoo.engine.replay_check import CHECKS, sample_of
from zoo.errors import RecomputeError

# a fingerprint is bytes from so many places of a tensor, so many at each
PLACES = 4
WIDTH = 16
REPLACED = (
    "a tensor that this gradient needs was given other memory after it was used, by `Tensor.data` "
    "or a conversion of its module, and that memory is not held. Do so after the backward."
)
UNSEEN = (
    "a tensor {} that this gradient needs was changed in place after it was used, through "
    "`Tensor.data` or by code that torch does not see (NumPy, DLPack, C++). Change it after the "
    "backward, or change a copy."
)
# tensors whose storage is their own; any other kind is taken apart by its own dispatch
PLAIN = {Tensor, Parameter, FakeTensor}
# bytes of a tensor that are read at once rather than place by place
AT_ONCE = 1 << 12


def alive(references: Iterable[Callable[[], Any]]) -> list[Any]:
    """Returns what weak references still refer to."""
    return [found for reference in references if (found := reference()) is not None]


def has_own_storage(kind: type) -> bool:
    """Says whether tensors of a class are no wrappers, which their own dispatch takes apart."""
    if kind in PLAIN:
        return True
    if kind.__torch_dispatch__ is not disabled_torch_dispatch:  # type: ignore[attr-defined]
        return False
    PLAIN.add(kind)  # type: ignore[arg-type]
    return True


def is_plain(tensor: Tensor) -> bool:
    """Says whether a tensor is sizes, strides and an offset in its storage, and nothing more."""
    return (
        has_own_storage(type(tensor))
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())
    )


class Original(weakref.ref[Tensor]):
    """A weak reference to a tensor of the program, which may be given other memory and dropped.

    `Tensor.data = other` calls no operator and counts no version, and autograd, which has the very
    tensor of an operation's argument, reads the other memory. When the tensor goes, the address of
    its storage is copied out of it. That is done in C, since an interrupt is lost that comes while
    Python is called for a weak reference.
    """

    __slots__ = ("home", "storage")
    # how the reference, with which it is called, says to `memmove` how much to copy
    _as_parameter_ = ctypes.sizeof(ctypes.c_size_t)
    home: int  # the address of the storage that it had
    storage: ctypes.c_size_t  # and of the last one

    @property
    def is_replaced(self) -> bool:
        """Whether the tensor is gone and had other memory."""
        return self.storage.value != self.home


# as `ctypes.memmove`, but that lets other threads of Python run meanwhile, which takes longer
_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value  # type: ignore[arg-type]
)


def original_of(tensor: Tensor, storage: Any) -> Original:
    """Returns a reference to a tensor whose storage this is."""
    home = storage._cdata
    last = ctypes.c_size_t(home)
    pointer = tensor._cdata + OFFSET_OF_STORAGE_POINTER
    found = Original(tensor, functools.partial(_move, ctypes.addressof(last), pointer))
    found.home, found.storage = home, last
    return found


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
        is_lazy = self.negative or base.is_neg() or self.dtype.is_complex
        if base.dtype is self.dtype and not (is_lazy or base.is_nested):
            return base.as_strided(self.sizes, self.strides, self.offset)
        return self.of_storage(base.untyped_storage(), base.device)

    def of_storage(self, storage: Any, device: torch.device) -> Tensor:
        """Returns the tensor of this geometry on a storage."""
        found = torch.empty(0, dtype=self.dtype, device=device)
        found.set_(storage, self.offset, self.sizes, self.strides)
        if self.conjugate:
            found = conj(found)
        return neg_view(found) if self.negative else found


@dataclass(slots=True)
class Apart:
    """A tensor that shares a storage with others and no version, and its version as it was left."""

    tensor: weakref.ref[Tensor]
    counter: int | None


class Value:
    """One version of a storage that a recorded kernel made."""

    # in slots and all set, since a default of a class takes long to read
    __slots__ = (
        "__weakref__", "after", "apart", "base", "before", "blank", "counter", "home", "is_empty",
        "made", "node", "readers", "saved", "shared", "trains",
    )  # fmt: skip

    def __init__(self, node: int, storage: Any, tensor: Tensor, counter: int | None) -> None:
        self.node = node
        self.home: Callable[[], Any] = weakref.ref(storage)
        # the tensor that the kernel left, and its version
        self.base: Callable[[], Tensor | None] = weakref.ref(tensor)
        self.counter = counter
        # bytes of memory that is made to be written, and may be by code that nobody sees
        self.blank: bytes | None = None
        self.is_empty = False  # no kernel wrote it yet
        self.after: Value | None = None  # the next version of the storage, and the one before
        self.before: Callable[[], Value | None] | None = None
        self.saved: Sequence[weakref.ref[Any]] = ()  # handles, to be told when it is written
        self.readers: Sequence[Outside] = ()  # parts of sparse tensors, to have a copy before that
        # by the ids of tensors that share the storage and no version
        self.apart: dict[int, Apart] | None = None
        # tensors that have the memory and not the base, which they may outlive
        self.shared: SharedMemory | None = None
        self.trains: bool | None = None  # whether it requires a gradient; some kernels do more then
        self.made: Tensor | None = None  # the tensor again, in a replay

    @property
    def value(self) -> "Value":
        """The value that this refers to."""
        return self

    def handles(self) -> list[Any]:
        """Returns the handles that somebody may still open."""
        return alive(self.saved)

    def set_apart(self, tensor: Tensor, version: int) -> None:
        """Notes the version of a tensor that shares the storage and no version."""
        if self.apart is None:
            self.apart = {}
        self.apart[id(tensor)] = Apart(weakref.ref(tensor), version)

    def share(self, tensor: Tensor | None) -> None:
        """Notes a tensor that has the memory, and may outlive the one that the kernel left.

        None for one that is about to be made by `detach`, as long as there is the other to tell
        where in the memory the value lies. A value that nothing read yet may lie anywhere.
        """
        base = self.base()
        source = tensor if base is None and self.trains is None else base
        if self.shared is None and source is not None:
            self.shared = SharedMemory(Geometry(source))
        if self.shared is not None and tensor is not None:
            self.shared.add(tensor if tensor._base is None else tensor._base)

    def take(self, tensor: Tensor) -> None:
        """Has a replay read this tensor for the value."""
        if tensor.requires_grad is not self.trains:
            tensor.requires_grad_(bool(self.trains))
        self.made = tensor

    def now(self) -> Tensor:
        """Returns the tensor in a replay that has made it."""
        assert self.made is not None, "a replay makes what a node reads before the node"
        return self.made


class SharedMemory:
    """Where in its storage a value lies, and tensors that have the storage."""

    __slots__ = ("geometry", "references")

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.references: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Notes a tensor, and forgets those that are gone."""
        living = alive(self.references)
        if all(tensor is not one for one in living):
            self.references = [weakref.ref(one) for one in (*living, tensor)]


class ReplayedCopy(Value):
    """Memory in which a replay inside of the recorded forward has made a value once more.

    What reads it reads the value, so that nothing recorded holds it. Once written it is a tensor
    from outside.
    """

    __slots__ = ("source",)

    def __init__(self, source: Value, storage: Any, tensor: Tensor) -> None:
        super().__init__(source.node, storage, tensor, tensor._version)
        # another geometry than that of the value
        self.base = no_tensor
        self.source = source

    @property
    def value(self) -> Value:
        """The value that was made once more."""
        return self.source

    def share(self, tensor: Tensor | None) -> None:
        """Notes nothing: it is gone when the backward is that it was made for."""


class View(Geometry):
    """A tensor of a recorded value that lies elsewhere in its storage."""

    __slots__ = ("trains", "value")
    value: Value
    trains: bool

    def make_room(self) -> None:
        """Gives the storage in a replay the size that a kernel gave it in the forward."""
        storage = self.value.now().untyped_storage()
        steps = zip(self.sizes, self.strides, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in steps)
        needed = (last + 1) * self.dtype.itemsize
        if storage.nbytes() < needed:
            storage.resize_(int(needed))

    def now(self) -> Tensor:
        """Returns the tensor in a replay that has made its value."""
        made = self.value.made
        assert made is not None, "a replay makes what a node reads before the node"
        # a view of what requires a gradient would require one, too
        if made.requires_grad and not self.trains:
            made = detached(made)
        found = self.on(made)
        return found.requires_grad_() if self.trains else found


class Outside:
    """A tensor from outside as it is, with the check that autograd makes in the baseline, too."""

    __slots__ = (
        "__weakref__", "copy", "earlier", "geometry", "has_history", "home", "is_read", "is_result",
        "memory", "original", "parts", "sample", "tensor", "version", "wrapper",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, home: Any = None, earlier: "Outside | None" = None) -> None:
        self.tensor = tensor
        self.home = home  # its storage
        self.earlier = earlier  # while the recording is open another tensor of the storage
        self.version = version_of(tensor)
        # the tensor of the program, once this has one of its own
        self.original: Callable[[], Tensor | None] | None = None
        # how operations of autograd's saved it: as an argument with a history, or as their result
        self.has_history = self.is_result = False
        self.is_read = False  # whether a kernel has read it
        # bytes of it as it was read, which `Tensor.data` and NumPy may write and count no version
        self.sample: bytes | None = None
        self.copy: Any = None  # its storage before a kernel wrote it, and where it lay there
        self.geometry: Geometry | None = None
        # while the recording is open the memory that a kernel read
        self.memory: Tensor | None = None
        self.parts: Sequence[Outside] = ()  # what a sparse one consists of
        # what it is a part of, as `counted` has it
        self.wrapper: tuple[Tensor, int] | None = None if earlier is None else earlier.wrapper

    @property
    def is_copied(self) -> bool:
        """Whether a part of a sparse tensor was written since."""
        return any(part.geometry is not None for part in self.parts)

    def is_as_read(self) -> bool:
        """Returns whether its memory has the bytes that it had when read, if they are known."""
        return self.sample is None or self.sample == bytes_of(self.tensor)

    def hold(self, copy: Any) -> None:
        """Has a replay read a copy of the storage."""
        self.copy, self.geometry = copy, Geometry(self.tensor)

    def look_for_other_memory(self) -> None:
        """Has a replay read the memory that was there, where the tensor has other memory since."""
        if self.memory is not None:
            storage = self.memory.untyped_storage()
            if self.tensor.untyped_storage() is not storage and is_plain(self.memory):
                self.copy, self.geometry, self.memory = storage, Geometry(self.memory), None

    def cut(self, detach: Callable[[Tensor], Tensor]) -> None:
        """Lets go of the tensor of the program, and keeps one of the same memory and version.

        The graph may hold this, and the program may write into its tensor what the graph makes, or
        give it hooks and attributes that hold a result. That would be a cycle through autograd's
        nodes, where Python's garbage collector sees nothing.
        """
        if self.original is not None:
            return
        self.look_for_other_memory()
        self.memory, tensor, trains = None, self.tensor, self.tensor.requires_grad
        is_given_gradient = trains and tensor._base is None and tensor.is_leaf
        self.original, self.tensor = weakref.ref(tensor), detach(tensor)
        if trains:
            self.tensor.requires_grad_()
        del tensor
        found = self.original()
        if found is None:
            # nobody had it but this
            self.original = no_tensor
        elif self.home is not None and not is_given_gradient:
            # what is given a gradient autograd has, so that it does not go before the graph
            self.original = original_of(found, found.untyped_storage())

    def is_of(self, tensor: Tensor) -> bool:
        """Returns whether this stands for a tensor."""
        return self.tensor is tensor or (self.original is not None and self.original() is tensor)

    def unpack(self) -> Tensor:
        """Returns the tensor, which autograd saved.

        Raises:
            RecomputeError: it was changed or detached in place since, or other memory that it was
                given cannot be found.
        """
        tensor, original = self._unchanged(), self.original
        if original is None or self.home is None:
            return tensor
        found = original()
        if self.has_history:
            check_history(found)
        storage = tensor.untyped_storage()
        # of its results autograd has the memory, of its arguments the very tensors
        if self.is_result:
            is_lost = self.home() is not storage
        elif found is None:
            is_lost = type(original) is Original and original.is_replaced
        elif found.untyped_storage() is not storage:
            return detached(found)
        else:
            return tensor
        if is_lost:
            raise RecomputeError(REPLACED)
        return tensor

    def _unchanged(self) -> Tensor:
        tensor = self.tensor
        if tensor._version != self.version:
            check_version(tensor, self.version)
        if self.wrapper is not None:
            check_version(*self.wrapper)
        return tensor

    def now(self) -> Tensor:
        """Returns the tensor as the forward read it.

        Raises:
            RecomputeError: it was changed in place since, or given other memory.
        """
        tensor = self.tensor
        if isinstance(tensor, FakeTensor):
            return tensor
        if self.memory is not None:
            self.look_for_other_memory()
        if self.geometry is None:
            if self.home is not None and self.home() is not tensor.untyped_storage():
                raise RecomputeError(REPLACED)
            found = self._unchanged()
        else:
            with DisableTorchDispatch():
                found = self.geometry.of_storage(self.copy, tensor.device)
                if tensor.requires_grad:
                    found.requires_grad_()
            if self.home is None or self.copy is not self.home():
                return found
        if self.sample is not None and self.sample != bytes_of(found):
            raise RecomputeError(UNSEEN.format(tuple(found.shape)))
        return found


class Sparse(Outside):
    """A sparse tensor from outside.

    It shares memory with the tensors that it was made of, whose writes its version does not count.
    """

    def __init__(self, tensor: Tensor, parts: list[Outside]) -> None:
        super().__init__(tensor)
        self.parts = parts
        self.samples = [sample(part.tensor.untyped_storage()) for part in parts]
        # an operator, which is the program's only where the program asks
        with DisableTorchDispatch():
            self.is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()

    def now(self) -> Tensor:
        """Returns the tensor as the forward read it; raises as that of any other."""
        parts = [part.now() for part in self.parts]
        for part, found in zip(self.parts, self.samples, strict=True):
            if part.geometry is None and sample(part.tensor.untyped_storage()) != found:
                raise RecomputeError(
                    f"a sparse tensor {tuple(self.tensor.shape)} shares its memory with a tensor "
                    "that was changed in place after the forward. Change it after the backward, or "
                    "change a copy."
                )
        if not self.is_copied:
            return self._unchanged()
        size, layout = self.tensor.size(), self.tensor.layout
        given: dict[str, Any] = {"layout": layout}
        make: Callable[..., Tensor] = torch.sparse_compressed_tensor
        if layout is torch.sparse_coo:
            make, given = torch.sparse_coo_tensor, {"is_coalesced": self.is_coalesced}
        with DisableTorchDispatch():
            return make(*parts, size, check_invariants=False, **given)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the indices and values that a sparse tensor consists of, the values last."""
    layout = tensor.layout
    if layout is torch.strided:
        return []
    with DisableTorchDispatch():
        if layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def parts_of_wrapper(wrapper: Any) -> list[Tensor]:
    """Returns the tensors that a tensor of a class with a dispatch of its own consists of."""
    names, _ = wrapper.__tensor_flatten__()
    parts = (getattr(wrapper, name) for name in names)
    return [part for part in parts if isinstance(part, Tensor)]


class Blank:
    """Memory that a kernel writes and nobody reads."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tensor.size(), tensor.dtype, tensor.device

    def now(self) -> Tensor:
        """Returns such memory."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


class Listed(NamedTuple):
    """An argument that is a list with references in it."""

    parts: list[Any]

    def now(self) -> list[Any]:
        """Returns the list in a replay that has made what it refers to."""
        return [part.now() if type(part) in REFERENCES else part for part in self.parts]


@dataclass(slots=True, eq=False)
class Write:
    """An argument that a kernel writes, and its next version; None for one from outside."""

    target: "Reference | Outside"
    scratch: Tensor | None  # while the kernel runs the tensor, in a replay what is in its place
    after: Value | None = None

    def now(self) -> Tensor | None:
        """Returns what a replay has the kernel write."""
        return self.scratch


# refers to a tensor that is gone, or has another geometry now
no_tensor: Callable[[], Any] = weakref.ref(set())


# what stands for a tensor that a recorded kernel made
Reference = Value | View
# all that makes an argument in a replay; asked for each, a set of types is faster than isinstance
REFERENCES = {Value, View, Outside, Sparse, Write, Blank, Listed}

# what a thread's dispatch is outside of all modes
_KEYS = DispatchKey
_INCLUDED = DispatchKeySet(_KEYS.BackendSelect) | DispatchKeySet(_KEYS.ADInplaceOrView)
_EXCLUDED = functools.reduce(
    operator.or_,
    (DispatchKeySet(key) for name, key in _KEYS.__members__.items() if name.startswith("Autocast")),
)


def detach_here() -> Callable[[Tensor], Tensor]:
    """Returns what does here as `detached` does."""
    is_below = is_key_excluded(_KEYS.ADInplaceOrView)
    return detached if is_below or count_dispatch_modes() else Tensor.detach


def detached(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph that shares its version, wherever this is called.

    Below autograd, where dispatch modes are, `Tensor.detach` gives the result a version of its own.
    """
    if detach_here() is not detached:
        return tensor.detach()
    with (
        ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
        DisableTorchDispatch(),
    ):
        found = tensor.detach()
    if isinstance(tensor, FakeTensor):
        return FakeTensor(tensor.fake_mode, found, tensor.fake_device)
    return found


def memory_of(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same memory with a version of its own, which no mode sees."""
    if not count_dispatch_modes():
        return tensor.data
    with DisableTorchDispatch():
        return tensor.data


def counted(wrapper: Any) -> tuple[Tensor, int] | None:
    """Returns what shares the version of a wrapper, whose parts count no writes, and the version.

    None for one without numbers, which is not always possible to detach.
    """
    is_meta = wrapper.device.type == "meta"
    return None if is_meta else (detached(wrapper), version_of(wrapper))


def version_of(tensor: Tensor) -> int:
    """Returns the version of a tensor; 0 for one made in inference mode, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def check_version(tensor: Tensor, version: int) -> None:
    """Refuses a tensor that was changed in place since it had this version.

    Raises:
        RecomputeError: it was.
    """
    now = version_of(tensor)
    # a fake tensor has no numbers, and FSDP2 gives its parameters other versions
    if now != version and type(tensor) is not FakeTensor:
        what = "nested tensor" if tensor.is_nested else f"tensor {tuple(tensor.shape)}"
        raise RecomputeError(
            f"a {what} that this gradient needs was changed in place after it was used (version "
            f"{version}, now {now}). Change it after the backward, or change a copy."
        )


def roles_of(tensor: Tensor, sequence: int) -> tuple[bool, bool]:
    """Returns whether a tensor that autograd saves now is an argument with a history, or a result.

    `sequence` is the number of the next operation. It is neither where it has no history. A view,
    which cannot be detached in place, and asked for its history may make it anew, is a result where
    the operation has written it: what it is a view of has got its history just before it.
    """
    if not tensor.requires_grad:
        return False, False
    if (base := tensor._base) is not None:
        written_by: Any = base.grad_fn
        is_just_written = written_by is not None and written_by._sequence_nr() == sequence - 2
        return False, is_just_written and written_by.name().endswith("CopySlices")
    made_by: Any = tensor.grad_fn
    is_result = made_by is not None and made_by._sequence_nr() == sequence - 1
    return made_by is not None and not is_result, is_result


def check_history(tensor: Tensor | None) -> None:
    """Refuses a saved tensor that had a history and is detached, where it is still held.

    Raises:
        RecomputeError: it is, which autograd refuses in the baseline, too.
    """
    if tensor is not None and not tensor.requires_grad:
        raise RecomputeError(
            f"a tensor {tuple(tensor.shape)} that this gradient needs was detached in place after "
            "it was used, by `detach_()`. Use `detach()`, which leaves it as it is."
        )


class _Thread(threading.local):
    on = True


_thread = _Thread()


@contextlib.contextmanager
def without_fingerprints() -> Iterator[None]:
    """Disables fingerprints on this thread; `verify` compares every bit instead."""
    earlier, _thread.on = _thread.on, False
    try:
        yield
    finally:
        _thread.on = earlier


def fingerprint(tensor: Tensor) -> bytes | Tensor | None:
    """Returns what `read` has to return for a replay of a tensor; None where bytes do not tell.

    Of one on an accelerator it returns a sample that stays there, where replays are checked.

    They do not for one that no gradient flows through, which may hold what a kernel leaves
    unwritten or writes after it was saved.
    """
    if not tensor.requires_grad or isinstance(tensor, FakeTensor):
        return None
    if not tensor.is_cpu:
        return sample_of(tensor) if CHECKS else None
    return read(tensor) if _thread.on and tensor.is_contiguous() else None


# so that no two marks are alike
_marks = itertools.count(1)


def new_mark() -> bytes:
    """Returns bytes that nobody else writes, which are small numbers of any type."""
    number = next(_marks) * 0x9E3779B97F4A7C15 & 0x3F3F3F3F3F3F3F3F
    return number.to_bytes(8, "little")


def fill(storage: Any, mark: bytes) -> None:
    """Writes a mark into memory without content at the places of `sample`, and zeros elsewhere.

    Memory that is used again may hold just what code that nobody sees is about to write; and what
    a program reads there without having written it is the same in a replay. Where torch fills such
    memory, it stays as that left it.
    """
    if storage.device.type != "cpu" or _fills_empty_memory():
        return
    start, size = storage.data_ptr(), storage.nbytes()
    if size > AT_ONCE:
        ctypes.memset(start, 0, size)
        for place in range(PLACES):
            ctypes.memmove(start + place * _gap(size), mark * 2, WIDTH)
    else:
        ctypes.memmove(start, mark * (size // 8 + 1), size)


def filled_empty(size: Any, stride: Any, mark: bytes, **kwargs: Any) -> Tensor:
    """Returns memory without content again, in a replay."""
    found = torch.empty_strided(size, stride, **kwargs)
    fill(found.untyped_storage(), mark)
    return found


def _fills_empty_memory() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )


def sample(storage: Any) -> bytes:
    """Returns bytes at places spread over a storage; b"" where they cannot be read."""
    return read_storage(storage) if storage.device.type == "cpu" else b""


def read_storage(storage: Any) -> bytes:
    """Returns bytes at places spread over a storage that is on the CPU."""
    return read_memory(storage.data_ptr(), storage.nbytes())


def bytes_of(tensor: Tensor) -> bytes | None:
    """Returns bytes at places spread over a tensor; None where they cannot be read at once."""
    # asked for what is on an accelerator, all of its work would be waited for
    if not tensor.is_cpu or type(tensor) is FakeTensor:
        return None
    # most often plain memory, of which the rest need not be asked
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    if tensor.is_quantized or tensor.is_nested:
        return None
    return read(tensor) if tensor.is_contiguous() else read_storage(tensor.untyped_storage())


def read(tensor: Tensor) -> bytes:
    """Returns bytes at places spread over a dense tensor."""
    return read_memory(tensor.data_ptr(), tensor.nbytes)


# as `ctypes.string_at`, which is a function of Python
_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def read_memory(start: int, size: int) -> bytes:
    """Returns bytes at places spread over some memory; b"" where there is none."""
    if not start:
        # tensors of zeros that autograd makes have sizes and no memory
        return b""
    if size <= AT_ONCE:
        content: bytes = _bytes_at(start, size)
        # an odd stride takes high and low bytes of numbers in turn
        return content[:: size // (PLACES * WIDTH) | 1] + content[-WIDTH:]
    gap = _gap(size)
    return b"".join([_bytes_at(start + place * gap, WIDTH) for place in range(PLACES)])


def _gap(size: int) -> int:
    return (size - WIDTH) // (PLACES - 1) // WIDTH * WIDTH
