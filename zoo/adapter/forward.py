"""The object that stands in a module's `forward` while a plan is in force.

An instance attribute, and nothing else of the module changes: class, names, hooks, state dict. It
has no `__dict__`, so that the engine does not go through it to the whole model, and holds its
module weakly; a copy or a pickle takes the option along and watches its own module anew.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from zoo.adapter.blocks import block_paths, matching_paths, row_paths
from zoo.adapter.following import Arguments, Followed, Following, refuse_global_hooks
from zoo.adapter.instead import NAME, Instead
from zoo.adapter.switches import check_switches
from zoo.adapter.watch import Opaque, line_of
from zoo.chain import is_hooked
from zoo.checkpointing import Checkpoint, PlannedRunner, runner_for
from zoo.engine.compiled import is_exporting
from zoo.engine.recompute import _is_transformed, recompute
from zoo.errors import ArgumentError
from zoo.plan import Plan
from zoo.planning import Budget

# what operations raise that real tensors would not
OF_FAKES = (
    NotImplementedError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class Option(NamedTuple):
    """What the user asked for."""

    checkpoint: Checkpoint
    memory_budget: Budget | None = None
    max_overhead: float | None = None
    steps: tuple[str, ...] | None = None

    def runner(self) -> PlannedRunner:
        """Makes what decides and runs plans."""
        found = runner_for(self.checkpoint, self.memory_budget, self.max_overhead)
        assert found is not None, "False puts nothing in force"
        return found

    def is_by_blocks(self) -> bool:
        """Says whether it can be had without knowing what happens between the blocks."""
        return self.memory_budget is None and self.checkpoint in (True, "blocks")


class Segment(Instead):
    """A block's forward that runs as one segment."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps only the inputs, in training."""
        if not self.module.training:
            return self.original(*args, **kwargs)
        return recompute(functools.partial(_call, self.module, self.original), *args, **kwargs)

    def __reduce__(self) -> Any:
        return _segment, (), (self.module, self.before)

    def __setstate__(self, state: Any) -> None:
        module, self.before = state
        self._module = weakref.ref(module)


