"""The attributes of a module at one moment.

Most modules keep theirs for a whole training. Such a snapshot is kept, too, and only compared,
which takes a tenth of the time of another one. Only those are kept that hold nothing but numbers:
another could keep a graph, or its own module, alive.
"""

import weakref
from operator import is_
from typing import Any

from torch import nn

from zoo.engine.norms import is_norm
from zoo.engine.notes import PLAIN, is_fixed, is_flat, is_same_value, note, thaw, unchanged

BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
_NOTED = object()


class Snapshot:
    """The attributes of a module, without torch's own books: parameters, buffers, children, hooks.

    `simple` says that none of them leads anywhere; `norm` that the module is one of torch's that
    folds its batch into running statistics now, so that what these are does not matter.
    """

    __slots__ = ("count", "names", "nones", "norm", "notes", "simple", "values")

    def __init__(self, module: nn.Module) -> None:
        attributes = vars(module)
        self.count = len(attributes)
        self.norm = module.training and is_norm(module)
        self.notes = {
            name: note(value)
            for name, value in attributes.items()
            if name not in BOOKKEEPING and not is_fixed(value)
        }
        self.simple = all(is_flat(noted) for noted in self.notes.values())
        self.names = tuple(name for name in attributes if name not in BOOKKEEPING)
        # a missing one would look like these
        self.nones = tuple(name for name in self.names if attributes[name] is None)
        self.values = tuple(
            _NOTED if name in self.notes else attributes[name] for name in self.names
        )

    def holds(self, module: nn.Module) -> bool:
        """Says whether the attributes are still the same."""
        attributes = vars(module)
        return (
            len(attributes) == self.count
            and all(map(attributes.__contains__, self.nones))
            and (
                all(map(is_, map(attributes.get, self.names), self.values))
                or all(map(_is_equal, map(attributes.get, self.names), self.values))
            )
            and all(unchanged(noted, attributes.get(name)) for name, noted in self.notes.items())
        )

    def thawed(self, fresh: dict[int, Any]) -> dict[str, Any]:
        """Returns the attributes as they were."""
        plain = dict(zip(self.names, self.values, strict=True))
        return plain | {name: thaw(noted, fresh) for name, noted in self.notes.items()}


_simple: "weakref.WeakKeyDictionary[nn.Module, Snapshot]" = weakref.WeakKeyDictionary()


def snapshot(module: nn.Module) -> Snapshot:
    """Returns the attributes of a module as they are now."""
    known = _simple.get(module)
    if known is not None and known.holds(module):
        return known
    found = Snapshot(module)
    if found.simple:
        _simple[module] = found
    return found


def _is_equal(now: Any, before: Any) -> bool:
    if now is before or before is _NOTED:
        return True
    return isinstance(before, PLAIN) and is_same_value(before, now)
