"""`zoo.plan_rank`: a plan for a model that is spread over many processes, before its first step.

On a rank another plan may be the best than in one process: gradients and the optimizer's state are
sharded, and a segment that is recomputed gathers all its weights until its backward. So steps by
several plans are tracked until one keeps to the budget:

    costs of the steps in one process     some twenty plans that may be the best, the fastest first
    a fake process group                  this process is rank 0, its collectives send nothing
    a fake copy of the model, sharded     by FSDP2's own code, whose hooks then run
    a step of it by one of the plans      tracked: bytes of rank 0, the largest of all ranks

Bytes are those of tensors, for a CUDA device in the blocks of its allocator and with the workspaces
of cuBLAS. Those of other kernels and buffers of the communication library are left out: gloo, for
one, copies gradients before it reduces them.
"""

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from zoo._torch import fake_store
from zoo.api.plan import planner_for
from zoo.api.track import CopiedStep, mean_of
from zoo.engine.devices import random_state_restored
from zoo.errors import ArgumentError, BudgetError, OptimizerError, shortened
from zoo.invocation import Inputs, Invocation, check_step, device_of
from zoo.layers.module_hooks import is_hooked
from zoo.loss import Loss
from zoo.planner.plan import Plan
from zoo.policy.budget import StepPlanner, only_in_backward
from zoo.policy.goal import Budget, Offload, Overhead, parse_bounds
from zoo.policy.plan_report import PlanReport, Point, peak_table
from zoo.profiling.optimizer_memory import OptimizerOption
from zoo.profiling.progress import each, shown
from zoo.profiling.timeline import Timeline
from zoo.report.escaping import markdown_table
from zoo.tracing.partition import block_paths
from zoo.units import at_least, exact_bytes, format_bytes

# for each parameter torch lists all ranks: for so many that takes minutes, for more hours
MOST_RANKS = 2**16
Strategy = str | Callable[[nn.Module], object]


