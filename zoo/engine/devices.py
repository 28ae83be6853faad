"""Random streams (generators), memory statistics and synchronization of any kind of device.

A device's own module is queried (`torch.cuda`, `torch.xpu`, `torch.npu`), or `torch.accelerator`
where the module lacks a function. No device names are hard-coded: a missing capability is refused
when it is needed, by an error with the device's name.

A kernel draws from the generator among its arguments, or from the default stream of each device
among them. A recording keeps the states before kernels, so that their replays draw the same
numbers. That works for any device whose stream can be read and set; for others the result is kept.
A state of the CPU's takes 5 KB, packed 2.5 KB. So a segment keeps one: a kernel that continues
where another in the segment ended is replayed after that one, and one that drew nothing needs none.
The first draws in a segment, as long as they take fewer bytes than a state, are kept themselves.
"""

import contextlib
import ctypes
import functools
import operator
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Generator, Tensor
from torch.autograd.profiler import profile

from zoo._torch import (
    Args,
    DisableTorchDispatch,
    Kwargs,
    has_expandable_segments,
    is_profiling,
    note_profiling,
)
from zoo.errors import ArgumentError, RecomputeError, nearest

# bytes of a state of the CPU's generator, and of its fields before and behind the words
SIZE, HEAD, TAIL = 5056, 24, 40
# bytes of a packed state
PACKED_SIZE = (SIZE - HEAD - TAIL) // 2 + HEAD + TAIL
# where Linux says how much memory there is, and how much a container may take
MEMINFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def accelerator() -> str | None:
    """Names the kind of device that this torch has beside the CPU: cuda, xpu, ...; or None."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def accelerator_here() -> str | None:
    """Names the accelerator if one is present and counts its memory; else None."""
    kind = accelerator()
    return kind if kind is not None and counts_memory(torch.device(kind)) else None


def nearest_device(name: str, names: Iterable[str]) -> str:
    """Returns ' Did you mean cuda?' for an unknown device name; "gpu" means the accelerator."""
    words = name.lower().replace(":", " ").split()
    if {"gpu", "nvidia", "accelerator"} & set(words):
        return f" Did you mean {accelerator() or 'cuda'}?"
    return nearest(name, names)


def devices_in_use() -> list[torch.device]:
    """Lists the accelerator's devices, each with its index; none where it was not used yet."""
    kind = accelerator()
    if kind is None or not _is_in_use(torch.get_device_module(kind)):
        return []
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def is_available(kind: str) -> bool:
    """Returns whether torch finds a device of a kind here."""
    module = _module(torch.device(kind))
    return module is not None and bool(module.is_available())


def name_of(kind: str) -> str:
    """Returns the product name of the current device of a kind; '' for the CPU, or if unknown."""
    name = getattr(_module(torch.device(kind)), "get_device_name", str)
    return str(name())


def uuid_of(kind: str) -> str:
    """Returns the identity of the current device of a kind; '' where it has none."""
    properties = getattr(_module(torch.device(kind)), "get_device_properties", int)
    return str(getattr(properties(), "uuid", ""))


def _is_in_use(module: Any) -> bool:
    # without `is_initialized` an available device counts as in use
    asked = getattr(module, "is_initialized", None) or module.is_available
    return bool(asked())


def indexed(device: torch.device) -> torch.device:
    """Returns a device with its index: the current one where it has none and is in use."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    module = _module(device)
    if module is None or not _is_in_use(module):
        return device
    current = getattr(module, "current_device", torch.accelerator.current_device_index)
    return torch.device(device.type, current())


class StreamOfModule:
    """The random stream of a device whose module gets and sets its state, without generators."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device

    def get_state(self) -> Tensor:
        """Returns the state."""
        with DisableTorchDispatch():
            state: Tensor = self.module.get_rng_state(self.device)
            return state

    def set_state(self, state: Tensor) -> None:
        """Sets the state."""
        with DisableTorchDispatch():
            self.module.set_rng_state(state, self.device)


