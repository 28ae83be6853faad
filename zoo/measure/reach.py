"""What functions can reach: modules, objects, generators and variables that they may change.

Nothing in Python lists it. So a function is read: whom a bound method belongs to, what a closure
holds, which globals the code names. What is reached by other ways (a registry looked up by a
string, what a generator function goes through) is not found.
"""

import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# what torch keeps in each module itself
BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
LONG = 1000
DEEP = 4
PLAIN = int | float | str | bytes | bool | None | torch.dtype | torch.device
CONTAINERS = (list, tuple, set, frozenset, dict, deque)
LIBRARIES = frozenset({"torch", "numpy", "einops"}) | sys.stdlib_module_names
OURS = ("zoo.engine.", "zoo.measure.", "zoo.verification.", "zoo.verify")
OF_GLOBALS = frozenset(
    (
        "LOAD_GLOBAL",
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
        "LOAD_NAME",
        "LOAD_FROM_DICT_OR_GLOBALS",  # from Python 3.12 on
    )
)
# code that names one of these gets at modules, maybe its own, whose attributes are its globals
OF_MODULES = frozenset(("modules", "import_module"))
FUNCTIONS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial,
)  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """A variable of a function: a cell of its closure, a global, an attribute, its defaults."""

    name: str
    holder: Any

    def read(self) -> Any:
        """Returns its value, None when it is unbound."""
        if isinstance(self.holder, types.CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return None
        if isinstance(self.holder, dict):
            return self.holder.get(self.name)
        return getattr(self.holder, self.name, None)

    def write(self, value: Any) -> None:
        """Binds it to a value."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)


@dataclass
class Reached:
    """What was found, each once."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)
    generators: dict[int, Any] = field(default_factory=dict)
    variables: dict[tuple[int, str], Variable] = field(default_factory=dict)


def reach(roots: Iterable[Any]) -> Reached:
    """Returns what functions, modules and containers of these reach."""
    visit = _Visit()
    for root in roots:
        visit.value(root, 0)
    return visit.reached


class _Visit:
    """One walk: what was found, and what need not be looked at again."""

    def __init__(self) -> None:
        self.reached = Reached()
        # by their ids; all stay alive meanwhile
        self.seen: dict[int, Any] = {}

    def value(self, value: Any, depth: int) -> None:
        if isinstance(value, (PLAIN, Tensor)) or depth > DEEP or id(value) in self.seen:
            return
        if isinstance(value, CONTAINERS) and len(value) > LONG:
            return
        self.seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.module(value, depth)
        elif isinstance(value, types.MethodType):
            # of a module all that is below it may run
            self.value(value.__self__, depth)
            self.value(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            self.function(value, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.value(part, depth)
        elif isinstance(value, CONTAINERS):
            for part in value.values() if isinstance(value, dict) else value:
                self.value(part, depth + 1)
        elif is_generator(value):
            self.reached.generators[id(value)] = value
        elif _is_object(value):
            self.object(value, depth)

    def object(self, value: Any, depth: int) -> None:
        self.reached.objects[id(value)] = value
        for part in vars(value).values():
            self.value(part, depth + 1)
        self.kind(type(value), depth)

    def module(self, module: nn.Module, depth: int) -> None:
        self.reached.modules[id(module)] = module
        for name, value in vars(module).items():
            if name not in BOOKKEEPING:
                self.value(value, depth + 1)
        self.kind(type(module), depth)
        for part in module._modules.values():
            self.value(part, depth)

    def kind(self, kind: Any, depth: int) -> None:
        """Looks at the attributes and methods of a class."""
        if id(kind) in self.seen:
            return
        self.seen[id(kind)] = kind
        for part in kind.__mro__:
            if _is_library(part):
                continue
            for name, value in vars(part).items():
                function = getattr(value, "fget", getattr(value, "__func__", value))
                if isinstance(function, types.FunctionType):
                    self.value(function, depth)
                elif not name.startswith("__"):
                    self.attribute(part, name, value)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(value, (PLAIN, Tensor, *CONTAINERS)):
            self.reached.variables[id(owner), name] = Variable(name, owner)
        if isinstance(value, CONTAINERS) or _is_object(value):
            self.value(value, 1)

    def function(self, function: types.FunctionType, depth: int) -> None:
        if _is_library(function):
            return
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        variables = [Variable(*pair) for pair in zip(names, cells, strict=True)]
        variables += [
            Variable(name, function.__globals__)
            for name in _looked_up(function.__code__)
            if name in function.__globals__
        ]
        variables += [Variable(name, vars(function)) for name in vars(function)]
        defaults = [Variable(name, function) for name in ("__defaults__", "__kwdefaults__")]
        variables += [variable for variable in defaults if variable.read() is not None]
        for variable in variables:
            self.variable(variable, function, depth)

    def variable(self, variable: Variable, function: types.FunctionType, depth: int) -> None:
        value = variable.read()
        if isinstance(value, types.ModuleType):
            if not _is_library_name(value.__name__):
                for name in _names_in(function.__code__) & vars(value).keys():
                    if not isinstance(vars(value)[name], types.ModuleType):
                        self.variable(Variable(name, vars(value)), function, depth)
        elif isinstance(value, type):
            if not _is_library(value):
                self.kind(value, depth + 1)
        else:
            if not isinstance(value, FUNCTIONS):
                self.reached.variables[id(variable.holder), variable.name] = variable
            self.value(value, depth + 1)


def is_generator(value: Any) -> bool:
    """Says whether this is a random generator of torch, Python or NumPy."""
    if isinstance(value, torch.Generator | random.Random):
        # the system's randomness has no state
        return not isinstance(value, random.SystemRandom)
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, numpy.random.Generator | numpy.random.RandomState
    )


def _is_object(value: Any) -> bool:
    # tuple[int, ...] passes on the attributes of its class
    own = isinstance(getattr(value, "__dict__", None), dict)
    return own and not isinstance(value, type) and not _is_library(type(value))


def _is_library(owner: Any) -> bool:
    return _is_library_name(getattr(owner, "__module__", None) or "")


@functools.cache
def _is_library_name(origin: str) -> bool:
    return origin.partition(".")[0] in LIBRARIES or origin.startswith(OURS)


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names that code looks up outside itself; attributes are among them."""
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _looked_up(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals in code: a `self.step` is not the `step` of a training loop."""
    inner = (_looked_up(const) for const in code.co_consts if isinstance(const, types.CodeType))
    steps = list(dis.get_instructions(code))
    if not OF_MODULES.isdisjoint(code.co_names) or any(s.opname == "IMPORT_NAME" for s in steps):
        return _names_in(code)
    return frozenset(s.argval for s in steps if s.opname in OF_GLOBALS).union(*inner)
