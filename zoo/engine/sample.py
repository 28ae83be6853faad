"""A few numbers of each saved tensor, by which a second run is held against the first.

The gradient is that of the first run unless a saved tensor differs: the backward goes through the
nodes of the first run, and takes nothing else from the second. So whatever a second run got wrong
that matters shows here, however it came about. Numbers spread over the tensor are enough: what
goes wrong, goes wrong in most of a tensor. Only on the CPU, where to look at numbers costs no
waiting, and where kernels repeat themselves to the bit.
"""

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

NUMBERS = 16
# two masks are more often alike in one place
BITS = 64


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


class _Probe:
    """Counts the references of a tensor that only autograd has, as a segment's hook sees it."""

    def __init__(self) -> None:
        self.references = sys.maxsize

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts."""
        self.references = sys.getrefcount(tensor)
        return tensor


@functools.cache
def references_of_a_fresh_one() -> int:
    """Returns how many references a pack hook counts to a tensor that no Python code has."""
    probe = _Probe()
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device="cpu", requires_grad=True)
        with saved_tensors_hooks(probe.pack, _as_it_is):
            x.exp()
    return probe.references


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def sample(tensor: Tensor, references: int = sys.maxsize) -> list[float] | None:
    """Returns some of a tensor's numbers; None where they do not tell.

    They do not for one without history that an operation made for itself, which nobody else has a
    reference to: the kernel may yet write what it has just saved, or leave parts unwritten.
    """
    if not _thread.on or type(tensor) is not Tensor or not _is_plain(tensor):
        return None
    if tensor.grad_fn is None and references <= references_of_a_fresh_one():
        return None
    count = tensor.numel()
    detached = tensor.detach()
    size, stride = (count, 1) if _is_dense(detached, count) else _longest_axis(detached)
    taken = min(size, BITS if tensor.dtype is torch.bool else NUMBERS)
    found: list[float] = detached.as_strided(
        (taken,), (size // taken * stride,), detached.storage_offset()
    ).tolist()
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Says whether it has numbers, in memory, that can be looked at."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_complex() or tensor.is_quantized)
        and not tensor._is_zerotensor()
        and tensor.numel() > 0
    )


def _longest_axis(tensor: Tensor) -> tuple[int, int]:
    """Returns the size and the stride of the axis along which most numbers lie."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return max(((size, stride) for size, stride in axes if stride), default=(1, 1))


def same_numbers(first: list[float] | None, second: list[float] | None) -> bool:
    """Says whether two samples are equal, a NaN being equal to a NaN."""
    if first is None or second is None or first == second:
        return True
    return all(
        one == other or (math.isnan(one) and math.isnan(other))
        for one, other in zip(first, second, strict=True)
    )


def same_values(one: Tensor, other: Tensor) -> bool:
    """Says whether two tensors are equal, a NaN being equal to a NaN."""
    if torch.equal(one, other):
        return True
    alike = one.shape == other.shape and one.dtype == other.dtype and one.is_floating_point()
    return alike and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _is_dense(tensor: Tensor, count: int) -> bool:
    """Says whether the numbers lie in one block of memory without gaps, in any order of axes."""
    if tensor.is_contiguous():
        return True
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == count and 0 not in tensor.stride()
