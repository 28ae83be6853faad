"""Placeholders for tensors among the arguments of a recorded kernel; a replay resolves them.

Value             a storage as a recorded kernel left it, in the geometry of the tensor that it made
View              another tensor of a value
External          a tensor that no recorded kernel made: itself, or a copy
SparseExternal    an external sparse tensor: indices and values are External
Write             an argument that the kernel writes
ScratchArgument   memory that a kernel writes and no other reads
ListArgument      a list with references in it

Writes after a tensor was saved are detected by its version, or else by a fingerprint
(`unseen_writes`).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import DisableTorchDispatch, FakeTensor, PyTree, sequence_number
from zoo.engine.tensor_state import (
    Geometry,
    Original,
    alive,
    check_history,
    check_version,
    detached,
    gone,
    is_plain,
    original_of,
    storage_of,
    version_of,
)
from zoo.engine.unseen_writes import bytes_of, digest, is_slice, sample
from zoo.errors import RecomputeError

REPLACED = (
    "a tensor that this gradient needs was given other memory after it was used, by `Tensor.data` "
    "or a conversion of its module, and that memory is not held. Do so after the backward."
)
BESIDE = (
    "a tensor {} that this gradient needs was changed in place after it was used, or other bytes "
    "of the memory that it is a slice of were, which its version cannot tell apart. Write after "
    "the backward, or use a copy of the slice."
)
UNSEEN = (
    "a tensor {} that this gradient needs was changed in place after it was used, through "
    "`Tensor.data` or by code that torch does not see (NumPy, DLPack, C++). Change it after the "
    "backward, or change a copy."
)


class SavedValue(Protocol):
    """A saved tensor that a replay makes (`segments.Handle`); told of writes to its memory."""

    def keep_if_replaced(self, tensor: Tensor) -> None:
        """Keeps the tensor if it is this one, whose memory the program has replaced."""

    def before_write(self) -> None:
        """Called before a recorded kernel writes the storage of the tensor."""

    def mark_external(self, storage: UntypedStorage) -> None:
        """Called before the storage of the tensor is written unrecorded."""


class OffloadedMemory(Protocol):
    """A storage that may lie on the host (`host_memory.OffloadedStorage`)."""

    def before_read(self) -> None:
        """Called before the storage is read."""


@dataclass(slots=True)
class SeparateVersion:
    """A tensor that shares a storage but no version counter, and its version after a kernel."""

    tensor: weakref.ref[Tensor]
    version: int | None


class Value:
    """One version of a storage that a recorded kernel made."""

    # in slots and all set, since a default of a class takes long to read
    __slots__ = (
        "__weakref__", "after", "base", "before", "blank", "home", "is_empty", "made_at", "readers",
        "replayed", "requires_grad", "saved", "separate", "sequence", "shared", "version",
    )  # fmt: skip

    def __init__(
        self, kernel: int, storage: UntypedStorage, tensor: Tensor, version: int | None
    ) -> None:
        self.made_at = kernel  # the index of the recorded kernel that left it
        self.home: Callable[[], UntypedStorage | None] = weakref.ref(storage)
        # the tensor that the kernel made or wrote, and its version
        self.base: Callable[[], Tensor | None] = weakref.ref(tensor)
        self.version = version
        # the number of the autograd operation after the one that called the kernel
        self.sequence = sequence_number()
        # sample of memory that is allocated to be written, perhaps by code that no mode sees
        self.blank: bytes | None = None
        self.is_empty = False  # no kernel wrote it yet
        self.after: Value | None = None  # the next version of the storage, and the one before
        self.before: Callable[[], Value | None] | None = None
        self.saved: Sequence[Callable[[], SavedValue | None]] = ()  # told before it is written
        self.readers: Sequence[External] = ()  # parts of sparse tensors, copied before a write
        # tensors that share the storage but no version counter, by id
        self.separate: dict[int, SeparateVersion] | None = None
        # tensors other than the base in this memory, which may outlive it
        self.shared: SharedMemory | None = None
        self.requires_grad: bool | None = None  # some kernels save more for a gradient
        self.replayed: Tensor | None = None  # its tensor in a replay

    @property
    def value(self) -> "Value":
        """The value itself, as `View.value`."""
        return self

    def handles(self) -> list[SavedValue]:
        """Returns the saved tensors that a backward may still unpack."""
        return alive(self.saved)

    def separate_version(self, tensor: Tensor, version: int) -> None:
        """Notes the version of a tensor that shares the storage but no version counter."""
        if self.separate is None:
            self.separate = {}
        self.separate[id(tensor)] = SeparateVersion(weakref.ref(tensor), version)

    def holder(self, tensor: Tensor) -> "Value | SeparateVersion":
        """Returns the object that holds the version of a tensor in the storage."""
        if self.separate is not None:
            for base in (tensor, tensor._base):
                separate = self.separate.get(id(base))
                if separate is not None and separate.tensor() is base:
                    return separate
        return self

    def has_version(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has the version with which recorded kernels left its storage."""
        holder, version = self.holder(tensor), version_of(tensor)
        if holder.version is None:
            holder.version = version
        if holder.version == version:
            return True
        whole = self.base()
        if version or holder is not self or whole is None or version_of(whole) != self.version:
            return False
        # made by `Tensor.data` or `detach`, and not written since
        self.separate_version(tensor, version)
        return True

    def is_untouched(self, storage: UntypedStorage) -> bool:
        """Returns whether memory has the content that recorded kernels left, as far as sampled."""
        if self.is_empty:
            return False
        return self.blank is None or (self.blank != b"" and self.blank == sample(storage))

    def refer(self, tensor: Tensor) -> "Reference | None":
        """Returns a reference to a tensor of this value; None for one that is not plain."""
        if self.base() is tensor:
            requires_grad = tensor.requires_grad
            if self.requires_grad is None:
                self.requires_grad = requires_grad
            if self.requires_grad is requires_grad:
                return self
        if not is_plain(tensor):
            return None
        if self.shared is not None or (self.requires_grad is None and self.base() is None):
            self.share(tensor)
        view = View(tensor)
        view.value, view.requires_grad = self.value, tensor.requires_grad
        return view

    def share(self, tensor: Tensor | None) -> None:
        """Notes another tensor of the memory, which may outlive the base.

        None stands for one that `detach` is about to make: the base tells where in the memory the
        value lies while it exists. A value that nothing has read yet may lie anywhere.
        """
        base = self.base()
        source = tensor if base is None and self.requires_grad is None else base
        if self.shared is None and source is not None and not source.is_nested:
            self.shared = SharedMemory(Geometry(source))
        if self.shared is not None and tensor is not None:
            self.shared.add(tensor if tensor._base is None else tensor._base)

    def take(self, tensor: Tensor) -> None:
        """Sets the tensor that a replay reads for the value."""
        if tensor.requires_grad is not self.requires_grad:
            tensor.requires_grad_(bool(self.requires_grad))
        self.replayed = tensor

    def resolve(self) -> Tensor:
        """Returns the replayed tensor."""
        assert self.replayed is not None, "a replay makes what a kernel reads before the kernel"
        return self.replayed


