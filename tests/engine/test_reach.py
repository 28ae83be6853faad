"""What a function reaches: generators and modules in every place where Python keeps them."""

import abc
import collections
import functools
import gc
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.engine.pitfalls.program import Call, assert_exact, rows
from zoo.engine.reach import is_generator, reach
from zoo.verification.watch import Watch

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


def hooked(register: str, hook: Callable[..., Any]) -> nn.Module:
    model = nn.Linear(4, 4)
    getattr(model, register)(hook)
    return model


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
    "hook": lambda: hooked("register_forward_hook", lambda m, xs, y: stream and None),
    "pre-hook": lambda: hooked("register_forward_pre_hook", lambda m, xs: stream and None),
    "wrapped hook": lambda: hooked(
        "register_forward_hook", functools.wraps(named)(lambda *_: None)
    ),
    "method of a method": lambda: Owner().by_global,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_generator_is_found(place: Callable[[], Any]) -> None:
    assert [*reach([place()]).generators.values()] == [stream]


@pytest.mark.parametrize("generator", [
    torch.Generator(), random.Random(), numpy.random.default_rng(), numpy.random.RandomState(),
])  # fmt: skip
def test_generators_of_every_kind_go_on_as_without(generator: Any) -> None:
    def number() -> float:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return generator.random() if isinstance(generator, random.Random) else generator.uniform()

    def program(call: Call) -> Any:
        for seed in ("manual_seed", "seed"):
            if hasattr(generator, seed):
                getattr(generator, seed)(3)
                break
        else:
            generator.bit_generator.state = numpy.random.default_rng(3).bit_generator.state
        (x,) = rows()
        y = call(lambda x: (x * number()).sin().exp(), x)
        call(lambda y: (y * number()).sin().exp(), y).sum().backward()
        return x.grad, number()

    assert_exact(program)


@pytest.mark.parametrize("method", ["directly", "by_method", "by_property"])
@pytest.mark.parametrize("kind", [Owner, Heir])
def test_a_method_reaches_the_children_that_it_names_and_no_others(
    kind: type[Owner], method: str
) -> None:
    """Also where a class overrides what another names: cost is that of what may run."""
    model = kind()
    child = model.first if kind is Owner else model.second
    found = reach([getattr(model, method)])
    assert set(found.modules) == {model, child}
    assert [*found.generators.values()] == [child.stream]


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_modules_with_hooks_are_listed(register: str) -> None:
    model = nn.Sequential(nn.Tanh(), hooked(register, print))
    assert reach([model]).hooked == [model[1]]


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
        import tests.engine.test_reach as own  # noqa: PLC0415, PLW0406

        return own.stream

    def looked_up() -> Any:
        return sys.modules[__name__].stream

    assert reach((imported,)).generators
    assert reach((looked_up,)).generators


@pytest.mark.parametrize("none", [True, False])
def test_empty_places_in_a_module(none: bool) -> None:
    """register_module and register_parameter take None."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())
    model.register_module("empty", None)
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    assert set(reach([model if none else model.forward]).modules) == {model, *model[:2]}


def test_what_watches_a_second_run_is_not_put_back() -> None:
    """The engine's own counts, and those of `zoo.verify`."""
    watch = object.__new__(Watch)
    watch.outputs = {}
    assert not reach([closing(watch), closing(zoo.recompute)]).objects


def test_a_method_is_freed() -> None:
    """Names of a method are kept only as long as the method."""

    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().sin()

    zoo.recompute(Local(), *rows()).sum().backward()
    alive = weakref.ref(Local.forward)
    del Local
    gc.collect()
    assert alive() is None
