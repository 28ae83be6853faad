"""Running statistics of torch's norms, and scratch in their place.

In training they are written and not read, so a second run may find anything in them, as long as it
is thrown away afterwards.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

# a count may be divided by; what the others hold is written over or thrown away
STATISTICS = {
    "running_mean": torch.empty_like,
    "running_var": torch.empty_like,
    "num_batches_tracked": torch.zeros_like,
}


def is_norm(module: nn.Module) -> bool:
    """Says whether a module works as one of torch's norms that may have running statistics."""
    return isinstance(module, _NormBase) and type(module).forward.__module__.startswith("torch.")


def moves_statistics(module: nn.Module) -> bool:
    """Says whether a module is such a norm and folds its batch into statistics now."""
    return is_norm(module) and module.training and module._buffers.get("running_mean") is not None


def moves_unseen(module: nn.Module, name: str) -> bool:
    """Says whether a buffer may be one that a norm's kernel writes without bumping a version."""
    return isinstance(module, _NormBase) and module.training and name in STATISTICS


def has_lazy_buffers(module: nn.Module) -> bool:
    """Says whether the first call has yet to make the statistics."""
    return any(buffer is not None and is_lazy(buffer) for buffer in module._buffers.values())


def scratch_statistics_of(buffers: dict[str, Any]) -> dict[str, Tensor]:
    """Returns tensors to be written in the place of the statistics among these buffers."""
    return {
        name: empty(value)
        for name, empty in STATISTICS.items()
        if (value := buffers.get(name)) is not None
    }
