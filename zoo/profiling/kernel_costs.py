"""Bytes and seconds of kernels: estimated from a device's peak rates (a roofline), or measured.

Fake tensors show what a kernel returns, but neither its workspace (a convolution's reordered
weights, the copy that a sort works on) nor its seconds. So each different call of a kernel can run
for real, alone, on tensors of the same specs: no user code runs, and no more memory is needed than
one kernel takes. Measurements are kept until the process ends.

An estimate is for a device that may not be present. A kernel takes as long as its arithmetic or its
memory traffic, whichever is longer, plus a launch; a plan needs only relative times. Sources:
NVIDIA's data sheets of the H200, H100 (SXM), A100 (80 GB, SXM), L4, T4 and V100 (SXM2) and the Ada
architecture's white paper; rates without sparsity. float32 rates are those of TF32 where the device
has it, as with `torch.set_float32_matmul_precision("high")` and in cuDNN's convolutions.
"""

import contextlib
import functools
import itertools
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from zoo._torch import DisableAutocast, PyTree, clear_blas_workspaces, disable_current_modes
from zoo.engine import devices
from zoo.engine.devices import nearest_device, random_state_restored
from zoo.engine.kernel_settings import Settings, read_settings
from zoo.errors import ArgumentError, shortened
from zoo.profiling.caching_allocator import CUBLAS_WORKSPACE
from zoo.profiling.fake_results import ELEMENTWISE
from zoo.profiling.isolation import PLANNING
from zoo.profiling.progress import each
from zoo.profiling.tensor_spec import KernelSpec, TensorSpec

# the most timed runs of a kernel, and the seconds after which no further run begins
RUNS = 10
SECONDS = 0.005
# in so long a first run the setup of the kernel and the profiler are negligible
LONG = 0.05
# bytes of an allocation that marks a position among the allocator's events; no kernel has this size
MARK = 40009
# operators whose CUDA kernels multiply by cuBLAS, for an estimate; on a device it is measured
PRODUCTS = frozenset(
    f"aten.{name}" for name in ("addmm", "mm", "bmm", "baddbmm", "addmv", "mv", "addbmm", "dot")
)
# operators whose kernels take no workspace on the CPU, of tensors of one dtype
WITHOUT_WORKSPACE = frozenset(
    str(operator)
    for operator in (*ELEMENTWISE, torch.ops.aten.cat.default)
    if operator._overloadname != "Scalar"
)
# words that names of devices may begin with
MAKERS = frozenset({"nvidia", "geforce", "tesla"})
# the forward's thread and the backward's: each has a handle of its own
THREADS = 2
# the most entries of the cache of costs
MOST_KNOWN = 1 << 14


@dataclass(frozen=True)
class Device:
    """The peak rates of a device."""

    operations: Mapping[int, float]  # per second, by the bytes of an element: 8, 4, 2
    bandwidth: float  # bytes per second
    start: float = 5e-6  # seconds of an eager program between two kernels
    kind: str = "cuda"
    workspace: int = CUBLAS_WORKSPACE  # bytes that a thread's handle of cuBLAS holds
    # bytes per second of a copy to the host, or from it: by 16 lanes of PCI Express 4
    to_host: float = 25e9

    def seconds(self, flops: int, moved: int, dtype: torch.dtype) -> float:
        """Estimates the seconds of a kernel from its operations and the bytes that it moves."""
        size = min(self.operations, key=lambda itemsize: abs(itemsize - dtype.itemsize))
        return max(flops / self.operations[size], moved / self.bandwidth) + self.start


