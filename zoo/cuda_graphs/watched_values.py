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
from zoo.engine.tensor_state import parts_of
from zoo.errors import shortened

# types whose values are compared; a subclass by their methods, which it cannot replace
PLAIN: tuple[Any, ...] = (
    float, int, complex, str, bytes, types.NoneType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
# what a variable without a value has
MISSING = object()
# tensors without code of the program, and what says where they lie, once they have memory
PLAIN_TENSORS = (Tensor, nn.Parameter)
PLACES: tuple[Callable[[Any], Any], ...] = (
    Tensor.data_ptr, Tensor.size, Tensor.stride, operator.attrgetter("requires_grad"),
    operator.attrgetter("dtype"),
)  # fmt: skip
# parts of a module that the names of what is in them leave out
UNNAMED = ("_parameters", "_buffers", "_modules")
# nested tuples are compared by what is in them to this depth
DEEPEST_TUPLE = 4


def is_plain(value: object) -> bool:
    """Returns whether a value is compared, not its identity."""
    return issubclass(type(value), PLAIN)


def is_same(value: Any, other: Any, depth: int = DEEPEST_TUPLE) -> bool:
    """Compares plain values by type and bits, tuples by what is in them, others by identity."""
    kind = type(value)
    if kind is Whereabouts:
        other = whereabouts(other) or other
        return type(other) is kind and bool(value == other)
    if value is other or kind is not type(other):
        return value is other
    if issubclass(kind, float):
        # -0.0 is not 0.0, and nan is nan
        return float.hex(value) == float.hex(other)
    if issubclass(kind, PLAIN):
        base = next(base for base in PLAIN if issubclass(kind, base))
        return base.__eq__(value, other) is True
    if issubclass(kind, tuple):
        one, two = [*tuple.__iter__(value)], [*tuple.__iter__(other)]
        pairs = map(is_same, one, two, itertools.repeat(depth - 1))
        return depth > 0 and len(one) == len(two) and all(pairs)
    return False


class Whereabouts(NamedTuple):
    """Where a tensor lies, which is not kept alive, nor is its graph; address 0 without memory."""

    address: int
    geometry: tuple[Any, ...] = ()
    requires_grad: bool = False
    identity: int | None = None
    # another may come to lie at the address when this is freed; the parts of a sparse tensor
    storage: Any = None


def whereabouts(tensor: Any) -> Whereabouts | None:
    """Returns where a tensor lies, and which parameter it is; None of what is no tensor."""
    # a proxy that says so is none
    if not issubclass(type(tensor), Tensor):
        return None
    identity = id(tensor) if issubclass(type(tensor), nn.Parameter) else None
    try:
        place = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
        # the same memory may be read in another way
        geometry = (*place, type(tensor), tensor.is_conj(), tensor.is_neg())
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        # such as the mark of a gradient that was used in the backward
        parts = (*map(whereabouts, parts_of(tensor)),)
        return Whereabouts(0, (), tensor.requires_grad, identity, parts)
    return Whereabouts(address, geometry, tensor.requires_grad, identity, ref(storage))


@dataclass(eq=False)
class Watched:
    """A container, an object or a function, and how its values are read and written.

    Attributes:
        sources: what hands out the values, one part after the other.
        is_free: whether a step may change them: a gradient, or where an iterator is.
    """

    name: str
    sources: tuple[Callable[[], Iterable[Any]], ...]
    keys: Sequence[Any] = ()
    write: Any = None
    is_free: bool = False

    def name_of(self, index: int) -> str:
        """Returns the name of the value at an index."""
        key = self.keys[index] if index < len(self.keys) else None
        if type(key) is not str:
            return self.name if key is None else f"{self.name}[{index}]"
        return ".".join(filter(None, (self.name, "" if key in UNNAMED else key)))


def read(sources: Iterable[Callable[[], Iterable[Any]]]) -> list[Any]:
    """Returns the values that sources hand out now."""
    return [*itertools.chain.from_iterable(map(operator.call, sources))]


class Snapshot:
    """All that is watched, as it was, in one list that is read and compared at once.

    No Python runs for each value. Those are looked at one by one that are other objects now, such
    as a number that is computed anew, and tensors if one of them is not where it was.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self.watched, found = watched, [read(each.sources) for each in watched]
        self.lengths = [*map(len, found)]
        pairs = zip(watched, self.lengths, strict=True)
        owners = ((each, index) for each, length in pairs for index in range(length))
        self.owners = [(at, *owner) for at, owner in enumerate(owners)]
        self.sources = [source for each in watched for source in each.sources]
        now = [*itertools.chain.from_iterable(found)]
        self.before = [whereabouts(value) or value for value in now]
        # those of no class of the program, weakly, and where they lie
        plain = (at for at, value in enumerate(now) if type(value) in PLAIN_TENSORS)
        plain = (at for at in plain if self.before[at].geometry)
        self.placed = {at: (ref(now[at]), *(place(now[at]) for place in PLACES)) for at in plain}
        self.forgotten: set[int] = set()
        self.forget(())

    def forget(self, indices: Iterable[int]) -> None:
        """Compares the values at some indices no longer."""
        self.forgotten.update(indices)
        placed = {at: each for at, each in self.placed.items() if at not in self.forgotten}
        each_once = {id(tensor): (tensor, *place) for tensor, *place in placed.values()}
        numbers = {identity: number for number, identity in enumerate(each_once)}
        self.positions = [(at, numbers[id(tensor)]) for at, (tensor, *_) in placed.items()]
        columns = ([row[n] for row in each_once.values()] for n in range(len(PLACES) + 1))
        self.tensors, *self.places = columns

    def change(self, by_step: bool = False) -> str | None:
        """Says which value is not as it was; `by_step`, of those that replays would leave."""
        now = read(self.sources)
        with DisableTorchFunction():
            return next(self._changes(now, by_step), None)

    def locations(self) -> Iterator["TensorLocation"]:
        """Yields where tensors are among the values, and where a gradient may be."""
        for at, watched, index in self.owners:
            before, is_value = self.before[at], index < len(watched.keys)
            if watched.write and is_value and (type(before) is Whereabouts or watched.is_free):
                storage = before.address if type(before) is Whereabouts else -1
                yield TensorLocation(watched, index, watched.name_of(index), storage, at)

    def _expected(self, now: list[Any]) -> list[Any]:
        """Returns the objects that are to be there; tensors if all of them are where they were."""
        expected, tensors = [*self.before], [*map(operator.call, self.tensors)]
        # one that is gone, or has other memory than the strided one, has no places
        with contextlib.suppress(TypeError, RuntimeError):
            if [[*map(place, tensors)] for place in PLACES] == self.places:
                for at, number in self.positions:
                    expected[at] = tensors[number]
        for at in self.forgotten:
            expected[at] = now[at]
        return expected

    def _changes(self, now: list[Any], by_step: bool) -> Iterator[str]:
        if len(now) != len(self.before):
            counts = zip(self.watched, self.lengths, strict=True)
            others = (each for each, length in counts if len(read(each.sources)) != length)
            # those that were empty hand out their names
            yield from (f"{each.name or read(each.sources)[0]} (other entries)" for each in others)
            yield "a container (other entries)"
        are_other = map(operator.is_not, now, self._expected(now))
        for at, watched, index in itertools.compress(self.owners, are_other):
            before, value = self.before[at], now[at]
            if is_same(before, value) or (by_step and watched.is_free):
                continue
            after = whereabouts(value) if by_step and type(before) is Whereabouts else None
            if after is None or after.identity != before.identity:
                are_plain = is_plain(before) and is_plain(value)
                text = f" ({shortened(before)}, now {shortened(value)})" if are_plain else ""
                yield watched.name_of(index) + text


@dataclass(eq=False)
class TensorLocation:
    """Where a tensor or a gradient is kept, and the address of the storage that it had, or -1."""

    watched: Watched
    index: int
    name: str
    storage: int
    # its index in the snapshot
    at: int

    def read(self) -> Any:
        """Returns what is there now."""
        return next(itertools.islice(read(self.watched.sources), self.index, None), None)

    def write(self, tensor: Any) -> None:
        """Puts a tensor there, or None."""
        self.watched.write(self.watched.keys[self.index], tensor)
