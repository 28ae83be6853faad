"""The `checkpoint=` option: True, a number of segments, a scheme's name, "auto" or a Plan.

An option becomes a plan once the steps of a model are known. `tracing.planned_forward` puts the
plan in force and keeps it for the inputs that it serves.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn

from zoo._torch import active_fake_mode
from zoo.engine.devices import ProfilerError, name_of
from zoo.engine.sharded import is_spread
from zoo.errors import ArgumentError, BudgetError, PlanError, shortened
from zoo.invocation import InputSpec, Invocation, device_of
from zoo.loss import Loss
from zoo.optimizer.in_backward import attached_to
from zoo.optimizer.independence import optimizer_like
from zoo.planner import schemes
from zoo.planner.costs import LEAST_OFFLOADED, simulate
from zoo.planner.json_reader import read_file
from zoo.planner.least_memory import least_memory
from zoo.planner.plan import Plan, RoomyPlan
from zoo.policy.budget import (
    NO_OFFLOAD,
    Budget,
    Offload,
    Overhead,
    StepPlanner,
    check_gathered,
    parse_bounds,
)
from zoo.policy.plan_report import PlanReport
from zoo.profiling.kernel_costs import is_of_kind
from zoo.profiling.optimizer_memory import (
    OptimizerBytes,
    OptimizerOption,
    is_optimizer,
    maker_of,
)
from zoo.profiling.progress import shown
from zoo.units import exact_bytes, format_bytes

Checkpoint = bool | int | str | Plan | PlanReport | tuple[Any, ...]
# more segments than any model has blocks
MOST_SEGMENTS = 2**40
# the optimizer that steps in the backward, or AdamW, with a warning
ASSUMED = "assumed"
_log = logging.getLogger("zoo")


def parse_checkpoint(option: Checkpoint) -> Checkpoint:
    """Reads text of a `checkpoint=` option, the same in Python and on a command line.

    It is "true", "false", "auto", digits, a scheme's name, a plan such as "(0-1) 2", or the name of
    a .json file: of a `PlanReport`, or of a plan alone. What is no text is returned as it is.

    Raises:
        ArgumentError: no such option.
        PlanError: a malformed plan.
    """
    if not isinstance(option, str):
        return option
    text = option.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal() and len(text) <= len(str(MOST_SEGMENTS)):
        return int(text)
    if text.endswith(".json"):
        saved = read_file(text)
        is_plan = saved.lstrip().startswith("[")
        return Plan.from_json(saved) if is_plan else PlanReport.from_json(saved)
    if any(character in text for character in "()-"):
        return Plan.parse(text)
    if text != "auto":
        schemes.check_name(text)
    return text


def plan_or_option(option: Any) -> Any:
    """Returns a parsed `checkpoint=` option; for a report its plan alone, without its budget.

    None stays None.
    """
    option = parse_checkpoint(option)
    return option.plan if isinstance(option, PlanReport) else option


@dataclass(frozen=True)
class StepSettings:
    """The parts of a training step beside the model that a budget counts.

    Attributes:
        optimizer: the one whose state is counted, as in `zoo.plan`, or ASSUMED.
        loss: a function of the model's output; None if it is in the model or takes no memory.
        accumulates: whether the step begins with the gradients of earlier backwards.
        holds_outputs: whether a variable holds the outputs until the backward is over.
    """

    optimizer: OptimizerOption | None = ASSUMED
    loss: Loss | None = None
    accumulates: bool = False
    holds_outputs: bool = True

    def for_model(self, model: nn.Module) -> "StepSettings":
        """Returns the same without the state of an optimizer, which would live as long as a plan.

        Raises:
            ArgumentError: no optimizer, or one of other parameters.
        """
        optimizer: Any = self.optimizer
        if optimizer == ASSUMED:
            return self
        maker_of(optimizer, model)
        if not is_optimizer(optimizer):
            return self
        groups = [{**g, "params": [*g["params"]]} for g in optimizer.param_groups]
        return replace(self, optimizer=optimizer_like(optimizer, groups))

    def of(self, planner: StepPlanner) -> StepPlanner:
        """Returns a planner in which this is counted.

        Raises:
            ArgumentError: the model's parameters are spread over processes.
        """
        check_gathered(planner.model)
        in_backward = attached_to(planner.model.parameters()) is not None
        planner = replace(
            planner,
            accumulates=self.accumulates,
            holds_outputs=self.holds_outputs,
            optimizer_in_backward=in_backward,
            counted_optimizer=None,
        )
        if self.optimizer != ASSUMED:
            return replace(planner, optimizer=maker_of(self.optimizer, planner.model))
        return _with_optimizer_in_backward(planner) if in_backward else planner

    @property
    def names(self) -> tuple[str, ...]:
        """The settings as text, the same in all processes of a group."""
        parts = self.optimizer, self.loss
        named = (part if isinstance(part, str) else _name(part) for part in parts)
        return (*named, str(self.accumulates), str(self.holds_outputs))


def _name(value: object) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def option_for(
    checkpoint: Checkpoint,
    memory_budget: Budget | None,
    max_overhead: Overhead | None,
    step: StepSettings | None = None,
    offload: Offload = NO_OFFLOAD,
) -> "Option | None":
    """Returns an option of `zoo.checkpoint`; None for False. `step` is what a budget counts.

    Raises:
        ArgumentError: no such option, or a budget or a step beside another option.
        PlanError: a malformed plan.
    """
    option = _option_for(checkpoint, memory_budget, max_overhead, step)
    if option is None:
        if offload.is_on:
            raise ArgumentError(
                "offload=True copies what a plan names to the host, and checkpoint=False has none; "
                "take checkpoint=True, another option or a budget, or leave offload= out"
            )
        return None
    if option.report is not None and option.report.offloaded:
        # otherwise it would break the budget that it was made for
        own = frozenset(option.report.offloads)
        if offload.items not in (None, own):
            raise ArgumentError(
                f"offload={shortened(sorted(offload.items))} beside a report whose plan offloads "
                f"{shortened(sorted(own))} would break its budget; leave offload= out, or pass "
                "report.plan"
            )
        offload = replace(offload, is_on=True, items=own)
    return replace(option, offload=offload.named_in(option.plan))


def _option_for(
    checkpoint: Checkpoint,
    memory_budget: Budget | None,
    max_overhead: Overhead | None,
    step: StepSettings | None,
) -> "Option | None":
    checkpoint = parse_checkpoint(checkpoint)
    bounded = memory_budget is not None or max_overhead is not None
    report = checkpoint if isinstance(checkpoint, PlanReport) else None
    checkpoint = plan_or_option(checkpoint)
    if checkpoint == "auto" or (bounded and checkpoint is False):
        budget = memory_budget if bounded else "device"
        return Option("auto", *parse_bounds(budget, max_overhead), step=step or StepSettings())
    if bounded:
        bound = "max_overhead" if memory_budget is None else "memory_budget"
        raise ArgumentError(
            f"{bound}= goes with checkpoint='auto'; got checkpoint={checkpoint!r}, which does not "
            "use it"
        )
    if step is not None:
        raise ArgumentError(
            "optimizer=, loss=, accumulates= and holds_outputs= say what a budget counts; got "
            f"checkpoint={checkpoint!r}, which has none. Pass memory_budget= or max_overhead=, or "
            "leave them out"
        )
    if checkpoint is False:
        return None
    if isinstance(checkpoint, tuple | list):
        if report is None:
            return Option(Plan(checkpoint))
        settings = StepSettings(holds_outputs=report.holds_outputs)
        return Option(Plan(checkpoint), report=report, step=settings)
    if not isinstance(checkpoint, int):
        schemes.check_name(checkpoint)
    elif checkpoint < 1:
        raise ArgumentError(f"checkpoint={checkpoint}: choose 1 segment or more, or False")
    return Option(checkpoint)


@dataclass(frozen=True)
class Option:
    """A user's option, from which plans are made.

    Attributes:
        checkpoint: True, "auto", a number of segments, a scheme's name or a Plan.
        memory_budget: of "auto", in bytes, as a share of the baseline's peak, or "device".
        max_overhead: of "auto", as a share of the baseline's time.
        report: the report that a given plan comes from; None without one.
        step: what a budget counts beside the model.
        offload: what lies on the host until the backward.
    """

    checkpoint: Any
    memory_budget: Budget | None = None
    max_overhead: float | None = None
    report: PlanReport | None = None
    step: StepSettings = StepSettings()
    offload: Offload = NO_OFFLOAD

    @property
    def plan(self) -> Plan | None:
        """The plan, if the option is one."""
        return self.checkpoint if isinstance(self.checkpoint, Plan) else None

    @property
    def is_count(self) -> bool:
        """Whether it is a number of segments, which may exceed the number of blocks."""
        return self.checkpoint is not True and isinstance(self.checkpoint, int)

    @property
    def binds_first_step(self) -> bool:
        """Whether the first training step must run by a plan: a budget, or a plan of the user's."""
        return self.plan is not None or self.is_bounded

    @property
    def is_bounded(self) -> bool:
        """Whether it is a budget or an overhead, for which each kind of kernel is measured."""
        return bool(self.checkpoint == "auto")

    def plan_for(self, planner: StepPlanner, *, runs_kernels: bool = True) -> RoomyPlan:
        """Returns the plan for the steps of a model on inputs like these.

        Without `runs_kernels`, as for a step whose inputs may not fit now, `True` counts the
        optimizer and the kernel workspaces that the planner knows.

        Raises:
            BudgetError: no plan keeps to the budget.
            PlanError: the user's plan is for other steps.
        """
        return self._checked_plans(planner, runs_kernels=runs_kernels)[0]

    def plans_for(self, planner: StepPlanner, *, has_run: bool = False) -> Sequence[RoomyPlan]:
        """Returns the plan, and for a budget in bytes others for larger inputs, by rising room.

        A training that has run goes on: where no plan keeps to the budget, it gets the plan of the
        least peak, with a warning.

        Raises:
            BudgetError: no plan keeps to the budget, or the user's does not keep to the one that it
                was made for.
            PlanError: the user's plan is for other steps.
        """
        plans, model = self._checked_plans(planner, has_run=has_run), planner.model
        report = self.report
        if report is None or report.budget is None or _is_elsewhere(report.device, model):
            return plans
        if any(map(is_spread, model.parameters())):
            # costs are those of whole parameters
            return plans
        (chosen,) = plans
        still = report.fixed.beside_activations - report.fixed.inputs
        planner = replace(
            planner,
            outline=planner.outline.without_loss(),
            holds_outputs=False,
            offload=self.offload,
        )
        costs = _with_optimizer_in_backward(planner).costs_with_gradients
        peak = planner.simulate(chosen.plan, costs, chosen.offloads).peak
        grows = sum(tensor.nbytes for tensor in planner.inputs) + peak
        if still + grows > report.budget:
            raise BudgetError(
                f"this plan is for {report.title} and a budget of {exact_bytes(report.budget)}; "
                f"on {planner.title} a training step by it takes at least "
                f"{exact_bytes(still + grows)}. Lower the batch size, or plan for these inputs: "
                "zoo.checkpoint(model, memory_budget=...) does so for each size that comes",
                report.budget,
            )
        return [chosen._replace(room=(report.budget - still) / grows if grows else math.inf)]

    @shown("zoo.checkpoint")
    def _checked_plans(
        self, planner: StepPlanner, *, runs_kernels: bool = True, has_run: bool = False
    ) -> Sequence[RoomyPlan]:
        if self.checkpoint != "auto":
            planner = replace(planner, outline=planner.outline.without_loss())
        planner = replace(planner, offload=self.offload)
        plans = self._unchecked_plans(planner, runs_kernels, has_run)
        plans[0].plan.check(planner.steps)
        if self.checkpoint != "auto":
            plans = [one._replace(offloads=self.offload.of_plan(one.plan)) for one in plans]
        if self.offload.is_on:
            self._check_offload(plans[0], planner, has_run)
        return plans

    def _check_offload(self, chosen: RoomyPlan, planner: StepPlanner, has_run: bool) -> None:
        """Refuses a plan that needs more host memory than the budget; warns if it needs none."""
        steps = range(planner.steps, len(planner.costs))
        whole = Plan([*chosen.plan, *steps])
        offloaded = planner.simulate(whole, planner.costs, chosen.offloads).offloaded
        if not has_run:
            self.offload.check(offloaded, planner.title)
        if not offloaded:
            why = "without offloading, the plan for its budget takes no more time"
            if self.checkpoint != "auto":
                why = (
                    "no segment of its plan starts from, and no kept step in offload= saves, "
                    f"{format_bytes(LEAST_OFFLOADED)} or more that nothing else holds. For a "
                    "budget, zoo chooses among all plans"
                )
            what = "offload= copies nothing of %s to the host: %s"
            _log.warning(what, type(planner.model).__name__, why)

    def _unchecked_plans(
        self, planner: StepPlanner, runs_kernels: bool, has_run: bool
    ) -> Sequence[RoomyPlan]:
        option, model, outline = self.checkpoint, planner.model, planner.outline
        if self.plan is not None:
            if self.report is not None and _is_elsewhere(self.report.device, model):
                kind = device_of(model).type
                _warn_of_device(self.report.device, name_of(kind) or kind)
            return [RoomyPlan(self.plan)]
        if option is True or option == "auto":
            parameters = [(name, p.shape, p.dtype) for name, p in model.named_parameters()]
            spec = InputSpec.of(Invocation(tuple(planner.inputs)), model)
            bounds = option, self.memory_budget, self.max_overhead, self.step.names, self.offload
            request = repr((outline.names, outline.blocks, parameters, spec, bounds))
            if option == "auto":
                return _first_decided(request, lambda: self._within_budget(planner, has_run))
            return _first_decided(request, lambda: [RoomyPlan(_least(planner, runs_kernels))])
        planner = _with_optimizer_in_backward(planner)
        if isinstance(option, int):
            plan = schemes.segments(outline.blocks, option)
        else:
            plan = schemes.named(option, outline.blocks, outline.whole, lambda: planner.costs)
        with contextlib.suppress(PlanError):
            _warn_of_no_saving(option, plan, planner)
        return [RoomyPlan(plan)]

    def _within_budget(self, planner: StepPlanner, has_run: bool) -> Sequence[RoomyPlan]:
        """Plans for the budget and logs the prediction."""
        planner = self.step.of(planner)
        try:
            planner = planner.measured()
        except ProfilerError:
            _warn_of_profiler(type(planner.model).__name__)
        is_assumed = self.step.optimizer == ASSUMED and not planner.optimizer_in_backward
        assumed = (
            f"the optimizer is assumed to be AdamW, with a state of "
            f"{format_bytes(planner.optimizer_bytes.state)}: pass optimizer= to zoo.checkpoint, "
            "'adamw' or another name, a class, or the optimizer itself"
        )
        try:
            budget = planner.bytes_of(self.memory_budget) if self.max_overhead is None else None
            # a plan for both sides of autocast, if one fits both, until it is known which it is
            chosen = outside = planner.chosen(budget, self.max_overhead, planner.sides[:1])
            fits_all = len(planner.sides) == 1
            with contextlib.suppress(BudgetError):
                chosen = planner.chosen(budget, self.max_overhead)
                fits_all = True
        except BudgetError as error:
            if has_run:
                what = "%s goes by the plan of the least peak, which breaks its budget: %s"
                _log.warning(what, type(planner.model).__name__, error)
                least = planner.of_model(planner.lowest())
                return [RoomyPlan(least.plan, offloads=frozenset(least.offloads))]
            if not is_assumed:
                raise
            text = f"{error} {assumed[0].upper()}{assumed[1:]}."
            raise BudgetError(text, error.budget, error.least, error.baseline) from None
        if is_assumed and self.memory_budget is not None:
            _warn_of_assumed(type(planner.model).__name__, assumed)
        _log.info(
            "%s: planned peak %s, x%.2f of the baseline, time x%.2f",
            planner.title,
            format_bytes(chosen.peak),
            chosen.peak / planner.baseline.peak,
            chosen.time_ratio,
        )
        # a share of the baseline, and an overhead, grow with the inputs
        limit = None if isinstance(self.memory_budget, float) else budget
        plans = list[RoomyPlan]()
        for point in [chosen] if outside.plan == chosen.plan else [chosen, outside]:
            leaves = point is not chosen or not fits_all
            found = planner.plans_with_room(point, limit)
            plans += (one._replace(leaves_autocast=leaves) for one in found)
        return plans


