"""What a function reaches: generators and modules in every place where Python keeps them."""

import abc
import collections
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from zoo.measure.reach import is_generator, reach

stream = random.Random(0)


def named(x: Any) -> Any:
    return stream.random()


def by_inner_code(x: Any) -> Any:
    return [stream.random() for _ in (lambda: stream, x)]


class Owner(nn.Module):
    """Methods that name a child, through others; the two children have a generator each."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.stream, self.second.stream = random.Random(1), random.Random(2)

    def directly(self) -> Any:
        return self.first

    def by_method(self) -> Any:
        return self.directly()

    def by_property(self) -> Any:
        return self.property

    @property
    def property(self) -> Any:
        return self.by_method()

    def by_global(self) -> Any:
        return self.drawn()

    def drawn(self) -> Any:
        return stream.random()


class Heir(Owner):
    """Has another child in the place."""

    def directly(self) -> Any:
        return self.second


class Called:
    """Is called, and names a global there."""

    def __call__(self, x: Any) -> Any:
        return stream.random()


class Holding:
    def __init__(self, value: Any) -> None:
        self.value = value


def defaulted(x: Any, *, noise: random.Random = stream) -> Any:
    return noise


def closing(value: Any) -> Callable[[], Any]:
    return lambda: value


PLACES: dict[str, Callable[[], Any]] = {
    "global": lambda: named,
    "inner code": lambda: by_inner_code,
    "closure": lambda: closing(stream),
    "function in a closure": lambda: closing(closing(stream)),
    "default of a keyword": lambda: defaulted,
    "argument of a partial": lambda: functools.partial(print, stream),
    "keyword of a partial": lambda: functools.partial(print, end=stream),
    "partial": lambda: functools.partial(named, 1),
    "set": lambda: closing({stream}),
    "frozen set": lambda: closing(frozenset([stream])),
    "deque": lambda: closing(collections.deque([stream])),
    "tuple in a dict": lambda: closing({"it": (stream,)}),
    "object": lambda: Holding([stream]),
    "object in an object": lambda: Holding(Holding(stream)),
    "called object": Called,
    "method of a method": lambda: Owner().by_global,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_generator_is_found(place: Callable[[], Any]) -> None:
    assert id(stream) in reach([place()]).generators


def test_a_type_with_parameters_is_no_object() -> None:
    class Typed(nn.Module):
        kinds = (tuple[int, ...], Callable[[int], Any])

    assert not reach([Typed()]).objects


def test_the_randomness_of_the_system_has_no_state() -> None:
    assert not is_generator(random.SystemRandom())
    assert is_generator(random.Random())


def test_a_class_that_is_a_value_is_no_object() -> None:
    """What a class has cannot be cleared and filled again; also not one with a metaclass."""

    class Abstract(metaclass=abc.ABCMeta):
        value = 1

        @abc.abstractmethod
        def run(self) -> None: ...

    assert not reach([closing([Holding, Abstract])]).objects


def test_what_leads_to_itself_is_gone_through_once() -> None:
    values: list[Any] = [stream]
    values.append(values)
    thing = Holding(values)
    thing.itself = thing  # type: ignore[attr-defined]

    def function() -> Any:
        return function, thing

    assert [*reach([function]).generators.values()] == [stream]


def test_long_containers_are_not_gone_through() -> None:
    assert not reach([closing([stream] * 2000)]).generators


@pytest.mark.parametrize("wrap", [Holding, closing, lambda value: [value]])
def test_deep_structures_are_not_gone_through_to_their_end(wrap: Callable[[Any], Any]) -> None:
    """A linked list is longer than Python's stack."""
    value: Any = stream
    for _ in range(3000):
        value = wrap(value)
    assert not reach([value]).generators


def test_the_variables_of_a_function_and_of_classes_that_it_names() -> None:
    later: Any

    def function() -> Any:
        return Owner.scale, stream, later, random, named

    assert {name for _, name in reach([function]).variables} == {"scale", "stream", "later"}
    later = 1
    assert {name for _, name in reach([function]).variables} == {"scale", "stream", "later"}


def test_an_attribute_is_no_global_of_its_name() -> None:
    def attribute(x: Any) -> Any:
        return x.stream

    assert not reach((attribute,)).variables
    assert not reach((attribute,)).generators


def test_an_attribute_of_its_own_module_is_a_global() -> None:
    def imported() -> Any:
        import tests.measure.test_reach as own  # noqa: PLC0415, PLW0406

        return own.stream

    def looked_up() -> Any:
        return sys.modules[__name__].stream

    assert reach((imported,)).generators
    assert reach((looked_up,)).generators
