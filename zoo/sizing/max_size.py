"""The largest batch, sequence or volume whose whole training step fits a memory budget.

Lightning's batch size finder tries sizes until one runs out of memory. That needs the device, finds
a size near the limit, and does not work for another device or less memory. Here sizes are searched
by predicted bytes (`zoo.sizing.size_estimate`); then a copy of the model trains at the size found,
if there is room for it, to confirm the prediction. The logger "zoo.largest" names at level INFO
each size that is evaluated.
"""

import functools
import logging
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch
from torch import nn

from zoo.api.track import CopiedStep, mean_of
from zoo.engine.devices import counts_memory, random_state_restored
from zoo.errors import ArgumentError, BudgetError, Interrupted, shortened
from zoo.invocation import Inputs, check_loss, check_module
from zoo.loss import Loss
from zoo.planner.plan import Plan
from zoo.policy.budget import free_on, only_in_backward, ways_out
from zoo.policy.goal import (
    Budget,
    Checkpoint,
    Offload,
    Overhead,
    parse_budget,
    parse_overhead,
)
from zoo.profiling.optimizer_memory import OptimizerOption
from zoo.profiling.progress import shown
from zoo.sizing.size_estimate import SizeEstimates, Vary, input_sizes, plan_policy
from zoo.sizing.size_search import MOST, largest_within
from zoo.tracing.planned_forward import goal_of
from zoo.units import SIZES, exact_bytes, format_bytes, format_seconds

# seconds that a real step may take unless verify=True
QUICK = 20.0
# after a step ran out of memory, the bisection ends within budget / NEAR bytes
NEAR = 32
_log = logging.getLogger("zoo.largest")


@dataclass(frozen=True)
class Largest:
    """The largest size that fits a budget, and the costs of its training step.

    Attributes:
        size: of the batch, or of the dimensions that vary.
        budget: bytes.
        next_peak: bytes that the next larger size needs at least; None if there is none, or the
            host has no room.
        measured_peak: bytes of a real step; None if none was run.
        predicted_seconds: of forward and backward on this machine; None if no kernel was measured.
        plan, predicted_peak, predicted_time_ratio, offloaded, offloads: as in `zoo.PlanReport`.
    """

    size: int
    budget: int
    predicted_peak: int
    next_peak: int | None
    measured_peak: int | None
    plan: Plan
    predicted_time_ratio: float
    predicted_seconds: float | None = None
    offloaded: int = 0
    offloads: tuple[int, ...] = ()

    def __str__(self) -> str:
        measured, larger = "not measured", "no larger size works"
        if self.measured_peak is not None:
            measured = f"measured {format_bytes(self.measured_peak)}"
        elif self.predicted_seconds is not None:
            step = f"a training step takes about {format_seconds(self.predicted_seconds)}"
            measured = f"not measured ({step}; verify=True runs two)"
        if self.next_peak is not None:
            excess = format_bytes(self.next_peak - self.budget)
            larger = f"the next size needs {format_bytes(self.next_peak)}, {excess} too much"
        host = f", {format_bytes(self.offloaded)} on the host" if self.offloaded else ""
        return (
            f"size {self.size}: {format_bytes(self.predicted_peak)} of "
            f"{format_bytes(self.budget)}{host}, {measured}; {larger}; "
            f"time ×{self.predicted_time_ratio:.2f} of the baseline"
        )


class Options(TypedDict, total=False):
    """The options of `largest`."""

    memory_budget: Budget
    checkpoint: Checkpoint | None
    max_overhead: Overhead | None
    optimizer: OptimizerOption | None
    loss: Loss | None
    vary: Vary
    multiple_of: int
    device: str | None
    verify: bool | None
    optimizer_in_backward: bool
    offload: bool
    host_budget: int | str | None


def max_batch_size(
    model: nn.Module, sample: Inputs | None = None, **options: Unpack[Options]
) -> int:
    """Returns the largest batch whose training step fits a memory budget.

    Options and errors are those of `zoo.largest`.
    """
    return largest(model, sample, **options).size


