"""Activation offloading (CPU offload): storages that lie in host memory until the backward.

What segments start from and what kept steps save is there for the backward, and nothing reads it
until then. So it is copied to the host, as far as a plan says, when its last reader in the forward
has been called, and copied back ahead of the backward, on a stream of its own (the side stream)
beside the kernels:

    kernels     ... b  |  c        |  d        ...   replay d | backward d  | replay c ...
    host        x_b is copied out, its memory freed  |  x_c comes back      | x_b comes back

The storage stays the same object without memory, so that views and other tensors of it have their
numbers again when it is back. Only a storage that nothing but segments and autograd holds is
copied: any other would stay on the device. A copy does not round. Where events are, and why:

    kernels -> copy out    what is copied has been computed
    copy out -> kernels    its memory is freed, and given to others, when it has been copied
    kernels -> copy back   the memory for it may have been another tensor's a moment ago
    copy back -> kernels   what is read has been copied back

The side stream copies in order, so that a slab is not written again before it has been read. No
stream is recorded for the allocator (`record_stream`), by which the time of a copy would decide how
much memory a step takes.

On an accelerator the host's memory is pinned, on the CPU it is a memory-mapped file, for fake
tensors there is none. While a graph is captured, nothing is copied.

A mapped file is shared with forked processes. So neither the process nor its fork writes a slab
again that both may read, and the fork writes no slab of before:

    fork            slabs with pieces in use            slabs without
    the process     both read the pieces, until the     goes on with them
    its fork        last is gone; no new pieces         does not use them
"""

import contextlib
import functools
import math
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from zoo._torch import BelowAutograd, DisableTorchDispatch, FakeTensor, storage_holders
from zoo.engine.devices import is_capturing, synchronize
from zoo.engine.operands import External
from zoo.engine.replay import without_modes
from zoo.engine.segments import Segment
from zoo.engine.tensor_state import alive, gone, is_plain
from zoo.errors import in_a_line
from zoo.planner.costs import LEAST_OFFLOADED

# those of this process
_HOSTS: set["weakref.ref[HostMemory]"] = set()
# bytes of a slab: few calls for large tensors, and little that is left over at the end
SLAB = 1 << 25


class Slab:
    """Host memory that is allocated once, and the pieces of it that are in use.

    A piece is in use as long as it lives, so that nothing that ends a step early loses one.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self.memory = _host_memory(device)(size)
        self.used = 0
        self.pieces: set[weakref.ref[Tensor]] = set()

    def room(self) -> int:
        """Returns how many bytes are left; all of them once no piece is in use."""
        self.used = self.used if self.pieces else 0
        return len(self.memory) - self.used

    def piece(self, size: int) -> Tensor:
        """Returns a piece of the rest, of at most so many bytes."""
        piece = self.memory[self.used : self.used + size]
        # no line of Python, which an interrupt could leave out
        self.pieces.add(weakref.ref(piece, self.pieces.discard))
        self.used += len(piece)
        return piece


def _host_memory(device: torch.device) -> Callable[[int], Tensor]:
    return {"cpu": _file_memory, "meta": _fake_memory}.get(device.type, _pinned_memory)


def _fake_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _pinned_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _file_memory(size: int) -> Tensor:
    with tempfile.TemporaryFile() as file:
        # a full disk is an error now, and no signal when it is written
        os.posix_fallocate(file.fileno(), 0, size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


class HostMemory:
    """Slabs of host memory for the storages of one model; at most `limit` bytes in all.

    A copy or a pickle of a model has slabs of its own, and so has a forked process.

    Attributes:
        limit: None where there is none.
        peak: the most bytes that storages took so far.
        is_full: whether there was no room for a storage, which stayed on its device.
        error_text: why the system gave no more memory; "" where it gave all that was asked for.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.peak, self.is_full, self.error_text = limit, 0, False, ""
        self.lock = threading.RLock()
        self._of_devices: dict[torch.device, DeviceTransfers] = {}
        _HOSTS.add(weakref.ref(self, _HOSTS.discard))
        _watch_forks()

    @property
    def slabs(self) -> list[Slab]:
        """The slabs of all devices."""
        every = [*self._of_devices.values()]
        return [slab for transfers in every for slab in (*transfers.slabs, *transfers.read_only)]

    @property
    def allocated(self) -> int:
        """Bytes of slabs so far."""
        return sum(len(slab.memory) for slab in self.slabs)

    @property
    def offloaded(self) -> int:
        """Bytes of pieces that are in use."""
        references = (reference for slab in self.slabs for reference in [*slab.pieces])
        return sum(map(len, alive(references)))

    def __reduce__(self) -> tuple[type["HostMemory"], tuple[int | None]]:
        return HostMemory, (self.limit,)

    def on(self, device: torch.device) -> "DeviceTransfers":
        """Returns the transfers from and to a device."""
        with self.lock:
            if device not in self._of_devices:
                self._of_devices[device] = DeviceTransfers(self, device)
            return self._of_devices[device]

    def settle(self) -> None:
        """Waits, on the current streams, for the copies that are under way."""
        for transfers in [*self._of_devices.values()]:
            transfers.settle(0)

    def before_fork(self) -> None:
        """Gives up the slabs that this process and its fork will both read."""
        with self.lock:
            for transfers in self._of_devices.values():
                transfers.give_up([slab for slab in transfers.slabs if slab.pieces])

    def after_fork(self) -> None:
        """Gives up all slabs, in the forked process; another thread may have had the lock."""
        self.lock = threading.RLock()
        for transfers in self._of_devices.values():
            transfers.give_up(transfers.slabs)

    def room(self) -> int:
        """Returns the size of the next slab; 0 if the limit is reached."""
        return SLAB if self.limit is None else min(SLAB, self.limit - self.allocated)


