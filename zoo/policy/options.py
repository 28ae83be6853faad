"""The `checkpoint=` option: True, a number of segments, a scheme's name, "auto" or a Plan.

A plan is chosen at the first training forward, when the inputs are known, and cached in the runner
of a chain. It serves inputs of the same structure (types, devices, autocast, steps) in which no
size is larger, such as an epoch's last batch:

    batches   32      32      20      48      20      40
    plan      for 32  for 32  for 32  for 48  for 32  for 48
"""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed, nn
from torch.nn.parameter import is_lazy

from zoo._torch import (
    active_fake_mode,
    are_functorch_transforms_active,
    is_exporting,
    is_profiling,
)
from zoo.chain import Chain, Outline, State, Step, fold
from zoo.engine.devices import name_of, splits_all_blocks
from zoo.engine.recompute import run_compiled, run_plan
from zoo.engine.replay import without_modes
from zoo.engine.sharded import is_spread
from zoo.errors import ArgumentError, BudgetError, PlanError
from zoo.invocation import InputSpec, Invocation, device_of, needs_gradients
from zoo.optimizer.in_backward import attached_to
from zoo.optimizer.independence import optimizer_like
from zoo.planner import schemes
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.json_reader import read_file
from zoo.planner.least_memory import least_memory
from zoo.planner.plan import Plan, indices
from zoo.policy.budget import Budget, BudgetPlanner, Overhead, parse_bounds
from zoo.policy.plan_report import PlanReport
from zoo.profiling.caching_allocator import rounding_of
from zoo.profiling.chain_profile import StepError
from zoo.profiling.kernel_costs import KernelCosts, is_of_kind
from zoo.profiling.log_profile import profile_of
from zoo.profiling.optimizer_memory import OptimizerBytes, optimizer_bytes
from zoo.profiling.progress import shown
from zoo.units import format_bytes

Checkpoint = bool | int | str | Plan | PlanReport | tuple[Any, ...]
# more than any model has blocks
MOST_SEGMENTS = 2**40
# inputs whose plans are cached; the oldest are dropped first
MOST_PLANS = 64
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
    """Returns a parsed `checkpoint=` option, of a report the plan alone: it trains no user's step.

    None stays None.
    """
    option = parse_checkpoint(option)
    return option.plan if isinstance(option, PlanReport) else option


def runner_for(
    checkpoint: Checkpoint, memory_budget: Budget | None, max_overhead: Overhead | None
) -> "PlannedRunner | None":
    """Returns the runner for an option of `zoo.checkpoint`; None for False.

    Raises:
        ArgumentError: no such option, or a budget beside another option.
        PlanError: a malformed plan.
    """
    checkpoint = parse_checkpoint(checkpoint)
    bounded = memory_budget is not None or max_overhead is not None
    made_for = checkpoint.device if isinstance(checkpoint, PlanReport) else ""
    checkpoint = plan_or_option(checkpoint)
    if checkpoint == "auto" or (bounded and checkpoint is False):
        budget = memory_budget if bounded else "device"
        return PlannedRunner("auto", *parse_bounds(budget, max_overhead))
    if bounded:
        bound = "max_overhead" if memory_budget is None else "memory_budget"
        raise ArgumentError(
            f"{bound}= goes with checkpoint='auto'; got checkpoint={checkpoint!r}, which does not "
            "use it"
        )
    if checkpoint is False:
        return None
    if isinstance(checkpoint, tuple | list):
        runner = PlannedRunner(Plan(checkpoint), made_for=made_for)
        runner.force(runner.checkpoint)
        return runner
    if not isinstance(checkpoint, int):
        schemes.check_name(checkpoint)
    elif checkpoint < 1:
        raise ArgumentError(f"checkpoint={checkpoint}: choose 1 segment or more, or False")
    return PlannedRunner(checkpoint)