class SharedMemory:
    """Where in its storage a value lies, and other tensors of the storage."""

    __slots__ = ("geometry", "references")

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.references: list[weakref.ref[Tensor]] = []

    def add(self, tensor: Tensor) -> None:
        """Notes a tensor, and forgets freed ones."""
        living = alive(self.references)
        if all(tensor is not other for other in living):
            self.references = [weakref.ref(other) for other in (*living, tensor)]


class ReplayedCopy(Value):
    """Memory in which a replay inside of the recorded forward has recomputed a value.

    A read of it is recorded as a read of the value. Once written it is external.
    """

    __slots__ = ("source",)

    def __init__(self, source: Value, storage: UntypedStorage, tensor: Tensor) -> None:
        super().__init__(source.made_at, storage, tensor, tensor._version)
        # its geometry may differ from the value's
        self.base = gone
        source.sequence = -1  # the replay is of an earlier operation
        self.source = source

    @property
    def value(self) -> Value:
        """The value that was recomputed."""
        return self.source

    def share(self, tensor: Tensor | None) -> None:
        """Notes nothing: it is freed with the backward that it was recomputed for."""


class View(Geometry):
    """Another tensor of a recorded value: a geometry in its storage."""

    __slots__ = ("requires_grad", "value")
    value: Value
    requires_grad: bool

    def make_room(self) -> None:
        """Enlarges the storage in a replay as the forward did (`resize_`)."""
        storage = self.value.resolve().untyped_storage()
        steps = zip(self.sizes, self.strides, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in steps)
        needed = (last + 1) * self.dtype.itemsize
        if storage.nbytes() < needed:
            storage.resize_(int(needed))

    def resolve(self) -> Tensor:
        """Returns the view of the replayed value."""
        base = self.value.replayed
        assert base is not None, "a replay makes what a kernel reads before the kernel"
        # a view of a tensor that requires a gradient would require one, too
        if base.requires_grad and not self.requires_grad:
            base = detached(base)
        view = self.on(base)
        return view.requires_grad_() if self.requires_grad else view


