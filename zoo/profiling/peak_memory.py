"""Measures the peak memory of a block of code or a training step, byte for byte.

torch has `max_memory_allocated` on accelerators and nothing on the CPU, where the process's
resident set misleads: the C library keeps freed pages. The events come from torch's profiler on the
CPU, and from the caching allocator's history on a device that keeps one (CUDA, XPU); of others only
the peak is known. Kernel workspaces, which belong to no tensor, are included.

    event      +a   +b   +g   -b   +c   -a  ...        a, b, c: activations, g: a gradient
    allocated  a    ab   abg  ag   agc  gc
    counted    a    ab   ab   a    ac   c               activation_peak = max = ab

*Activation peak*: the most bytes allocated at once, less parameters, buffers, optimizer state,
inputs and the gradients that exist *at that moment*. Gradients appear one by one, so subtracting
their total would understate a peak early in the backward.

Not counted: memory that other libraries allocate themselves; on an accelerator also what the
caching allocator rounds up. What it reserves in all is a number of its own. Every
operation on the CPU is recorded, so measure a few training steps, not an epoch.
"""

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import allocator_history
from zoo.engine import devices
from zoo.invocation import device_of
from zoo.profiling.caching_allocator import Rounding, as_requested
from zoo.profiling.tensor_spec import storages_of, tensors_in

# otherwise the profiler logs to stderr that it runs and that there is no GPU
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# an address, and the bytes allocated there; below 0 if freed
Event = tuple[int, int]


@dataclass(frozen=True)
class MemoryTrace:
    """The allocations and frees while a callable ran, in their order.

    Blocks that existed before are left out. Without a history the peak is the only event.
    """

    events: tuple[Event, ...]
    has_history: bool = True

    @classmethod
    def within(cls, events: Iterable[Event]) -> "MemoryTrace":
        """Drops the frees of blocks that the callable did not allocate."""
        alive: set[int] = set()
        own: list[Event] = []
        for address, size in events:
            if size > 0 or address in alive:
                (alive.add if size > 0 else alive.discard)(address)
                own.append((address, size))
        return cls(tuple(own))

    @property
    def peak(self) -> int:
        """The most bytes allocated at once, above those at the start."""
        return max(self._allocated(), default=0)

    def blocks_at_peak(self) -> list[int]:
        """Lists the bytes of each block that was allocated at the peak, the largest first."""
        if not self.events:
            return []
        alive = _alive_after(self.events[: self._allocated().index(self.peak) + 1])
        return sorted((self.events[index][1] for index in alive.values()), reverse=True)

    def activation_peak(self, gradients: Iterable[int] = ()) -> int:
        """Returns the most bytes allocated at once, without gradients.

        `gradients` are `gradient_addresses(model)` after the step; their blocks outlive it.
        """
        alive = _alive_after(self.events)
        left_out = {alive.get(address) for address in gradients}
        events = (event for index, event in enumerate(self.events) if index not in left_out)
        return MemoryTrace(tuple(events)).peak

    def _allocated(self) -> list[int]:
        return list(itertools.accumulate(size for _, size in self.events))


def _alive_after(events: Sequence[Event]) -> dict[int, int]:
    """Maps the address of each block that outlives the events to the index of its allocation."""
    latest = {address: index for index, (address, _) in enumerate(events)}
    return {address: index for address, index in latest.items() if events[index][1] > 0}


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes resident before or after a step; a storage counts in the first category that has it."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    inputs: int


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step in bytes; `resident` is after it, with its gradients.

    `activation_peak` is None where the device keeps no history, `reserved_peak` where its allocator
    reserves nothing, as on the CPU, or does not tell.
    """

    peak: int
    activation_peak: int | None
    resident: ResidentBytes
    reserved_peak: int | None = None


def trace(function: Callable[[], object], device: torch.device | str = "cpu") -> MemoryTrace:
    """Collects garbage, runs a function and records the events of a device's allocator."""
    chosen = torch.device(device)
    gc.collect()
    if chosen.type == "cpu":
        with devices.cpu_events() as events:
            function()
        return MemoryTrace.within((address, size) for _, address, size in events)
    devices.check_counts_memory(chosen)
    chosen = devices.indexed(chosen)
    devices.synchronize(chosen)
    devices.reset_peak(chosen)
    start = devices.allocated(chosen)
    with allocator_history(chosen) as history:
        function()
        devices.synchronize(chosen)
    most = devices.peak(chosen) - start
    record = MemoryTrace.within(history_events(history))
    # another allocator has no history, only a peak
    return record if record.events or not most else MemoryTrace(((0, most),), has_history=False)


