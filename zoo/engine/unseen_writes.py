"""Detects writes that no dispatch mode sees and no version counts: `Tensor.data`, NumPy, C++.

    fingerprint   bytes of a saved tensor, compared with its replay
    sample        bytes of a storage, compared with a later sample
    digest        of all bytes of a slice, whose version counts writes beside it, too
    mark          bytes written into uninitialized memory, which the next write replaces

Each is a few bytes spread over the memory: a replay calls the same kernels on the same bytes, so it
can differ only if code that torch does not see wrote into a tensor, or a kernel is not
deterministic, and then most of the tensor differs. Reading memory of the CPU waits for nothing;
on other devices `replay_check` takes samples.
"""

import contextlib
import ctypes
import functools
import itertools
import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import DisableTorchDispatch, FakeTensor
from zoo.engine.replay_check import CHECKS, sample_of

# a fingerprint is WIDTH bytes from each of POSITIONS positions in a tensor
POSITIONS = 4
WIDTH = 16
# numbers that are read of a tensor that leaves gaps
NUMBERS = 8
# a tensor of at most so many bytes is read whole
AT_ONCE = 1 << 12


class _Thread(threading.local):
    on = True


_thread = _Thread()


@contextlib.contextmanager
def without_fingerprints() -> Iterator[None]:
    """Disables fingerprints on this thread; `verify` compares every bit instead."""
    earlier, _thread.on = _thread.on, False
    try:
        yield
    finally:
        _thread.on = earlier


def fingerprint(tensor: Tensor) -> bytes | Tensor | None:
    """Returns the bytes to compare a tensor's replay with; None where they would prove nothing.

    That is so for a tensor that no gradient flows through: a kernel may leave parts unwritten, or
    write it after it was saved. On an accelerator it is a sample on the device, inside of
    `check_replays`.
    """
    if not tensor.requires_grad or isinstance(tensor, FakeTensor):
        return None
    if not tensor.is_cpu:
        return sample_of(tensor) if CHECKS else None
    return read(tensor) if _thread.on and not tensor.is_nested else None


# makes all marks different
_marks = itertools.count(1)


def new_mark() -> bytes:
    """Returns bytes that no other code writes; read as numbers of any type they are small."""
    number = next(_marks) * 0x9E3779B97F4A7C15 & 0x3F3F3F3F3F3F3F3F
    return number.to_bytes(8, "little")


