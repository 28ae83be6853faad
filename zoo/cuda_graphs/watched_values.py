"""Values that a training step may read, as they were, and whether they still are.

Plain values are compared by type and bits, parameters and objects by identity, other tensors by
where they lie. None of the program's own code runs: a class may compare, iterate or hand out
attributes in its own way, without end or with an error.
"""

import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.errors import shortened

# types whose values are compared; a subclass is compared as they are
PLAIN = (
    int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
# exact values of their subclasses, by methods that these cannot replace
CANONICAL: dict[type, Callable[[Any], Any]] = {
    int: lambda value: int.__add__(value, 0),
    float: float.__repr__,
    complex: complex.__repr__,
    str: str.__str__,
    bytes: lambda value: bytes.__add__(value, b""),
}
# what a variable without a value has, and a tensor that is not compared by identity
MISSING, TENSOR = object(), object()
# nested tuples are compared by value to this depth
DEEPEST_TUPLE = 4
Read = Callable[[], tuple[Any, ...]]
Write = Callable[[Any, Any], object]


def is_plain(value: object) -> bool:
    """Returns whether a value is compared, not its identity."""
    return issubclass(type(value), PLAIN)


def is_tensor(value: object) -> bool:
    """Returns whether a value is a tensor; a proxy that says so is none."""
    return issubclass(type(value), Tensor)


def bits_of(value: Any) -> Any:
    """Returns what tells a plain value from others of its type: -0.0 is not 0.0, nan is nan."""
    kind = type(value)
    exact = (canonical for base, canonical in CANONICAL.items() if issubclass(kind, base))
    return next(exact, lambda value: value)(value)


def is_same(value: Any, other: Any, depth: int = DEEPEST_TUPLE) -> bool:
    """Compares plain values by type and bits, tuples by what is in them, others by identity."""
    kind = type(value)
    if value is other or (value is TENSOR and is_tensor(other)):
        return True
    if kind is not type(other):
        return False
    if issubclass(kind, PLAIN):
        return bool(bits_of(value) == bits_of(other))
    if issubclass(kind, tuple):
        pair = [(*tuple.__iter__(value),), (*tuple.__iter__(other),)]
        alike = depth > 0 and len(pair[0]) == len(pair[1])
        return alike and all(is_same(one, two, depth - 1) for one, two in zip(*pair, strict=True))
    if kind is types.MethodType:
        return value.__self__ is other.__self__ and value.__func__ is other.__func__
    return False


class StateChange(NamedTuple):
    """A value that has changed."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        """Says what it was and what it is."""
        if is_plain(self.before) and is_plain(self.now):
            return f"{self.name} ({shortened(self.before)}, now {shortened(self.now)})"
        return self.name


class WatchedValues:
    """The values that a container, an object or a function holds, as they were.

    Attributes:
        is_counter: whether they advance by being read, as an iterator does.
    """

    def __init__(
        self,
        name: str,
        read: Read,
        keys: Sequence[Hashable] = (),
        write: Write | None = None,
        *,
        is_counter: bool = False,
    ) -> None:
        self.name, self.read, self.keys, self.write = name, read, keys, write
        self.is_counter = is_counter
        found = read()
        self.tensors = [*self._tensors(found)]
        # a tensor is not kept alive, nor its graph of autograd
        self.before = tuple(TENSOR if _is_passing(value) else value for value in found)

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        if index >= len(self.keys):
            return self.name
        key = self.keys[index]
        if type(key) is not str:
            return f"{self.name}[{index}]"
        return f"{self.name}.{key}" if self.name else key

    def change(self) -> StateChange | None:
        """Returns the first value that has changed; tensors are compared elsewhere."""
        now = self.read()
        if len(now) != len(self.before):
            return StateChange(self.name, f"{len(self.before)} entries", f"{len(now)} entries")
        for index, (before, value) in enumerate(zip(self.before, now, strict=True)):
            if before is not value and not is_same(before, value):
                return StateChange(self.name_of(index), before, value)
        return None

    def _tensors(self, found: tuple[Any, ...]) -> Iterator["TensorLocation"]:
        if self.write is None:
            return
        for index, (key, value) in enumerate(zip(self.keys, found, strict=False)):
            if is_tensor(value):

                def read(index: int = index) -> Any:
                    now = self.read()
                    return now[index] if index < len(now) else None

                def write(tensor: Any, key: Any = key) -> None:
                    self.write(key, tensor)  # type: ignore[misc]

                yield TensorLocation(self.name_of(index), read, write)


def _is_passing(value: object) -> bool:
    return is_tensor(value) and not issubclass(type(value), nn.Parameter)


class TensorLocation:
    """Where a tensor or a gradient is kept, and where in memory that lies."""

    __slots__ = ("address", "is_gradient", "name", "read", "requires_grad", "storage", "write")

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        is_gradient: bool = False,
    ) -> None:
        self.name, self.read, self.write, self.is_gradient = name, read, write, is_gradient
        self.storage, self.address, self.requires_grad = _whereabouts(read())

    def change(self) -> StateChange | None:
        """Returns how the tensor differs now; None if it does not."""
        storage, address, requires_grad = _whereabouts(self.read())
        if storage != self.storage or address != self.address:
            before = "None" if self.address is None else "in its memory"
            return StateChange(self.name, before, "None" if address is None else "in other memory")
        if requires_grad is not self.requires_grad:
            return StateChange(f"requires_grad of {self.name}", self.requires_grad, requires_grad)
        return None


def _whereabouts(tensor: Any) -> tuple[int, tuple[Any, ...] | None, bool]:
    """Returns the address of a tensor's storage, where in it the tensor lies, and whether it is
    trained; -1 and None for none.
    """
    if not is_tensor(tensor):
        return -1, None, False
    try:
        address = tensor.untyped_storage().data_ptr()
        where = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
    except (NotImplementedError, RuntimeError):
        # one without memory, such as the mark of a gradient that was used in the backward
        return 0, (), tensor.requires_grad
    return address, where, tensor.requires_grad
