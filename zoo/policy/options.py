"""From what a user writes to a plan in force: `checkpoint=True`, a number, a name or a Plan.

The decision is made at the first forward in training, when the inputs are known, once for each kind
of inputs, and kept in the runner that this file attaches to a chain.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from zoo._torch import are_functorch_transforms_active, is_exporting
from zoo.chain import Chain, Outline, State, fold, step_names
from zoo.engine.executor import run_compiled, run_plan
from zoo.errors import ArgumentError
from zoo.planner import schemes
from zoo.planner.costs import StepCosts
from zoo.planner.least_memory import least_memory
from zoo.planner.plan import Plan, indices
from zoo.policy.budget import Budget, BudgetPlanner, check_bounds
from zoo.policy.report import PlanReport
from zoo.profiling.chain_profile import Profile
from zoo.units import format_bytes

Checkpoint = bool | int | str | Plan | PlanReport | tuple[Any, ...]
Decide = Callable[[Chain, Outline, State], Plan]
# kinds of inputs whose plans are kept; the oldest goes first
MOST_PLANS = 64
_log = logging.getLogger("zoo")
AnyChain = TypeVar("AnyChain", bound=Chain)


def attach(
    chain: AnyChain,
    checkpoint: Checkpoint = True,
    *,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
) -> AnyChain:
    """Puts a `checkpoint=` option in force on a chain, in place of an earlier one, and returns it.

    The options are those of `zoo.checkpoint`.
    All but `False` decide at the first forward in training, for each kind of inputs anew.

    Raises:
        ArgumentError: none of these, no chain, or a budget beside another option.
        BudgetError: at that forward, when no plan keeps to the budget.
        PlanError: a malformed plan; one that does not fit raises at the first forward.
    """
    if not isinstance(chain, Chain):
        raise ArgumentError(
            f"checkpoint= needs a zoo.Chain; got {type(chain).__name__}. Write the model as a "
            "chain, or call its parts through zoo.recompute"
        )
    chain.runner = runner_for(checkpoint, memory_budget, max_overhead)
    return chain


def runner_for(
    checkpoint: Checkpoint, memory_budget: Budget | None, max_overhead: float | None
) -> "PlannedRunner | None":
    """Returns what decides and runs by an option, None for the baseline; raises as `attach`."""
    bounded = memory_budget is not None or max_overhead is not None
    if isinstance(checkpoint, PlanReport):
        checkpoint = checkpoint.plan
    if checkpoint == "auto" or (bounded and checkpoint is False):
        budget = memory_budget if bounded else "device"
        check_bounds(budget, max_overhead)
        return PlannedRunner(functools.partial(_within, budget, max_overhead))
    if bounded:
        raise ArgumentError(
            f"memory_budget and max_overhead go with checkpoint='auto'; got {checkpoint!r}, which "
            "decides without them"
        )
    runner = None if checkpoint is False else PlannedRunner(_decide_by(checkpoint))
    if runner is not None and isinstance(checkpoint, tuple | list):
        runner.force(Plan(checkpoint))
    return runner


@dataclass
class PlannedRunner:
    """Runs a chain by a plan that is decided once for each kind of inputs."""

    decide: Decide
    plan: Plan | None = None
    plans: dict[Any, Plan] = field(default_factory=dict)
    compiled: tuple[tuple[Any, ...], ...] = ()

    def __call__(self, chain: Chain, outline: Outline, inputs: State) -> Any:
        """Decides if need be, then runs.

        Under `torch.func` and `torch.export` the chain runs plainly and saves nothing. Under
        `torch.compile` it runs by the latest plan for as many steps; deciding one is a break in the
        graph, and so is a chain that cannot be compiled whole.
        """
        if are_functorch_transforms_active() or is_exporting():
            return fold(outline.steps, inputs)
        if torch.compiler.is_compiling():
            if not self.compiled or self.compiled[-1][-1] != len(outline.steps) - 1:
                _settle_uncompiled(self, chain, outline, inputs)
            assert self.plan is not None
            return run_compiled(self.plan, self.compiled, outline.steps, inputs)
        return run_plan(self.settle(chain, outline, inputs), outline.steps, inputs)

    def settle(self, chain: Chain, outline: Outline, inputs: State) -> Plan:
        """Puts the plan for inputs like these in force and returns it."""
        kind = (len(outline.steps), *map(_kind, inputs), *_autocast(inputs))
        if kind not in self.plans:
            plan = self.decide(chain, outline, inputs)
            plan.check(len(outline.steps))
            if len(self.plans) == MOST_PLANS:
                del self.plans[next(iter(self.plans))]
            self.plans[kind] = plan
        if self.plan is not self.plans[kind]:
            self.force(self.plans[kind])
        return self.plans[kind]

    def force(self, plan: Plan) -> None:
        """Puts a plan in force."""
        self.plan = plan
        self.compiled = tuple((isinstance(item, tuple), *indices(item)) for item in plan)


def _settle_uncompiled(
    runner: PlannedRunner, chain: Chain, outline: Outline, inputs: State
) -> None:
    torch.compiler.disable(runner.settle)(chain, outline, inputs)  # type: ignore[no-untyped-call]


# what torch.compiler.disable sets on a function; to call it here would import the compiler
vars(_settle_uncompiled).update(
    _torchdynamo_disable=True,
    _torchdynamo_disable_msg="zoo decides a plan at the first training forward. For fullgraph=True "
    "run one before compiling, or pass checkpoint= a Plan.",
)


def _decide_by(checkpoint: Any) -> Decide:
    if checkpoint is True:
        return functools.partial(_from_costs, least_memory)
    if isinstance(checkpoint, tuple | list):
        return functools.partial(_given, Plan(checkpoint))
    if isinstance(checkpoint, str):
        schemes.check_name(checkpoint)
        if checkpoint == schemes.BLOCKS:
            return _each_block
        if checkpoint in schemes.FROM_BLOCKS:
            return functools.partial(_from_blocks, schemes.FROM_BLOCKS[checkpoint])
        return functools.partial(_from_costs, schemes.FROM_COSTS[checkpoint])
    if isinstance(checkpoint, int):
        if checkpoint < 1:
            raise ArgumentError(f"checkpoint={checkpoint} segments; choose 1 or more, or False")
        scheme = functools.partial(schemes.segments, count=checkpoint)
        return functools.partial(_from_blocks, scheme)
    raise ArgumentError(
        f"checkpoint={checkpoint!r} is none of True, False, 'auto', a number of segments, a Plan, "
        f"{', '.join(schemes.NAMES)}"
    )


def _within(
    memory_budget: Budget | None,
    max_overhead: float | None,
    chain: Chain,
    outline: Outline,
    inputs: State,
) -> Plan:
    """Plans for a budget, AdamW's state counted, once for all processes of a group."""
    kinds = (*map(_kind, inputs), *_autocast(inputs))
    own = [(name, value.shape, value.dtype) for name, value in chain.named_parameters()]
    names = step_names(chain, outline.steps)
    question = repr((names, outline.blocks, own, kinds, memory_budget, max_overhead))
    return _agreed(question, lambda: _planned(memory_budget, max_overhead, chain, outline, inputs))


