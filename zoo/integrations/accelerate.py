"""accelerate: activation checkpointing of a model as it is prepared.

    from zoo.integrations.accelerate import prepare
    model, optimizer, data = prepare(accelerator, model, optimizer, data, memory_budget="8GiB")

The loop stays as it is. `accelerator.save_state` holds the random states of all processes, so that
a run that resumes from one ends with the bits of one that was not stopped.
"""

from typing import Any

import accelerate
from torch import nn
from torch.optim import Optimizer

from zoo.errors import OptimizerError
from zoo.integrations.budget import checkpoint_with
from zoo.optimizer.in_backward import optimizer_in_backward as in_backward
from zoo.policy.goal import Checkpoint


def prepare(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    *others: Any,
    checkpoint: Checkpoint | None = None,
    optimizer_in_backward: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Returns what `accelerator.prepare` does, the model with a plan.

    Args:
        accelerator: as ever.
        model: any module; `accelerator.unwrap_model(model)` is what `zoo.plan_of` takes.
        optimizer: of the model, which a budget counts.
        others: whatever else is to be prepared: batches, schedulers.
        checkpoint: what `zoo.checkpoint` takes, and so are the other options.
        optimizer_in_backward: also updates each parameter in the backward
            (`zoo.optimizer_in_backward`), on one process or sharded, without accumulation.

    Raises:
        OptimizerError: the accelerator accumulates or scales gradients, which are then needed all
            at once, or as `zoo.optimizer_in_backward` does.
        ArgumentError: as `zoo.checkpoint` does.
    """
    if optimizer_in_backward:
        steps, scaler = accelerator.gradient_accumulation_steps, accelerator.scaler
        if steps != 1 or scaler is not None:
            what = "a GradScaler" if scaler is not None else f"gradient_accumulation_steps={steps}"
            raise OptimizerError(
                f"{what} needs all gradients at once, which optimizer_in_backward=True frees one "
                "by one; leave out either"
            )
    checkpoint_with(model, checkpoint, optimizer, options)
    prepared = accelerator.prepare(model, optimizer, *others)
    if optimizer_in_backward:
        in_backward(prepared[0], getattr(prepared[1], "optimizer", prepared[1]))
    return tuple(prepared)
