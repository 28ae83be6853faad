"""`zoo.plan`, `zoo.frontier` and `zoo.plan_rank`: plans for any model before its first step.

The model and its inputs may be on the meta device; the model does not change. `policy.budget` plans
for one process. On a rank another plan may be the best: gradients and the optimizer's state are
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
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from zoo._torch import fake_store
from zoo.api.checkpoint import outline_of
from zoo.api.track import CopiedStep, mean_of
from zoo.engine.devices import random_state_restored
from zoo.errors import ArgumentError, BudgetError, OptimizerError, shortened
from zoo.invocation import (
    Inputs,
    Invocation,
    Loss,
    check_step,
    device_of,
    nothing_trained,
    title_of,
)
from zoo.layers.module_hooks import is_hooked
from zoo.planner.plan import Plan
from zoo.policy.budget import (
    Budget,
    BudgetPlanner,
    Overhead,
    check_planner,
    only_in_backward,
    outputs_held,
    parse_bounds,
)
from zoo.policy.plan_report import Frontier, PlanReport, peak_table
from zoo.profiling.optimizer_memory import OptimizerBytes, OptimizerOption, maker_of
from zoo.profiling.progress import each, shown
from zoo.profiling.timeline import Timeline
from zoo.report.escaping import markdown_table
from zoo.tracing.partition import block_paths
from zoo.units import at_least, exact_bytes, format_bytes

# for each parameter torch lists all ranks: for so many that takes minutes, for more hours
MOST_RANKS = 2**16
Strategy = str | Callable[[nn.Module], object]


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
) -> PlanReport:
    """Finds the plan of least time whose training step keeps to a budget in bytes.

    Args:
        model: in the mode of the training; one in eval mode is planned for in that mode, with a
            warning.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments, real or on the meta
            device. Targets are among them where the model takes them: `(tokens, targets)` for
            GPT-2, `(tokens, None, targets)` for an LSTM, `{"input_ids": tokens, "labels": tokens}`
            for transformers, whose loss is then the output of that name.
        memory_budget: the peak of the whole training step: bytes as an int, `"8GiB"` or `"8G"`
            (2^30 each), `"8GB"` (10^9); a share of the baseline's peak, `0.6` or `"60%"`; or
            `"device"` for what is free where the model is.
        max_overhead: instead, `0.2` or `"20%"` asks for the least memory in at most 1.2 times the
            baseline's time.
        optimizer: whose state is counted: `"adamw"`, `"adam"`, `"sgd"` (with momentum) or `"none"`;
            a class, or a function of the list of parameters; an optimizer of the model's
            parameters; None counts none. Called under autocast, the plan counts the casts of
            weights that are cached until the forward and the loss are over; where the backward is
            inside of the region, too, subtract half of `report.fixed.parameters` from the budget.
        loss: where it is outside of the model, so that its bytes count: a function of the model's
            output that knows its targets, `lambda logits: cross_entropy(logits, targets)`, which
            count as inputs; targets that are meta tensors count as zeros. Wherever zoo takes a loss
            it is called as in `loss(model(x))`: a tuple, dict or dataclass is its one argument.
        device: "a100", say, estimates for a device that is not here by its peak rates, without
            kernel workspaces (`zoo.profiling.kernel_costs` lists them). By default, and by the name
            of the model's own device, each kind of kernel is measured where the model is. The
            report says which device it is for, and warns where its plan trains on another.
        optimizer_in_backward: the step is trained with `zoo.optimizer_in_backward`: gradients are
            counted until each is complete.
        accumulates: the step begins with gradients, of earlier backwards or zeroed in place: all
            of them count from the start.
        holds_outputs: a variable of the training loop holds what the model returns until the
            backward is over, as in `outputs = model(x)`: True unless `loss` is given, which makes
            it `loss(model(x)).backward()`. False for the Trainer of transformers, which drops the
            logits: a sixteenth of a step of GPT-2.

    Raises:
        ArgumentError: no module, one that reads numbers which only a real step has, a loss that
            does not take the model's output, both or neither of budget and overhead, or a wrong
            form of them.
        BudgetError: no plan keeps to the budget, with the least that one needs.
    """
    bounds = parse_bounds(memory_budget, max_overhead)
    options: Any = {
        "device": device,
        "optimizer_in_backward": optimizer_in_backward,
        "accumulates": accumulates,
        "holds_outputs": outputs_held(holds_outputs, loss),
    }
    planner = planner_for(model, inputs, optimizer=optimizer, loss=loss, **options)
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
) -> Frontier:
    """Returns the best plans by rising peak and falling time, then the classic schemes.

    Each point has `peak`, `time_ratio`, `plan` and `name`; `Frontier` draws and writes them.
    Arguments and errors are those of `plan`. Ctrl-C raises `Interrupted`, a KeyboardInterrupt whose
    `found` is the `Frontier` of the plans found so far, once there are some.
    """
    options: Any = {
        "device": device,
        "optimizer_in_backward": optimizer_in_backward,
        "accumulates": accumulates,
        "holds_outputs": outputs_held(holds_outputs, loss),
    }
    check_planner()
    return planner_for(model, inputs, optimizer=optimizer, loss=loss, **options).frontier()


def planner_for(
    model: nn.Module,
    inputs: Inputs | Invocation,
    *,
    optimizer: OptimizerOption | OptimizerBytes | None = torch.optim.AdamW,
    loss: Loss | None = None,
    measured: bool = True,
    **options: Any,
) -> BudgetPlanner:
    """Traces a model for these inputs; options are those of `BudgetPlanner`.

    `measured` runs its kernels where their device is here.
    """
    check_step(model, "planning", loss)
    counted = isinstance(optimizer, OptimizerBytes)
    options["optimizer"] = optimizer if counted else maker_of(optimizer, model)
    given = Invocation.of(inputs)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        shown(title_of(model, tuple(given.tensors))),
    ):
        planner = BudgetPlanner(model, outline_of(model, given, loss), given.tensors, **options)
        if not planner.profile.is_trained:
            raise ArgumentError(nothing_trained(model))
        return planner.measured() if measured else planner


@dataclass(frozen=True)
class RankReport:
    """A plan and its predicted cost on each rank.

    Attributes:
        world_size: the number of ranks.
        strategy: how the model is spread over them.
        predicted_peak: bytes of the whole training step at its peak, on rank 0.
        baseline_peak: the same of the baseline.
        budget: bytes, None where time was given.
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
) -> RankReport:
    """Finds the plan of least time whose training step keeps to a budget on each of many ranks.

    The ranks are simulated, by a fake process group and fake tensors, so that nothing of the
    model's size is allocated. Bytes are those of the step's tensors on rank 0, which of uneven
    shards has the larger, as the allocator of the device counts them, with the workspaces of
    cuBLAS; those of other kernels are not counted. Some twenty plans are compared, so that
    a faster one may be missed.

    Args:
        model: whole, not spread over ranks; may be on the meta device. A copy is spread.
        inputs: of one rank: its part of the batch.
        world_size: the number of ranks.
        strategy: "fsdp2" shards each block and then the whole (`fully_shard`, ZeRO-3, as in
            arXiv:1910.02054), "ddp" keeps all on each rank and a copy of the gradients in buckets
            (`DistributedDataParallel`, arXiv:2006.15704). Or a function that spreads a copy of the
            model in place, as `fully_shard` and `parallelize_module` do: it is called while
            `torch.distributed` has a group of `world_size` processes.
        memory_budget: that of `zoo.plan`, for the peak of a rank; not "device".
        max_overhead, optimizer, loss, device: those of `zoo.plan`; kernels are never timed, and
            time is without communication.
        optimizer_in_backward: the step is trained with `zoo.optimizer_in_backward`: shards of
            gradients are counted until each is used. Not by "ddp".

    Raises:
        ArgumentError: no module, one whose forward cannot be traced or that is spread already, no
            such strategy or bound, an optimizer in the backward by "ddp", or a process group that
            exists already.
        BudgetError: no plan keeps to the budget, with the least that one needs.
        OptimizerError: the optimizer cannot step in the backward.
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
    with random_state_restored(), _fake_group(world_size):
        given = model, Invocation.of(inputs), optimizer, loss or mean_of, spread
        make = functools.partial(CopiedStep, *given)
        step = make(in_backward=optimizer_in_backward)
        options: Any = {"optimizer": optimizer, "optimizer_in_backward": optimizer_in_backward}
        hooked = _hooked_as(step.model, model)
        planner = planner_for(hooked, inputs, loss=loss, device=device, measured=False, **options)
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        buckets = sum(parameter.nbytes for parameter in trained) if name == "ddp" else 0
        other = None if optimizer_in_backward or name == "ddp" else make
        rank = _Rank(world_size, name, functools.cache(step.track), buckets, other, planner)
        return rank.report(*bounds)


@dataclass
class _Rank:
    """Rank 0: `track` tracks a step by a plan; `buckets` are bytes of gradients beside it.

    `other` makes the step in which the optimizer steps in the backward, where it does not yet;
    `planner` has the plans, and says how the device counts bytes.
    """

    world_size: int
    strategy: str
    track: Callable[[Plan | None], Timeline]
    buckets: int
    other: Callable[..., CopiedStep] | None
    planner: BudgetPlanner

    def report(self, memory_budget: Any, max_overhead: float | None) -> RankReport:
        """Chooses among the plans that may be the best on a rank, the fastest first."""
        planner = self.planner
        points = {point: planner.of_model(point).plan for point in planner.trades}
        plans = {point: plan if plan.depth() else None for point, plan in points.items()}
        budget = None
        if max_overhead is not None:
            quick = [point for point in plans if point.time_ratio <= 1 + max_overhead]
            measured = each("steps by plans", quick)
            chosen = min(measured, key=lambda point: self._peak(plans[point]))
        else:
            is_share = isinstance(memory_budget, float)
            budget = int(memory_budget * self._peak(None)) if is_share else memory_budget
            measured = each("steps by plans", plans)
            within = (point for point in measured if self._peak(plans[point]) <= budget)
            if (fastest := next(within, None)) is None:
                raise self._refusal(min(plans.values(), key=self._peak), budget)
            chosen = fastest
        timeline = self._tracked(plans[chosen])
        beside = {"buckets of gradients": self.buckets, "workspaces of libraries": self.libraries}
        return RankReport(
            world_size=self.world_size,
            strategy=self.strategy,
            predicted_peak=self._peak(plans[chosen]),
            baseline_peak=self._peak(None),
            budget=budget,
            phase=timeline.phase_at(timeline.peak_point),
            at_peak=timeline.by("category") | {n: size for n, size in beside.items() if size},
            alone=planner.describe(chosen, None),
        )

    def _peak(self, plan: Plan | None) -> int:
        return self._tracked(plan).peak + self.buckets + self.libraries

    def _tracked(self, plan: Plan | None, *others: CopiedStep) -> Timeline:
        """Tracks a step by a plan, with its bytes as the device's allocator counts them."""
        track = others[0].track if others else self.track
        return track(plan).counted_by(self.planner.rounding)

    @property
    def libraries(self) -> int:
        """The workspaces of libraries, which all plans have."""
        return self.planner.fixed.libraries

    def _refusal(self, plan: Plan | None, budget: int) -> BudgetError:
        """Returns why none of the plans keeps to the budget, of which this one takes the least."""
        least = self._peak(plan)
        text = (
            f"a rank of {self.world_size} by {self.strategy} needs at least {exact_bytes(least)} "
            f"by the plans compared; the budget is {exact_bytes(budget)}; the baseline takes "
            f"{exact_bytes(self._peak(None))}. Raise the budget to {at_least(least)!r}, lower the "
            "batch of a rank, or spread over more ranks."
        )
        with contextlib.suppress(OptimizerError):
            if self.other is not None:
                other = self._tracked(plan, self.other(in_backward=True)).peak + self.libraries
                text += only_in_backward(other) if other <= budget else ""
        text += self.planner.gaps
        return BudgetError(text, budget, least, self._peak(None))


def _hooked_as(spread: nn.Module, model: nn.Module) -> nn.Module:
    """Returns a copy that shares a model's tensors, with a hook wherever the spread model has one.

    A module with hooks runs as a whole, so that they fire: the steps are those of a rank.
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
        known = " nor ".join(map(repr, STRATEGIES))
        raise ArgumentError(f"strategy={strategy!r} is neither {known} nor a function of the model")
    return strategy, STRATEGIES[strategy]


def _shard(model: nn.Module) -> None:
    """Shards each block and then what is left, by FSDP2."""
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