class DeviceTransfers:
    """Copies between one device and its slabs, in the order of its side stream."""

    def __init__(self, host: HostMemory, device: torch.device) -> None:
        self.host, self.device = host, device
        self.stream = None if device.type in ("cpu", "meta") else torch.Stream(device=device)
        # storages that a copy on the side stream still reads or writes, whose memory is not freed
        self.moving: deque[OffloadedStorage] = deque()
        self.slabs: list[Slab] = []
        # those of before a fork, as long as pieces of them are in use
        self.read_only: list[Slab] = []

    def give_up(self, slabs: Sequence[Slab]) -> None:
        """Takes no new pieces of these slabs."""
        self.slabs = [slab for slab in self.slabs if slab not in slabs]
        self.read_only = [slab for slab in (*self.read_only, *slabs) if slab.pieces]

    def take(self, size: int) -> list[Tensor]:
        """Returns memory of a size, in one slab or several; none if there is no room."""
        self.give_up([])
        missing = size - sum(slab.room() for slab in self.slabs)
        while missing > 0:
            if (more := self.host.room()) <= 0:
                return []
            try:
                self.slabs.append(Slab(self.device, more))
            except (OSError, RuntimeError, MemoryError) as error:
                self.host.limit, self.host.error_text = self.host.allocated, in_a_line(error, 200)
                return []
            missing -= more
        pieces: list[Tensor] = []
        for slab in self.slabs:
            if size and slab.room():
                pieces.append(slab.piece(size))
                size -= len(pieces[-1])
        self.host.peak = max(self.host.peak, sum(slab.used for slab in self.host.slabs))
        return pieces

    def wait_for_kernels(self) -> None:
        """Makes the side stream wait for the kernels so far."""
        if self.stream is not None:
            self.stream.wait_event(self.kernels().record_event())

    def kernels(self) -> torch.Stream:
        """Returns the stream on which kernels run here."""
        return torch.accelerator.current_stream(self.device)

    def copy(self, storage: UntypedStorage, pieces: Sequence[Tensor], out: bool) -> "Copied | None":
        """Copies a storage out, or back, on the side stream; returns what tells its end."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        parts = whole.split([*map(len, pieces)])
        try:
            with contextlib.nullcontext() if self.stream is None else self.stream:
                for part, piece in zip(parts, pieces, strict=True):
                    target, source = (piece, part) if out else (part, piece)
                    target.copy_(source, non_blocking=True)
            return self._copied()
        except BaseException:
            # an interrupt: the storage may be freed, and what was begun still writes it
            if (copied := self._copied()) is not None:
                copied.wait(self.kernels())
            raise

    def _copied(self) -> "Copied | None":
        return None if self.stream is None else Copied(self.stream.record_event(), self.kernels())

    def settle(self, count: int) -> None:
        """Makes kernels wait for copies until so many are left that may be under way."""
        with self.host.lock:
            while len(self.moving) > count:
                self.moving[0].settle()


class Copied(NamedTuple):
    """The end of a copy, and the stream whose kernels the storage's memory belongs to."""

    event: torch.Event
    owner: torch.Stream

    def wait(self, stream: torch.Stream) -> None:
        """Makes kernels wait for the copy."""
        stream.wait_event(self.event)
        if stream != self.owner:
            self.owner.wait_event(self.event)


