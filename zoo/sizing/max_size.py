"""The largest batch, sequence or volume whose whole training step keeps to a memory budget.

Trying sizes until one runs out of memory, as in Lightning's batch size finder, needs the device,
finds a power of two or some size near the limit, and cannot ask about another device or about less
memory than there is. Here sizes are searched by predicted bytes (`zoo.sizing.size_estimate`); then
one real training step of a copy of the model, where there is room for it, proves the answer. The
logger "zoo.largest" names at level INFO each size that is evaluated.
"""

import copy
import functools
import logging
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import torch
from torch import nn

from zoo.errors import ArgumentError, BudgetError
from zoo.invocation import Inputs, Loss, check_loss, nothing_trained, place_of, with_loss_errors
from zoo.planner.plan import Plan
from zoo.policy.options import Checkpoint
from zoo.profiling.optimizer import MakeOptimizer
from zoo.sizing.input_sizes import Vary, input_sizes
from zoo.sizing.size_estimate import SizeEstimates, plan_policy
from zoo.sizing.size_search import MOST, largest_within
from zoo.sizing.trial_step import train_twice
from zoo.tracing.api import checkpoint as put_in_force
from zoo.units import at_least, exact_bytes, format_bytes, format_seconds
from zoo.verification.training_record import random_state_restored

# seconds that a real step may take where nobody asked for one
QUICK = 20.0
# where memory ran out, the search ends when so small a part of the budget is undecided
NEAR = 32
_log = logging.getLogger("zoo.largest")


@dataclass(frozen=True)
class Largest:
    """The largest size that keeps to a budget, and what its training step takes.

    Attributes:
        size: of the batch, or of what else varies.
        budget: bytes.
        predicted_peak: bytes of the whole training step.
        next_peak: bytes, at the least, that the next larger size needs, with what real steps took
            beyond what was predicted; None where the model takes no larger inputs.
        measured_peak: bytes of a real step; None where none was run.
        plan: which steps are kept.
        predicted_time_ratio: seconds of forward and backward against keeping everything.
        predicted_seconds: of forward and backward here; None where the steps were not run.
    """

    size: int
    budget: int
    predicted_peak: int
    next_peak: int | None
    measured_peak: int | None
    plan: Plan
    predicted_time_ratio: float
    predicted_seconds: float | None = None

    def __str__(self) -> str:
        measured, larger = "not measured", "the model takes no larger size"
        if self.measured_peak is not None:
            measured = f"measured {format_bytes(self.measured_peak)}"
        elif self.predicted_seconds is not None:
            step = f"a step takes about {format_seconds(self.predicted_seconds)}"
            measured = f"not measured ({step}; verify=True runs two)"
        if self.next_peak is not None:
            excess = format_bytes(self.next_peak - self.budget)
            larger = f"the next size needs {format_bytes(self.next_peak)}, {excess} too much"
        return (
            f"size {self.size}: {format_bytes(self.predicted_peak)} of "
            f"{format_bytes(self.budget)}, {measured}; {larger}; "
            f"time x{self.predicted_time_ratio:.2f} of keeping everything"
        )


class Options(TypedDict, total=False):
    """The options of `largest`."""

    memory_budget: int | str
    checkpoint: Checkpoint | None
    max_overhead: float | None
    optimizer: MakeOptimizer | None
    loss: Loss | None
    vary: Vary
    multiple_of: int
    device: str | None
    verify: bool | None


def max_batch_size(
    model: nn.Module, sample: Inputs | None = None, **options: Unpack[Options]
) -> int:
    """Returns the largest batch whose training step keeps to a memory budget.

    Options and errors are those of `zoo.largest`, which also says what the step takes.
    """
    return largest(model, sample, **options).size


