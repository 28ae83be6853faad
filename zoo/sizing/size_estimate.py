"""Predicts the bytes of a training step for any size of its inputs, at low cost.

FakeTensor tracing    of each size once: nothing of the model's size is allocated
kernels               if that fits and the model's device is present, each kind of kernel also
                      runs alone, which adds kernel workspaces and seconds; if this takes long,
                      kernels run at a smaller size and are extrapolated
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.api.plan import planner_for
from zoo.errors import ArgumentError, BudgetError, InputError
from zoo.invocation import Inputs, Invocation, sizes_hint
from zoo.loss import Loss
from zoo.policy.budget import StepPlanner
from zoo.policy.decision import plan_for
from zoo.policy.goal import NO_OFFLOAD, Offload, goal_for, optimal_planner, plan_or_option
from zoo.policy.plan_report import Point
from zoo.policy.training_step import CountedStep
from zoo.profiling.kernel_costs import KernelCosts
from zoo.profiling.optimizer_memory import OptimizerBytes, OptimizerOption
from zoo.profiling.progress import shown
from zoo.profiling.tensor_spec import KernelSpec
from zoo.tracing.isolated_trace import TraceError
from zoo.tracing.planned_forward import patched_forward
from zoo.units import format_bytes

Vary = int | tuple[int, ...] | Callable[[int], Inputs]
# makes inputs of a size on a device
MakeInputs = Callable[[int, torch.device], Invocation]
# chooses the fastest plan within a budget in bytes; for None, the plan of least peak
PlanPolicy = Callable[[StepPlanner, int | None], Point]
Kernels = Sequence[KernelCosts | None]
# seconds that one run of all kinds of kernels may take, approximately
PATIENCE = 2.0
_log = logging.getLogger("zoo.largest")


def plan_policy(
    model: nn.Module, checkpoint: Any, max_overhead: float | None, offload: Offload = NO_OFFLOAD
) -> PlanPolicy:
    """Returns the policy by which training with this option chooses its plan."""
    checkpoint = plan_or_option(checkpoint)
    if checkpoint == "auto" or (max_overhead is not None and checkpoint in (None, False)):
        optimal_planner()

        def best(planner: StepPlanner, budget: int | None) -> Point:
            if budget is None and max_overhead is None:
                return planner.least
            report = planner.report(budget if max_overhead is None else None, max_overhead)
            costs = report.predicted_peak, report.predicted_time_ratio
            return Point(*costs, report.plan, offloaded=report.offloaded, offloads=report.offloads)

        return best
    patched = patched_forward(model) if checkpoint is None else None
    given = False if checkpoint is None else checkpoint
    goal = patched.goal if patched else goal_for(given, None, max_overhead, offload)
    if goal is not None:
        goal = replace(goal, offload=offload)

    @functools.cache
    def decided(planner: StepPlanner) -> Point:
        if goal is None:
            return planner.step.of_model(planner.baseline)
        try:
            if patched is not None and goal.is_bounded:
                own = StepPlanner(planner.step.trained_as(patched.training), offload)
                limit = own.bytes_of(goal.memory_budget) if goal.max_overhead is None else None
                chosen = own.roomy(own.chosen(limit, goal.max_overhead))
            else:
                chosen = plan_for(goal, planner.step.without_loss(), measures=False)
            return planner.step.of_model(planner.point(chosen.plan, chosen.offloads))
        except BudgetError as error:
            if not goal.is_bounded:
                # the host has no room
                raise
            raise ArgumentError(
                "the model already has a budget of its own, which no plan fits at this size; pass "
                "checkpoint='auto' to search within the one given here"
            ) from error

    return lambda planner, budget: decided(planner)


@dataclass
class SizeEstimates:
    """The bytes that sizes need, in multiples of `unit`; None for a size that the model refuses."""

    model: nn.Module
    make_inputs: MakeInputs
    policy: PlanPolicy
    max_overhead: float | None
    unit: int
    optimizer: OptimizerOption | None
    loss: Loss | None
    device: str | None
    optimizer_in_backward: bool = False
    offload: Offload = NO_OFFLOAD
    # by size, with kernels if they were measured or extrapolated
    planners: dict[int, StepPlanner | None] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)
    refusal: Exception | None = None
    # the same for any size
    optimizer_bytes: OptimizerBytes | None = None

    def needed(self, count: int, budget: float = math.inf) -> int | None:
        """Returns the bytes of a size; a lower bound if they exceed the budget."""
        with shown(f"size {count * self.unit}"):
            if (planner := self.trace(count)) is None:
                return None
            try:
                return self._needed(count, planner, budget)
            except BudgetError as error:
                # the host has no room for what the plan offloads
                self.refusal = self.refusal or error
                return None

    def _needed(self, count: int, planner: StepPlanner, budget: float) -> int:
        # a limit on the overhead needs measured seconds
        step = planner.step
        can_measure = step.is_here and not step.kernels
        is_timed = can_measure and self.max_overhead is not None
        peak = (planner.least if is_timed else self.policy(planner, None)).peak
        if can_measure and peak <= budget:
            measured = step.with_kernels(self._kernels(count, step))
            self.planners[count] = planner = StepPlanner(measured, self.offload)
            peak = self.policy(planner, None).peak
        self.needs[count] = peak
        _log.info("size %d needs %s", count * self.unit, format_bytes(peak))
        return peak

    def smallest(self) -> tuple[int, int]:
        """Returns the smallest known size that the model takes, and its bytes."""
        self.trace(1)
        count = self._smallest_known()
        if (needed := self.needed(count)) is None:
            raise self._refused()
        return count, needed

    def in_backward(self) -> "SizeEstimates":
        """Returns estimates for the same step with the optimizer in the backward."""
        return replace(
            self, optimizer_in_backward=True, optimizer_bytes=None, planners={}, needs={}
        )

    def planner_of(self, count: int) -> StepPlanner:
        """Returns the costs of a size; raises what the model raised if it takes no such size."""
        planner = self.trace(count)
        if planner is None:
            raise self._refused()
        return planner

    def _refused(self) -> Exception:
        assert self.refusal is not None
        return self.refusal

    def trace(self, count: int) -> StepPlanner | None:
        """Traces a size on fake tensors, once."""
        if count in self.planners:
            return self.planners[count]
        size, planner = count * self.unit, None
        try:
            planner = planner_for(
                self.model,
                self.make_inputs(size, torch.device("meta")),
                optimizer=self.optimizer_bytes or self.optimizer,
                loss=self.loss,
                device=self.device,
                measured=False,
                optimizer_in_backward=self.optimizer_in_backward,
                offload=self.offload,
            )
            self.optimizer_bytes = planner.step.optimizer_bytes
        except Exception as error:
            error.add_note(f"this happened at size {size}")
            is_refusal = isinstance(error, TraceError) and error.raised
            if not (is_refusal or isinstance(error, InputError)):
                raise
            self.refusal = self.refusal or error
        self.planners[count] = planner
        return planner

    def _smallest_known(self) -> int:
        return min(count for count, planner in self.planners.items() if planner is not None)

    def _kernels(self, count: int, large: CountedStep) -> Kernels:
        """Runs each kind of kernel, or extrapolates from a smaller size at which that is faster.

        Sizes in between run, too: small ones predict large ones badly, since launching a kernel
        takes time and another kernel may be chosen.
        """
        size, estimate = self._smallest_known(), list[KernelCosts | None]()
        operators = [spec and spec.operator for spec in large.profile.specs]
        while size < count and (planner := self.trace(size)) is not None:
            small = planner.step
            if [spec and spec.operator for spec in small.profile.specs] != operators:
                break
            kernels = small.kernels or small.profile.kernels()
            estimate = extrapolated(kernels, small.profile.specs, large.profile.specs)
            taken = max(_seconds(kernels), 1e-9)
            if taken > PATIENCE or _seconds(estimate) <= PATIENCE:
                break
            power = math.log(PATIENCE / taken) / math.log(_seconds(estimate) / taken)
            size = max(2 * size, int(size * (count / size) ** power))
        return estimate if _seconds(estimate) > PATIENCE else large.profile.kernels()


def extrapolated(
    kernels: Kernels, small: Sequence[KernelSpec | None], large: Sequence[KernelSpec | None]
) -> list[KernelCosts | None]:
    """Extrapolates the costs of kernels from a small size to a large one.

    With the batch, workspaces and seconds grow at most as the fastest growing tensor: oneDNN's
    convolution reorders its input, its output and its weights, and only the first two grow. With
    the sequence length, attention grows faster.
    """
    costs: list[KernelCosts | None] = []
    for kernel, before, after in zip(kernels, small, large, strict=True):
        if kernel is None or before is None or after is None:
            costs.append(None)
            continue
        sizes = zip(before.sizes, after.sizes, strict=False)
        ratio = max((new / old for old, new in sizes if old), default=1.0)
        workspace = math.ceil(kernel.workspace * ratio)
        costs.append(KernelCosts(kernel.seconds * ratio, workspace, kernel.held_by_library))
    return costs


def _seconds(kernels: Kernels) -> float:
    return sum(kernel.seconds for kernel in kernels if kernel is not None)


def input_sizes(sample: Inputs | None, vary: Vary) -> tuple[MakeInputs, int]:
    """Returns a function that makes inputs, from a sample or `vary`, and the sample's size.

    The sample's values are repeated, so that labels and tokens stay in range.
    """
    if callable(vary):
        if sample is not None:
            raise ArgumentError("vary=, a function, makes all inputs; pass no sample beside it")
        return lambda size, device: Invocation.of(vary(size)).map(lambda t: _on(t, device)), 1
    if sample is None:
        raise ArgumentError("pass a sample of the inputs, or as vary= a function that makes them")
    inputs, dims = Invocation.of(sample), vary if isinstance(vary, tuple) else (vary,)
    if not inputs.tensors:
        raise ArgumentError(f"the sample holds no tensor that could grow{sizes_hint(inputs)}")
    for dim in dims:
        for value in inputs.tensors:
            if type(dim) is not int or not -value.ndim <= dim < value.ndim:
                raise ArgumentError(
                    f"vary={dim!r} is no dimension of an input of shape {tuple(value.shape)}; "
                    "where inputs differ, pass as vary= a function of the size that makes them"
                )
    sizes = sorted({int(value.shape[dim]) for value in inputs.tensors for dim in dims})
    if len(sizes) != 1 or sizes[0] < 1:
        raise ArgumentError(
            f"dimensions {', '.join(map(str, dims))} of the inputs have sizes {sizes}; they must "
            "be equal and above 0. Where they differ, pass as vary= a function of the size that "
            "makes the inputs"
        )

    def resized(size: int, device: torch.device) -> Invocation:
        return inputs.map(lambda value: _resized(_on(value, device), dims, size))

    return resized, sizes[0]


def _resized(value: Tensor, dims: tuple[int, ...], size: int) -> Tensor:
    """Returns a tensor of another size with this one's layout and its values, repeated."""
    source = value.detach()
    for dim in dims:
        repeated = torch.arange(size, device=value.device) % value.shape[dim]
        source = source.index_select(dim, repeated)
    layout = sorted(range(value.ndim), key=value.stride, reverse=True)
    resized = torch.empty_permuted(source.shape, layout, dtype=value.dtype, device=value.device)
    return resized.copy_(source).requires_grad_(value.requires_grad)


def _on(value: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to a device; one on the meta device becomes zeros."""
    is_new = value.is_meta and device.type != "meta"
    moved = torch.zeros_like(value, device=device) if is_new else value.detach().to(device)
    return moved.requires_grad_(value.requires_grad)
