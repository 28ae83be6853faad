"""What is looked at before each replay: exact, cheap, and a change captures anew.

    the whole program   autocast, modes, hooks of all modules and optimizers, torch's settings
    module, optimizer   all attributes: parameters, gradients, hooks, groups, state, plans
    function            variables of functions around it, globals that it names, defaults
    the program's own   attributes of objects, classes and modules that the code names

From the step on, functions of the program are followed, and their values a few containers deep.
What lies deeper, is of libraries, or is read in other ways, is left to the audits (`audit`).
"""

import argparse
import contextlib
import dis
import functools
import gc
import itertools
import operator
import random
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zoo._torch import (
    HOOKS_AFTER_ALL_STEPS,
    HOOKS_OF_ALL_STEPS,
    dispatch_modes,
    function_modes,
    top_saved_tensors_hooks,
)
from zoo.cuda_graphs.watched_values import MISSING, Snapshot, Watched, is_plain, read, whereabouts
from zoo.engine.kernel_settings import TABLE, read_settings
from zoo.layers.module_hooks import GLOBAL_HOOKS
from zoo.tracing.planned_forward import PatchedForward

# containers in containers, and objects in objects, that are looked into; numbers of one, at most
DEEPEST, MOST_VALUES = 6, 4096
# objects whose attributes are all compared, and some whose others are notes of their own on a step
WHOLE = nn.Module, Optimizer, LRScheduler, Distribution, types.SimpleNamespace, argparse.Namespace
NAMED: dict[type, tuple[str, ...]] = {
    DistributedDataParallel: (
        *("training", "_modules", "_forward_hooks", "require_backward_grad_sync"),
    ),
    PatchedForward: ("latest",),
}
GRADIENT = operator.attrgetter("grad")
HOOKS_OF_PARAMETER = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS_OF_ALL = (*GLOBAL_HOOKS, HOOKS_OF_ALL_STEPS, HOOKS_AFTER_ALL_STEPS)
LIBRARIES = (*sys.stdlib_module_names, "torch", "zoo", "numpy")
# as no code of the program hands it out
DICT_OF_CLASS: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, deque, set, frozenset)
# what wraps functions, and where it has them
CACHED = type(functools.lru_cache(print))
WRAPPERS = (types.MethodType, functools.partial, CACHED, property, staticmethod, classmethod)
WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "__wrapped__", "fget")


class Found(NamedTuple):
    """A value that is reached, and the number of containers and objects around it."""

    name: str
    value: Any
    depth: int = 0