@dataclass
class PlannedRunner:
    """Runs a chain by the plan that an option chooses for the size of the inputs.

    `made_for` is the device of the report that a given plan comes from; "" where there is none.
    """

    checkpoint: Any
    memory_budget: Budget | None = None
    max_overhead: float | None = None
    plan: Plan | None = None
    plans: dict[InputSpec, Plan] = field(default_factory=dict)
    compiled: tuple[tuple[Any, ...], ...] = ()
    # whether a step ran, which a plan may no longer end
    has_run: bool = False
    made_for: str = ""

    def __call__(self, chain: Chain, outline: Outline, inputs: State) -> Any:
        """Chooses a plan unless one is cached, then runs by it.

        Under `torch.func` and `torch.export` the chain runs its own forward without recomputation.
        Under `torch.compile` it runs by the latest plan for as many steps. Choosing a plan is a
        graph break, and so is a chain that cannot be compiled whole.
        """
        if are_functorch_transforms_active() or is_exporting():
            return fold(outline.steps, inputs)
        if torch.compiler.is_compiling():
            if not self.compiled or self.compiled[-1][-1] != len(outline.steps) - 1:
                _plan_uncompiled(self, chain, outline, inputs)
            assert self.plan is not None
            return run_compiled(self.plan, self.compiled, outline.steps, inputs)
        with without_modes():
            is_trained = needs_gradients(chain, Invocation(inputs))
        if not is_trained:
            return fold(outline.steps, inputs)
        refused = None
        with without_modes():
            try:
                plan = self.plan_for(chain, outline, inputs)
            except StepError as error:
                # the step's own error tells more
                plan, refused = schemes.each_block(outline.blocks, outline.whole), error
            except (ArgumentError, BudgetError, PlanError) as error:
                if not self.has_run:
                    raise
                plan = schemes.each_block(outline.blocks, outline.whole)
                warn_of_blocks(chain, error)
                self.plans[_spec(chain, outline, inputs)] = plan
        outputs = run_plan(plan, outline.steps, inputs)
        if refused is not None:
            raise refused
        self.has_run = True
        return outputs

    def plan_for(self, chain: Chain, outline: Outline, inputs: State) -> Plan:
        """Puts the plan for inputs like these in force and returns it."""
        spec = _spec(chain, outline, inputs)
        # a copy, since other threads may add plans meanwhile
        plans = self.plans.copy()
        known = spec if spec in plans else spec.smallest_cover(plans)
        if known is None and not isinstance(self.checkpoint, Plan) and has_lazy(chain):
            # for this forward, which gives lazy parameters their sizes
            return schemes.each_block(outline.blocks, outline.whole)
        if known is None:
            plan = self.decide(chain, outline, inputs)
            plan.check(len(outline))
            self.plans[spec] = plan
            for oldest in [*self.plans][:-MOST_PLANS]:
                self.plans.pop(oldest, None)
        else:
            plan = plans[known]
        if self.plan is not plan:
            self.force(plan)
        return plan

    def force(self, plan: Plan) -> None:
        """Puts a plan in force."""
        self.plan = plan
        self.compiled = tuple((isinstance(item, tuple), *indices(item)) for item in plan)

    @shown("zoo.checkpoint")
    def decide(
        self,
        chain: Chain,
        outline: Outline,
        inputs: State,
        *,
        later_step: BudgetPlanner | None = None,
    ) -> Plan:
        """Returns the plan that the option chooses for a chain and its inputs.

        `later_step` is a later training step, whose inputs may not fit now: then `True` runs no
        kernels and takes workspaces from there.
        """
        option, outline = self.checkpoint, outline.without_loss()
        if isinstance(option, Plan):
            device = device_of(chain).type
            if self.made_for and device != "meta" and not is_of_kind(self.made_for, device):
                _warn_of_device(self.made_for, name_of(device) or device)
            return option
        if option is True or option == "auto":
            parameters = [(name, p.shape, p.dtype) for name, p in chain.named_parameters()]
            steps = outline.names(chain), outline.blocks, parameters
            bounds = option, self.memory_budget, self.max_overhead
            request = repr((*steps, _spec(chain, outline, inputs), *bounds))
            if option == "auto":
                return _first_decided(request, lambda: self._planned(chain, outline, inputs))
            return _first_decided(request, lambda: _least(chain, outline, inputs, later_step))
        costs = functools.cache(lambda: _costs(chain, outline, inputs))
        if isinstance(option, int):
            plan = schemes.segments(outline.blocks, option)
        else:
            plan = schemes.named(option, outline.blocks, outline.whole, costs)
        # a user's own steps do not run on fake tensors for this, but traced ones may
        if option == "cheap" or not isinstance(chain, Chain):
            with contextlib.suppress(PlanError):
                _warn_of_no_saving(chain, option, plan, costs())
        return plan

    def _planned(self, chain: Chain, outline: Outline, inputs: State) -> Plan:
        """Plans for the budget and logs the prediction.

        The optimizer is the one that steps in the backward; if there is none, AdamW is assumed.
        """
        known = _optimizer_in_backward(chain)
        given = chain, outline, inputs
        planner = BudgetPlanner(*given, optimizer=known or torch.optim.AdamW).measured()
        try:
            report = planner.report(self.memory_budget, self.max_overhead)
        except BudgetError as error:
            if known is not None:
                raise
            raise BudgetError(
                f"{error} The optimizer is assumed to be AdamW, with a state of "
                f"{format_bytes(planner.optimizer.state)}; for another one plan by "
                "zoo.plan(..., optimizer=...), and pass what it returns as checkpoint=.",
                error.budget,
                error.least,
                error.baseline,
            ) from None
        _log.info(
            "%s: planned peak %s, x%.2f of the baseline, time x%.2f",
            planner.title,
            format_bytes(report.predicted_peak),
            report.predicted_peak / report.baseline_peak,
            report.predicted_time_ratio,
        )
        return report.plan


def warn_of_blocks(model: nn.Module, error: Exception) -> None:
    """Warns that a model whose training has begun goes on block by block."""
    what = "%s runs block by block: its forward cannot be planned for (%s)"
    _log.warning(what, type(model).__name__, error)


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


def has_lazy(model: nn.Module) -> bool:
    """Says whether a model has lazy parameters or buffers without a size."""
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


