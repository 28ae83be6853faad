"""What a forward did, as data: the calls of torch functions and leaf modules in their order.

A tape holds no tensor and no module. Values are numbers, modules and their tensors are paths, so a
tape fits every copy of the model and survives `to()` and `load_state_dict`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import Tensor


class Value(NamedTuple):
    """The place of a tensor that an earlier call made, or that is an input."""

    number: int


class Attribute(NamedTuple):
    """The place of a parameter, a buffer or another tensor that a module has."""

    owner: str
    name: str


@dataclass(slots=True)
class Call:
    """One call of a torch function, or of a module where `module` has a path.

    Attributes:
        args, kwargs: as given, a `Value` or an `Attribute` in the place of each tensor.
        results: the numbers that the tensors among its results get, in order.
        within: paths of the modules whose forward made the call, outermost first.
        grad: whether gradients were on.
        origins: for each result the number of the value that first had its storage.
        writes: such numbers of the storages that the call wrote in place.
        line: "file:line" of the code that made the call, "" where it is none of the model's.
    """

    function: Callable[..., Any] | None
    module: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    within: tuple[str, ...]
    grad: bool
    origins: tuple[int, ...] = ()
    writes: frozenset[int] = frozenset()
    line: str = field(default="", compare=False)

    def reads(self) -> Iterator[int]:
        """Yields the numbers of the values among the arguments."""
        for leaf in leaves_of((self.args, self.kwargs)):
            if isinstance(leaf, Value):
                yield leaf.number

    def attributes(self) -> Iterator[Attribute]:
        """Yields the tensors of modules among the arguments."""
        for leaf in leaves_of((self.args, self.kwargs)):
            if isinstance(leaf, Attribute):
                yield leaf


@dataclass(slots=True)
class Tape:
    """The calls of one forward; its inputs are the values 0, 1, ... up to `inputs`.

    `output` is what the forward returned, encoded as arguments are; `inlined` are the paths of the
    modules whose own Python code ran, which are the ones that a replay leaves out.
    """

    inputs: int
    calls: list[Call] = field(default_factory=list)
    output: Any = None
    output_spec: Any = None
    inlined: tuple[str, ...] = ()
    reads: tuple[tuple[str, str], ...] = ()


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields what containers hold; `Value` and `Attribute` count as leaves."""
    if isinstance(value, Value | Attribute):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves_of(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves_of(part)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a value with every leaf changed; containers are new ones of the same type."""
    if isinstance(value, Value | Attribute):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [mapped(part, change) for part in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return parts if type(value) is list else tuple(parts) if type(value) is tuple else value
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


class Fields(NamedTuple):
    """A dataclass of somebody's as containers that `torch.utils._pytree` knows."""

    kind: Any
    values: dict[str, Any]


def flattened(value: Any) -> Any:
    """Returns what a forward returned with `Fields` in the place of dataclasses."""
    is_leaf = any(leaf is value for leaf in pytree.tree_leaves(value))
    if is_leaf and dataclasses.is_dataclass(value):
        return Fields(type(value), {key: flattened(part) for key, part in vars(value).items()})
    if type(value) in (list, tuple):
        return type(value)(map(flattened, value))
    return {k: flattened(v) for k, v in value.items()} if type(value) is dict else value


def restored(value: Any) -> Any:
    """Returns dataclasses in the place of `Fields`, without their `__init__`."""
    if isinstance(value, Fields):
        made = object.__new__(value.kind)
        vars(made).update({key: restored(part) for key, part in value.values.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(map(restored, value))
    return {k: restored(v) for k, v in value.items()} if type(value) is dict else value


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in what a call returned, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
