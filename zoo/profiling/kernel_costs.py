"""Bytes and seconds of kernels: estimated from a device's peak rates (a roofline), or measured.

A fake tensor shows what a kernel returns. Its workspace (a convolution's reordered weights, the
copy that a sort works on) it does not show, nor seconds. So each different call of a kernel can run
for real, alone, on tensors of the same specs: no code of a user's runs, and no more memory is
needed than one kernel takes. What was measured is known for as long as the process lives.

An estimate is for a device that may not be here. A kernel takes as long as its arithmetic or its
traffic, whichever is longer, and a while to start; a plan needs only how steps compare. Sources:
NVIDIA's data sheets of the H200, H100 (SXM), A100 (80 GB, SXM), L4, T4 and V100 (SXM2) and the Ada
architecture's white paper; dense numbers, with float32 products in TF32 where there is one for
`torch.set_float32_matmul_precision("high")` and for cuDNN's convolutions.
"""

import bisect
import functools
import itertools
import operator
import statistics
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from zoo._torch import DisableAutocast, disable_current_modes
from zoo.engine.devices import (
    accelerator,
    allocated,
    counts_memory,
    indexed,
    peak,
    reset_peak,
    synchronize,
)
from zoo.engine.operators import Settings, read_settings
from zoo.errors import ArgumentError, nearest, shortened
from zoo.profiling.allocator_events import cpu_events
from zoo.profiling.progress import each
from zoo.profiling.tensor_spec import KernelSpec
from zoo.verification.state_comparison import random_state_restored

# a quick kernel is timed so often; a slow one only until so many seconds went by
RUNS = 10
SECONDS = 0.005
# what its first run takes longer, to choose and build it, is little beside this
LONG = 0.05
# beside this the time of the profiler is nothing, which is at work when a kernel runs first
QUICK = 0.001
# kernels whose costs are known at once, at most
MOST_KNOWN = 1 << 14


@dataclass(frozen=True)
class Device:
    """A device by its peaks: operations a second for each size of number, bytes a second.

    `operations` maps the bytes of a number (8, 4, 2) to operations a second; `start` is the seconds
    between one kernel and the next that an eager program needs; `kind` is torch's word for it.
    """

    operations: Mapping[int, float]
    bandwidth: float
    start: float = 5e-6
    kind: str = "cuda"

    def seconds(self, flops: int, moved: int, dtype: torch.dtype) -> float:
        """Returns the seconds of a kernel of so many operations and bytes."""
        size = min(self.operations, key=lambda known: abs(known - dtype.itemsize))
        return max(flops / self.operations[size], moved / self.bandwidth) + self.start


DEVICES: dict[str, Device] = {
    "nvidia-h200": Device({8: 67e12, 4: 494e12, 2: 989e12}, 4.8e12),
    "nvidia-h100": Device({8: 67e12, 4: 494e12, 2: 989e12}, 3.35e12),
    "a100": Device({8: 19.5e12, 4: 156e12, 2: 312e12}, 2.039e12),
    "rtx-4090": Device({8: 1.29e12, 4: 82.6e12, 2: 165.2e12}, 1.008e12),
    "l4": Device({8: 0.47e12, 4: 60e12, 2: 121e12}, 0.3e12),
    "t4": Device({8: 0.25e12, 4: 8.1e12, 2: 65e12}, 0.32e12),
    "v100": Device({8: 7.8e12, 4: 15.7e12, 2: 125e12}, 0.9e12),
    # two cores with AVX2 and one channel of memory: a small machine, not any one
    "cpu": Device({8: 5e10, 4: 1e11, 2: 1e11}, 1.5e10, kind="cpu"),
}

_MOVE = " For the device that is here, move model and inputs to it and leave device= out"


def device_named(name: str) -> Device:
    """Returns a device of the table.

    Raises:
        ArgumentError: it is not in the table.
    """
    if name not in DEVICES:
        is_here = str(name).partition(":")[0] == accelerator()
        hint = _MOVE if is_here else nearest(str(name), DEVICES)
        raise ArgumentError(
            f"device={shortened(name)} is not in the table: {', '.join(DEVICES)}.{hint}"
        )
    return DEVICES[name]


