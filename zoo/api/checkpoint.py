"""`zoo.checkpoint`, `zoo.uncheckpoint`, `zoo.chain_of` and `zoo.plan_of`, for any module."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from zoo.errors import ArgumentError, shortened
from zoo.invocation import Inputs, Invocation, check_loss, check_module, check_step
from zoo.loss import Loss
from zoo.planner.event_costs import Outline
from zoo.planner.plan import Plan
from zoo.policy.goal import Budget, Checkpoint, Offload, OffloadOption, Overhead, goal_for
from zoo.policy.training_step import TrainingStep, outputs_held
from zoo.profiling.optimizer_memory import OptimizerOption
from zoo.profiling.progress import shown
from zoo.tracing.forward_patch import Patch
from zoo.tracing.isolated_trace import step_trace_of
from zoo.tracing.partition import partition, paths_of
from zoo.tracing.planned_forward import PatchedForward, named_steps, patched_forward
from zoo.tracing.switches import check_switches
from zoo.units import plural

AnyModule = TypeVar("AnyModule", bound=nn.Module | list[nn.Module] | tuple[nn.Module, ...])


def checkpoint(
    model: AnyModule,
    checkpoint: Checkpoint | None = None,
    *,
    memory_budget: Budget | None = None,
    max_overhead: Overhead | None = None,
    inputs: Inputs | None = None,
    steps: Sequence[str] | None = None,
    optimizer: OptimizerOption | None = "assumed",
    loss: Loss | None = None,
    accumulates: bool = False,
    holds_outputs: bool | None = None,
    forwards: int = 1,
    offload: OffloadOption | None = None,
    host_budget: int | str | None = None,
) -> AnyModule:
    """Puts a `checkpoint=` option in force on any model and returns the same object.

    - `True`, or nothing: the least peak of the whole step, recomputing no step more than once;
    - `False`: the baseline, no recomputation;
    - `"auto"`, implied by `memory_budget` or `max_overhead`: as in `zoo.plan`; with neither, the
      budget is what is free on the device;
    - an int k: k segments of equal numbers of blocks, all but the last recomputed;
    - `"sqrt"`, `"blocks"`, `"cheap"`: a scheme of `zoo.planner.schemes`;
    - a `Plan`, nested tuple or `PlanReport`; also as text, `"(0-1) 2"`, or a file, `"plan.json"`.

    A budget, a plan of yours, a number of segments, `inputs=` and zoo's own models are planned for
    ahead, on fake tensors in a forked process. Otherwise the first training forward runs block by
    block and is traced, and the plan holds from the next one on.

    A plan serves inputs of its size and smaller ones; without a budget also those up to twice as
    large. For larger ones a budget has the plans that it knows judged, and plans anew where none
    keeps to it or is fast. Of forwards that take several paths 4 are planned for, and later few
    more. A training that has begun goes on, with a warning: by the plan of the least peak where
    none keeps to the budget, and block by block where none is known. A report is refused for inputs
    by which it breaks its budget.

    A budget in bytes counts what other models with a budget hold that run in the same step, and
    buckets of DistributedDataParallel; by the third step they keep to it together.

    Args:
        model: any module; its pickle holds the option, too. Or several, as a list, a tuple or an
            `nn.ModuleList` without a forward, that a step calls in turns: a budget in bytes is that
            of all together.
        inputs: plans now, for these; under the autocast that the training has, if any.
        steps: names of modules that count as blocks, `["encoder.layers.*"]`.
        optimizer, loss, accumulates, holds_outputs, forwards: as in `zoo.plan`. The optimizer is
            assumed to be the one that steps in the backward, or AdamW, with a warning. The loss
            makes targets of each new size. More forwards before a backward are planned for from
            the second step on.
        offload: as in `zoo.plan`; without a budget, what segments start from; beside a plan also
            the first steps of its segments, and its kept steps, that go. A report's own
            (`report.offloads`) go if it is left out.
        host_budget: as in `zoo.plan`.

    Raises:
        ArgumentError: no such option, a model that checkpoints itself or has no forward; at the
            first forward, more segments than blocks, or a budget for a forward that needs real
            data.
        BudgetError: at the first forward, no plan keeps to the budget or to `host_budget`.
        PlanError: a malformed plan; at the first forward, one that does not fit.
    """
    if isinstance(model, list | tuple) or _is_bare_list(model):
        options = {name: value for name, value in locals().items() if name != "model"}
        _checkpoint_each([*model], options)
        return model
    if checkpoint is None:
        checkpoint = True if memory_budget is None and max_overhead is None else "auto"
    check_module(model, "zoo.checkpoint")
    check_loss(loss)
    holds = outputs_held(holds_outputs, loss)
    training = TrainingStep(optimizer, loss, accumulates, holds, forwards=forwards)
    says_step = holds_outputs is not None or training != TrainingStep()
    training = training.for_model(model)
    to_host = Offload.of(offload or False, host_budget)
    goal = goal_for(checkpoint, memory_budget, max_overhead, to_host)
    if says_step and not (goal is not None and goal.is_bounded):
        choice = False if goal is None else goal.choice
        raise ArgumentError(
            "optimizer=, loss=, accumulates=, holds_outputs= and forwards= say what a budget "
            f"counts; got checkpoint={choice!r}, which has none. Pass memory_budget= or "
            "max_overhead=, or leave them out"
        )
    if goal is not None and goal.report is not None:
        made_for = goal.report
        training = TrainingStep(holds_outputs=made_for.holds_outputs, forwards=made_for.forwards)
    if offload is False and goal is not None and goal.offload.is_on:
        raise ArgumentError(
            "offload=False beside a report whose plan offloads would break its budget; leave "
            "offload= out, pass report.plan, or plan without offload=True"
        )
    if isinstance(model, torch.jit.ScriptModule) and goal is not None:
        raise ArgumentError(
            f"this {type(model).__name__} is a module of TorchScript, whose forward is compiled; "
            "call zoo.checkpoint on the module that it was made of, or on a model around it"
        )
    if hasattr(model, "_orig_mod"):
        raise ArgumentError(
            "this model is compiled; call zoo.checkpoint before torch.compile, or zoo.recompute in "
            "its forward, which compiles with the rest"
        )
    if goal is None:
        return uncheckpoint(model)
    _check_forward(model)
    check_switches(model)
    patched, earlier = PatchedForward(model, goal, training, _names(steps)), patched_forward(model)
    uncheckpoint(model)
    patched.install()
    if inputs is not None:
        try:
            check_step(model, "zoo.checkpoint")
            patched.plan_ahead(Invocation.of(inputs))
        except BaseException:
            patched.uninstall()
            if earlier is not None:
                earlier.install()
            raise
    return model


def _has_forward(model: nn.Module) -> bool:
    return getattr(model.forward, "__name__", "") != "_forward_unimplemented"


def _is_bare_list(model: object) -> TypeGuard[nn.ModuleList]:
    return isinstance(model, nn.ModuleList) and not _has_forward(model)


def _check_forward(model: nn.Module) -> None:
    if not _has_forward(model):
        raise ArgumentError(
            f"this {type(model).__name__} has no forward of its own, and a plan is for a forward; "
            "give it one that does what the method that you train by does, or put zoo.checkpoint "
            "on the module in it that is called"
        )


def _checkpoint_each(models: Sequence[nn.Module], options: dict[str, Any]) -> None:
    """Puts an option in force on several models, or on none of them.

    The budget of each counts the weights and buffers of the others, also of those that no step
    trains.
    """
    if not models:
        raise ArgumentError("zoo.checkpoint got a list without models; put those of a step in it")
    for model in models:
        check_module(model, "zoo.checkpoint")
        if _is_bare_list(model):
            _check_forward(model)
    done = list[tuple[nn.Module, PatchedForward | None]]()
    try:
        for model in models:
            earlier = patched_forward(model)
            checkpoint(model, **options)
            done.append((model, earlier))
    except BaseException:
        for model, patch in done:
            uncheckpoint(model)
            if patch is not None:
                patch.install()
        raise
    sizes = {
        model: sum(t.nbytes for t in (*model.parameters(), *model.buffers())) for model, _ in done
    }
    for model, size in sizes.items():
        patch = patched_forward(model)
        if patch is not None and isinstance(patch.goal.memory_budget, int):
            others = sum(sizes.values()) - size
            foreign = max(patch.training.foreign, others)
            patch.training = replace(patch.training, foreign=foreign)


def uncheckpoint(model: AnyModule) -> AnyModule:
    """Takes checkpointing off a model, or off several, and all modules in it, and returns it.

    Raises:
        ArgumentError: it is no module.
    """
    if isinstance(model, list | tuple):
        for one in model:
            check_module(one, "zoo.uncheckpoint")
        for one in model:
            uncheckpoint(one)
        return model
    check_module(model, "zoo.uncheckpoint")
    for module in model.modules():
        if isinstance(patch := vars(module).get("forward"), Patch):
            patch.uninstall_from(module)
            if patch.module() is module:
                patch.uninstall()
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that a model ran by in its last training forward.

    None before the first and without checkpointing. `zoo.chain_of` names the steps.

    Raises:
        ArgumentError: it is no module.
    """
    check_module(model, "zoo.plan_of")
    patched = patched_forward(model)
    return None if patched is None or patched.latest is None else patched.latest.plan