def _least(chain: Chain, outline: Outline, inputs: State, later_step: BudgetPlanner | None) -> Plan:
    """Returns the plan with the least peak of the whole training step.

    The peak counts activations; gradients of parameters, from when the backward makes them to when
    an optimizer in the backward frees them; and kernel workspaces, for which each different kernel
    runs once. Gradients of parameters that are spread over processes are left out.
    """
    device = device_of(chain)
    rounding = rounding_of(device.type, splits_all=splits_all_blocks(device))
    profile = profile_of(chain, outline, inputs, rounding)
    # a training loop's variable holds the output beyond the backward
    returned = profile.returned
    if any(map(is_spread, chain.parameters())):
        return least_memory(replace(profile.costs(), returned=returned))
    is_here = profile.device.type != "meta" and active_fake_mode() is None
    kernels: Sequence[KernelCosts | None] = ()
    if later_step is not None:
        kernels = later_step.kernels_for(profile)
    elif is_here and not is_profiling():
        kernels = profile.kernels(timed=False)
    optimizer = _optimizer_in_backward(chain) if later_step is None else later_step.optimizer
    updates = None if optimizer is None else optimizer.updates
    costs = profile.costs(kernels=kernels, updates=updates)
    costs = replace(costs, returned=returned).with_parameter_gradients()
    plan = least_memory(costs)
    _warn_of_no_saving(chain, True, plan, costs)
    return plan


def _costs(chain: Chain, outline: Outline, inputs: State) -> StepCosts:
    """Returns the costs of steps whose kernels are not measured."""
    updates = None if (known := _optimizer_in_backward(chain)) is None else known.updates
    profile = profile_of(chain, outline, inputs)
    return profile.costs(updates=updates).with_parameter_gradients()


# the models of which a warning said so, and the options that it named
_SAVES_NOTHING: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _warn_of_no_saving(chain: Chain, option: Any, plan: Plan, costs: StepCosts) -> None:
    """Warns, once for a model and an option, if a plan takes no less than training without one."""
    said = _SAVES_NOTHING.setdefault(chain, set())
    if repr(option) in said:
        return
    plain = simulate(Plan.keep_all(len(costs)), costs).peak
    peak = simulate(plan, costs).peak
    if plain and peak >= plain:
        said.add(repr(option))
        hint = (
            ". Where the peak is made by the gradients of weights, zoo.optimizer_in_backward frees "
            "them"
        )
        _log.warning(
            "checkpoint=%r saves nothing of %s: a training step takes %s by its plan and %s plain, "
            "beside weights and optimizer. Take another option, such as memory_budget=, which says "
            "the least that is possible, or leave checkpointing out%s",
            option,
            type(chain).__name__,
            format_bytes(peak),
            format_bytes(plain),
            hint if attached_to(chain.parameters()) is None else "",
        )


def _optimizer_in_backward(chain: Chain) -> OptimizerBytes | None:
    """Returns the bytes of the optimizer that steps in the backward; None if there is none."""
    attached = attached_to(chain.parameters())
    if attached is None:
        return None
    try:
        group = attached.param_groups[0]
        return optimizer_bytes(
            lambda parameters: optimizer_like(attached, [{**group, "params": parameters}]),
            chain.parameters(),
            in_backward=True,
        )
    except ArgumentError:
        # one that cannot be made again, or cannot step on fake tensors, counts as AdamW
        return optimizer_bytes(torch.optim.AdamW, chain.parameters(), in_backward=True)


def _plan_uncompiled(runner: PlannedRunner, chain: Chain, outline: Outline, inputs: State) -> None:
    torch.compiler.disable(runner.plan_for)(chain, outline, inputs)  # type: ignore[no-untyped-call]


# torch.compiler.disable sets these on a function; to call it here would import the compiler
vars(_plan_uncompiled).update(
    _torchdynamo_disable=True,
    _torchdynamo_disable_msg="zoo decides a plan at the first training forward. For fullgraph=True "
    "run one before compiling, or pass checkpoint= a Plan.",
)


def _first_decided(request: str, decide: Callable[[], Plan]) -> Plan:
    """Returns the plan of the first process in a group that decided the same request.

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
        return Plan.parse(store.get(key).decode())
    return Plan.parse(store.compare_set(key, "", decide().text()).decode())


def _spec(chain: Chain, outline: Outline, inputs: State) -> InputSpec:
    """Returns what a plan depends on: what the inputs are like, and the steps."""
    given = InputSpec.of(Invocation(inputs), chain)
    steps = outline.blocks, tuple(map(_code_of, outline.steps))
    return given._replace(structure=(given.structure, *steps))


def _code_of(step: Step) -> tuple[str, str]:
    """Names the code of a step, without its numeric arguments, such as a chunk's size."""
    while isinstance(step, functools.partial):
        step = step.func
    if isinstance(step, str | nn.Module):
        return type(step).__qualname__, ""
    return type(getattr(step, "__self__", step)).__qualname__, getattr(step, "__name__", "")
