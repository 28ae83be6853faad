"""A module that applies a function.

A plan's blocks begin where modules are called. The repeated part of a forward that calls no module
of its own, such as a chunk of tokens, becomes a block by this one.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


class Apply(nn.Module):
    """Applies a function to inputs; it has no parameters."""

    def forward(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Calls the function."""
        return function(*inputs)
