"""Measures the peak memory of a block of code, on the CPU and on the devices of an accelerator.

    device   peak                                                       from
    cpu      the most bytes that the block itself had allocated at      the allocator's events
             once, in this thread and the backwards that it starts
    others   the most bytes that were allocated at once, above what     max_memory_allocated
             was allocated when the block began

What the block frees of what was there before counts in its favor on an accelerator only: torch's
profiler says nothing of blocks that it did not see begin. On the CPU every operation is recorded:
meant for a step or a few, not for an epoch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zoo.engine.devices import (
    allocated,
    check_counts_memory,
    counts_memory,
    cpu_events,
    devices_in_use,
    peak,
    reset_peak,
    synchronize,
)
from zoo.profiling.allocator_events import MemoryTrace


@dataclass
class Spending:
    """What a block allocated, known when it has ended.

    `peaks` maps a device ("cpu", "cuda:0") to bytes; `largest` maps it to the sizes of the blocks
    that made up the peak, largest first, as far as they are known (CPU).
    """

    peaks: dict[str, int] = field(default_factory=dict)
    largest: dict[str, list[int]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The largest peak of a device in bytes."""
        return max(self.peaks.values(), default=0)


@contextmanager
def spending(device: str | None = None) -> Iterator[Spending]:
    """Measures a block on one device; without one, on the CPU and on all devices in use.

    Raises:
        ArgumentError: a device that does not count its memory, or a CPU's block inside of another
            or of a profiler.
    """
    chosen = torch.device(device or "cpu")
    on_cpu = chosen.type == "cpu"
    if not on_cpu:
        check_counts_memory(chosen)
    spent = Spending()
    before: dict[torch.device, int] = {}
    for place in devices_in_use():
        if counts_memory(place):
            synchronize(place)
            reset_peak(place)
            before[place] = allocated(place)
    if on_cpu:
        with cpu_events() as events:
            yield spent
        record = MemoryTrace.within((address, size) for _, address, size in events)
        spent.peaks["cpu"] = record.peak
        spent.largest["cpu"] = record.blocks_at_peak()
    else:
        yield spent
    for place in () if on_cpu and device is not None else devices_in_use():
        if (on_cpu or chosen in (place, torch.device(place.type))) and counts_memory(place):
            # the block may be the first to use the device: nothing was allocated before
            spent.peaks[str(place)] = peak(place) - before.get(place, 0)