@dataclass(frozen=True)
class RankReport:
    """A plan and its predicted cost on each rank.

    Attributes:
        world_size, strategy: what it was made for.
        predicted_peak, baseline_peak, budget: as in `zoo.PlanReport`, on rank 0.
        phase: of the step at the peak: "forward", "backward", "recompute" or "optimizer".
        at_peak: `predicted_peak` by category; "parameters" are shards and gathered ones.
        alone: the plan and its predicted cost in one process that has all of the model.
    """

    world_size: int
    strategy: str
    predicted_peak: int
    baseline_peak: int
    budget: int | None
    phase: str
    at_peak: Mapping[str, int]
    alone: PlanReport

    @property
    def plan(self) -> Plan:
        """The plan, the same on all ranks."""
        return self.alone.plan

    @property
    def predicted_time_ratio(self) -> float:
        """Seconds of forward and backward against the baseline's, without communication."""
        return self.alone.predicted_time_ratio

    def to_json(self) -> str:
        """Writes the report as JSON."""
        return json.dumps(vars(self), indent=1, default=vars)

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file that `zoo.PlanReport.load` reads, with its costs alone."""
        self.alone.save(path)

    def __str__(self) -> str:
        sizes = {"peak": self.predicted_peak, "budget": self.budget, "baseline": self.baseline_peak}
        predicted = [
            *(
                (name, format_bytes(size), f"×{size / max(self.baseline_peak, 1):.2f}")
                for name, size in sizes.items()
                if size is not None
            ),
            ("the plan in one process", format_bytes(self.alone.predicted_peak), ""),
            *([("on its host", format_bytes(host), "")] if (host := self.alone.offloaded) else []),
            ("time without communication", "", f"×{self.predicted_time_ratio:.2f}"),
        ]
        parts = (
            f"{self.alone.title}, one training step on each of {self.world_size} ranks, "
            f"{self.strategy}",
            markdown_table(("predicted for a rank", "", "of the baseline"), predicted),
            f"At the peak, in the {self.phase}:",
            peak_table(self.at_peak, self.predicted_peak),
            "without workspaces of kernels and buffers of the communication library",
            str(self.plan),
        )
        return "\n\n".join(parts)


@shown("zoo.plan_rank")
def plan_rank(
    model: nn.Module,
    inputs: Inputs,
    *,
    world_size: int,
    strategy: Strategy = "fsdp2",
    memory_budget: Budget | None = None,
    max_overhead: Overhead | None = None,
    optimizer: OptimizerOption | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
    optimizer_in_backward: bool = False,
    offload: bool = False,
    host_budget: int | str | None = None,
) -> RankReport:
    """Finds the plan of least time whose training step keeps to a budget on each of many ranks.

    The ranks are simulated: nothing of the model's size is allocated. Bytes are those of rank 0, as
    the device's allocator counts them, with cuBLAS's workspaces and without those of other kernels.
    Some twenty plans are compared, so that a faster one may be missed.

    Args:
        model: whole; a copy is spread.
        inputs: of one rank: its part of the batch.
        world_size: the number of ranks.
        strategy: "fsdp2" shards each block and then the whole (ZeRO-3, arXiv:1910.02054), "ddp"
            keeps all on each rank and gradients in buckets (arXiv:2006.15704); or a function that
            spreads a copy of the model in place, called within a group of `world_size` processes.
        memory_budget: that of `zoo.plan`, for the peak of a rank; not "device".
        max_overhead, optimizer, loss, device: as in `zoo.plan`; kernels are never timed.
        optimizer_in_backward: not by "ddp".
        offload, host_budget: for each rank.

    Raises:
        ArgumentError: a forward that cannot be traced, a model that is spread already, no such
            strategy or bound, or a process group that exists already.
        BudgetError: no plan keeps to the budget, with the least that one needs.
        OptimizerError: with `optimizer_in_backward`.
    """
    bounds = parse_bounds(memory_budget, max_overhead)
    check_step(model, "planning", loss)
    if bounds[0] == "device":
        raise ArgumentError(
            "memory_budget='device' is what is free here; for a rank that is elsewhere give bytes, "
            "'80GiB' or a fraction of the baseline"
        )
    if type(world_size) is not int or not 1 <= world_size <= MOST_RANKS:
        raise ArgumentError(
            f"world_size={shortened(world_size)} must be a number from 1 to {MOST_RANKS}; for more "
            "ranks plan for that many, of which one takes hardly less"
        )
    name, spread = _spreading(strategy)
    if name == "ddp" and optimizer_in_backward:
        raise ArgumentError(
            "strategy='ddp' combines gradients after an optimizer in the backward has used them; "
            "choose 'fsdp2', or leave out optimizer_in_backward"
        )
    training = model, Invocation.of(inputs), optimizer, loss or mean_of, spread
    with random_state_restored(), _fake_group(world_size):
        step = CopiedStep(*training, in_backward=optimizer_in_backward)
        planner = planner_for(
            _hooked_as(step.model, model),
            inputs,
            optimizer=optimizer,
            loss=loss,
            device=device,
            optimizer_in_backward=optimizer_in_backward,
            offload=Offload.of(offload, host_budget).named_in(None),
            measured=False,
        )
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        buckets = sum(parameter.nbytes for parameter in trained) if name == "ddp" else 0
        rank = _Rank(step, planner, buckets)
        point, budget = rank.chosen(*bounds)
        if budget is None or rank.peak(point) <= budget:
            return rank.report(point, budget, world_size, name)
        least, baseline = rank.peak(point), rank.peak(planner.baseline)
        text = (
            f"a rank of {world_size} by {name} needs at least {exact_bytes(least)} by the plans "
            f"compared; the budget is {exact_bytes(budget)}; the baseline takes "
            f"{exact_bytes(baseline)}. Raise the budget to {at_least(least)!r}, lower the batch of "
            "a rank, or spread over more ranks."
        )
        if not optimizer_in_backward and name != "ddp":
            with contextlib.suppress(OptimizerError):
                rank = _Rank(CopiedStep(*training, in_backward=True), planner, buckets)
                needed = rank.peak(point)
                text += only_in_backward(needed) if needed <= budget else ""
        raise BudgetError(f"{text}{planner.gaps}", budget, least, baseline)


class _Rank:
    """Rank 0, on which a step is tracked by one plan after another."""

    def __init__(self, step: CopiedStep, planner: StepPlanner, buckets: int) -> None:
        self.step, self.planner = step, planner
        # bytes of no tensor, the same by all plans
        self.beside = {
            "buckets of gradients": buckets,
            "workspaces of libraries": planner.step.fixed.libraries,
        }
        self.timelines: dict[tuple[Plan, tuple[int, ...]], Timeline] = {}

    def timeline(self, point: Point) -> Timeline:
        """Returns a step by a plan, with its bytes as the device's allocator counts them."""
        plan = self.planner.step.of_model(point).plan
        if (plan, point.offloads) not in self.timelines:
            tracked = self.step.track(plan, point.offloads)
            self.timelines[plan, point.offloads] = tracked.counted_by(self.planner.step.rounding)
        return self.timelines[plan, point.offloads]

    def peak(self, point: Point) -> int:
        """Returns the bytes of a step by a plan at its peak."""
        return self.timeline(point).peak + sum(self.beside.values())

    def chosen(self, memory_budget: Any, max_overhead: float | None) -> tuple[Point, int | None]:
        """Returns a plan and the budget in bytes: the plan of least peak where none fits."""
        points = self.planner.proposals.trades
        if max_overhead is not None:
            quick = [point for point in points if point.time_ratio <= 1 + max_overhead]
            return min(each("steps by plans", quick), key=self.peak), None
        budget = memory_budget
        if isinstance(budget, float):
            budget = int(budget * self.peak(self.planner.baseline))
        for point in each("steps by plans", points):
            if self.peak(point) <= budget:
                return point, budget
        return min(points, key=self.peak), budget

    def report(
        self, point: Point, budget: int | None, world_size: int, strategy: str
    ) -> RankReport:
        """Returns the report of a plan."""
        timeline = self.timeline(point)
        return RankReport(
            world_size=world_size,
            strategy=strategy,
            predicted_peak=self.peak(point),
            baseline_peak=self.peak(self.planner.baseline),
            budget=budget,
            phase=timeline.phase_at(timeline.peak_point),
            at_peak=timeline.by("category") | {n: size for n, size in self.beside.items() if size},
            alone=self.planner.describe(point, None),
        )


