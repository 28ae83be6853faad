"""What stands for a tensor among the arguments of a recorded kernel until a replay resolves it.

Value             a storage as a recorded kernel left it, in the geometry of the tensor that it made
View              another tensor of a value
External          a tensor that no recorded kernel made, held as it is or as a copy
SparseExternal    one of these that consists of others: indices and values
Write             an argument that the kernel writes
ScratchArgument   memory that a kernel writes and no other reads
ListArgument      a list with references in it

A tensor that was written after it was saved is noticed by its version, or else by a fingerprint
(`unseen_writes`).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import DisableTorchDispatch, FakeTensor, PyTree
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
from zoo.engine.unseen_writes import bytes_of, sample
from zoo.errors import RecomputeError

REPLACED = (
    "a tensor that this gradient needs was given other memory after it was used, by `Tensor.data` "
    "or a conversion of its module, and that memory is not held. Do so after the backward."
)
UNSEEN = (
    "a tensor {} that this gradient needs was changed in place after it was used, through "
    "`Tensor.data` or by code that torch does not see (NumPy, DLPack, C++). Change it after the "
    "backward, or change a copy."
)


class SavedValue(Protocol):
    """A saved tensor that a replay makes (`segments.Handle`), as writes to its memory see it."""

    def keep_if_replaced(self, tensor: Tensor) -> None:
        """Keeps the tensor after all if it is this one, which has been given other memory."""

    def before_write(self) -> None:
        """Called before a recorded kernel writes the storage of the tensor."""

    def mark_external(self, storage: UntypedStorage) -> None:
        """Called before the storage of the tensor is written unrecorded."""


@dataclass(slots=True)
class SeparateVersion:
    """A tensor that shares a storage with others and no version, and its version as it was left."""

    tensor: weakref.ref[Tensor]
    counter: int | None


class Value:
    """One version of a storage that a recorded kernel made."""

    # in slots and all set, since a default of a class takes long to read
    __slots__ = (
        "__weakref__", "after", "base", "before", "blank", "counter", "home", "is_empty", "made_at",
        "readers", "replayed", "saved", "separate", "shared", "trains",
    )  # fmt: skip

    def __init__(
        self, kernel: int, storage: UntypedStorage, tensor: Tensor, counter: int | None
    ) -> None:
        self.made_at = kernel  # the index of the recorded kernel
        self.home: Callable[[], UntypedStorage | None] = weakref.ref(storage)
        # the tensor that the kernel left, and its version
        self.base: Callable[[], Tensor | None] = weakref.ref(tensor)
        self.counter = counter
        # bytes of memory that is made to be written, and may be by code that no mode sees
        self.blank: bytes | None = None
        self.is_empty = False  # no kernel wrote it yet
        self.after: Value | None = None  # the next version of the storage, and the one before
        self.before: Callable[[], Value | None] | None = None
        self.saved: Sequence[Callable[[], SavedValue | None]] = ()  # to be told when it is written
        self.readers: Sequence[External] = ()  # parts of sparse tensors, to have a copy before that
        # by the ids of tensors that share the storage and no version
        self.separate: dict[int, SeparateVersion] | None = None
        # tensors that have the memory and not the base, which they may outlive
        self.shared: SharedMemory | None = None
        self.trains: bool | None = None  # whether it requires a gradient; some kernels do more then
        self.replayed: Tensor | None = None  # the tensor again, in a replay

    @property
    def value(self) -> "Value":
        """The value that this refers to."""
        return self

    def handles(self) -> list[SavedValue]:
        """Returns the saved tensors that a backward may still open."""
        return alive(self.saved)

    def separate_version(self, tensor: Tensor, version: int) -> None:
        """Notes the version of a tensor that shares the storage and no version."""
        if self.separate is None:
            self.separate = {}
        self.separate[id(tensor)] = SeparateVersion(weakref.ref(tensor), version)

    def holder(self, tensor: Tensor) -> "Value | SeparateVersion":
        """Returns what holds the version of a tensor in the storage."""
        if self.separate is not None:
            for base in (tensor, tensor._base):
                separate = self.separate.get(id(base))
                if separate is not None and separate.tensor() is base:
                    return separate
        return self

    def has_version(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has the version with which recorded kernels left its storage."""
        holder, counter = self.holder(tensor), version_of(tensor)
        if holder.counter is None:
            holder.counter = counter
        if holder.counter == counter:
            return True
        whole = self.base()
        if counter or holder is not self or whole is None or version_of(whole) != self.counter:
            return False
        # by `Tensor.data` or `detach`, and not written since
        self.separate_version(tensor, counter)
        return True

    def is_untouched(self, storage: UntypedStorage) -> bool:
        """Returns whether memory that is made to be written is as recorded kernels left it."""
        if self.is_empty:
            return False
        return self.blank is None or (self.blank != b"" and self.blank == sample(storage))

    def refer(self, tensor: Tensor) -> "Reference | None":
        """Returns the reference of a tensor of this value; None for one that is not plain."""
        if self.base() is tensor:
            trains = tensor.requires_grad
            if self.trains is None:
                self.trains = trains
            if self.trains is trains:
                return self
        if not is_plain(tensor):
            return None
        if self.shared is not None or (self.trains is None and self.base() is None):
            self.share(tensor)
        view = View(tensor)
        view.value, view.trains = self.value, tensor.requires_grad
        return view

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
        """Makes a replay read this tensor for the value."""
        if tensor.requires_grad is not self.trains:
            tensor.requires_grad_(bool(self.trains))
        self.replayed = tensor

    def resolve(self) -> Tensor:
        """Returns the tensor in a replay that has made it."""
        assert self.replayed is not None, "a replay makes what a kernel reads before the kernel"
        return self.replayed


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

    What reads it reads the value, so that nothing recorded holds it. Once written it is external.
    """

    __slots__ = ("source",)

    def __init__(self, source: Value, storage: UntypedStorage, tensor: Tensor) -> None:
        super().__init__(source.made_at, storage, tensor, tensor._version)
        # another geometry than that of the value
        self.base = gone
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
        storage = self.value.resolve().untyped_storage()
        steps = zip(self.sizes, self.strides, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in steps)
        needed = (last + 1) * self.dtype.itemsize
        if storage.nbytes() < needed:
            storage.resize_(int(needed))

    def resolve(self) -> Tensor:
        """Returns the tensor in a replay that has made its value."""
        made = self.value.replayed
        assert made is not None, "a replay makes what a kernel reads before the kernel"
        # a view of what requires a gradient would require one, too
        if made.requires_grad and not self.trains:
            made = detached(made)
        view = self.on(made)
        return view.requires_grad_() if self.trains else view


class External:
    """An external tensor as it is, with the check that autograd makes in the baseline, too."""

    __slots__ = (
        "__weakref__", "copy", "earlier", "geometry", "has_history", "home", "is_read", "is_result",
        "memory", "original", "parts", "sample", "tensor", "version", "wrapper",
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
        # the tensor of the program, once this has one of its own
        self.original: Callable[[], Tensor | None] | None = None
        # how operations of autograd's saved it: as an argument with a history, or as their result
        self.has_history = self.is_result = False
        self.is_read = False  # whether a kernel has read it
        # bytes of it as it was read, which `Tensor.data` and NumPy may write and count no version
        self.sample: bytes | None = None
        # its storage before a kernel wrote it, and where it lay there
        self.copy: UntypedStorage | None = None
        self.geometry: Geometry | None = None
        # while the recording is open the memory that a kernel read
        self.memory: Tensor | None = None
        self.parts: Sequence[External] = ()  # what a sparse one consists of
        # what it is a part of, as `counted` has it
        self.wrapper: tuple[Tensor, int] | None = None if earlier is None else earlier.wrapper

    @property
    def is_copied(self) -> bool:
        """Whether a part of a sparse tensor was written since."""
        return any(part.geometry is not None for part in self.parts)

    def is_as_read(self) -> bool:
        """Returns whether its memory has the bytes that it had when read, if they are known."""
        return self.sample is None or self.sample == bytes_of(self.tensor)

    def hold(self, copy: UntypedStorage) -> None:
        """Makes a replay read a copy of the storage."""
        self.copy, self.geometry = copy, Geometry(self.tensor)

    def look_for_other_memory(self) -> None:
        """Makes a replay read the memory of the forward where the tensor has other memory since."""
        if self.memory is not None:
            storage = self.memory.untyped_storage()
            if self.tensor.untyped_storage() is not storage and is_plain(self.memory):
                self.copy, self.geometry, self.memory = storage, Geometry(self.memory), None

    def detach_graph(self, detach: Callable[[Tensor], Tensor]) -> None:
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
        original = self.original()
        if original is None:
            # this was its last holder
            self.original = gone
        elif self.home is not gone and not is_given_gradient:
            # what is given a gradient autograd has, so that it does not go before the graph
            self.original = original_of(original, original.untyped_storage())

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
        if original is None or self.home is gone:
            return tensor
        present = original()
        if self.has_history:
            check_history(present)
        storage = tensor.untyped_storage()
        # of its results autograd has the memory, of its arguments the very tensors
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
        tensor = self.tensor
        if tensor._version != self.version:
            check_version(tensor, self.version)
        if self.wrapper is not None:
            check_version(*self.wrapper)
        return tensor

    def resolve(self) -> Tensor:
        """Returns the tensor as the forward read it.

        Raises:
            RecomputeError: it was changed in place since, or given other memory.
        """
        tensor = self.tensor
        if isinstance(tensor, FakeTensor):
            return tensor
        if self.memory is not None:
            self.look_for_other_memory()
        if self.geometry is None or self.copy is None:
            if self.home is not gone and self.home() is not tensor.untyped_storage():
                raise RecomputeError(REPLACED)
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
    """Returns what stands for a tensor as it is."""
    storage = storage_of(tensor)
    return External(tensor, gone if storage is None else weakref.ref(storage))


class SparseExternal(External):
    """An external sparse tensor.

    It shares memory with the tensors that it was made of, whose writes its version does not count.
    """

    def __init__(self, tensor: Tensor, parts: list[External]) -> None:
        super().__init__(tensor)
        self.parts = parts
        self.samples = [sample(part.tensor.untyped_storage()) for part in parts]
        # an operator, which is the program's only where the program asks
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
    """Memory that a kernel writes and no other reads."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tensor.size(), tensor.dtype, tensor.device

    def resolve(self) -> Tensor:
        """Returns such memory."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


class ListArgument(NamedTuple):
    """An argument that is a list with references in it."""

    parts: list[PyTree]

    def resolve(self) -> list[PyTree]:
        """Returns the list in a replay that has made what it refers to."""
        return [part.resolve() if type(part) in REFERENCES else part for part in self.parts]


@dataclass(slots=True, eq=False)
class Write:
    """An argument that a kernel writes, and its next version; None for an external one."""

    target: "Reference | External"
    scratch: Tensor | None  # while the kernel runs the tensor, in a replay what is in its place
    after: Value | None = None

    def resolve(self) -> Tensor | None:
        """Returns what a replay has the kernel write."""
        return self.scratch


# what stands for a tensor that a recorded kernel made
Reference = Value | View
# all that makes an argument in a replay; asked for each, a set of types is faster than isinstance
REFERENCES = {Value, View, External, SparseExternal, Write, ScratchArgument, ListArgument}
