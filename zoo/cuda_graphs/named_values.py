"""The values that the code of a training step names, and what models and optimizers hold.

From the step on, functions of the program are followed, not those of libraries, and their values a
few containers deep:

    function    variables of functions around it, globals that it names, defaults
    module      attributes, parameters, buffers, hooks, submodules; the plan in force
    optimizer   groups and state
    object      attributes that the code names, of libraries' objects all; those of its class
    iterator    where it is

What lies deeper, or is found in other ways, is left to the audits (`audit`).
"""

import dis
import functools
import itertools
import operator
import random
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zoo.cuda_graphs.watched_values import MISSING, TensorLocation, WatchedValues, is_plain
from zoo.tracing.planned_forward import PatchedForward

# containers in containers, and objects in objects, that are looked into
DEEPEST = 6
# containers and objects that are looked into at most, and values that are compared of one of them
MOST_OBJECTS, MOST_VALUES = 100_000, 4096
# roots of packages whose objects hold nothing that a step reads, but for those of WALKED
CLOSED = {*sys.stdlib_module_names, "torch", "zoo", "numpy"} - {"__main__"}
WALKED: tuple[type, ...] = (
    nn.Module,
    Optimizer,
    LRScheduler,
    Distribution,
    SimpleNamespace,
    Namespace,
)
WALKED += (threading.local,)
# parts of a module that the names of what is in them leave out
UNNAMED = ("_parameters", "_buffers", "_modules")
# attributes of torch's wrapper, whose others are notes of its own on each step
OF_PARALLEL = ("training", "_modules", "_forward_hooks", "require_backward_grad_sync")
HOOKS_OF_PARAMETER = ("_backward_hooks", "_post_accumulate_grad_hooks")
# what draws random numbers on the host, where NumPy is in use
DRAWING = ("Generator", "RandomState", "BitGenerator")
# flag of classes that are made while a program runs
HEAP_TYPE = 1 << 9
# asked without the program's own code, which may hand out attributes in its own way
DICT_OF_CLASS: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
# how a gradient is read and written
ACCESS: tuple[Callable[..., Any], ...] = (getattr, setattr)
CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset)
ITERATORS = tuple(map(type, (iter([]), iter(()), iter(range(0)), iter(range(1 << 70)))))
# what wraps functions, and where it has them
WRAPPERS: dict[type, tuple[str, ...]] = {
    MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    type(functools.lru_cache(print)): ("__wrapped__",),
    functools.cached_property: ("func",),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


class Found(NamedTuple):
    """A value that is reached, and the number of containers and objects around it."""

    name: str
    value: Any
    depth: int = 0


class NamedValues:
    """Collects values and tensors from some roots outward.

    Attributes:
        values: what is compared.
        tensors: where there are tensors, and gradients.
        generators, host_generators: what draws random numbers, of torch and others.
        scalers: names of the GradScalers in use.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        arrays, drawing = _numpy_kinds()
        # how to tell the state of what holds no values
        self.states: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (arrays, lambda array: array.nbytes <= MOST_VALUES and array.tobytes()),
            (ContextVar, lambda variable: variable.get(MISSING)),
            (itertools.count, repr),
            (ITERATORS, operator.length_hint),
            (PatchedForward, lambda patch: patch.latest),
        )
        self.visitors: tuple[tuple[Any, Callable[[Found], None]], ...] = (
            (Tensor, self._add_gradient),
            (torch.Generator, lambda found: self.generators.append(found.value)),
            ((random.Random, *drawing), lambda found: self.host_generators.append(found.value)),
            (torch.amp.GradScaler, self._add_scaler),
            (CONTAINERS, self._add_container),
            *((kinds, self._add_state) for kinds, _ in self.states),
            (tuple(WRAPPERS), self._add_wrapper),
            (FunctionType, self._add_function),
            (type, self._add_class),
            (ModuleType, self._add_attributes),
            (object, self._add_object),
        )
        # names that code uses, by which attributes of the user's objects are chosen
        self.names: set[str] = set()
        count = -1
        while count != len(self.names):
            count = len(self.names)
            self._walk(roots)

    def _walk(self, roots: Mapping[str, Any]) -> None:
        self.values: list[WatchedValues] = []
        self.tensors: list[TensorLocation] = []
        self.generators: list[torch.Generator] = []
        self.host_generators: list[Any] = []
        self.scalers: list[str] = []
        # keeps each object alive, so that its id is not reused
        self.seen: dict[int, Any] = {}
        self.waiting = deque(Found(*root) for root in roots.items())
        while self.waiting and len(self.seen) < MOST_OBJECTS:
            self._visit(self.waiting.popleft())

    def _visit(self, found: Found) -> None:
        if found.depth > DEEPEST or is_plain(found.value) or id(found.value) in self.seen:
            return
        self.seen[id(found.value)] = found.value
        kind = type(found.value)
        next(visit for base, visit in self.visitors if issubclass(kind, base))(found)

    def _watch(
        self, found: Found, read: Callable[[], Any], keys: Iterable[Any] = (), write: Any = None
    ) -> None:
        watched = WatchedValues(found.name, read, (*keys,), write)
        self.values.append(watched)
        self.tensors += watched.tensors
        parts = (Found(watched.name_of(n), part, found.depth + 1) for n, part in enumerate(read()))
        self.waiting += parts

    def _watch_keys(self, found: Found, mapping: Any, keys: Iterable[str]) -> None:
        """Watches some variables or attributes, also those that are not there yet."""
        if keys := (*dict.fromkeys(keys),):
            write = getattr(mapping, "__setitem__", None)
            self._watch(
                found, lambda: tuple(mapping.get(key, MISSING) for key in keys), keys, write
            )

    def _add_scaler(self, found: Found) -> None:
        self.scalers += [found.name] * found.value.is_enabled()

    def _add_container(self, found: Found) -> None:
        values = found.value
        base = next(base for base in CONTAINERS if issubclass(type(values), base))
        keys: Any = range(base.__len__(values)) if base is not dict else (*dict.keys(values),)
        set_item = getattr(base, "__setitem__", None)
        write = set_item and functools.partial(set_item, values)
        if len(keys) > MOST_VALUES:
            self._watch(found, lambda: (base.__len__(values),))
        elif base is dict:
            self._watch(found, lambda: (*dict.values(values), *dict.keys(values)), keys, write)
        else:
            self._watch(found, lambda: (*base.__iter__(values),), keys, write)
        if _is_own(_module_of(type(values))):
            self._add_object(found)

    def _add_state(self, found: Found) -> None:
        name, value, _ = found
        state_of = next(read for kinds, read in self.states if issubclass(type(value), kinds))
        self.values.append(WatchedValues(name, lambda: (state_of(value),), is_counter=True))

    def _add_wrapper(self, found: Found) -> None:
        kind = next(kind for kind in WRAPPERS if issubclass(type(found.value), kind))
        parts = (getattr(found.value, key, None) for key in WRAPPERS[kind])
        # it is no level of its own
        self.waiting += (found._replace(value=part) for part in parts)

    def _add_gradient(self, found: Found) -> None:
        name, tensor, _ = found
        if tensor.is_leaf and tensor.requires_grad:
            read, write = (functools.partial(access, tensor, "grad") for access in ACCESS)
            location = TensorLocation(f"the gradient of {name}", read, write, is_gradient=True)
            self.tensors.append(location)
            hooks = [*map(operator.attrgetter, HOOKS_OF_PARAMETER)]
            read_hooks: Any = lambda: tuple(key for of in hooks for key in of(tensor) or ())  # noqa: E731
            self.values.append(WatchedValues(f"the hooks of {name}", read_hooks))

    def _add_object(self, found: Found) -> None:
        name, value, depth = found
        kind, own = type(value), _attributes_of(value)
        if issubclass(kind, nn.Module):
            # before they are met under a longer name; no module is too deep
            self.waiting += (Found(name, own.get(part)) for part in UNNAMED)
        if issubclass(kind, DistributedDataParallel):
            self._watch_keys(found, own, OF_PARALLEL)
        elif issubclass(kind, WALKED):
            self._watch(
                found._replace(depth=0), lambda: (*own.values(), *own), own, own.__setitem__
            )
        elif _is_own(_module_of(kind)):
            self._add_attributes(found)
        elif _is_open(_module_of(kind)):
            self._watch(found, lambda: (*own.values(), *own), own, own.__setitem__)
        for owner in kind.__mro__:
            self._visit(Found(name, owner, depth))

    def _add_attributes(self, found: Found) -> None:
        """Watches the attributes of a user's object or module that code names."""
        kind, own = type(found.value), _attributes_of(found.value)
        is_own = _is_own(own.get("__name__") if kind is ModuleType else _module_of(kind))
        # also those of the class, in front of which one of the object may come
        of_class = (key for owner in kind.__mro__ for key in DICT_OF_CLASS(owner))
        self._watch_keys(found, own, self._named((*own, *of_class)) if is_own else ())

    def _add_class(self, found: Found) -> None:
        """Watches methods and attributes of a user's class: those named, and what Python calls."""
        own = DICT_OF_CLASS(found.value)
        if _is_own(_module_of(found.value)):
            called = [key for key in own if key == "forward" or key.startswith("__")]
            called = [key for key in called if isinstance(own[key], FunctionType)]
            self._watch_keys(found, own, (*self._named(own), *called))

    def _named(self, own: Iterable[str]) -> list[str]:
        return [key for key in own if key in self.names]

    def _add_function(self, found: Found) -> None:
        name, function, _ = found
        if not _is_own(function.__module__ or "__main__"):
            return
        variables, names = names_in(function.__code__)
        self.names |= names
        # its values are the outermost ones
        within = Found("", function, -1)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        read = functools.partial(_contents, (*cells.values(),))
        self._watch(within, read, cells, lambda key, new: setattr(cells[key], "cell_contents", new))
        # also those that are not there, as of built-in functions
        self._watch_keys(within, function.__globals__, variables)
        self.waiting += (Found(name, function.__defaults__), Found(name, function.__kwdefaults__))


@functools.cache
def names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the globals, and all names, in code and in that of functions in it.

    A string that could be the name of an attribute counts as one, as that of `getattr`.
    """
    loads = ((step.opname, step.argval) for step in dis.get_instructions(code))
    variables = frozenset(name for kind, name in loads if kind in ("LOAD_GLOBAL", "LOAD_NAME"))
    texts = (text for text in code.co_consts if type(text) is str and text.isidentifier())
    names = frozenset((*code.co_names, *texts))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_in(constant)
            variables, names = variables | inner[0], names | inner[1]
    return variables, names


def _attributes_of(value: Any) -> Any:
    """Returns the attributes of an object, without asking its class; none if it has no dict."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, dict) else {}


def _contents(cells: Iterable[CellType]) -> tuple[Any, ...]:
    return tuple(map(_content, cells))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _numpy_kinds() -> tuple[Any, tuple[type, ...]]:
    """Returns the types of NumPy's arrays and of what draws, where NumPy is in use."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (), ()
    return numpy.ndarray, tuple(getattr(numpy.random, name) for name in DRAWING)


def _module_of(kind: type) -> str:
    """Returns the module of a class; that of a program run by `exec` is not the built-in one."""
    module = DICT_OF_CLASS(kind).get("__module__", "builtins")
    is_of_program = module == "builtins" and kind.__flags__ & HEAP_TYPE
    return "__main__" if is_of_program else str(module)


@functools.cache
def _is_open(module: str | None) -> bool:
    """Returns whether objects of a module's classes may hold what a step reads."""
    return (module or "torch").partition(".")[0] not in CLOSED


@functools.cache
def _is_own(module: str | None) -> bool:
    """Returns whether a module is the program's own, not one that was installed."""
    if module == "__main__":
        # which may be installed, too
        return True
    path = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return _is_open(module) and "site-packages" not in path and "dist-packages" not in path
