"""Hooks that a forward registers on tensors which outlive it, registered once.

A second run would register them again, on the same parameter, and the gradient would go through
them twice. What is registered on a tensor made inside needs no care: the second one's is not used.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextlib.contextmanager
def no_new_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Takes back, after the block, the hooks of gradients that it registered on these tensors."""
    before = [(tensor, name, set(_hooks(tensor, name))) for tensor in tensors for name in HOOKS]
    try:
        yield
    finally:
        for tensor, name, numbers in before:
            hooks = _hooks(tensor, name)
            for number in hooks.keys() - numbers:
                del hooks[number]


def _hooks(tensor: Tensor, name: str) -> dict[int, Any]:
    return getattr(tensor, name, None) or {}
