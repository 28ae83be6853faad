"""A model's inputs at any size, made from a sample or by a function of the user's.

On the meta device they take no memory. Elsewhere the sample's values are repeated, so that labels
and tokens stay in range.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.errors import ArgumentError
from zoo.invocation import Inputs, Invocation

Vary = int | tuple[int, ...] | Callable[[int], Inputs]


@dataclass(frozen=True)
class InputSizes:
    """`make` returns the inputs of a size on a device; `start` is the sample's own size."""

    make: Callable[[int, torch.device], Invocation]
    start: int = 1


def input_sizes(sample: Inputs | None, vary: Vary) -> InputSizes:
    """Returns what makes inputs of a size, from a sample's dimensions or by a function.

    Raises:
        ArgumentError: both or neither are given, or the dimensions are not those of every tensor.
    """
    if callable(vary):
        if sample is not None:
            raise ArgumentError("vary= a function makes all inputs; pass no sample beside it")
        return InputSizes(
            lambda size, device: Invocation.of(vary(size)).map(lambda value: _on(value, device))
        )
    if sample is None:
        raise ArgumentError("a sample of the inputs is needed, or vary= a function that makes them")
    given, dims = Invocation.of(sample), vary if isinstance(vary, tuple) else (vary,)
    return InputSizes(
        lambda size, device: given.map(lambda value: _resized(_on(value, device), dims, size)),
        _size(given.tensors, dims),
    )


def _size(tensors: list[Tensor], dims: tuple[Any, ...]) -> int:
    """Returns the one size of these dimensions in all tensors."""
    for dim in dims:
        wrong = isinstance(dim, bool) or not isinstance(dim, int)
        for value in tensors:
            if wrong or not -value.ndim <= dim < value.ndim:
                raise ArgumentError(
                    f"vary={dim!r} is no dimension of an input of shape {tuple(value.shape)}; "
                    "where inputs differ, pass vary= a function of the size that makes them"
                )
    sizes = sorted({int(value.shape[dim]) for value in tensors for dim in dims})
    if len(sizes) != 1 or sizes[0] < 1:
        raise ArgumentError(
            f"dimensions {', '.join(map(str, dims))} of the inputs have sizes {sizes}; they must "
            "be one above 0. Where they differ, pass vary= a function of the size that makes them"
        )
    return sizes[0]


def _resized(value: Tensor, dims: tuple[int, ...], size: int) -> Tensor:
    """Returns a tensor of another size with the values of this one, repeated, and its layout."""
    source = value.detach()
    for dim in dims:
        repeated = torch.arange(size, device=value.device) % value.shape[dim]
        source = source.index_select(dim, repeated)
    layout = sorted(range(value.ndim), key=value.stride, reverse=True)
    resized = torch.empty_permuted(source.shape, layout, dtype=value.dtype, device=value.device)
    return resized.copy_(source).requires_grad_(value.requires_grad)


def _on(value: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device, of zeros where it comes from the meta device."""
    is_new = value.is_meta and device.type != "meta"
    moved = torch.zeros_like(value, device=device) if is_new else value.detach().to(device)
    return moved.requires_grad_(value.requires_grad)
