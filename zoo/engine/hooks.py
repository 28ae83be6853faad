"""Module hooks of the user, fired once per forward and not again by a second run.

A hook that only looks (it returns None and leaves its module as it is) has done its work in the
first run. One that acts - returns another output, sets an attribute as pruning and the hook-based
spectral norm do - belongs to the computation and must act again. Which is which is seen in the
first run. Torch's own hooks always run: they keep books that a second run needs, too.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from zoo.engine.notes import version_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
Hook = Callable[..., Any]
Key = tuple[int, int]


class Hooks:
    """Modules that have hooks as a first run finds them, and the hooks that act in it."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.found = [
            (module, getattr(module, name), dict(getattr(module, name)))
            for module in modules
            for name in HOOKS
        ]
        self.acting: set[Key] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes which hooks act while the block runs."""
        watches: list[_Watched] = []
        with contextlib.ExitStack() as stack:
            for place, (module, registry, hooks) in enumerate(self.found):
                chosen = dict(hooks)
                for number, hook in hooks.items():
                    if not _is_torch(hook):
                        chosen[number] = _Watched(hook, module, self.acting, (place, number))
                        watches.append(chosen[number])
                stack.enter_context(_exchanged(registry, chosen, again=False))
            try:
                yield
            finally:
                for watch in watches:
                    watch.over = True

    @contextlib.contextmanager
    def acting_only(self) -> Iterator[None]:
        """Has the hooks in place that acted in the first run, removed ones too, and torch's own."""
        with contextlib.ExitStack() as stack:
            for place, (_, registry, hooks) in enumerate(self.found):
                chosen = {
                    number: _innermost(hook)
                    for number, hook in (hooks | registry).items()
                    if (place, number) in self.acting or (_is_torch(hook) and number in registry)
                }
                stack.enter_context(_exchanged(registry, chosen, again=True))
            yield


class _Watched:
    """A hook in a first run: notes whether it acts, until that run is over."""

    def __init__(self, hook: Hook, module: nn.Module, acting: set[Key], key: Key) -> None:
        self.__wrapped__ = hook
        self.module, self.acting, self.key = module, acting, key
        self.over = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.over:
            return self.__wrapped__(*args, **kwargs)
        before = _face(self.module, args)
        result = self.__wrapped__(*args, **kwargs)
        if result is not None or _face(self.module, args) != before:
            self.acting.add(self.key)
        return result


@contextlib.contextmanager
def _exchanged(registry: Any, chosen: Mapping[int, Hook], *, again: bool) -> Iterator[None]:
    """Fills a registry of hooks with others; what a first run adds and removes itself is kept.

    Entry by entry, in the registry itself: the handles of hooks hold it, and another thread may be
    going through it.
    """
    before = dict(registry)
    _fill(registry, chosen)
    try:
        yield
    finally:
        if not again:
            before = {n: hook for n, hook in before.items() if n in registry}
            before |= {n: hook for n, hook in registry.items() if n not in chosen}
        _fill(registry, {n: _without_past(hook) for n, hook in before.items()})


def _fill(registry: Any, chosen: Mapping[int, Hook]) -> None:
    for number in registry.keys() - chosen.keys():
        del registry[number]
    registry.update(chosen)
    if list(registry) != list(chosen):
        for number in chosen:
            registry.move_to_end(number)


def _without_past(hook: Hook) -> Hook:
    """Takes off watches that are over, as another thread may have left them."""
    while isinstance(hook, _Watched) and hook.over:
        hook = hook.__wrapped__
    return hook


def _innermost(hook: Hook) -> Hook:
    while isinstance(hook, _Watched):
        hook = hook.__wrapped__
    return hook


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
    hook = _innermost(hook)
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return origin.partition(".")[0] == "torch"
