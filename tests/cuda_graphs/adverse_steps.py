"""Steps that an adversary of graphs would write: each reads something that changes, in its own way.

A program is made anew for each training. `read` is called in the step, and scales the loss or is
done beside it; `change` is called between two calls, or never, where the step itself changes it.
"""

import argparse
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import operator
import os
import random
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Read = Callable[[Any, "Training"], Any]


class Training:
    """A small model, its optimizer and a step whose loss is scaled by what a program reads."""

    def __init__(self, program: "Program") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 4))
        self.model.register_buffer("scale", torch.ones(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.program, self.kept = program, program.make()
        self.outside: list[Tensor] = []
        read, kept, model, optimizer = program.read, self.kept, self.model, self.optimizer
        training = self

        def step(x: Tensor) -> Tensor:
            weight = read(kept, training)
            loss = (1.0 if weight is None else weight) * model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.step: Any = program.step(self) if program.step is not None else step

    def change(self) -> None:
        """Changes what the step reads."""
        self.program.change(self.kept, self)


class Program(NamedTuple):
    """What a step reads, and how that changes after some calls.

    Attributes:
        step: makes the whole step of a training, where it is none that scales its loss.
    """

    make: Callable[[], Any]
    read: Read
    change: Callable[[Any, Training], object]
    step: Callable[[Training], Callable[[Tensor], Any]] | None = None


def nothing(kept: Any, training: Training) -> None:
    """Changes nothing: the step does it."""


def number(make: Callable[[], Any], read: Any, change: Any) -> Program:
    """A program whose number is kept by one object."""
    return Program(make, lambda kept, _: read(kept), lambda kept, _: change(kept))


class Holder:
    """Keeps a number in the ways that a class may."""

    of_class = 1.0
    __slots__ = ("__dict__", "__weakref__", "of_slot")

    def __init__(self) -> None:
        self.own = self._hidden = self.of_slot = 1.0

    @property
    def by_property(self) -> float:
        """The number."""
        return self._hidden

    @functools.cached_property
    def cached(self) -> float:
        """The number, as it was when it was read first."""
        return self._hidden

    @staticmethod
    def static() -> float:
        """The number of the class."""
        return Holder.of_class

    @classmethod
    def of_this_class(cls) -> float:
        """The number of the class."""
        return cls.of_class

    def method(self) -> float:
        """The number."""
        return self._hidden

    def __call__(self) -> float:
        return self._hidden

    def __float__(self) -> float:
        return self._hidden

    def __getitem__(self, key: object) -> float:
        return self._hidden

    def __len__(self) -> int:
        return int(2 * self._hidden)

    def __iter__(self) -> Iterator[float]:
        yield self._hidden

    def __mul__(self, other: Tensor) -> Tensor:
        return other * self._hidden


class Asking:
    """Hands out attributes of a dict, as configs of libraries do."""

    def __init__(self) -> None:
        object.__setattr__(self, "values", {"weight": 1.0})

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "values")[name]
        except KeyError:
            raise AttributeError(name) from None


class Meta(type):
    """A class of classes that keeps a number."""

    weight = 1.0

    @property
    def of_meta(cls) -> float:
        """The number."""
        return Meta.weight


class OfMeta(metaclass=Meta):
    """Has the number of its class of classes."""


class Descriptor:
    """Hands out a number of its own."""

    weight = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return Descriptor.weight


class Described:
    """Has a number by a descriptor."""

    weight = Descriptor()


@dataclasses.dataclass
class Settings:
    """Nested settings."""

    weight: float = 1.0
    inner: "Settings | None" = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Settings that are replaced."""

    weight: float = 1.0


class Mode(enum.Enum):
    """Ways to scale."""

    ONE = 1.0
    HALF = 0.5


class Flag(enum.IntFlag):
    """Ways to scale, as a number."""

    ONE = 1
    TWO = 2


class Pair(NamedTuple):
    """A named pair."""

    first: float
    second: float


class NoEquality:
    """Its comparison raises."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class TensorEquality(NoEquality):
    """Its comparison returns a tensor."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(3)

    __hash__ = None  # type: ignore[assignment]


class Endless(list):  # type: ignore[type-arg]
    """A list whose iteration does not end."""

    def __iter__(self) -> Iterator[float]:
        while True:
            yield list.__getitem__(self, 0)


class Recursive:
    """Asks itself for an attribute that is not there, without end."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self, f"{name}_")


class Lying:
    """Says that it is of another class."""

    weight = 1.0

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no class")


class OwnFloat(float):
    """A number that equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


def itself() -> dict[str, Any]:
    """Returns a dict in itself."""
    kept: dict[str, Any] = {"weight": 1.0}
    kept["self"] = [kept]
    return kept


def deep() -> Any:
    """Returns a number in forty lists, one in the other."""
    innermost: list[Any] = [1.0]
    outer = innermost
    for _ in range(40):
        outer = [outer]
    return outer, innermost


def innermost(outer: Any) -> float:
    """Returns the number in lists."""
    while isinstance(outer, list):
        outer = outer[0]
    return float(outer)


def namespace(**values: Any) -> types.SimpleNamespace:
    """Returns a namespace."""
    return types.SimpleNamespace(**values)


def in_file() -> Path:
    """Returns a file with a number."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write("1.0")
    return Path(file.name)


GLOBAL = {"weight": 1.0}
# what `set_global` sets
WEIGHT = 1.0
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("weight", default=1.0)
LOCAL = threading.local()


def helper() -> float:
    """Reads a global number."""
    return WEIGHT


def through(function: Callable[[], float] = helper) -> float:
    """Calls a default."""
    return function()


def defaulted(values: Any = [1.0]) -> float:  # noqa: B006 - it is what is changed
    """Returns what its default has."""
    return float(values[0])


def reset() -> None:
    """Sets what is not made anew."""
    GLOBAL["weight"] = Holder.of_class = Meta.weight = Descriptor.weight = 1.0
    set_global(1.0)
    VARIABLE.set(1.0)
    LOCAL.weight = 1.0
    os.environ["ADVERSE_WEIGHT"] = "1.0"
    defaulted.__defaults__[0][0] = 1.0  # type: ignore[index]
    cached.cache_clear()


@functools.lru_cache
def cached() -> float:
    """Returns a global number, as it was when this was called first."""
    return GLOBAL["weight"]


def set_global(value: float) -> None:
    """Sets a global number."""
    globals()["WEIGHT"] = value


def half(name: str) -> Callable[[Any], None]:
    """Halves an attribute."""
    return lambda kept: setattr(kept, name, getattr(kept, name) / 2)


def each(kept: Any, count: int, training: Training, do: Callable[[], object]) -> None:
    """Does something in each `count`-th call, which the step counts itself."""
    kept["calls"] += 1
    if kept["calls"] % count == 0:
        do()


class Deep:
    """Keeps a number behind objects that no code names on the way."""

    def __init__(self, value: Any) -> None:
        self.__dict__["a" + str(id(self))] = value

    def get(self) -> Any:
        """Returns what it keeps."""
        (value,) = self.__dict__.values()
        return value

    def put(self, value: Any) -> None:
        """Keeps something else."""
        (key,) = self.__dict__
        self.__dict__[key] = value


def step_reading(
    kept: Deep, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor], Tensor]:
    """Returns a training step whose loss is scaled by a number that two such objects keep."""

    def step(x: Tensor) -> Tensor:
        loss = kept.get().get() * model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


