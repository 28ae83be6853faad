"""The `forward` of a model and of its blocks while a plan is in force (monkey patching).

It is an instance attribute, and nothing else of a module changes: class, names, hooks, state dict.
The original forward runs, once and as it is written. What stands before it opens segments between
its kernels (`engine.ranges`), by a plan for the operators that came when it was traced:

    first forward in training   traced while it runs block by block, then planned
    every other                 by the plan, as long as the operators are the same
    other operators             block by block; where the next one's differ, too, it is traced

For a budget or a plan of the user's the first forward is traced ahead instead. A copy or a pickle
takes the option along and plans anew.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from zoo._torch import active_fake_mode, is_exporting
from zoo.chain import Chain, Runner
from zoo.engine.kernel_segments import Conductor, Script, Visit, conducts
from zoo.engine.recording import thread
from zoo.errors import ArgumentError, BudgetError, PlanError
from zoo.invocation import InputSpec, Invocation
from zoo.optimizer.in_backward import attached_to
from zoo.policy.budget import Budget
from zoo.policy.options import Checkpoint, PlannedRunner, runner_for
from zoo.profiling.progress import shown
from zoo.profiling.sharded import is_spread
from zoo.tracing.ahead import graph_of
from zoo.tracing.blocks import check_switches, paths_of
from zoo.tracing.graph import Graph
from zoo.tracing.partition import partition
from zoo.tracing.tracer import Tracer

NAME = "forward"
# scripts that are kept for inputs of one kind, whose forwards may branch
MOST_BRANCHES = 8
# kinds of inputs whose plans are kept; the one that was used longest ago goes first
MOST_KINDS = 64
_log = logging.getLogger("zoo")


class OptionPlanner(NamedTuple):
    """Plans by the option that the user chose; `patterns` name the modules that are blocks."""

    checkpoint: Checkpoint
    memory_budget: Budget | None = None
    max_overhead: float | None = None
    patterns: tuple[str, ...] | None = None

    def runner(self) -> PlannedRunner:
        """Makes the runner that decides plans."""
        runner = runner_for(self.checkpoint, self.memory_budget, self.max_overhead)
        assert runner is not None, "False puts nothing in force"
        return runner

    @property
    def is_given(self) -> bool:
        """Whether the user gave the plan itself."""
        return self.runner().plan is not None

    @property
    def binds_first_step(self) -> bool:
        """Whether the first forward must keep to the plan, too."""
        return self.is_given or self.checkpoint == "auto" or self.memory_budget is not None

    def before_first_step(self, model: nn.Module, given: Invocation) -> Script | None:
        """Plans where the first forward must keep to the plan; None where it is traced itself."""
        # a step on fake tensors takes no memory, and may be traced itself
        if not self.binds_first_step or active_fake_mode() is not None:
            return None
        # parameters that are spread over processes cannot be traced in one
        if self.is_given and any(map(is_spread, model.parameters())):
            return None
        return self.ahead(model, given)

    @shown("zoo.checkpoint")
    def ahead(self, model: nn.Module, given: Invocation) -> Script:
        """Plans without a step."""
        check_switches(model)
        graph = graph_of(model, given)
        return self._planned(model, graph, graph.overloads(), graph.visits)

    def while_running(self, model: nn.Module, run: Callable[[], Any]) -> tuple[Any, Script | None]:
        """Runs a forward block by block, traces it, and plans for the next.

        Returns what the forward returned, and None for a plan, with a warning, where there is none.
        """
        check_switches(model)
        tracer, conductor = Tracer(model), Conductor([])
        with tracer, conductor:
            outputs = run()
        try:
            tracer.note_outputs(outputs)
            graph = tracer.graph
            return outputs, self._planned(model, graph, conductor.operators, conductor.visits)
        except BudgetError:
            raise
        except (ArgumentError, PlanError) as error:
            if self.binds_first_step:
                raise
            _log.warning(
                "%s runs block by block: its forward cannot be planned for (%s)",
                type(model).__name__,
                error,
            )
            return outputs, None

    def _planned(
        self, model: nn.Module, graph: Graph, operators: Sequence[Any], visits: dict[Visit, int]
    ) -> Script:
        steps = partition(model, graph, paths_of(model, self.patterns))
        state = steps.fake_state()
        with torch.enable_grad():
            plan = self.runner().settle(model, steps.outline, state)  # type: ignore[arg-type]
        return Script(operators, steps.boundaries, plan, visits)


class Patch:
    """A callable in the place of a module's forward; `before` is an instance attribute it had."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.before: Any = vars(module).get(NAME)

    @property
    def module(self) -> nn.Module:
        """The module whose forward this is."""
        module = self._module()
        assert module is not None, "its forward is part of the module"
        return module

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the module had."""
        if self.before is None:
            owner = type(self.module)
            # that of a module of TorchScript belongs to the object alone
            forward = inspect.getattr_static(owner, NAME)
            return forward.__get__(self.module, owner)  # type: ignore[no-any-return]
        return self.before  # type: ignore[no-any-return]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __code__(self) -> CodeType:
        """The code of the original forward, which `torch.export` reads."""
        return inspect.unwrap(self.original).__code__  # type: ignore[no-any-return, attr-defined]

    def put(self) -> None:
        """Takes its place."""
        vars(self.module)[NAME] = self

    def take_back(self) -> None:
        """Restores the original forward, unless the module or its forward was replaced since."""
        module = self._module()
        if module is None or vars(module).get(NAME) is not self:
            return
        if self.before is None:
            del vars(module)[NAME]
        else:
            vars(module)[NAME] = self.before

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_module": weakref.ref(state["_module"])})


class BlockMark(Patch):
    """The forward of a block, which tells the conductor that the block begins and ends."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module)
        self.path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block."""
        conductor = thread.conductor
        if conductor is None or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        conductor.enter(self.path)
        try:
            return self.original(*args, **kwargs)
        finally:
            conductor.leave()


class PatchedForward(Patch):
    """A model's forward that runs by a plan in training; `paths` are those of its blocks.

    In `eval()`, under `no_grad`, `torch.func`, `torch.export`, a tracer, or inside of another
    segment it is the original forward.
    """

    def __init__(self, module: nn.Module, planner: OptionPlanner, paths: Sequence[str]) -> None:
        super().__init__(module)
        self.planner = planner
        blocks = {path: module.get_submodule(path) for path in paths}
        self.marks = [
            BlockMark(block, path) for path, block in blocks.items() if not _is_compiled(block)
        ]
        # the latest kind of inputs last
        self.traces: dict[InputSpec, Traces] = {}
        self.latest: Script | None = None
        # whether plans count with an optimizer in the backward, which frees gradients
        self.counts_freed = False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"traces": {}, "latest": None}

    def put(self) -> None:
        """Takes its place, and the marks of the blocks theirs."""
        for mark in self.marks:
            mark.put()
        super().put()

    def take_back(self) -> None:
        """Restores the original forwards of the model and of its blocks."""
        for mark in self.marks:
            mark.take_back()
        super().take_back()

    def plan_ahead(self, given: Invocation) -> None:
        """Plans for arguments like these now."""
        self.latest = self.planner.ahead(self.module, given)
        spec = InputSpec.of(given, self.module)
        self.traces[spec] = Traces(spec, [self.latest])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward: by the plan in training, else as it is written."""
        if is_exporting():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._run)(args, kwargs)  # type: ignore[no-untyped-call]
        return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        module = self.module
        if not module.training or not conducts():
            return self.original(*args, **kwargs)
        if (attached_to(module.parameters()) is not None) != self.counts_freed:
            self.counts_freed = not self.counts_freed
            self.traces.clear()
        given = Invocation(args, kwargs)
        spec = InputSpec.of(given, self.module)
        traces = self._traces_for(spec)
        if not traces.branches and (script := self.planner.before_first_step(module, given)):
            traces.branches.append(script)
        if traces.must_trace():
            run = functools.partial(self.original, *args, **kwargs)
            outputs, self.latest = self.planner.while_running(module, run)
            traces.strayed, traces.can_be_planned = False, self.latest is not None
            if self.latest is not None:
                traces.spec = spec
                traces.branches.append(self.latest)
            return outputs
        with Conductor(traces.branches[::-1]) as conductor:
            outputs = self.original(*args, **kwargs)
        traces.strayed = conductor.lost
        traces.branches.sort(key=lambda script: script is conductor.script)
        self.latest = traces.branches[-1] if traces.branches else None
        return outputs

    def _traces_for(self, spec: InputSpec) -> "Traces":
        """Returns the traces for inputs like these, or begins with those of larger ones."""
        traces = self.traces.pop(spec, None)
        if traces is None:
            planned = {known.spec: known.branches for known in self.traces.values()}
            cover = spec.smallest_cover(known for known, scripts in planned.items() if scripts)
            traces = Traces(spec) if cover is None else Traces(cover, [*planned[cover]])
        self.traces[spec] = traces
        if len(self.traces) > MOST_KINDS:
            del self.traces[next(iter(self.traces))]
        return traces


