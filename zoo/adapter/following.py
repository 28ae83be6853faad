"""Runs a module by a plan: watches it once for each kind of inputs, then runs its steps instead.

    first forward in training    watch -> tape -> steps -> plan
    every other                  same kind of inputs and the guard holds -> the steps, by the plan
                                 else watch again

A module whose own code cannot be put on a tape runs as it is written, with each of its blocks as a
segment (`blocks`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from zoo.adapter.blocks import block_of_each, block_paths, matching_paths, parts_of
from zoo.adapter.guard import Guard, has_global_hooks
from zoo.adapter.rehearsal import Rehearsal
from zoo.adapter.steps import Steps
from zoo.adapter.switches import check_switches
from zoo.adapter.tape import Tape
from zoo.adapter.watch import Opaque, ambient
from zoo.chain import fold, is_hooked
from zoo.checkpointing import PlannedRunner
from zoo.engine.recompute import is_recomputing
from zoo.errors import ArgumentError

# batches of text may have as many lengths; each takes some 20 KB a step of the chain
MOST_KINDS = 64
# what may turn out to be a leaf one after another
MOST_TRIES = 200
# so many watches are worth a word
OFTEN = 96
_log = logging.getLogger("zoo")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flat: distinct tensors, and everything else as the kind of it."""

    tensors: tuple[Tensor, ...]
    kind: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Arguments":
        """Flattens arguments."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        places: dict[int, int] = {}
        tensors: list[Tensor] = []
        kinds: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                kinds.append((type(leaf), leaf))
                continue
            if id(leaf) not in places:
                places[id(leaf)] = len(tensors)
                tensors.append(leaf)
            kinds.append((places[id(leaf)], *_kind(leaf)))
        return cls(tuple(tensors), (structure, tuple(kinds), ambient()))


@dataclass
class Followed:
    """A model that was watched on one kind of inputs, its steps and the runner that plans them."""

    kind: tuple[Any, ...]
    guard: Guard
    steps: Steps
    runner: PlannedRunner


class Following:
    """Runs a model by the plans that `make_runner` makes, one for each kind of inputs."""

    def __init__(
        self, make_runner: Callable[[], PlannedRunner], patterns: Sequence[str] | None
    ) -> None:
        self.make_runner, self.patterns = make_runner, patterns
        self.known: list[Followed] = []
        self.latest: Followed | None = None
        self.times = 0

    def __call__(
        self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Runs the steps of the model and returns what its forward would have returned."""
        given = Arguments.of(args, kwargs)
        found = self.followed(model, forward, given, args, kwargs)
        steps = found.steps
        state = found.runner(model, steps.outline, steps.state(given.tensors))  # type: ignore[arg-type]
        return steps.returned(model, state)

    def followed(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        given: Arguments,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Followed:
        """Returns what is known for inputs of this kind; watches the model where nothing is.

        Raises:
            Opaque: the model's own code cannot be put on a tape.
            ArgumentError: a checkpointing switch of its own is on, or hooks for all modules are.
        """
        for place, found in enumerate(self.known):
            if found.kind == given.kind and found.guard.holds():
                # the one that was used longest ago is the first to go
                self.known = [*self.known[:place], *self.known[place + 1 :], found]
                self.latest = found
                return found
        found = self._watched(model, forward, given, args, kwargs)
        self._report(model, found)
        same = [old for old in self.known if old.kind == given.kind]
        for old in same:
            self.known.remove(old)
            if _is_equal(old.steps.tape, found.steps.tape):
                # what differs does not matter to it, so its plan stands
                found.runner = old.runner
        self.known = [*self.known[-MOST_KINDS + 1 :], found]
        self.latest = found
        return found

    def _report(self, model: nn.Module, found: Followed) -> None:
        """Says in the log what was found, and when it is found too often."""
        self.times += 1
        kind, steps = type(model).__name__, len(found.steps.outline.steps)
        _log.info("%s: %d steps, watched for the time %d", kind, steps, self.times)
        if self.times == OFTEN:
            _log.warning(
                "%s was watched %d times: its inputs, or what its forward looks at, change all the "
                "time, and each time costs more than a forward. Pad inputs to fewer sizes",
                kind,
                self.times,
            )

    def _watched(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        given: Arguments,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Followed:
        check_switches(model)
        rehearsal = Rehearsal(model, forward, args, kwargs)
        tape = tape_of(rehearsal)
        if not tape.calls:
            raise Opaque("", "calls no function of torch")
        steps = Steps(model, tape, self._blocks(model, tape))
        if not rehearsal.proves(lambda tensors: fold(steps.outline.steps, steps.state(tensors))):
            raise Opaque("", "does other work than the steps that were made of it")
        return Followed(given.kind, Guard(model, tape), steps, self.make_runner())

    def _blocks(self, model: nn.Module, tape: Tape) -> list[str]:
        """Returns for each call the path of its block; a model of no two falls into its parts."""
        if self.patterns is not None:
            return block_of_each(tape.calls, matching_paths(model, self.patterns))
        found = block_of_each(tape.calls, block_paths(model))
        if len({*found} - {""}) < 2:
            return block_of_each(tape.calls, parts_of(model))
        return found


def tape_of(rehearsal: Rehearsal) -> Tape:
    """Watches a model; modules whose own code cannot be put on a tape become leaves, by class.

    Raises:
        Opaque: the model itself is such a module.
    """
    modules = dict(rehearsal.model.named_modules())
    leaves = {module for module in modules.values() if is_hooked(module)}
    first: Opaque | None = None
    for _ in range(MOST_TRIES):
        try:
            return rehearsal.record(frozenset(leaves))
        except Opaque as opaque:
            if not opaque.path:
                raise _cause(first, opaque) from opaque
            first = first or opaque
            kind = type(modules[opaque.path])
            leaves |= {module for module in modules.values() if type(module) is kind}
    raise Opaque("", f"has more than {MOST_TRIES} kinds of modules that cannot be followed")


def _cause(first: Opaque | None, last: Opaque) -> Opaque:
    """Returns why a model cannot be followed: of a leaf that fails, why it became one."""
    if first is None or last.raised is None:
        return last
    return Opaque("", f"{first.reason} (in {first.path})")


def refuse_global_hooks(model: nn.Module) -> None:
    """Raises ArgumentError while hooks for all modules are registered.

    Modules whose inside is cut are not called, and their hooks would not fire.
    """
    # a second run puts one up itself
    if has_global_hooks() and not is_recomputing():
        raise ArgumentError(
            f"hooks for all modules are registered, and a checkpointed {type(model).__name__} does "
            "not call every module. Remove them, or call zoo.uncheckpoint for that forward"
        )


def _is_equal(one: Tape, other: Tape) -> bool:
    return (
        one.calls == other.calls
        and one.output == other.output
        and one.output_spec == other.output_spec
    )


def _kind(tensor: Tensor) -> Any:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return (
        tuple(tensor.shape),
        strides,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )
