"""Values that a training step may read, as they were, and whether they still are.

Plain values are compared by type and bits, tensors by where they lie, parameters and objects by
identity. None of the program's own code runs: a class may compare, iterate or hand out attributes
in its own way, without end or with an error.
"""

import operator
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.errors import shortened

# types whose values are compared; a subclass by their methods, which it cannot replace
PLAIN: tuple[Any, ...] = (
    float, int, complex, str, bytes, types.NoneType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
# what a variable without a value has, and what stands for a tensor that is not compared
MISSING, ANY = object(), object()
# nested tuples are compared by what is in them to this depth
DEEPEST_TUPLE = 4


def is_plain(value: object) -> bool:
    """Returns whether a value is compared, not its identity."""
    return issubclass(type(value), PLAIN)


def is_same(value: Any, other: Any, depth: int = DEEPEST_TUPLE) -> bool:
    """Compares plain values by type and bits, tuples by what is in them, others by identity."""
    kind = type(value)
    if kind is Whereabouts:
        return bool(value == whereabouts(other))
    if value is other or value is ANY or kind is not type(other):
        return value is other or value is ANY
    if issubclass(kind, float):
        # -0.0 is not 0.0, and nan is nan
        return float.hex(value) == float.hex(other)
    if issubclass(kind, PLAIN):
        base = next(base for base in PLAIN if issubclass(kind, base))
        return base.__eq__(value, other) is True
    if issubclass(kind, tuple):
        pair = (*tuple.__iter__(value),), (*tuple.__iter__(other),)
        alike = depth > 0 and len(pair[0]) == len(pair[1])
        return alike and all(is_same(one, two, depth - 1) for one, two in zip(*pair, strict=True))
    is_bound = kind is types.MethodType and value.__self__ is other.__self__
    return bool(is_bound and value.__func__ is other.__func__)


class Whereabouts(NamedTuple):
    """Where a tensor lies, which is not kept alive, nor is its graph; address 0 without memory."""

    address: int
    geometry: tuple[Any, ...] = ()
    requires_grad: bool = False
    identity: int | None = None


def whereabouts(tensor: Any) -> Whereabouts | None:
    """Returns where a tensor lies, and which parameter it is; None of what is no tensor."""
    # a proxy that says so is none
    if not issubclass(type(tensor), Tensor):
        return None
    identity = id(tensor) if issubclass(type(tensor), nn.Parameter) else None
    try:
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
        address = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        # such as the mark of a gradient that was used in the backward
        return Whereabouts(0, (), tensor.requires_grad, identity)
    return Whereabouts(address, geometry, tensor.requires_grad, identity)


class WatchedValues:
    """The values that a container, an object or a function holds, as they were."""

    def __init__(
        self, name: str, read: Callable[[], Any], keys: Sequence[Any] = (), write: Any = None
    ) -> None:
        self.name, self.read, self.keys, self.write = name, read, keys, write
        self.is_gradient, self.is_iterator = keys == ("grad",), keys == ("next",)
        found = read()
        self.before = [whereabouts(value) or value for value in found]
        # their numbers are not reused
        self.parameters = [each for each in found if issubclass(type(each), nn.Parameter)]

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        is_named = index < len(self.keys) and not (self.is_gradient or self.is_iterator)
        key = self.keys[index] if is_named else None
        if type(key) is not str:
            return self.name if key is None else f"{self.name}[{index}]"
        return f"{self.name}.{key}" if self.name else key

    def change(self, by_step: bool = False) -> str | None:
        """Says which value was and is now another; `by_step`, but for tensors."""
        now = self.read()
        if len(now) != len(self.before):
            return f"{self.name} ({len(self.before)} entries, now {len(now)})"
        if all(map(operator.is_, self.before, now)):
            return None
        for index, (before, value) in enumerate(zip(self.before, now, strict=True)):
            if before is value or is_same(before, value):
                continue
            after = whereabouts(value) if by_step and type(before) is Whereabouts else None
            if after is None or after.identity != before.identity:
                name, are_plain = self.name_of(index), is_plain(before) and is_plain(value)
                text = f" ({shortened(before)}, now {shortened(value)})" if are_plain else ""
                return name + text
        return None

    def locations(self) -> Iterator["TensorLocation"]:
        """Yields where tensors are among the values, and where a gradient may be."""
        for index, before in enumerate(self.before[: len(self.keys)]):
            if self.write and (type(before) is Whereabouts or self.is_gradient):
                storage = before.address if type(before) is Whereabouts else -1
                yield TensorLocation(self, index, self.name_of(index), storage)


@dataclass(eq=False)
class TensorLocation:
    """Where a tensor or a gradient is kept, and the address of the storage that it had, or -1."""

    values: WatchedValues
    index: int
    name: str
    storage: int

    def read(self) -> Any:
        """Returns what is there now."""
        now = self.values.read()
        return now[self.index] if self.index < len(now) else None

    def write(self, tensor: Any) -> None:
        """Puts a tensor there, or None."""
        self.values.write(self.values.keys[self.index], tensor)
