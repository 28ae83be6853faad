"""What single kernels take for real: seconds, and the bytes that they allocate inside and free.

A fake tensor shows what a kernel returns; a convolution's reordered weights or the copy that a sort
works on it does not show, and no seconds. Here a kernel runs alone, on tensors of the same kinds,
once for each kind of call: no code of a user's runs, and no more memory is needed than one kernel
takes. What was measured is known for as long as the process lives.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo._torch import DisableAutocast, disable_current_modes, pytree
from zoo.engine.operators import CONSTANTS, KERNELS, Settings, read_settings, resolved
from zoo.profiling.allocator import AllocatorEvents
from zoo.profiling.tensor_spec import NumberedSpec, Storages, make_tensors, numbered_spec
from zoo.verification.training_record import random_state_restored

# a quick kernel is timed so often; a slow one only until so many seconds went by
RUNS = 10
SECONDS = 0.01
# kernels whose costs are known at once, at most
MOST_KNOWN = 1 << 14


class KernelSpec(NamedTuple):
    """A call of a kernel without numbers: a `NumberedSpec` in the place of each tensor."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[int, ...]


class KernelCosts(NamedTuple):
    """Seconds of a kernel (median), and the most bytes that it allocates beside its results."""

    seconds: float
    workspace: int


class KernelTable:
    """Numbers different calls of kernels, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.specs: list[KernelSpec | None] = []

    def number(self, func: Any, args: Any, kwargs: Any) -> int:
        """Returns the number of a call."""
        spec = _spec_of(func, args, kwargs)
        key = repr(spec) if spec is not None else ""
        if key not in self.numbers:
            self.numbers[key] = len(self.specs)
            self.specs.append(spec)
        return self.numbers[key]


def measure_kernels(
    specs: Sequence[KernelSpec | None], device: torch.device
) -> list[KernelCosts | None]:
    """Runs kernels on a device, each that is not known yet; None for those that cannot run alone.

    Raises:
        ArgumentError: on a CPU where a profiler of torch's is at work.
    """
    settings = read_settings()
    keys = [(repr(spec), settings) for spec in specs]
    if len(_known) + len(keys) > MOST_KNOWN:
        _known.clear()
    missing = {
        key: spec
        for key, spec in zip(keys, specs, strict=True)
        if spec is not None and key not in _known
    }
    if missing:
        with (
            random_state_restored(),
            disable_current_modes(),
            torch.no_grad(),
            DisableAutocast(),
        ):
            if device.type == "cuda":
                with torch.cuda.device(device):
                    found = [_run_on_cuda(spec) for spec in missing.values()]
            else:
                found = _on_cpu(list(missing.values()))
        _known.update(zip(missing, found, strict=True))
    return [_known.get(key) for key in keys]


# what a kernel is called with, and the settings that choose it
_Key = tuple[str, Settings]
_known: dict[_Key, KernelCosts | None] = {}


def _spec_of(func: Any, args: Any, kwargs: Any) -> KernelSpec | None:
    """Describes a call; None for a kernel that cannot be called alone."""
    if getattr(func, "namespace", "") not in KERNELS:
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    if not all(isinstance(leaf, Tensor | torch.Generator | CONSTANTS) for leaf in leaves):
        return None
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    if any(tensor.layout is not torch.strided for tensor in tensors.values()):
        return None
    storages = Storages(())
    kinds = {
        name: numbered_spec(tensor, number, storages.number(tensor))._replace(requires_grad=False)
        for number, (name, tensor) in enumerate(tensors.items())
    }
    looks = Counter(kind.storage for kind in kinds.values())
    for name, kind in kinds.items():
        if looks[kind.storage] == 1:
            # where it lies in a larger storage is nothing to a kernel
            kinds[name] = kind._replace(offset=0)
            storages.sizes[kind.storage] = kind.reach * kind.dtype.itemsize

    def without_numbers(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return kinds[id(leaf)]
        return None if isinstance(leaf, torch.Generator) else leaf

    args, kwargs = pytree.tree_map(without_numbers, (args, kwargs))
    return KernelSpec(str(func), args, kwargs, tuple(storages.sizes))


def _prepared(spec: KernelSpec) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Makes what a call takes."""
    given = spec.args, spec.kwargs
    leaves = pytree.tree_leaves(given, is_leaf=_is_spec)
    kinds = [leaf for leaf in leaves if _is_spec(leaf)]
    made = dict(zip(kinds, make_tensors(kinds, spec.sizes), strict=True))

    def real(leaf: Any) -> Any:
        return made[leaf] if _is_spec(leaf) else leaf

    args, kwargs = pytree.tree_map(real, given, is_leaf=_is_spec)
    return resolved(spec.operator), args, kwargs


def _is_spec(value: Any) -> bool:
    return isinstance(value, NumberedSpec)


def _on_cpu(specs: Sequence[KernelSpec]) -> list[KernelCosts | None]:
    spans: list[tuple[int, int] | None] = []
    with AllocatorEvents() as record:
        for spec in specs:
            spans.append(_span(spec))
    workspaces = _workspaces(record.events, spans)
    return [
        None if span is None else KernelCosts(_seconds(spec), workspace)
        for spec, span, workspace in zip(specs, spans, workspaces, strict=True)
    ]


def _span(spec: KernelSpec) -> tuple[int, int] | None:
    """Runs a kernel; returns the nanoseconds when it began and ended, None where it fails."""
    try:
        func, args, kwargs = _prepared(spec)
        start = time.time_ns()
        result = func(*args, **kwargs)
        end = time.time_ns()
    except Exception:
        # numbers that it does not take, such as those of a matrix without an inverse
        return None
    del result
    return start, end


def _workspaces(
    events: Sequence[tuple[int, int, int]], spans: Sequence[tuple[int, int] | None]
) -> list[int]:
    """Returns for each span the most bytes above those that are left at its end."""
    found, place = [], 0
    for span in spans:
        total = peak = 0
        start, end = span or (0, 0)
        while place < len(events) and events[place][0] < end:
            if events[place][0] >= start:
                total += events[place][2]
                peak = max(peak, total)
            place += 1
        found.append(peak - max(total, 0))
    return found


def _seconds(spec: KernelSpec) -> float:
    func, args, kwargs = _prepared(spec)
    times: list[float] = []
    while len(times) < RUNS and sum(times) < SECONDS:
        start = time.perf_counter()
        func(*args, **kwargs)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _run_on_cuda(spec: KernelSpec) -> KernelCosts | None:
    try:
        func, args, kwargs = _prepared(spec)
        func(*args, **kwargs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **kwargs)
        torch.cuda.synchronize()
        workspace = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del result
    except Exception:
        return None
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(RUNS):
        func(*args, **kwargs)
    end.record()
    end.synchronize()
    return KernelCosts(float(start.elapsed_time(end)) / 1e3 / RUNS, math.ceil(workspace))