@dataclass(frozen=True)
class ModelSteps:
    """The steps of a model by name, and the block of each.

    Attributes:
        names: the steps in order.
        blocks: for each step the number of its block.
    """

    names: tuple[str, ...]
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        rows = zip(self.blocks, self.names, strict=True)
        steps, blocks = plural(len(self.names), "step"), plural(len(set(self.blocks)), "block")
        lines = (f"{block:>4}  {name}" for block, name in rows)
        return "\n".join([f"{steps} in {blocks}", *lines])


@shown("zoo.chain_of")
def chain_of(model: nn.Module, inputs: Inputs, *, steps: Sequence[str] | None = None) -> ModelSteps:
    """Returns the steps, ranges of kernels, that `zoo.checkpoint` finds for inputs like these.

    `steps` names the modules that count as blocks.

    Raises:
        ArgumentError: as `checkpoint` does.
    """
    check_module(model, "zoo.chain_of")
    check_switches(model)
    check_step(model, "zoo.chain_of")
    outline = outline_of(model, Invocation.of(inputs), patterns=_names(steps))
    return ModelSteps(outline.names, outline.blocks)


def outline_of(
    model: nn.Module,
    invocation: Invocation,
    loss: Loss | None = None,
    patterns: Sequence[str] | None = None,
    *,
    is_judged: bool = False,
) -> Outline:
    """Returns the steps that a model runs for some inputs, traced ahead of a training step.

    The blocks are the modules that `patterns` name, or those of the plan in force. If it
    `is_judged`, it has dry steps.

    Raises:
        ArgumentError: it does not take these arguments, or reads data of a real step.
        InputError: a model of zoo does not take these inputs.
    """
    patterns = named_steps(model) if patterns is None else patterns
    blocks = paths_of(model, patterns)
    trace = step_trace_of(model, invocation, loss, blocks, is_judged=is_judged)
    return partition(model, trace, blocks)


def _names(steps: Any) -> tuple[str, ...] | None:
    """Returns names of modules; one that is given without a list is one name, not its letters."""
    if steps is None:
        return None
    names = (steps,) if isinstance(steps, str) or not isinstance(steps, Iterable) else tuple(steps)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(
                f"steps={shortened(name)} is no name of a module; write names as in "
                "steps=['encoder.layers.*']"
            )
    return names
