"""From a memory budget to a plan, for a chain of steps whose first state is known.

A budget is the peak of a whole training step. A plan decides about activations only; the rest is
counted here, and gradients of parameters from when the backward makes them:

    forward, backward    parameters + buffers + inputs + optimizer state + activations + gradients
    optimizer            parameters + buffers + inputs + optimizer state + gradients + its scratch

The larger of the two must keep to the budget. Nothing of the model's size is allocated: bytes come
from fake tensors, seconds and workspaces from one real run of each kind of kernel
(`profiling.chain_profile`).
"""

import copy
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.chain import Outline, State, step_names
from zoo.errors import ArgumentError, BudgetError
from zoo.invocation import place_of, title_of, with_loss
from zoo.planner import schemes
from zoo.planner.costs import StepCosts
from zoo.planner.plan import Item, Plan
from zoo.planner.simulate import least_possible, simulate
from zoo.planner.subsample import thinned
from zoo.policy.report import FixedBytes, Frontier, PeakBytes, PlanReport, Point
from zoo.profiling.allocator import resident_bytes
from zoo.profiling.chain_profile import Profile
from zoo.profiling.kernel_costs import KernelCosts, device_named
from zoo.profiling.optimizer import MakeOptimizer, OptimizerBytes, optimizer_bytes
from zoo.profiling.sharded import is_spread
from zoo.units import at_least, exact_bytes, parse_bytes

# bytes of the state of a random stream, and of one that a segment keeps, packed
STREAM = 5056
KEPT_STREAM = 2528 + 128
# numbers that torch makes in C++ on the way, such as a learning rate: some bytes each
NUMBERS = 64
# plans of a kind that are worth a look where each look takes a step
MOST = 10
# segments in segments of such a plan: a step by one of 150 runs single steps 11,000 times again
DEEPEST = 64

Budget = int | float | str


