"""Module hooks of the user, fired once per forward and not again by a second run.

A hook that only looks (it returns None and leaves its module as it is) has done its work in the
first run. One that acts - returns another output, sets an attribute as pruning and the hook-based
spectral norm do - belongs to the computation and must act again. Which is which is seen in the
first run. Torch's own hooks always run: they keep books that a second run needs, too.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from zoo.engine.notes import version_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
Hook = Callable[..., Any]
Key = tuple[int, str, int]


class Hooks:
    """Modules that have hooks, and the hooks that acted in the first run."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self.acting: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes which hooks act while the block runs."""
        with self._in_place_of(self._watch):
            yield

    @contextlib.contextmanager
    def acting_only(self) -> Iterator[None]:
        """Leaves only the hooks that act in place."""
        with self._in_place_of(self._if_acting):
            yield

    def _watch(self, key: Key, module: nn.Module, hook: Hook) -> Hook:
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = _face(module, args)
            result = hook(*args, **kwargs)
            if result is not None or _face(module, args) != before:
                self.acting.add(key)
            return result

        watched.__wrapped__ = hook  # type: ignore[attr-defined]
        return hook if _is_torch(hook) else watched

    def _if_acting(self, key: Key, module: nn.Module, hook: Hook) -> Hook | None:
        return hook if _is_torch(hook) or key in self.acting else None

    @contextlib.contextmanager
    def _in_place_of(self, change: Callable[[Key, nn.Module, Hook], Hook | None]) -> Iterator[None]:
        originals = [
            (module, name, getattr(module, name)) for module in self.modules for name in HOOKS
        ]
        try:
            for module, name, hooks in originals:
                changed = (
                    (number, change((id(module), name, number), module, hook))
                    for number, hook in hooks.items()
                )
                setattr(module, name, OrderedDict(pair for pair in changed if pair[1] is not None))
            yield
        finally:
            for module, name, hooks in originals:
                setattr(module, name, hooks)


def _face(module: nn.Module, args: Any) -> Any:
    """Returns what a hook could change of a module and what it gets, by identity and version."""
    registries = (module._parameters, module._buffers)
    tensors = [value for registry in registries for value in registry.values()]
    tensors += [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return (
        [(name, id(value)) for name, value in vars(module).items()],
        [(id(tensor), version_of(tensor)) for tensor in tensors if tensor is not None],
    )


def _is_torch(hook: Hook) -> bool:
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return origin.partition(".")[0] == "torch"