ATTRIBUTES = {
    "own": number(Holder, lambda one: one.own, half("own")),
    "of the class": number(
        Holder, lambda one: one.of_class, lambda one: setattr(Holder, "of_class", 0.5)
    ),
    "of a class that is named": number(
        lambda: None, lambda one: Holder.of_class, lambda one: setattr(Holder, "of_class", 0.5)
    ),
    "in front of that of the class": number(
        Holder, lambda one: one.of_class, lambda one: setattr(one, "of_class", 0.5)
    ),
    "slot": number(Holder, lambda one: one.of_slot, half("of_slot")),
    "property": number(Holder, lambda one: one.by_property, half("_hidden")),
    "cached property": number(
        Holder, lambda one: one.cached, lambda one: one.__dict__.update(cached=0.5)
    ),
    "static method": number(
        Holder, lambda one: one.static(), lambda one: setattr(Holder, "of_class", 0.5)
    ),
    "class method": number(
        Holder, lambda one: one.of_this_class(), lambda one: setattr(Holder, "of_class", 0.5)
    ),
    "method": number(Holder, lambda one: one.method(), half("_hidden")),
    "getattr": number(Holder, lambda one: getattr(one, "_hid" + "den"), half("_hidden")),
    "attrgetter": number(Holder, operator.attrgetter("own"), half("own")),
    "vars": number(Holder, lambda one: vars(one)["own"], half("own")),
    "all of vars": number(Holder, lambda one: sum(vars(one).values()), half("own")),
    "__getattr__": number(
        Asking, lambda one: one.weight, lambda one: one.values.update(weight=0.5)
    ),
    "of a class of classes": number(
        lambda: OfMeta, lambda one: one.of_meta, lambda one: setattr(Meta, "weight", 0.5)
    ),
    "descriptor": number(
        Described, lambda one: one.weight, lambda one: setattr(Descriptor, "weight", 0.5)
    ),
    "other class": number(
        type("One", (), {"weight": 1.0}),
        lambda one: one.weight,
        lambda one: setattr(one, "__class__", type("Two", (), {"weight": 0.5})),
    ),
    "other method": number(
        Holder, lambda one: one.method(), lambda one: setattr(one, "method", lambda: 0.5)
    ),
    "nowhere named": number(
        lambda: Deep(Deep(Deep(1.0))),
        lambda one: one.get().get().get(),
        lambda one: one.get().get().put(0.5),
    ),
    "of a module": Program(
        lambda: None,
        lambda one, training: getattr(training.model[1], "gain", 1.0),
        lambda one, training: setattr(training.model[1], "gain", 0.5),
    ),
}
OPERATORS = {
    "call": number(Holder, lambda one: one(), half("_hidden")),
    "float": number(Holder, float, half("_hidden")),
    "item": number(Holder, lambda one: one["any"], half("_hidden")),
    "len": number(Holder, len, half("_hidden")),
    "iteration": number(Holder, sum, half("_hidden")),
    "product": number(Holder, lambda one: one * torch.ones(()), half("_hidden")),
}
CONTAINERS = {
    "list": number(lambda: [1.0], lambda one: one[0], lambda one: operator.setitem(one, 0, 0.5)),
    "deque": number(
        lambda: collections.deque([1.0]), lambda one: one[0], lambda one: one.appendleft(0.5)
    ),
    "default dict": number(
        lambda: collections.defaultdict(lambda: 1.0),
        lambda one: one.get("weight", 1.0),
        lambda one: one.update(weight=0.5),
    ),
    "chained maps": number(
        lambda: collections.ChainMap({}, {"weight": 1.0}),
        lambda one: one["weight"],
        lambda one: one.update(weight=0.5),
    ),
    "user dict": number(
        lambda: collections.UserDict(weight=1.0),
        lambda one: one["weight"],
        lambda one: one.update(weight=0.5),
    ),
    "counter": number(
        lambda: collections.Counter("a"), lambda one: one["a"], lambda one: one.update("aa")
    ),
    "set": number(lambda: {1}, len, lambda one: one.add(2)),
    "keys of a dict": number(lambda: {1.0: None}, sum, lambda one: one.update({0.5: one.pop(1.0)})),
    "order of a dict": number(
        lambda: {"a": 1.0, "b": 0.5},
        lambda one: next(iter(one.values())),
        lambda one: one.update(a=one.pop("a")),
    ),
    "tuple that is replaced": number(
        lambda: {"pair": (1.0, 2.0)},
        lambda one: one["pair"][0],
        lambda one: one.update(pair=(0.5, 2.0)),
    ),
    "named tuple": number(
        lambda: {"pair": Pair(1.0, 2.0)},
        lambda one: one["pair"].first,
        lambda one: one.update(pair=Pair(0.5, 2.0)),
    ),
    "array": number(
        lambda: numpy.ones(3), lambda one: float(one[0]), lambda one: operator.setitem(one, 0, 0.5)
    ),
    "large array": number(
        lambda: numpy.ones(100_000),
        lambda one: float(one[7]),
        lambda one: operator.setitem(one, 7, 0.5),
    ),
    "long list": number(
        lambda: [1.0] * 10_000, lambda one: one[7], lambda one: operator.setitem(one, 7, 0.5)
    ),
    "byte array": number(
        lambda: bytearray(b"\2"), lambda one: one[0] / 2, lambda one: operator.setitem(one, 0, 1)
    ),
    "memory view": number(
        lambda: memoryview(bytearray(b"\2")),
        lambda one: one[0] / 2,
        lambda one: operator.setitem(one, 0, 1),
    ),
    "in itself": number(
        itself, lambda one: one["self"][0]["weight"], lambda one: one.update(weight=0.5)
    ),
    "deep": number(
        deep, lambda one: innermost(one[0]), lambda one: operator.setitem(one[1], 0, 0.5)
    ),
}
NUMBERS = {
    "of another sign": number(
        lambda: {"weight": 0.0}, lambda one: one["weight"], lambda one: one.update(weight=-0.0)
    ),
    "of another type": Program(
        lambda: {"by": 1},
        lambda one, training: None,
        lambda one, _: one.update(by=1.5),
        lambda training: lambda x: training.model(x).sum() * training.kept["by"],
    ),
    "NumPy scalar": number(
        lambda: {"weight": numpy.float32(1)},
        lambda one: float(one["weight"]),
        lambda one: one.update(weight=numpy.float32(0.5)),
    ),
    "decimal": number(
        lambda: {"weight": Decimal(1)},
        lambda one: float(one["weight"]),
        lambda one: one.update(weight=Decimal("0.5")),
    ),
    "fraction": number(
        lambda: {"weight": Fraction(1)},
        lambda one: float(one["weight"]),
        lambda one: one.update(weight=Fraction(1, 2)),
    ),
    "that equals all": number(
        lambda: {"weight": OwnFloat(1)},
        lambda one: one["weight"] + 0.0,
        lambda one: one.update(weight=OwnFloat(0.5)),
    ),
    "text": number(
        lambda: {"weight": "1.0"},
        lambda one: float(one["weight"]),
        lambda one: one.update(weight="0.5"),
    ),
    "nan": number(
        lambda: {"weight": 1.0, "other": float("nan")},
        lambda one: one["weight"] if one["other"] != one["other"] else 0.0,
        lambda one: one.update(weight=0.5),
    ),
}
SETTINGS = {
    "data class": number(Settings, lambda one: one.weight, half("weight")),
    "nested data class": number(
        lambda: Settings(inner=Settings(inner=Settings())),
        lambda one: one.inner.inner.weight,
        lambda one: setattr(one.inner.inner, "weight", 0.5),
    ),
    "frozen data class": number(
        lambda: {"settings": Frozen()},
        lambda one: one["settings"].weight,
        lambda one: one.update(settings=Frozen(0.5)),
    ),
    "enum": number(
        lambda: {"mode": Mode.ONE},
        lambda one: one["mode"].value,
        lambda one: one.update(mode=Mode.HALF),
    ),
    "flag": number(
        lambda: {"mode": Flag.ONE},
        lambda one: int(one["mode"]),
        lambda one: one.update(mode=Flag.TWO),
    ),
    "namespace": number(
        lambda: namespace(loss=namespace(weight=1.0)),
        lambda one: one.loss.weight,
        lambda one: setattr(one.loss, "weight", 0.5),
    ),
    "namespace of arguments": number(
        lambda: argparse.Namespace(alpha=1.0), lambda one: one.alpha, half("alpha")
    ),
    "environment": number(
        lambda: None,
        lambda one: float(os.environ["ADVERSE_WEIGHT"]),
        lambda one: os.environ.update(ADVERSE_WEIGHT="0.5"),
    ),
    "file": number(in_file, lambda one: float(one.read_text()), lambda one: one.write_text("0.5")),
    "context variable": number(
        lambda: None, lambda one: VARIABLE.get(), lambda one: VARIABLE.set(0.5)
    ),
    "of a thread": number(
        lambda: None, lambda one: LOCAL.weight, lambda one: setattr(LOCAL, "weight", 0.5)
    ),
    "module": number(
        lambda: types.ModuleType("settings"),
        lambda one: vars(one).get("weight", 1.0),
        lambda one: setattr(one, "weight", 0.5),
    ),
    "weak reference": number(
        lambda: (owner := Holder(), weakref.ref(owner)),
        lambda one: one[1]().own,
        lambda one: setattr(one[0], "own", 0.5),
    ),
    "weak proxy": number(
        lambda: (owner := Holder(), weakref.proxy(owner)),
        lambda one: one[1].own,
        lambda one: setattr(one[0], "own", 0.5),
    ),
}


