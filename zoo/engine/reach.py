"""What a function can reach: the modules, generators and variables that its result may depend on.

A second run must find all of it as the first run did, and nothing in Python lists it. So the
function is read: whom a bound method belongs to, what a closure holds, which globals and which
children of its module the code names. What is reached by other ways (a registry looked up by a
string, what a generator function goes through) is not found.

    recompute(block, x)             block and everything below it
    recompute(self._mix, x)         self, and the children that the code of _mix names
    recompute(lambda x: f(x, g))    what f reaches, the value of g
"""

import dis
import functools
import inspect
import itertools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.engine.global_hooks import global_hooks
from zoo.engine.notes import PLAIN, note, unchanged
from zoo.engine.snapshot import BOOKKEEPING, Snapshot, snapshot
from zoo.errors import RecomputeError

LONG = 1000
DEEP = 4
CONTAINERS = (list, tuple, set, frozenset, dict, deque)
LIBRARIES = ("torch", "numpy", "einops", "builtins", "collections", "functools", "itertools")
# what watches a second run must not be put back by it
OURS = ("zoo.engine.", "zoo.verification.", "zoo.verify")
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
# a function that names one of these, or has it as a string, may read what norms only write
OF_NORMS = frozenset(
    (
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "buffers",
        "_buffers",
        "get_buffer",
        "named_buffers",
        "state_dict",
        "deepcopy",
        "eval",
        "train",
    )
)
# a method that names one of these may get at any child
ANY_CHILD = frozenset(
    (
        "children",
        "named_children",
        "modules",
        "named_modules",
        "_modules",
        "getattr",
        "get_submodule",
    )
)
FUNCTIONS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial,
)  # fmt: skip


@dataclass
class Reached:
    """What was found: modules as they are, those of them with hooks, other objects, generators.

    And variables of functions. `statistics` says that a function may use those of norms; `read` has
    the keys of what is reached without hooks.
    """

    modules: dict[nn.Module, Snapshot] = field(default_factory=dict)
    hooked: list[nn.Module] = field(default_factory=list)
    objects: dict[int, Any] = field(default_factory=dict)
    generators: dict[int, Any] = field(default_factory=dict)
    variables: dict[tuple[int, str], "Variable"] = field(default_factory=dict)
    statistics: bool = False
    read: set[Hashable] = field(default_factory=set)


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


def reach(roots: Iterable[Any]) -> Reached:
    """Returns what functions, modules and containers of these reach."""
    visit = _Visit()
    for root in roots:
        visit.value(root, 0)
    reached, everywhere = visit.reached, global_hooks()
    # one for all modules may read any statistics
    reached.statistics |= bool(everywhere)
    if everywhere or reached.hooked:
        reached.read = {*reached.variables, *reached.objects, *map(id, reached.modules)}
        # a hook may reach modules that have hooks
        for hook in itertools.chain(everywhere.values(), visit.hooks):
            visit.value(inspect.unwrap(hook), 1)
    return reached


def places_of(hook: Any) -> dict[Hashable, Callable[[], Callable[[], bool]]]:
    """Returns the places that a hook may read or write, each to be watched for a change."""
    visit = _HookVisit()
    visit.value(inspect.unwrap(hook), 1)
    reached = visit.reached
    places: dict[Hashable, Callable[[], Callable[[], bool]]] = {
        key: functools.partial(_watch, variable.read) for key, variable in reached.variables.items()
    }
    for key, value in reached.objects.items():
        places[key] = functools.partial(_watch, functools.partial(vars, value))
    for module in reached.modules:
        places[id(module)] = functools.partial(_watch_module, module)
    return places


def _watch(read: Callable[[], Any]) -> Callable[[], bool]:
    noted = note(read())
    return lambda: not unchanged(noted, read())


def _watch_module(module: nn.Module) -> Callable[[], bool]:
    found = snapshot(module)
    return lambda: not found.holds(module)


