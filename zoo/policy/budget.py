"""Chooses the plan for a budget: costs propose, the engine on fake tensors judges.

`policy.proposals` has the best plans by the costs of the steps; `policy.judge` tells what a step by
one of them takes. The choice is the fastest that fits, by few judgements: the error of the last one
tells which proposal to judge next, between one that fits and one that does not.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from zoo.engine.devices import counts_memory, free_bytes, free_host_bytes
from zoo.errors import ArgumentError, BudgetError, Interrupted
from zoo.planner.costs import computed_once, least_possible
from zoo.planner.plan import Plan, RoomyPlan, thinned
from zoo.policy.goal import NO_OFFLOAD, Budget, Offload
from zoo.policy.judge import OUTSIDE, Judge, Sides
from zoo.policy.plan_report import Frontier, PlanReport, Point
from zoo.policy.proposals import Proposals, best_of
from zoo.policy.training_step import CountedStep
from zoo.profiling.caching_allocator import with_rests
from zoo.profiling.optimizer_memory import OptimizerBytes
from zoo.profiling.progress import each, shown
from zoo.units import at_least, exact_bytes

# parts of a device's memory that `"device"` leaves to gaps between blocks, with expandable segments
# and without: on an H200 a step by a plan reserved 2 % more than it allocated, without 4 to 71 %, a
# part of which the allocator releases where memory runs out (docs/gpu.md)
FEW_GAPS, GAPS = 1 / 32, 1 / 8
# the least ratio between the rooms of two plans for larger inputs
ROOMIER = 1.2
# how many of the best plans are judged to be shown
SHOWN = 12
# the most judgements in a search for a plan, and those of proposals where none fits, the smallest
MOST_JUDGEMENTS, LOWEST = 8, 4
# the least saving of time for which one more proposal is judged
WORTH = 0.01


class StepPlanner:
    """Plans one traced training step: the plan for a budget, the best plans.

    By default the backward leaves an autocast that is around the model; a plan for several `sides`
    fits them all.
    """

    def __init__(
        self, step: CountedStep, offload: Offload = NO_OFFLOAD, sides: Sides = OUTSIDE
    ) -> None:
        self.step, self.offload = step, offload
        self.judge, self.proposals = Judge(step, sides), Proposals(step, offload)

    @property
    def baseline(self) -> Point:
        """The plan that recomputes nothing."""
        return self.judge.baseline

    def report(self, budget: Budget | None, overhead: float | None) -> PlanReport:
        """Chooses the plan for bounds from `parse_bounds` and predicts its costs."""
        limit = None if overhead is not None else self.bytes_of(budget)
        return self.describe(self.chosen(limit, overhead), limit)

    def chosen(self, limit: int | None, overhead: float | None = None, sides: Sides = ()) -> Point:
        """Returns the plan of least time within bytes; else that of least peak within an overhead.

        It fits the judge's `sides` of autocast, or those given.

        Raises:
            BudgetError: no plan keeps to the bytes.
        """
        if limit is None:
            return self._least_within(math.inf if overhead is None else 1 + overhead)
        fastest = self.fastest_within(limit, sides)
        if fastest is None:
            raise self._budget_error(limit)
        return fastest

    def fastest_within(self, limit: int, sides: Sides = ()) -> Point | None:
        """Returns the fastest of the judged plans that fits; None if none does."""
        error = self.judge.error
        fitting: tuple[Point, Point] | None = None  # a proposal, and what a dry step by it takes
        too_large = math.inf
        for _ in range(MOST_JUDGEMENTS):
            least = -1 if fitting is None else fitting[0].peak
            near = self._around(functools.partial(takes_at_most, limit - error))
            between = [point for point in near if least < point.peak < too_large]
            if not between:
                break
            expected = [point for point in between if takes_at_most(limit - error, point)]
            proposal = expected[-1] if expected else between[0]
            if fitting and fitting[0].time_ratio - proposal.time_ratio < WORTH:
                break
            point = self.judge.judged(proposal, sides)
            error = point.peak - proposal.peak
            if self.fits(point, limit):
                fitting = proposal, point
            else:
                too_large = proposal.peak
        if fitting is not None:
            # seconds are judged, too: another one may be faster than the costs of its steps say
            judged = [fitting[1], *self.judge.fitting(limit, sides)]
            allowed = (point for point in judged if self.fits(point, limit))
            return min(allowed, key=attrgetter("time_ratio", "peak"))
        lowest = self.lowest(sides)
        return lowest if lowest.peak <= limit else None

    def lowest(self, sides: Sides = ()) -> Point:
        """Returns the plan of the least peak; which of the lowest it is, only judging tells."""
        lowest = self._around(lambda _: False)[:LOWEST]
        return self._lowest_of([*lowest, self.proposals.smallest], sides)

    def _lowest_of(self, proposals: Sequence[Point], sides: Sides = ()) -> Point:
        """Returns the judged plan of the least peak; the baseline is one, too.

        What takes more than the least so far by the costs of its steps, too, is not judged.
        """
        # the costs of the steps may say more of it than it takes; and with tiny activations the
        # random states of a segment take more than it saves
        baseline, judged = self.judge.judged(self.judge.keeps_all, sides), list[Point]()
        for point in proposals:
            least = min((one.peak for one in judged), default=math.inf)
            if point.peak + min(self.judge.error, 0) < least:
                judged.append(self.judge.judged(point, sides))
        return min((*judged, baseline), key=attrgetter("peak", "time_ratio"))

    def _least_within(self, time_ratio: float) -> Point:
        """Returns the judged plan of the least peak that takes at most so much time."""
        judged, share = [self.baseline], 1.0
        for _ in range(LOWEST):
            # the engine recomputes less than the costs of the steps say, by a share like the last
            most = 1 + (time_ratio - 1) / share if share else math.inf
            near = self._around(functools.partial(_is_slower, most))
            within = [point for point in near if point.time_ratio <= most]
            known = {(point.plan, point.offloads) for point in judged}
            left = [p for p in within if (p.plan, p.offloads) not in known]
            if not left:
                break
            judged.append(self.judge.judged(left[0]))
            if left[0].time_ratio > 1:
                share = (judged[-1].time_ratio - 1) / (left[0].time_ratio - 1)
        quick = (point for point in judged if point.time_ratio <= time_ratio)
        return min(quick, key=attrgetter("peak", "time_ratio"))

    def plans_with_room(self, chosen: Point, budget: int | None) -> list[RoomyPlan]:
        """Returns the plan that was chosen for bytes, and slower ones for larger inputs.

        Everything but parameters, buffers and the optimizer's state is taken to grow with the
        inputs. Where the budget grows with them, too, it is None.
        """
        if budget is None:
            return [self.roomy(chosen)]
        proposal = self.step.point(chosen.plan, offloads=chosen.offloads)
        error = chosen.peak - proposal.peak
        plans = [self.roomy(chosen)._replace(room=self.room(chosen, budget))]

        def is_roomier(point: Point) -> bool:
            expected = replace(point, peak=point.peak + error)
            return self.room(expected, budget) >= plans[-1].room * ROOMIER

        def slower() -> list[Point]:
            near = self._around(is_roomier)
            return [p for p in near if p.time_ratio > proposal.time_ratio and is_roomier(p)]

        while others := slower():
            point = replace(others[-1], peak=others[-1].peak + error)
            plans.append(self.roomy(point)._replace(room=self.room(point, budget)))
        return plans

    def room(self, point: Point, budget: int) -> float:
        """Returns how many times as large tensors may get until a plan breaks a budget in bytes."""
        still = self.step.fixed.beside_activations - self.step.fixed.inputs
        room = (budget - still) / (point.peak - still)
        if self.offload.host_budget is not None and point.offloaded:
            room = min(room, self.offload.host_budget / point.offloaded)
        return room

    def fits(self, point: Point, limit: int) -> bool:
        """Returns whether a plan keeps to so many bytes, and to those of the host."""
        return point.peak <= limit and self.offload.allows(point.offloaded)

    def roomy(self, point: Point) -> RoomyPlan:
        """Returns a plan of the model for tensors of any size."""
        step, plan = self.step, self.step.of_model(point).plan
        if self.judge.has_judged(point) and (taken := self.judge.judgement(plan, point.offloads)):
            between, casts = taken.between_passes, taken.casts
        else:
            casts, between = 0, step.simulate(point.plan, step.costs, point.offloads).between_passes
        return RoomyPlan(
            plan,
            offloads=frozenset(point.offloads),
            peak=point.peak,
            holds=between + step.inputs_held,
            casts=casts,
        )

    @property
    def gaps(self) -> str:
        """A sentence for a BudgetError where a device reserves much more than what is counted."""
        if self.step.rounding is not with_rests:
            return ""
        return (
            " Between these bytes the allocator leaves gaps, which it reserves, too: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True leaves few."
        )

    def _budget_error(self, budget: int) -> BudgetError:
        least, baseline, step = self.lowest().peak, self.baseline.peak, self.step
        text = (
            f"a training step needs at least {exact_bytes(least)}; the budget is "
            f"{exact_bytes(budget)}; the baseline takes {exact_bytes(baseline)}. "
            f"{ways_out(least, ['lower the batch size'], step.optimizer_bytes)}{self.gaps}"
        )
        if not (step.training.accumulates or step.training.optimizer_in_backward):
            other = StepPlanner(step.in_backward(), self.offload, self.judge.sides).least.peak
            if other <= budget:
                text += only_in_backward(other)
        return BudgetError(text, budget, least, baseline)

    def frontier(self, best: Sequence[Point] | None = None) -> Frontier:
        """Returns the best plans, of which `best` may be known already, and the classic schemes.

        Raises:
            Interrupted: by Ctrl-C, with the best plans found so far.
        """
        best, step = self.points if best is None else best, self.step
        others = map(self.judge.judged, each("judged schemes", self.proposals.schemes()))
        during = step.resident + least_possible(step.costs_with_gradients)
        held = step.costs.bytes_of(step.costs.held_until_end)
        return Frontier(
            tuple(map(step.of_model, (*best, *others))),
            step.of_model(replace(self.baseline, name="baseline")),
            max(during, step.fixed.optimizer_peak + held),
            step.title,
            bool(step.kernels),
            step.made_for,
        )

    def point(self, plan: Plan, offloads: Collection[int] = ()) -> Point:
        """Predicts what a plan of the model costs, with items on the host.

        Raises:
            PlanError: it is for another number of steps.
        """
        return self.judge.judged(self.step.point(self.step.with_loss(plan), offloads=offloads))

    def bytes_of(self, budget: Budget | None) -> int:
        """Returns a parsed budget in bytes."""
        if budget == "device":
            step = self.step
            own = step.model_device
            kinds = {own.type, "cpu" if own.type == "meta" else own.type}
            if step.rated is not None and step.rated.kind not in kinds:
                raise ArgumentError(
                    "memory_budget='device' is the free memory of the model's device, "
                    f"{own}, but device= plans for another one; give bytes such as '80GiB'"
                )
            free = free_on(own) + step.fixed.parameters + step.fixed.buffers
            gaps = 0.0 if own.type in ("cpu", "meta") else FEW_GAPS if step.splits_all else GAPS
            return int(free * (1 - gaps))
        if isinstance(budget, float):
            return int(budget * self.baseline.peak)
        assert isinstance(budget, int)
        return budget

    @computed_once
    def points(self) -> list[Point]:
        """The best of the judged plans by rising peak and falling time, as many as are shown."""
        with shown(self.step.title):
            return self._judged_best(self._proposed(lambda: self.proposals.best))

    def _judged_best(self, proposals: Sequence[Point]) -> list[Point]:
        found: list[Point] = []
        try:
            for point in each("judged plans", thinned(proposals, SHOWN)):
                found.append(self.judge.judged(point))
        except KeyboardInterrupt:
            if not found:
                raise
            raise self._interrupted(best_of(found)) from None
        return best_of(found)

    def _around(self, fits: Callable[[Point], bool]) -> list[Point]:
        """Returns the best plans by the costs of the steps, those around the last that fits."""
        return self._proposed(lambda: self.proposals.around(fits))

    def _proposed(self, propose: Callable[[], list[Point]]) -> list[Point]:
        """Returns what is proposed; an interrupt has judged plans."""
        try:
            return propose()
        except Interrupted as error:
            raise self._interrupted(self._judged_best(error.found)) from None

    def _interrupted(self, best: Sequence[Point]) -> Interrupted:
        text = f"interrupted; {len(best)} of the best plans of {self.step.title} were found"
        return Interrupted(text, self.frontier(best))

    @computed_once
    def least(self) -> Point:
        """The plan of least peak, without offloading found without the other best ones."""
        return self._lowest_of(self.proposals.lowest[:LOWEST])

    @computed_once
    def least_once(self) -> Point:
        """The plan of least peak that recomputes no step more than once, as `checkpoint=True`."""
        return self.judge.judged(self.proposals.least_once)

    def describe(self, point: Point, budget: int | None) -> PlanReport:
        """Returns the report of a point that was chosen for a budget in bytes, or for a time."""
        step, at = self.step, self.judge.bytes_at_peak(point)
        result = step.simulate(point.plan, step.costs, point.offloads)
        return PlanReport(
            plan=step.of_model(point).plan,
            predicted_peak=point.peak,
            predicted_time_ratio=point.time_ratio,
            predicted_activations=at.activations,
            budget=budget,
            baseline_peak=self.baseline.peak,
            least_peak=min(self.least.peak, point.peak),
            fixed=step.fixed,
            at_peak=self.judge.at_peak(point),
            flops=sum(step.costs.flops),
            recomputed_flops=at.flops,
            names=step.outline.names,
            blocks=step.costs.blocks[: step.steps],
            saved=step.costs.newly_saved()[: step.steps],
            title=step.title,
            kernels_measured=bool(step.kernels),
            device=step.made_for,
            optimizer=step.optimizer_bytes.name,
            accumulates=step.training.accumulates,
            holds_outputs=step.training.holds_outputs,
            forwards=step.training.forwards,
            offloaded=point.offloaded,
            on_host=result.on_host[: step.steps],
        )


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


def takes_at_most(peak: int, point: Point) -> bool:
    """Returns whether a plan keeps to so many bytes."""
    return point.peak <= peak


def _is_slower(time_ratio: float, point: Point) -> bool:
    return point.time_ratio > time_ratio