def sent() -> Any:
    """Returns a generator that hands out the number that it was sent last."""

    def numbers() -> Any:
        weight = 1.0
        while True:
            weight = (yield weight) or weight

    started = numbers()
    next(started)
    return started


FUNCTIONS = {
    "global": number(lambda: None, lambda one: WEIGHT, lambda one: set_global(0.5)),
    "global of a helper": number(lambda: None, lambda one: helper(), lambda one: set_global(0.5)),
    "function as a default": number(
        lambda: None, lambda one: through(), lambda one: set_global(0.5)
    ),
    "default": number(
        lambda: None,
        lambda one: defaulted(),
        lambda one: operator.setitem(defaulted.__defaults__[0], 0, 0.5),  # type: ignore[index]
    ),
    "other default": number(
        lambda: lambda weight=1.0: weight,
        lambda one: one(),
        lambda one: setattr(one, "__defaults__", (0.5,)),
    ),
    "other code": number(
        lambda: lambda: 1.0,
        lambda one: one(),
        lambda one: setattr(one, "__code__", (lambda: 0.5).__code__),
    ),
    "cache": number(
        lambda: None,
        lambda one: cached(),
        lambda one: (GLOBAL.update(weight=0.5), cached.cache_clear()),
    ),
    "partial": number(
        lambda: functools.partial(dict.get, {"weight": 1.0}, "weight"),
        lambda one: one(),
        lambda one: one.args[0].update(weight=0.5),
    ),
    "bound method": number(
        lambda: {"weight": 1.0}.get,
        lambda one: one("weight"),
        lambda one: one.__self__.update(weight=0.5),
    ),
    "attribute of a function": number(
        lambda: types.FunctionType(helper.__code__, globals()),
        lambda one: getattr(one, "weight", 1.0),
        lambda one: setattr(one, "weight", 0.5),
    ),
    "closure in a dict": number(
        lambda: (kept := {"weight": 1.0}, {"read": lambda: kept["weight"]}),
        lambda one: one[1]["read"](),
        lambda one: one[0].update(weight=0.5),
    ),
    "coroutine": number(sent, lambda one: one.send(None), lambda one: one.send(0.5)),
}


