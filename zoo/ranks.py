"""What a training step takes on each of many ranks, none of which need be here, and the best plan.

    costs of the steps in one process     plans that may be the best, some twenty, the fastest first
    a fake group of so many processes     this one is rank 0, its collectives send nothing
    a fake copy of the model, sharded     by FSDP2's own code, whose hooks then run
    a step of it by one of the plans      tracked: bytes of rank 0, the largest of all ranks

The best plan of one process need not be the best here: gradients and the optimizer's state are
spread, and a segment that runs again gathers all weights in it until its backward. So each plan's
own step is looked at, until one keeps to the budget. Bytes are those of tensors; what kernels and
the library that communicates allocate inside of themselves is not among them: gloo, for one, copies
gradients before it reduces them.
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

from zoo.ahead import look_ahead
from zoo.chain import is_hooked
from zoo.entry import Inputs, Invocation, Loss, place_of
from zoo.errors import ArgumentError, BudgetError, shortened
from zoo.measure.optimizer import MakeOptimizer
from zoo.measure.timeline import Timeline
from zoo.plan import Plan
from zoo.plan_report import PlanReport
from zoo.planning import Budget, Prospect, check_bounds
from zoo.report.markdown import markdown_table
from zoo.tracing.blocks import block_paths
from zoo.tracking import TrainingStep, mean_of
from zoo.units import at_least, exact_bytes, format_bytes, parse_bytes
from zoo.verification.records import read_streams, set_streams

# for each parameter torch lists all ranks: for so many that takes minutes
MOST_RANKS = 2**16
Strategy = str | Callable[[nn.Module], object]


@dataclass(frozen=True)
class RankReport:
    """A plan and what it should cost each rank.

    Attributes:
        world_size: how many ranks there are.
        strategy: what spreads the model over them.
        predicted_peak: bytes of the whole training step at its peak, on rank 0.
        baseline_peak: likewise, when everything is kept.
        budget: bytes, None where time was given.
        phase: of the step at the peak: "forward", "backward", "recompute" or "optimizer".
        at_peak: `predicted_peak` by category; "parameters" are shards and what is gathered.
        alone: the plan and what it should cost in one process that has all of the model.
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
        """Seconds of forward and backward against keeping everything, communication left out."""
        return self.alone.predicted_time_ratio

    def to_json(self) -> str:
        """Writes the report as JSON."""
        return json.dumps(vars(self), indent=1, default=vars)

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file that `zoo.PlanReport.load` reads, with its costs alone."""
        self.alone.save(path)

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.alone.title}, one training step on each of {self.world_size} ranks, "
                f"{self.strategy}\n",
                markdown_table(
                    ("predicted for a rank", "", "of keeping everything"), list(self._predictions())
                ),
                f"\nAt the peak, in the {self.phase}:\n",
                markdown_table(("what", "bytes", "share"), list(self._shares())),
                "\nwithout what kernels and the communicating library take inside of themselves",
                f"\n{self.plan}",
            )
        )

    def _predictions(self) -> Iterator[tuple[str, str, str]]:
        yield "peak", *self._size(self.predicted_peak)
        if self.budget is not None:
            yield "budget", *self._size(self.budget)
        yield "keeping everything", *self._size(self.baseline_peak)
        yield "the plan in one process", format_bytes(self.alone.predicted_peak), ""
        yield "forward and backward, without communication", "", f"×{self.predicted_time_ratio:.2f}"

    def _size(self, size: int) -> tuple[str, str]:
        return format_bytes(size), f"×{size / max(self.baseline_peak, 1):.2f}"

    def _shares(self) -> Iterator[tuple[str, str, str]]:
        for words, size in {**self.at_peak, "in all": self.predicted_peak}.items():
            yield words, format_bytes(size), f"{size / max(self.predicted_peak, 1):.1%}"


def plan_rank(
    model: nn.Module,
    inputs: Inputs,
    *,
    world_size: int,
    strategy: Strategy = "fsdp2",
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    device: str | None = None,
) -> RankReport:
    """Finds the plan of least time whose training step keeps to a budget on each of many ranks.

    None of them need be here: a fake process group stands for them and fake tensors for all others,
    so that nothing of the model's size is allocated. Bytes are those of the step's tensors on rank
    0, which of uneven shards has the larger; workspaces of kernels are not counted. Some twenty
    plans are looked at, so that a faster one may be missed.

    Args:
        model: whole, on no rank yet; may be on the meta device. A copy is spread.
        inputs: what one rank's model is called with: its part of the batch.
        world_size: how many ranks there are.
        strategy: "fsdp2" shards each block and then the whole (`fully_shard`, ZeRO-3, as in
            arXiv:1910.02054), "ddp" keeps all on each rank and a copy of the gradients in buckets
            (`DistributedDataParallel`, arXiv:2006.15704). Or a function that spreads the copy of
            the model that it is given, in place, as `fully_shard` and `parallelize_module` do: it
            is called where `torch.distributed` has the group of `world_size` processes.
        memory_budget: the peak of a rank: bytes, "8GiB", or a fraction of what keeping everything
            takes there, `0.5`.
        max_overhead, optimizer, loss, device: those of `zoo.plan`; kernels are never timed, and
            time is without communication.

    Raises:
        ArgumentError: no module, one whose forward cannot be followed or that is spread already,
            or no such strategy or bound; a process group that is there already.
        BudgetError: no plan keeps to the budget, with the least that one needs.
    """
    check_bounds(memory_budget, max_overhead)
    name, spread = _spreading(strategy)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"planning needs a torch.nn.Module; got {type(model).__name__}")
    step = TrainingStep(model, Invocation.of(inputs), optimizer, loss or mean_of, spread)
    streams = read_streams()
    try:
        with _group(_checked(world_size)):
            rank = _Rank(world_size, name, step)
            prospect = look_ahead(
                rank.in_one_process(),
                inputs,
                optimizer=optimizer,
                loss=loss,
                device=device or "cpu",
            )
            return rank.report(prospect, memory_budget, max_overhead)
    finally:
        set_streams(streams)


class _Rank:
    """Rank 0 of so many; remembers the steps that it has looked at."""

    def __init__(self, world_size: int, strategy: str, step: TrainingStep) -> None:
        self.world_size, self.strategy, self.step = world_size, strategy, step
        trained = (parameter for parameter in step.model.parameters() if parameter.requires_grad)
        self.buckets = sum(p.nbytes for p in trained) if strategy == "ddp" else 0
        self.timeline = functools.cache(step.predicted)

    def in_one_process(self) -> nn.Module:
        """Returns the model with hooks where spreading it leaves some, its tensors shared.

        A module that has hooks runs as a whole, so that they fire: the steps are those of a rank.
        """
        model = self.step.model
        whole: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
        hooked = copy.deepcopy(model, whole)
        for path, module in self.step.fake.named_modules():
            if is_hooked(module):
                hooked.get_submodule(path).register_forward_pre_hook(_nothing)
        return hooked

    def report(
        self, prospect: Prospect, memory_budget: Budget | None, max_overhead: float | None
    ) -> RankReport:
        """Chooses among plans of which one may be the best on a rank, too."""
        plans = {point: prospect.of_model(point).plan for point in prospect.trades}
        if memory_budget is None:
            assert max_overhead is not None
            quick = [point for point in plans if point.time_ratio <= 1 + max_overhead]
            chosen = min(quick, key=lambda point: self.peak(plans[point]))
            return self._described(prospect.describe(chosen, None), None)
        budget = self._bytes_of(memory_budget)
        # the fastest come first
        fitting = (point for point in plans if self.peak(plans[point]) <= budget)
        found = next(fitting, None)
        if found is None:
            raise BudgetError(self._too_much(budget, min(map(self.peak, plans.values()))))
        return self._described(prospect.describe(found, None), budget)

    def peak(self, plan: Plan | None) -> int:
        """Returns the bytes that a rank takes by a plan, or keeping everything."""
        return self._seen(plan).peak + self.buckets

    def _seen(self, plan: Plan | None) -> Timeline:
        return self.timeline(plan if plan is not None and plan.depth() else None)

    def _bytes_of(self, budget: Budget) -> int:
        if isinstance(budget, float):
            return int(budget * self.peak(None))
        if budget == "device":
            raise ArgumentError(
                "memory_budget='device' is what is free here; for a rank that is elsewhere give "
                "bytes, '80GiB' or a fraction of what keeping everything takes"
            )
        return parse_bytes(budget, "memory_budget")

    def _described(self, alone: PlanReport, budget: int | None) -> RankReport:
        timeline = self._seen(alone.plan)
        buckets = {"buckets of gradients": self.buckets} if self.buckets else {}
        return RankReport(
            world_size=self.world_size,
            strategy=self.strategy,
            predicted_peak=self.peak(alone.plan),
            baseline_peak=self.peak(None),
            budget=budget,
            phase=timeline.phase_at(timeline.peak_point),
            at_peak=timeline.by("category") | buckets,
            alone=alone,
        )

    def _too_much(self, budget: int, least: int) -> str:
        return (
            f"a rank of {self.world_size} by {self.strategy} needs at least {exact_bytes(least)} "
            f"by the plans looked at; the budget is {exact_bytes(budget)}; keeping everything "
            f"takes {exact_bytes(self.peak(None))}. Raise the budget to {at_least(least)!r}, lower "
            "the batch of a rank, or spread over more ranks."
        )


def _nothing(*_: Any) -> None:
    """Stands for a hook."""


def _checked(world_size: Any) -> int:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ArgumentError(f"world_size={shortened(world_size)} is no number from 1")
    if world_size > MOST_RANKS:
        raise ArgumentError(
            f"world_size={shortened(world_size)} is beyond {MOST_RANKS}; plan for that many, of "
            "which a rank takes hardly less: a fake group of more takes hours"
        )
    return world_size


def _spreading(strategy: Any) -> tuple[str, Callable[[nn.Module], object] | None]:
    """Returns a strategy's name and what it does to a model."""
    if callable(strategy):
        return getattr(strategy, "__name__", type(strategy).__name__), strategy
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ArgumentError(
            f"strategy={strategy!r} is neither {' nor '.join(map(repr, STRATEGIES))} nor a "
            "function of the model"
        )
    return strategy, STRATEGIES[strategy]


def _shard(model: nn.Module) -> None:
    """Shards each block and then what is left, by FSDP2."""
    # imported late because it takes a second that `import zoo` does not need
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh(place_of(model).type, (distributed.get_world_size(),))
    for path in block_paths(model):
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)


STRATEGIES: dict[str, Callable[[nn.Module], object] | None] = {"fsdp2": _shard, "ddp": None}


@contextlib.contextmanager
def _group(world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of a group whose others are not there."""
    if not distributed.is_available():
        raise ArgumentError("this build of torch has no torch.distributed, which spreads models")
    if distributed.is_initialized():
        raise ArgumentError(
            "there is a process group already, and a fake one takes its place; call this before "
            "init_process_group, or in a process of its own"
        )
    # imported late: torch keeps the group that sends nothing among what its tests use
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    # it has every uncaught error begin with the rank from then on, once more for each group
    report_uncaught = sys.excepthook
    try:
        distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        sys.excepthook = report_uncaught
