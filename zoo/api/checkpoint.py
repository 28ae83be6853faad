"""`zoo.checkpoint`, `zoo.uncheckpoint`, `zoo.chain_of` and `zoo.plan_of`, for any module."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn

from zoo.chain import Chain, Outline, State, Step
from zoo.errors import ArgumentError, shortened
from zoo.invocation import (
    Invocation,
    Loss,
    capture_first_state,
    check_module,
    check_step,
    kernel_device,
    with_loss_errors,
)
from zoo.planner.plan import Plan
from zoo.policy.budget import Budget, Overhead
from zoo.policy.options import Checkpoint, parse_checkpoint, runner_for
from zoo.profiling.progress import shown
from zoo.tracing.isolated_trace import step_trace_of
from zoo.tracing.partition import check_switches, partition, paths_of
from zoo.tracing.planned_forward import Patch, PatchedForward, named_steps, patched_forward
from zoo.units import counted

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def checkpoint(
    model: AnyModule,
    checkpoint: Checkpoint | None = None,
    *,
    memory_budget: Budget | None = None,
    max_overhead: Overhead | None = None,
    inputs: Any = None,
    steps: Sequence[str] | None = None,
) -> AnyModule:
    """Puts a `checkpoint=` option in force on any model and returns the same object.

    - `False`: the baseline, no recomputation;
    - `True`, or nothing: of the plans that run no step of the model more than twice, the one whose
      training step has the least peak;
    - `"auto"`: the plan of least time within a memory budget, or of least memory within an
      overhead; `memory_budget` and `max_overhead` are those of `zoo.plan`, and without either the
      budget is what is free on the device. A budget alone means "auto";
    - an int k: k segments of equal numbers of blocks, all but the last recomputed;
    - `"sqrt"`, `"blocks"`, `"cheap"`: a scheme of `zoo.planner.schemes`;
    - a `Plan`, nested tuple or `PlanReport`: that plan; also as text, `"(0-1) 2"`, or as the name
      of a file, `"plan.json"`.

    The model's own forward runs, once and as it is written; a plan decides which of the tensors
    that it saves stay in memory. It does so wherever gradients are recorded, in `eval()`, too; an
    option that saves nothing says so by a warning. The steps are those of a `zoo.Chain`; of any
    other model they are ranges of its kernels (`zoo.chain_of` shows them). The first training
    forward of such a model runs block by block and is traced, and the plan is in force from the
    next one on. A budget and a plan of your own are in force from the first one on: for them the
    forward is traced ahead, on fake tensors in a forked process. Where `inputs` are given (a
    tensor, a tuple of arguments or a dict of keyword arguments), this call does so and plans for
    them, whatever the option; call it under the autocast that the training has, if any. `steps`
    names the modules that count as blocks, with `*` for any name: `["encoder.layers.*"]`. A
    `zoo.Chain` has its own blocks, and plans at its first training forward or for `inputs`.

    A budget counts the state of AdamW, or that of the optimizer that steps in the backward, and
    nothing of a loss outside of the model: `zoo.plan` takes the optimizer and the loss, and the
    report that it returns is an option here.

    A plan serves inputs of the size that it was made for and smaller ones, which need no more
    memory; where several plans would serve, the one for the fewest elements does. Larger inputs,
    and those that take other steps, are planned for when they come; where no plan is found for
    these, a training that has begun goes on block by block, with a warning. A fraction of the
    baseline, an overhead and the least peak are those of the size that was planned for.

    Raises:
        ArgumentError: none of these options, no module, one without a forward of its own, a model
            that checkpoints itself, `steps` of a `zoo.Chain`; at that forward, more segments than
            blocks; for a budget or a plan, one that needs data of a real step.
        BudgetError: at that forward, when no plan keeps to the budget.
        PlanError: a malformed plan; one that does not fit raises at that forward.
    """
    if checkpoint is None:
        checkpoint = True if memory_budget is None and max_overhead is None else "auto"
    option = parse_checkpoint(checkpoint), memory_budget, max_overhead
    if isinstance(model, Chain):
        _attach(model, option, inputs, steps)
        return model
    check_module(model, "zoo.checkpoint")
    if hasattr(model, "_orig_mod"):
        raise ArgumentError(
            "this model is compiled; call zoo.checkpoint before torch.compile, or zoo.recompute in "
            "its forward, which compiles with the rest"
        )
    if runner_for(*option) is None:
        return uncheckpoint(model)
    if getattr(model.forward, "__name__", "") == "_forward_unimplemented":
        raise ArgumentError(
            f"this {type(model).__name__} has no forward of its own, and a plan is for a forward; "
            "give it one that does what the method that you train by does, or put zoo.checkpoint "
            "on the module in it that is called"
        )
    check_switches(model)
    patched, earlier = PatchedForward(model, option, _names(steps)), patched_forward(model)
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


def _attach(model: Chain, option: Any, inputs: Any, steps: Sequence[str] | None) -> None:
    """Puts an option in force on a chain, and plans for inputs where they are given."""
    if steps is not None:
        raise ArgumentError(
            f"steps={steps!r} names blocks, and {type(model).__name__} is a zoo.Chain, which lists "
            "its own; leave steps out"
        )
    runner = runner_for(*option)
    if inputs is not None and runner is not None:
        check_step(model, "zoo.checkpoint")
        runner.plan_for(model, *capture_first_state(model, Invocation.of(inputs)))
    model.runner = runner


def uncheckpoint(model: AnyModule) -> AnyModule:
    """Takes checkpointing off a model and off all modules in it, and returns it.

    Raises:
        ArgumentError: it is no module.
    """
    check_module(model, "zoo.uncheckpoint")
    for module in model.modules():
        if isinstance(patch := vars(module).get("forward"), Patch):
            patch.uninstall_from(module)
            if patch.module() is module:
                patch.uninstall()
        if isinstance(module, Chain):
            module.runner = None
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that a model, yours or one of zoo's, ran by in its last training forward.

    The plan of a forward that was just traced is in force from the next one on. None before the
    first and without checkpointing. `zoo.chain_of` names the steps that a plan numbers.

    Raises:
        ArgumentError: it is no module.
    """
    check_module(model, "zoo.plan_of")
    if isinstance(model, Chain):
        return model.plan
    patched = patched_forward(model)
    return None if patched is None or patched.latest is None else patched.latest.plan


