"""Decides which plan is in force: what a goal is for the steps of a model on some inputs.

`tracing.planned_forward` puts the plan in force and keeps it for the inputs that it serves.
"""

import contextlib
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from weakref import WeakKeyDictionary

from torch import Tensor, distributed, nn

from zoo._torch import active_fake_mode
from zoo.engine.devices import ProfilerError, name_of
from zoo.engine.sharded import is_spread
from zoo.errors import BudgetError, PlanError
from zoo.invocation import InputSpec, Invocation, device_of
from zoo.optimizer.in_backward import attached_to
from zoo.planner import schemes
from zoo.planner.costs import LEAST_OFFLOADED, simulate
from zoo.planner.event_costs import Outline
from zoo.planner.least_memory import least_memory
from zoo.planner.plan import Plan, RoomyPlan
from zoo.policy.budget import StepPlanner, takes_at_most
from zoo.policy.goal import Goal
from zoo.policy.judge import OUTSIDE, Sides
from zoo.policy.proposals import ROUGH, Proposals
from zoo.policy.training_step import CountedStep, TrainingStep, without_optimizer
from zoo.profiling.kernel_costs import is_of_kind
from zoo.profiling.optimizer_memory import OptimizerBytes
from zoo.profiling.progress import shown
from zoo.units import exact_bytes, format_bytes

# how many times the best time a known plan may take
SLOWER = 1.05
_log = logging.getLogger("zoo")


def step_of(
    goal: Goal,
    training: TrainingStep,
    traced: tuple[nn.Module, Outline, Sequence[Tensor]],
    optimizer: OptimizerBytes | None = None,
) -> CountedStep:
    """Returns the step that is planned for: for a budget, with its loss and its optimizer.

    `optimizer`: the bytes of it, if they are known.
    """
    model, outline, inputs = traced
    if goal.is_bounded:
        return CountedStep(model, outline, inputs, training.of(model), counted_optimizer=optimizer)
    return CountedStep(model, outline.without_loss(), inputs, without_optimizer(model))


@shown("zoo.checkpoint")
def plans_for(
    goal: Goal, step: CountedStep, sides: Sides = OUTSIDE, *, has_run: bool = False
) -> Sequence[RoomyPlan]:
    """Returns the plan, and for a budget in bytes others for larger inputs, by rising room.

    The backward runs on any of the `sides` of an autocast around the model.

    A training that has run goes on: where no plan keeps to the budget, it gets the plan of the
    least peak, with a warning.

    Raises:
        BudgetError: no plan keeps to the budget, or the user's does not keep to the one that it
            was made for.
        PlanError: the user's plan is for other steps.
    """
    if goal.is_bounded:
        return _within_budget(goal, step, sides, has_run)
    return _with_room(goal, step, plan_for(goal, step, has_run=has_run))


def plan_for(
    goal: Goal, step: CountedStep, *, measures: bool = True, has_run: bool = False
) -> RoomyPlan:
    """Returns the plan for a goal without bounds.

    Without `measures`, as for a step whose inputs may not fit now, True counts the kernel
    workspaces that the step knows.

    Raises:
        PlanError: the user's plan is for other steps.
    """
    plan = _plan_for(goal, step, measures)
    plan.check(step.steps)
    chosen = RoomyPlan(plan, offloads=goal.offload.of_plan(plan))
    _check_offload(goal, chosen, step, has_run)
    return chosen


def _plan_for(goal: Goal, step: CountedStep, measures: bool) -> Plan:
    choice, blocks = goal.choice, step.outline.blocks
    if goal.plan is not None:
        if goal.report is not None and _is_elsewhere(goal.report.device, step.model):
            kind = device_of(step.model).type
            _warn_of_device(goal.report.device, name_of(kind) or kind)
        return goal.plan
    if choice is True:
        (found,) = _first_decided(goal, step, lambda: [RoomyPlan(_least(goal, step, measures))])
        return found.plan
    if isinstance(choice, int):
        plan = schemes.segments(blocks, choice)
    else:
        plan = schemes.named(choice, blocks, step.outline.whole, lambda: step.costs)
    with contextlib.suppress(PlanError):
        _warn_of_no_saving(goal, plan, step)
    return plan