class OffloadedStorage:
    """A storage that is copied to the host until the backward reads it.

    Its states come in this order: an interrupt between two of them, or within one, loses nothing.

        leaving   the copy is under way: memory and numbers are still there
        away      without memory
        back      copied back, or read before it went away
    """

    def __init__(
        self,
        storage: UntypedStorage,
        item: int,
        offloading: "Offloading",
        transfers: DeviceTransfers,
    ) -> None:
        self.storage, self.size = storage, storage.nbytes()
        self.item, self.offloading, self.transfers = item, offloading, transfers
        self.pieces: Sequence[Tensor] = ()
        self.copied: Copied | None = None
        self.is_leaving, self.is_away = True, False

    def leave(self) -> None:
        """Begins to copy the storage out, if the host has room."""
        self.pieces = self.transfers.take(self.size)
        if self.pieces:
            self.transfers.wait_for_kernels()
            self.copied = self.transfers.copy(self.storage, self.pieces, out=True)

    def come_back(self) -> None:
        """Begins to copy the storage back, if it is away."""
        with self.transfers.host.lock:
            if self.is_away:
                # first: an interrupt must not free memory that a copy writes
                if self not in self.transfers.moving:
                    self.transfers.moving.append(self)
                self.storage.resize_(self.size)
                self.transfers.wait_for_kernels()
                self.copied = self.transfers.copy(self.storage, self.pieces, out=False)
                self.is_away = False
                # for copies that come later on the side stream
                self.pieces = ()

    def before_read(self) -> None:
        """Makes the numbers be there for the kernels that are called next."""
        self.offloading.before_backward(self.item)
        with self.transfers.host.lock:
            if self.is_away:
                without_modes(self.come_back_here)
            self.is_leaving = False
            self.settle()
            self.pieces = ()

    def come_back_here(self) -> None:
        """Comes back, wherever this is called."""
        with _as_bytes():
            self.come_back()

    def settle(self) -> None:
        """Makes kernels wait for the copy; then frees memory that was copied out."""
        if self.copied is not None:
            self.copied.wait(self.transfers.kernels())
        if self.is_leaving:
            self.is_leaving, self.is_away = False, True
        if self.is_away:
            self.storage.resize_(0)
        if self in self.transfers.moving:
            self.transfers.moving.remove(self)


