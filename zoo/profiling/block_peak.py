"""Measures the peak memory of a block of code, on the CPU and on CUDA devices.

    device   peak                                                       from
    cpu      the most bytes that the block itself had allocated at      the allocator's events
             once, in this thread and the backwards that it starts
    cuda     the most bytes that were allocated at once, above what     max_memory_allocated
             was allocated when the block began

What the block frees of what was there before counts in its favor on CUDA only: torch's profiler
says nothing of blocks that it did not see begin. On the CPU every operation is recorded: meant for
a step or a few, not for an epoch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zoo.errors import ArgumentError
from zoo.profiling.allocator_events import AllocatorEvents


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
    """Measures a block on one device; without one, on the CPU and on all CUDA devices in use.

    Raises:
        ArgumentError: another kind of device, or a CPU's block inside of another or of a profiler.
    """
    chosen = torch.device(device or "cpu")
    if chosen.type not in ("cpu", "cuda"):
        raise ArgumentError(f"memory is measured on cpu and cuda devices; got {device!r}")
    spent = Spending()
    before: dict[int, int] = {}
    for index in range(torch.cuda.device_count()) if _is_cuda_used() else ():
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
        before[index] = torch.cuda.memory_allocated(index)
    if chosen.type == "cuda":
        yield spent
    else:
        with AllocatorEvents() as record:
            yield spent
        spent.peaks["cpu"] = record.trace.peak
        spent.largest["cpu"] = record.trace.blocks_at_peak()
    if chosen.type == "cuda" or (device is None and _is_cuda_used()):
        for index in range(torch.cuda.device_count()) if chosen.index is None else [chosen.index]:
            # the block may be the first to use CUDA: nothing was allocated before
            peak = torch.cuda.max_memory_allocated(index) - before.get(index, 0)
            spent.peaks[f"cuda:{index}"] = peak


def _is_cuda_used() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]