RandomStream = Generator | StreamOfModule


def default_stream(device: torch.device) -> RandomStream | None:
    """Returns the stream for kernels on a device that get no generator; None if unknown."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = _module(device)
    if hasattr(module, "init") and not _is_in_use(module) and module.is_available():
        # there are no generators before, and a stream must keep its identity
        module.init()
    device = indexed(device)
    generators = getattr(module, "default_generators", ())
    if device.index is not None and device.index < len(generators):
        generator: Generator = generators[device.index]
        return generator
    has_state = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
    return _stream_of_module(device) if has_state else None


@functools.cache
def _stream_of_module(device: torch.device) -> StreamOfModule:
    # one object per device, since streams are compared by identity
    return StreamOfModule(_module(device), device)


def restorable_stream(device: torch.device) -> RandomStream:
    """Returns the default stream of a device.

    Raises:
        ArgumentError: its state cannot be read and set.
    """
    stream = default_stream(device)
    if stream is None:
        raise ArgumentError(
            f"random numbers on {device} cannot be drawn again: torch.{device.type} has neither "
            "default_generators nor get_rng_state and set_rng_state. Plan, compare and verify on "
            "another device; training by a plan works here and keeps what was drawn"
        )
    return stream


def synchronize(device: torch.device) -> None:
    """Waits until all work on a device is done."""
    if device.type == accelerator():
        torch.accelerator.synchronize(device)
    elif device.type not in ("cpu", "meta"):
        _device_function(device, "synchronize")()


def counts_memory(device: torch.device) -> bool:
    """Returns whether a device is present and counts its bytes in use and their peak."""
    module = _module(device)
    if device.type in ("cpu", "meta") or module is None:
        return False
    if hasattr(module, "max_memory_allocated"):
        return bool(module.is_available())
    if device.type != accelerator():
        return False
    try:
        # statistics are empty before the first allocation
        return bool(_statistics(device) or _statistics(torch.empty(1, device=device).device))
    except RuntimeError:
        return False


def _statistics(device: torch.device) -> dict[str, Any]:
    return torch.accelerator.memory_stats(device)


def check_counts_memory(device: torch.device) -> None:
    """Raises ArgumentError for a device that is absent or does not count its memory."""
    if device.type not in ("cpu", "meta") and not is_available(device.type):
        raise ArgumentError(f"torch finds no {device.type} here; {device} cannot be measured")
    if not counts_memory(device):
        raise ArgumentError(
            f"memory is measured on the CPU and on devices that count it; got {device}, whose "
            f"peak neither torch.{device.type} nor torch.accelerator has. Plan for it by the "
            "bytes of tensors instead: zoo.plan and zoo.track need none of this"
        )


def allocated(device: torch.device) -> int:
    """Returns the bytes in use on a device."""
    return int(_device_function(device, "memory_allocated")())


def peak(device: torch.device) -> int:
    """Returns the most bytes in use on a device since `reset_peak`."""
    return int(_device_function(device, "max_memory_allocated")())


def reserved_peak(device: torch.device) -> int | None:
    """Returns the most bytes that a device's allocator reserved since `reset_peak`.

    None on the CPU, which reserves nothing, and for a device that does not count them.
    """
    if not counts_memory(device):
        return None
    try:
        return int(_device_function(device, "max_memory_reserved")())
    except ArgumentError:
        return None


def reset_peak(device: torch.device) -> None:
    """Restarts `peak` and `reserved_peak` at the bytes that are in use and reserved now."""
    _device_function(device, "reset_peak_memory_stats")()


def release_cached(device: torch.device) -> None:
    """Releases the memory that a device's allocator has cached, if its module has `empty_cache`."""
    getattr(_module(device), "empty_cache", lambda: None)()