def largest(
    model: nn.Module,
    sample: Inputs | None = None,
    *,
    memory_budget: int | str = "device",
    checkpoint: Checkpoint | None = None,
    max_overhead: float | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    vary: Vary = 0,
    multiple_of: int = 1,
    device: str | None = None,
    verify: bool | None = None,
) -> Largest:
    """Finds the largest size whose whole training step keeps to a budget in bytes.

    The size found keeps to it and the next two do not, which makes it exact where bytes grow with
    the size. The model is left as it is; nothing of its size is allocated, but for a real step.

    Args:
        model: in training mode; on the meta device if it is nowhere yet.
        sample: what the model is called with: a tensor, a tuple or a dict of keyword arguments, in
            any size, also of meta tensors. A real step repeats its values; meta tensors become
            zeros.
        memory_budget: bytes, "8GiB", or "device" for what is free where the model is.
        checkpoint: what `zoo.create` takes; by default what is in force on the model. "auto" stands
            for any plan that keeps to the budget, and chooses the fastest for the size found.
        max_overhead: with "auto", at most so much more time: 0.2 for a fifth.
        optimizer, loss, device: those of `zoo.plan`.
        vary: what grows: a dimension of every tensor in the sample, or several of one size, such as
            `(2, 3, 4)` for a volume; or, without a sample, a function of the size that makes the
            inputs, best of meta tensors.
        multiple_of: only multiples of this are sizes.
        verify: whether a copy of the model trains at the size found, if the device is here and has
            room beside the model. If that takes more than the budget, the size is lowered. By
            default it does where its steps were run and one takes less than 20 seconds.

    Raises:
        ArgumentError: no module, one that cannot be followed, or an argument of no such form.
        BudgetError: no size keeps to the budget, with the least bytes that one needs; or memory
            runs out in a real step of the smallest.
        InputError: the model does not take inputs like the sample.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a largest size needs a torch.nn.Module; got {type(model).__name__}")
    if isinstance(memory_budget, float):
        raise ArgumentError(
            f"memory_budget={memory_budget}, a float, is a fraction of what keeping everything "
            "takes, which grows with the size; give an int of bytes, '8GiB' or 'device'"
        )
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise ArgumentError(f"multiple_of={multiple_of!r} is no number from 1")
    check_loss(loss)
    estimates = SizeEstimates(
        model,
        input_sizes(sample, vary),
        plan_policy(model, checkpoint, max_overhead),
        max_overhead,
        multiple_of,
        optimizer,
        loss,
        device,
    )
    with torch.inference_mode(False), torch.enable_grad():
        return _Search(estimates, memory_budget).run(verify)


class _Search:
    """Searches by predicted bytes, of which fewer are allowed where real steps need more."""

    def __init__(self, estimates: SizeEstimates, memory_budget: int | str) -> None:
        start = max(estimates.inputs.start // estimates.unit, 1)
        # one example may be too few for a norm
        self.start = start if estimates.trace(start) is not None else 2 * start
        if estimates.trace(self.start) is None:
            assert estimates.refusal is not None
            raise estimates.refusal
        self.estimates, self.first = estimates, estimates.known(self.start)
        inputs = estimates.inputs.make(self.start * estimates.unit, torch.device("meta"))
        if not any(t.requires_grad for t in (*estimates.model.parameters(), *inputs.tensors)):
            raise ArgumentError(nothing_trained(estimates.model))
        self.budget = self.first.bytes_of(memory_budget)

    def run(self, verify: bool | None) -> Largest:
        """Returns the largest size that predictions allow and a real step proves.

        By how much memory ran out is not known, so from then on bytes are bisected, between the
        size that had no room and one that has, at first the smallest.
        """
        room = 0 if verify is False else self._room()
        target, low, excess = self.budget, 0, 0
        high: int | None = None
        fitted: Largest | None = None
        ran_out: Largest | None = None
        while fitted is None or (high is not None and high - low > self.budget // NEAR):
            if high is not None:
                low = low or self.estimates.smallest()[1]
                target = min((low + high) // 2, high - 1)
            found = self._predicted(target)
            if found is None:
                raise self._refusal(ran_out, excess)
            if fitted is not None and found.size <= fitted.size:
                low = target
                continue
            seconds = found.predicted_seconds
            is_quick = seconds is not None and seconds <= QUICK
            if found.predicted_peak > room or not (verify or is_quick):
                return fitted or found
            peak = self._measured(found)
            if peak is not None and peak <= self.budget:
                fitted, low = replace(found, measured_peak=peak), target
                continue
            if peak is None or high is not None:
                high = found.predicted_peak
            ran_out = found if peak is None else None
            excess = 0 if peak is None else peak - found.predicted_peak
            target = self.budget - excess
        return fitted

    def _predicted(self, target: int) -> Largest | None:
        """Returns the largest size whose predicted bytes keep to a target; None if none does."""
        estimates, unit = self.estimates, self.estimates.unit
        needed = functools.partial(estimates.needed, budget=target)
        base = self.first.fixed.beside_activations - self.first.fixed.inputs
        count = largest_within(needed, target, self.start, base)
        if not count:
            return None
        larger = needed(count + 1)
        if larger is None and needed(2 * count) is not None:
            raise ArgumentError(
                f"the model takes size {count * unit} and {2 * count * unit}, but not "
                f"{(count + 1) * unit}; pass multiple_of= what its sizes are multiples of"
            )
        if count >= MOST and needed(count) == needed(self.start):
            raise ArgumentError(
                f"sizes {self.start * unit} and {count * unit} need the same "
                f"{format_bytes(needed(count) or 0)}, so that no size is the largest; pass vary= "
                "what makes inputs that grow with the size"
            )
        known = estimates.known(count)
        point = estimates.policy(known, max(target, needed(count) or 0))
        seconds = sum(known.costs.seconds) + sum(known.costs.seconds_backward)
        return Largest(
            size=count * unit,
            budget=self.budget,
            predicted_peak=point.peak,
            # what real steps took beyond what was predicted, the next size would, too
            next_peak=larger and larger + self.budget - target,
            measured_peak=None,
            plan=point.plan,
            predicted_time_ratio=point.time_ratio,
            predicted_seconds=seconds * point.time_ratio if known.timed else None,
        )

    def _refusal(self, ran_out: Largest | None, excess: int) -> BudgetError:
        """Says why no size is left; `excess` bytes only a real step showed."""
        if ran_out is not None:
            return BudgetError(
                f"memory ran out in a real training step of size {ran_out.size}, the smallest, "
                f"which is predicted to take {exact_bytes(ran_out.predicted_peak)}; the budget is "
                f"{exact_bytes(self.budget)}. Free memory on {self.first.place}, or pass "
                "verify=False to go by what is predicted."
            )
        count, least = self.estimates.smallest()
        least += excess
        shown = f", {format_bytes(excess)} of it as a real step showed" if excess else ""
        return BudgetError(
            f"a training step of size {count * self.estimates.unit} needs at least "
            f"{exact_bytes(least)}{shown}; the budget is {exact_bytes(self.budget)}. Raise the "
            f"budget to {at_least(least)!r}, choose checkpoint='auto', or an optimizer of less "
            "state."
        )

    def _room(self) -> int:
        """Returns the bytes that are free beside the model where it is."""
        if self.first.place.type not in ("cpu", "cuda"):
            return 0
        fixed = self.first.fixed
        return self.first.bytes_of("device") - fixed.parameters - fixed.buffers

    def _measured(self, found: Largest) -> int | None:
        """Trains a copy of the model; its peak in bytes, None where memory runs out."""
        _log.info("size %d: a real step", found.size)
        estimates = self.estimates
        with random_state_restored():
            try:
                model, loss = copy.deepcopy((estimates.model, estimates.loss))
                place = place_of(model)
                put_in_force(model, found.plan if found.plan.depth() else False)
                inputs = estimates.inputs.make(found.size, place)
                checked = loss and with_loss_errors(loss, place)
                return train_twice(model, inputs, estimates.optimizer, checked)
            except torch.OutOfMemoryError:
                return None
