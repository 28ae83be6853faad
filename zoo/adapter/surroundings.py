"""What a model reaches beside its own attributes: containers, objects, globals, closures.

A rehearsal may write them as the forward does, and must not leave that behind.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from zoo.engine.notes import Noted, note, unchanged
from zoo.engine.reach import Variable, reach
from zoo.engine.snapshot import BOOKKEEPING

CONTAINERS = (list, dict, set, deque)
DEEP = 3


class Surroundings:
    """All that, as it was."""

    def __init__(self, model: nn.Module) -> None:
        reached = reach((model,))
        self.variables: list[tuple[Variable, Noted]] = []
        self.objects = [
            (value, dict(vars(value)))
            for value in reached.objects.values()
            # this package's own are changed by using them
            if not type(value).__module__.startswith("zoo.")
        ]
        self.contents: dict[int, tuple[Any, Any]] = {}
        for variable in reached.variables.values():
            value = variable.read()
            if not callable(value) and not is_registry(value):
                self.variables.append((variable, note(value)))
                self._keep(value, 0)
        for _, attributes in self.objects:
            self._keep(attributes, 0)
        for module in model.modules():
            own = {k: v for k, v in vars(module).items() if k not in BOOKKEEPING}
            self._keep(own, 0)

    def _keep(self, value: Any, depth: int) -> None:
        # a subclass may make its parts as it is read, as a registry of transformers does
        if type(value) not in CONTAINERS or id(value) in self.contents or depth > DEEP:
            return
        self.contents[id(value)] = value, value.copy()
        for part in value.values() if isinstance(value, dict) else value:
            self._keep(part, depth + 1)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[list[str]]:
        """Puts all back after the block; yields a list that names then what had been changed.

        Containers among the attributes of modules are left out of it, since those have notes.
        """
        changed: list[str] = []
        try:
            yield changed
            changed += [v.name for v, noted in self.variables if not unchanged(noted, v.read())]
            changed += [
                f"{name} of a {type(value).__name__}"
                for value, attributes in self.objects
                for name in _differing(attributes, vars(value))
            ]
        finally:
            for container, content in self.contents.values():
                _refill(container, content)
            for variable, noted in self.variables:
                if variable.read() is not noted.value:
                    variable.write(noted.value)
            for value, attributes in self.objects:
                vars(value).clear()
                vars(value).update(attributes)


def is_registry(value: Any) -> bool:
    """Says whether a container is of another kind, and may make its parts as it is read."""
    return isinstance(value, CONTAINERS) and type(value) not in CONTAINERS


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    missing = object()
    names = before | now
    return [name for name in names if before.get(name, missing) is not now.get(name, missing)]


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) and _parts(container) == _parts(content):
        return
    container.clear()
    container.extend(content) if isinstance(container, list | deque) else container.update(content)


def _parts(container: Any) -> list[int]:
    parts = [*container, *container.values()] if isinstance(container, dict) else container
    return [id(part) for part in parts]
