"""Module hooks of the user, fired once per forward and not again by a second run.

A hook that only looks (it returns None and leaves its module as it is) has done its work in the
first run. One that acts - returns another output, sets an attribute as pruning and the hook-based
spectral norm do, writes a variable that the forward reads - belongs to the computation and must act
again. Which is which is seen in the first run (`acting`). Torch's own hooks always run: they keep
books that a second run needs, too.
"""

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from zoo.engine.acting import Acting, Hook, is_ours
from zoo.engine.global_hooks import GlobalHooks, global_hooks
from zoo.engine.reach import Reached, places_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Hooks:
    """Modules that have hooks as a first run finds them, and the hooks that act in it."""

    def __init__(self, reached: Reached) -> None:
        self.found = [
            (getattr(module, name), dict(getattr(module, name)))
            for module in reached.hooked
            for name in HOOKS
        ]
        self.acting = Acting(reached.read)
        self.acting.places = {key: places_of(hook) for key, hook in self._users()}
        self.everywhere = GlobalHooks(self.acting)

    def _users(self) -> Iterator[tuple[Hashable, Hook]]:
        yield from global_hooks().items()
        for place, (_, hooks) in enumerate(self.found):
            for number, hook in hooks.items():
                if not is_ours(_innermost(hook)):
                    yield (place, number), _innermost(hook)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes which hooks act while the block runs."""
        watches: list[_Watched] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.everywhere.watched())
            for place, (registry, hooks) in enumerate(self.found):
                chosen = dict(hooks)
                for number, hook in hooks.items():
                    if not is_ours(_innermost(hook)):
                        chosen[number] = _Watched(hook, self.acting, (place, number))
                        watches.append(chosen[number])
                stack.enter_context(_exchanged(registry, chosen, again=False))
            try:
                yield
            finally:
                for watch in watches:
                    watch.over = True
                self.acting.close()

    @contextlib.contextmanager
    def acting_only(self) -> Iterator[None]:
        """Has the hooks in place that acted in the first run, removed ones too, and torch's own."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.everywhere.acting_only())
            for place, (registry, hooks) in enumerate(self.found):
                chosen = {
                    number: _innermost(hook)
                    for number, hook in (hooks | registry).items()
                    if (place, number) in self.acting.hooks
                    or (is_ours(_innermost(hook)) and number in registry)
                }
                stack.enter_context(_exchanged(registry, chosen, again=True))
            yield


class _Watched:
    """A hook in a first run: notes whether it acts, until that run is over."""

    def __init__(self, hook: Hook, acting: Acting, key: Hashable) -> None:
        self.__wrapped__ = hook
        self.acting, self.key = acting, key
        self.over = False

    def __call__(self, *args: Any) -> Any:
        if self.over:
            return self.__wrapped__(*args)
        return self.acting.fire(self.key, self.__wrapped__, args)


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
