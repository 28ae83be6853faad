"""A module that applies a function.

A plan's blocks begin where modules are called. The repeated part of a forward that calls no module
of its own, such as a chunk of tokens, becomes a block by this one.
"""

from collections.abc import Callable

from torch import nn

from zoo._torch import PyTree


class Apply(nn.Module):
    """Applies a function to inputs; it has no parameters."""

    def forward(self, function: Callable[..., PyTree], *inputs: PyTree) -> PyTree:
        """Calls the function."""
        return function(*inputs)