def _hooked_as(spread: nn.Module, model: nn.Module) -> nn.Module:
    """Returns a copy that shares a model's tensors, with a hook wherever the spread model has one.

    Language models call a decoder or an embedding that has hooks, where they compute the same by
    other kernels without (`layers.weight_sharing`): so the steps are those of a rank.
    """
    hooked = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for path, module in spread.named_modules():
        if is_hooked(module):
            hooked.get_submodule(path).register_forward_pre_hook(lambda *_: None)
    return hooked


def _spreading(strategy: Any) -> tuple[str, Callable[[nn.Module], object] | None]:
    """Returns a strategy's name and the function that spreads a model by it."""
    if callable(strategy):
        return getattr(strategy, "__name__", type(strategy).__name__), strategy
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        names = " nor ".join(map(repr, STRATEGIES))
        raise ArgumentError(f"strategy={strategy!r} is neither {names} nor a function of the model")
    return strategy, STRATEGIES[strategy]


def _shard(model: nn.Module) -> None:
    """Shards each block and then the other parameters, by FSDP2."""
    # imported late because it takes a second that `import zoo` does not need
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh(device_of(model).type, (distributed.get_world_size(),))
    for block in map(model.get_submodule, block_paths(model)):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


STRATEGIES: dict[str, Callable[[nn.Module], object] | None] = {"fsdp2": _shard, "ddp": None}


@contextlib.contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of a group whose other ranks are simulated."""
    if not distributed.is_available():
        raise ArgumentError("this build of torch has no torch.distributed, which spreads models")
    if distributed.is_initialized():
        raise ArgumentError(
            "there is a process group already, and a fake one would replace it; call this before "
            "init_process_group, or in a process of its own"
        )
    # each group makes uncaught errors begin with the rank, once more than before
    report_uncaught = sys.excepthook
    try:
        distributed.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        sys.excepthook = report_uncaught