@shown("zoo.largest")
def largest(
    model: nn.Module,
    sample: Inputs | None = None,
    *,
    memory_budget: Budget = "device",
    checkpoint: Checkpoint | None = None,
    max_overhead: Overhead | None = None,
    optimizer: OptimizerOption | None = torch.optim.AdamW,
    loss: Loss | None = None,
    vary: Vary = 0,
    multiple_of: int = 1,
    device: str | None = None,
    verify: bool | None = None,
    optimizer_in_backward: bool = False,
    offload: bool = False,
    host_budget: int | str | None = None,
) -> Largest:
    """Finds the largest size whose whole training step fits a budget in bytes.

    The returned size fits and the next two do not. The model does not change. Ctrl-C raises
    `Interrupted`, whose `found` is the largest size known to fit.

    Args:
        model: in the mode of the training; on the meta device if it has no memory yet.
        sample: inputs of any size. A real step repeats their values; meta tensors become zeros.
        memory_budget: no share of a baseline, which grows with the size.
        checkpoint: by default the model's own. "auto" allows any plan that fits the budget.
        max_overhead: with "auto", at most so much more time.
        optimizer, loss, device: as in `zoo.plan`.
        vary: the dimension that grows in every tensor of the sample, or several, `(2, 3, 4)` for a
            volume; or, without a sample, a function of the size that makes the inputs.
        multiple_of: only multiples of this are sizes.
        verify: whether a copy trains two real steps at the size, which is lowered if they take more
            than the budget; by default if kernels were measured and a step takes less than 20
            seconds.
        optimizer_in_backward: for real steps, too.
        offload, host_budget: as in `zoo.plan`; by default the model's own, if its plan is.

    Raises:
        ArgumentError: no module, one that cannot be traced, or an invalid argument.
        BudgetError: no size fits the budget, with the least bytes that one needs, or the host's;
            or memory runs out in a real step of the smallest.
        InputError: the model does not take inputs like the sample.
        OptimizerError: with `optimizer_in_backward`, in a real step.
    """
    check_module(model, "zoo.largest")
    check_loss(loss)
    budget = parse_budget(memory_budget)
    if isinstance(budget, float):
        raise ArgumentError(
            f"memory_budget={shortened(memory_budget)} is a share of the baseline's peak, which "
            f"grows with the size; write {SIZES}, or 'device' for what is free there"
        )
    overhead = None if max_overhead is None else parse_overhead(max_overhead)
    if type(multiple_of) is not int or multiple_of < 1:
        raise ArgumentError(f"multiple_of={multiple_of!r} must be a whole number, 1 or more")
    make_inputs, start = input_sizes(sample, vary)
    to_host, own = Offload.of(offload, host_budget).named_in(None), goal_of(model)
    if checkpoint is None and own is not None and not to_host.is_on:
        to_host = own.offload
    estimates = SizeEstimates(
        model,
        make_inputs,
        plan_policy(model, checkpoint, overhead, to_host),
        overhead,
        multiple_of,
        optimizer,
        loss,
        device,
        optimizer_in_backward,
        to_host,
    )
    with torch.inference_mode(False), torch.enable_grad():
        search = _Search(estimates, start, budget)
        try:
            return search.run(verify)
        except KeyboardInterrupt:
            raise search.interrupted() from None


