"""A `zoo.checkpoint` option whose budget counts the optimizer of a library's loop."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.policy.goal import Checkpoint


def checkpoint_with(
    model: nn.Module,
    checkpoint: Checkpoint | None,
    optimizer: Optimizer | None,
    options: Mapping[str, Any],
) -> None:
    """Puts an option in force; a budget counts this optimizer, unless the options name one."""
    bounds = (options.get("memory_budget"), options.get("max_overhead"))
    has_budget = checkpoint == "auto" or bounds != (None, None)
    counted = {"optimizer": optimizer} if has_budget and optimizer is not None else {}
    put_in_force(model, checkpoint, **{**counted, **options})
