"""What a function can reach: the modules, generators and variables that its result may depend on.

A second run must find all of it as the first run did, and nothing in Python lists it. So the
function is read: whom a bound method belongs to, what a closure holds, which globals and which
children of its module the code names. What is reached by other ways (an attribute of an object that
is no module, a registry looked up by a string) is not found.

    recompute(block, x)             block and everything below it
    recompute(self._mix, x)         self, and the children that the code of _mix names
    recompute(lambda x: f(x, g))    what f reaches, the value of g
"""

import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

LONG = 1000
CONTAINERS = (list, tuple, set, frozenset, dict)
LIBRARIES = ("torch", "numpy", "einops", "builtins")


@dataclass
class Reached:
    """What was found: modules, generators, and the variables of functions as (name, holder)."""

    modules: dict[nn.Module, None] = field(default_factory=dict)
    generators: dict[torch.Generator, None] = field(default_factory=dict)
    variables: dict[tuple[int, str], "Variable"] = field(default_factory=dict)


@dataclass(frozen=True)
class Variable:
    """A variable of a function: a cell of its closure or a global."""

    name: str
    holder: Any

    def read(self) -> Any:
        """Returns its value, None when it is unbound."""
        if isinstance(self.holder, types.CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return None
        return self.holder.get(self.name)

    def write(self, value: Any) -> None:
        """Binds it to a value."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


def reach(roots: Iterable[Any]) -> Reached:
    """Returns what functions, modules and containers of these reach."""
    reached = Reached()
    seen: set[int] = set()
    for root in roots:
        _visit(root, reached, seen)
    return reached


def _visit(value: Any, reached: Reached, seen: set[int]) -> None:
    if isinstance(value, nn.Module):
        _visit_module(value, reached, seen)
    elif isinstance(value, types.MethodType):
        _visit_method(value, reached, seen)
    elif id(value) in seen:
        return
    elif isinstance(value, functools.partial):
        seen.add(id(value))
        for part in (value.func, *value.args, *value.keywords.values()):
            _visit(part, reached, seen)
    elif isinstance(value, types.FunctionType):
        seen.add(id(value))
        _visit_function(value, reached, seen)
    elif isinstance(value, torch.Generator):
        reached.generators[value] = None
    elif isinstance(value, CONTAINERS) and len(value) <= LONG:
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            _visit(part, reached, seen)


def _visit_module(module: nn.Module, reached: Reached, seen: set[int]) -> None:
    """Everything below a module that is called may run."""
    for part in module.modules():
        if id(part) not in seen:
            seen.add(id(part))
            _visit_own(part, reached, seen)
            for name in ("forward", "__call__"):
                function = getattr(type(part), name, None)
                if isinstance(function, types.FunctionType):
                    _visit_function(function, reached, seen)


def _visit_method(method: types.MethodType, reached: Reached, seen: set[int]) -> None:
    owner, function = method.__self__, method.__func__
    if not isinstance(owner, nn.Module):
        _visit(getattr(owner, "__dict__", {}), reached, seen)
        return
    if owner not in reached.modules:
        _visit_own(owner, reached, seen)
    for name in _names(type(owner), function):
        child = owner._modules.get(name)
        if child is not None:
            _visit_module(child, reached, seen)
    _visit_function(function, reached, seen)


def _visit_own(module: nn.Module, reached: Reached, seen: set[int]) -> None:
    reached.modules[module] = None
    for value in vars(module).values():
        if isinstance(value, torch.Generator):
            reached.generators[value] = None


def _visit_function(function: Any, reached: Reached, seen: set[int]) -> None:
    if not isinstance(function, types.FunctionType) or _is_library(function):
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    variables = [Variable(*pair) for pair in zip(names, cells, strict=True)]
    variables += [Variable(name, function.__globals__) for name in _globals(function.__code__)]
    for variable in variables:
        value = variable.read()
        if isinstance(value, types.FunctionType | functools.partial | nn.Module | types.MethodType):
            _visit(value, reached, seen)
        elif isinstance(value, torch.Generator):
            reached.generators[value] = None
        elif not isinstance(value, types.ModuleType | type) and not callable(value):
            reached.variables[id(variable.holder), variable.name] = variable
            if isinstance(value, CONTAINERS):
                _visit(value, reached, seen)


def _is_library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in LIBRARIES


@functools.cache
def _globals(code: types.CodeType) -> frozenset[str]:
    """Returns the names that code looks up outside itself; attributes are among them."""
    inner = (_globals(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


_known: "weakref.WeakKeyDictionary[Any, dict[type, frozenset[str]]]" = weakref.WeakKeyDictionary()


def _names(owner: type, function: Any) -> frozenset[str]:
    """Returns the names in a method's code and in the methods of its class that it names."""
    found = _known.setdefault(function, {})
    if owner not in found:
        found[owner] = frozenset(_collect(owner, function, set()))
    return found[owner]


def _collect(owner: type, function: Any, seen: set[Any]) -> Iterator[str]:
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    for name in _globals(function.__code__):
        yield name
        method = getattr(owner, name, None)
        yield from _collect(owner, getattr(method, "fget", method), seen)