class BudgetPlanner:
    """A chain's costs for one kind of inputs, and its best plans for any budget.

    `model` is the chain, or the module whose steps these are.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Outline,
        state: State,
        *,
        optimizer: MakeOptimizer | OptimizerBytes | None = torch.optim.AdamW,
        loss: Callable[..., Tensor] | None = None,
        device: str | None = None,
    ) -> None:
        if any(map(is_spread, model.parameters())):
            raise ArgumentError(
                f"the parameters of {type(model).__name__} are spread over processes, and what "
                "comes and goes with them is not counted. Plan before they are, with "
                "zoo.plan_rank, or choose checkpoint=True or a scheme"
            )
        self.title = title_of(model, state)
        self.outline, self.state = found, state
        self.names = tuple(step_names(model, found.steps))
        self.steps = len(found.steps)
        if not isinstance(optimizer, OptimizerBytes):
            optimizer = optimizer_bytes(optimizer, model.parameters())
        self.optimizer = optimizer
        self.fixed = _fixed_bytes(model, state, optimizer)
        self.place = place_of(model)
        named = device_named(device) if device is not None else None
        self.profile = Profile(model, with_loss(found, loss), state)
        is_here = named is None and self.place.type != "meta"
        kernels = self.profile.kernels() if is_here else ()
        self._count(self.profile.costs(named, kernels), bool(kernels))

    def with_kernels(self, kernels: Sequence[KernelCosts | None]) -> "BudgetPlanner":
        """Returns what this is with what each kind of kernel takes."""
        found = copy.copy(self)
        for known in ("points", "least", "trades"):
            vars(found).pop(known, None)
        found._count(self.profile.costs(kernels=kernels), True)
        return found

    def _count(self, costs: StepCosts, timed: bool) -> None:
        self.timed = timed
        # a training loop's names for the outputs and the loss outlive the backward
        self.costs = replace(costs, returned=costs.live[self.steps] | costs.live[-1])
        self.whole = self.costs.with_parameter_gradients()
        self.baseline = self._point(Plan.keep_all(len(self.costs)))

    def report(self, memory_budget: Budget | None, max_overhead: float | None) -> PlanReport:
        """Chooses a plan and says what it costs."""
        check_bounds(memory_budget, max_overhead)
        if max_overhead is not None:
            return self.describe(self._within_time(max_overhead), None)
        budget = self.bytes_of(memory_budget)
        return self.describe(self._within_bytes(budget), budget)

    def frontier(self) -> Frontier:
        """Returns the best plans and the classic schemes."""
        classic = {name: scheme(self.costs.blocks) for name, scheme in schemes.FROM_BLOCKS.items()}
        classic[schemes.BLOCKS] = schemes.each_block(self.costs.blocks, self.outline.whole)
        classic |= {name: scheme(self.costs) for name, scheme in schemes.FROM_COSTS.items()}
        others = (
            self._point(_kept_from(found, self.steps), name) for name, found in classic.items()
        )
        during = self.fixed.beside_activations + least_possible(self.whole)
        return Frontier(
            tuple(map(self.of_model, (*self.points, *others))),
            self.of_model(replace(self.baseline, name="baseline")),
            max(during, self.fixed.optimizer_peak),
            self.title,
            self.timed,
        )

    def point(self, found: Plan) -> Point:
        """Says what a plan of the chain costs.

        Raises:
            PlanError: it is for another number of steps.
        """
        found.check(self.steps)
        return self._point(Plan([*found, *range(self.steps, len(self.costs))]))

    def bytes_of(self, budget: Any) -> int:
        """Returns a budget in bytes."""
        if budget == "device":
            return _free_bytes(self.place) + self.fixed.parameters + self.fixed.buffers
        if isinstance(budget, float):
            return int(budget * self.baseline.peak)
        return parse_bytes(budget, "memory_budget")

    @functools.cached_property
    def points(self) -> list[Point]:
        """The best plans by rising peak and falling time."""
        table = _planner().frontier(self.whole)
        plans = dict.fromkeys(_kept_from(point.plan, self.steps) for point in table)
        points = sorted(map(self._point, plans), key=lambda p: (p.time_ratio, p.peak))
        best: list[Point] = []
        for point in points:
            if not best or point.peak < best[-1].peak:
                best.append(point)
        return best[::-1]

    @functools.cached_property
    def trades(self) -> list[Point]:
        """Plans that may be the best where the rest of a step lies elsewhere; the fastest first.

        Activations alone decide which: plans of all kinds, and with them those that run single
        steps again.
        """
        table = _planner().frontier(self.costs)
        best = [_kept_from(point.plan, self.steps) for point in table]
        single = [
            Plan([*found, *range(self.steps, len(self.costs))])
            for found in schemes.one_by_one(self.costs, self.steps)
        ]
        kept = Plan.keep_all(len(self.costs))
        chosen = dict.fromkeys([kept, *thinned(best, MOST), *thinned(single, MOST)])
        shallow = (found for found in chosen if found.depth() <= DEEPEST)
        return sorted(map(self._point, shallow), key=lambda point: point.time_ratio)

    @functools.cached_property
    def least(self) -> Point:
        """The plan of least peak, without the other best ones."""
        found = self._point(_kept_from(_planner().least(self.whole), self.steps))
        # of what is tiny the random streams of a segment take more than it saves
        return min(self.baseline, found, key=lambda point: point.peak)

    def _point(self, found: Plan, name: str = "optimal") -> Point:
        result = simulate(found, self.whole)
        activations = self.fixed.beside_activations + result.peak + self._streams(found)
        peak = max(activations, self.fixed.optimizer_peak) + NUMBERS
        return Point(
            peak,
            1 + result.recomputed_seconds / self._seconds(),
            found,
            name,
            result.recomputed_flops / (sum(self.costs.flops) or 1),
        )

    def _streams(self, found: Plan) -> int:
        """Returns the bytes of random states that segments keep, and of one that a replay restores.

        As if each kernel that draws had a segment of its own, so that plans compare by the rest.
        """
        draws = sum(self.costs.draws)
        return KEPT_STREAM * draws + STREAM if draws and found.depth() else 0

    def _seconds(self) -> float:
        return sum(self.costs.seconds) + sum(self.costs.seconds_backward) or 1.0

    def _within_bytes(self, budget: int) -> Point:
        found = [point for point in self.points if point.peak <= budget]
        if not found:
            least, baseline = self.points[0].peak, self.points[-1].peak
            raise BudgetError(
                f"a training step needs at least {exact_bytes(least)}; the budget is "
                f"{exact_bytes(budget)}; keeping everything takes {exact_bytes(baseline)}. Raise "
                f"the budget to {at_least(least)!r}, lower the batch size, or choose an optimizer "
                "of less state."
            )
        return found[-1]

    def _within_time(self, overhead: float) -> Point:
        return next(point for point in self.points if point.time_ratio <= 1 + overhead)

    def describe(self, point: Point, budget: int | None) -> PlanReport:
        """Says in full what a point costs that was chosen for a budget in bytes, or for a time."""
        result = simulate(point.plan, self.costs)
        return PlanReport(
            plan=self.of_model(point).plan,
            predicted_peak=point.peak,
            predicted_time_ratio=point.time_ratio,
            predicted_activations=result.peak,
            budget=budget,
            baseline_peak=self.baseline.peak,
            least_peak=self.points[0].peak,
            fixed=self.fixed,
            at_peak=self._at_peak(point),
            flops=sum(self.costs.flops),
            recomputed_flops=result.recomputed_flops,
            names=self.names,
            blocks=self.costs.blocks[: self.steps],
            saved=self.costs.newly_saved()[: self.steps],
            title=self.title,
            tried=self.timed,
        )

    def of_model(self, point: Point) -> Point:
        """Takes the loss, which is not the model's, out of a plan."""
        return replace(point, plan=Plan(point.plan[:-1])) if self.has_loss else point

    def _at_peak(self, point: Point) -> PeakBytes:
        """Tells apart what the bytes of a plan's peak are."""
        result = simulate(point.plan, self.whole)
        if self.fixed.optimizer_peak > self.fixed.beside_activations + result.peak:
            return PeakBytes.in_optimizer(self.fixed, point.peak)
        moment, left = result.moment, self.costs.parameter_gradients
        gradients = left[moment.gradient_of] if left and moment.gradient_of is not None else 0
        step = (*self.names, "the loss")[moment.step]
        return PeakBytes.in_run(self.fixed, point.peak, moment, gradients, step)

    @property
    def has_loss(self) -> bool:
        """Whether a step of the costs is the loss, and not the model's."""
        return len(self.costs) > self.steps


