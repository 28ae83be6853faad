"""A few numbers of a saved tensor, which its replay must have, too.

A replay calls the same kernels on the same bytes, so it can only differ where code that torch does
not see wrote into a tensor, or where a kernel does not repeat itself. Bytes spread over the tensor
show that: what goes wrong, goes wrong in most of a tensor. They are read on the CPU alone, where to
look at memory costs no waiting.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

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


class Fingerprint(bytes):
    """Bytes at places spread over a dense tensor."""

    __slots__ = ()

    def matches(self, tensor: Tensor) -> bool:
        """Says whether a tensor has the same bytes."""
        return _read(tensor) == self


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """Returns the fingerprint of a tensor; None where its bytes do not tell.

    They do not for one that no gradient flows through, which may hold what a kernel leaves
    unwritten or writes after it was saved.
    """
    if not _thread.on or not tensor.requires_grad or not tensor.is_cpu:
        return None
    if isinstance(tensor, FakeTensor) or not tensor.is_contiguous():
        return None
    return Fingerprint(_read(tensor))


def constant_of(tensor: Tensor) -> bytes | None:
    """Returns the bytes of the number that fills a tensor; b"" where they cannot be looked at.

    None for one without numbers, which nobody changes unseen.
    """
    if not tensor.is_cpu:
        return b""
    if isinstance(tensor, FakeTensor):
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.itemsize)


def is_still(tensor: Tensor, constant: bytes) -> bool:
    """Says whether a tensor has this number wherever it is looked at."""
    if not constant or tensor.itemsize != len(constant) or not tensor.numel():
        return False
    if not tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), tensor.itemsize) == constant
    found = _read(tensor)
    return found == constant * (len(found) // len(constant))


def _read(tensor: Tensor) -> bytes:
    start, size = tensor.data_ptr(), tensor.nbytes
    if size <= PLACES * WIDTH:
        return ctypes.string_at(start, size)
    gap = (size - WIDTH) // (PLACES - 1) // WIDTH * WIDTH
    if size <= AT_ONCE:
        found = ctypes.string_at(start, size)
        return b"".join([found[place * gap : place * gap + WIDTH] for place in range(PLACES)])
    return b"".join([ctypes.string_at(start + place * gap, WIDTH) for place in range(PLACES)])
