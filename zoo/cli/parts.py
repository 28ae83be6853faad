"""The parts of a model in the order in which they run: what each hands on and which weights it has.

One forward on tensors without memory tells. The parts of a chain are its steps, those of any other
module the steps that `zoo.checkpoint` finds in it, or its children where it finds none.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from zoo.chain import Chain, Outline, step_names
from zoo.entry import Inputs, Invocation, called
from zoo.measure.memory import tensors_in
from zoo.tracing.entry import Entry
from zoo.tracing.isolated import TraceError

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Part:
    """A step of a chain, some steps together, or a child of a module.

    `shapes` are those of the tensors that it hands on; a parameter counts where it is first used.
    """

    name: str
    block: int
    shapes: Shapes
    parameters: int
    steps: int = 1


@dataclass(frozen=True)
class Parts:
    """The parts of a model; `reason` says in a sentence why they are no steps, where they are not.

    Calling a chain or a module that can be followed for its parts takes no memory; calling the
    children takes what they take, on the meta device none.
    """

    listed: list[Part]
    reason: str | None = None

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs) -> "Parts":
        """Runs a model forward without gradients and returns its parts."""
        given = Invocation.of(inputs)
        if isinstance(model, Chain):
            found, state = called(model, given)
            return cls(_steps(found, step_names(model, found.steps), state))
        try:
            return cls(_followed(model, given))
        except TraceError as error:
            return cls(_children(model, given, error), str(error))


def _steps(found: Outline, names: Sequence[str], value: Any) -> list[Part]:
    uses = _Uses()
    parts = []
    with torch.no_grad(), uses:
        for step, name, block in zip(found.steps, names, found.blocks, strict=True):
            value = step(*(value if isinstance(value, tuple) else (value,)))
            parts.append(Part(name, block, _shapes(value), uses.new()))
    return parts


def _followed(model: nn.Module, given: Invocation) -> list[Part]:
    """Returns the steps that are found in any module, run on fake tensors."""
    entry = Entry.of(model, given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _steps(entry.outline, entry.names, entry.state)


def _children(model: nn.Module, given: Invocation, refused: TraceError) -> list[Part]:
    """Returns the children in the order of their first calls, then those that were not called."""
    handed: dict[str, Shapes] = {}
    children = dict(model.named_children())
    handles = [
        child.register_forward_hook(_noting(name, handed)) for name, child in children.items()
    ]
    try:
        with torch.no_grad():
            given.on(model)
    except Exception:
        # else it reads a number, which is not there on the meta device
        if refused.raised:
            raise
    finally:
        for handle in handles:
            handle.remove()
    known: set[int] = set()
    return [
        Part(name, block, handed.get(name, ()), _new(children[name].parameters(), known))
        for block, name in enumerate(dict.fromkeys([*handed, *children]))
    ]


def _noting(name: str, handed: dict[str, Shapes]) -> Callable[..., None]:
    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        handed.setdefault(name, _shapes(output))

    return note


class _Uses(TorchFunctionMode):
    """Counts the parameters that functions of torch are called with, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.count = 0

    def new(self) -> int:
        """Returns the count since it was last asked for."""
        count, self.count = self.count, 0
        return count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs or {}))
        parameters = (value for value in given if isinstance(value, nn.Parameter))
        self.count += _new(parameters, self.known)
        return func(*args, **(kwargs or {}))


def _new(parameters: Iterable[nn.Parameter], known: set[int]) -> int:
    """Counts the elements of those parameters that are not known, and knows them from now on."""
    count = 0
    for parameter in parameters:
        count += 0 if id(parameter) in known else parameter.numel()
        known.add(id(parameter))
    return count


def _shapes(value: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))