def write_mark(storage: UntypedStorage, mark: bytes) -> None:
    """Writes a mark into uninitialized memory at the positions of `sample`, and zeros elsewhere.

    Reused memory may hold by chance the bytes that unseen code is about to write; and a program
    that reads uninitialized memory gets the same in a replay. Nothing is written where torch itself
    fills such memory.
    """
    if storage.device.type != "cpu" or _fills_empty_memory():
        return
    start, size = storage.data_ptr(), storage.nbytes()
    if size > AT_ONCE:
        ctypes.memset(start, 0, size)
        for position in range(POSITIONS):
            ctypes.memmove(start + position * _gap(size), mark * 2, WIDTH)
    else:
        ctypes.memmove(start, mark * (size // 8 + 1), size)


def marked_empty(
    size: Sequence[int],
    stride: Sequence[int],
    mark: bytes,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Makes uninitialized memory in a replay, with the mark of the forward."""
    memory = torch.empty_strided(size, stride, dtype=dtype, device=device)
    write_mark(memory.untyped_storage(), mark)
    return memory


def _fills_empty_memory() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )


def sample(storage: UntypedStorage) -> bytes:
    """Returns bytes at positions spread over a storage; b"" where they cannot be read."""
    return read_storage(storage) if storage.device.type == "cpu" else b""


def read_storage(storage: UntypedStorage) -> bytes:
    """Returns bytes at positions spread over a storage that is on the CPU."""
    return read_memory(storage.data_ptr(), storage.nbytes())


def bytes_of(tensor: Tensor) -> bytes | None:
    """Returns bytes at positions spread over a tensor; None where they cannot be read at once."""
    # reading an accelerator's memory waits for all of its work
    if not tensor.is_cpu or type(tensor) is FakeTensor:
        return None
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    if tensor.is_quantized or tensor.is_nested:
        return None
    return read(tensor)


def read(tensor: Tensor) -> bytes:
    """Returns bytes at positions spread over a strided tensor."""
    if tensor.is_contiguous():
        return read_memory(tensor.data_ptr(), tensor.nbytes)
    return _read_as(tensor, tensor.data_ptr())


def read_in(storage: UntypedStorage, like: Tensor) -> bytes | None:
    """Returns what `read` does of a tensor that lies so in a storage; None if it has grown."""
    start = int(like.storage_offset()) * like.itemsize
    if start + _extent(like) * like.itemsize > storage.nbytes():
        return None
    return _read_as(like, storage.data_ptr() + start)


def _read_as(tensor: Tensor, start: int) -> bytes:
    """Returns bytes at positions spread over memory in which a tensor lies that begins there."""
    places = _places(tensor.size(), tensor.stride())
    if places is None:
        return read_memory(start, tensor.nbytes)
    size = tensor.itemsize
    return b"".join([_bytes_at(start + place * size, size) for place in places]) if start else b""


@functools.lru_cache(1 << 10)
def _places(sizes: Sequence[int], strides: Sequence[int]) -> Sequence[int] | None:
    """Returns where numbers spread over a tensor lie, the first and last too, if it leaves gaps.

    None if its numbers lie side by side, in any order, as in `channels_last`.
    """
    count = 1
    for step, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and step != count:
            break
        count *= size
    else:
        return None
    count, places = math.prod(sizes), []
    for part in range(NUMBERS if count else 0):
        index, place = part * (count - 1) // (NUMBERS - 1), 0
        for size, step in zip(reversed(sizes), reversed(strides), strict=True):
            index, along = divmod(index, size)
            place += along * step
        places.append(place)
    return places


# `ctypes.string_at` is a Python function, which takes longer
_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
# to slice it takes less time than four calls
_view_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
FOR_READING = 0x100


def read_memory(start: int, size: int) -> bytes:
    """Returns bytes at positions spread over some memory; b"" where there is none."""
    if not start:
        # tensors of zeros that autograd makes have sizes and no memory
        return b""
    if size <= AT_ONCE:
        content: bytes = _bytes_at(start, size)
        # an odd stride takes high and low bytes of numbers in turn
        return content[:: size // (POSITIONS * WIDTH) | 1] + content[-WIDTH:]
    memory, gap = _view_at(start, size, FOR_READING), _gap(size)
    return b"".join([memory[at : at + WIDTH] for at in range(0, POSITIONS * gap, gap)])


def is_slice(tensor: Tensor) -> bool:
    """Returns whether a plain tensor is a part of its memory, in which its numbers may overlap."""
    return _extent(tensor) * tensor.itemsize < tensor.untyped_storage().nbytes()


def _extent(tensor: Tensor) -> int:
    """Returns how many numbers lie from the first one of a tensor to its last."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def digest(tensor: Tensor) -> int | None:
    """Returns a number for all bytes of a plain tensor; None where they cannot be read at once."""
    if not tensor.is_cpu or type(tensor) is FakeTensor:
        return None
    if not tensor.is_contiguous():
        with DisableTorchDispatch():
            for axis, step in enumerate(tensor.stride()):
                # what is repeated is read once
                tensor = tensor if step else tensor.narrow(axis, 0, 1)
            tensor = tensor.contiguous()
    return hash(_view_at(tensor.data_ptr(), tensor.nbytes, FOR_READING)) if tensor.nbytes else 0


def _gap(size: int) -> int:
    return (size - WIDTH) // (POSITIONS - 1) // WIDTH * WIDTH
