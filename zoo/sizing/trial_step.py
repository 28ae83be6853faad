"""One whole training step run for real, to see what a prediction is worth."""

from typing import Any

import torch
from torch import nn

from zoo.invocation import Invocation, Loss, own_loss
from zoo.profiling.allocator import measure_step, tensors_in
from zoo.profiling.optimizer import MakeOptimizer, made_by
from zoo.profiling.step_profile import ends_of, root_of


def train_twice(
    model: nn.Module, inputs: Invocation, make_optimizer: MakeOptimizer | None, loss: Loss | None
) -> int:
    """Trains a model two steps and returns the peak bytes of the second, which finds all state.

    Without a loss, an output named `loss` or a scalar first output is the loss; else all outputs
    are given gradients of ones. Without an optimizer the step ends with the backward.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make = make_optimizer if trained else None
    # where none steps, an optimizer without state stands in
    optimizer = made_by(make or torch.optim.SGD, trained or [nn.Parameter(torch.empty(0))])

    def step() -> None:
        # a training loop holds what the model returned, and the loss, until the optimizer steps
        returned = inputs.on(model)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        own = loss(returned) if loss is not None else own_loss(outputs[0])
        _backward(outputs if own is None else (own,))
        if make is not None:
            optimizer.step()

    step()
    return measure_step(step, model, optimizer, inputs.tensors).peak


def _backward(outputs: tuple[Any, ...]) -> None:
    ends = [value for value in tensors_in(outputs) if value.requires_grad]
    if ends[0] is outputs[0] and ends[0].ndim == 0:
        torch.autograd.backward(ends[0])
    else:
        # as in a loss, only autograd holds the gradients: a caller's list would to the end
        torch.autograd.backward(root_of(ends_of(ends)))
