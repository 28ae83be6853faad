"""`zoo.plan` and `zoo.frontier`: plans for any model before its first step.

The model and its inputs may be on the meta device; the model does not change. `policy.budget` plans
for one process, `api.plan_rank` for one of many.
"""

from typing import Any

import torch
from torch import nn

from zoo.api.checkpoint import outline_of
from zoo.errors import ArgumentError
from zoo.invocation import Inputs, Invocation, check_step, title_of
from zoo.loss import Loss, nothing_trained
from zoo.policy.budget import StepPlanner
from zoo.policy.goal import (
    NO_OFFLOAD,
    Budget,
    Offload,
    Overhead,
    optimal_planner,
    parse_bounds,
)
from zoo.policy.plan_report import Frontier, PlanReport
from zoo.policy.training_step import CountedStep, TrainingStep, check_gathered, outputs_held
from zoo.profiling.optimizer_memory import OptimizerBytes, OptimizerOption
from zoo.profiling.progress import shown


@shown("zoo.plan")
def plan(
    model: nn.Module,
    inputs: Inputs,
    *,
    memory_budget: Budget | None = None,
    max_overhead: Overhead | None = None,
    optimizer: OptimizerOption | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
    optimizer_in_backward: bool = False,
    accumulates: bool = False,
    holds_outputs: bool | None = None,
    forwards: int = 1,
    offload: bool = False,
    host_budget: int | str | None = None,
) -> PlanReport:
    """Finds the plan of least time whose training step keeps to a budget in bytes.

    Args:
        model: in the mode of the training; eval mode is planned for with a warning.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments, real or on the meta
            device. Targets are among them where the model takes them: `(tokens, targets)` for
            GPT-2, `{"input_ids": tokens, "labels": tokens}` for transformers.
        memory_budget: the peak of the whole training step: bytes as an int, `"8GiB"` or `"8G"`
            (2^30 each), `"8GB"` (10^9); a share of the baseline's peak, `0.6` or `"60%"`; or
            `"device"` for what is free where the model is.
        max_overhead: instead, `0.2` or `"20%"` asks for the least memory in at most 1.2 times the
            baseline's time.
        optimizer: whose state is counted: `"adamw"`, `"adam"`, `"sgd"` (with momentum), `"none"` or
            None; a class, a function of the list of parameters, or an optimizer of them.
        loss: a function of the model's output, so that a loss outside of the model counts, and its
            targets as inputs: `lambda logits: cross_entropy(logits, targets)`. It is called as in
            `loss(model(x))`: a tuple, dict or dataclass is its one argument.
        device: by default each kind of kernel is measured where the model is. "a100", say,
            estimates for a device that is not here by its peak rates, without kernel workspaces
            (`zoo.profiling.kernel_costs` lists devices).
        optimizer_in_backward: the step is trained with `zoo.optimizer_in_backward`.
        accumulates: the step begins with all gradients, of earlier backwards or zeroed in place.
        holds_outputs: a variable holds what the model returns until the backward is over, as in
            `outputs = model(x)`: True unless `loss` is given. False for the Trainer of
            transformers: a sixteenth of a step of GPT-2.
        forwards: how many forwards like this one run before the backward, as of both images of a
            pair, or in a roll-out: the peak is that of all.
        offload: what segments start from and what kept steps save may lie on the host until the
            backward; a model that gets the report is offloaded, too. A copy of 32 MiB is measured.
        host_budget: the most bytes there, or "8GiB"; a plan that needs more is left out.

    Raises:
        ArgumentError: a model that reads numbers which only a real step has, a loss that does not
            take its output, both or neither of budget and overhead, or a wrong form of an argument.
        BudgetError: no plan keeps to the budget, with the least that one needs.
    """
    bounds = parse_bounds(memory_budget, max_overhead)
    planner = planner_for(
        model,
        inputs,
        optimizer=optimizer,
        loss=loss,
        device=device,
        optimizer_in_backward=optimizer_in_backward,
        accumulates=accumulates,
        holds_outputs=outputs_held(holds_outputs, loss),
        forwards=forwards,
        offload=Offload.of(offload, host_budget).named_in(None),
    )
    return planner.report(*bounds)


@shown("zoo.frontier")
def frontier(
    model: nn.Module,
    inputs: Inputs,
    *,
    optimizer: OptimizerOption | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
    optimizer_in_backward: bool = False,
    accumulates: bool = False,
    holds_outputs: bool | None = None,
    forwards: int = 1,
    offload: bool = False,
    host_budget: int | str | None = None,
) -> Frontier:
    """Returns the best plans by rising peak and falling time, then the classic schemes.

    Arguments and errors are those of `zoo.plan`. Ctrl-C raises `Interrupted`, whose `found` is the
    `Frontier` so far.
    """
    optimal_planner()
    return planner_for(
        model,
        inputs,
        optimizer=optimizer,
        loss=loss,
        device=device,
        optimizer_in_backward=optimizer_in_backward,
        accumulates=accumulates,
        holds_outputs=outputs_held(holds_outputs, loss),
        forwards=forwards,
        offload=Offload.of(offload, host_budget).named_in(None),
    ).frontier()


def planner_for(
    model: nn.Module,
    inputs: Inputs | Invocation,
    *,
    optimizer: OptimizerOption | OptimizerBytes | None = torch.optim.AdamW,
    loss: Loss | None = None,
    offload: Offload = NO_OFFLOAD,
    measured: bool = True,
    **options: Any,
) -> StepPlanner:
    """Traces a model for these inputs; options are those of `TrainingStep`.

    `measured` runs its kernels where their device is here.
    """
    check_step(model, "planning", loss)
    check_gathered(model)
    training, invocation = TrainingStep(optimizer, loss, **options), Invocation.of(inputs)
    if not isinstance(optimizer, OptimizerBytes):
        training = training.for_model(model)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        shown(title_of(model, tuple(invocation.tensors))),
    ):
        outline = outline_of(model, invocation, loss, is_judged=True)
        step = CountedStep(model, outline, invocation.tensors, training)
        if not step.profile.is_trained:
            raise ArgumentError(nothing_trained(model))
        return StepPlanner(step.measured() if measured else step, offload)
