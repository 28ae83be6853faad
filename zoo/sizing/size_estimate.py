"""What a training step of each size needs, estimated as cheaply as will do.

FakeTensor tracing    each size once: nothing of the model's size is allocated
kernels               where that fits and the model's device is here, each kind of kernel also
                      runs alone, which adds kernel workspaces and seconds; where this takes
                      long, it runs at a smaller size and is extrapolated
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zoo.api.plan import planner_for
from zoo.errors import ArgumentError, BudgetError, InputError
from zoo.invocation import Loss
from zoo.planner.plan import Plan
from zoo.policy.budget import BudgetPlanner
from zoo.policy.options import PlannedRunner, runner_for
from zoo.policy.report import Point
from zoo.profiling.kernel_costs import KernelCosts
from zoo.profiling.optimizer import MakeOptimizer, OptimizerBytes
from zoo.profiling.tensor_spec import KernelSpec
from zoo.sizing.input_sizes import InputSizes
from zoo.tracing.ahead import TraceError
from zoo.tracing.patched_forward import runner_of
from zoo.units import format_bytes

# chooses the plan of least time within a budget in bytes, without one that of least bytes
PlanPolicy = Callable[[BudgetPlanner, int | None], Point]
# seconds that one run of all kinds of kernels may take, about
PATIENCE = 2.0
_log = logging.getLogger("zoo.largest")


def plan_policy(model: nn.Module, checkpoint: Any, max_overhead: float | None) -> PlanPolicy:
    """Returns how a training with this option would choose its plan.

    Raises:
        ArgumentError: no such option, or the plans of what runs the model are not known.
    """
    if checkpoint == "auto" or (max_overhead is not None and checkpoint in (None, False)):

        def best(prospect: BudgetPlanner, budget: int | None) -> Point:
            if budget is None and max_overhead is None:
                return prospect.least
            report = prospect.report(budget if max_overhead is None else None, max_overhead)
            return Point(report.predicted_peak, report.predicted_time_ratio, report.plan)

        return best
    asked = checkpoint is not None
    runner = runner_for(checkpoint, None, max_overhead) if asked else runner_of(model)
    if not isinstance(runner, PlannedRunner | None):
        raise ArgumentError(
            f"the plans of a {type(runner).__name__} are not known; pass checkpoint="
        )

    @functools.cache
    def decided(prospect: BudgetPlanner) -> Point:
        plan = Plan.keep_all(prospect.steps)
        try:
            if runner is not None:
                plan = runner.decide(model, prospect.outline, prospect.state)  # type: ignore[arg-type]
            return prospect.of_model(prospect.point(plan))
        except BudgetError as error:
            raise ArgumentError(
                "the model already has a budget, which ends the search; pass checkpoint='auto'"
            ) from error

    return lambda prospect, budget: decided(prospect)


@dataclass
class SizeEstimates:
    """The needs of sizes, counted in units of `unit`; None where the model takes no such size."""

    model: nn.Module
    inputs: InputSizes
    policy: PlanPolicy
    max_overhead: float | None
    unit: int
    optimizer: MakeOptimizer | None
    loss: Loss | None
    device: str | None
    traced: dict[int, BudgetPlanner | None] = field(default_factory=dict)
    measured: dict[int, BudgetPlanner] = field(default_factory=dict)
    kernels: dict[int, Sequence[KernelCosts | None]] = field(default_factory=dict)
    refusal: Exception | None = None
    # the optimizer's, the same for any size
    counted: OptimizerBytes | None = None

    def needed(self, count: int, budget: float = math.inf) -> int | None:
        """Returns the bytes of a size; where they exceed the budget, a lower bound."""
        prospect = self.trace(count)
        if prospect is None:
            return None
        is_here = self.device is None and prospect.place.type != "meta"
        # without seconds it is not known which plans keep to an overhead
        is_timed = is_here and self.max_overhead is not None
        peak = (prospect.least if is_timed else self.policy(prospect, None)).peak
        if is_here and peak <= budget:
            if count not in self.measured:
                self.measured[count] = prospect.with_kernels(self._kernels(count, prospect))
            peak = self.policy(self.measured[count], None).peak
        _log.info("size %d needs %s", count * self.unit, format_bytes(peak))
        return peak

    def smallest(self) -> tuple[int, int]:
        """Returns the smallest known size that the model takes, and its bytes."""
        self.trace(1)
        count = min(count for count, prospect in self.traced.items() if prospect is not None)
        return count, self.needed(count) or 0

    def known(self, count: int) -> BudgetPlanner:
        """Returns the costs of a size that the model takes, measured ones where there are some."""
        prospect = self.measured.get(count) or self.trace(count)
        assert prospect is not None
        return prospect

    def trace(self, count: int) -> BudgetPlanner | None:
        """Traces a size on fake tensors, once."""
        if count not in self.traced:
            self.traced[count] = self._trace(count * self.unit)
        return self.traced[count]

    def _trace(self, size: int) -> BudgetPlanner | None:
        try:
            prospect = planner_for(
                self.model,
                self.inputs.make(size, torch.device("meta")),
                optimizer=self.counted or self.optimizer,
                loss=self.loss,
                device=self.device or "cpu",
            )
        except Exception as error:
            error.add_note(f"the size looked at was {size}")
            if isinstance(error, InputError) or (isinstance(error, TraceError) and error.raised):
                self.refusal = self.refusal or error
                return None
            raise
        self.counted = prospect.optimizer
        return prospect

    def _kernels(self, count: int, large: BudgetPlanner) -> Sequence[KernelCosts | None]:
        """Runs each kind of kernel, or extrapolates from a size at which that takes less long.

        Sizes in between run, too: small ones tell little of large ones, since it takes time to
        launch a kernel, and another kernel may be chosen.
        """
        specs = large.profile.specs
        size = min(count, *(known for known, found in self.traced.items() if found is not None))
        found: Sequence[KernelCosts | None] = ()
        while size < count and (small := self.trace(size)) is not None:
            if _operators(small.profile.specs) != _operators(specs):
                break
            kernels = self._run(size, small)
            found = extrapolated(kernels, small.profile.specs, specs)
            taken = max(_seconds(kernels), 1e-9)
            if taken > PATIENCE or _seconds(found) <= PATIENCE:
                break
            power = math.log(PATIENCE / taken) / math.log(_seconds(found) / taken)
            size = max(2 * size, int(size * (count / size) ** power))
        return found if _seconds(found) > PATIENCE else self._run(count, large)

    def _run(self, count: int, prospect: BudgetPlanner) -> Sequence[KernelCosts | None]:
        if count not in self.kernels:
            self.kernels[count] = prospect.profile.kernels()
        return self.kernels[count]


def extrapolated(
    kernels: Sequence[KernelCosts | None],
    small: Sequence[KernelSpec | None],
    large: Sequence[KernelSpec | None],
) -> list[KernelCosts | None]:
    """Returns what the kernels of a large size would take, from what those of a small one took.

    Workspaces and seconds of a larger batch grow at most as that tensor does which grows most:
    oneDNN's convolution reorders its input, its output and its weights, and only the first two
    grow. Along a sequence attention takes longer than that.
    """
    found: list[KernelCosts | None] = []
    for kernel, here, there in zip(kernels, small, large, strict=True):
        if kernel is None or here is None or there is None:
            found.append(None)
            continue
        sizes = zip(here.sizes, there.sizes, strict=False)
        ratio = max((size / known for known, size in sizes if known), default=1.0)
        found.append(KernelCosts(kernel.seconds * ratio, math.ceil(kernel.workspace * ratio)))
    return found


def _operators(specs: Sequence[KernelSpec | None]) -> list[str | None]:
    return [spec and spec.operator for spec in specs]


def _seconds(kernels: Sequence[KernelCosts | None]) -> float:
    return sum(kernel.seconds for kernel in kernels if kernel is not None)
