"""Which memory from outside is yet to be read in a backward: by replays, and as saved tensors.

An optimizer that steps inside of the backward asks before it writes a weight. Most weights are read
for the last time by the operation that makes their gradient. Others are not: a pass without
gradients over the same weights, whose replay comes later; a detached copy that shares the memory; a
weight that was frozen for a part of the forward.

    replays         what the segments schedule for handles that have no tensor yet
    saved tensors   what is packed for them, and more holders of the weight or its storage than
                    there are outside of a forward; recordings do not count
"""

import sys
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from zoo._torch import storage_holders
from zoo.engine.operands import External
from zoo.engine.recording import Recording
from zoo.engine.replay import schedule
from zoo.engine.saved_tensors import SAVED, goals_of, waiting_in
from zoo.engine.segments import SEGMENTS, Segment
from zoo.engine.sharded import whole_storages
from zoo.engine.tensor_state import alive, has_own_storage, storage_of


class Holders(NamedTuple):
    """How many hold a tensor and its storage, views and detached tensors among them."""

    storage: int | None  # its id
    of_tensor: int
    of_storage: int


def holders_of(tensor: Tensor) -> Holders | None:
    """Returns the holders of a tensor; None for one whose class hides its memory."""
    if not has_own_storage(type(tensor)):
        return None
    storage = storage_of(tensor)
    if storage is None:
        return Holders(None, tensor._use_count(), 0)  # type: ignore[attr-defined]
    return Holders(id(storage), tensor._use_count(), storage_holders(storage._cdata))  # type: ignore[attr-defined]


def fewest(before: Holders | None, now: Holders | None) -> Holders | None:
    """Returns what stays of two counts: the fewest holders of the same storage."""
    if before is None or now is None or before.storage != now.storage:
        return now
    return Holders(now.storage, *map(min, before[1:], now[1:]))


# what has no other holders: the tensor by itself, its storage by the tensor and by Python
ALONE = (1, 2)


class _Held:
    """A tensor from outside that autograd may hold, and how often kernels of a recording do."""

    def __init__(self, found: External, recording: Recording | None) -> None:
        self.outside = weakref.ref(found)
        self.recording = None if recording is None else weakref.ref(recording)
        self.times = 0

    @property
    def is_saved(self) -> bool:
        """Whether autograd holds it."""
        is_recorded = self.recording is not None and self.recording() is not None
        kernels = self.times if is_recorded else 0
        return _references(self.outside) > kernels + UNHELD


def _references(found: "weakref.ref[External]") -> int:
    """Returns how many references there are; `UNHELD` or fewer where it has no holder."""
    outside = found()
    return 0 if outside is None else sys.getrefcount(outside)


class _Counted:
    """Stands for a tensor from outside that one variable holds."""


_counted = _Counted()
# references that counting them makes
UNHELD = _references(weakref.ref(_counted)) - 1  # type: ignore[arg-type]


def note_saved(tensor: Tensor) -> None:
    """Notes what stands for a tensor among saved tensors from now on."""
    if id(tensor) not in SAVED:
        SAVED[id(tensor)] = []
        weakref.finalize(tensor, SAVED.pop, id(tensor), None).atexit = False


def forget_saved(tensor: Tensor) -> None:
    """Ends what `note_saved` has begun."""
    SAVED.pop(id(tensor), None)


class PendingReads:
    """The reads that are left when this is made, and of these those that are left when asked."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, _Held]] = {}
        self._readers: dict[int, list[weakref.ref[Segment]]] = {}
        for segment in alive([*SEGMENTS]):
            self._note_held(segment.recording)
            for part in _segments(segment):
                self._note_reads(segment, part)
        for noted in [*SAVED.values()]:
            noted[:] = [reference for reference in noted if reference() is not None]
            for found in alive(noted):
                self._note(found, None)
        self._wholes = whole_storages()

    def _note_held(self, recording: Recording) -> None:
        for kernel in recording.kernels:
            for external in kernel.externals():
                self._note(external, recording).times += 1

    def _note(self, found: External, recording: Recording | None) -> _Held:
        held = self._held.setdefault(id(storage_of(found.tensor)), {})
        return held.setdefault(id(found), _Held(found, recording))

    def _note_reads(self, outermost: Segment, segment: Segment) -> None:
        waiting = waiting_in(segment)
        if not waiting:
            return
        # more than it will replay, where a replay of the segment around it has made a part
        scheduled = schedule(outermost.backwards(), goals_of(waiting), ())
        arguments = (external for kernel, _ in scheduled for external in kernel.externals())
        reader = weakref.ref(segment)
        for storage in {id(storage_of(a.tensor)) for a in arguments if a.geometry is None}:
            self._readers.setdefault(storage, []).append(reader)

    def are_left(self, tensor: Tensor, before: Holders | None) -> bool:
        """Returns whether something is yet to read a tensor whose gradient is complete.

        `before` are the holders that it has outside of a forward.
        """
        storage = self._wholes.get(id(tensor)) or storage_of(tensor)
        segments = (reader() for reader in self._readers.get(id(storage), ()))
        if any(segment is not None and waiting_in(segment) for segment in segments):
            return True
        held = [*self._held.get(id(storage), {}).values()]
        return any(one.is_saved for one in held) or self._is_held(tensor, before, held)

    def _is_held(self, tensor: Tensor, before: Holders | None, held: list[_Held]) -> bool:
        now = holders_of(tensor)
        if now is None:
            return False
        is_known = before is not None and before.storage == now.storage
        of_tensor, of_storage = before[1:] if before is not None and is_known else ALONE
        tensors = (found.tensor for one in held if (found := one.outside()) is not None)
        views = len({id(found) for found in tensors if found is not tensor})
        # the accumulation of its gradient is one more
        return now.of_tensor > of_tensor + 1 or now.of_storage > of_storage + views


def _segments(segment: Segment) -> Iterator[Segment]:
    yield segment
    for part in segment.inner():
        yield from _segments(part)