ODD = {
    "no equality": number(NoEquality, lambda one: one.weight, half("weight")),
    "equality that is a tensor": number(TensorEquality, lambda one: one.weight, half("weight")),
    "endless list": number(
        lambda: Endless([1.0]), lambda one: one[0], lambda one: operator.setitem(one, 0, 0.5)
    ),
    "endless attributes": number(Recursive, lambda one: one.weight, half("weight")),
    "another class": number(Lying, lambda one: one.weight, lambda one: setattr(one, "weight", 0.5)),
    "endless iterator": number(
        lambda: (itertools.repeat(1.0), [1.0]),
        lambda one: next(one[0]) * one[1][0],
        lambda one: operator.setitem(one[1], 0, 0.5),
    ),
}


def of_training(change: Callable[[Training], object]) -> Program:
    """A program that changes the model, its optimizer or torch, and no number of its own."""
    return Program(lambda: None, lambda *_: None, lambda _, training: change(training))


def hooked(training: Training) -> None:
    """Hooks the modules of all programs; removed with the training."""
    training.kept = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 0.5 if isinstance(module, nn.Tanh) else None
    )


def replace_weight(training: Training) -> None:
    """Gives a module another parameter with the same memory."""
    training.model[0].weight = nn.Parameter(training.model[0].weight.data)