def _least(goal: Goal, step: CountedStep, measures: bool) -> Plan:
    """Returns the plan with the least peak of the whole training step.

    It counts activations, gradients of parameters and kernel workspaces, for which each different
    kernel runs once. Gradients of parameters that are spread over processes are left out.
    """
    if any(map(is_spread, step.model.parameters())):
        return least_memory(step.costs)
    if measures and active_fake_mode() is None:
        with contextlib.suppress(ProfilerError):
            step = step.measured(timed=False)
    plan = least_memory(step.costs_with_gradients)
    _warn_of_no_saving(goal, plan, step)
    return plan


def _with_room(goal: Goal, step: CountedStep, chosen: RoomyPlan) -> list[RoomyPlan]:
    """Returns a plan that is for no bounds, as far as it keeps to the budget of its report.

    Raises:
        BudgetError: it does not for these inputs.
    """
    report = goal.report
    if report is None or report.budget is None or _is_elsewhere(report.device, step.model):
        return [chosen]
    if any(map(is_spread, step.model.parameters())):
        # costs are those of whole parameters
        return [chosen]
    still = report.fixed.beside_activations - report.fixed.inputs
    step = replace(step, training=replace(step.training, holds_outputs=False))
    peak = step.simulate(chosen.plan, step.costs_with_gradients, chosen.offloads).peak
    grows = sum(tensor.nbytes for tensor in step.inputs) + peak
    if still + grows > report.budget:
        raise BudgetError(
            f"this plan is for {report.title} and a budget of {exact_bytes(report.budget)}; "
            f"on {step.title} a training step by it takes at least "
            f"{exact_bytes(still + grows)}. Lower the batch size, or plan for these inputs: "
            "zoo.checkpoint(model, memory_budget=...) does so for each size that comes",
            report.budget,
        )
    room = (report.budget - still) / grows if grows else math.inf
    return [chosen._replace(room=room, peak=still + grows)]


def _within_budget(
    goal: Goal, step: CountedStep, sides: Sides, has_run: bool
) -> Sequence[RoomyPlan]:
    def decide() -> Sequence[RoomyPlan]:
        return _budget_plans(goal, StepPlanner(_measured(step), goal.offload, sides), has_run)

    plans = _first_decided(goal, step, decide, sides)
    plans[0].plan.check(step.steps)
    _check_offload(goal, plans[0], step, has_run)
    return plans


@shown("zoo.checkpoint")
def known_plan_for(
    goal: Goal, step: CountedStep, sides: Sides, known: Sequence[RoomyPlan]
) -> RoomyPlan | None:
    """Returns the plan, of those of a path in other sizes, that is to serve these, if one is.

    A dry step by it keeps to the budget, and it takes little more time than the best that the
    costs of the steps propose: both by estimates, since no kernel is timed.
    """

    def decide() -> Sequence[RoomyPlan]:
        planner = StepPlanner(_measured(step, timed=False), goal.offload, sides)
        found = _known_plan(goal, planner, step, known)
        return [] if found is None else [found]

    plans = _first_decided(goal, step, decide, sides, known)
    return plans[0] if plans else None


def _known_plan(
    goal: Goal, planner: StepPlanner, estimated: CountedStep, known: Sequence[RoomyPlan]
) -> RoomyPlan | None:
    limit, judge = planner.bytes_of(goal.memory_budget), planner.judge
    points = [
        estimated.point(estimated.with_loss(plan.plan), offloads=plan.offloads) for plan in known
    ]
    for quick in sorted(points, key=attrgetter("time_ratio")):
        if quick.peak + min(judge.error, 0) > limit:
            continue
        point = judge.judged(planner.step.point(quick.plan, offloads=quick.offloads))
        if not (judge.has_judged(point) and planner.fits(point, limit)):
            continue
        best, error = quick.time_ratio, point.peak - quick.peak
        if best > SLOWER:
            proposals = Proposals(estimated, goal.offload, ROUGH)
            near = proposals.around(functools.partial(takes_at_most, limit - error))
            within = (p.time_ratio for p in near if takes_at_most(limit - error, p))
            best = min(within, default=best)
        if quick.time_ratio > SLOWER * best:
            return None
        room = math.inf if isinstance(goal.memory_budget, float) else planner.room(point, limit)
        return planner.roomy(point)._replace(room=room)
    return None


