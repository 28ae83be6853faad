"""`zoo.anatomy`: where the memory of a training step goes, with and without a plan."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.checkpointing import Checkpoint
from zoo.entry import Inputs, Invocation, Loss, check_loss
from zoo.errors import ArgumentError
from zoo.measure.optimizer import MakeOptimizer
from zoo.measure.timeline import Timeline, compare
from zoo.plan import Plan
from zoo.tracking import TrainingStep, mean_of
from zoo.verification.records import read_streams, set_streams


@dataclass(frozen=True)
class Anatomy:
    """The timelines of one training step without a plan, and with one where there is one."""

    baseline: Timeline
    planned: Timeline | None = None
    plan: Plan | None = None

    def table(self, holders: int = 10) -> str:
        """Writes what takes how much at the peak, by category, block and tensor."""
        if self.planned is None:
            return self.baseline.table(holders)
        return compare({"baseline": self.baseline, "with the plan": self.planned}, holders)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Writes plan and timelines as JSON."""
        timelines = {"baseline": self.baseline, "planned": self.planned}
        found = {name: json.loads(t.to_json()) if t else None for name, t in timelines.items()}
        return json.dumps({"plan": self.plan, **found})


def anatomy(
    model: nn.Module,
    inputs: Inputs,
    *,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    checkpoint: Checkpoint | None = None,
    device: str | None = None,
) -> Anatomy:
    """Takes a steady training step of a model apart: without a plan and, if there is one, with it.

    The model is left as it is; a copy trains. Its first step is not counted.

    Args:
        model: in training mode. Where it has a plan of its own, that is the plan.
        inputs: what it is called with: a tensor, a tuple or a dict of keyword arguments, real or on
            the meta device.
        optimizer: is called with the list of parameters; None takes no step.
        loss: turns what the model returns into a scalar, as in `zoo.plan`; by default a scalar is
            its own loss, and an output named `loss` too, and of anything else the means of all
            floating tensors are added.
        checkpoint: what `zoo.create` takes, in place of the model's own.
        device: "meta" runs nothing real: fake tensors stand for those of the model's device, the
            CPU's where the model is on the meta device. Meta inputs or parameters say so, too.

    Raises:
        ArgumentError: no module or not in training mode; a plan for what cannot be followed.
    """
    _check(model, device)
    check_loss(loss)
    given = Invocation.of(inputs)
    tensors = [*given.tensors, *model.parameters()]
    is_fake = device == "meta" or any(tensor.is_meta for tensor in tensors)
    run = TrainingStep(model, given, optimizer, loss or mean_of)
    plan = run.plan(checkpoint)
    streams = read_streams()
    try:
        measure = run.predicted if is_fake else run.measured
        planned = measure(plan) if plan is not None else None
        return Anatomy(measure(None), planned, plan if isinstance(plan, Plan) else None)
    finally:
        set_streams(streams)


def _check(model: Any, device: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"an anatomy needs a torch.nn.Module; got {type(model).__name__}")
    if not model.training:
        raise ArgumentError("an anatomy is that of a training step; call model.train() first")
    if device not in (None, "meta"):
        raise ArgumentError(
            f"device={device!r} is neither None nor 'meta'; the step runs where the model is"
        )