def splits_all_blocks(device: torch.device) -> bool:
    """Returns whether a device is in use and its allocator can split all blocks.

    That is so with `PYTORCH_ALLOC_CONF=expandable_segments:True`.
    """
    is_here = device.type == accelerator() and device in devices_in_use()
    return is_here and has_expandable_segments(device)


def total_bytes(device: torch.device) -> int:
    """Returns the bytes of a device's memory."""
    return int(_device_function(device, "mem_get_info", "get_memory_info")()[1])


def free_bytes(device: torch.device) -> int:
    """Returns the bytes on a device that are free, or cached by torch and not in use."""
    free, _ = _device_function(device, "mem_get_info", "get_memory_info")()
    return int(free) + int(_device_function(device, "memory_reserved")()) - allocated(device)


def free_host_bytes(meminfo: Path = MEMINFO, group: Path = CONTROL_GROUP) -> int:
    """Returns the bytes of host memory that this process may take: free, or caches of files.

    Linux gives those up when memory is asked for, and they fill what is free. A container's limit
    counts, as files of control groups of version 2 tell it.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, KeyError, ValueError):
        free = _table(meminfo)["MemAvailable:"] * 1024
    # without a limit it is "max"
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used + _table(group / "memory.stat")["inactive_file"])
    return max(free, 0)


def _table(file: Path) -> dict[str, int]:
    """Reads a file of the kernel with a name and a number in each line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


def _module(device: torch.device) -> Any:
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def _device_function(device: torch.device, *names: str) -> Callable[[], Any]:
    """Returns the first of some functions that the device's module has, bound to the device.

    Raises:
        ArgumentError: it has none of them.
    """
    modules = [_module(device)]
    if device.type == accelerator():
        modules.append(torch.accelerator)
    for name in names:
        for module in modules:
            if (function := getattr(module, name, None)) is not None:
                return functools.partial(function, device)
    raise ArgumentError(f"{device} cannot be measured: torch.{device.type} has no {names[0]}")


# random streams, and the states that they had
Draws = list[tuple[RandomStream, Tensor]]


class PackedState:
    """A random state in half its bytes: torch stores each 32-bit word of the CPU's in 64 bits.

        24 bytes    624 words of 64 bits, of which the high halves are zero    40 bytes

    States of other devices are not packed.
    """

    __slots__ = ("capture", "ends", "words")

    def __init__(self, state: Tensor, device: torch.device) -> None:
        self.capture = current_capture(device)
        self.words: Tensor = state
        self.ends: tuple[bytes, bytes] | None = None
        if device.type == "cpu" and state.numel() == SIZE and _is_packable():
            with DisableTorchDispatch():
                self.words = state.view(torch.int32)[::2].clone()
            start = state.data_ptr()
            self.ends = (
                ctypes.string_at(start, HEAD),
                ctypes.string_at(start + SIZE - TAIL, TAIL),
            )

    def state(self) -> Tensor:
        """Returns the unpacked state."""
        if self.ends is None:
            return self.words
        with DisableTorchDispatch():
            state = self.words.to(torch.int64).bitwise_and_(0xFFFFFFFF).view(torch.uint8)
        start = state.data_ptr()
        head, tail = self.ends
        ctypes.memmove(start, head, HEAD)
        ctypes.memmove(start + SIZE - TAIL, tail, TAIL)
        return state


@functools.cache
def _is_packable() -> bool:
    """Returns whether this torch lays states out as `PackedState` describes."""
    state = torch.Generator().manual_seed(2**63 + 1).get_state()
    with DisableTorchDispatch():
        return not state[HEAD : SIZE - TAIL].view(torch.int32)[1::2].any().item()


# stands for a graph that torch does not tell
_UNKNOWN_GRAPH = object()


