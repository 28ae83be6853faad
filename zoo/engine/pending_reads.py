"""Whether a running backward is yet to read a weight: by a replay, or as a saved tensor.

An optimizer that steps inside of the backward asks before it writes a weight. Most weights are read
for the last time by the operation that makes their gradient. Others are read later: by the replay
of a pass without gradients, through a detached tensor that shares the memory, or after the weight
was frozen for a part of the forward.

    replays         external tensors in the schedules of handles that have no tensor yet
    saved tensors   packed external tensors, and more holders of the weight or its storage than
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
from zoo.engine.replay import kernels_in, schedule
from zoo.engine.saved_tensors import SAVED, goals_of, waiting_in
from zoo.engine.segments import SEGMENTS, Segment
from zoo.engine.sharded import whole_storages
from zoo.engine.tensor_state import alive, has_own_storage, storage_of


class Holders(NamedTuple):
    """How many references a tensor and its storage have, those of views and detached ones too."""

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
    """Returns the smaller of two counts of the same storage, else the present count."""
    if before is None or now is None or before.storage != now.storage:
        return now
    return Holders(now.storage, *map(min, before[1:], now[1:]))


# counts without other holders: the tensor by itself, its storage by the tensor and by Python
ALONE = (1, 2)


class _ExternalUse:
    """An external tensor, and how many kernels of a recording use it."""

    def __init__(self, external: External, recording: Recording | None) -> None:
        self.external = weakref.ref(external)
        self.recording = None if recording is None else weakref.ref(recording)
        self.times = 0

    @property
    def is_saved(self) -> bool:
        """Whether autograd holds it."""
        is_recorded = self.recording is not None and self.recording() is not None
        kernels = self.times if is_recorded else 0
        return _references(self.external) > kernels + UNHELD


def _references(reference: "weakref.ref[External]") -> int:
    """Returns the number of references to an external tensor; up to `UNHELD` without holders."""
    external = reference()
    return 0 if external is None else sys.getrefcount(external)


class _ReferenceProbe:
    """Stands for an external tensor that one variable holds."""


_probe = _ReferenceProbe()
# references that counting them makes
UNHELD = _references(weakref.ref(_probe)) - 1  # type: ignore[arg-type]


def note_saved(tensor: Tensor) -> None:
    """Begins to note the packed external tensors of a tensor that autograd saves."""
    if id(tensor) not in SAVED:
        SAVED[id(tensor)] = []
        weakref.finalize(tensor, SAVED.pop, id(tensor), None).atexit = False


def forget_saved(tensor: Tensor) -> None:
    """Ends what `note_saved` began."""
    SAVED.pop(id(tensor), None)


class PendingReads:
    """The reads of external tensors that a backward has left; made when it begins."""

    def __init__(self) -> None:
        self._uses: dict[int, dict[int, _ExternalUse]] = {}
        self._readers: dict[int, list[weakref.ref[Segment]]] = {}
        for segment in alive([*SEGMENTS]):
            self._note_externals(segment.recording)
            for part in _segments(segment):
                self._note_reads(segment, part)
        for saved in [*SAVED.values()]:
            saved[:] = [reference for reference in saved if reference() is not None]
            for external in alive(saved):
                self._note(external, None)
        self._wholes = whole_storages()

    def _note_externals(self, recording: Recording) -> None:
        for kernel in recording.kernels:
            for external in kernel.externals():
                self._note(external, recording).times += 1

    def _note(self, external: External, recording: Recording | None) -> _ExternalUse:
        uses = self._uses.setdefault(id(storage_of(external.tensor)), {})
        return uses.setdefault(id(external), _ExternalUse(external, recording))

    def _note_reads(self, outermost: Segment, segment: Segment) -> None:
        waiting = waiting_in(segment)
        if not waiting:
            return
        # more than will be replayed if a replay of the segment around it has made a part
        goals = goals_of(waiting)
        scheduled = schedule(outermost.backwards(goals), goals, ())
        arguments = (
            external for kernel in kernels_in(scheduled) for external in kernel.externals()
        )
        reader = weakref.ref(segment)
        for storage in {id(storage_of(a.tensor)) for a in arguments if a.geometry is None}:
            self._readers.setdefault(storage, []).append(reader)

    def are_left(self, tensor: Tensor, before: Holders | None) -> bool:
        """Returns whether the backward is yet to read a tensor whose gradient is complete.

        `before` are its holders outside of a forward.
        """
        storage = self._wholes.get(id(tensor)) or storage_of(tensor)
        segments = (reader() for reader in self._readers.get(id(storage), ()))
        if any(segment is not None and waiting_in(segment) for segment in segments):
            return True
        uses = [*self._uses.get(id(storage), {}).values()]
        return any(use.is_saved for use in uses) or self._is_held(tensor, before, uses)

    def _is_held(self, tensor: Tensor, before: Holders | None, uses: list[_ExternalUse]) -> bool:
        now = holders_of(tensor)
        if now is None:
            return False
        is_known = before is not None and before.storage == now.storage
        of_tensor, of_storage = before[1:] if before is not None and is_known else ALONE
        externals = alive([use.external for use in uses])
        read = (other.tensor if other.memory is None else other.memory for other in externals)
        views = len({id(view) for view in read if view is not tensor})
        # the accumulation of its gradient is one more holder
        return now.of_tensor > of_tensor + 1 or now.of_storage > of_storage + views


def _segments(segment: Segment) -> Iterator[Segment]:
    yield segment
    for part in segment.inner():
        yield from _segments(part)
