"""What stands in the `forward` of a model and of its blocks while a plan is in force.

An instance attribute, and nothing else of a module changes: class, names, hooks, state dict. The
user's own forward runs, once and as it is written. What stands before it opens segments between its
kernels (`engine.ranges`), by a plan for the operators that came when it was traced:

    first forward in training   traced while it runs block by block, then planned
    every other                 by the plan, as far as the operators are the same
    other operators             block by block; one that goes its own way again is traced

A copy or a pickle takes the option along and plans anew.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zoo._torch import is_exporting, pytree
from zoo.chain import Chain
from zoo.engine.ranges import Conductor, Script, conducts
from zoo.engine.recording import thread
from zoo.planner.plan import Plan

NAME = "forward"
# scripts of one kind of inputs that are kept, for forwards that go one way or another
MOST_WAYS = 8
# kinds of inputs whose plans are kept; the one that was used longest ago goes first
MOST_KINDS = 64


class Traced(NamedTuple):
    """A script and the plan in it, with what was said of the model's size when it was planned."""

    script: Script
    plan: Plan


class Planner(Protocol):
    """Makes plans for a model; `patterns` are the modules that the user named as blocks."""

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """The modules that the user named as blocks."""
        ...

    def runner(self) -> Any:
        """Makes what decides plans."""
        ...

    def plan_ahead(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what was traced and planned without a step."""
        ...

    def ahead(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what was traced and planned without a step; None where a step tells."""
        ...

    def of_forward(self, model: nn.Module, run: Callable[[], Any]) -> tuple[Any, Traced | None]:
        """Runs a forward, traces it and plans; returns what the forward returned."""
        ...


class Patch:
    """A callable in the place of a module's forward; `before` is an instance attribute it had."""

    __slots__ = ("__weakref__", "_module", "before")

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
            kind = type(self.module)
            # that of a module of TorchScript belongs to the object alone
            found = inspect.getattr_static(kind, "forward")
            return found.__get__(self.module, kind)  # type: ignore[no-any-return]
        return self.before  # type: ignore[no-any-return]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __code__(self) -> CodeType:
        """The code of the forward that the module had, which `torch.export` looks at."""
        return inspect.unwrap(self.original).__code__  # type: ignore[no-any-return, attr-defined]

    def put(self) -> None:
        """Takes its place."""
        vars(self.module)[NAME] = self

    def take_back(self) -> None:
        """Gives the module the forward that it had."""
        attributes = vars(self.module)
        if attributes.get(NAME) is not self:
            return
        if self.before is None:
            attributes.pop(NAME, None)
        else:
            attributes[NAME] = self.before


class BlockMark(Patch):
    """The forward of a block, which tells the conductor that the block begins and ends."""

    __slots__ = ("path",)

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

    def __reduce__(self) -> Any:
        return _mark, (), (self.module, self.before, self.path)

    def __setstate__(self, state: Any) -> None:
        module, self.before, self.path = state
        self._module = weakref.ref(module)


class PatchedForward(Patch):
    """A model's forward that runs by a plan in training.

    In `eval()`, under `no_grad`, `torch.func`, `torch.export`, a tracer, or inside of another
    segment it is the model's own.
    """

    __slots__ = ("known", "latest", "marks", "planner")

    def __init__(self, module: nn.Module, planner: Planner, marks: Sequence[BlockMark]) -> None:
        super().__init__(module)
        self.planner = planner
        self.marks = list(marks)
        # the ways that a forward went, for each kind of inputs, the latest kind last
        self.known: dict[Any, Ways] = {}
        self.latest: Traced | None = None

    def put(self) -> None:
        """Takes its place, and the marks of the blocks theirs."""
        for mark in self.marks:
            mark.put()
        super().put()

    def take_back(self) -> None:
        """Gives the model and its blocks the forwards that they had."""
        for mark in self.marks:
            # a block may have been replaced by another module since
            if mark._module() is not None:
                mark.take_back()
        super().take_back()

    def plan_ahead(self, args: Any, kwargs: Any) -> None:
        """Plans for arguments like these now."""
        self.latest = self.planner.plan_ahead(self.module, args, kwargs)
        self.known[numbered_spec(args, kwargs)] = Ways([self.latest])

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
        kind = numbered_spec(args, kwargs)
        ways = self.known.pop(kind, None) or self._similar(kind) or Ways()
        if len(self.known) >= MOST_KINDS:
            del self.known[next(iter(self.known))]
        self.known[kind] = ways
        if not ways.found and (found := self.planner.ahead(module, args, kwargs)) is not None:
            ways.found.append(found)
        if ways.must_trace():
            return self._trace(ways, args, kwargs)
        with Conductor([traced.script for traced in reversed(ways.found)]) as conductor:
            outputs = self.original(*args, **kwargs)
        ways.note(conductor)
        self.latest = ways.found[-1] if ways.found else None
        return outputs

    def _trace(self, ways: "Ways", args: Any, kwargs: Any) -> Any:
        outputs, found = self.planner.of_forward(
            self.module, lambda: self.original(*args, **kwargs)
        )
        ways.add(found)
        self.latest = found
        return outputs

    def _similar(self, kind: Any) -> "Ways | None":
        """Returns the ways for inputs of other sizes that need no more memory than known ones."""
        for known, ways in reversed(self.known.items()):
            if ways.found and kind.is_within(known):
                return Ways(list(ways.found))
        return None

    def __reduce__(self) -> Any:
        return _patched, (), (self.module, self.before, self.planner, self.marks)

    def __setstate__(self, state: Any) -> None:
        module, self.before, self.planner, self.marks = state
        self._module = weakref.ref(module)
        self.known, self.latest = {}, None


def take_back_all(model: nn.Module) -> None:
    """Gives a model, and all that is in it, the forwards that they had, and plain training."""
    for module in model.modules():
        for patch in [*vars(module).values()]:
            if isinstance(patch, Patch):
                patch.take_back()
        if isinstance(module, Chain):
            module.runner = None


class Ways:
    """The ways that a forward went for one kind of inputs; the latest one last."""

    def __init__(self, found: list[Traced] | None = None) -> None:
        self.found = found or []
        self.strayed = False
        self.is_planned_for = True

    def must_trace(self) -> bool:
        """Says whether the next forward is traced: the first, and one that follows a new way."""
        is_new = not self.found or (self.strayed and len(self.found) < MOST_WAYS)
        return is_new and self.is_planned_for

    def note(self, conductor: Conductor) -> None:
        """Notes after a forward by which script it went, and whether by any."""
        self.strayed = conductor.lost
        for place, traced in enumerate(self.found):
            if traced.script is conductor.script:
                self.found.append(self.found.pop(place))
                return

    def add(self, found: Traced | None) -> None:
        """Adds a way; None where it cannot be planned for, after which none is tried again."""
        if found is None:
            self.is_planned_for = False
        else:
            self.found.append(found)
        self.strayed = False


class Kind(NamedTuple):
    """What tells the arguments of one call from those of another: structure, and sizes."""

    structure: Any
    sizes: tuple[tuple[int, ...], ...]

    def is_within(self, other: "Kind") -> bool:
        """Says whether arguments are like others, with no size above theirs."""
        return self.structure == other.structure and all(
            len(one) == len(two) and all(a <= b for a, b in zip(one, two, strict=True))
            for one, two in zip(self.sizes, other.sizes, strict=True)
        )


def numbered_spec(args: Any, kwargs: Any) -> Kind:
    """Returns the kind of arguments; values that are no tensors count by their types."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds: list[Any] = [structure]
    sizes: list[tuple[int, ...]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            nested = leaf.is_nested
            sizes.append(() if nested else tuple(leaf.shape))
            kinds.append((leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout))
        else:
            kinds.append(type(leaf))
    return Kind((tuple(map(str, kinds[:1])), *kinds[1:]), tuple(sizes))


def _mark() -> BlockMark:
    return BlockMark.__new__(BlockMark)


def _patched() -> PatchedForward:
    return PatchedForward.__new__(PatchedForward)