class _Search:
    """Searches by predicted bytes, and lowers their limit if real steps need more."""

    def __init__(self, estimates: SizeEstimates, start: int, budget: Budget) -> None:
        self.start = max(start // estimates.unit, 1)
        if estimates.trace(self.start) is None:
            # one example may be too few for a norm
            self.start *= 2
        self.estimates, self.first = estimates, estimates.planner_of(self.start)
        self.budget = self.first.bytes_of(budget)
        # the limit on predicted bytes, as far as real steps have confirmed it
        self.trusted = self.budget
        self.fitted: Largest | None = None

    def run(self, verify: bool | None) -> Largest:
        """Returns the largest size that predictions allow and a real step confirms.

        A step that runs out of memory does not tell how much was missing, so from then on the limit
        is bisected between that size's bytes and those of one that fits, at first the smallest.
        """
        device = self.first.step.model_device
        is_counted = device.type == "cpu" or counts_memory(device)
        room = free_on(device) if verify is not False and is_counted else 0
        target, low, excess = self.budget, 0, 0
        high: int | None = None
        ran_out: Largest | None = None
        while self.fitted is None or (high is not None and high - low > self.budget // NEAR):
            if high is not None:
                low = low or self.estimates.smallest()[1]
                target = min((low + high) // 2, high - 1)
            candidate = self._predicted(target)
            if candidate is None:
                raise self._refusal(ran_out, excess)
            if self.fitted is not None and candidate.size <= self.fitted.size:
                low = target
                continue
            seconds = candidate.predicted_seconds
            is_quick = seconds is not None and seconds <= QUICK
            if candidate.predicted_peak > room or not (verify or is_quick):
                return self.fitted or candidate
            peak = self._measured(candidate)
            if peak is not None and peak <= self.budget:
                self.fitted, low = replace(candidate, measured_peak=peak), target
                continue
            if peak is None or high is not None:
                high = candidate.predicted_peak
            ran_out = candidate if peak is None else None
            excess = 0 if peak is None else peak - candidate.predicted_peak
            target = self.budget - excess
            self.trusted = target if high is None else 0
        return self.fitted

    def interrupted(self) -> Interrupted:
        """Returns the error that names the largest size known to fit."""
        fits, how = None, "none is known to fit yet"
        needs = self.estimates.needs.items()
        predicted = [count for count, needed in needs if needed <= self.trusted]
        if self.fitted is not None:
            fits = self.fitted.size
            how = f"size {fits} fits in {exact_bytes(self.budget)}, as a real training step showed"
        elif predicted:
            fits = max(predicted) * self.estimates.unit
            how = f"size {fits} is predicted to fit in {exact_bytes(self.budget)}"
        return Interrupted(f"interrupted; of the sizes so far, {how}", fits)

    def _predicted(self, target: int) -> Largest | None:
        """Returns the largest size whose predicted bytes fit a target; None if none does."""
        estimates, unit = self.estimates, self.estimates.unit
        needed = functools.partial(estimates.needed, budget=target)
        fixed = self.first.step.fixed
        base = fixed.beside_activations - fixed.inputs
        count = largest_within(needed, target, self.start, base)
        if not count:
            return None
        larger = needed(count + 1)
        if larger is None and needed(2 * count) is not None:
            raise ArgumentError(
                f"the model takes size {count * unit} and {2 * count * unit}, but not "
                f"{(count + 1) * unit}; pass multiple_of= a number that divides its sizes"
            )
        if count >= MOST and needed(count) == needed(self.start):
            raise ArgumentError(
                f"sizes {self.start * unit} and {count * unit} need the same "
                f"{format_bytes(needed(count) or 0)}, so that no size is the largest; pass vary= a "
                "dimension or a function that makes inputs grow with the size"
            )
        planner = estimates.planner_of(count)
        point = estimates.policy(planner, max(target, needed(count) or 0))
        step = planner.step
        return Largest(
            size=count * unit,
            budget=self.budget,
            predicted_peak=point.peak,
            # the excess of real steps over the prediction counts for the next size, too
            next_peak=larger and larger + self.budget - target,
            measured_peak=None,
            plan=point.plan,
            predicted_time_ratio=point.time_ratio,
            predicted_seconds=step.seconds * point.time_ratio if step.kernels else None,
            offloaded=point.offloaded,
            offloads=point.offloads,
        )

    def _refusal(self, ran_out: Largest | None, excess: int) -> BudgetError:
        """Returns the error that no size is left; only real steps showed the `excess` bytes."""
        if ran_out is not None:
            return BudgetError(
                f"memory ran out in a real training step of size {ran_out.size}, the smallest, "
                f"which is predicted to take {exact_bytes(ran_out.predicted_peak)}; the budget is "
                f"{exact_bytes(self.budget)}. Free memory on {self.first.step.model_device}, or "
                "pass verify=False to rely on the prediction.",
                self.budget,
            )
        count, least = self.estimates.smallest()
        planner = self.estimates.planner_of(count)
        bound = self.estimates.max_overhead
        way = "choose checkpoint='auto'" if bound is None else "raise max_overhead"
        others = [way] * (planner.least.peak < least)
        least += excess
        shown = f", {format_bytes(excess)} of it as a real training step showed" if excess else ""
        text = (
            f"a training step of size {count * self.estimates.unit} needs at least "
            f"{exact_bytes(least)}{shown}; the budget is {exact_bytes(self.budget)}. "
            f"{ways_out(least, others, planner.step.optimizer_bytes)}"
        )
        if not self.estimates.optimizer_in_backward:
            other = self.estimates.in_backward().needed(count)
            if other is not None and other + excess <= self.budget:
                text += only_in_backward(other + excess)
        return BudgetError(text, self.budget, least)

    def _measured(self, candidate: Largest) -> int | None:
        """Trains a copy of the model; returns its peak in bytes, None if memory runs out."""
        _log.info("size %d: a real step", candidate.size)
        estimates = self.estimates
        with random_state_restored(), shown(f"a training step of size {candidate.size}"):
            try:
                step = CopiedStep(
                    estimates.model,
                    estimates.make_inputs(candidate.size, self.first.step.model_device),
                    estimates.optimizer,
                    estimates.loss or mean_of,
                    fake=False,
                    in_backward=estimates.optimizer_in_backward,
                )
                return step.peak(candidate.plan, candidate.offloads)
            except torch.OutOfMemoryError:
                return None