DEVICES: dict[str, Device] = {
    "h200": Device({8: 67e12, 4: 494e12, 2: 989e12}, 4.8e12, workspace=32 << 20, to_host=55e9),
    "h100": Device({8: 67e12, 4: 494e12, 2: 989e12}, 3.35e12, workspace=32 << 20, to_host=55e9),
    "a100": Device({8: 19.5e12, 4: 156e12, 2: 312e12}, 2.039e12),
    "rtx-4090": Device({8: 1.29e12, 4: 82.6e12, 2: 165.2e12}, 1.008e12),
    "l4": Device({8: 0.47e12, 4: 60e12, 2: 121e12}, 0.3e12),
    "t4": Device({8: 0.25e12, 4: 8.1e12, 2: 65e12}, 0.32e12, to_host=12e9),
    "v100": Device({8: 7.8e12, 4: 15.7e12, 2: 125e12}, 0.9e12, to_host=12e9),
    # a small machine: two cores with AVX2 and one memory channel
    "small-cpu": Device({8: 5e10, 4: 1e11, 2: 1e11}, 1.5e10, kind="cpu", workspace=0, to_host=7e9),
}


def rated_name(name: str) -> str | None:
    """Returns the name in the table of 'H100', 'nvidia-h100' or 'RTX 4090'; None without one."""
    short = functools.partial(re.sub, r"nvidia|geforce|tesla|[\W_]", "")
    names = {short(rated): rated for rated in DEVICES} | {"cpu": "small-cpu"}
    return names.get(short(str(name).lower()))


def device_named(name: str) -> Device:
    """Returns a device of the table; raises ArgumentError for one that is not in it."""
    if (rated := rated_name(name)) is not None:
        return DEVICES[rated]
    hint = nearest_device(str(name), DEVICES)
    if str(name).partition(":")[0] in (devices.accelerator(), "cpu"):
        hint = " For the device that is here, move model and inputs to it, without device="
    raise ArgumentError(
        f"device={shortened(name)} is not in the table: {', '.join(DEVICES)}.{hint}"
    )


def rated_device(name: str | None, own: torch.device) -> Device | None:
    """Returns the device of the table that a plan is for; None for the model's own, `own`.

    The model's own, by torch's name or by None, is measured. For a model on the meta device, or on
    another one, "cpu" is the table's small CPU.

    Raises:
        ArgumentError: the name is neither.
    """
    if name is None or (own.type != "meta" and str(name).partition(":")[0] == own.type):
        return None
    return device_named(name)


def device_like(device: torch.device) -> Device:
    """Returns a device of the table that is like one of torch's."""
    like = DEVICES["small-cpu" if device.type in ("cpu", "meta") else "a100"]
    # cuBLAS holds workspaces on CUDA alone
    return like if device.type == "cuda" else replace(like, workspace=0)


def is_of_kind(made_for: str, kind: str) -> bool:
    """Returns whether a device is the current one of a kind such as "cuda", or is like it.

    "a100" of the table is like "NVIDIA A100-SXM4-80GB".
    """
    words, here = _words(made_for), _words(devices.name_of(kind) or kind)
    return here[: len(words)] == words


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word not in MAKERS]


class KernelCosts(NamedTuple):
    """Seconds of a kernel (median; of its first run if not timed), and its workspaces in bytes.

    The workspace is its peak without its results; `held_by_library` are the bytes that its library
    keeps from the first call on, as cuBLAS does for each thread, and no part of the workspace.
    """

    seconds: float
    workspace: int
    held_by_library: int = 0


def held_by_libraries(
    specs: Sequence[KernelSpec | None],
    device: Device,
    costs: Sequence[KernelCosts | None] = (),
) -> int:
    """Returns the bytes that libraries hold beside a step of these kernels, from its first on.

    Libraries share a thread's workspaces among its kernels, so the largest counts for each thread.
    Without `costs` those of cuBLAS count if a kernel is a product.
    """
    if costs:
        return THREADS * max((c.held_by_library for c in costs if c is not None), default=0)
    names = {spec.operator.rpartition(".")[0] for spec in specs if spec is not None}
    return 0 if PRODUCTS.isdisjoint(names) else THREADS * device.workspace