def _is_elsewhere(made_for: str, model: nn.Module) -> bool:
    """Returns whether a model is on another device than its plan was made for."""
    kind = device_of(model).type
    return bool(made_for) and kind != "meta" and not is_of_kind(made_for, kind)


@functools.cache
def _warn_of_assumed(name: str, assumed: str) -> None:
    """Warns, once in a process, that a budget counts an optimizer that was assumed."""
    _log.warning("a plan for a budget of %s: %s", name, assumed)


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


def _with_optimizer_in_backward(planner: StepPlanner) -> StepPlanner:
    """Returns a planner that counts the optimizer if it steps in the backward, and else none.

    One that cannot be made again, or cannot step on fake tensors, counts as AdamW.
    """
    attached = attached_to(planner.model.parameters())
    if attached is None:
        return replace(planner, counted_optimizer=OptimizerBytes())
    group = attached.param_groups[0]

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        return optimizer_like(attached, [{**group, "params": parameters}])

    planner = replace(planner, optimizer_in_backward=True, counted_optimizer=None)
    with contextlib.suppress(ArgumentError):
        return replace(planner, counted_optimizer=replace(planner, optimizer=make).optimizer_bytes)
    return planner


def _least(planner: StepPlanner, runs_kernels: bool) -> Plan:
    """Returns the plan with the least peak of the whole training step.

    It counts activations, gradients of parameters and kernel workspaces, for which each different
    kernel runs once. Gradients of parameters that are spread over processes are left out.
    """
    if any(map(is_spread, planner.model.parameters())):
        return least_memory(_with_optimizer_in_backward(planner).costs)
    if runs_kernels:
        planner = _with_optimizer_in_backward(planner)
        if active_fake_mode() is None:
            with contextlib.suppress(ProfilerError):
                planner = planner.measured(timed=False)
    plan = least_memory(planner.costs_with_gradients)
    _warn_of_no_saving(True, plan, planner)
    return plan


