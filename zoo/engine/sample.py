"""A few numbers of each saved tensor, by which a second run is held against the first.

The gradient is that of the first run unless a saved tensor differs: the backward goes through the
nodes of the first run, and takes nothing else from the second. So whatever a second run got wrong
that matters shows here, however it came about. Numbers spread over the tensor are enough: what
goes wrong, goes wrong in most of a tensor. Only on the CPU, where to look at numbers costs no
waiting, and where kernels repeat themselves to the bit.
"""

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

NUMBERS = 16


class _Thread(threading.local):
    on = True


_thread = _Thread()


@contextlib.contextmanager
def without_samples() -> Iterator[None]:
    """Lets second runs differ inside the block, for who compares all there is, on this thread."""
    earlier, _thread.on = _thread.on, False
    try:
        yield
    finally:
        _thread.on = earlier


def sample(tensor: Tensor) -> list[float] | None:
    """Returns some of a tensor's numbers; None where they do not tell.

    They do not for a tensor without history: a kernel may yet write what it has just saved.
    """
    if not _thread.on or type(tensor) is not Tensor or tensor.grad_fn is None:
        return None
    if not tensor.is_cpu:
        return None
    count = tensor.numel()
    if not count or not tensor.dtype.is_floating_point or tensor.layout is not torch.strided:
        return None
    detached = tensor.detach()
    if not _is_dense(detached, count):
        return None
    taken = min(count, NUMBERS)
    found: list[float] = detached.as_strided(
        (taken,), (count // taken,), detached.storage_offset()
    ).tolist()
    return found


def same_numbers(first: list[float] | None, second: list[float] | None) -> bool:
    """Says whether two samples are equal, a NaN being equal to a NaN."""
    if first is None or second is None or first == second:
        return True
    return all(
        one == other or (math.isnan(one) and math.isnan(other))
        for one, other in zip(first, second, strict=True)
    )


def _is_dense(tensor: Tensor, count: int) -> bool:
    """Says whether the numbers lie in one block of memory without gaps, in any order of axes."""
    if tensor.is_contiguous():
        return True
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == count and 0 not in tensor.stride()