def _measured(step: CountedStep, *, timed: bool = True) -> CountedStep:
    try:
        return step.measured(timed=timed)
    except ProfilerError:
        _warn_of_profiler(type(step.model).__name__)
    return step


def _budget_plans(goal: Goal, planner: StepPlanner, has_run: bool) -> Sequence[RoomyPlan]:
    """Plans for a budget and logs the prediction."""
    step, sides = planner.step, planner.judge.sides
    name = type(step.model).__name__
    assumed = (
        f"the optimizer is assumed to be AdamW, with a state of "
        f"{format_bytes(step.optimizer_bytes.state)}: pass optimizer= to zoo.checkpoint, "
        "'adamw' or another name, a class, or the optimizer itself"
    )
    try:
        budget = planner.bytes_of(goal.memory_budget) if goal.max_overhead is None else None
        chosen = planner.chosen(budget, goal.max_overhead, sides[:1])
    except BudgetError as error:
        if has_run:
            beside = ""
            if step.training.others:
                beside = (
                    " beside what other models hold in this step, which are planned anew for the "
                    "next ones"
                )
            what = "%s goes by the plan of the least peak, which breaks its budget%s: %s"
            _log.warning(what, name, beside, error)
            lowest = planner.lowest()
            leaves = len(sides) > 1 and not planner.judge.has_judged(lowest)
            return [planner.roomy(lowest)._replace(leaves_autocast=leaves)]
        if not step.training.is_assumed:
            raise
        text = f"{error} {assumed[0].upper()}{assumed[1:]}."
        raise BudgetError(text, error.budget, error.least, error.baseline) from None
    if not planner.judge.has_judged(chosen, sides[:1]):
        _warn_of_costs(name, planner.judge.failure)
    if step.training.is_assumed and goal.memory_budget is not None:
        _warn_of_assumed(name, assumed)
    _log.info(
        "%s: planned peak %s, x%.2f of the baseline, time x%.2f",
        step.title,
        format_bytes(chosen.peak),
        chosen.peak / planner.judge.expected(planner.judge.keeps_all).peak,
        chosen.time_ratio,
    )
    # a share of the baseline, and an overhead, grow with the inputs
    limit = None if isinstance(goal.memory_budget, float) else budget
    plans = planner.plans_with_room(chosen, limit)
    if len(sides) == 1 or budget is None:
        return plans
    # until the first backward tells on which side of autocast it is: one that fits both, if any
    for_both = planner.fastest_within(budget)
    if for_both is None or not planner.judge.has_judged(for_both):
        return [plan._replace(leaves_autocast=True) for plan in plans]
    if (for_both.plan, for_both.offloads) == (chosen.plan, chosen.offloads):
        return plans
    plans = [plan._replace(leaves_autocast=True) for plan in plans]
    return [*planner.plans_with_room(for_both, limit), *plans]


def _check_offload(goal: Goal, chosen: RoomyPlan, step: CountedStep, has_run: bool) -> None:
    """Refuses a plan that needs more host memory than the budget; warns if it needs none."""
    if not goal.offload.is_on:
        return
    whole = step.with_loss(chosen.plan)
    offloaded = step.simulate(whole, step.costs, chosen.offloads).offloaded
    if not has_run:
        goal.offload.check(offloaded, step.title)
    if not offloaded:
        why = "without offloading, the plan for its budget takes no more time"
        if not goal.is_bounded:
            why = (
                "no segment of its plan starts from, and no kept step in offload= saves, "
                f"{format_bytes(LEAST_OFFLOADED)} or more that nothing else holds. For a "
                "budget, zoo chooses among all plans"
            )
        what = "offload= copies nothing of %s to the host: %s"
        _log.warning(what, type(step.model).__name__, why)


