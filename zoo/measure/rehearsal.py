"""One whole training step run for real, to see what a prediction is worth."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.entry import Invocation, Loss, own_loss
from zoo.measure.memory import measure_step, tensors_in
from zoo.measure.optimizer import MakeOptimizer, made_by
from zoo.measure.step import ends_of, root_of


def rehearse(
    model: nn.Module,
    given: Invocation,
    make_optimizer: MakeOptimizer | None,
    loss: Loss | None,
    *,
    first: Invocation | None = None,
    then: Callable[[], object] = lambda: None,
) -> int:
    """Trains a model two steps and returns the peak bytes of the second.

    The first, after which the optimizer has its state, may be on other inputs, such as smaller
    ones; `then` is called between the two. Without a loss that which the model names is the loss,
    or the first output if it is a scalar; else all outputs are given gradients of ones. Without an
    optimizer the step ends with the backward.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # where there is none, or nothing for one, another without state stands in and makes no step
    stands_in = make_optimizer is None or not trained
    optimizer = made_by(
        torch.optim.SGD if stands_in else make_optimizer,  # type: ignore[arg-type]
        trained or [nn.Parameter(torch.empty(0))],
    )

    def step(given: Invocation) -> None:
        # a training loop holds what the model returned, and the loss, until the optimizer steps
        returned = given.on(model)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        own = loss(returned) if loss is not None else own_loss(outputs[0])
        _backward(outputs if own is None else (own,))
        if not stands_in:
            optimizer.step()

    step(first or given)
    then()
    return measure_step(lambda: step(given), model, optimizer, given.tensors).peak


def _backward(outputs: tuple[Any, ...]) -> None:
    ends = [value for value in tensors_in(outputs) if value.requires_grad]
    if ends[0] is outputs[0] and ends[0].ndim == 0:
        torch.autograd.backward(ends[0])
    else:
        # as a loss does, only autograd holds the gradients: a caller's list would to the end
        torch.autograd.backward(root_of(ends_of(ends, ())))
