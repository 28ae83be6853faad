"""Values that a training step may read, as they were, and whether they still are.

Plain values are compared by type and bits, tensors by where they lie, parameters and objects by
identity. None of the program's own code runs: a class may compare, iterate or hand out attributes
in its own way, without end or with an error.
"""

import contextlib
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from zoo._torch import DisableTorchFunction
from zoo.errors import shortened

# types whose values are compared; a subclass by their methods, which it cannot replace
PLAIN: tuple[Any, ...] = (
    float, int, complex, str, bytes, types.NoneType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
# what a variable without a value has, and what stands for a tensor that is not compared
MISSING, ANY = object(), object()
# tensors without code of the program, and what says where they lie, once they have memory
PLAIN_TENSORS = (Tensor, nn.Parameter)
PLACES: tuple[Callable[[Any], Any], ...] = (
    Tensor.data_ptr, Tensor.size, Tensor.stride, operator.attrgetter("requires_grad"),
    operator.attrgetter("dtype"),
)  # fmt: skip
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
    # another may come to lie at the address when this is freed
    storage: Any = None


def whereabouts(tensor: Any) -> Whereabouts | None:
    """Returns where a tensor lies, and which parameter it is; None of what is no tensor."""
    # a proxy that says so is none
    if not issubclass(type(tensor), Tensor):
        return None
    identity = id(tensor) if issubclass(type(tensor), nn.Parameter) else None
    try:
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        # such as the mark of a gradient that was used in the backward
        return Whereabouts(0, (), tensor.requires_grad, identity)
    return Whereabouts(address, geometry, tensor.requires_grad, identity, ref(storage))


class WatchedValues:
    """The values that a container, an object or a function holds, as they were.

    Attributes:
        sources: what hands them out, one part after the other.
    """

    def __init__(
        self,
        name: str,
        sources: tuple[Callable[[], Iterable[Any]], ...],
        keys: Sequence[Any] = (),
        write: Any = None,
    ) -> None:
        self.name, self.sources, self.keys, self.write = name, sources, keys, write
        self.is_gradient, self.is_iterator = keys == ("grad",), keys == ("next",)
        found = self.read()
        self.before = [whereabouts(value) or value for value in found]
        # of tensors that are of no class of the program
        self.places = {
            index: (ref(value), *(read(value) for read in PLACES))
            for index, (value, where) in enumerate(zip(found, self.before, strict=True))
            if type(value) in PLAIN_TENSORS and where.geometry
        }
        # their numbers are not reused
        self.parameters = [each for each in found if issubclass(type(each), nn.Parameter)]

    def read(self) -> list[Any]:
        """Returns the values that are there now."""
        return _values(self.sources)

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


def _values(sources: Iterable[Callable[[], Iterable[Any]]]) -> list[Any]:
    return [*itertools.chain.from_iterable(map(operator.call, sources))]


class ComparedAtOnce:
    """All watched values, which are compared without a call of Python for each of them.

    Those are looked at one by one that are no longer the same objects, such as a number that is
    computed anew, and tensors that are not where they were.
    """

    def __init__(self, watched: Sequence[WatchedValues]) -> None:
        self.watched = watched
        self.sources = [source for each in watched for source in each.sources]
        self.owners = [each for each in watched for _ in each.before]
        self.objects = [value for each in watched for value in each.before]
        # those that are not compared here
        self.skipped = [at for at, value in enumerate(self.objects) if value is ANY]
        # tensors, each once, where they are among the objects, and where they lie
        self.positions: list[tuple[int, int]] = []
        found: dict[int, tuple[int, Any, list[Any]]] = {}
        indices = itertools.chain.from_iterable(range(len(each.before)) for each in watched)
        for at, (index, owner) in enumerate(zip(indices, self.owners, strict=True)):
            if type(self.objects[at]) is Whereabouts and index in owner.places:
                tensor, *place = owner.places[index]
                number, *_ = found.setdefault(id(tensor), (len(found), tensor, place))
                self.positions.append((at, number))
        self.tensors = [tensor for _, tensor, _ in found.values()]
        places = [place for *_, place in found.values()]
        self.places = [[*each] for each in zip(*places, strict=True)] or [[] for _ in PLACES]

    def change(self) -> str | None:
        """Says which value is not as it was; None if all are."""
        now, suspects = _values(self.sources), self.watched
        with DisableTorchFunction():
            tensors = [*map(operator.call, self.tensors)]
            if len(now) == len(self.objects) and self._are_in_place(tensors):
                expected = [*self.objects]
                for index, number in self.positions:
                    expected[index] = tensors[number]
                for index in self.skipped:
                    expected[index] = now[index]
                others = itertools.compress(self.owners, map(operator.is_not, now, expected))
                # as owners of tensors of other classes always are, which are no places
                suspects = [*dict.fromkeys(others)]
        changes = (watched.change() for watched in suspects)
        return next((change for change in changes if change is not None), None)

    def _are_in_place(self, tensors: list[Any]) -> bool:
        # one that is gone, or has other memory than the strided one, has none of these
        with contextlib.suppress(TypeError, RuntimeError):
            return [[*map(read, tensors)] for read in PLACES] == self.places
        return False


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
