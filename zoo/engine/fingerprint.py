"""A few numbers of a saved tensor, which its replay must have, too.

A replay calls the same kernels on the same bytes, so it can only differ where code that torch does
not see wrote into a tensor, or where a kernel is not deterministic. Bytes spread over the tensor
show that: what goes wrong, goes wrong in most of a tensor. They are read on the CPU alone, where
reading memory waits for nothing.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from torch import Tensor

from zoo._torch import FakeTensor

PLACES = 4
WIDTH = 16
# bytes that are read at once rather than place by place
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


def fingerprint(tensor: Tensor) -> bytes | None:
    """Returns what `read` has to return for a replay of a tensor; None where bytes do not tell.

    They do not for one that no gradient flows through, which may hold what a kernel leaves
    unwritten or writes after it was saved.
    """
    if not tensor.requires_grad or not tensor.is_cpu or not _thread.on:
        return None
    if isinstance(tensor, FakeTensor) or not tensor.is_contiguous():
        return None
    return read(tensor)


def constant_of(tensor: Tensor) -> bytes | None:
    """Returns the bytes of the number that fills a tensor; b"" where they cannot be read.

    None for one without numbers, which nobody changes unseen.
    """
    if not tensor.is_cpu:
        return b""
    if isinstance(tensor, FakeTensor):
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.itemsize)


def is_still(tensor: Tensor, constant: bytes) -> bool:
    """Says whether a tensor has this number wherever it is read."""
    if not constant or tensor.itemsize != len(constant) or not tensor.numel():
        return False
    if not tensor.is_contiguous():
        return constant_of(tensor) == constant
    size = tensor.nbytes
    found = read(tensor) if size > AT_ONCE else ctypes.string_at(tensor.data_ptr(), size)
    return found == constant * (len(found) // len(constant))


def read(tensor: Tensor) -> bytes:
    """Returns bytes at places spread over a dense tensor."""
    start, size = tensor.data_ptr(), tensor.nbytes
    if size <= AT_ONCE:
        found = ctypes.string_at(start, size)
        # an odd stride takes high and low bytes of numbers in turn
        return found[:: size // (PLACES * WIDTH) | 1] + found[-WIDTH:]
    gap = (size - WIDTH) // (PLACES - 1) // WIDTH * WIDTH
    return b"".join([ctypes.string_at(start + place * gap, WIDTH) for place in range(PLACES)])
