"""`zoo.plan` and `zoo.frontier`: what a training step of any model would take, before there is one.

The model may be on the meta device, its inputs too; it is afterwards what it was.
"""

import torch
from torch import nn

from zoo.entry import Inputs, Invocation, Loss, check_loss
from zoo.errors import ArgumentError
from zoo.measure.optimizer import MakeOptimizer, OptimizerBytes
from zoo.plan_frontier import Frontier
from zoo.plan_report import PlanReport
from zoo.planning import Budget, Prospect, check_bounds
from zoo.tracing.entry import Entry


def plan(
    model: nn.Module,
    inputs: Inputs,
    *,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
) -> PlanReport:
    """Finds the plan of least time whose training step keeps to a budget in bytes.

    `inputs` are what the model is called with: a tensor, a tuple of arguments or a dict of keyword
    arguments, also of meta tensors, which take no memory. Targets are among them where the model
    takes them: `(tokens, targets)` for GPT-2, `(tokens, None, targets)` for an LSTM, `{"input_ids":
    tokens, "labels": tokens}` for transformers, whose loss is then the output of that name. Else
    the loss is outside of the model, and `loss` may be given so that its bytes count: a function of
    what the model returns that knows its targets, `lambda scores: cross_entropy(scores, targets)`;
    targets that are meta tensors count as zeros. Here as wherever zoo takes a loss it is called as
    in `loss(model(x))`: a tuple, dict or dataclass that the model returns is its one argument.

    `memory_budget` is the peak of the whole step: bytes, "8GiB", "8GB", "device" for what is free
    there, or a fraction of what keeping everything takes, `0.5`. Instead, `max_overhead=0.2` asks
    for the least memory in at most 1.2 times the baseline's time.

    `optimizer` makes the optimizer whose state is counted, AdamW if not said; None counts none.
    A step is counted that begins without gradients. One that accumulates them over several calls,
    or zeroes them in place (`zero_grad(set_to_none=False)`), has them in the forward, too: take
    `report.fixed.gradients` off the budget. Under autocast the copies of weights in its cache are
    not counted; `torch.autocast(..., cache_enabled=False)` keeps none.
    `device` plans for a device that may not be here ("a100"; see `zoo.measure.devices`) by its
    peak rates; else each kind of step is timed once, where the model is.

    Raises:
        ArgumentError: no module, one that reads numbers which only a real step has, a loss that
            does not take what the model returns, not one of budget and overhead, or no such form
            of them.
        BudgetError: no plan keeps to the budget, with the least that one needs.
    """
    check_bounds(memory_budget, max_overhead)
    found = look_ahead(model, inputs, optimizer=optimizer, loss=loss, device=device)
    return found.report(memory_budget, max_overhead)


def frontier(
    model: nn.Module,
    inputs: Inputs,
    *,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
) -> Frontier:
    """Returns the best plans by rising peak and falling time, then the classic schemes.

    It is a sequence of points, each with `peak`, `time_ratio`, `plan` and `name`, and can be drawn
    and written: see `Frontier`. Arguments and errors are those of `plan`.
    """
    return look_ahead(model, inputs, optimizer=optimizer, loss=loss, device=device).frontier()


def look_ahead(
    model: nn.Module,
    inputs: Inputs | Invocation,
    *,
    optimizer: MakeOptimizer | OptimizerBytes | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
) -> Prospect:
    """Looks at a model as it would be called with these inputs; arguments are those of `plan`.

    The bytes of an optimizer may be given where they are known: they are those of any inputs.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"planning needs a torch.nn.Module; got {type(model).__name__}")
    if not model.training:
        raise ArgumentError("a plan is for training; call model.train() first")
    check_loss(loss)
    with torch.inference_mode(False), torch.enable_grad():
        found = Entry.of(model, Invocation.of(inputs), loss)
        return Prospect(
            model,
            found.outline,
            found.state,
            optimizer=optimizer,
            loss=found.loss,
            device=device,
        )