def wrapped(module: nn.Module, factor: float) -> None:
    """Puts another forward in the place of a module's."""
    forward = module.forward
    module.forward = lambda x: factor * forward(x)  # type: ignore[method-assign]


MODEL = {
    "forward": of_training(lambda training: wrapped(training.model[0], 0.5)),
    "module": of_training(lambda training: operator.setitem(training.model, 1, nn.ReLU())),
    "module appended": of_training(lambda training: training.model.append(nn.Tanh())),
    "eval of a module": of_training(
        lambda training: (setattr(training.model[2], "p", 0.5), training.model[2].eval())
    ),
    "rate of a dropout": of_training(lambda training: setattr(training.model[2], "p", 1.0)),
    "frozen": of_training(lambda training: training.model[0].weight.requires_grad_(False)),
    "frozen and not": Program(
        lambda: None,
        lambda *_: None,
        lambda _, training: training.model[0].requires_grad_(
            not training.model[0].weight.requires_grad
        ),
    ),
    "other parameter": of_training(replace_weight),
    "other memory": of_training(
        lambda training: setattr(training.model[0].weight, "data", torch.ones(16, 8))
    ),
    "no bias": of_training(lambda training: setattr(training.model[3], "bias", None)),
    "tied": of_training(
        lambda training: setattr(training.model[3], "bias", nn.Parameter(torch.zeros(4)))
    ),
    "buffer resized": Program(
        lambda: None,
        lambda _, training: training.model.scale.sum(),
        lambda _, training: training.model.scale.resize_(3).fill_(0.5),
    ),
    "buffer smaller": Program(
        lambda: None,
        lambda _, training: training.model.scale.sum(),
        lambda _, training: training.model.scale.resize_(1),
    ),
    "buffer filled": Program(
        lambda: None,
        lambda _, training: training.model.scale.sum(),
        lambda _, training: training.model.scale.fill_(0.5),
    ),
    "buffer negated": Program(
        lambda: None,
        lambda _, training: training.model.scale.sum(),
        lambda _, training: setattr(
            training.model, "scale", torch._neg_view(training.model.scale.detach())
        ),
    ),
    "buffer of another class": Program(
        lambda: None,
        lambda _, training: torch.mul(training.model.scale, 1.0).as_subclass(Tensor).sum(),
        lambda _, training: setattr(
            training.model, "scale", training.model.scale.as_subclass(Halved)
        ),
    ),
    "buffer that is sparse": Program(
        lambda: {"made": torch.eye(6).to_sparse()},
        lambda *_: None,
        lambda kept, _: kept.update(made=(torch.eye(6) / 2).to_sparse()),
        lambda training: product_step(training, lambda kept: kept["made"]),
    ),
    "buffer strided": Program(
        lambda: None,
        lambda _, training: training.model.scale[0],
        lambda _, training: training.model.scale.set_(torch.tensor([0.5, 2.0, 3.0])[1:]),
    ),
    "other tensor in an attribute": Program(
        lambda: None,
        lambda _, training: getattr(training.model, "factor", 1.0),
        lambda _, training: setattr(training.model, "factor", torch.full((), 0.5)),
    ),
    "other class of a module": of_training(
        lambda training: setattr(training.model[1], "__class__", nn.Sigmoid)
    ),
}
HOOKS = {
    "parameter": of_training(
        lambda training: training.model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    ),
    "accumulated gradient": of_training(
        lambda training: training.model[0].weight.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", parameter.grad.mul_(0.5))
        )
    ),
    "forward": of_training(
        lambda training: training.model[0].register_forward_hook(lambda m, a, out: out * 0.5)
    ),
    "before the forward": of_training(
        lambda training: training.model[0].register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
    ),
    "backward": of_training(
        lambda training: training.model[3].register_full_backward_hook(
            lambda m, inputs, outputs: (inputs[0] * 0.5,)
        )
    ),
    "all modules": of_training(hooked),
    "in another order": Program(
        lambda: None,
        lambda *_: None,
        lambda _, training: training.model[1]._forward_hooks.move_to_end(
            next(iter(training.model[1]._forward_hooks))
        ),
        lambda training: twice_hooked(training),  # noqa: PLW0108 - it comes later
    ),
    "optimizer": of_training(
        lambda training: training.optimizer.register_step_pre_hook(
            lambda *_: setattr(training.model[0].bias, "grad", None)
        )
    ),
    "after the optimizer": of_training(
        lambda training: training.optimizer.register_step_post_hook(
            lambda *_: training.model[0].weight.data.mul_(0.5)
        )
    ),
    "hook that reads a number": Program(
        lambda: {"weight": 1.0},
        lambda kept, training: None,
        lambda kept, _: kept.update(weight=0.5),
        lambda training: reading_hook(training),  # noqa: PLW0108 - it comes later
    ),
}


def reading_hook(training: Training) -> Any:
    """Returns a step whose hook scales a gradient by a number."""
    kept, step = training.kept, plain_step(training)
    training.model[0].weight.register_hook(lambda gradient: gradient * kept["weight"])
    return step


def twice_hooked(training: Training) -> Any:
    """Returns a step of a model with two hooks."""
    training.model[1].register_forward_hook(lambda module, _, output: output * 0.5)
    training.model[1].register_forward_hook(lambda module, _, output: output + 1.0)
    return plain_step(training)


def plain_step(training: Training, **options: Any) -> Any:
    """Returns an ordinary step; `after` is called at its end."""
    model, optimizer = training.model, training.optimizer
    after = options.get("after", lambda loss: None)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(loss)
        return loss

    return step


def groups(**values: Any) -> Program:
    """A program that changes values of the optimizer's groups."""
    return of_training(lambda training: training.optimizer.param_groups[0].update(values))


def clipped(training: Training) -> Any:
    """Returns a step that clips gradients to a length that changes."""
    model, optimizer, kept = training.model, training.optimizer, training.kept

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), kept.get().get())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def two_optimizers(training: Training) -> Any:
    """Returns a step of an optimizer that the graphed step is not told of."""
    other = torch.optim.SGD(training.model[3].parameters(), 0.05)
    training.kept.put(other)
    model, optimizer, kept = training.model, training.optimizer, training.kept

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        kept.get().step()
        model.zero_grad()
        return loss

    return step


OPTIMIZER = {
    "rate": groups(lr=0.01),
    "momentum": groups(momentum=0.5),
    "weight decay": groups(weight_decay=0.1),
    "nesterov": groups(nesterov=True),
    "for each": groups(foreach=False),
    "group added": of_training(
        lambda training: training.optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(1))]}
        )
    ),
    "scheduler": of_training(
        lambda training: torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda _: 0.5)
    ),
    "state cleared": of_training(lambda training: training.optimizer.state.clear()),
    "state loaded": of_training(
        lambda training: training.optimizer.load_state_dict(training.optimizer.state_dict())
    ),
    "state halved": of_training(
        lambda training: [
            state["momentum_buffer"].mul_(0.5) for state in training.optimizer.state.values()
        ]
    ),
    "parameters of a group": of_training(
        lambda training: training.optimizer.param_groups[0]["params"].pop()
    ),
    "other step": of_training(lambda training: setattr(training.optimizer, "step", lambda: None)),
    "maximized": groups(maximize=True),
    "one that is not told of": Program(
        lambda: Deep(None),
        lambda *_: None,
        lambda kept, _: kept.get().param_groups[0].update(lr=0.5),
        two_optimizers,
    ),
    "length of gradients": Program(
        lambda: Deep(Deep(0.01)), lambda *_: None, lambda kept, _: kept.get().put(0.001), clipped
    ),
    "gradients left": of_training(
        lambda training: training.model(torch.ones(2, 8)).sum().backward()
    ),
}
TORCH = {
    "default type": of_training(lambda training: torch.set_default_dtype(torch.float64)),
    "threads": of_training(lambda training: torch.set_num_threads(torch.get_num_threads() + 1)),
    "deterministic": of_training(lambda training: torch.use_deterministic_algorithms(True)),
    "function of torch": of_training(lambda training: setattr(F, "tanh", torch.relu)),
    "function of tensors": Program(
        lambda: None,
        lambda *_: None,
        lambda _, training: setattr(nn.Tanh, "forward", lambda self, x: torch.relu(x)),
    ),
    "anomalies": of_training(lambda training: torch.autograd.set_detect_anomaly(True)),
    "products": of_training(lambda training: torch.set_float32_matmul_precision("medium")),
}


def filling(training: Training) -> Any:
    """Returns a step that puts its loss into a list."""
    kept = training.kept
    return plain_step(training, after=lambda loss: kept.append(loss.detach().clone()))


def filling_deep(training: Training) -> Any:
    """Returns a step that puts its loss into a list which no guard sees."""
    kept = training.kept
    return plain_step(training, after=lambda loss: kept.get().get().append(loss.detach().clone()))


def averaged(training: Training, count: int) -> Any:
    """Returns a step that averages weights in each `count`-th call."""
    weight = training.model[0].weight
    average = weight.detach().clone()
    training.outside.append(average)
    kept = training.kept
    return plain_step(
        training,
        after=lambda _: each(kept, count, training, lambda: average.lerp_(weight.detach(), 0.5)),
    )