def _agreed(question: str, decide: Callable[[], Plan]) -> Plan:
    """Returns the plan that the first process of a group to ask a question decided.

    Clocks differ, and so do plans by measured times. Any of them is exact, but for collectives
    inside of steps: a recompute must issue these in the same order everywhere. No broadcast, since
    nobody may wait for a process that never has such inputs:

        rank 0    asks, finds nothing, plans, writes
        rank 1    asks, finds nothing, plans, writes too late and gets what rank 0 wrote
        rank 2    asks, finds that
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return decide()
    store = distributed.distributed_c10d._get_default_store()
    key = f"zoo/{hashlib.sha256(question.encode()).hexdigest()}"
    if store.check([key]):
        return Plan.parse(store.get(key).decode())
    return Plan.parse(store.compare_set(key, "", decide().text()).decode())


def _planned(
    memory_budget: Budget | None,
    max_overhead: float | None,
    chain: Chain,
    outline: Outline,
    inputs: State,
) -> Plan:
    """Plans for a budget, and says so in the log."""
    report = BudgetPlanner(chain, outline, inputs).report(memory_budget, max_overhead)
    shapes = ", ".join("x".join(map(str, value.shape)) for value in inputs if value is not None)
    _log.info(
        "%s on %s: planned peak %s with AdamW, %s of keeping everything, time x%.2f",
        type(chain).__name__,
        shapes,
        format_bytes(report.predicted_peak),
        f"{report.predicted_peak / report.baseline_peak:.2f}",
        report.predicted_time_ratio,
    )
    return report.plan


def _given(plan: Plan, chain: Chain, outline: Outline, inputs: State) -> Plan:
    return plan


def _each_block(chain: Chain, outline: Outline, inputs: State) -> Plan:
    return schemes.each_block(outline.blocks, outline.whole)


def _from_blocks(
    scheme: Callable[[Sequence[int]], Plan], chain: Chain, outline: Outline, inputs: State
) -> Plan:
    return scheme(outline.blocks)


def _from_costs(
    planner: Callable[[StepCosts], Plan], chain: Chain, outline: Outline, inputs: State
) -> Plan:
    """Measures the chain on fake tensors and plans."""
    return planner(Profile(chain, outline, inputs).costs())


def _kind(value: Tensor | None) -> Any:
    if value is None:
        return None
    return tuple(value.shape), value.dtype, value.device, value.requires_grad


def _autocast(inputs: State) -> list[Any]:
    types = sorted({value.device.type for value in inputs if value is not None})
    return [
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in types
        if torch.amp.is_autocast_available(kind)
    ]