class KernelCosts(NamedTuple):
    """Seconds of a kernel (median; of its first run if not timed), and its workspace.

    The workspace is the most bytes beside its results.
    """

    seconds: float
    workspace: int


class Kernel(NamedTuple):
    """A kernel that ran: the number of its call, floating point operations, bytes read and written.

    `change`: how many changes of memory there were when it had returned.
    """

    number: int
    flops: int
    moved: int
    change: int


class Update(NamedTuple):
    """The gradient of a parameter that is complete, and may be used and freed.

    parameter: the id of the parameter.
    shape, dtype: those of the parameter.
    change: how many changes of memory there were in the backward by then.
    size: bytes of the gradient.
    freed: the same if the backward of this step made it, else 0.
    is_shared: whether other steps add to it, through a node that was made before this step.
    birth: which change of the backward made the gradient; -1 where it was there before.
    cast: bytes of the gradient of a cast that autocast caches, which became this one and was freed
        by the next change; 0 where there is none.
    is_view: whether the gradient (that of the cast) is a view: autograd's first addition to it is
        not in place.
    """

    parameter: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    change: int
    size: int
    freed: int
    is_shared: bool
    birth: int
    cast: int
    is_view: bool


# bytes that an optimizer allocates to update a parameter, by its shape and type
UpdateBytes = Mapping[tuple[tuple[int, ...], torch.dtype], int]


@dataclass(frozen=True)
class Curve:
    """Allocated and freed bytes in the order of time, and the kernels that ran between them."""

    changes: tuple[int, ...]
    kernels: tuple[Kernel, ...]

    def peak(self, costs: Sequence[KernelCosts | None] = ()) -> int:
        """Returns the most bytes at once; a kernel takes its workspace beside its results."""
        totals = list(itertools.accumulate(self.changes, initial=0))
        most = max(totals)
        for kernel in self.kernels if costs else ():
            known = costs[kernel.number]
            most = max(most, totals[kernel.change] + (known.workspace if known else 0))
        return most

    def with_changes(self, others: Iterable[tuple[int, int]]) -> "Curve":
        """Returns the curve with other changes, each before the one at its place."""
        ordered = sorted(others, key=operator.itemgetter(0))
        parts: list[int] = []
        start = 0
        for place, size in ordered:
            parts += (*self.changes[start:place], size)
            start = place
        before = [place for place, _ in ordered]
        kernels = (
            kernel._replace(change=kernel.change + bisect.bisect_left(before, kernel.change))
            for kernel in self.kernels
        )
        return Curve((*parts, *self.changes[start:]), tuple(kernels))

    def without(self, places: Container[int]) -> "Curve":
        """Returns the curve as if some changes had been of no bytes."""
        pairs = enumerate(self.changes)
        return replace(self, changes=tuple(0 if n in places else size for n, size in pairs))

    @property
    def flops(self) -> int:
        """Floating point operations of its kernels."""
        return sum(kernel.flops for kernel in self.kernels)

    def seconds(
        self, device: Device, dtype: torch.dtype, costs: Sequence[KernelCosts | None] = ()
    ) -> float:
        """Returns the seconds of its kernels: measured ones, else estimated ones."""
        known = [costs[kernel.number] if costs else None for kernel in self.kernels]
        return sum(
            device.seconds(kernel.flops, kernel.moved, dtype) if cost is None else cost.seconds
            for kernel, cost in zip(self.kernels, known, strict=True)
        )


@functools.cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Returns torch's formulas for floating point operations, by operator."""
    # imported late because it imports triton: 0.2 s that `import zoo` does not need
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415

    return flop_registry


# by what a kernel is called with and the settings that choose it
_known: dict[bool, dict[tuple[str, Settings], KernelCosts | None]] = {True: {}, False: {}}


