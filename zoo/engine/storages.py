"""The ledger of storages: where the content of each comes from at a point of a recording.

    Value       a recorded kernel left it; each write makes the next value of the storage
    External    no recorded kernel did: a parameter, an input, a write by foreign code or by a
                kernel that cannot be replayed, a result of another process

An external tensor is held by reference, with its version; it is copied before a kernel overwrites
memory that a replay may read. So what the ledger cannot know costs memory, never a wrong number.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from zoo._torch import DisableTorchDispatch, FakeTensor, PyTree
from zoo.engine.operands import External, Reference, ReplayedCopy, SparseExternal, Value
from zoo.engine.operator_effects import Effects
from zoo.engine.tensor_state import (
    alive,
    detach_here,
    detached,
    gone,
    is_plain,
    memory_of,
    parts_of,
    storage_of,
    version_of,
)
from zoo.engine.unseen_writes import bytes_of, digest, is_slice, read_storage, sample

# the most bytes of a tensor without history that is copied when read: a program may change it
# between forward and backward, which the baseline allows
SMALL = 1 << 14


class Storages:
    """The value or external tensor in each storage that the kernels of an open recording used.

    Attributes:
        is_open: whether the forward that is recorded still runs.
        is_replayed: whether there was a replay while it ran.
        latest: a storage's value, or the latest external tensor of it, by the storage's id.
        externals: the external tensors.
        current: those that are unchanged since they were read, by the ids of the program's tensors.
        saved: values of the tensors that autograd saved, by the ids of these.
        watched: tensors that `detach` has made of these, by their ids.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_replayed = False
        self.latest: dict[int, Value | External] = {}
        self.externals: list[External] = []
        self.current: dict[int, External] = {}
        self.saved: dict[int, Value] = {}
        self.watched: dict[int, tuple[weakref.ref[Tensor], Callable[[], None]]] = {}

    def find(self, storage: UntypedStorage | None) -> Value | External | None:
        """Returns the present value or external tensor of a storage; None if it is unknown."""
        latest = self.latest.get(id(storage))
        # another storage may have come to lie where one was freed
        return latest if latest is not None and latest.home() is storage else None

    def value_of(self, tensor: Tensor) -> Value | None:
        """Returns the value of a tensor whose storage a recorded kernel made."""
        value = self.find(storage_of(tensor))
        return value if isinstance(value, Value) else None

    def refer(self, tensor: Tensor) -> Reference | External:
        """Returns the reference of a tensor as it is now."""
        try:
            storage, version = tensor.untyped_storage(), tensor._version
        except (NotImplementedError, RuntimeError):
            # tensors made in inference mode have no version
            return self._refer_external(tensor, None, None)
        latest = self.latest.get(id(storage))
        # another storage may have come to lie where one was freed
        if latest is None or latest.home() is not storage:
            latest = None
        elif isinstance(latest, Value):
            # fast path: one version counter for the storage, and no write that the recorder missed
            if (
                latest.version == version
                and latest.separate is None
                and not latest.is_empty
                and ((blank := latest.blank) is None or (blank and blank == read_storage(storage)))
            ):
                if latest.requires_grad is tensor.requires_grad and latest.base() is tensor:
                    return latest
                if id(tensor) not in self.saved and (reference := latest.refer(tensor)) is not None:
                    return reference
            return self._refer_value(tensor, storage, latest)
        elif (
            (latest.tensor is tensor or latest.is_of(tensor))
            and latest.version == version
            and id(tensor) not in self.saved
            and (latest.sample is None or latest.is_as_read())
        ):
            return latest
        if id(tensor) in self.saved:
            self.look_for_replaced(tensor, None)
        return self._refer_external(tensor, storage, latest)

    def _refer_value(
        self, tensor: Tensor, storage: UntypedStorage, value: Value
    ) -> Reference | External:
        if value.has_version(tensor) and value.is_untouched(storage):
            if id(tensor) in self.saved:
                self.look_for_replaced(tensor, value)
            reference = value.refer(tensor)
            return self._refer_external(tensor, None, None) if reference is None else reference
        # written by code that no mode sees, so external from now on
        if value.handles() and value.has_version(tensor):
            # a saved tensor in the baseline has what was written, too
            self.mark_external(tensor)
        return self._refer_external(tensor, storage, None)

    def _refer_external(
        self, tensor: Tensor, storage: UntypedStorage | None, latest: External | None
    ) -> External:
        home = gone if storage is None else weakref.ref(storage)
        external = self.current.get(id(tensor))
        if (
            external is not None
            and external.is_of(tensor)
            # `Tensor.data` may have given it another storage
            and external.home is home
            and external.version == version_of(tensor)
            and not external.is_copied
            and external.is_as_read()
        ):
            return external
        parts: list[Tensor] = []
        if storage is None:
            if tensor.is_inference():
                # autograd never saves it and no recorded kernel reads it
                return External(tensor)
            # a fake tensor has no numbers that could change
            parts = [] if isinstance(tensor, FakeTensor) else parts_of(tensor)
        external = (
            SparseExternal(tensor, [*map(self._refer_part, parts)])
            if parts
            else External(tensor, home, latest)
        )
        self.current[id(tensor)] = external
        self.externals.append(external)
        if self.is_replayed:
            external.detach_graph(detached)
        if storage is not None:
            self.latest[id(storage)] = external
        return external

    def _refer_part(self, tensor: Tensor) -> External:
        """Returns the external tensor for a part of a sparse tensor; its storage may be shared."""
        storage = tensor.untyped_storage()
        latest = self.find(storage)
        external = External(
            tensor, weakref.ref(storage), latest if isinstance(latest, External) else None
        )
        external.is_read = True
        self.externals.append(external)
        if isinstance(latest, Value):
            latest.readers = [*latest.readers, external]
        else:
            self.latest[id(storage)] = external
        return external

    def still_there(self, value: Value) -> Tensor | None:
        """Returns a tensor that still has a value; None if there is none, or it was written.

        A replay may read it instead of recomputing the value.
        """
        home = value.home()
        if home is None or self.find(home) is not value or not value.is_untouched(home):
            return None
        base, shared = value.base(), value.shared
        if base is not None and storage_of(base) is home and value.has_version(base):
            return detached(base)
        if shared is None:
            return None
        for tensor in alive(shared.references):
            is_here = storage_of(tensor) is home and type(tensor) is not FakeTensor
            if is_here and value.has_version(tensor):
                with DisableTorchDispatch():
                    return shared.geometry.on(detached(tensor))
        return None

    def target(self, tensor: Tensor, effects: Effects) -> Value | None:
        """Returns the value that a kernel is about to write; None for an external tensor.

        Code that no mode sees may have written into memory that was allocated to be written. If
        that memory cannot be sampled, a kernel that reads it uninitialized is the sign.
        """
        storage = storage_of(tensor)
        value = self.find(storage)
        if storage is None or not isinstance(value, Value):
            return None
        for handle in value.handles():
            handle.before_write()
        if type(value) is ReplayedCopy:
            # in the baseline they all have this memory
            for handle in value.source.handles():
                handle.mark_external(storage)
        if value.readers:
            hold_readers(value.readers, storage, tensor)
        if value.blank:
            is_known = value.blank == sample(storage)
        else:
            is_known = value.blank is None or not value.is_empty or effects.overwrites
        is_known &= type(value) is not ReplayedCopy
        if is_known and value.has_version(tensor):
            return value
        self.mark_external(tensor)
        return None

    def written(self, before: Value, tensor: Tensor, kernel: int) -> Value:
        """Returns the next value of a storage, after a kernel wrote a tensor in it."""
        storage, holder = tensor.untyped_storage(), before.holder(tensor)
        value = Value(kernel, storage, tensor, None if holder is before else before.version)
        if holder is not before:
            holder.version = None
        is_part = tensor.nbytes < storage.nbytes()
        if before.blank and (is_part or not (before.is_empty or tensor.requires_grad)):
            # code that no mode sees may yet write the rest, or a tensor without gradient
            value.blank = sample(storage)
        value.before, value.separate = weakref.ref(before), before.separate
        before.after = self.latest[id(storage)] = value
        return value

    def reshape(self, value: Value, tensor: Tensor) -> None:
        """Called before a tensor gets another geometry in its memory, which counts a version."""
        for handle in value.handles():
            handle.before_write()
        if value.has_version(tensor):
            value.holder(tensor).version = None
        value.base = gone

    def mark_external(self, tensor: Tensor) -> None:
        """Marks a storage that a recorded kernel made as external; saved tensors of it are kept."""
        storage = storage_of(tensor)
        value = self.find(storage)
        if storage is None or not isinstance(value, Value):
            return
        self.forget(tensor)
        while value is not None:
            hold_readers(value.readers, storage, tensor)
            for handle in value.handles():
                handle.mark_external(storage)
            value = None if value.before is None else value.before()

    def forget(self, tensor: Tensor) -> None:
        """Forgets a storage, whose content is external from its next kernel on."""
        self.latest.pop(id(storage_of(tensor)), None)

    def before_read(self, external: External) -> None:
        """Called before a kernel first reads an external tensor, which is copied if it is small."""
        external.is_read = True
        tensor = external.tensor
        requires_grad = tensor.requires_grad
        # no sample of a weight or its view: results that need a gradient are compared when replayed
        if not (requires_grad and torch.is_grad_enabled()):
            external.sample = bytes_of(tensor)
        elif type(tensor) is Parameter:
            external.is_weight = not self.is_replayed
        elif not _is_parameter(tensor._base):
            external.sample = bytes_of(tensor)
        if not requires_grad and is_small(tensor):
            # one copy for all tensors of a storage, as long as it is not written
            of_version = (
                other
                for other in earlier_of(external)
                if other.version == external.version and other.is_as_read()
            )
            copy = next((other.copy for other in of_version if other.copy is not None), None)
            external.hold(_copied(tensor.untyped_storage(), tensor) if copy is None else copy)
        elif external.home is not gone and type(tensor) is not FakeTensor:
            external.memory = memory_of(tensor)
            if not requires_grad and is_plain(tensor) and is_slice(tensor):
                external.digest = digest(tensor)

    def before_write(self, tensor: Tensor) -> None:
        """Called before an unrecorded write: a storage that a kernel read is copied.

        One that a recorded kernel made is external from then on.
        """
        storage = storage_of(tensor)
        if storage is None:
            for part in parts_of(tensor):
                self.before_write(part)
            return
        latest = self.find(storage)
        if isinstance(latest, Value):
            self.mark_external(tensor)
        if type(latest) is not External:
            return
        # fast path: a single external tensor, which no kernel read
        if latest.is_read or latest.earlier is not None:
            hold_readers(earlier_of(latest), storage, tensor)
        for reader in earlier_of(latest):
            tensor_of = reader.tensor if reader.original is None else reader.original()
            self.current.pop(id(tensor_of), None)
        self.forget(tensor)

    def look_for_replaced(self, tensor: Tensor, value: Value | None) -> None:
        """Keeps saved tensors of a tensor to which `Tensor.data` has given other memory since."""
        saved = later = self.saved.get(id(tensor))
        while later is not None and later is not value:
            later = later.after
        if saved is None or later is not None:
            return
        for handle in saved.handles():
            handle.keep_if_replaced(tensor)

    def note_result(
        self, tensor: PyTree, kernel: int, effects: Effects, requires_grad: bool
    ) -> Value | None:
        """Returns the value of a result; None for one that no replay makes, or no new storage.

        `kernel` is its index; `requires_grad`: a gradient may flow through it.
        """
        try:
            storage, version = tensor.untyped_storage(), tensor._version
        except (AttributeError, NotImplementedError, RuntimeError):
            return None
        latest = self.latest.get(id(storage))
        if latest is not None and latest.home() is storage:
            if isinstance(latest, Value):
                latest.separate_version(tensor, version)
            return None
        value = Value(kernel, storage, tensor, version)
        self.latest[id(storage)] = value
        if effects.blank and storage.nbytes() > 0:
            value.is_empty = effects.empty
            if not isinstance(tensor, FakeTensor):
                value.blank = sample(storage)
        elif (
            tensor.is_cpu
            and type(tensor) is not FakeTensor
            and not tensor._is_zerotensor()
            and not (requires_grad and (tensor.is_floating_point() or tensor.is_complex()))
        ):
            # NumPy and DLPack may share this memory
            value.blank = read_storage(storage) or None
        return value

    def begin_replay(self) -> None:
        """Called at a replay inside of the forward, whose graph does not outlive the forward."""
        if not self.is_replayed:
            self.is_replayed = True
            for external in self.externals:
                external.detach_graph(detached)

    def note_copy(self, value: Value, tensor: Tensor) -> None:
        """Notes a replayed tensor of a value: reads of it are recorded as reads of the value."""
        storage = tensor.untyped_storage()
        if self.find(storage) is None:
            self.latest[id(storage)] = ReplayedCopy(value, storage, tensor)

    def note_detach(self, tensor: Tensor) -> None:
        """Notes where a value lies in memory that another tensor is about to share."""
        if (value := self.value_of(tensor)) is not None:
            value.share(None)
            if value.blank is None and tensor.is_cpu and type(tensor) is not FakeTensor:
                # a detached tensor may be shared with NumPy and DLPack
                value.blank = sample(tensor.untyped_storage()) or None

    def watch_detached(self, tensor: Tensor, alias: Tensor) -> None:
        """Looks for unseen writes when a tensor that `detach` has made dies, and when all ends.

        NumPy, DLPack or another thread may write by it what autograd saved, which may be freed by
        the time of the backward.
        """
        value = self.value_of(tensor)
        if value is None or not value.blank or not value.saved:
            return
        key = id(alias)

        def look(_: object = None) -> None:
            if self.is_open and self.watched.pop(key, None) is not None:
                self._look_for_unseen(value)

        self.watched[key] = weakref.ref(alias, look), look

    def look_at_detached(self) -> None:
        """Looks for unseen writes by all tensors that `detach` has made and that are alive."""
        for _, look in [*self.watched.values()]:
            look()

    def _look_for_unseen(self, value: Value) -> None:
        storage = value.home()
        if storage is None or self.find(storage) is not value or value.is_untouched(storage):
            return
        # in the baseline a saved tensor has what was written, too
        self.latest.pop(id(storage), None)
        for handle in value.handles():
            handle.mark_external(storage)

    def hold(self, external: External) -> None:
        """Holds the tensor itself while the recording is open: it may yet get other memory."""
        if self.is_open:
            self.externals.append(external)
        else:
            external.detach_graph(detached)

    def close(self) -> None:
        """Ends the recording; only references of kernels and handles remain."""
        self.is_open = False
        detach = detach_here()
        for external in self.externals:
            external.earlier = None
            external.detach_graph(detach)
        del self.externals, self.latest, self.current, self.saved, self.watched