class Guards:
    """Values and tensors that a training step may read, as they were when this was made.

    Attributes:
        tensors: where tensors and gradients are; those of the names in `unread` are not compared.
        generators, host_generators: what draws random numbers, of torch and others.
    """

    def __init__(self, roots: Mapping[str, Any], device: torch.device) -> None:
        self.device, self.ambient = device, _ambient(device)
        self.unread: set[str] = set()
        self.visitors: dict[Any, Callable[[Found], None]] = {
            Tensor: self._add_parameter,
            CONTAINERS: self._add_container,
            WRAPPERS: self._add_wrapper,
            types.FunctionType: self._add_function,
            type: self._add_class,
            object: self._add_object,
        }
        # names that code uses, by which attributes of objects are chosen
        self.names = {"forward"}
        count = -1
        while count != len(self.names):
            count = len(self.names)
            self.watched: list[Watched] = []
            self.empty: list[Found] = []
            # keeps each object alive, so that its id is not reused
            self.seen: dict[int, Found] = {}
            self.waiting: deque[Found] = deque()
            for root in roots.items():
                self.waiting.append(Found(*root))
                while self.waiting:
                    self._visit(self.waiting.popleft())
        # they hand out their names once they are no longer empty
        names, containers = ([found[n] for found in self.empty] for n in (0, 1))
        filled = functools.partial(itertools.compress, names, containers)
        self.watched.append(Watched("", (filled,)))
        numpy = getattr(sys.modules.get("numpy"), "random", None)
        drawing = (numpy.Generator, numpy.RandomState, numpy.BitGenerator) if numpy else ()
        self.generators = [found.value for found in self._seen(torch.Generator)]
        self.host_generators = [found.value for found in self._seen(random.Random, *drawing)]
        whole = self._seen(*WHOLE)
        kinds = functools.partial(map, type, [found.value for found in whole])
        self.watched.append(Watched("", (kinds,), [found.name for found in whole]))
        self.seen.clear()
        self.snapshot = Snapshot(self.watched)
        self.tensors = [*self.snapshot.locations()]
        known: Counter[str] = Counter()
        for location in self.tensors:
            # names are unique
            known.update((name := location.name,))
            location.name += f" ({known[name]})" * (known[name] > 1)

    def change(self, by_step: bool = False) -> str | None:
        """Says what is not as it was; `by_step`, of what replays would leave as it is."""
        if not by_step and (now := _ambient(self.device)) != self.ambient:
            pairs = ((name, was, now[name]) for name, was in self.ambient.items())
            return next(f"{name} ({was}, now {new})" for name, was, new in pairs if was != new)
        return self.snapshot.change(by_step)

    def forget(self, names: set[str]) -> None:
        """Compares tensors of these names no longer: the step does not read them."""
        self.unread |= names
        self.snapshot.forget(location.at for location in self.tensors if location.name in names)

    def _seen(self, *kinds: type) -> list[Found]:
        return [found for found in self.seen.values() if issubclass(type(found.value), kinds)]

    def _visit(self, found: Found) -> None:
        kind, is_new = type(found.value), id(found.value) not in self.seen
        if is_new and found.depth <= DEEPEST and not is_plain(found.value):
            self.seen[id(found.value)] = found
            next(visit for base, visit in self.visitors.items() if issubclass(kind, base))(found)

    def _watch(
        self, found: Found, sources: Any, keys: Iterable[Any] = (), write: Any = None
    ) -> None:
        self.watched.append(watched := Watched(found.name, sources, (*keys,), write))
        for index, value in enumerate(read(sources)):
            self.waiting.append(Found(watched.name_of(index), value, found.depth + 1))

    def _watch_keys(self, found: Found, mapping: Any, keys: Iterable[str]) -> None:
        """Watches some variables or attributes, also those that are not there yet."""
        if keys := (*dict.fromkeys(keys),):
            get = functools.partial(map, mapping.get, keys, itertools.repeat(MISSING))
            self._watch(found, (get,), keys, getattr(mapping, "__setitem__", None))

    def _add_container(self, found: Found) -> None:
        values = found.value
        base = next(base for base in CONTAINERS if issubclass(type(values), base))
        length = base.__len__(values)
        write = hasattr(base, "__setitem__") and functools.partial(base.__setitem__, values)
        if not length and type(values) in CONTAINERS:
            self.empty.append(found)
        elif type(values) is tuple and all(map(is_plain, values)):
            return
        elif length > MOST_VALUES:
            self._watch(found, (lambda: (base.__len__(values),),))
        elif issubclass(base, dict):
            parts = base.values.__get__(values), base.__iter__.__get__(values)
            self._watch(found, (*parts, (values,).__iter__), dict(values), write)
        else:
            # itself as their end: a value that moves on to the next list is another entry there
            parts = base.__iter__.__get__(values), (values,).__iter__
            self._watch(found, parts, range(length), write)
        if type(values) is not base:
            self._add_object(found)

    def _add_wrapper(self, found: Found) -> None:
        # it is no level of its own
        parts = (attribute_of(found.value, key) for key in WRAPPED)
        self.waiting += (found._replace(value=part) for part in parts)

    def _add_parameter(self, found: Found) -> None:
        name, tensor, _ = found
        if tensor.is_leaf and tensor.requires_grad:
            gradient, write = f"the gradient of {name}", lambda _, new: setattr(tensor, "grad", new)
            get = functools.partial(map, GRADIENT, (tensor,))
            self.watched.append(Watched(gradient, (get,), (None,), write, is_free=True))
            hooks = functools.partial(HOOKS_OF_PARAMETER, tensor)
            self._watch(Found(f"the hooks of {name}", None), (hooks,))

    def _add_object(self, found: Found) -> None:
        name, value, depth = found
        kind, own = type(value), attribute_of(value, "__dict__", {})
        if _is_iterator(kind):
            position = (lambda: ((*_position(value),),),)
            self.watched.append(Watched(name, position, is_free=True))
        named = next((NAMED[base] for base in NAMED if issubclass(kind, base)), None)
        if named is not None:
            return self._watch_keys(Found(name, None), own, named)
        is_module = issubclass(kind, types.ModuleType)
        module = own.get("__name__") if is_module else DICT_OF_CLASS(kind).get("__module__")
        if issubclass(kind, WHOLE):
            # no module is too deep
            self._watch(Found(name, None), (own.values, own.__iter__), own, own.__setitem__)
        elif _is_own(str(module)):
            # also those of the class, in front of which one of the object may come
            keys = (*own, *(key for owner in kind.__mro__ for key in DICT_OF_CLASS(owner)))
            self._watch_keys(found, own, filter(self.names.__contains__, keys))
        else:
            return
        for owner in kind.__mro__:
            self._visit(Found(name, owner, depth))

    def _add_class(self, found: Found) -> None:
        """Watches methods and attributes of a user's class: those named, and what Python calls."""
        own = DICT_OF_CLASS(found.value)
        if _is_own(str(own.get("__module__"))):
            functions = (key for key, value in own.items() if type(value) is types.FunctionType)
            called = (key for key in functions if str(key).startswith("__"))
            self._watch_keys(found, own, (*filter(self.names.__contains__, own), *called))

    def _add_function(self, found: Found) -> None:
        name, function, _ = found
        if not _is_own(function.__module__ or "__main__"):
            return
        variables, names = names_in(function.__code__)
        self.names |= names
        # its values are the outermost ones
        within = Found("", function, -1)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        get = functools.partial(map, _contents, cells.values())
        write = lambda key, new: setattr(cells[key], "cell_contents", new)  # noqa: E731
        self._watch(within, (get,), cells, write)
        # also those that are not there, as of built-in functions
        self._watch_keys(within, function.__globals__, variables)
        self.waiting += (Found(name, function.__defaults__), Found(name, function.__kwdefaults__))


