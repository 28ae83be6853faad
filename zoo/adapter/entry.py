"""What any model runs by: the steps and the first state of one call, found without running it.

    a chain          is called, and stopped where its first step would run
    any other        is watched on fake tensors, as its first forward under a plan would be

Either way the model is afterwards what it was, and nothing of its size is allocated.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.utils._pytree as pytree
from torch import Tensor, nn

from zoo.adapter.following import Arguments, Followed, Following
from zoo.adapter.forward import Option, Planned, not_taken, raised_by, way_out
from zoo.adapter.instead import NAME
from zoo.adapter.tape import Value, restored
from zoo.adapter.watch import Opaque
from zoo.chain import Chain, Outline, Runner, State
from zoo.checkpointing import PlannedRunner
from zoo.entry import Invocation, Loss, called, explained, own_loss, place_of
from zoo.errors import ArgumentError
from zoo.plan import Plan

AnyRunner = TypeVar("AnyRunner", bound=Runner)


class UnfollowedError(ArgumentError):
    """A model's forward cannot be put on a tape; `opaque` says why.

    `raised` says that it raised something of its own: it may take other inputs.
    """

    def __init__(self, model: nn.Module, opaque: Opaque) -> None:
        super().__init__(
            not_taken(model, opaque)
            or f"{type(model).__name__} cannot be planned for: its code {opaque.reason}. "
            "checkpoint=True and 'blocks' run its blocks again as a whole, without a plan."
            f"{way_out(model, opaque)}"
        )
        self.opaque, self.raised = opaque, raised_by(opaque) is not None


@dataclass(frozen=True)
class Entry:
    """A model, the steps that it runs for some inputs, and what comes to the first of them."""

    model: nn.Module
    outline: Outline
    state: State
    followed: Followed | None = None

    @classmethod
    def of(cls, model: nn.Module, given: Invocation) -> "Entry":
        """Looks at a model as it would be called with these arguments.

        Raises:
            UnfollowedError: its forward cannot be followed, or does not take them; with the reason.
            ArgumentError: a chain has no arguments of these names, or more than these.
        """
        if isinstance(model, Chain):
            return cls(model, *called(model, given))
        found = given.at(place_of(model))
        planned = Planned(model, Option("blocks", steps=named_steps(model)))
        try:
            followed = planned.watched(found.args, found.kwargs)
        except Opaque as opaque:
            raise UnfollowedError(model, opaque) from opaque
        tensors = Arguments.of(found.args, found.kwargs).tensors
        return cls(model, followed.steps.outline, followed.steps.state(tensors), followed)

    def decided(self, runner: PlannedRunner) -> Plan:
        """Has a runner decide the plan for this call."""
        runner.settle(self.model, self.outline, self.state)  # type: ignore[arg-type]
        assert runner.plan is not None
        return runner.plan

    def loss(self, loss: Loss | None) -> Callable[..., Tensor] | None:
        """Returns a loss as a function of the last state; that which a model returns is its own."""
        if loss is None and not self._has_own_loss():
            return None
        of_outputs = own_loss if loss is None else explained(loss, place_of(self.model))

        def of_state(*state: Tensor) -> Tensor:
            return of_outputs(self._returned(*state))  # type: ignore[no-any-return]

        return of_state

    def _returned(self, *state: Any) -> Any:
        """Returns what the model returns, from the last state."""
        if self.followed is None:
            return cast(Chain, self.model).returned(*state)
        return self.followed.steps.returned(self.model, state)

    def _has_own_loss(self) -> bool:
        if self.followed is None:
            return False
        tape = self.followed.steps.tape
        outputs = pytree.tree_unflatten(tape.output, tape.output_spec)
        return isinstance(own_loss(restored(outputs)), Value)


def named_steps(model: nn.Module) -> tuple[str, ...] | None:
    """Returns the modules that the user named as blocks."""
    planned = vars(model).get(NAME)
    return planned.option.steps if isinstance(planned, Planned) else None


def follow(model: nn.Module, given: Invocation) -> None:
    """Watches a model under a plan now; its next forward with such inputs will not have to."""
    planned = vars(model).get(NAME)
    if isinstance(planned, Planned):
        with contextlib.suppress(Opaque):
            planned.watched(given.args, given.kwargs)


def runner_of(model: nn.Module) -> Runner | None:
    """Returns what runs a model by the option in force on it; None for plain training."""
    if isinstance(model, Chain):
        return model.runner
    planned = vars(model).get(NAME)
    return planned.option.runner() if isinstance(planned, Planned) else None


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that a model, yours or one of zoo's, ran by in its last training forward.

    None before there was one, without checkpointing, and where a forward that cannot be followed
    runs block by block. The steps that a plan numbers are those that `zoo.chain_of` names.

    Raises:
        ArgumentError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"only a torch.nn.Module has a plan; got {type(model).__name__}")
    if isinstance(model, Chain):
        return model.plan
    planned = vars(model).get(NAME)
    return planned.plan if isinstance(planned, Planned) else None


def watch_steps(model: nn.Module, make: Callable[[Runner | None], AnyRunner]) -> AnyRunner | None:
    """Puts a runner in force that stands before the one there was, or before none.

    Returns None, and changes nothing, where a model runs by blocks.
    """
    if isinstance(model, Chain):
        model.runner = made = make(model.runner)
        return made
    planned = vars(model).get(NAME)
    if not isinstance(planned, Planned):
        planned = Planned(model, Option("blocks"))
        made = make(None)
    elif planned.reason is None:
        made = make(planned.option.runner())
    else:
        return None
    planned.following = Following(lambda: cast(PlannedRunner, made), planned.option.steps)
    planned.put()
    return made