def _is_compiled(module: nn.Module) -> bool:
    """Says whether a module is compiled, which shows none of its kernels."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def take_back_all(model: nn.Module) -> None:
    """Restores the original forwards of a model and of all modules in it."""
    for module in model.modules():
        for patch in [*vars(module).values()]:
            if isinstance(patch, Patch):
                patch.take_back()
        if isinstance(module, Chain):
            module.runner = None


def patched_forward(model: nn.Module) -> PatchedForward | None:
    """Returns the patch of a model's forward; None where no plan is in force."""
    patch = vars(model).get(NAME)
    return patch if isinstance(patch, PatchedForward) else None


def named_steps(model: nn.Module) -> tuple[str, ...] | None:
    """Returns the modules that the user named as blocks."""
    patched = patched_forward(model)
    return None if patched is None else patched.planner.patterns


def runner_of(model: nn.Module) -> Runner | None:
    """Returns the runner that decides a model's plans by the option in force; None without one."""
    if isinstance(model, Chain):
        return model.runner
    patched = patched_forward(model)
    return None if patched is None else patched.planner.runner()


@dataclass
class Traces:
    """Scripts of the forwards traced for inputs of one kind, one for each branch, latest last.

    The latest trace was of inputs of this `spec`, these or larger ones.
    """

    spec: InputSpec
    branches: list[Script] = field(default_factory=list)
    strayed: bool = False
    can_be_planned: bool = True

    def must_trace(self) -> bool:
        """Says whether the next forward is traced: the first, and one after a new branch."""
        is_new = not self.branches or (self.strayed and len(self.branches) < MOST_BRANCHES)
        return is_new and self.can_be_planned
