"""A snapshot that torch recorded on a GPU, played again by the model of its allocator.

    python -m tests.profiling.recorded_snapshot snapshot.pickle ...

`torch.cuda.memory._snapshot` holds the segments of the end and the events of some time before. What
there was when the record began is what the events, undone, leave of the end.
"""

import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zoo.profiling.caching_allocator import SMALL_SEGMENT, AllocatedBlock, CachingAllocator

Snapshot = dict[str, Any]


class Plain(pickle.Unpickler):
    """Reads lists, dicts, numbers and text, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a snapshot holds no {module}.{name}")


def read(path: Path) -> Snapshot:
    """Reads a file that `torch.cuda.memory._dump_snapshot` wrote."""
    with path.open("rb") as file:
        snapshot: Snapshot = Plain(file).load()
        return snapshot


class Replay:
    """The allocator of one device at the beginning of the record; `play` takes the events."""

    def __init__(self, snapshot: Snapshot, device: int = 0) -> None:
        self.events = snapshot["device_traces"][device]
        self.allocator, self.blocks = CachingAllocator(), dict[int, AllocatedBlock]()
        self.allocator.segments = _segments_before(snapshot, device, self.events)
        used = _used_before(snapshot, device, self.events)
        for address, size in self.allocator.segments.items():
            inside = {a: sizes for a, sizes in used.items() if address <= a < address + size}
            self._fill(address, size, inside)

    def _fill(self, address: int, size: int, used: dict[int, tuple[int, int]]) -> None:
        """Adds the blocks of a segment: those in use, and the free ones between them."""
        allocator = self.allocator
        cached = allocator.small if size == SMALL_SEGMENT else allocator.large
        allocator.reserved.add(size)
        end = address
        for start, (length, requested) in sorted(used.items()):
            if start > end:
                cached[end] = start - end
            self.blocks[start] = AllocatedBlock(start, length, requested)
            allocator.requested.add(requested)
            allocator.allocated.add(length)
            end = start + length
        if end < address + size:
            cached[end] = address + size - end

    def play(self) -> int:
        """Plays the events; returns how many allocations and releases there were.

        Each block must lie at the address at which torch had it, and each segment come and go when
        torch's did.
        """
        events, made = _without_requests(self.events), 0
        segments = dict(self.allocator.segments)
        for number, event in enumerate(events):
            action, address, size = event["action"], event["addr"], event["size"]
            if action == "segment_alloc":
                self.allocator.end = address
                segments[address] = size
            elif action == "segment_free":
                if events[number - 1]["action"] != "segment_free":
                    self.allocator.release_cached()
                del segments[address]
            elif action == "alloc":
                block = self.blocks[address] = self.allocator.allocate(size)
                assert block.address == address, f"event {number}: a block at another address"
                assert self.allocator.segments == segments
                made += 1
            elif action == "free_completed":
                self.allocator.free(self.blocks.pop(address))
                made += 1
        return made


def _without_requests(events: Sequence[Any]) -> list[Any]:
    return [event for event in events if event["action"] != "free_requested"]


def _segments(snapshot: Snapshot, device: int) -> Iterator[Any]:
    return (segment for segment in snapshot["segments"] if segment["device"] == device)


def _segments_before(snapshot: Snapshot, device: int, events: Sequence[Any]) -> dict[int, int]:
    sizes = {segment["address"]: segment["total_size"] for segment in _segments(snapshot, device)}
    for event in reversed(events):
        if event["action"] == "segment_alloc":
            del sizes[event["addr"]]
        elif event["action"] == "segment_free":
            sizes[event["addr"]] = event["size"]
    return sizes


def _used_before(
    snapshot: Snapshot, device: int, events: Sequence[Any]
) -> dict[int, tuple[int, int]]:
    """Returns the blocks in use by their addresses: the bytes of each, and those requested."""
    used = {
        block["address"]: (block["size"], block["requested_size"])
        for segment in _segments(snapshot, device)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    for event in reversed(events):
        if event["action"] == "alloc":
            del used[event["addr"]]
        elif event["action"] == "free_completed":
            used[event["addr"]] = (-(-event["size"] // 512) * 512, event["size"])
    return used


if __name__ == "__main__":
    for name in sys.argv[1:]:
        replay = Replay(read(Path(name)))
        made, found = replay.play(), replay.allocator
        print(f"{Path(name).name}: {made} events, {found.allocated.peak} allocated at most,")
        print(f"    {found.reserved.peak} reserved at most, each block at its address")