# for each model the options of which a warning was logged
_SAVES_NOTHING: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _warn_of_no_saving(option: Any, plan: Plan, planner: StepPlanner) -> None:
    """Warns, once for a model and an option, if a plan takes no less than training without one."""
    model = planner.model
    logged = _SAVES_NOTHING.setdefault(model, set())
    if repr(option) in logged:
        return
    costs = planner.costs_with_gradients
    plain = simulate(Plan.keep_all(len(costs)), costs).peak
    peak = planner.simulate(plan, costs, planner.offload.of_plan(plan)).peak
    if plain and peak >= plain:
        logged.add(repr(option))
        hint = (
            ". Where the peak is made by the gradients of weights, zoo.optimizer_in_backward frees "
            "them"
        )
        _log.warning(
            "checkpoint=%r saves nothing of %s: a training step takes %s by its plan, %s without, "
            "beside weights and optimizer. Take another option, such as memory_budget=, which says "
            "the least that is possible, or leave checkpointing out%s",
            option,
            type(model).__name__,
            format_bytes(peak),
            format_bytes(plain),
            hint if attached_to(model.parameters()) is None else "",
        )


def _first_decided(request: str, decide: Callable[[], Sequence[RoomyPlan]]) -> Sequence[RoomyPlan]:
    """Returns the plans of the first process in a group that decided the same request.

    Clocks differ, and so do plans by measured times. Each plan is exact, but collectives inside
    steps must be recomputed in the same order everywhere. A store is used instead of a broadcast,
    since other processes may never have such inputs and must not be waited for:

        rank 0    asks the store, gets no plan, plans, writes
        rank 1    asks, gets no plan, plans, writes too late and gets what rank 0 wrote
        rank 2    asks, gets what rank 0 wrote
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return decide()
    store = distributed.distributed_c10d._get_default_store()
    key = f"zoo/{hashlib.sha256(request.encode()).hexdigest()}"
    if store.check([key]):
        text = store.get(key)
    else:
        own_plans = "\n".join(
            f"{room!r} {leaves:d} {json.dumps(sorted(offloads), separators=(',', ':'))} {p.text()}"
            for p, room, offloads, leaves in decide()
        )
        text = store.compare_set(key, "", own_plans)
    lines = (line.split(maxsplit=3) for line in text.decode().splitlines())
    return [
        RoomyPlan(Plan.parse(plan), float(room), frozenset(json.loads(offloads)), leaves == "1")
        for room, leaves, offloads, plan in lines
    ]
