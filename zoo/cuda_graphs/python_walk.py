"""Walks all that the Python of a training step may read, and collects values and tensors.

    function    variables of functions around it, globals that its code names, defaults
    module      attributes, parameters, buffers, hooks, and so submodules; the plan in force
    optimizer   groups and state
    object      of the program's own classes the attributes that code names, of others all
    container   what is in it

Of installed libraries only the objects are walked, not what their functions name. Names of what is
found are those that the program would write.
"""

import dis
import functools
import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sized
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zoo.cuda_graphs.batch import VALUES
from zoo.cuda_graphs.watched_values import (
    ArrayValues,
    ContainerValues,
    EnclosedValues,
    FixedValues,
    ListValues,
    MappingValues,
    PlanInForce,
    SlotValues,
    TensorLocation,
)
from zoo.errors import GraphError
from zoo.tracing.planned_forward import PatchedForward

# parts of a module that the names of what is in them leave out
UNNAMED = ("_parameters", "_buffers", "_modules")
# objects that are walked at most
MOST_OBJECTS = 200_000
# roots of packages whose objects hold nothing that a step reads, but for those of WALKED
CLOSED = {*sys.stdlib_module_names, "torch", "zoo", "numpy"} - {"__main__"}
WALKED = (nn.Module, Optimizer, LRScheduler, Distribution, SimpleNamespace, Namespace)
# attributes of torch's wrapper, whose others are notes of its own on each step
OF_PARALLEL = ("training", "_modules", "_forward_hooks", "require_backward_grad_sync")
# what draws random numbers on the host, where NumPy is in use
DRAWING = ("Generator", "RandomState", "BitGenerator")
# flag of classes that are made while a program runs
HEAP_TYPE = 1 << 9
# how an attribute is read and written
ACCESS: tuple[Callable[..., Any], ...] = (getattr, setattr)