@dataclass(frozen=True)
class ChainSummary:
    """The steps of a model by name, and the block of each.

    Attributes:
        names: the steps in order.
        blocks: for each step the number of its block.
    """

    names: tuple[str, ...]
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        rows = zip(self.blocks, self.names, strict=True)
        steps, blocks = counted(len(self.names), "step"), counted(len(set(self.blocks)), "block")
        lines = (f"{block:>4}  {name}" for block, name in rows)
        return "\n".join([f"{steps} in {blocks}", *lines])


@shown("zoo.chain_of")
def chain_of(model: nn.Module, inputs: Any, *, steps: Sequence[str] | None = None) -> ChainSummary:
    """Returns the steps that `zoo.checkpoint` finds in a model for inputs like these, real or meta.

    Those of a `zoo.Chain` are its own, and so are its blocks; `steps` names those of any other.

    Raises:
        ArgumentError: as `checkpoint` does.
    """
    check_module(model, "zoo.chain_of")
    if not isinstance(model, Chain):
        check_switches(model)
        check_step(model, "zoo.chain_of")
    found = steps_of(model, Invocation.of(inputs), patterns=_names(steps))
    return ChainSummary(tuple(found.outline.names(model)), found.outline.blocks)


class ModelSteps(NamedTuple):
    """The steps that a model runs for some inputs.

    Attributes:
        outline: the steps, and the block of each.
        state: the inputs of the first step, or the tensors among the model's inputs.
        loss: a function of the last state of a chain; the log of another model has its loss.
    """

    outline: Outline
    state: State
    loss: Step | None = None


def steps_of(
    model: nn.Module,
    given: Invocation,
    loss: Loss | None = None,
    patterns: Sequence[str] | None = None,
) -> ModelSteps:
    """Finds the steps without running one: a chain is stopped before, any other traced ahead.

    The blocks of a model that is no chain are the modules that `patterns` name, or those of the
    plan in force.

    Raises:
        ArgumentError: it does not take these arguments, or reads data of a real step.
    """
    if not isinstance(model, Chain):
        patterns = named_steps(model) if patterns is None else patterns
        trace = step_trace_of(model, given, loss)
        logged = partition(model, trace, paths_of(model, patterns))
        return ModelSteps(logged, tuple(given.tensors))
    outline, state = capture_first_state(model, given)
    if loss is None:
        return ModelSteps(outline, state)
    of_outputs = with_loss_errors(loss, kernel_device(model))
    return ModelSteps(outline, state, lambda *last: of_outputs(model.returned(*last)))


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
