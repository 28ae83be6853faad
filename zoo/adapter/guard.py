"""Says whether a model would still do what its tape says.

Inlined code took its branches by what it looked at: attributes of modules, which children there
are, settings in objects and globals. All that it looked at is noted while it is watched and
compared before each use of the tape; where something differs the model is watched again.
"""

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from zoo.adapter.instead import NAME
from zoo.adapter.surroundings import is_registry
from zoo.adapter.tape import Tape
from zoo.chain import hooks_for_all, is_hooked
from zoo.engine.notes import Noted, note, unchanged
from zoo.engine.reach import Variable, _is_library, reach

MISSING = object()
# objects in objects
DEEP = 3


class Guard:
    """What a tape depends on, as it was when it was made."""

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        modules = dict(model.named_modules())
        self.model = model
        self.inlined = [modules[path] for path in tape.inlined]
        # that of the model itself is what runs
        self.forwards = [
            (module, type(module).forward, vars(module).get(NAME) if path else None)
            for path, module in zip(tape.inlined, self.inlined, strict=True)
        ]
        self.looks = [
            (modules[path], name, _looked(modules[path], name)) for path, name in tape.reads
        ]
        self.objects: dict[int, tuple[Any, dict[str, Noted]]] = {}
        for _, _, (noted, _) in self.looks:
            if isinstance(noted, Noted):
                self._note_settings(noted.value, 0)
        self.variables = list(_variables(self.inlined))

    def _note_settings(self, value: Any, depth: int) -> None:
        """Notes the attributes of an object that was looked at, and of those in it."""
        if depth < DEEP and _has_settings(value) and id(value) not in self.objects:
            self.objects[id(value)] = value, {k: note(v) for k, v in vars(value).items()}
            for part in vars(value).values():
                self._note_settings(part, depth + 1)

    def holds(self) -> bool:
        """Says whether all that was looked at is as it was."""
        return (
            not any(is_hooked(module) for module in self.inlined if module is not self.model)
            and all(
                type(module).forward is forward
                and (module is self.model or vars(module).get(NAME) is own)
                for module, forward, own in self.forwards
            )
            and all(_is_same(module, name, seen) for module, name, seen in self.looks)
            and all(_same_settings(noted, vars(value)) for value, noted in self.objects.values())
            and all(unchanged(noted, variable.read()) for variable, noted in self.variables)
        )


def has_global_hooks() -> bool:
    """Says whether hooks for all modules are registered, as some profilers do.

    Not those of torch's own counter of operations: they note names, and its sum needs none.
    """
    return any(
        not isinstance(getattr(hook, "__self__", None), ModuleTracker) for hook in hooks_for_all()
    )


def _looked(module: nn.Module, name: str) -> tuple[Any, Any]:
    """Notes what an attribute is, and what the class has by that name."""
    return _own(module, name), getattr(type(module), name, MISSING)


def _own(module: nn.Module, name: str) -> Any:
    if name == "_modules":
        return tuple(module._modules.items())
    if name in ("_parameters", "_buffers"):
        return tuple((key, _kind(value)) for key, value in getattr(module, name).items())
    if name in module._modules:
        return (module._modules[name],)
    for tensors in (module._parameters, module._buffers):
        if name in tensors:
            return (_kind(tensors[name]),)
    attributes = vars(module)
    return note(attributes[name]) if name in attributes else MISSING


def _is_same(module: nn.Module, name: str, seen: tuple[Any, Any]) -> bool:
    noted, inherited = seen
    if getattr(type(module), name, MISSING) is not inherited:
        return False
    if isinstance(noted, Noted):
        attributes = vars(module)
        return name in attributes and unchanged(noted, attributes[name])
    now = _own(module, name)
    if noted is MISSING or now is MISSING or isinstance(now, Noted):
        return noted is now
    return len(noted) == len(now) and all(map(_equal, noted, now))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or (not isinstance(one, nn.Module) and bool(one == other))


def _kind(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def _has_settings(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | nn.Module | Tensor | types.ModuleType)
        and not callable(value)
        and not _is_library(type(value))
    )


def _same_settings(noted: dict[str, Noted], now: dict[str, Any]) -> bool:
    return noted.keys() == now.keys() and all(
        unchanged(part, now[key]) for key, part in noted.items()
    )


def _variables(inlined: Iterable[nn.Module]) -> Iterator[tuple[Variable, Noted]]:
    """Yields the globals and closures that the inlined forwards name, noted."""
    methods = [types.MethodType(type(module).forward, module) for module in inlined]
    for variable in reach(methods).variables.values():
        value = variable.read()
        if (
            not callable(value)
            and not isinstance(value, torch.Generator)
            and not is_registry(value)
        ):
            yield variable, note(value)
