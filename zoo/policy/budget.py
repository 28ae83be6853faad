"""Plans for a memory budget, for a model whose inputs are known.

A budget limits the peak of a whole training step. A plan changes activations only; the rest is
counted here, with gradients of parameters from when the backward makes them:

    forward, backward    parameters + buffers + inputs + optimizer state + workspaces of libraries
                         + activations + gradients
    optimizer            the first five + gradients + temporaries + outputs

The larger of the two must fit the budget. Where gradients are accumulated, those of earlier
backwards are there from the start. Nothing of the model's size is allocated: bytes come
from fake tensors, seconds and kernel workspaces from real runs of each kind of kernel
(`profiling.kernel_costs`). For a CUDA device each storage counts as the caching allocator counts
it, and so do the workspaces of cuBLAS, so that a budget limits `torch.cuda.max_memory_allocated`.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zoo.engine.devices import (
    counts_memory,
    free_bytes,
    free_host_bytes,
    name_of,
    splits_all_blocks,
)
from zoo.engine.host_memory import copy_rate
from zoo.engine.operator_effects import DROPOUT_STATE
from zoo.engine.sharded import is_spread
from zoo.errors import ArgumentError, BudgetError, Interrupted, needed, shortened
from zoo.invocation import device_of, title_of
from zoo.planner import schemes
from zoo.planner.costs import (
    AT_ONCE,
    CopyRate,
    Simulation,
    StepCosts,
    computed_once,
    least_possible,
    simulate,
)
from zoo.planner.dry_step import DryStep, Gradients, Row, StepBytes, bytes_of_step
from zoo.planner.least_memory import least_memory
from zoo.planner.offload_choices import COUNT, choices, segments_of
from zoo.planner.plan import Item, Plan, RoomyPlan, falling, first_step, thinned
from zoo.policy.plan_report import FixedBytes, Frontier, PeakBytes, PlanReport, Point
from zoo.profiling.caching_allocator import Rounding, rounding_of, with_rests
from zoo.profiling.cudnn_recurrent import dropout_state_bytes
from zoo.profiling.isolation import FailedCall
from zoo.profiling.kernel_costs import Device, KernelCosts, rated_device, rated_name
from zoo.profiling.optimizer_memory import MakeOptimizer, OptimizerBytes, optimizer_bytes
from zoo.profiling.peak_memory import resident_bytes
from zoo.profiling.progress import each, shown
from zoo.profiling.step_profile import Outline, Profile
from zoo.units import SIZES, at_least, exact_bytes, parse_bytes, parse_ratio

# bytes of scalars that torch allocates in C++, such as a learning rate
NUMBERS = 64
# parts of a device's memory that `"device"` leaves to gaps between blocks, with expandable segments
# and without: on an H200 a step by a plan reserved 2 % more than it allocated, without 4 to 71 %, a
# part of which the allocator releases where memory runs out (docs/gpu.md)
FEW_GAPS, GAPS = 1 / 32, 1 / 8
# the most plans of a kind in `trades`, since callers track a whole step for each
MOST = 10
# the deepest nesting of such a plan: with 150 levels single steps are recomputed 11,000 times
DEEPEST = 64
# the least ratio between the rooms of two plans for larger inputs
ROOMIER = 1.2
# steps that the search for items to offload simulates in all: some seconds
SIMULATED_STEPS = 300_000
# how many of the best plans are judged to be shown
SHOWN = 12
# the most judgements in a search for a plan, and those of proposals where none fits, the smallest
MOST_JUDGEMENTS, LOWEST = 8, 4
# the least saving of time for which one more proposal is judged
WORTH = 0.01

Budget = int | float | str
OffloadOption = bool | Collection[int]
Overhead = float | str
BUDGETS = (
    f"{SIZES}, a share of the baseline's peak as 0.6 or '60%', or 'device' for what is free there"
)


@dataclass(frozen=True)
class Offload:
    """Whether a part of what the backward needs lies on the host until then.

    Attributes:
        is_on: whether it may.
        host_budget: the most bytes there; None for as many as that takes.
        items: the first steps of the items of a given plan that are offloaded; None for those that
            a planner chooses for a budget, and for all segments of a plan that is made for none.
    """

    is_on: bool = False
    host_budget: int | None = None
    items: frozenset[int] | None = None

    @classmethod
    def of(cls, offload: OffloadOption, host_budget: int | str | None) -> "Offload":
        """Reads the options of a user.

        Raises:
            ArgumentError: steps that are no numbers, a budget without offloading, or in a wrong
                form.
        """
        items = None if isinstance(offload, bool) else _steps(offload)
        is_on = offload is True or bool(items)
        if host_budget is None:
            return cls(is_on, None, items)
        if not is_on:
            raise ArgumentError(
                f"host_budget={shortened(host_budget)} limits what offload=True copies to the "
                "host; pass both, or leave it out"
            )
        return cls(True, parse_bytes(host_budget, "host_budget"), items)

    def named_in(self, plan: Plan | None) -> "Offload":
        """Returns the same, checked against its plan; None if that is yet to be made.

        Raises:
            ArgumentError: steps are named, and the plan has no such items.
        """
        if not self.items:
            return self
        if plan is None:
            raise ArgumentError(
                f"offload={shortened(sorted(self.items))} names steps of a plan, and this one is "
                "yet to be made; pass offload=True, or to zoo.checkpoint that plan beside offload="
            )
        firsts = [*map(first_step, plan)]
        if unknown := sorted(self.items.difference(firsts)):
            raise ArgumentError(
                f"offload= names step {unknown[0]}, with which no segment and no kept step of the "
                f"plan begins; these do: {shortened(firsts)}. Name some of them, or pass "
                "offload=True"
            )
        return self

    def of_plan(self, plan: Plan) -> frozenset[int]:
        """Returns the items of a plan that the user named, or all segments."""
        if not self.is_on:
            return frozenset()
        return segments_of(plan) if self.items is None else self.items

    def allows(self, needed: int) -> bool:
        """Returns whether the host may hold so many bytes."""
        return self.host_budget is None or needed <= self.host_budget

    def check(self, needed: int, title: str) -> None:
        """Raises BudgetError if a plan copies more to the host than the budget allows."""
        if self.host_budget is not None and not self.allows(needed):
            raise BudgetError(
                f"offloading {title} needs {exact_bytes(needed)} of host memory; host_budget is "
                f"{exact_bytes(self.host_budget)}. Raise it to {at_least(needed)!r}, lower the "
                "batch size, or leave offload= out",
                self.host_budget,
                needed,
            )


NO_OFFLOAD = Offload()
# for the steps that a plan is to fit, whether the backward runs outside of an autocast around the
# model, which holds its casts of weights until it is left
Sides = tuple[bool, ...]
OUTSIDE, INSIDE, EITHER = (True,), (False,), (True, False)


def _steps(offload: Collection[int]) -> frozenset[int]:
    steps = None if isinstance(offload, str) or not isinstance(offload, Iterable) else [*offload]
    if steps is None or any(type(step) is not int or step < 0 for step in steps):
        raise ArgumentError(
            f"offload={shortened(offload)} is neither True nor False, nor the steps that a report "
            "names, as report.offloads"
        )
    return frozenset(steps)


@dataclass(frozen=True, eq=False)
class StepPlanner:
    """Plans one traced training step: its costs, its best plans, the plan for a budget.

    The options are those of `zoo.plan`. `counted_optimizer` has the bytes of the optimizer and
    `kernels` the costs of each different kernel, if they are known. With `offload` the plans are
    those that are the best without, the schemes and equal numbers of blocks, each with nothing and
    with several sets of its items on the host (`planner.offload_choices`). By default the backward
    leaves an autocast that is around the model; a plan for several `sides` fits them all.
    """

    model: nn.Module
    outline: Outline
    inputs: Sequence[Tensor]
    optimizer: MakeOptimizer | None = torch.optim.AdamW
    device: str | None = None
    optimizer_in_backward: bool = False
    accumulates: bool = False
    holds_outputs: bool = True
    counted_optimizer: OptimizerBytes | None = None
    kernels: Sequence[KernelCosts | None] = ()
    offload: Offload = NO_OFFLOAD
    sides: Sides = OUTSIDE

    def __post_init__(self) -> None:
        """Refuses options that exclude each other."""
        if self.accumulates and self.optimizer_in_backward:
            raise ArgumentError(
                "accumulates=True keeps gradients over several backwards, and an optimizer in the "
                "backward uses and frees each in its own; leave out one of both"
            )

    def measured(self, *, timed: bool = True) -> "StepPlanner":
        """Returns a planner with measured kernels, unless its device is not here."""
        return self.with_kernels(self.profile.kernels(timed=timed)) if self.is_here else self

    def with_kernels(self, kernels: Sequence[KernelCosts | None]) -> "StepPlanner":
        """Returns a planner of the same step with these costs of kernels."""
        return replace(self, kernels=kernels, counted_optimizer=self.optimizer_bytes)

    def in_backward(self) -> "StepPlanner":
        """Returns a planner for the same step with the optimizer in the backward."""
        return replace(self, optimizer_in_backward=True, counted_optimizer=None)

    @property
    def steps(self) -> int:
        """How many steps the model has; the loss, if it is known, comes behind them."""
        return len(self.outline)

    @property
    def is_here(self) -> bool:
        """Whether the kernels can be measured."""
        return self.rated is None and self.model_device.type != "meta"

    @property
    def title(self) -> str:
        """The model and its inputs."""
        return title_of(self.model, self.inputs)

    @property
    def model_device(self) -> torch.device:
        """The device that the model is on."""
        return device_of(self.model)

    @computed_once
    def rated(self) -> Device | None:
        """The device whose peak rates were asked for; None for the model's own."""
        return rated_device(self.device, self.model_device)

    @property
    def made_for(self) -> str:
        """The device by its maker's name."""
        own = "cpu" if self.model_device.type == "meta" else self.model_device.type
        return (rated_name(str(self.device)) if self.rated else name_of(own)) or own

    @computed_once
    def rounding(self) -> Rounding:
        """How the device's allocator counts a storage."""
        kind = self.model_device.type if self.rated is None else self.rated.kind
        return rounding_of(kind, splits_all=self._splits_all)

    @property
    def _splits_all(self) -> bool:
        return self.rated is None and splits_all_blocks(self.model_device)

    @computed_once
    def optimizer_bytes(self) -> OptimizerBytes:
        """The bytes of the optimizer."""
        if self.counted_optimizer is not None:
            return self.counted_optimizer
        kind = None if self.rated is None else self.rated.kind
        arguments = self.optimizer, self.model.parameters(), self.optimizer_in_backward
        with shown("counting the optimizer's state"):
            return optimizer_bytes(*arguments, kind, self.rounding)

    @computed_once
    def profile(self) -> Profile:
        """The costs of the steps by device and kernels."""
        return Profile(self.model, self.outline, self.rounding)

    @computed_once
    def fixed(self) -> FixedBytes:
        """The bytes that no plan changes."""
        resident = resident_bytes(self.model, inputs=self.inputs, rounding=self.rounding)
        optimizer, profile = self.optimizer_bytes, self.profile
        return FixedBytes(
            parameters=resident.parameters,
            buffers=resident.buffers,
            gradients=0 if optimizer.updates is not None else profile.gradient_bytes,
            inputs=resident.inputs + profile.constants,
            optimizer=optimizer.state,
            scratch=optimizer.step,
            libraries=profile.held_by_libraries(self.rated, self.kernels),
        )

    @computed_once
    def costs(self) -> StepCosts:
        """The costs of the steps, of the loss, too, if it is known."""
        updates, profile = self.optimizer_bytes.updates, self.profile
        costs = profile.costs(self.rated, self.kernels, updates, accumulates=self.accumulates)
        # a training loop's variables hold the outputs and the loss beyond the backward
        returned = profile.returned if self.holds_outputs else frozenset()
        return replace(costs, held_until_end=returned | profile.remaining)

    @computed_once
    def costs_with_gradients(self) -> StepCosts:
        """The costs with the gradients of parameters."""
        return self.costs.with_parameter_gradients()

    @computed_once
    def baseline(self) -> Point:
        """The plan that recomputes nothing."""
        return self.judged(self._baseline, self.sides[:1])

    @computed_once
    def _baseline(self) -> Point:
        return self._point(Plan.keep_all(len(self.costs)))

    @computed_once
    def _resident(self) -> int:
        """Bytes that are there in forward and backward under every plan."""
        return self.fixed.beside_activations + self.fixed.gradients * self.accumulates

    def report(self, budget: Budget | None, overhead: float | None) -> PlanReport:
        """Chooses the plan for bounds from `parse_bounds` and predicts its costs."""
        limit = None if overhead is not None else self.bytes_of(budget)
        return self.describe(self.chosen(limit, overhead), limit)

    def chosen(self, limit: int | None, overhead: float | None = None, sides: Sides = ()) -> Point:
        """Returns the plan of least time within bytes; else that of least peak within an overhead.

        It fits the planner's `sides` of autocast, or those given.

        Raises:
            BudgetError: no plan keeps to the bytes.
        """
        if limit is None:
            return self._least_within(math.inf if overhead is None else 1 + overhead)
        found = self._fastest_within(limit, sides or self.sides)
        if found is None:
            raise self._budget_error(limit)
        return found

    def _fastest_within(self, limit: int, sides: Sides) -> Point | None:
        """Returns the fastest of the judged plans that fits; None if none does.

        By the error of the last judgement, the next proposal is the fastest that is expected to
        fit, between one that fits and one that does not.
        """
        proposals, error = self.proposals, sum(self._errors[-1:])
        fits, too_large = -1, len(proposals)
        for _ in range(MOST_JUDGEMENTS):
            expected = sum(point.peak + error <= limit for point in proposals) - 1
            index = min(max(expected, fits + 1), too_large - 1)
            if index <= fits or (
                fits >= 0 and proposals[fits].time_ratio - proposals[index].time_ratio < WORTH
            ):
                break
            peak = self.judged(proposals[index], sides).peak
            error = peak - proposals[index].peak
            fits, too_large = (index, too_large) if peak <= limit else (fits, index)
        if fits >= 0:
            return self.judged(proposals[fits], sides)
        lowest = self.lowest(sides)
        return lowest if lowest.peak <= limit else None

    def lowest(self, sides: Sides = ()) -> Point:
        """Returns the plan of the least peak; which of the lowest it is, only judging tells."""
        lowest = (*self.proposals[:LOWEST], self._smallest, self._baseline)
        judged = (self.judged(point, sides) for point in lowest)
        return min(judged, key=attrgetter("peak", "time_ratio"))

    def _least_within(self, time_ratio: float) -> Point:
        """Returns the judged plan of the least peak that takes at most so much time."""
        within = [point for point in self.proposals if point.time_ratio <= time_ratio]
        judged = [self.judged(point) for point in (within or [self._baseline])[:LOWEST]]
        quick = [point for point in judged if point.time_ratio <= time_ratio]
        return min(quick or [self.baseline], key=attrgetter("peak", "time_ratio"))

    def simulated(self, point: Point) -> Point:
        """Returns the same plan with its costs by the steps."""
        return self._point(point.plan, point.name, point.offloads)

    def judged(self, point: Point, sides: Sides = ()) -> Point:
        """Returns the same plan with what a dry step by it takes.

        Where no dry step tells, with its costs by the steps and the error that these had before.
        """
        step = self.judgement(self.of_model(point).plan, frozenset(point.offloads), sides)
        expected = self.simulated(point)
        if step is None:
            return replace(expected, peak=expected.peak + sum(self._errors[-1:]))
        # a dry step makes the state of cuDNN's dropout, which others find and a segment copies
        copied = self._dropout_state if point.plan.depth() else 0
        peak = self._peak(step.peak + copied, step.held)
        self._errors.append(peak - expected.peak)
        return replace(expected, peak=peak)

    @computed_once
    def _dropout_state(self) -> int:
        """The bytes of the state that cuDNN's recurrent networks draw their dropout by."""
        operators = {spec.operator for spec in self.outline.specs if spec is not None}
        has_one = str(DROPOUT_STATE) in operators
        return self.rounding(dropout_state_bytes(self.model_device)) if has_one else 0

    @computed_once
    def _errors(self) -> list[int]:
        """By how much judged peaks were above those by the costs of the steps."""
        return []

    def judgement(
        self, plan: Plan, offloads: frozenset[int] = frozenset(), sides: Sides = ()
    ) -> StepBytes | None:
        """Returns what a dry step by a plan of the model takes, at most; None if none tells."""
        steps = [self._dry_step(plan, offloads, side) for side in sides or self.sides]
        known = [step for step in steps if step is not None]
        return max(known, key=attrgetter("peak"), default=None)

    def _dry_step(
        self, plan: Plan, offloads: frozenset[int], leaves_autocast: bool
    ) -> StepBytes | None:
        outline, key = self.outline, (plan, offloads, leaves_autocast)
        if outline.dry_step is None:
            return None
        if key not in self._judgements:
            cuts = outline.cuts[: self.steps]
            request = DryStep(plan, cuts, offloads, self.holds_outputs, leaves_autocast)
            log = outline.dry_step(request)
            failed = isinstance(log, FailedCall)
            self._judgements[key] = None if failed else self.bytes_of_log(log)
        return self._judgements[key]

    @computed_once
    def _judgements(self) -> dict[tuple[Plan, frozenset[int], bool], StepBytes | None]:
        """What the dry steps by plans of the model take."""
        return {}

    def bytes_of_log(self, log: Sequence[Row]) -> StepBytes:
        """Returns what a dry step takes, from its log."""
        rates = self.profile.rates(self.rated, self.kernels)
        updates = self.optimizer_bytes.updates
        gradients = Gradients(self.profile.gradient_bytes, updates, self.accumulates)
        return bytes_of_step(log, self.rounding, rates, gradients)

    def plans_with_room(self, chosen: Point, budget: int | None) -> list[RoomyPlan]:
        """Returns the plan that was chosen for bytes, and slower ones for larger inputs.

        Everything but parameters, buffers and the optimizer's state is taken to grow with the
        inputs. Where the budget grows with them, too, it is None.
        """
        if budget is None:
            plan = self.of_model(chosen).plan
            return [RoomyPlan(plan, offloads=frozenset(chosen.offloads))]
        still, plans = self.fixed.beside_activations - self.fixed.inputs, list[RoomyPlan]()
        error = chosen.peak - self.simulated(chosen).peak
        slower = (p for p in reversed(self.proposals) if p.time_ratio > chosen.time_ratio)
        others = (replace(point, peak=point.peak + error) for point in slower)
        for point in (chosen, *others):
            room = (budget - still) / (point.peak - still)
            if self.offload.host_budget is not None and point.offloaded:
                room = min(room, self.offload.host_budget / point.offloaded)
            if room >= (plans[-1].room * ROOMIER if plans else 1):
                offloads = frozenset(point.offloads)
                plans.append(RoomyPlan(self.of_model(point).plan, room, offloads))
        return plans

    @property
    def gaps(self) -> str:
        """A sentence for a BudgetError where a device reserves much more than what is counted."""
        if self.rounding is not with_rests:
            return ""
        return (
            " Between these bytes the allocator leaves gaps, which it reserves, too: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True leaves few."
        )

    def _budget_error(self, budget: int) -> BudgetError:
        least, baseline = self.lowest().peak, self.baseline.peak
        text = (
            f"a training step needs at least {exact_bytes(least)}; the budget is "
            f"{exact_bytes(budget)}; the baseline takes {exact_bytes(baseline)}. "
            f"{ways_out(least, ['lower the batch size'], self.optimizer_bytes)}{self.gaps}"
        )
        if not (self.accumulates or self.optimizer_in_backward):
            other = self.in_backward().least.peak
            if other <= budget:
                text += only_in_backward(other)
        return BudgetError(text, budget, least, baseline)

    def frontier(self, best: Sequence[Point] | None = None) -> Frontier:
        """Returns the best plans, of which `best` may be known already, and the classic schemes.

        Raises:
            Interrupted: by Ctrl-C, with the best plans found so far.
        """
        best = self.points if best is None else best
        steps = self.costs.blocks, self.outline.whole, lambda: self.costs
        classic = {name: schemes.named(name, *steps) for name in schemes.NAMES}
        kept = {name: _loss_kept(plan, self.steps) for name, plan in classic.items()}
        named = (self._point(p, name, self.offload.of_plan(p)) for name, p in kept.items())
        allowed = [point for point in named if self.offload.allows(point.offloaded)]
        others = map(self.judged, each("judged schemes", allowed))
        during = self._resident + least_possible(self.costs_with_gradients)
        return Frontier(
            tuple(map(self.of_model, (*best, *others))),
            self.of_model(replace(self.baseline, name="baseline")),
            max(during, self.fixed.optimizer_peak + self.costs.bytes_of(self.costs.held_until_end)),
            self.title,
            bool(self.kernels),
            self.made_for,
        )

    def point(self, plan: Plan, offloads: Collection[int] = ()) -> Point:
        """Predicts what a plan of the model costs, with items on the host.

        Raises:
            PlanError: it is for another number of steps.
        """
        plan.check(self.steps)
        whole = Plan([*plan, *range(self.steps, len(self.costs))])
        return self.judged(self._point(whole, offloads=offloads))

    def bytes_of(self, budget: Budget | None) -> int:
        """Returns a parsed budget in bytes."""
        if budget == "device":
            own = self.model_device
            kinds = {own.type, "cpu" if own.type == "meta" else own.type}
            if self.rated is not None and self.rated.kind not in kinds:
                raise ArgumentError(
                    "memory_budget='device' is the free memory of the model's device, "
                    f"{own}, but device= plans for another one; give bytes such as '80GiB'"
                )
            free = free_on(own) + self.fixed.parameters + self.fixed.buffers
            gaps = 0.0 if own.type in ("cpu", "meta") else FEW_GAPS if self._splits_all else GAPS
            return int(free * (1 - gaps))
        if isinstance(budget, float):
            return int(budget * self.baseline.peak)
        assert isinstance(budget, int)
        return budget

    @computed_once
    def points(self) -> list[Point]:
        """The best of the judged plans by rising peak and falling time, as many as are shown."""
        with shown(self.title):
            return self._judged_best(self.proposals)

    def _judged_best(self, proposals: Sequence[Point]) -> list[Point]:
        found: list[Point] = []
        try:
            for point in each("judged plans", thinned(proposals, SHOWN)):
                found.append(self.judged(point))
        except KeyboardInterrupt:
            if not found:
                raise
            raise self._interrupted(_best(found)[::-1]) from None
        return _best(found)[::-1]

    def _interrupted(self, best: Sequence[Point]) -> Interrupted:
        text = f"interrupted; {len(best)} of the best plans of {self.title} were found"
        return Interrupted(text, self.frontier(best))

    @computed_once
    def proposals(self) -> list[Point]:
        """The best plans by the costs of the steps, by rising peak and falling time."""
        found: list[Point] = []
        with shown(self.title):
            try:
                costs = self.costs_with_gradients
                found += self._without_offloading(optimal_planner().frontier(costs, each=each))
                if self.offload.is_on:
                    # one by one, so that an interrupt loses none
                    for point in self._offloaded([point.plan for point in found]):
                        found.append(point)
            except KeyboardInterrupt as error:
                if isinstance(error, Interrupted):
                    found += self._without_offloading(error.found)
                if not found:
                    raise
                best = self._judged_best(_best(found)[::-1])
                raise self._interrupted(best) from None
        return _best(found)[::-1]

    def _without_offloading(self, simulated: Sequence[Any]) -> list[Point]:
        results = dict(simulated)
        plans = dict.fromkeys(_loss_kept(plan, self.steps) for plan in results)
        return [self._point(plan, result=results.get(plan)) for plan in plans]

    def _offloaded(self, best: Sequence[Plan]) -> Iterator[Point]:
        """Yields plans with items on the host, as many as can be simulated in seconds.

        They are the best ones without, and some whose segments do not nest.
        """
        flat = dict.fromkeys(_loss_kept(plan, self.steps) for plan in self._flat_plans())
        count = max(2, SIMULATED_STEPS // (COUNT * len(self.costs)))
        plans = dict.fromkeys([*thinned(best, count), *thinned([*flat], max(2, count // 4))])
        options = self.costs_with_gradients, self.steps, self.copies, self.offload.host_budget
        for plan in each("plans with offloading", [*plans]):
            for offloads in choices(plan, *options):
                point = self._point(plan, offloads=offloads)
                if self._is_offloaded(point):
                    yield point

    def _flat_plans(self) -> Iterator[Plan]:
        """Yields plans whose segments do not nest, which offload the most."""
        blocks = self.costs.blocks
        for name in schemes.NAMES:
            yield schemes.named(name, blocks, self.outline.whole, lambda: self.costs)
        for count in range(2, len(set(blocks)) + 1):
            yield schemes.segments(blocks, count)

    def simulate(self, plan: Plan, costs: StepCosts, offloads: Collection[int] = ()) -> Simulation:
        """Computes the costs of a plan, with items on the host."""
        if not offloads:
            return simulate(plan, costs)
        return simulate(plan, costs, offloads=offloads, steps=self.steps, copies=self.copies)

    @computed_once
    def copies(self) -> CopyRate:
        """How fast copies to the host are: measured where kernels are, else by peak rates."""
        if self.rated is not None:
            return CopyRate(self.rated.to_host, self.rated.kind != "cpu")
        if not self.kernels:
            return AT_ONCE
        return CopyRate(copy_rate(self.model_device), self.model_device.type != "cpu")

    @computed_once
    def trades(self) -> list[Point]:
        """Plans that may be the best if parameters and gradients are sharded; fastest first.

        They are chosen by activations alone, from the best nested plans and from plans that
        recompute single steps.
        """
        nested = optimal_planner().frontier(self.costs, each=each)
        best = [_loss_kept(point.plan, self.steps) for point in nested]
        single = schemes.one_by_one(self.costs, self.steps)
        chosen = dict.fromkeys([self._baseline.plan, *thinned(best, MOST), *thinned(single, MOST)])
        shallow = [plan for plan in chosen if plan.depth() <= DEEPEST]
        points = [*map(self._point, shallow)]
        if self.offload.is_on:
            points += thinned(_best(self._offloaded(shallow)), 2 * MOST)
        return sorted(points, key=lambda point: point.time_ratio)

    def _is_offloaded(self, point: Point) -> bool:
        return point.offloaded > 0 and self.offload.allows(point.offloaded)

    @computed_once
    def least(self) -> Point:
        """The plan of least peak, without offloading found without the other best ones."""
        # with tiny activations the random states of a segment take more than it saves
        return min(self.baseline, self.judged(self._smallest), key=attrgetter("peak"))

    @computed_once
    def _smallest(self) -> Point:
        """The plan of least peak by the costs of the steps."""
        if self.offload.is_on or "proposals" in vars(self):
            # what is offloaded decides which plan that is; else a search of its own is faster
            return self.proposals[0]
        least = optimal_planner().least(self.costs_with_gradients)
        return self._point(_loss_kept(least, self.steps))

    @computed_once
    def least_once(self) -> Point:
        """The plan of least peak that recomputes no step more than once, as `checkpoint=True`."""
        plan = _loss_kept(least_memory(self.costs_with_gradients), self.steps)
        return self.judged(self._point(plan))

    def _point(
        self,
        plan: Plan,
        name: str = "optimal",
        offloads: Collection[int] = (),
        result: Simulation | None = None,
    ) -> Point:
        result = result or self.simulate(plan, self.costs_with_gradients, offloads)
        seconds = sum(self.costs.seconds) + sum(self.costs.seconds_backward) or 1.0
        return Point(
            self._peak(result.peak, self.costs.bytes_of(self.costs.held_until_end)),
            1 + (result.recomputed_seconds + result.waited_seconds) / seconds,
            plan,
            name,
            result.recomputed_flops / (sum(self.costs.flops) or 1),
            result.offloaded,
            tuple(step for step, size in enumerate(result.on_host) if size),
        )

    def _peak(self, peak: int, held: int) -> int:
        """Returns the peak of a whole step; `held` are bytes that the program holds at its end."""
        # the loss and the gradient 1 that `backward` holds to its end: on CUDA a block each
        numbers = max(NUMBERS, 2 * self.rounding(1))
        during = self._resident + peak
        return max(during, self.fixed.optimizer_peak + held) + numbers

    def describe(self, point: Point, budget: int | None) -> PlanReport:
        """Returns the report of a point that was chosen for a budget in bytes, or for a time."""
        result = self.simulate(point.plan, self.costs, point.offloads)
        step = self.judgement(self.of_model(point).plan, frozenset(point.offloads))
        return PlanReport(
            plan=self.of_model(point).plan,
            predicted_peak=point.peak,
            predicted_time_ratio=point.time_ratio,
            predicted_activations=result.peak if step is None else step.activations,
            budget=budget,
            baseline_peak=self.baseline.peak,
            least_peak=min(self.least.peak, point.peak),
            fixed=self.fixed,
            at_peak=self.at_peak(point),
            flops=sum(self.costs.flops),
            recomputed_flops=result.recomputed_flops,
            names=self.outline.names,
            blocks=self.costs.blocks[: self.steps],
            saved=self.costs.newly_saved()[: self.steps],
            title=self.title,
            kernels_measured=bool(self.kernels),
            device=self.made_for,
            optimizer=self.optimizer_bytes.name,
            accumulates=self.accumulates,
            holds_outputs=self.holds_outputs,
            offloaded=point.offloaded,
            on_host=result.on_host[: self.steps],
        )

    def of_model(self, point: Point) -> Point:
        """Removes the loss, which is not the model's, from a point's plan."""
        has_loss = len(self.costs) > self.steps
        return replace(point, plan=Plan(point.plan[:-1])) if has_loss else point

    def at_peak(self, point: Point) -> PeakBytes:
        """Splits the bytes of a plan's peak into categories."""
        fixed, at = self.fixed, self.bytes_at_peak(point)
        kept, recomputed, between, work = at.kept, at.recomputed, at.between, at.work
        if fixed.optimizer_peak + at.held > self._resident + at.peak:
            phase, gradients = "step of the optimizer", fixed.gradients
            kept, recomputed, between, work = at.held, 0, 0, fixed.scratch
        else:
            step = self.outline.step_of(at.operator)
            phase = f"{at.phase} of {(*self.outline.names, 'the loss')[step]}"
            gradients = at.gradients + fixed.gradients * self.accumulates
        same = fixed.parameters, fixed.buffers, fixed.inputs, fixed.optimizer
        parts = *same, gradients, kept, recomputed, between, work
        reserve = point.peak - sum(parts) - fixed.libraries
        return PeakBytes(phase, *parts, reserve, fixed.libraries)

    def bytes_at_peak(self, point: Point) -> StepBytes:
        """Returns what a step by a plan takes; by the costs of the steps if no dry step tells."""
        step = self.judgement(self.of_model(point).plan, frozenset(point.offloads))
        if step is not None:
            return step
        result = self.simulate(point.plan, self.costs_with_gradients, point.offloads)
        moment, left = result.moment, self.costs.parameter_gradients
        gradients = 0 if moment.gradient_of is None else left[moment.gradient_of]
        return StepBytes(
            phase=moment.phase,
            operator=self.outline.cuts[moment.step],
            kept=moment.kept,
            recomputed=moment.recomputed,
            gradients=gradients,
            between=moment.state + moment.gradient - gradients,
            work=moment.work,
            held=self.costs.bytes_of(self.costs.held_until_end),
            activations=self.simulate(point.plan, self.costs, point.offloads).peak,
            seconds=result.recomputed_seconds,
            flops=result.recomputed_flops,
            returned=self.costs.bytes_of(self.costs.held_until_end - self.profile.remaining),
            remaining=self.costs.bytes_of(self.profile.remaining),
        )


def _best(points: Iterable[Point]) -> list[Point]:
    """Returns the points than which none has both less time and a smaller peak; fastest first."""
    return falling(points, attrgetter("time_ratio", "peak"), attrgetter("peak"))


def ways_out(least: int, others: Sequence[str], optimizer: OptimizerBytes) -> str:
    """Returns the last sentence of a BudgetError: raise the budget, or one of the other ways."""
    ways = [f"Raise the budget to {at_least(least)!r}", *others]
    ways += ["choose an optimizer with less state"] * (optimizer.state > 0)
    *first, last = ways
    others = f"{', '.join(first)}{',' * (len(first) > 1)} or " if first else ""
    return f"{others}{last}."


def only_in_backward(needed: int) -> str:
    """Returns the words for a step that fits a budget with the optimizer in the backward."""
    return (
        f" With the optimizer in the backward it needs {exact_bytes(needed)}: "
        "zoo.optimizer_in_backward does that; optimizer_in_backward=True plans ahead for it "
        "(--optimizer-in-backward)."
    )


def outputs_held(holds_outputs: bool | None, loss: object) -> bool:
    """Returns whether outputs count until the backward is over; None: unless there is a loss.

    A step with a loss is `loss(model(x)).backward()`, as losses are called.
    """
    return loss is None if holds_outputs is None else holds_outputs


def check_gathered(model: nn.Module) -> None:
    """Raises ArgumentError if the parameters of a model are spread over processes."""
    if any(map(is_spread, model.parameters())):
        raise ArgumentError(
            f"the parameters of {type(model).__name__} are spread over processes (DTensor), and "
            "gathering them is not counted. Plan before the model is distributed, with "
            "zoo.plan_rank, or choose checkpoint=True or a scheme"
        )


def parse_bounds(memory_budget: Any, max_overhead: Any) -> tuple[Budget | None, float | None]:
    """Reads a budget and an overhead.

    Raises:
        ArgumentError: not exactly one is given, in a wrong form, or planning for it needs a package
            that is not installed.
    """
    if (memory_budget is None) == (max_overhead is None):
        raise ArgumentError(
            f"one of memory_budget and max_overhead must be given; got {memory_budget!r} and "
            f"{max_overhead!r}"
        )
    optimal_planner()
    if max_overhead is not None:
        return None, parse_overhead(max_overhead)
    return parse_budget(memory_budget), None


def parse_budget(value: Any) -> Budget:
    """Reads a memory budget, the same in Python and on a command line.

    Returns an int of bytes; a float, the share of the baseline's peak; or "device".

    Raises:
        ArgumentError: it is none of BUDGETS.
    """
    text = value.strip() if isinstance(value, str) else ""
    if text.lower() == "device":
        return "device"
    is_share = isinstance(value, Real) and not isinstance(value, Integral)
    # text such as 8.5GiB is no number, and one such as 512 is bytes
    if is_share or text.endswith("%") or ("." in text and parse_ratio(text) is not None):
        share = parse_ratio(value)
        # NaN compares False
        if share is None or not 0 < share <= 1:
            raise ArgumentError(
                f"memory_budget={shortened(value)} is no share of the baseline's peak, which is "
                f"above 0 and up to 1; write {BUDGETS}"
            )
        return share
    return parse_bytes(value, "memory_budget", BUDGETS)


def parse_overhead(value: Any) -> float:
    """Reads an overhead: 0.2 or '20%' for a fifth more time; raises ArgumentError for others."""
    ratio = parse_ratio(value)
    if ratio is None or not 0 <= ratio < math.inf:
        raise ArgumentError(
            f"max_overhead={shortened(value)} must be a number, 0 or more; 0.2 or '20%' allows a "
            "fifth more time than the baseline's"
        )
    return ratio


def _loss_kept(plan: Plan, steps: int) -> Plan:
    """Moves the loss out of a segment that ends with it, since the model does not recompute it."""
    total = len(plan.flatten())
    if total == steps or isinstance(plan[-1], int):
        return plan
    inner = _without_last(plan[-1])
    return Plan([*plan[:-1], *([inner] if inner else []), total - 1])


def _without_last(item: tuple[Item, ...]) -> tuple[Item, ...]:
    last = item[-1]
    rest = _without_last(last) if isinstance(last, tuple) else ()
    return (*item[:-1], rest) if rest else item[:-1]


def optimal_planner() -> Any:
    """Returns `planner.optimal`, which needs numpy; raises ArgumentError if that is missing."""
    return needed("zoo.planner.optimal", "planning for a budget", ArgumentError, "plan")


def free_on(device: torch.device) -> int:
    """Returns the bytes that are free on a device, or cached by torch and not in use."""
    if device.type == "cpu":
        return free_host_bytes()
    if not counts_memory(device):
        raise ArgumentError(
            "memory_budget='device', and checkpoint='auto' without a budget, need the CPU or a "
            f"device that counts its memory; this model is on {device}. Move it to where it is "
            "to train, give bytes such as '8GiB', or take the plan that zoo.plan finds "
            "for them"
        )
    return free_bytes(device)