def measure_kernels(
    specs: Sequence[KernelSpec | None], device: torch.device, *, timed: bool = True
) -> list[KernelCosts | None]:
    """Runs kernels on a device, each that is not known yet; None for those that cannot run alone.

    Each runs once, which shows its workspace; those that are `timed` run several times.

    Raises:
        ArgumentError: on a CPU where a profiler of torch's is at work.
    """
    settings = read_settings()
    known = _known[timed]
    keys = [(repr(spec), settings) for spec in specs]
    if len(known) + len(keys) > MOST_KNOWN:
        known.clear()
    if not timed:
        known.update({key: _known[True][key] for key in keys if key in _known[True]})
    missing = {
        key: spec
        for key, spec in zip(keys, specs, strict=True)
        if spec is not None and key not in known
    }
    if missing:
        measure = _on_cpu if device.type == "cpu" else _on_accelerator
        with random_state_restored(), disable_current_modes(), torch.no_grad(), DisableAutocast():
            costs = measure(list(missing.values()), device, timed)
        known.update(zip(missing, costs, strict=True))
    return [known.get(key) for key in keys]


def _on_cpu(specs: Sequence[KernelSpec], _: torch.device, timed: bool) -> list[KernelCosts | None]:
    with cpu_events() as events:
        runs = [_run(spec, timed) for spec in each("running kernels", specs)]
    workspaces = _workspaces(events, runs)
    costs: list[KernelCosts | None] = []
    for spec, run, workspace in zip(specs, runs, workspaces, strict=True):
        if run is None:
            costs.append(None)
            continue
        seconds = run.seconds
        if timed and seconds < QUICK:
            operator, args, kwargs = spec.prepared()
            seconds = _seconds(lambda: operator(*args, **kwargs))  # noqa: B023
        costs.append(KernelCosts(seconds, workspace))
    return costs


class _Run(NamedTuple):
    """A run of a kernel: the nanoseconds when it began and ended, and the seconds that it takes."""

    start: int
    end: int
    seconds: float


def _run(spec: KernelSpec, timed: bool) -> _Run | None:
    """Runs a kernel; None where it fails."""
    try:
        operator, args, kwargs = spec.prepared()
        start = time.time_ns()
        result = operator(*args, **kwargs)
        end = time.time_ns()
    except Exception:
        # numbers that it does not take, such as those of a matrix without an inverse
        return None
    del result
    seconds = (end - start) / 1e9
    if timed and QUICK <= seconds <= LONG:
        seconds = _seconds(lambda: operator(*args, **kwargs))
    return _Run(start, end, seconds)


def _workspaces(events: Sequence[tuple[int, int, int]], runs: Sequence[_Run | None]) -> list[int]:
    """Returns for each run the most bytes above those that are left at its end."""
    peaks, index = [], 0
    for run in runs:
        total = peak = 0
        start, end = run[:2] if run else (0, 0)
        while index < len(events) and events[index][0] < end:
            if events[index][0] >= start:
                total += events[index][2]
                peak = max(peak, total)
            index += 1
        peaks.append(peak - max(total, 0))
    return peaks


def _seconds(run: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < RUNS and sum(times) < SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _on_accelerator(
    specs: Sequence[KernelSpec], device: torch.device, timed: bool
) -> list[KernelCosts | None]:
    if not counts_memory(device):
        # its kernels are estimated, by bytes and operations
        return [None] * len(specs)
    device = indexed(device)
    with torch.accelerator.device_index(device.index):
        return [_run_on_accelerator(spec, device, timed) for spec in each("running kernels", specs)]


def _run_on_accelerator(spec: KernelSpec, device: torch.device, timed: bool) -> KernelCosts | None:
    try:
        operator, args, kwargs = spec.prepared()
        operator(*args, **kwargs)
        synchronize(device)
        reset_peak(device)
        result = operator(*args, **kwargs)
        synchronize(device)
        workspace = peak(device) - allocated(device)
        del result
    except Exception:
        return None
    runs = RUNS if timed else 1
    start = time.perf_counter()
    for _ in range(runs):
        operator(*args, **kwargs)
    synchronize(device)
    return KernelCosts((time.perf_counter() - start) / runs, workspace)
