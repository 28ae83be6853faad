"""Whether a hook looks or acts.

One that looks returns None, and leaves its module, what it gets, and what others read as they are.
A log that only such hooks write belongs to none of these.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.engine.notes import version_of

Hook = Callable[..., Any]
Places = Mapping[Hashable, Callable[[], Callable[[], bool]]]


class Acting:
    """The hooks that act in a first run.

    `read` are the places that the rest of it reads; `places` has for a hook those that it may read
    or write: what to call before it, and what that returns to be asked after it for a change.
    """

    def __init__(self, read: set[Hashable]) -> None:
        self.read = read
        self.hooks: set[Hashable] = set()
        self.places: dict[Hashable, Places] = {}
        self.changed: dict[Hashable, set[Hashable]] = {}

    def fire(self, key: Hashable, hook: Hook, args: Any) -> Any:
        """Calls a hook with a module and more, and notes what it does."""
        module, *rest = args
        before = _face(module, rest)
        watches = {place: watch() for place, watch in self.places.get(key, {}).items()}
        result = hook(*args)
        if result is not None or _face(module, rest) != before:
            self.hooks.add(key)
        changed = {place for place, has_changed in watches.items() if has_changed()}
        self.changed.setdefault(key, set()).update(changed)
        return result

    def close(self) -> None:
        """Counts in those that wrote what is read by the forward or by others that act."""
        count = -1
        while len(self.hooks) > count:
            count = len(self.hooks)
            for key in self.hooks:
                self.read.update(self.places.get(key, ()))
            self.hooks |= self._writers()

    def _writers(self) -> set[Hashable]:
        return {key for key, changed in self.changed.items() if changed & self.read}


def _face(module: nn.Module, args: Any) -> Any:
    """Returns what a hook could change of a module and what it gets, by identity and version."""
    registries = (module._parameters, module._buffers)
    tensors = [value for registry in registries for value in registry.values()]
    tensors += [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return (
        [(name, id(value)) for name, value in vars(module).items()],
        [(id(tensor), version_of(tensor)) for tensor in tensors if tensor is not None],
    )


def is_ours(hook: Hook) -> bool:
    """Says whether a hook is of torch or of this engine: it keeps books of every run."""
    return _origin(hook).partition(".")[0] == "torch" or is_of_engine(hook)


def is_of_engine(hook: Hook) -> bool:
    """Says whether a hook is of this engine."""
    return _origin(hook).startswith("zoo.engine.")


def _origin(hook: Hook) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__