def is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream of a device is captured into a graph."""
    return bool(getattr(_module(device), "is_current_stream_capturing", bool)())


def current_capture(device: torch.device) -> Any:
    """Returns the graph that the current stream of a device is captured into; None without."""
    if not is_capturing(device):
        return None
    tells = getattr(_module(device).CUDAGraph, "get_currently_capturing_graph", None)
    return _UNKNOWN_GRAPH if tells is None else tells()


class _WholeStep:
    """Whether a capture is one of forward and backward, so that both lie in the same graph."""

    is_captured = False


@contextlib.contextmanager
def whole_step_captured() -> Iterator[None]:
    """Says that what is captured inside of the block is a whole training step.

    Elsewhere the backward may be captured into a graph of its own, as by
    `torch.cuda.make_graphed_callables`. In a graph offsets count from where its replay begins, and
    those of one graph say nothing in another.
    """
    around, _WholeStep.is_captured = _WholeStep.is_captured, True
    try:
        yield
    finally:
        _WholeStep.is_captured = around


# random streams, and the states that a segment keeps of them
PackedDraws = list[tuple[RandomStream, PackedState]]


def draws_of(args: Args, kwargs: Kwargs) -> Draws | None:
    """Returns the state of each stream that a kernel may draw from; None if one is unknown.

    So is that of a stream in a graph which the backward may not be in.
    """
    values = (*args, *kwargs.values())
    generators: list[RandomStream] = [value for value in values if isinstance(value, Generator)]
    if not generators and args and isinstance(args[0], Tensor) and args[0].is_cpu:
        generators = [torch.default_generator]
    devices = () if generators else _devices(args, kwargs)
    streams = [*generators, *map(default_stream, devices)]
    is_captured = any(is_capturing(stream.device) for stream in streams if stream is not None)
    if is_captured and not _WholeStep.is_captured:
        return None
    try:
        states = [(stream, stream.get_state()) for stream in streams if stream is not None]
    except RuntimeError:
        # a device that cannot read a state in a capture; CUDA does, in torch 2.11 and 2.14
        if is_captured:
            return None
        raise
    return states if len(states) == len(streams) else None


def _devices(args: Args, kwargs: Kwargs) -> Iterable[torch.device]:
    values = [*args, *kwargs.values()]
    parts = [part for value in values if isinstance(value, (list, tuple)) for part in value]
    devices = {value.device for value in (*values, *parts) if isinstance(value, Tensor)}
    devices |= {value for value in values if isinstance(value, torch.device)}
    return devices or {torch.get_default_device()}


def is_same_state(state: Tensor, other: Tensor) -> bool:
    """Compares states of random streams, which no dispatch mode sees."""
    with DisableTorchDispatch():
        return torch.equal(state, other)


class SetAsideState:
    """The state of a stream, set aside from `begin` until a call restores it.

    Setting a state counts as seeding, after which cuDNN's networks draw anew to make the state of
    their dropout. So the stream of a CUDA device gets another state object, and then its own again,
    which was not written.
    """

    def __init__(self, stream: RandomStream) -> None:
        self.stream = self.written = stream
        self.own: Any = None
        if _swaps_state(stream):
            self.own = stream.graphsafe_get_state()
            self.written = stream.clone_state()
        else:
            self.state = stream.get_state()

    def begin(self) -> None:
        """Gives the stream another state object, to be written from now on."""
        if self.own is not None:
            self.stream.graphsafe_set_state(self.written)  # type: ignore[union-attr, arg-type]

    def write(self, state: Tensor) -> None:
        """Sets another state."""
        self.begin()
        self.written.set_state(state)

    def __call__(self) -> None:
        """Restores the state."""
        if self.own is None:
            self.stream.set_state(self.state)
        else:
            self.stream.graphsafe_set_state(self.own)  # type: ignore[union-attr]


def _swaps_state(stream: RandomStream) -> TypeGuard[Generator]:
    """Returns whether a stream takes another state object, which a capture does not allow."""
    is_of_cuda = isinstance(stream, Generator) and stream.device.type == "cuda"
    return is_of_cuda and not torch.cuda.is_current_stream_capturing()


# held by a thread that notes what it draws from streams that all share, or draws it again: a replay
# sets a stream to an earlier state and back, and no other forward may draw between the two
DRAWING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=DRAWING._at_fork_reinit)  # type: ignore[attr-defined]


def release_draws() -> None:
    """Has this thread hold `DRAWING` no longer; an interrupt at the end of a block leaves it held.

    Python raises that there if something traces its lines, such as a debugger.
    """
    while DRAWING._is_owned():  # type: ignore[attr-defined]
        DRAWING.release()


def draw_as(draws: PackedDraws, restore: dict[int, SetAsideState]) -> None:
    """Sets streams to recorded states; `restore` gets their own states, by the ids of streams.

    Raises:
        RecomputeError: forward and backward are not captured into the same graph.
    """
    for stream, packed in draws:
        if packed.capture is not current_capture(stream.device):
            raise RecomputeError(
                f"a kernel has drawn random numbers on {stream.device} and its replay is captured "
                "into a CUDA graph that the forward is not in, or the other way round, so that it "
                "would draw others. Capture forward and backward together, as "
                "zoo.make_graphed_step does"
            )
        if id(stream) not in restore:
            restore[id(stream)] = SetAsideState(stream)
        restore[id(stream)].write(packed.state())


def count_as_seeded(device: torch.device) -> None:
    """Makes cuDNN's networks create the state of their dropout anew, as after a seed."""
    stream = restorable_stream(device)
    stream.set_state(stream.get_state())


