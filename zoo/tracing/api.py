"""`zoo.checkpoint`, `zoo.uncheckpoint`, `zoo.chain_of` and `zoo.plan_of`: any module by a plan."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from zoo._torch import active_fake_mode
from zoo.chain import Chain
from zoo.engine.ranges import Conductor, Script, Visit
from zoo.errors import ArgumentError, BudgetError, PlanError, shortened
from zoo.invocation import Invocation
from zoo.planner.plan import Plan
from zoo.policy.budget import Budget
from zoo.policy.options import Checkpoint, PlannedRunner, attach, runner_for
from zoo.policy.report import PlanReport
from zoo.profiling.sharded import is_spread
from zoo.tracing.ahead import graph_of
from zoo.tracing.graph import Graph
from zoo.tracing.native_checkpointing import check_switches
from zoo.tracing.patched_forward import BlockMark, PatchedForward, Traced, take_back_all
from zoo.tracing.traced_steps import Entry, patched_forward, paths_of, steps_of
from zoo.tracing.tracer import Tracer

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_log = logging.getLogger("zoo")


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

    The model's own forward runs, once and as it is written; a plan decides which of the tensors
    that it saves stay in memory. The steps are those of a `zoo.Chain`; of any other model they are
    ranges of its kernels (`zoo.chain_of` shows them). Its first training forward runs block by
    block and is traced, and the plan is in force from the next on; a budget and a plan of your own
    are in force from the first on, for which the forward is traced ahead on fake tensors in a
    forked process. `inputs`, a tensor, a tuple of arguments or a dict of keyword arguments, has
    that done now. `steps` names the modules that count as blocks, with `*` for any name:
    `["encoder.layers.*"]`.

    Raises:
        ArgumentError: none of these options, no module, a model that checkpoints itself; for a
            budget or a plan, at that forward, one that needs numbers of a real step.
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
    if runner is None:
        return uncheckpoint(model)
    check_switches(model)
    names = _names(steps)
    paths = paths_of(model, names)
    earlier = patched_forward(model)
    uncheckpoint(model)
    if isinstance(checkpoint, list):
        checkpoint = tuple(checkpoint)
    planner = OptionPlanner(checkpoint, memory_budget, max_overhead, names)
    patched = PatchedForward(model, planner, _marks(model, paths))
    patched.put()
    if inputs is not None:
        try:
            patched.plan_ahead(*_given(model, inputs))
        except BaseException:
            patched.take_back()
            if earlier is not None:
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
    take_back_all(model)
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that a model, yours or one of zoo's, ran by in its last training forward.

    That of one that was just traced is in force from the next on. None before there was one and
    without checkpointing. The steps that a plan numbers are those that `zoo.chain_of` names.

    Raises:
        ArgumentError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"only a torch.nn.Module has a plan; got {type(model).__name__}")
    if isinstance(model, Chain):
        return model.plan
    patched = patched_forward(model)
    return None if patched is None or patched.latest is None else patched.latest.plan


@dataclass(frozen=True)
class ChainSummary:
    """What was found in a model: the steps by name, and the block of each.

    Attributes:
        names: the steps in order.
        blocks: for each step the number of its block.
    """

    names: tuple[str, ...]
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.names)} steps in {len(set(self.blocks))} blocks"]
        lines += [
            f"{block:>4}  {name}" for block, name in zip(self.blocks, self.names, strict=True)
        ]
        return "\n".join(lines)


def chain_of(model: nn.Module, inputs: Any, *, steps: Sequence[str] | None = None) -> ChainSummary:
    """Returns the steps that `zoo.checkpoint` finds in a model for inputs like these, real or meta.

    Those of a `zoo.Chain` are its own, and so are its blocks; `steps` names those of any other.

    Raises:
        ArgumentError: as `checkpoint` does.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a chain is found in a torch.nn.Module; got {type(model).__name__}")
    if isinstance(model, Chain):
        found = Entry.of(model, Invocation.of(inputs))
        return ChainSummary(tuple(found.names), found.outline.blocks)
    check_switches(model)
    args, kwargs = _given(model, inputs)
    cut = steps_of(model, graph_of(model, Invocation(tuple(args), dict(kwargs))), _names(steps))
    return ChainSummary(tuple(cut.names), cut.outline.blocks)