@functools.cache
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the globals, and all names, also as strings, in code and in functions in it."""
    loads = ((step.opname, step.argval) for step in dis.get_instructions(code))
    variables = frozenset(name for kind, name in loads if kind in ("LOAD_GLOBAL", "LOAD_NAME"))
    texts = (text for text in code.co_consts if type(text) is str and text.isidentifier())
    names = frozenset((*code.co_names, *texts))
    inner = [names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return variables.union(*(v for v, _ in inner)), names.union(*(n for _, n in inner))


def attribute_of(value: Any, key: str, default: Any = None) -> Any:
    """Returns an attribute of an object, without asking its class."""
    with contextlib.suppress(AttributeError):
        return object.__getattribute__(value, key)
    return default


def _is_iterator(kind: type) -> bool:
    """Returns whether a class is one of Python's own iterators, or of generators."""
    return type(DICT_OF_CLASS(kind).get("__next__")) is types.WrapperDescriptorType


def _position(iterator: Any, depth: int = 0) -> Iterator[Any]:
    """Yields where an iterator is: what is left, and what it holds, such as locals or others."""
    # one that goes round does not tell, and is never where it was
    is_told = type(iterator) is not itertools.cycle
    yield (operator.length_hint(iterator) or repr(iterator)) if is_told else object()
    for value in gc.get_referents(iterator) if depth <= DEEPEST else ():
        yield whereabouts(value) or value
        # also those of `zip`
        others = value if type(value) is tuple else (value,)
        for other in (other for other in others if _is_iterator(type(other))):
            yield from _position(other, depth + 1)


def _contents(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):
        return cell.cell_contents
    return MISSING


@functools.cache
def _is_own(module: str) -> bool:
    """Returns whether a module is the program's own, not one that was installed."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    is_library = module.partition(".")[0] in LIBRARIES
    is_library |= "site-packages" in path or "dist-packages" in path
    # which may be installed, too; classes of a program that `exec` runs say that they are built in
    return module in ("__main__", "builtins") or not is_library


def _ambient(device: torch.device) -> dict[str, Any]:
    kind, settings = device.type, zip(TABLE, read_settings(), strict=False)
    return {
        "autocast": torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        "the cache of autocast": torch.is_autocast_cache_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "gradients enabled": torch.is_grad_enabled(),
        "the default device": torch.get_default_device(),
        "the dispatch modes": [*map(id, dispatch_modes())],
        # of others may be a new one around each call
        "the function modes": [*map(type, function_modes())],
        "hooks for saved tensors": top_saved_tensors_hooks(False) is not None,
        "the hooks of all modules and optimizers": [(*hooks,) for hooks in HOOKS_OF_ALL],
        **{setting.name: value for setting, value in settings},
    }