def read_streams() -> dict[str, Any]:
    """Reads the state of every global random stream in use, by name."""
    return {name: read() for name, read, _ in _global_streams()}


def set_streams(states: Mapping[str, Any]) -> None:
    """Sets the states that `read_streams` read."""
    for name, _, write in _global_streams():
        if name in states:
            write(states[name])


@contextlib.contextmanager
def random_state_restored() -> Iterator[dict[str, Any]]:
    """Yields the states of all global random streams and restores them at the end."""
    states = read_streams()
    aside = {str(device): SetAsideState(restorable_stream(device)) for device in devices_in_use()}
    try:
        for own_state in aside.values():
            own_state.begin()
        yield states
    finally:
        for restore in aside.values():
            restore()
        set_streams({name: state for name, state in states.items() if name not in aside})


def _global_streams() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    """Yields each global random stream in use: its name, and functions to get and set its state."""
    yield "cpu", torch.get_rng_state, torch.set_rng_state
    yield "python", random.getstate, random.setstate
    for device in devices_in_use():
        stream = restorable_stream(device)
        yield str(device), stream.get_state, stream.set_state
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"].random
        yield "numpy", numpy.get_state, numpy.set_state


class ProfilerError(ArgumentError):
    """Another profiler is at work: a second one would end it."""


@contextlib.contextmanager
def cpu_events() -> Iterator[list[tuple[int, int, int]]]:
    """Yields a list that gets the CPU allocator's events: `time.time_ns`, address, bytes.

    Raises:
        ProfilerError: torch's profiler is at work.
    """
    if is_profiling():
        raise ProfilerError(
            "memory on the CPU is measured by torch's profiler, which is at work already: put "
            "the block outside of it, and not inside of another; where a plan for a budget is "
            "made at the first training step, run that step before"
        )
    events: list[tuple[int, int, int]] = []
    profiler: Any = profile(use_cpu=True, profile_memory=True)
    try:
        with profiler:
            yield events
    finally:
        # torch does not where memory ran out as the profiler ended, of which an error is on its way
        note_profiling(False)
        results = profiler.kineto_results
        # a stack, since a deep model's backward nests deeper than Python recurses
        waiting = [] if results is None else [*reversed(results.experimental_event_tree())]
        while waiting:
            event = waiting.pop()
            waiting.extend(reversed(event.children))
            fields = event.extra_fields
            if event.name == "[memory]" and fields.device.type == "cpu":
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        events.sort(key=operator.itemgetter(0))
