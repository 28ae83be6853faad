"""The ledger of storages: what the memory of each tensor is at this point of a recording.

    Value       a recorded kernel left it; each write makes the next value of the storage
    External    no recorded kernel did: a parameter, an input, what foreign code or a kernel that
                cannot be replayed wrote, a result of another process

An external tensor is held by reference, with the version that it had; a copy is taken before a
kernel writes over what a replay may read. So what cannot be known costs memory and never changes a
number.
"""

import ctypes
import weakref
from collections.abc import Iterable, Iterator

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
from zoo.engine.unseen_writes import bytes_of, read_storage, sample

# bytes of a tensor without history that is copied when it is read: a program may change it between
# forward and backward, where the baseline does not mind
SMALL = 1 << 14


class Storages:
    """What each storage is that the kernels of an open recording met.

    Attributes:
        is_open: whether the forward that is recorded still runs.
        is_replayed: whether a replay came while it ran.
        latest: by its id, what a storage is: a value, or the latest external tensor of it.
        externals: the external tensors.
        current: those that are as they were read, by the ids of the program's tensors.
        saved: values of tensors that autograd saved, by the ids of these.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_replayed = False
        self.latest: dict[int, Value | External] = {}
        self.externals: list[External] = []
        self.current: dict[int, External] = {}
        self.saved: dict[int, Value] = {}

    def find(self, storage: UntypedStorage | None) -> Value | External | None:
        """Returns what a storage is now; None for one that no kernel met."""
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
            # none has a version that was made in inference mode
            return self._refer_external(tensor, None, None)
        latest = self.latest.get(id(storage))
        # another storage may have come to lie where one was freed
        if latest is None or latest.home() is not storage:
            latest = None
        elif isinstance(latest, Value):
            # fast path: one version counter for the storage, and no write that no mode saw
            if (
                latest.counter == version
                and latest.separate is None
                and not latest.is_empty
                and ((blank := latest.blank) is None or (blank and blank == read_storage(storage)))
            ):
                if latest.trains is tensor.requires_grad and latest.base() is tensor:
                    return latest
                if id(tensor) not in self.saved and (made := latest.refer(tensor)) is not None:
                    return made
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
        # written by code that no mode sees, so known only as it is now
        if value.handles() and value.has_version(tensor):
            # autograd, which saved it, has what was written
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
            # a fake one has no numbers that could change
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
        """Returns what stands for a part of a sparse tensor, whose storage may be another's."""
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
        """Returns a tensor that has a value still; None where none is known or it was written.

        What would be recorded as a read of the value may be read in its place.
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

        Code that no mode sees may have written into memory that is made to be written. Where that
        cannot be looked at, a kernel that reads memory without content says so.
        """
        storage = storage_of(tensor)
        value = self.find(storage)
        if storage is None or not isinstance(value, Value):
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
        if is_known and value.has_version(tensor):
            return value
        self.mark_external(tensor)
        return None

    def written(self, before: Value, tensor: Tensor, kernel: int) -> Value:
        """Returns the next version of a storage, of which a kernel wrote a tensor."""
        storage, holder = tensor.untyped_storage(), before.holder(tensor)
        value = Value(kernel, storage, tensor, None if holder is before else before.counter)
        if holder is not before:
            holder.counter = None
        is_part = tensor.nbytes < storage.nbytes()
        if before.blank and (is_part or not (before.is_empty or tensor.requires_grad)):
            # the rest may yet be written by code that no mode sees, or all that has no gradient
            value.blank = sample(storage)
        value.before, value.separate = weakref.ref(before), before.separate
        before.after = self.latest[id(storage)] = value
        return value

    def reshape(self, value: Value, tensor: Tensor) -> None:
        """Called before a tensor gets another geometry, which leaves what is in memory.

        Autograd counts a version after the kernel, as for one that writes.
        """
        for handle in value.handles():
            handle.before_write()
        if value.has_version(tensor):
            value.holder(tensor).counter = None
        value.base = gone

    def mark_external(self, tensor: Tensor) -> None:
        """Marks a storage that a recorded kernel made as external; what is saved of it is kept."""
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
        """Leaves open what a storage is, until its next kernel: external then."""
        self.latest.pop(id(storage_of(tensor)), None)

    def before_read(self, external: External) -> None:
        """Called before a kernel first reads an external tensor, which is copied if it is small."""
        external.is_read = True
        tensor = external.tensor
        # what is computed with a weight has a gradient, and is compared when it is replayed
        if type(tensor) is not Parameter or not (tensor.requires_grad and torch.is_grad_enabled()):
            external.sample = bytes_of(tensor)
        if not tensor.requires_grad and is_small(tensor):
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
        # mostly there is one, and no kernel read it
        if latest.is_read or latest.earlier is not None:
            hold_readers(earlier_of(latest), storage, tensor)
        for reader in earlier_of(latest):
            tensor_of = reader.tensor if reader.original is None else reader.original()
            self.current.pop(id(tensor_of), None)
        self.forget(tensor)

    def look_for_replaced(self, tensor: Tensor, value: Value | None) -> None:
        """Keeps what autograd saved of a tensor that `Tensor.data` has given other memory since."""
        saved = known = self.saved.get(id(tensor))
        while known is not None and known is not value:
            known = known.after
        if saved is None or known is not None:
            return
        for handle in saved.handles():
            handle.keep_if_replaced(tensor)

    def note_result(
        self, tensor: PyTree, kernel: int, effects: Effects, trains: bool
    ) -> Value | None:
        """Returns the value of a result; None for one that no replay makes, or no new storage.

        `trains` says whether a gradient may flow through the kernel, whose index is given.
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
            and not (trains and (tensor.is_floating_point() or tensor.is_complex()))
        ):
            # NumPy and DLPack give it away as it is
            value.blank = read_storage(storage) or None
        return value

    def begin_replay(self) -> None:
        """Called at a replay inside of the forward, whose graphs are gone before that ends."""
        if not self.is_replayed:
            self.is_replayed = True
            for external in self.externals:
                external.detach_graph(detached)

    def note_copy(self, value: Value, tensor: Tensor) -> None:
        """Marks what a replay has made of a value: reads of it count as reads of the value."""
        storage = tensor.untyped_storage()
        if self.find(storage) is None:
            self.latest[id(storage)] = ReplayedCopy(value, storage, tensor)

    def note_detach(self, tensor: Tensor) -> None:
        """Notes where a value lies in memory that another tensor is about to share."""
        if (value := self.value_of(tensor)) is not None:
            value.share(None)
            if value.blank is None and tensor.is_cpu and type(tensor) is not FakeTensor:
                # which gives it to NumPy and DLPack
                value.blank = sample(tensor.untyped_storage()) or None

    def hold(self, external: External) -> None:
        """Holds the very tensor while the recording is open: it may get other memory yet."""
        if self.is_open:
            self.externals.append(external)
        else:
            external.detach_graph(detached)

    def close(self) -> None:
        """Ends the recording; only what its kernels and handles refer to is kept."""
        self.is_open = False
        detach = detach_here()
        for external in self.externals:
            external.earlier = None
            external.detach_graph(detach)
        del self.externals, self.latest, self.current, self.saved


def earlier_of(external: External | None) -> Iterator[External]:
    """Yields the external tensors of one storage, the latest first."""
    while external is not None:
        yield external
        external = external.earlier


def hold_readers(readers: Iterable[External], storage: UntypedStorage, tensor: Tensor) -> None:
    """Gives those that a kernel read a copy of their storage, which is about to be written."""
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
    """Returns whether a storage is worth a copy, to be safe from a program that changes it."""
    if _is_parameter(tensor) or _is_parameter(tensor._base):
        return False
    return is_plain(tensor) and bool(tensor.untyped_storage().nbytes() <= SMALL)


def _is_parameter(tensor: Tensor | None) -> bool:
    # asked for this class, `isinstance` runs Python
    return tensor is not None and type(tensor) is not Tensor and isinstance(tensor, Parameter)


def _copied(storage: UntypedStorage, tensor: Tensor) -> UntypedStorage:
    if isinstance(tensor, FakeTensor):
        # it has no numbers that could change
        return storage
    if not tensor.is_cpu:
        with DisableTorchDispatch():
            cloned: UntypedStorage = storage.clone()
            return cloned
    # a third of the time of `clone`, which goes through tensors
    copy = torch.UntypedStorage(storage.nbytes())
    ctypes.memmove(copy.data_ptr(), storage.data_ptr(), storage.nbytes())
    return copy