def check_bounds(memory_budget: Any, max_overhead: Any) -> None:
    """Raises ArgumentError unless one of them is given, in a form that is known."""
    if (memory_budget is None) == (max_overhead is None):
        raise ArgumentError(
            f"one of memory_budget and max_overhead must be given; got {memory_budget!r} and "
            f"{max_overhead!r}"
        )
    if isinstance(memory_budget, float):
        if not 0 < memory_budget <= 1:
            raise ArgumentError(
                f"memory_budget={memory_budget} is no fraction of the baseline; give one above 0 "
                "and up to 1, an int of bytes, or text such as '8GiB'"
            )
    elif memory_budget not in (None, "device"):
        parse_bytes(memory_budget, "memory_budget")
    if max_overhead is None:
        return
    if not isinstance(max_overhead, int | float):
        raise ArgumentError(f"max_overhead={max_overhead!r} is no number; 0.2 allows a fifth more")
    if not max_overhead >= 0:
        raise ArgumentError(f"max_overhead={max_overhead} is below 0; 0.2 allows a fifth more time")


def _kept_from(found: Plan, steps: int) -> Plan:
    """Takes the loss out of a segment that it ends, since it is not the chain's to recompute."""
    total = len(found.flatten())
    if total == steps or isinstance(found[-1], int):
        return found
    inner = _without_last(found[-1])
    return Plan([*found[:-1], *([inner] if inner else []), total - 1])


def _without_last(item: tuple[Item, ...]) -> tuple[Item, ...]:
    last = item[-1]
    rest = _without_last(last) if isinstance(last, tuple) else ()
    return (*item[:-1], rest) if rest else item[:-1]


def _planner() -> Any:
    try:
        # numpy is needed to plan for a budget, and for nothing else that `import zoo` brings
        from zoo.planner import optimal  # noqa: PLC0415
    except ImportError as error:
        raise ArgumentError(
            "planning for a budget needs numpy: pip install 'zoo-checkpoint[plan]'"
        ) from error
    return optimal


def _fixed_bytes(model: nn.Module, inputs: State, optimizer: OptimizerBytes) -> FixedBytes:
    given = [value for value in inputs if isinstance(value, Tensor)]
    resident = resident_bytes(model, inputs=given)
    trained: Iterable[Tensor] = (p for p in model.parameters() if p.requires_grad)
    return FixedBytes(
        parameters=resident.parameters,
        buffers=resident.buffers,
        gradients=sum(parameter.nbytes for parameter in trained),
        inputs=resident.inputs,
        optimizer=optimizer.state,
        scratch=optimizer.step,
    )


def _free_bytes(device: torch.device) -> int:
    """Returns the bytes that are free on a device, or cached by torch and not in use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    if device.type != "cpu":
        raise ArgumentError(
            "memory_budget='device', and checkpoint='auto' without a budget, is what is free on "
            f"cpu or cuda; this model is on {device}. Put it where it is to train, give bytes such "
            "as '8GiB', or take the plan that zoo.plan finds for them"
        )
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