@functools.cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Returns torch's formulas for floating-point operations, by operator; two are corrected.

    For the gradient of a weight torch's own counts every pair of an input and an output channel, so
    of g groups g times the operations: 65 forwards for the backward of a depthwise convolution of
    64 channels, which takes two. Those for attention refuse grouped queries, whose heads of keys
    and values are used by several heads of queries each.

    A formula that raises an error for a call returns 0, as for an operator without one: the
    kernel's time is then measured, or estimated from the bytes that it moves.
    """
    # imported late because it imports triton: 0.2 s that `import zoo` does not need
    from torch.utils.flop_counter import (  # noqa: PLC0415
        flop_registry,
        sdpa_backward_flop_count,
        sdpa_flop_count,
    )

    backward = torch.ops.aten.convolution_backward
    by_torch = flop_registry[backward]
    forward: Callable[..., int] = sdpa_flop_count
    by_gradient: Callable[..., int] = sdpa_backward_flop_count

    def convolution_backward(*args: PyTree, **kwargs: PyTree) -> int:
        *arguments, groups, (of_input, of_weight, _) = args
        masks = [of_input, False, False], [False, of_weight, False]
        inputs, weights = (by_torch(*arguments, groups, mask, **kwargs) for mask in masks)
        return int(inputs + weights // groups)

    def attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
        return int(forward(query.shape, *_shapes_by_query(query, key, value)))

    def attention_backward(
        gradient: Any, query: Any, key: Any, value: Any, *_: object, **__: object
    ) -> int:
        shapes = query.shape, *_shapes_by_query(query, key, value)
        return int(by_gradient(gradient.shape, *shapes))

    formulas = {**flop_registry, backward: convolution_backward}
    for packet in flop_registry:
        name = getattr(packet, "__name__", "")
        if name.startswith("_scaled_dot_product"):
            formulas[packet] = attention_backward if name.endswith("_backward") else attention
    return {packet: _zero_if_raised(formula) for packet, formula in formulas.items()}


def _shapes_by_query(query: Any, *others: Any) -> list[tuple[int, ...]]:
    """Returns shapes of keys and values (N, heads, L, C) with the heads of the queries."""
    heads = query.shape[1]
    shapes = [tuple(other.shape) for other in others]
    return [(n, heads if heads % h == 0 else h, *more) for n, h, *more in shapes]


def _zero_if_raised(formula: Callable[..., int]) -> Callable[..., int]:
    def guarded(*args: PyTree, **kwargs: PyTree) -> int:
        try:
            return int(formula(*args, **kwargs))
        except Exception:
            return 0

    return guarded


# by the repr of the call's spec, the settings that select the kernel, and whether it was timed
_measured: dict[tuple[str, Settings, bool], KernelCosts | None] = {}


def measure_kernels(
    specs: Sequence[KernelSpec | None], device: torch.device, *, timed: bool = True
) -> list[KernelCosts | None]:
    """Measures kernels on a device, unless known; None for those that cannot run alone.

    Each runs once, which shows its workspace, unless it takes none; `timed` ones run several times.

    Raises:
        ArgumentError: the device is the CPU, and another profiler of torch's is active.
    """
    settings = read_settings()
    if len(_measured) + len(specs) > MOST_KNOWN:
        _measured.clear()
    texts = [repr(spec) for spec in specs]
    keys = [(text, settings, timed or (text, settings, True) in _measured) for text in texts]
    missing = {
        key: spec
        for key, spec in zip(keys, specs, strict=True)
        if spec is not None and key not in _measured
    }
    if device.type == "cpu" and not timed:
        free = [key for key, spec in missing.items() if _takes_no_workspace(spec)]
        _measured.update(dict.fromkeys(free, KernelCosts(0.0, 0)))
        missing = {key: spec for key, spec in missing.items() if key not in _measured}
    if missing:
        measure = _on_cpu if device.type == "cpu" else _on_accelerator
        with (
            PLANNING,
            random_state_restored(),
            disable_current_modes(),
            torch.no_grad(),
            DisableAutocast(),
        ):
            costs = measure(list(missing.values()), device, timed)
        _measured.update(zip(missing, costs, strict=True))
    return [_measured.get(key) for key in keys]


def _takes_no_workspace(spec: KernelSpec) -> bool:
    """Returns whether a kernel of the CPU is known to take no memory beside its results."""
    tensors = [leaf for leaf in spec.leaves if isinstance(leaf, TensorSpec)]
    # a number would become a tensor, and one of another dtype would be cast
    is_number = spec.operator.endswith(".Tensor") and len(tensors) < 2
    is_of_one_kind = len({tensor.dtype for tensor in tensors}) == 1
    return spec.operator in WITHOUT_WORKSPACE and is_of_one_kind and not is_number


def _on_cpu(specs: Sequence[KernelSpec], _: torch.device, timed: bool) -> list[KernelCosts | None]:
    with devices.cpu_events() as events:
        times = [_run_between_marks(spec) for spec in each("running kernels", specs)]
    sizes = [size for *_, size in events]
    # not by the clock: that of the events may be some microseconds off
    marks = (index for index, size in enumerate(sizes) if size == MARK)
    costs: list[KernelCosts | None] = []
    for spec, first_run, first, last in zip(specs, times, marks, marks, strict=True):
        if first_run is None:
            costs.append(None)
            continue
        # behind the event that frees the mark
        totals = list(itertools.accumulate(sizes[first + 2 : last], initial=0))
        seconds = _median_seconds(spec) if timed and first_run <= LONG else first_run
        # the bytes left at its end are its results
        costs.append(KernelCosts(seconds, max(totals) - max(totals[-1], 0)))
    return costs


def _run_between_marks(spec: KernelSpec) -> float | None:
    """Runs a kernel between two marks in the allocator's events; returns its seconds.

    None if it fails.
    """
    prepared = result = seconds = None
    with contextlib.suppress(Exception):
        prepared = spec.prepared()
    _mark()
    if prepared is not None:
        operator, args, kwargs = prepared
        # values that it rejects, such as a matrix without an inverse
        with contextlib.suppress(Exception):
            start = time.perf_counter()
            result = operator(*args, **kwargs)
            seconds = time.perf_counter() - start
    _mark()
    del result
    return seconds


def _mark() -> None:
    torch.empty(MARK, dtype=torch.uint8)


def _median_seconds(spec: KernelSpec) -> float:
    operator, args, kwargs = spec.prepared()
    times: list[float] = []
    while len(times) < RUNS and sum(times) < SECONDS:
        start = time.perf_counter()
        operator(*args, **kwargs)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _on_accelerator(
    specs: Sequence[KernelSpec], device: torch.device, timed: bool
) -> list[KernelCosts | None]:
    if not devices.counts_memory(device):
        # its kernels are estimated
        return [None] * len(specs)
    device = devices.indexed(device)
    with torch.accelerator.device_index(device.index):
        running = each("running kernels", specs)
        costs = [_run_on_accelerator(spec, device, timed) for spec in running]
        # segments of sizes that no step asks for, which would stay reserved
        devices.release_cached(device)
    return costs


def _run_on_accelerator(spec: KernelSpec, device: torch.device, timed: bool) -> KernelCosts | None:
    try:
        operator, args, kwargs = spec.prepared()
        clear_blas_workspaces()
        before = devices.allocated(device)
        operator(*args, **kwargs)
        devices.synchronize(device)
        held_by_library = max(devices.allocated(device) - before, 0)
        devices.reset_peak(device)
        result = operator(*args, **kwargs)
        devices.synchronize(device)
        workspace = devices.peak(device) - devices.allocated(device)
        del result
    except Exception:
        return None
    runs = RUNS if timed else 1
    start = time.perf_counter()
    for _ in range(runs):
        operator(*args, **kwargs)
    devices.synchronize(device)
    return KernelCosts((time.perf_counter() - start) / runs, workspace, held_by_library)