class Planned(Instead):
    """A model's forward that runs by a plan in training.

    In `eval()`, under `no_grad`, `torch.func`, `torch.export` and a tracer it is the model's own.
    """

    __slots__ = ("following", "option", "reason", "segments")

    def __init__(self, module: nn.Module, option: Option) -> None:
        super().__init__(module)
        self.option = option
        self.following = Following(option.runner, option.steps)
        self.segments: list[Segment] = []
        self.reason: str | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan used last; None before the first training forward, and for blocks alone."""
        latest = self.following.latest
        return None if latest is None else latest.runner.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward: by the plan in training, else as it is written."""
        module = self.module
        if (
            not module.training
            or not torch.is_grad_enabled()
            or is_exporting()
            or _is_transformed()
        ):
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._run)(module, args, kwargs)  # type: ignore[no-untyped-call]
        return self._run(module, args, kwargs)

    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.reason is None:
            refuse_global_hooks(module)
            try:
                return self.following(module, self.original, args, kwargs)
            except Opaque as opaque:
                self.by_blocks(opaque)
                return self._tried(args, kwargs)
        check_switches(module)
        return self.original(*args, **kwargs)

    def _tried(self, args: Any, kwargs: Any) -> Any:
        """Runs by blocks; where that fails too, it was the call that was wrong, not the model."""
        try:
            return self.original(*args, **kwargs)
        except BaseException:
            self.take_back_segments()
            self.segments, self.reason = [], None
            raise

    def watched(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Followed:
        """Watches the model as it is written, and decides nothing.

        Raises:
            Opaque: it cannot be followed.
        """
        given = Arguments.of(args, kwargs)
        with torch.enable_grad():
            return self.following.followed(self.module, self.written, given, args, kwargs)

    def follow(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Followed | None:
        """Watches the model and decides the plan now; None where it runs by blocks."""
        try:
            found = self.watched(args, kwargs)
        except Opaque as opaque:
            self.by_blocks(opaque)
            return None
        with torch.enable_grad():
            state = found.steps.state(Arguments.of(args, kwargs).tensors)
            found.runner.settle(self.module, found.steps.outline, state)  # type: ignore[arg-type]
        return found

    def by_blocks(self, opaque: Opaque) -> None:
        """Makes each block a segment, since the code between them is only known to run.

        Raises:
            ArgumentError: the option needs more than that, or there are no blocks, or it was the
                inputs that were wrong.
        """
        module, kind, reason = self.module, type(self.module).__name__, opaque.reason
        wrong = not_taken(module, opaque)
        said = f"the forward of {kind} cannot be followed: its code {reason}"
        if self.option.steps is None:
            paths = block_paths(module) or row_paths(module)
        else:
            paths = matching_paths(module, self.option.steps)
        if paths and not self.option.is_by_blocks():
            raise ArgumentError(
                wrong
                or f"{said}. checkpoint={self.option.checkpoint!r} needs that; checkpoint='blocks' "
                f"does not.{way_out(module, opaque)}"
            )
        if not paths:
            raise ArgumentError(
                wrong
                or f"{said}, and it has no blocks that repeat. Name modules to run again by "
                "checkpoint='blocks', steps=[...], or call its parts through zoo.recompute."
                f"{way_out(module, opaque)}"
            )
        self.reason = reason
        self.segments = [Segment(module.get_submodule(path)) for path in paths]
        for segment in self.segments:
            segment.put()

    def take_back(self) -> None:
        """Gives the model and its blocks the forwards that they had."""
        self.take_back_segments()
        super().take_back()

    def take_back_segments(self) -> None:
        """Gives the blocks the forwards that they had."""
        for segment in self.segments:
            if vars(segment.module).get(NAME) is segment:
                segment.take_back()

    def __reduce__(self) -> Any:
        state = self.module, self.before, self.option, self.reason, self.segments
        return _planned, (), state

    def __setstate__(self, state: Any) -> None:
        module, self.before, self.option, self.reason, self.segments = state
        self._module = weakref.ref(module)
        self.following = Following(self.option.runner, self.option.steps)


def _call(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a forward; the engine sees by the first argument what it may reach."""
    return forward(*args, **kwargs)


def way_out(module: nn.Module, opaque: Opaque) -> str:
    """Returns a sentence, with a space before it, on what to do where a forward is not followed."""
    if opaque.reason.startswith("changes "):
        return " Set that before, or call the model once without checkpointing."
    if opaque.raised is not None and any(map(is_hooked, module.modules())):
        return " It was watched without the hooks that are on its modules."
    if getattr(getattr(module, "config", None), "use_cache", False) is True:
        return " A cache is for generation: set model.config.use_cache = False."
    return ""


def raised_by(opaque: Opaque) -> Exception | None:
    """Returns what a forward raised where it was not followed; None where it raised nothing.

    None, too, for what it raised only because the tensors that it was watched on have no numbers.
    """
    # of a leaf that fails, the reason is why it became one
    last = opaque.__cause__ if opaque.raised is None else opaque
    found = last.raised if isinstance(last, Opaque) else None
    return None if found is None or _is_of_fakes(found) else found


def _is_of_fakes(error: BaseException) -> bool:
    # compiled code that is no operation of torch asks for the address of the numbers
    return isinstance(error, OF_FAKES) or "data pointer" in str(error)


def not_taken(module: nn.Module, opaque: Opaque) -> str | None:
    """Returns a sentence on inputs that a forward raises on; None where they are not to blame.

    Nor are they where the forward may need the hooks of its modules, which a watch takes off.
    """
    hooked = any(map(is_hooked, module.modules()))
    if hooked or opaque.raised is None or _is_of_fakes(opaque.raised):
        return None
    return f"{type(module).__name__} does not take these inputs: {line_of(opaque.raised)}"


def _segment() -> Segment:
    return Segment.__new__(Segment)


def _planned() -> Planned:
    return Planned.__new__(Planned)
