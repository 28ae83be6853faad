"""Values and tensors that Python reads, as they were, and how they are now.

Plain values are compared by value, objects by identity, and tensors by their addresses: by whether
they require a gradient, too, and whether they have one.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.cuda_graphs.batch import VALUES
from zoo.engine.tensor_state import storage_of
from zoo.errors import shortened

# what a variable without a value has, and the address of no tensor
MISSING, NOWHERE = object(), -1
# bytes of an array whose numbers are compared, at most
LARGEST_ARRAY = 1 << 16


class StateChange(NamedTuple):
    """A value that has changed."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        """Says what it was and what it is."""
        if isinstance(self.before, VALUES) and isinstance(self.now, VALUES):
            return f"{self.name} ({shortened(self.before)}, now {shortened(self.now)})"
        return self.name


class ContainerValues:
    """The values of a container, as they were when this was made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.before = self.read()

    def read(self) -> tuple[Any, ...]:
        """Returns the values that are there now."""
        raise NotImplementedError

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        raise NotImplementedError

    def set(self, index: int, value: Any) -> None:
        """Writes the value at an index, a tensor."""
        raise NotImplementedError

    def change(self) -> StateChange | None:
        """Returns the first value that has changed; tensors are compared elsewhere."""
        now = self.read()
        if len(now) != len(self.before):
            return StateChange(self.name, f"{len(self.before)} entries", f"{len(now)} entries")
        if all(map(operator.is_, self.before, now)):
            return None
        for index, (before, value) in enumerate(zip(self.before, now, strict=True)):
            if not _is_same(before, value):
                return StateChange(self.name_of(index), before, value)
        return None

    def tensors(self) -> Iterator["TensorLocation"]:
        """Yields where the tensors among the values are kept."""
        for index, value in enumerate(self.before):
            if isinstance(value, Tensor):
                read = functools.partial(self._value, index)
                yield TensorLocation(self.name_of(index), read, functools.partial(self.set, index))

    def _value(self, index: int) -> Any:
        now = self.read()
        return now[index] if index < len(now) else None


class MappingValues(ContainerValues):
    """The values of a dict or of an object's attributes: of some keys, or of all."""

    def __init__(
        self, name: str, mapping: Mapping[Any, Any], keys: Iterable[Any] | None = None
    ) -> None:
        self.mapping, self.has_all = mapping, keys is None
        self.keys = (*mapping,) if keys is None else (*keys,)
        super().__init__(name)

    def read(self) -> tuple[Any, ...]:
        """Returns the values that are there now."""
        if self.has_all:
            return (*self.mapping.values(),)
        return tuple(self.mapping.get(key, MISSING) for key in self.keys)

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        key = self.keys[index]
        if not isinstance(key, str):
            return f"{self.name}[{index}]"
        return f"{self.name}.{key}" if self.name else key

    def set(self, index: int, value: Any) -> None:
        """Writes the value at an index."""
        self.mapping[self.keys[index]] = value  # type: ignore[index]

    def _value(self, index: int) -> Any:
        return self.mapping.get(self.keys[index])


class PlanInForce(MappingValues):
    """The plan by which a model ran last."""

    def name_of(self, index: int) -> str:
        """Returns the name of the plan."""
        return f"the plan of {self.name}"


class ListValues(ContainerValues):
    """The values of a list, a deque or a set."""

    def __init__(self, name: str, values: Any) -> None:
        self.values = values
        super().__init__(name)

    def read(self) -> tuple[Any, ...]:
        """Returns the values that are there now."""
        return (*self.values,)

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        return f"{self.name}[{index}]"

    def set(self, index: int, value: Any) -> None:
        """Writes the value at an index."""
        self.values[index] = value


class FixedValues(ListValues):
    """The values of a tuple or a frozenset."""

    def set(self, index: int, value: Any) -> None:
        """Writes nothing: what is there stays there."""


class ArrayValues(ContainerValues):
    """The numbers of a small array of NumPy, which may be written in place."""

    def __init__(self, name: str, array: Any) -> None:
        self.array = array
        super().__init__(name)

    def read(self) -> tuple[Any, ...]:
        """Returns the numbers that are there now."""
        return (self.array.tobytes(),) if self.array.nbytes <= LARGEST_ARRAY else ()

    def name_of(self, index: int) -> str:
        """Returns the name of the array."""
        return self.name


class SlotValues(ContainerValues):
    """The values of an object's slots."""

    def __init__(self, name: str, owner: Any, keys: Iterable[str]) -> None:
        self.owner, self.keys = owner, (*keys,)
        super().__init__(name)

    def read(self) -> tuple[Any, ...]:
        """Returns the values that are there now."""
        return tuple(getattr(self.owner, key, MISSING) for key in self.keys)

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        return f"{self.name}.{self.keys[index]}"

    def set(self, index: int, value: Any) -> None:
        """Writes the value at an index."""
        setattr(self.owner, self.keys[index], value)


class EnclosedValues(ContainerValues):
    """The values of the variables that a function has from the functions around it."""

    def __init__(self, name: str, function: FunctionType) -> None:
        self.cells = function.__closure__ or ()
        self.variables = function.__code__.co_freevars
        super().__init__(name)

    def read(self) -> tuple[Any, ...]:
        """Returns the values that are there now."""
        return tuple(map(_contents, self.cells))

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        return self.variables[index]

    def set(self, index: int, value: Any) -> None:
        """Writes the value at an index."""
        self.cells[index].cell_contents = value


def _is_same(value: Any, other: Any) -> bool:
    """Compares plain values by value and others by identity."""
    if value is other:
        return True
    if type(value) is not type(other):
        return isinstance(value, Tensor) and isinstance(other, Tensor)
    if isinstance(value, Tensor):
        return True
    if isinstance(value, tuple | torch.Size):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return isinstance(value, (*VALUES, MethodType)) and bool(value == other)


class TensorLocation:
    """Where a tensor or a gradient is kept, and the address that it had; that of None is -1."""

    __slots__ = ("address", "is_gradient", "name", "read", "requires_grad", "storage", "write")

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        is_gradient: bool = False,
    ) -> None:
        self.name, self.read, self.write = name, read, write
        self.is_gradient = is_gradient
        tensor = read()
        self.address, self.requires_grad = _address(tensor)
        storage = storage_of(tensor) if self.address > 0 else None
        # the address of its storage, of which it may be a part
        self.storage = NOWHERE if storage is None else storage.data_ptr()

    def change(self) -> StateChange | None:
        """Returns how the tensor differs now; None if it does not."""
        address, requires_grad = _address(self.read())
        if address != self.address:
            return StateChange(self.name, _whereabouts(self.address), _whereabouts(address))
        if requires_grad is not self.requires_grad:
            return StateChange(f"requires_grad of {self.name}", self.requires_grad, requires_grad)
        return None


def _address(tensor: Any) -> tuple[int, bool]:
    if not isinstance(tensor, Tensor):
        return NOWHERE, False
    try:
        return tensor.data_ptr(), tensor.requires_grad
    except RuntimeError:
        # one without memory, such as the mark of a gradient that was used in the backward
        return 0, tensor.requires_grad


def _whereabouts(address: int) -> str:
    return "None" if address == NOWHERE else "in other memory"


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
