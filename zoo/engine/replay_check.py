"""Compares recomputed tensors on accelerators with those of the forward, without synchronizing.

On the CPU each replay is checked at once, since reading memory there waits for nothing. Reading an
accelerator's memory waits for all of its work. So a sample of each saved tensor stays there:

    forward      a saved tensor       -> 64 bytes of it, by one kernel
    replay       all of a segment     -> bytes compared with the samples, a flag each, by four
    at the end   flags of all replays -> read once, where the check ends or every n backwards

The check is off by default: its kernels cost time if a step is bound by Python, and each sample
holds an allocator's smallest block (512 bytes on CUDA) until its segment is replayed. A CUDA graph
may capture it; there flags can only be read after the check ends.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zoo._torch import DisableTorchDispatch
from zoo.engine.devices import synchronize
from zoo.engine.tensor_state import is_dense
from zoo.errors import ArgumentError, RecomputeError

# bytes of a tensor that are compared
SAMPLE = 64
OTHER_NUMBERS = (
    "has other numbers than in the forward: code that torch does not see wrote it in place, or a "
    "kernel is not deterministic. Leave that code outside of the segment, or let it write a copy."
)


class TensorDescription(NamedTuple):
    """A replayed tensor that a flag is about, and the operator that made it."""

    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} of {self.operator} on {self.device}"


class SampleComparison(NamedTuple):
    """A replayed tensor, and the sample of the one in the forward."""

    replayed: TensorDescription
    tensor: Tensor
    sample: Tensor


class ReplayCheck:
    """The flags of all replays of some steps.

    Attributes:
        every: after how many backwards they are read; None for the end of the check alone.
    """

    def __init__(self, every: int | None) -> None:
        self.every, self.backwards, self._last = every, 0, -1
        # for what was replayed together, one flag for each byte of its samples
        self._flags: dict[tuple[TensorDescription, ...], Tensor] = {}
        self._lock = threading.Lock()

    def compare(self, compared: list[SampleComparison]) -> None:
        """Compares a segment's replayed tensors on their devices; waits for nothing."""
        by_device: dict[torch.device, list[SampleComparison]] = {}
        for comparison in compared:
            by_device.setdefault(comparison.replayed.device, []).append(comparison)
        with self._lock, torch.inference_mode(False), DisableTorchDispatch():
            for together in by_device.values():
                replayed_bytes = torch.cat([_view(pair.tensor) for pair in together])
                differs = replayed_bytes != torch.cat([pair.sample for pair in together])
                replayed = tuple(pair.replayed for pair in together)
                flags = self._flags.setdefault(replayed, differs)
                if flags is not differs:
                    flags.logical_or_(differs)

    def take(self) -> list[TensorDescription]:
        """Waits for the devices, and returns the tensors that differed since the last call."""
        with self._lock, torch.inference_mode(False), DisableTorchDispatch():
            for device in {replayed[0].device for replayed in self._flags}:
                synchronize(device)
            differing: list[TensorDescription] = []
            by_device: dict[torch.device, list[tuple[TensorDescription, ...]]] = {}
            for replayed in self._flags:
                by_device.setdefault(replayed[0].device, []).append(replayed)
            for every in by_device.values():
                tensors = [tensor for replayed in every for tensor in replayed]
                sizes = [_size(tensor.shape, tensor.dtype) for tensor in tensors]
                flags = torch.cat([self._flags[replayed] for replayed in every]).cpu()
                parts = torch.split(flags, sizes)
                differing += [t for t, part in zip(tensors, parts, strict=True) if part.any()]
            for flags in self._flags.values():
                flags.zero_()
            # autograd may have saved one tensor more than once
            return list(dict.fromkeys(differing))

    def end_backward(self, number: int) -> None:
        """Counts a backward, which may end on several threads, and reads the flags if it is time.

        Raises:
            RecomputeError: a replayed tensor differed.
        """
        if number == self._last:
            return
        self._last = number
        self.backwards += 1
        if self.every is not None and self.backwards % self.every == 0:
            self.check()

    def check(self) -> None:
        """Reads the flags.

        Raises:
            RecomputeError: a replayed tensor differed.
        """
        if differing := self.take():
            more = f" (and {len(differing) - 1} others)" if len(differing) > 1 else ""
            raise RecomputeError(
                f"a replayed tensor {differing[0]}{more} {OTHER_NUMBERS} "
                "torch.use_deterministic_algorithms(True) has kernels that repeat themselves. The "
                "gradients of the backwards since the last check may be wrong."
            )


# the last is in force, on all threads, since a device's backward has its own
CHECKS: list[ReplayCheck] = []


@contextlib.contextmanager
def checking(every: int | None = None) -> Iterator[ReplayCheck]:
    """Compares the replays in the block, and yields the check, whose flags are yet to be read."""
    check = ReplayCheck(every)
    CHECKS.append(check)
    try:
        yield check
    finally:
        CHECKS.remove(check)


@contextlib.contextmanager
def check_replays(*, every: int | None = None) -> Iterator[None]:
    """Compares tensors that are recomputed on accelerators inside of the block with the forward's.

    64 bytes of each are compared on the device; the result is read at the end of the block, and
    with `every=10` after each tenth backward, which waits for the device. Forward and backward must
    both be in the block. On the CPU each recomputation is compared anyway.

    Raises:
        ArgumentError: `every` is no number of backwards.
        RecomputeError: a recomputed tensor differs: after the block, or with `every` by the
            backward, whose gradients may be wrong.
    """
    if every is not None and (type(every) is not int or every < 1):
        raise ArgumentError(f"every= is a number of backwards, 1 at least; got {every!r}")
    with checking(every) as check:
        yield
    check.check()


def sample_of(tensor: Tensor) -> Tensor | None:
    """Returns a sample of a tensor on an accelerator; None for one that is not dense."""
    if not is_dense(tensor) or tensor.is_meta or not tensor.numel():
        return None
    with torch.inference_mode(False), DisableTorchDispatch():
        return _view(tensor).clone()


def _view(tensor: Tensor) -> Tensor:
    """Returns bytes spread over a dense tensor, without a copy.

    An odd stride takes high and low bytes of numbers in turn.
    """
    start, size = tensor.storage_offset() * tensor.itemsize, tensor.nbytes
    count = min(size, SAMPLE)
    stride = 1 if count < SAMPLE else ((size - 1) // (SAMPLE - 1) - 1) | 1
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), start, (count,), (stride,))


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return min(torch.Size(shape).numel() * dtype.itemsize, SAMPLE)
