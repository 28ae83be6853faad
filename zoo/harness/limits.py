"""Bounds what a cell may take, and tells memory that ran out from any other failure.

torch has a cap for CUDA's allocator and none for the CPU's. So `memory_limit` bounds

    device   what                                                          by
    cpu      private writable memory of the process, beyond what it had    RLIMIT_DATA, Linux only
             when the cell began: tensors, and also Python objects,
             libraries' own buffers, stacks of threads, freed blocks that
             the C library keeps
    cuda     what torch's caching allocator reserves on the device; not    torch's own cap
             the driver's context, nor memory on the host

Either is more than the peak of the tensors: ResNet-18, whose step peaks at 145 MiB, ends at 200
MiB and below and runs from 220 MiB on. RLIMIT_AS would count every mapped library, gigabytes with
CUDA's; the resident set cannot be limited without rights that a test runner lacks.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zoo.errors import ConfigError
from zoo.units import format_bytes

# how libraries below torch say it; torch and Python have exceptions of their own
WORDS = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "could not create a memory object",
    "alloc_failed",
)
# a thread whose stack does not fit; without a limit it is the number of threads that was too much
LIMITED_WORDS = ("resource temporarily unavailable",)


def limited(size: int | None, device: str) -> AbstractContextManager[None]:
    """Bounds the memory of this process to `size` bytes within a block, as said above.

    Where it does not do, allocators raise; `ran_out` knows by what.
    """
    if size is None:
        return nullcontext()
    return _limited_cuda(size) if device == "cuda" else _limited_data(size)


def check_limit(size: int | str | None, device: str) -> None:
    """Raises ConfigError where the memory of a process cannot be bounded."""
    if size is not None and device == "cpu" and sys.platform != "linux":
        raise ConfigError(
            f"memory_limit on the CPU needs Linux; this is {sys.platform}. Leave it out"
        )


def ran_out(error: BaseException | None, limit: int | None = None) -> bool:
    """Says whether an error, or one that led to it, is that there was no memory."""
    words = WORDS if limit is None else WORDS + LIMITED_WORDS
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words):
            return True
        error = error.__cause__
    return False


def too_much(error: BaseException, limit: int | None) -> str:
    """Says in a sentence that memory ran out."""
    if limit is not None:
        return f"needs more than its memory_limit of {format_bytes(limit)}"
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"needs more memory than there is ({words[:200]}); a smaller batch_size needs less"


def kills() -> int:
    """Counts the processes that the system has ended so far because memory ran out; 0 unknown."""
    counters = Path("/proc/vmstat")
    lines = counters.read_text().splitlines() if counters.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def be_killed_first() -> None:
    """Has the system, when memory runs out, end this process and not the one that waits for it."""
    score = Path("/proc/self/oom_score_adj")
    if score.is_file():
        score.write_text("1000")


@contextmanager
def _limited_data(size: int) -> Iterator[None]:
    resource: Any = import_module("resource")  # Windows has none

    # threads that torch starts later would count their stacks, 8 MiB each, against the cell
    torch.ones(1 << 17).add_(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_private_bytes() + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def _limited_cuda(size: int) -> Iterator[None]:
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min(size / total, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _private_bytes() -> int:
    """Returns the process's private writable memory in bytes, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))