class OptionPlanner(NamedTuple):
    """Plans by the option that the user chose."""

    checkpoint: Checkpoint
    memory_budget: Budget | None = None
    max_overhead: float | None = None
    patterns: tuple[str, ...] | None = None

    def runner(self) -> PlannedRunner:
        """Makes what decides plans."""
        found = runner_for(self.checkpoint, self.memory_budget, self.max_overhead)
        assert found is not None, "False puts nothing in force"
        return found

    @property
    def is_given(self) -> bool:
        """Whether the user gave the plan itself."""
        return isinstance(self.checkpoint, tuple | PlanReport)

    @property
    def holds_at_once(self) -> bool:
        """Whether the first forward must keep to the plan, too."""
        return self.is_given or self.checkpoint == "auto" or self.memory_budget is not None

    def ahead(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Traced | None:
        """Plans without a step, where the first one must keep to the plan."""
        # a step on fake tensors takes no memory, and may be traced itself
        if not self.holds_at_once or active_fake_mode() is not None:
            return None
        # parameters that are spread over processes cannot be looked at in one
        if self.is_given and any(map(is_spread, model.parameters())):
            return None
        return self.plan_ahead(model, args, kwargs)

    def plan_ahead(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Traced:
        """Plans without a step."""
        check_switches(model)
        graph = graph_of(model, Invocation(tuple(args), dict(kwargs)))
        return self._planned(model, graph, graph.overloads(),
                             _visits(graph, paths_of(model, self.patterns)))  # fmt: skip

    def of_forward(self, model: nn.Module, run: Callable[[], Any]) -> tuple[Any, Traced | None]:
        """Runs a forward block by block, traces it, and plans for the next."""
        check_switches(model)
        tracer = Tracer(model)
        conductor = Conductor([])
        with tracer, conductor:
            outputs = run()
        try:
            tracer.note_outputs(outputs)
            found = self._planned(model, tracer.graph, conductor.operators, conductor.visits)
        except BudgetError:
            raise
        except (ArgumentError, PlanError) as error:
            if self.holds_at_once:
                raise
            _log.warning(
                "%s runs block by block: its forward cannot be planned for (%s)",
                type(model).__name__,
                error,
            )
            return outputs, None
        return outputs, found

    def _planned(
        self,
        model: nn.Module,
        graph: Graph,
        operators: Sequence[Any],
        visits: dict[Visit, int],
    ) -> Traced:
        steps = steps_of(model, graph, self.patterns)
        runner = self.runner()
        with torch.enable_grad(), contextlib.ExitStack():
            runner.settle(model, steps.outline, steps.fake_state())  # type: ignore[arg-type]
        assert runner.plan is not None
        script = Script(operators, steps.boundaries, runner.plan, visits)
        return Traced(script, runner.plan)


def _visits(graph: Graph, paths: Sequence[str]) -> dict[Visit, int]:
    """Returns where the blocks of a model begin in a graph, for each call of theirs."""
    counts = dict.fromkeys(paths, 0)
    found: dict[Visit, int] = {}
    for path, place in graph.visits:
        if path in counts:
            found[path, counts[path]] = place
            counts[path] += 1
    return found


def _marks(model: nn.Module, paths: Sequence[str]) -> list[BlockMark]:
    modules = {path: model.get_submodule(path) for path in paths}
    return [
        BlockMark(module, path)
        for path, module in modules.items()
        # what is compiled shows none of its kernels
        if getattr(module, "_compiled_call_impl", None) is None and not hasattr(module, "_orig_mod")
    ]


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


def _given(model: nn.Module, inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if not model.training:
        raise ArgumentError("a plan is for training; call model.train() first")
    given = Invocation.of(inputs)
    return given.args, given.kwargs