def counted(calls: Any, count: int, training: Training) -> Any:
    """Returns a step that averages weights in each `count`-th call, by an iterator."""
    weight = training.model[0].weight
    average = weight.detach().clone()
    training.outside.append(average)

    def after(_: Tensor) -> None:
        if next(calls) % count == 0:
            average.lerp_(weight.detach(), 0.5)

    return plain_step(training, after=after)


def accumulating(training: Training, count: int) -> Any:
    """Returns a step that updates weights in each `count`-th call."""
    model, optimizer, kept = training.model, training.optimizer, training.kept

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        kept["calls"] += 1
        if kept["calls"] % count == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def counting(make: Callable[[Training], Any]) -> Program:
    """A program whose step counts."""
    return Program(lambda: {"calls": 0}, lambda *_: None, nothing, make)


def carrying(training: Training) -> Any:
    """Returns a step that carries a state from call to call, in memory of its own each time."""
    model, optimizer, kept = training.model, training.optimizer, training.kept

    def step(x: Tensor) -> Tensor:
        output = model(x) + 0.5 * kept["state"]
        kept["state"] = output.detach()
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    return step


def last(training: Training) -> Any:
    """Returns a step that leaves its output in an attribute."""
    kept = training.kept
    return plain_step(training, after=lambda loss: setattr(kept, "last", loss.detach()))


STEPS = {
    "counter": number(lambda: itertools.count(2), lambda one: 1.0 / next(one), lambda one: None),
    "numbers of a list": number(
        lambda: iter([1.0 / n for n in range(1, 100)]), next, lambda one: None
    ),
    "in turn": number(lambda: itertools.cycle([1.0, 0.5]), next, lambda one: None),
    "in turn of five": number(
        lambda: itertools.cycle([1.0, 1.0, 1.0, 1.0, 0.5]), next, lambda one: None
    ),
    "rotated deque": number(
        lambda: collections.deque([1.0, 1.0, 0.5]),
        lambda one: (one.rotate(), one[0])[1],
        lambda one: None,
    ),
    "generator": number(lambda: (0.5**n for n in range(100)), next, lambda one: None),
    "generator with a late change": number(
        lambda: (1.0 if n < 6 else 0.5 for n in range(100)), next, lambda one: None
    ),
    "values of a dict": number(
        lambda: iter({n: 1.0 if n < 6 else 0.5 for n in range(100)}.values()),
        next,
        lambda one: None,
    ),
    "pairs of iterators": number(
        lambda: zip(itertools.count(), [1.0] * 6 + [0.5] * 90, strict=False),
        lambda one: next(one)[1],
        lambda one: None,
    ),
    "class of tensors": Program(
        lambda: [1.0],
        lambda one, training: one[0] * Marked(training.model.scale * 1.0).as_subclass(Tensor)[0],
        lambda one, _: operator.setitem(one, 0, 0.5),
    ),
    "in a late turn": number(lambda: itertools.cycle([1.0] * 6 + [0.5]), next, lambda one: None),
    "random number of a class that is not pickled": Program(
        lambda: type("Own", (random.Random,), {})(0), lambda one, _: one.random(), nothing
    ),
    "generator of the system": number(
        lambda: (random.SystemRandom(), [1.0]),
        lambda one: one[1][0] * (one[0].random() >= 0.0),
        lambda one: operator.setitem(one[1], 0, 0.5),
    ),
    "popped": number(
        lambda: [1.0 / n for n in range(1, 100)], lambda one: one.pop(), lambda one: None
    ),
    "list that is filled": Program(list, lambda *_: None, nothing, filling),
    "deep list that is filled": Program(
        lambda: Deep(Deep([])), lambda *_: None, nothing, filling_deep
    ),
    "short deque that is filled": Program(
        lambda: Deep(Deep(collections.deque(maxlen=2))), lambda *_: None, nothing, filling_deep
    ),
    **{
        f"average in each {count}": counting(functools.partial(averaged, count=count))
        for count in (2, 3, 7)
    },
    **{
        f"update in each {count}": counting(functools.partial(accumulating, count=count))
        for count in (2, 3, 5)
    },
    **{
        f"average by a count of {count}": Program(
            itertools.count,
            lambda *_: None,
            nothing,
            lambda training, count=count: counted(training.kept, count, training),
        )
        for count in (2, 3, 10)
    },
    "carried state": Program(
        lambda: {"state": torch.zeros(6, 4)},
        lambda *_: None,
        lambda kept, _: kept.update(state=torch.zeros(6, 4)),
        carrying,
    ),
    "random number": Program(lambda: None, lambda *_: float(numpy.random.rand()), nothing),
}


def chosen(make: Callable[[], Any]) -> Program:
    """A program whose step reads one of two tensors that no guard sees."""
    return Program(
        lambda: Deep([*make(), 0]),
        lambda kept, _: kept.get()[kept.get()[-1]],
        lambda kept, _: operator.setitem(kept.get(), -1, 1),
    )


