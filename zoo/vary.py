"""Inputs of any size, from a sample or from a function of the user's: what `zoo.largest` looks at.

On paper they are meta tensors, which take no memory; for a real step they are filled with the
sample's values, again and again, so that labels and tokens stay in range.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.entry import Inputs, Invocation
from zoo.errors import ArgumentError

Vary = int | tuple[int, ...] | Callable[[int], Inputs]


@dataclass(frozen=True)
class Varied:
    """Makes inputs of a size; `start` is the sample's own."""

    on_paper: Callable[[int], Invocation]
    filled: Callable[[int, torch.device], Invocation]
    start: int = 1


def varied(sample: Inputs | None, vary: Vary) -> Varied:
    """Returns what makes inputs of a size, from a sample's dimensions or by a function.

    Raises:
        ArgumentError: both or neither are given, or the dimensions are not those of every tensor.
    """
    if callable(vary):
        if sample is not None:
            raise ArgumentError("vary= a function makes all inputs; pass no sample beside it")
        return _from_function(vary)
    if sample is None:
        raise ArgumentError("a sample of the inputs is needed, or vary= a function that makes them")
    return _from_sample(Invocation.of(sample), vary)


def _from_function(make: Callable[[int], Inputs]) -> Varied:
    return Varied(
        lambda size: Invocation.of(make(size)).map(_to_meta),
        lambda size, place: Invocation.of(make(size)).map(lambda value: _in_place(value, place)),
    )


def _from_sample(sample: Invocation, vary: Any) -> Varied:
    dims = vary if isinstance(vary, tuple) else (vary,)
    start = _size(sample.tensors, dims)
    return Varied(
        lambda size: sample.map(lambda value: _grown(_to_meta(value), dims, size)),
        lambda size, place: sample.map(lambda v: _grown(_in_place(v, place), dims, size)),
        start,
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


def _grown(value: Tensor, dims: tuple[int, ...], size: int) -> Tensor:
    """Returns a tensor of another size with the values of this one, repeated, and its layout."""
    shape = list(value.shape)
    source = value.detach()
    for dim in dims:
        shape[dim] = size
        if not value.is_meta:
            again = torch.arange(size, device=value.device) % value.shape[dim]
            source = source.index_select(dim, again)
    layout = sorted(range(value.ndim), key=value.stride, reverse=True)
    grown = torch.empty_permuted(shape, layout, dtype=value.dtype, device=value.device)
    if not value.is_meta:
        grown.copy_(source)
    return grown.requires_grad_(value.requires_grad)


def _to_meta(value: Tensor) -> Tensor:
    return value.detach().to("meta").requires_grad_(value.requires_grad)


def _in_place(value: Tensor, place: torch.device) -> Tensor:
    """Returns a real tensor on a device, of zeros where there was none."""
    real = torch.zeros_like(value, device=place) if value.is_meta else value.detach().to(place)
    return real.requires_grad_(value.requires_grad)