class External:
    """An external tensor, with autograd's check of its version, or a copy of it."""

    __slots__ = (
        "__weakref__", "copy", "digest", "earlier", "geometry", "has_history", "home", "is_read",
        "is_result", "is_weight", "memory", "offloaded", "original", "parts", "sample", "tensor",
        "version", "wrapper",
    )  # fmt: skip

    def __init__(
        self,
        tensor: Tensor,
        home: Callable[[], UntypedStorage | None] = gone,
        earlier: "External | None" = None,
    ) -> None:
        self.tensor = tensor
        self.home = home  # returns its storage, if it has one
        self.earlier = earlier  # while the recording is open another tensor of the storage
        self.version = version_of(tensor)
        # the tensor of the program, once `tensor` is a detached one
        self.original: Callable[[], Tensor | None] | None = None
        # whether autograd saved it as an argument with a history, and as a result
        self.has_history = self.is_result = False
        # whether it is a parameter that the graph holds itself, to give it a gradient
        self.is_weight = False
        self.is_read = False  # whether a kernel has read it
        # sample of it when read: writes by `Tensor.data` and NumPy count no version
        self.sample: bytes | None = None
        # of a slice, whose version counts writes beside it: a digest of it when read
        self.digest: int | None = None
        # a copy of its storage from before a write, and where it lay there
        self.copy: UntypedStorage | None = None
        self.geometry: Geometry | None = None
        # the memory that a kernel read, until it holds a detached tensor
        self.memory: Tensor | None = None
        # its storage, once that may lie on the host
        self.offloaded: OffloadedMemory | None = None
        self.parts: Sequence[External] = ()  # of a sparse tensor
        # the check of the wrapper that it is a part of (`version_check_of`)
        self.wrapper: tuple[Tensor, int] | None = None if earlier is None else earlier.wrapper

    @property
    def is_copied(self) -> bool:
        """Whether a part of a sparse tensor was written since."""
        return any(part.geometry is not None for part in self.parts)

    def is_as_read(self) -> bool:
        """Returns whether its memory has the content that it had when read, as far as sampled."""
        return self.sample is None or self.sample == bytes_of(self.tensor)

    def hold(self, copy: UntypedStorage) -> None:
        """Makes a replay read a copy of the storage."""
        self.copy, self.geometry = copy, Geometry(self.tensor)

    def look_for_other_memory(self) -> None:
        """Makes a replay read the forward's memory if the tensor has other memory since."""
        if self.memory is not None:
            storage = self.memory.untyped_storage()
            if self.tensor.untyped_storage() is not storage and is_plain(self.memory):
                self.copy, self.geometry, self.memory = storage, Geometry(self.memory), None

    def detach_graph(self, detach: Callable[[Tensor], Tensor]) -> None:
        """Replaces the program's tensor with a detached one of the same memory and version.

        The graph may hold this, and the program may write a result of the graph into its tensor,
        or set a hook or attribute that holds one: a cycle through autograd nodes, which Python's
        garbage collector cannot see. A weight, which the graph holds anyway, stays as it is.
        """
        if self.original is not None or self.is_weight:
            return
        self.look_for_other_memory()
        self.memory, tensor, requires_grad = None, self.tensor, self.tensor.requires_grad
        is_given_gradient = requires_grad and tensor._base is None and tensor.is_leaf
        self.original, self.tensor = weakref.ref(tensor), detach(tensor)
        if requires_grad:
            self.tensor.requires_grad_()
        del tensor
        original = self.original()
        if original is None:
            # this was its last holder
            self.original = gone
        elif self.home is not gone and not is_given_gradient:
            # autograd holds a leaf that gets a gradient as long as the graph
            self.original = original_of(original, original.untyped_storage())

    def is_of(self, tensor: Tensor) -> bool:
        """Returns whether this stands for the tensor."""
        return self.tensor is tensor or (self.original is not None and self.original() is tensor)

    def unpack(self) -> Tensor:
        """Returns the tensor that autograd saved.

        Raises:
            RecomputeError: it was changed or detached in place since, or other memory that it was
                given cannot be found.
        """
        tensor, original = self._unchanged(), self.original
        if original is None or self.home is gone:
            return tensor
        present = original()
        if self.has_history:
            check_history(present)
        storage = tensor.untyped_storage()
        # autograd holds the memory of its results, and its arguments themselves
        if self.is_result:
            is_lost = self.home() is not storage
        elif present is None:
            is_lost = type(original) is Original and original.is_replaced
        elif present.untyped_storage() is not storage:
            return detached(present)
        else:
            return tensor
        if is_lost:
            raise RecomputeError(REPLACED)
        return tensor

    def _unchanged(self) -> Tensor:
        if self.offloaded is not None:
            self.offloaded.before_read()
        tensor = self.tensor
        if tensor._version != self.version:
            check_version(tensor, self.version)
        if self.wrapper is not None:
            check_version(*self.wrapper)
        return tensor

    def _is_written_beside(self) -> bool:
        """Returns whether only other bytes of its memory were written since it was read."""
        tensor = self.tensor
        if not tensor.numel():
            return True
        if self.home is gone or not is_plain(tensor) or not is_slice(tensor):
            return False
        if self.offloaded is not None:
            self.offloaded.before_read()
        if self.digest is None:
            raise RecomputeError(BESIDE.format(tuple(tensor.shape)))
        return self.digest == digest(tensor)

    def resolve(self) -> Tensor:
        """Returns the tensor as the forward read it.

        Raises:
            RecomputeError: it was changed in place since, or given other memory.
        """
        tensor = self.tensor
        if isinstance(tensor, FakeTensor):
            if self.offloaded is not None:
                self.offloaded.before_read()
            return tensor
        if self.memory is not None:
            self.look_for_other_memory()
        if self.geometry is None or self.copy is None:
            if self.home is not gone and self.home() is not tensor.untyped_storage():
                raise RecomputeError(REPLACED)
            if tensor._version != self.version and self._is_written_beside():
                return tensor
            unchanged = self._unchanged()
        else:
            with DisableTorchDispatch():
                unchanged = self.geometry.of_storage(self.copy, tensor.device)
                if tensor.requires_grad:
                    unchanged.requires_grad_()
            if self.copy is not self.home():
                return unchanged
        if self.sample is not None and self.sample != bytes_of(unchanged):
            raise RecomputeError(UNSEEN.format(tuple(unchanged.shape)))
        return unchanged