def dropping(training: Training) -> Any:
    """Returns a step that adds to gradients, and may drop them, by which no kernel runs."""
    model, kept = training.model, training.kept

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None if kept.get().get() else parameter.grad
        return loss

    return step


def product_step(training: Training, find: Callable[[Any], Tensor]) -> Any:
    """Returns a step that multiplies outputs by a sparse tensor."""
    model, optimizer, kept = training.model, training.optimizer, training.kept

    def step(x: Tensor) -> Tensor:
        loss = torch.sparse.mm(find(kept), model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def filled(kept: Any, training: Training) -> Tensor:
    """Returns one of two tensors that were empty first."""
    one, two = torch.empty(()), torch.empty(())
    torch._foreach_copy_([one, two], [*training.model.scale])
    return (one.mul_(1.0), two.mul_(0.5))[kept.get().get()]


TENSORS = {
    "another one that was empty first": Program(
        lambda: Deep(Deep(0)), filled, lambda kept, _: kept.get().put(1)
    ),
    "another one that is sparse": Program(
        lambda: Deep([torch.eye(6).to_sparse(), (torch.eye(6) / 2).to_sparse(), 0]),
        lambda *_: None,
        lambda kept, _: operator.setitem(kept.get(), -1, 1),
        lambda training: product_step(training, lambda kept: kept.get()[kept.get()[-1]]),
    ),
    "another one": chosen(lambda: (torch.ones(()), torch.full((), 0.5))),
    "another part": chosen(lambda: torch.tensor([1.0, 0.5]).unbind()),
    "another shape": chosen(lambda: (torch.ones(()), torch.full((1,), 0.5))),
    "gradients that are dropped": Program(
        lambda: Deep(Deep(False)), lambda *_: None, lambda kept, _: kept.get().put(True), dropping
    ),
}


class Marked(Tensor):
    """A tensor that may be marked."""


class Halved(Tensor):
    """A tensor that is halved where it is multiplied."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) * 0.5 if func is torch.mul else result


class Reversed(Tensor):
    """A tensor whose products are halved."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 0.5 if func is F.linear else result


def scaled_by_mark(training: Training) -> Any:
    """Returns a step that reads a number on its batch."""
    model, optimizer = training.model, training.optimizer

    def step(x: Tensor) -> Tensor:
        loss = getattr(x, "weight", 1.0) * model(x).square().mean()
        loss = loss.as_subclass(Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def of_batch(change: Callable[[Tensor], Tensor]) -> Program:
    """A program whose batches change."""
    return Program(
        lambda: {"batch": lambda x: x},
        lambda *_: None,
        lambda kept, _: kept.update(batch=change),
        scaled_by_mark,
    )


def with_table(training: Training) -> Any:
    """Returns a step that makes a table anew where the batch is longer."""
    model, optimizer, kept = training.model, training.optimizer, training.kept

    def step(x: Tensor) -> Tensor:
        if kept["table"] is None or len(kept["table"]) < len(x):
            kept["table"] = torch.arange(len(x), dtype=torch.float32)[:, None].cos()
        loss = model(x * kept["table"][: len(x)]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def marked(x: Tensor, kind: type[Tensor] = Tensor, **marks: Any) -> Tensor:
    """Returns a batch with a mark."""
    x = x.as_subclass(kind)
    for name, value in marks.items():
        setattr(x, name, value)
    return x


BATCHES = {
    "mark": of_batch(lambda x: marked(x, weight=0.5)),
    "subclass": of_batch(lambda x: marked(x, Marked)),
    "mark of a subclass": of_batch(lambda x: marked(x, Marked, weight=0.5)),
    "subclass that halves": of_batch(lambda x: marked(x, Reversed)),
    "tensor as a mark": of_batch(lambda x: marked(x, weight=torch.full((), 0.5))),
    "strides": of_batch(lambda x: x.t().contiguous().t()),
    "type": of_batch(lambda x: x.clone().detach().requires_grad_(False)),
    "parameter": of_batch(lambda x: nn.Parameter(x, requires_grad=False)),
    "view": of_batch(lambda x: torch.cat([x, x])[: len(x)]),
    "offset": of_batch(lambda x: torch.cat([x, x])[len(x) :]),
    "fewer": of_batch(lambda x: x[:3]),
    "more than a table has": Program(
        lambda: {"batch": lambda x: x, "table": None},
        lambda *_: None,
        lambda kept, _: kept.update(batch=lambda x: torch.cat([x, x])),
        lambda training: with_table(training),  # noqa: PLW0108 - it comes later
    ),
}
KINDS: dict[str, dict[str, Program]] = {
    "attributes": ATTRIBUTES,
    "operators": OPERATORS,
    "containers": CONTAINERS,
    "numbers": NUMBERS,
    "settings": SETTINGS,
    "functions": FUNCTIONS,
    "odd objects": ODD,
    "model": MODEL,
    "hooks": HOOKS,
    "optimizer": OPTIMIZER,
    "torch": TORCH,
    "steps": STEPS,
    "tensors": TENSORS,
    "batches": BATCHES,
}
