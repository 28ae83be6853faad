"""`zoo.checkpoint`, `zoo.uncheckpoint`, `zoo.chain_of` and `zoo.plan_of`, for any module."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from zoo.errors import ArgumentError, shortened
from zoo.invocation import Inputs, Invocation, check_loss, check_module, check_step
from zoo.loss import Loss
from zoo.planner.plan import Plan
from zoo.policy.budget import Budget, Offload, Overhead, outputs_held
from zoo.policy.options import Checkpoint, StepSettings, option_for
from zoo.profiling.optimizer_memory import OptimizerOption
from zoo.profiling.progress import shown
from zoo.profiling.step_profile import Outline
from zoo.tracing.forward_patch import Patch
from zoo.tracing.isolated_trace import step_trace_of
from zoo.tracing.partition import partition, paths_of
from zoo.tracing.planned_forward import PatchedForward, named_steps, patched_forward
from zoo.tracing.switches import check_switches
from zoo.units import plural

AnyModule = TypeVar("AnyModule", bound=nn.Module)


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
    offload: bool = False,
    host_budget: int | str | None = None,
) -> AnyModule:
    """Puts a `checkpoint=` option in force on any model and returns the same object.

    - `False`: the baseline, no recomputation;
    - `True`, or nothing: of the plans that recompute each step of the model at most once, the one
      whose training step has the least peak;
    - `"auto"`: the plan of least time within a memory budget, or of least memory within an
      overhead; `memory_budget` and `max_overhead` are those of `zoo.plan`, and without either the
      budget is what is free on the device. A budget alone means "auto";
    - an int k: k segments of equal numbers of blocks, all but the last recomputed;
    - `"sqrt"`, `"blocks"`, `"cheap"`: a scheme of `zoo.planner.schemes`;
    - a `Plan`, nested tuple or `PlanReport`: that plan; also as text, `"(0-1) 2"`, or as the name
      of a file, `"plan.json"`.

    The model's own forward runs, once and as it is written; a plan decides which of the tensors
    that it saves stay in memory. It does so wherever gradients are recorded, in `eval()`, too; an
    option that saves nothing says so by a warning. The steps of a plan are ranges of the forward's
    kernels (`zoo.chain_of` shows them). A budget, a plan of your own, a number of segments and the
    plans of zoo's own models are in force from the first training forward on, which is traced ahead
    on fake tensors in a forked process. Otherwise the first one runs block by block (each block of
    the model is recomputed as a whole) and is traced, and the plan is in force from the next one
    on. Where `inputs` are given (a
    tensor, a tuple of arguments or a dict of keyword arguments), this call does so and plans for
    them, whatever the option; call it under the autocast that the training has, if any. `steps`
    names the modules that count as blocks, with `*` for any name: `["encoder.layers.*"]`.

    `optimizer`, `loss`, `accumulates` and `holds_outputs` say what a budget counts beside the
    model, as in `zoo.plan`. The optimizer is assumed to be the one that steps in the backward, or
    AdamW, with a warning. The loss is called with fake outputs of each new size of inputs, so it
    makes its targets of their size. Outputs that a variable holds in the backward, where the
    budget does not count them, are a warning. A model with a plan is pickled with what is given.

    `offload` has what segments start from lie on the host until the backward: it is copied there
    beside the kernels, and back ahead of the backward, without rounding; on the CPU the host is a
    memory-mapped file. `host_budget` is the most that lies there, in bytes or as "8GiB". What has
    no room there while a training runs, what something else holds on the device in any case, and
    tensors of less than 64 KiB stay where they are.

    A plan serves inputs of the size that it was made for, smaller ones, which need no more memory,
    and those up to twice as large. For a budget in bytes there are more plans for these, each with
    how much larger tensors may get: where a forward makes larger ones than its plan has room for,
    whatever decides their sizes (objects, numbers, attributes, data), it goes on by the next of
    them. Larger inputs, and those that take other steps, are planned for when they come, up to 8
    times for arguments that differ in sizes alone. A training that has begun goes on, with a
    warning: by the plan of the least peak where none keeps to the budget, and block by block where
    none is found or known yet. A fraction of the baseline, an overhead and the least peak are those
    of the size that was planned for. A report that was made for a budget is refused for inputs by
    which it breaks that budget.

    Raises:
        ArgumentError: none of these options, no module, one without a forward of its own, a model
            that checkpoints itself; at that forward, more segments than blocks; for a budget or a
            plan, one that needs data of a real step.
        BudgetError: at that forward, when no plan keeps to the budget, or the report's does not;
            when the plan copies more to the host than `host_budget`.
        PlanError: a malformed plan; one that does not fit raises at that forward, but for a
            report's, in whose place the model then goes block by block, with a warning.
    """
    if checkpoint is None:
        checkpoint = True if memory_budget is None and max_overhead is None else "auto"
    check_module(model, "zoo.checkpoint")
    check_loss(loss)
    settings = StepSettings(optimizer, loss, accumulates, outputs_held(holds_outputs, loss))
    has_settings = holds_outputs is not None or settings != StepSettings()
    step = settings.for_model(model) if has_settings else None
    to_host = Offload.of(offload, host_budget)
    option = option_for(checkpoint, memory_budget, max_overhead, step, to_host)
    if hasattr(model, "_orig_mod"):
        raise ArgumentError(
            "this model is compiled; call zoo.checkpoint before torch.compile, or zoo.recompute in "
            "its forward, which compiles with the rest"
        )
    if option is None:
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
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that a model, yours or one of zoo's, ran by in its last training forward.

    The plan of a forward that was just traced is in force from the next one on. None before the
    first and without checkpointing. `zoo.chain_of` names the steps that a plan numbers.

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
    """Returns the steps that `zoo.checkpoint` finds in a model for inputs like these, real or meta.

    The steps are ranges of its kernels; `steps` names the modules that count as blocks.

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
) -> Outline:
    """Returns the steps that a model runs for some inputs, traced ahead of a training step.

    The blocks are the modules that `patterns` name, or those of the plan in force.

    Raises:
        ArgumentError: it does not take these arguments, or reads data of a real step.
        InputError: a model of zoo does not take these inputs.
    """
    patterns = named_steps(model) if patterns is None else patterns
    blocks = paths_of(model, patterns)
    return partition(model, step_trace_of(model, invocation, loss, blocks), blocks)


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