# for each model the options of which a warning was logged
_SAVES_NOTHING: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _warn_of_no_saving(goal: Goal, plan: Plan, step: CountedStep) -> None:
    """Warns, once for a model and an option, if a plan takes no less than training without one."""
    model, option = step.model, repr(goal.choice)
    logged = _SAVES_NOTHING.setdefault(model, set())
    if option in logged:
        return
    costs = step.costs_with_gradients
    plain = simulate(Plan.keep_all(len(costs)), costs).peak
    peak = step.simulate(plan, costs, goal.offload.of_plan(plan)).peak
    if plain and peak >= plain:
        logged.add(option)
        hint = (
            ". Where the peak is made by the gradients of weights, zoo.optimizer_in_backward frees "
            "them"
        )
        _log.warning(
            "checkpoint=%s saves nothing of %s: a training step takes %s by its plan, %s without, "
            "beside weights and optimizer. Take another option, such as memory_budget=, which says "
            "the least that is possible, or leave checkpointing out%s",
            option,
            type(model).__name__,
            format_bytes(peak),
            format_bytes(plain),
            hint if attached_to(model.parameters()) is None else "",
        )


def _is_elsewhere(made_for: str, model: nn.Module) -> bool:
    """Returns whether a model is on another device than its plan was made for."""
    kind = device_of(model).type
    return bool(made_for) and kind != "meta" and not is_of_kind(made_for, kind)


@functools.cache
def _warn_of_assumed(name: str, assumed: str) -> None:
    """Warns, once in a process, that a budget counts an optimizer that was assumed."""
    _log.warning("a plan for a budget of %s: %s", name, assumed)


@functools.cache
def _warn_of_costs(name: str, failure: str) -> None:
    """Warns, once in a process, that no dry step told what a plan takes."""
    _log.warning(
        "the plan of %s is chosen by the costs of its steps, which may be some percent off, since "
        "no training step on fake tensors tells what it takes (%s): leave some of the budget free, "
        "or look at what a step takes with zoo.track",
        name,
        failure,
    )


@functools.cache
def _warn_of_profiler(name: str) -> None:
    """Warns, once in a process, that a plan was made while a profiler was at work."""
    _log.warning(
        "the plan of %s is made from estimates, which leave kernel workspaces out, so that a step "
        "may take more than was planned: a profiler is at work, and beside it no kernel of the CPU "
        "can be measured. Run the first training step before the profiler starts",
        name,
    )


@functools.cache
def _warn_of_device(made_for: str, here: str) -> None:
    """Warns, once in a process, that a plan is in force on another device than it was made for."""
    _log.warning(
        "this plan was made for %s, and the model is on %s, whose kernels take other workspaces "
        "and times: a training step may take more than the plan's budget. Make the plan here: "
        "zoo.plan(model, inputs, ...) with the model on its device, or `zoo plan --device`",
        made_for,
        here,
    )


def _first_decided(
    goal: Goal,
    step: CountedStep,
    decide: Callable[[], Sequence[RoomyPlan]],
    sides: Sides = OUTSIDE,
    known: Sequence[RoomyPlan] = (),
) -> Sequence[RoomyPlan]:
    """Returns the plans of the first process in a group that decided the same request.

    It may be a choice among `known` plans.

    Clocks differ, and so do plans by measured times. Each plan is exact, but collectives inside
    steps must be recomputed in the same order everywhere. A store is used instead of a broadcast,
    since other processes may never have such inputs and must not be waited for:

        rank 0    asks the store, gets no plan, plans, writes
        rank 1    asks, gets no plan, plans, writes too late and gets what rank 0 wrote
        rank 2    asks, gets what rank 0 wrote
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return decide()
    parameters = [(name, p.shape, p.dtype) for name, p in step.model.named_parameters()]
    spec = InputSpec.of(Invocation(tuple(step.inputs)), step.model)
    bounds = goal.choice, goal.memory_budget, goal.max_overhead, goal.offload
    asked = *bounds, step.training.names, sides, [plan.text for plan in known]
    request = repr((step.outline.names, step.outline.blocks, parameters, spec, asked))
    store = distributed.distributed_c10d._get_default_store()
    key = f"zoo/{hashlib.sha256(request.encode()).hexdigest()}"
    if store.check([key]):
        text = store.get(key)
    else:
        own_plans = "\n".join(plan.text for plan in decide())
        # a store takes no empty text
        text = store.compare_set(key, "", own_plans or "none")
    lines = text.decode().splitlines()
    return [RoomyPlan.parse(line) for line in lines if line != "none"]
