"""Judges plans: what a training step by a plan takes, as the engine itself runs it.

    plan  ->  dry step (tracing.dry_steps)  ->  log  ->  bytes at the peak (planner.dry_step)

A dry step is the model's own, on fake tensors, by the engine with the plan in force. Where none can
run, a plan is taken to miss its costs by the steps by as much as the last one that was judged did.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from zoo.planner.costs import computed_once
from zoo.planner.dry_step import DryStep, Gradients, KernelRates, Row, StepBytes, bytes_of_step
from zoo.planner.plan import Plan
from zoo.policy.plan_report import PeakBytes, Point
from zoo.policy.training_step import CountedStep
from zoo.profiling.isolation import FailedCall

# for the steps that a plan is to fit, whether the backward runs outside of an autocast around the
# model, which holds its casts of weights until it is left
Sides = tuple[bool, ...]
OUTSIDE, INSIDE, EITHER = (True,), (False,), (True, False)
# a plan of the model, the first steps of its items on the host, and a side of autocast
Request = tuple[Plan, tuple[int, ...], bool]


class Judge:
    """Judges plans of a step; a plan for several `sides` of autocast takes the most of them."""

    def __init__(self, step: CountedStep, sides: Sides = OUTSIDE) -> None:
        self.step, self.sides = step, sides
        self._known: dict[Request, StepBytes | None] = {}
        self._points: dict[Sides, dict[tuple[Plan, tuple[int, ...]], Point]] = {}
        # by how much the last judged peak was above that by the costs of the steps
        self.error = 0
        # the bytes that it saves by these costs
        self._saved = 0
        # why the last dry step told nothing
        self.failure = "its forward was traced in a real training step"

    @computed_once
    def baseline(self) -> Point:
        """The plan that recomputes nothing."""
        return self.judged(self.keeps_all, self.sides[:1])

    @computed_once
    def keeps_all(self) -> Point:
        """The plan that recomputes nothing, by the costs of the steps."""
        return self.step.point(Plan.keep_all(len(self.step.costs)))

    def judged(self, proposal: Point, sides: Sides = ()) -> Point:
        """Returns a plan, given with its costs by the steps, with what a dry step by it takes.

        How long kernels wait for copies to the host only the clock of a simulation tells.
        """
        step = self.judgement(self.step.of_model(proposal).plan, proposal.offloads, sides)
        if step is None:
            return self._with_error(proposal)
        peak = self.peak_of(step)
        self.error, self._saved = peak - proposal.peak, self.keeps_all.peak - proposal.peak
        waited = 0.0
        if proposal.offloaded:
            costs = self.step.costs_with_gradients
            waited = self.step.simulate(proposal.plan, costs, proposal.offloads).waited_seconds
        judged = replace(
            proposal,
            peak=peak,
            time_ratio=1 + (step.seconds + waited) / self.step.seconds,
            recomputed_share=step.flops / self.step.flops,
            offloaded=step.on_host if proposal.offloaded else 0,
        )
        self._points.setdefault(sides or self.sides, {})[judged.plan, judged.offloads] = judged
        return judged

    def fitting(self, limit: int, sides: Sides = ()) -> list[Point]:
        """Returns the plans that were judged so far and take at most so many bytes."""
        judged = self._points.get(sides or self.sides, {})
        return [point for point in judged.values() if point.peak <= limit]

    def expected(self, proposal: Point) -> Point:
        """Returns a plan as it was judged, or is expected to be by the error of the last one."""
        if self.has_judged(proposal):
            return self.judged(proposal)
        return self._with_error(proposal)

    def _with_error(self, proposal: Point) -> Point:
        """Adds the error of the last judged plan, in proportion where a plan saves more."""
        saved = self.keeps_all.peak - proposal.peak
        grows = self.error > 0 and 0 < self._saved < saved
        error = math.ceil(self.error * saved / self._saved) if grows else self.error
        return replace(proposal, peak=proposal.peak + error)

    def judgement(
        self, plan: Plan, offloads: Sequence[int] = (), sides: Sides = ()
    ) -> StepBytes | None:
        """Returns what a dry step by a plan of the model takes, at most; None if none tells."""
        steps = [self._dry_step((plan, (*offloads,), side)) for side in sides or self.sides]
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            return None
        return max(known, key=self.peak_of)

    def peak_of(self, step: StepBytes) -> int:
        """Returns the peak of the whole step, with what the step's earlier forwards hold."""
        between, backward = step.between_passes, step.in_backward
        return self.step.peak(self.step.with_earlier(step.peak, between, backward), step.held)

    def has_judged(self, point: Point, sides: Sides = ()) -> bool:
        """Returns whether dry steps told what a plan takes, on all sides or on those given."""
        plan = self.step.of_model(point).plan
        requests = ((plan, point.offloads, side) for side in sides or self.sides)
        return all(map(self._known.get, requests))

    def _dry_step(self, request: Request) -> StepBytes | None:
        outline = self.step.outline
        if outline.dry_step is None:
            return None
        if request not in self._known:
            plan, offloads, leaves_autocast = request
            cuts, holds_outputs = outline.cuts[: self.step.steps], self.step.training.holds_outputs
            dry_step = DryStep(plan, cuts, frozenset(offloads), holds_outputs, leaves_autocast)
            log = outline.dry_step(dry_step)
            if isinstance(log, FailedCall):
                self.failure, self._known[request] = log.text, None
            else:
                self._known[request] = self.bytes_of_log(log)
        return self._known[request]

    def bytes_of_log(self, log: Sequence[Row]) -> StepBytes:
        """Returns what a dry step takes, from its log."""
        step = self.step
        updates, accumulates = step.optimizer_bytes.updates, step.training.accumulates
        gradients = Gradients(step.profile.gradient_bytes, updates, accumulates)
        found = bytes_of_step(log, step.rounding, self._rates, gradients)
        if step.training.forwards == 1 or not gradients.are_kept:
            return found
        # a backward after another one adds to the gradients of parameters
        added = replace(gradients, accumulates=True)
        later = bytes_of_step(log, step.rounding, self._rates, added)
        return replace(found, in_backward=later.in_backward)

    @computed_once
    def _rates(self) -> KernelRates:
        return self.step.profile.rates(self.step.rated, self.step.kernels)

    def bytes_at_peak(self, point: Point) -> StepBytes:
        """Returns what a step by a plan takes; by the costs of the steps if no dry step tells."""
        step, costs = self.step, self.step.costs
        judged = self.judgement(step.of_model(point).plan, point.offloads)
        if judged is not None:
            return judged
        result = step.simulate(point.plan, step.costs_with_gradients, point.offloads)
        moment, left = result.moment, costs.parameter_gradients
        gradients = 0 if moment.gradient_of is None else left[moment.gradient_of]
        remaining = step.profile.remaining
        return StepBytes(
            phase=moment.phase,
            operator=step.outline.cuts[moment.step],
            kept=moment.kept,
            recomputed=moment.recomputed,
            gradients=gradients,
            between=moment.state + moment.gradient - gradients,
            work=moment.work,
            held=costs.bytes_of(costs.held_until_end),
            activations=step.simulate(point.plan, costs, point.offloads).peak,
            seconds=result.recomputed_seconds,
            flops=result.recomputed_flops,
            returned=costs.bytes_of(costs.held_until_end - remaining),
            remaining=costs.bytes_of(remaining),
        )

    def at_peak(self, point: Point) -> PeakBytes:
        """Splits the bytes of a judged plan's peak into categories."""
        step, fixed, at = self.step, self.step.fixed, self.bytes_at_peak(point)
        kept, recomputed, between, work = at.kept, at.recomputed, at.between, at.work
        if fixed.optimizer_peak + at.held > step.resident + at.peak:
            phase, gradients = "step of the optimizer", fixed.gradients
            kept, recomputed, between, work = at.held, 0, 0, fixed.scratch
        else:
            number = step.outline.step_of(at.operator)
            phase = f"{at.phase} of {(*step.outline.names, 'the loss')[number]}"
            gradients = at.gradients + fixed.gradients * step.training.accumulates
        # earlier forwards of the step hold it, and a later backward finds gradients
        kept += self.peak_of(at) - step.peak(at.peak, at.held)
        same = fixed.parameters, fixed.buffers, fixed.inputs, fixed.optimizer
        parts = *same, gradients, kept, recomputed, between, work
        beside = fixed.libraries, fixed.others
        return PeakBytes(phase, *parts, point.peak - sum(parts) - sum(beside), *beside)