class Offloading:
    """What one forward offloads: storages that its plan names, once only their holders are left.

    An item is a segment or a kept step. The last one that holds a storage decides whether it
    leaves, and when it comes back.
    """

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self.item, self._is_offloaded = 0, False
        # the external tensors of each storage, and the last item of those that shall leave
        self._holders: dict[int, list[weakref.ref[External]]] = {}
        self._candidates: dict[int, int] = {}
        self._copied: list[weakref.ref[OffloadedStorage]] = []
        # the earliest item whose backward has begun
        self._reached = math.inf
        host.settle()

    def begin(self, is_offloaded: bool) -> None:
        """Begins an item, after what the program has released since has been copied out."""
        self.copy_out()
        self.item, self._is_offloaded, self._reached = self.item + 1, is_offloaded, math.inf

    def end(self, segment: Segment, read: Sequence[External]) -> None:
        """Ends a segment, with the external tensors that its kernels read."""
        segment.offloading = self, self.item
        self.add(read)

    def add(self, externals: Sequence[External]) -> None:
        """Adds external tensors that the current item holds."""
        for external in externals:
            if (storage := _home(external)) is not None:
                key = id(storage)
                others = self._holders.setdefault(key, [])
                if all(external is not other for other in alive(others)):
                    others.append(weakref.ref(external))
                if self._is_offloaded:
                    self._candidates[key] = self.item
                else:
                    self._candidates.pop(key, None)

    def copy_out(self) -> None:
        """Copies out what the program has released since."""
        leaving = []
        for key, item in [*self._candidates.items()]:
            held = [one for one in alive(self._holders[key]) if id(_home(one)) == key]
            if not held or _are_alone(held):
                del self._candidates[key], self._holders[key]
                if held and not is_capturing(held[0].tensor.device):
                    leaving.append((held, item))
        if leaving:
            # the memory of those before them is freed now, theirs when others leave
            self.host.settle()
        for held, item in leaving:
            without_modes(self._leave, held, item)

    def _leave(self, externals: Sequence[External], item: int) -> None:
        storage = externals[0].tensor.untyped_storage()
        transfers = self.host.on(storage.device)
        with self.host.lock, _as_bytes():
            offloaded = OffloadedStorage(storage, item, self, transfers)
            offloaded.leave()
            if not offloaded.pieces:
                self.host.is_full = True
                return
            for external in externals:
                external.offloaded = offloaded
            # its memory is freed from now on
            transfers.moving.append(offloaded)
        self._copied.append(weakref.ref(offloaded))

    def before_backward(self, item: int) -> None:
        """Copies back what an item needs, and then what the one before it needs, the first time."""
        if item < self._reached:
            self._reached = item
            without_modes(self._come_back, item)

    def _come_back(self, item: int) -> None:
        copied = alive(self._copied)
        first = max((one.item for one in copied if one.item < item), default=item)
        for offloaded in reversed(copied):
            if offloaded.is_away and offloaded.item >= first:
                offloaded.come_back_here()


@functools.cache
def copy_rate(device: torch.device) -> float:
    """Measures the bytes per second of copies to the host and back, the slower of both.

    Infinite where the host has no memory for them: nothing will be copied.
    """
    with _as_bytes():
        storage = torch.zeros(SLAB, dtype=torch.uint8, device=device).untyped_storage()
        transfers = HostMemory().on(storage.device)
        pieces = transfers.take(SLAB)
        if not pieces:
            return math.inf
        seconds = []
        # the first of each takes longer
        for out in (True, False, True, False):
            synchronize(storage.device)
            start = time.perf_counter()
            transfers.copy(storage, pieces, out=out)
            synchronize(storage.device)
            seconds.append(time.perf_counter() - start)
        return SLAB / max(seconds[2:])


def _on_hosts(act: Callable[[HostMemory], None]) -> None:
    for host in alive([*_HOSTS]):
        act(host)


@functools.cache
def _watch_forks() -> None:
    """Registers what happens at a fork, once in a process that offloads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: _on_hosts(HostMemory.before_fork),
            after_in_child=lambda: _on_hosts(HostMemory.after_fork),
        )


@contextlib.contextmanager
def _as_bytes() -> Iterator[None]:
    """Hides copies of bytes from autograd and from modes."""
    with torch.inference_mode(False), torch.no_grad(), BelowAutograd(), DisableTorchDispatch():
        yield


def _home(external: External) -> UntypedStorage | None:
    """Returns the storage if it is worth a copy, and none that the program holds in any case."""
    tensor = external.tensor
    if type(tensor) not in (Tensor, FakeTensor) or not is_plain(tensor):
        return None
    home = tensor.untyped_storage()
    is_another = external.home is not gone and external.home() is not home
    is_parameter = external.original is not None and isinstance(external.original(), Parameter)
    is_large = home.nbytes() >= LEAST_OFFLOADED
    stays = is_another or is_parameter or external.copy is not None
    return home if is_large and home.resizable() and not stays else None


def _are_alone(externals: Sequence[External]) -> bool:
    """Returns whether nothing but these external tensors of one storage holds it."""
    first = _holders(externals[0])
    more = len(externals) - 1
    return first == (*_ALONE[:3], _ALONE[3] + more) and all(
        _holders(external)[:2] == _ALONE[:2] for external in externals[1:]
    )


def _holders(external: External) -> tuple[int, int, int, int]:
    """Returns the references to a tensor in C++ and in Python, and to its storage the other way."""
    storage = external.tensor.untyped_storage()
    return (
        external.tensor._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(external.tensor),
        sys.getrefcount(storage),
        storage_holders(storage._cdata),
    )


with torch.inference_mode(False), torch.device("cpu"):
    _ALONE = _holders(External(torch.empty(1)))