def external_of(tensor: Tensor) -> External:
    """Returns a placeholder for a tensor as it is."""
    storage = storage_of(tensor)
    return External(tensor, gone if storage is None else weakref.ref(storage))


class SparseExternal(External):
    """An external sparse tensor.

    It shares memory with its indices and values, and its version does not count writes to them.
    """

    def __init__(self, tensor: Tensor, parts: list[External]) -> None:
        super().__init__(tensor)
        self.parts = parts
        self.samples = [sample(part.tensor.untyped_storage()) for part in parts]
        # an operator, which is not to be recorded as the program's
        with DisableTorchDispatch():
            self.is_coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()

    def resolve(self) -> Tensor:
        """Returns the tensor as the forward read it; raises as that of any other."""
        parts = [part.resolve() for part in self.parts]
        for part, before in zip(self.parts, self.samples, strict=True):
            if part.geometry is None and sample(part.tensor.untyped_storage()) != before:
                raise RecomputeError(
                    f"a sparse tensor {tuple(self.tensor.shape)} shares its memory with a tensor "
                    "that was changed in place after the forward. Change it after the backward, or "
                    "change a copy."
                )
        if not self.is_copied:
            return self._unchanged()
        size, layout = self.tensor.size(), self.tensor.layout
        named: dict[str, object] = {"layout": layout}
        make: Callable[..., Tensor] = torch.sparse_compressed_tensor
        if layout is torch.sparse_coo:
            make, named = torch.sparse_coo_tensor, {"is_coalesced": self.is_coalesced}
        with DisableTorchDispatch():
            return make(*parts, size, check_invariants=False, **named)


class ScratchArgument:
    """Memory that a kernel writes and no other kernel reads."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tensor.size(), tensor.dtype, tensor.device

    def resolve(self) -> Tensor:
        """Returns zeros for the kernel to overwrite."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


class ListArgument(NamedTuple):
    """An argument that is a list with references in it."""

    parts: list[PyTree]

    def resolve(self) -> list[PyTree]:
        """Returns the list with its references resolved."""
        return [part.resolve() if type(part) in REFERENCES else part for part in self.parts]


@dataclass(slots=True, eq=False)
class Write:
    """An argument that a kernel writes, and its next version; None for an external one."""

    target: "Reference | External"
    scratch: Tensor | None  # the tensor while the kernel runs; in a replay, scratch memory
    after: Value | None = None

    def resolve(self) -> Tensor | None:
        """Returns the scratch memory that the kernel writes in a replay."""
        return self.scratch


# a placeholder for a tensor that a recorded kernel made
Reference = Value | View
# placeholders that a replay resolves; a set, since `type(x) in set` is faster than isinstance
REFERENCES = {Value, View, External, SparseExternal, Write, ScratchArgument, ListArgument}
