"""Notices writes that no dispatch mode sees and no version counts: `Tensor.data`, NumPy, C++.

    fingerprint   bytes of a saved tensor, for its replay to have, too
    sample        bytes of a storage, for a later look to find again
    mark          bytes written into memory without content, which the next write replaces

Each is a few bytes spread over the memory: a replay calls the same kernels on the same bytes, so it
can differ only where code that torch does not see wrote into a tensor, or where a kernel is not
deterministic, and then most of the tensor differs. Reading memory of the CPU waits for nothing;
elsewhere `replay_check` has samples.
"""

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import FakeTensor
from zoo.engine.replay_check import CHECKS, sample_of

# a fingerprint is bytes from so many places of a tensor, so many at each
PLACES = 4
WIDTH = 16
# bytes of a tensor that are read at once rather than place by place
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
    """Returns what `read` has to return for a replay of a tensor; None where bytes do not tell.

    Of one on an accelerator it returns a sample that stays there, where replays are checked.

    They do not for one that no gradient flows through, which may hold what a kernel leaves
    unwritten or writes after it was saved.
    """
    if not tensor.requires_grad or isinstance(tensor, FakeTensor):
        return None
    if not tensor.is_cpu:
        return sample_of(tensor) if CHECKS else None
    return read(tensor) if _thread.on and tensor.is_contiguous() else None


# so that no two marks are alike
_marks = itertools.count(1)


def new_mark() -> bytes:
    """Returns bytes that no other code writes, which are small numbers of any type."""
    number = next(_marks) * 0x9E3779B97F4A7C15 & 0x3F3F3F3F3F3F3F3F
    return number.to_bytes(8, "little")


def fill(storage: UntypedStorage, mark: bytes) -> None:
    """Writes a mark into memory without content at the places of `sample`, and zeros elsewhere.

    Memory that is used again may hold just what unseen code is about to write; and what
    a program reads there without having written it is the same in a replay. Where torch fills such
    memory, it stays as that left it.
    """
    if storage.device.type != "cpu" or _fills_empty_memory():
        return
    start, size = storage.data_ptr(), storage.nbytes()
    if size > AT_ONCE:
        ctypes.memset(start, 0, size)
        for place in range(PLACES):
            ctypes.memmove(start + place * _gap(size), mark * 2, WIDTH)
    else:
        ctypes.memmove(start, mark * (size // 8 + 1), size)


def filled_empty(
    size: Sequence[int],
    stride: Sequence[int],
    mark: bytes,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns memory without content again, in a replay."""
    found = torch.empty_strided(size, stride, dtype=dtype, device=device)
    fill(found.untyped_storage(), mark)
    return found


def _fills_empty_memory() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )


def sample(storage: UntypedStorage) -> bytes:
    """Returns bytes at places spread over a storage; b"" where they cannot be read."""
    return read_storage(storage) if storage.device.type == "cpu" else b""


def read_storage(storage: UntypedStorage) -> bytes:
    """Returns bytes at places spread over a storage that is on the CPU."""
    return read_memory(storage.data_ptr(), storage.nbytes())


def bytes_of(tensor: Tensor) -> bytes | None:
    """Returns bytes at places spread over a tensor; None where they cannot be read at once."""
    # asked for what is on an accelerator, all of its work would be waited for
    if not tensor.is_cpu or type(tensor) is FakeTensor:
        return None
    # most often plain memory, of which the rest need not be asked
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    if tensor.is_quantized or tensor.is_nested:
        return None
    return read(tensor) if tensor.is_contiguous() else read_storage(tensor.untyped_storage())


def read(tensor: Tensor) -> bytes:
    """Returns bytes at places spread over a dense tensor."""
    return read_memory(tensor.data_ptr(), tensor.nbytes)


# as `ctypes.string_at`, which is a function of Python
_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def read_memory(start: int, size: int) -> bytes:
    """Returns bytes at places spread over some memory; b"" where there is none."""
    if not start:
        # tensors of zeros that autograd makes have sizes and no memory
        return b""
    if size <= AT_ONCE:
        content: bytes = _bytes_at(start, size)
        # an odd stride takes high and low bytes of numbers in turn
        return content[:: size // (PLACES * WIDTH) | 1] + content[-WIDTH:]
    gap = _gap(size)
    return b"".join([_bytes_at(start + place * gap, WIDTH) for place in range(PLACES)])


def _gap(size: int) -> int:
    return (size - WIDTH) // (PLACES - 1) // WIDTH * WIDTH
