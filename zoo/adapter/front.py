"""`zoo.checkpoint`, `zoo.uncheckpoint` and `zoo.chain_of`: any module, by a plan and back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from zoo.adapter.forward import Option, Planned
from zoo.adapter.instead import NAME, Instead
from zoo.adapter.switches import check_switches
from zoo.chain import Chain, step_names
from zoo.checkpointing import Checkpoint, attach, runner_for
from zoo.entry import Invocation, called, place_of
from zoo.errors import ArgumentError, shortened
from zoo.planning import Budget

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def checkpoint(
    model: AnyModule,
    checkpoint: Checkpoint | None = None,
    *,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    inputs: Any = None,
    steps: Sequence[str] | None = None,
) -> AnyModule:
    """Puts a `checkpoint=` option in force on any model and returns the same object.

    - `False`: keep everything, plain training;
    - `True`, or nothing: the plan of least peak memory in which no step runs more than twice;
    - `"auto"`: the plan of least time within a memory budget, or of least memory within an
      overhead; `memory_budget` and `max_overhead` are those of `zoo.plan`, and without either the
      budget is what is free on the device. A budget alone means "auto";
    - an int k: k segments of equal numbers of blocks, the last one kept;
    - `"sqrt"`, `"blocks"`, `"cheap"`: a scheme of `zoo.planner.schemes`;
    - a `Plan`, nested tuple or `PlanReport`: just that.

    The steps are those of a `zoo.Chain`; of any other model they are found by watching its first
    forward in training (`zoo.chain_of` shows them), again for each kind of inputs and whenever
    something changed that the forward looks at. `inputs`, a tensor, a tuple of arguments or a dict
    of keyword arguments, has that done now. `steps` names the modules that count as blocks, with
    `*` for any name: `["encoder.layers.*"]`.

    A model whose forward cannot be followed runs as it is written and each of its blocks as a
    segment, where the option is `True` or `"blocks"`.

    Raises:
        ArgumentError: none of these options, no module, a model that checkpoints itself, or one
            that can be neither followed nor cut into blocks; the last at that forward.
        BudgetError: at that forward, when no plan keeps to the budget.
        PlanError: a malformed plan; one that does not fit raises at that forward.
    """
    if checkpoint is None:
        checkpoint = True if memory_budget is None and max_overhead is None else "auto"
    if isinstance(model, Chain):
        return attach(model, checkpoint, memory_budget=memory_budget, max_overhead=max_overhead)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"checkpoint= needs a torch.nn.Module; got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ArgumentError("this model is compiled; call zoo.checkpoint on the model before")
    runner = runner_for(checkpoint, memory_budget, max_overhead)
    if runner is not None:
        check_switches(model)
    earlier = vars(model).get(NAME)
    uncheckpoint(model)
    if runner is None:
        return model
    if isinstance(checkpoint, list):
        checkpoint = tuple(checkpoint)
    names = _names(steps)
    planned = Planned(model, Option(checkpoint, memory_budget, max_overhead, names))
    planned.put()
    if inputs is not None:
        try:
            _follow(planned, inputs)
        except BaseException:
            planned.take_back()
            if isinstance(earlier, Planned):
                earlier.put()
            raise
    return model


def uncheckpoint(model: AnyModule) -> AnyModule:
    """Gives a model, and all that is in it, plain training again, and returns it.

    Raises:
        ArgumentError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"uncheckpoint takes a torch.nn.Module; got {type(model).__name__}")
    for module in model.modules():
        instead = vars(module).get(NAME)
        if isinstance(instead, Instead):
            instead.take_back()
        if isinstance(module, Chain):
            module.runner = None
    return model


@dataclass(frozen=True)
class Found:
    """What was found in a model: the steps by name, the block of each, and why not where not.

    Attributes:
        names: the steps in order; none where the forward cannot be followed.
        blocks: for each step the number of its block.
        segments: paths of the modules that run again as a whole, where it cannot.
        reason: why it cannot be followed, None where it can.
    """

    names: tuple[str, ...]
    blocks: tuple[int, ...]
    segments: tuple[str, ...] = ()
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            lines = [f"its code {self.reason}; {len(self.segments)} blocks run again as a whole"]
            return "\n".join([*lines, *self.segments])
        lines = [f"{len(self.names)} steps in {len(set(self.blocks))} blocks"]
        lines += [
            f"{block:>4}  {name}" for block, name in zip(self.blocks, self.names, strict=True)
        ]
        return "\n".join(lines)


def chain_of(model: nn.Module, inputs: Any, *, steps: Sequence[str] | None = None) -> Found:
    """Returns the steps that `zoo.checkpoint` finds in a model for inputs like these, real or meta.

    Those of a `zoo.Chain` are its own, and so are its blocks; `steps` names those of any other.

    Raises:
        ArgumentError: as `checkpoint` does.
    """
    if isinstance(model, Chain):
        outline, _ = called(model, Invocation.of(inputs))
        return Found(tuple(step_names(model, outline.steps)), outline.blocks)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a chain is found in a torch.nn.Module; got {type(model).__name__}")
    check_switches(model)
    names = _names(steps)
    planned = Planned(model, Option("blocks", None, None, names))
    try:
        found = _follow(planned, inputs)
    finally:
        planned.take_back_segments()
    if found is None:
        paths = {module: path for path, module in model.named_modules()}
        segments = tuple(paths[segment.module] for segment in planned.segments)
        return Found((), (), segments, planned.reason)
    outline = found.steps.outline
    return Found(tuple(found.steps.names), outline.blocks)


def _names(steps: Sequence[str] | None) -> tuple[str, ...] | None:
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


def _follow(planned: Planned, inputs: Any) -> Any:
    if not planned.module.training:
        raise ArgumentError("a plan is for training; call model.train() first")
    given = Invocation.of(inputs).at(place_of(planned.module))
    return planned.follow(given.args, given.kwargs)