def earlier_of(external: External | None) -> Iterator[External]:
    """Yields the external tensors of one storage, the latest first."""
    while external is not None:
        yield external
        external = external.earlier


def hold_readers(readers: Iterable[External], storage: UntypedStorage, tensor: Tensor) -> None:
    """Gives external tensors that a kernel read a copy of their storage, before it is written."""
    copy = None
    for reader in readers:
        reader.look_for_other_memory()
        if reader.copy is storage:
            reader.copy = copy = _copied(storage, tensor) if copy is None else copy
        # code that no mode sees may have written it since
        is_still_there = reader.version == version_of(reader.tensor) and reader.is_as_read()
        # `Tensor.data` may have given it other memory
        is_still_there &= storage_of(reader.tensor) is storage
        if reader.is_read and reader.copy is None and is_still_there and is_plain(reader.tensor):
            copy = _copied(storage, tensor) if copy is None else copy
            reader.hold(copy)


class _Copies(threading.local):
    """Is told of each copy of a storage, which no mode sees, where a dry step counts them.

    Only there fake tensors, which have no numbers, are copied.
    """

    note: Callable[[UntypedStorage], object] | None = None


copies = _Copies()


def is_small(tensor: Tensor) -> bool:
    """Returns whether a tensor's storage is copied in case the program changes it."""
    if _is_parameter(tensor) or _is_parameter(tensor._base):
        return False
    return is_plain(tensor) and bool(tensor.untyped_storage().nbytes() <= SMALL)


def _is_parameter(tensor: Tensor | None) -> bool:
    # `isinstance` with this class runs Python
    return tensor is not None and type(tensor) is not Tensor and isinstance(tensor, Parameter)


def _copied(storage: UntypedStorage, tensor: Tensor) -> UntypedStorage:
    # a fake tensor has no numbers that could change
    if copies.note is None and isinstance(tensor, FakeTensor):
        return storage
    copy = _copy_of(storage, tensor)
    if copies.note is not None:
        copies.note(copy)
    return copy


def _copy_of(storage: UntypedStorage, tensor: Tensor) -> UntypedStorage:
    if isinstance(tensor, FakeTensor):
        return tensor.new_empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    if not tensor.is_cpu:
        with DisableTorchDispatch():
            cloned: UntypedStorage = storage.clone()
            return cloned
    # a third of the time of `clone`, which goes through tensors
    copy = torch.UntypedStorage(storage.nbytes())
    ctypes.memmove(copy.data_ptr(), storage.data_ptr(), storage.nbytes())
    return copy