class Walk:
    """Collects values and tensors from some roots outward.

    Attributes:
        values: what is compared in containers and attributes.
        empty: containers that are empty, with their names.
        tensors: where there are tensors, and gradients.
        generators, host_generators: what draws random numbers, of torch and others.
        scalers: names of the GradScalers in use.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        arrays, drawing = _numpy_kinds()
        self.visitors: tuple[tuple[Any, Callable[[str, Any], None]], ...] = (
            (Tensor, self._add_gradient),
            (torch.Generator, lambda _, generator: self.generators.append(generator)),
            ((random.Random, *drawing), lambda _, other: self.host_generators.append(other)),
            (torch.amp.GradScaler, self._add_scaler),
            (dict, self._add_dict),
            ((list, deque, set), self._add_list),
            ((tuple, frozenset), self._add_tuple),
            (arrays, lambda name, array: self._add(ArrayValues(name, array))),
            (ModuleType, self._add_python_module),
            (functools.partial, self._add_partial),
            (MethodType, self._add_method),
            (FunctionType, self._add_function),
            (PatchedForward, self._add_plan),
            (object, self._add_object),
        )
        # names that code uses, by which attributes of the user's objects are chosen
        self.names: set[str] = {"forward", "__call__"}
        count = 0
        while count != len(self.names):
            count = len(self.names)
            self.values: list[ContainerValues] = []
            self.empty: list[tuple[str, Sized]] = []
            self.tensors: list[TensorLocation] = []
            self.generators: list[torch.Generator] = []
            self.host_generators: list[Any] = []
            self.scalers: list[str] = []
            # keeps each object alive, so that its id is not reused
            self.seen: dict[int, Any] = {}
            self.waiting: list[tuple[str, Any]] = [*roots.items()]
            while self.waiting:
                self._visit(*self.waiting.pop())
                if len(self.seen) > MOST_OBJECTS:
                    name, _ = self.waiting[-1]
                    raise GraphError(
                        f"the step reaches more than {MOST_OBJECTS} objects, of which each may "
                        f"change what it does ({name}); leave out of it what it does not need"
                    )

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, (*VALUES, type)) or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        next(visit for kind, visit in self.visitors if isinstance(value, kind))(name, value)

    def _add_scaler(self, name: str, scaler: torch.amp.GradScaler) -> None:
        self.scalers += [name] * scaler.is_enabled()

    def _add_dict(self, name: str, values: dict[Any, Any]) -> None:
        if values:
            self._add(MappingValues(name, values))
        else:
            self.empty.append((name, values))

    def _add_list(self, name: str, values: Any) -> None:
        if values:
            self._add(ListValues(name, values))
        else:
            self.empty.append((name, values))

    def _add_tuple(self, name: str, values: Any) -> None:
        self._add(FixedValues(name, values))

    def _add_partial(self, name: str, function: functools.partial[Any]) -> None:
        self.waiting += [(name, function.func), (name, function.args), (name, function.keywords)]

    def _add_method(self, name: str, method: MethodType) -> None:
        self.waiting += [(f"{name}.__self__", method.__self__), (name, method.__func__)]

    def _add_plan(self, name: str, patch: PatchedForward) -> None:
        self._add(PlanInForce(name.removesuffix(".forward"), vars(patch), ("latest",)))

    def _add(self, values: ContainerValues) -> None:
        self.values.append(values)
        self.tensors += values.tensors()
        self.waiting += ((values.name_of(n), value) for n, value in enumerate(values.before))

    def _add_gradient(self, name: str, tensor: Tensor) -> None:
        if tensor.is_leaf and tensor.requires_grad:
            read, write = (functools.partial(function, tensor, "grad") for function in ACCESS)
            location = TensorLocation(f"the gradient of {name}", read, write, is_gradient=True)
            self.tensors.append(location)

    def _add_python_module(self, name: str, module: ModuleType) -> None:
        if _is_own(module.__name__):
            self._add(MappingValues(name, vars(module), self._named(vars(module))))

    def _named(self, own: Mapping[str, Any]) -> list[str]:
        """Returns those of some attributes that code names."""
        return [key for key in own if key in self.names]

    def _add_object(self, name: str, value: Any) -> None:
        kind, own = type(value), getattr(value, "__dict__", None)
        if not (isinstance(value, WALKED) or _is_open(_module_of(kind))):
            return
        if isinstance(value, nn.Module):
            # before they are met under a longer name
            for part in UNNAMED:
                self._visit(name, value.__dict__.get(part))
        if isinstance(value, DistributedDataParallel):
            self._add(MappingValues(name, value.__dict__, OF_PARALLEL))
        elif own is not None and (isinstance(value, WALKED) or not _is_own(_module_of(kind))):
            self._add(MappingValues(name, own))
        elif own is not None:
            # also those of the class, in front of which one of the object may come
            of_class = (key for owner in kind.__mro__ for key in vars(owner))
            self._add(MappingValues(name, own, self._named(dict.fromkeys((*own, *of_class)))))
        for owner in kind.__mro__:
            if slots := self._named(dict.fromkeys(vars(owner).get("__slots__", ()))):
                self._add(SlotValues(name, value, slots))
            if _is_own(_module_of(owner)) and id(owner) not in self.seen:
                # methods, and attributes of the class
                self.seen[id(owner)] = owner
                self._add(MappingValues(name, vars(owner), self._named(vars(owner))))

    def _add_function(self, name: str, function: FunctionType) -> None:
        if not _is_own(function.__module__ or "__main__"):
            return
        variables, attributes = _names_in(function.__code__)
        self.names |= attributes
        self._add(EnclosedValues(name, function))
        # also those that are not there, as of built-in functions
        self._add(MappingValues("", function.__globals__, variables))
        self.waiting += [(name, function.__defaults__), (name, function.__kwdefaults__)]


@functools.cache
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the variables and the attributes that code names, also that of functions in it."""
    loads = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    variables = {name for kind, name in loads if kind in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = {name for kind, name in loads if "ATTR" in kind or kind == "LOAD_METHOD"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _names_in(constant)
            variables, attributes = variables | inner[0], attributes | inner[1]
    return frozenset(variables), frozenset(attributes)


def _numpy_kinds() -> tuple[Any, tuple[type, ...]]:
    """Returns the types of NumPy's arrays and of what draws, where NumPy is in use."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (), ()
    return numpy.ndarray, tuple(getattr(numpy.random, name) for name in DRAWING)


def _module_of(kind: type) -> str:
    """Returns the module of a class; that of a program run by `exec` is not the built-in one."""
    is_of_program = kind.__module__ == "builtins" and kind.__flags__ & HEAP_TYPE
    return "__main__" if is_of_program else kind.__module__


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