class _Visit:
    """One walk: what was found, and what need not be looked at again."""

    def __init__(self) -> None:
        self.reached = Reached()
        self.seen: set[int] = set()
        self.seen_types: set[tuple[type, str]] = set()
        self.seen_methods: set[tuple[type, Any]] = set()
        self.hooks: list[Any] = []

    def value(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self.module(value, depth)
        elif isinstance(value, types.MethodType):
            self.method(value, depth)
        elif isinstance(value, (PLAIN, Tensor)) or id(value) in self.seen:
            return
        elif isinstance(value, types.FunctionType):
            self.function(value, depth)
        elif isinstance(value, functools.partial):
            self.seen.add(id(value))
            for part in (value.func, *value.args, *value.keywords.values()):
                self.value(part, depth)
        elif isinstance(value, CONTAINERS):
            if len(value) <= LONG and depth <= DEEP:
                self.seen.add(id(value))
                for part in value.values() if isinstance(value, dict) else value:
                    self.value(part, depth + 1)
        elif is_generator(value):
            self.reached.generators[id(value)] = value
        elif _is_object(value) and depth <= DEEP:
            self.object(value, depth)

    def object(self, value: Any, depth: int) -> None:
        self.seen.add(id(value))
        self.reached.objects[id(value)] = value
        for part in vars(value).values():
            self.value(part, depth + 1)
        self.attributes_of(type(value))
        self.function(getattr(type(value), "__call__", None), depth)  # noqa: B004

    def module(self, module: nn.Module, depth: int) -> None:
        """Everything below a module that is called may run."""
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        self.own(module, depth)
        owner = type(module)
        if (owner, "forward") not in self.seen_types:
            self.seen_types.add((owner, "forward"))
            # FSDP2 makes a class of torch from one of the user's
            if not all(map(_is_library, owner.__mro__)):
                self.methods(owner, owner.forward, depth)
        for part in module._modules.values():
            if part is not None:
                self.module(part, depth)

    def method(self, method: types.MethodType, depth: int) -> None:
        owner, function = method.__self__, method.__func__
        if isinstance(owner, nn.Module):
            names = _named_by(type(owner), function).names
            self.own(owner, depth)
            for name in owner._modules.keys() if names & ANY_CHILD else names:
                child = owner._modules.get(name)
                if child is not None:
                    self.module(child, depth)
        else:
            self.value(owner, depth)
        self.methods(type(owner), function, depth)

    def methods(self, owner: type, function: Any, depth: int) -> None:
        """A method and those of its class that it names."""
        if depth > DEEP or (owner, function) in self.seen_methods:
            return
        self.seen_methods.add((owner, function))
        self.function(function, depth)
        for name in _named_by(owner, function).methods:
            for method in _methods_of(owner, name):
                self.function(method, depth)

    def own(self, module: nn.Module, depth: int) -> None:
        if module in self.reached.modules:
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise RecomputeError(
                f"a segment holds a {type(module).__name__} of TorchScript, whose buffers cannot "
                "be exchanged for a second run. Use the module that it was made from."
            )
        found = self.reached.modules[module] = snapshot(module)
        if not found.simple:
            for name, value in list(vars(module).items()):
                if name not in BOOKKEEPING:
                    self.value(value, depth + 1)
        if module._forward_pre_hooks or module._forward_hooks:
            self.reached.hooked.append(module)
            self.hooks += module._forward_pre_hooks.values()
            self.hooks += module._forward_hooks.values()
        self.attributes_of(type(module))

    def attributes_of(self, owner: Any) -> None:
        if (owner, "attributes") in self.seen_types:
            return
        self.seen_types.add((owner, "attributes"))
        for part in owner.__mro__:
            if _is_library(part):
                continue
            for name, value in vars(part).items():
                if name.startswith("__"):
                    continue
                if isinstance(value, (PLAIN, Tensor, *CONTAINERS)):
                    self.reached.variables[id(part), name] = Variable(name, part)
                if isinstance(value, CONTAINERS) or _is_object(value):
                    self.value(value, 1)

    def function(self, function: Any, depth: int) -> None:
        if not isinstance(function, types.FunctionType) or _is_library(function):
            return
        if id(function) in self.seen or depth > DEEP:
            return
        self.seen.add(id(function))
        if _is_of_norms(function.__code__):
            self.reached.statistics = True
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
                for name in _globals(function.__code__) & vars(value).keys():
                    if not isinstance(vars(value)[name], types.ModuleType):
                        self.variable(Variable(name, vars(value)), function, depth)
        elif isinstance(value, type):
            if not _is_library(value):
                self.attributes_of(value)
        else:
            if not isinstance(value, FUNCTIONS):
                self.reached.variables[id(variable.holder), variable.name] = variable
            self.value(value, depth + 1)


class _HookVisit(_Visit):
    """A walk that goes no further than to modules."""

    def module(self, module: nn.Module, depth: int) -> None:
        self.own(module, depth)

    def own(self, module: nn.Module, depth: int) -> None:
        self.reached.modules[module] = snapshot(module)


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
def _globals(code: types.CodeType) -> frozenset[str]:
    """Returns the names that code looks up outside itself; attributes are among them."""
    inner = (_globals(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _looked_up(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals in code: a `self.step` is not the `step` of a training loop."""
    inner = (_looked_up(const) for const in code.co_consts if isinstance(const, types.CodeType))
    steps = list(dis.get_instructions(code))
    if not OF_MODULES.isdisjoint(code.co_names) or any(s.opname == "IMPORT_NAME" for s in steps):
        return _globals(code)
    return frozenset(s.argval for s in steps if s.opname in OF_GLOBALS).union(*inner)


@functools.cache
def _is_of_norms(code: types.CodeType) -> bool:
    """Says whether code may read the statistics of norms, or turn them off by `training`."""
    strings = {const for const in code.co_consts if isinstance(const, str)}
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return (
        not OF_NORMS.isdisjoint(strings.union(code.co_names))
        or any(
            step.opname == "STORE_ATTR" and step.argval == "training"
            for step in dis.get_instructions(code)
        )
        or any(map(_is_of_norms, inner))
    )


class _Named(NamedTuple):
    """The names in a method's code and in the methods of its class that it names, and these."""

    names: frozenset[str] = frozenset()
    methods: tuple[str, ...] = ()


# both weakly: a class holds its functions
_known: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[type, _Named]]" = (
    weakref.WeakKeyDictionary()
)


def _named_by(owner: type, function: Any) -> _Named:
    if not isinstance(function, types.FunctionType):
        return _Named()
    found = _known.get(function)
    if found is None:
        found = _known[function] = weakref.WeakKeyDictionary()
    if owner not in found:
        names = frozenset(_collect(owner, function, set()))
        found[owner] = _Named(names, tuple(n for n in names if any(_methods_of(owner, n))))
    return found[owner]


def _collect(owner: type, function: Any, seen: set[Any]) -> Iterator[str]:
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    for name in _globals(function.__code__):
        yield name
        for method in _methods_of(owner, name):
            yield from _collect(owner, method, seen)


def _methods_of(owner: type, name: str) -> Iterator[Any]:
    """Yields what a class calls by a name, and what that may call in the classes above it."""
    for part in owner.__mro__:
        method = vars(part).get(name)
        if method is None or _is_library(part):
            continue
        method = getattr(method, "fget", getattr(method, "__func__", method))
        yield method
        above = {"super", *(other.__name__ for other in owner.__mro__)}
        if not isinstance(method, types.FunctionType) or not above & _globals(method.__code__):
            return