@dataclass
class Spending:
    """The memory that a block of code allocated, known when it has ended.

    `peaks` maps a device ("cpu", "cuda:0") to bytes; `largest` maps it to the sizes of the
    allocator's blocks at the peak, largest first, where they are known (CPU).
    """

    peaks: dict[str, int] = field(default_factory=dict)
    largest: dict[str, list[int]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The largest peak among the devices, in bytes."""
        return max(self.peaks.values(), default=0)


@contextlib.contextmanager
def spending(device: str | None = None) -> Iterator[Spending]:
    """Measures a block of code on one device; by default on the CPU and on all devices in use.

    On the CPU the peak counts only what the block itself allocates, in this thread and the
    backwards that it starts. On other devices it is the peak of all allocations, less those when
    the block began: if the block frees some of them, its peak is lower.

    Raises:
        ArgumentError: the device does not count its memory, or a block that is measured on the CPU
            is inside another one or inside a profiler.
    """
    chosen = torch.device(device or "cpu")
    on_cpu = chosen.type == "cpu"
    if not on_cpu:
        devices.check_counts_memory(chosen)

    def measured() -> list[torch.device]:
        in_use = filter(devices.counts_memory, devices.devices_in_use())
        return [d for d in in_use if device is None or chosen in (d, torch.device(d.type))]

    spent = Spending()
    before: dict[torch.device, int] = {}
    for used in measured():
        devices.synchronize(used)
        devices.reset_peak(used)
        before[used] = devices.allocated(used)
    with devices.cpu_events() if on_cpu else contextlib.nullcontext() as events:
        yield spent
    if events is not None:
        record = MemoryTrace.within((address, size) for _, address, size in events)
        spent.peaks["cpu"], spent.largest["cpu"] = record.peak, record.blocks_at_peak()
    for used in measured():
        # without an entry the block is the first to use the device
        spent.peaks[str(used)] = devices.peak(used) - before.get(used, 0)


def measure_step(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    inputs: Iterable[Tensor],
) -> StepMemory:
    """Measures a training step: `step` runs forward, backward and optimizer, with no gradients yet.

    Run a step before, so that the optimizer has its state.
    """
    model.zero_grad(set_to_none=True)
    before = resident_bytes(model, optimizer, inputs)
    record = trace(step, device_of(model))
    return StepMemory(
        peak=before.parameters + before.buffers + before.optimizer + before.inputs + record.peak,
        activation_peak=(
            record.activation_peak(gradient_addresses(model)) if record.has_history else None
        ),
        resident=resident_bytes(model, optimizer, inputs),
        reserved_peak=devices.reserved_peak(device_of(model)),
    )


def resident_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Iterable[Tensor] = (),
    rounding: Rounding = as_requested,
) -> ResidentBytes:
    """Counts the bytes that a model and its step hold now, each storage counted by `rounding`."""
    seen: set[int] = set()

    def new_bytes(tensors: Iterable[Tensor]) -> int:
        # not by address: fake and meta tensors have none
        storages = {s._cdata: s for tensor in tensors for s in storages_of(tensor)}
        new = storages.keys() - seen
        seen.update(new)
        return sum(rounding(storages[key].nbytes()) for key in new)

    return ResidentBytes(
        parameters=new_bytes(model.parameters()),
        buffers=new_bytes(model.buffers()),
        gradients=new_bytes(_gradients(model)),
        optimizer=new_bytes(tensors_in(optimizer.state) if optimizer is not None else ()),
        inputs=new_bytes(inputs),
    )


def gradient_addresses(model: nn.Module) -> frozenset[int]:
    """Returns the addresses of the storages of the parameters' gradients."""
    return frozenset(s.data_ptr() for gradient in _gradients(model) for s in storages_of(gradient))


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def history_events(entries: Iterable[dict[str, Any]]) -> list[Event]:
    """Returns the events of the caching allocator's history, from its snapshot for one device."""
    signs = {"alloc": 1, "free_requested": -1}
    chosen = (entry for entry in entries if entry["action"] in signs)
    return [(entry["addr"], signs[entry["action"]] * entry["size"]) for entry in chosen]
