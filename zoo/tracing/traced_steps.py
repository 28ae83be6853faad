"""What a model runs in one training forward, as steps: found without running a step of training.

    a chain          is called, and stopped where its first step would run
    any other        is traced on fake tensors in another process (`ahead`)

Either way the model is afterwards what it was, and nothing of its size is allocated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from zoo.chain import Chain, Outline, Runner, State, step_names
from zoo.invocation import Invocation, Loss, capture_first_state, place_of, with_loss_errors
from zoo.planner.plan import Plan
from zoo.policy.options import PlannedRunner
from zoo.tracing.ahead import graph_of
from zoo.tracing.blocks import block_paths, matching_paths, parts_of, row_paths
from zoo.tracing.graph import Graph
from zoo.tracing.partition import Steps, partition
from zoo.tracing.patched_forward import NAME, PatchedForward


@dataclass(frozen=True)
class Entry:
    """A model, the steps that it runs for some inputs, and what comes to the first of them."""

    model: nn.Module
    outline: Outline
    state: State
    names: Sequence[str]
    loss: Callable[..., Tensor] | None = None

    @classmethod
    def of(cls, model: nn.Module, given: Invocation, loss: Loss | None = None) -> "Entry":
        """Looks at a model as it would be called with these arguments.

        Raises:
            ArgumentError: it does not take them, or reads numbers that only a real step has.
        """
        if isinstance(model, Chain):
            outline, state = capture_first_state(model, given)
            of_state = (
                None if loss is None else _of_chain(model, with_loss_errors(loss, place_of(model)))
            )
            return cls(model, outline, state, step_names(model, outline.steps), of_state)
        steps = steps_of(model, graph_of(model, given, loss), named_steps(model))
        return cls(model, steps.outline, steps.fake_state(), steps.names, steps.loss)

    def decided(self, runner: PlannedRunner) -> Plan:
        """Has a runner decide the plan for this call."""
        runner.settle(self.model, self.outline, self.state)  # type: ignore[arg-type]
        assert runner.plan is not None
        return runner.plan


def steps_of(model: nn.Module, graph: Graph, patterns: Sequence[str] | None) -> Steps:
    """Cuts the graph of a model into steps, and groups these by the model's blocks."""
    return partition(model, graph, paths_of(model, patterns))


def paths_of(model: nn.Module, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the paths of the blocks of a model: those named, those that repeat, or its parts."""
    if patterns is not None:
        return matching_paths(model, patterns)
    found = block_paths(model)
    return found if len(found) > 1 else row_paths(model) or parts_of(model)


def named_steps(model: nn.Module) -> tuple[str, ...] | None:
    """Returns the modules that the user named as blocks."""
    patched = patched_forward(model)
    return None if patched is None else patched.planner.patterns


def patched_forward(model: nn.Module) -> PatchedForward | None:
    """Returns what stands in a model's forward; None where no plan is in force."""
    found = vars(model).get(NAME)
    return found if isinstance(found, PatchedForward) else None


def runner_of(model: nn.Module) -> Runner | None:
    """Returns what decides a model's plans by the option in force on it; None without one."""
    if isinstance(model, Chain):
        return model.runner
    patched = patched_forward(model)
    return None if patched is None else cast(Runner, patched.planner.runner())


def _of_chain(model: Chain, loss: Loss) -> Callable[..., Tensor]:
    def of_state(*state: Any) -> Tensor:
        return loss(model.returned(*state))

    return of_state
