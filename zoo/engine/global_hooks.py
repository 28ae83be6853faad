"""Hooks that the user registered for all modules, as profilers do, fired once per forward.

Their registries are shared by all threads, so none is taken out for a second run. While a segment
runs, each stands behind a gate that asks what its thread is doing: a first run, which notes whether
the hook acts; a second run, which fires only those that did; or neither.

    register_module_forward_hook(log)      fires in the first run
    register_module_forward_hook(scale)    returns another output: fires in both

torch's own keep books of every run and fire in both, too; in the work of planning none fires.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import Any

from torch.nn.modules import module as registries

from zoo.engine.acting import Acting, Hook, is_of_engine, is_ours
from zoo.errors import RecomputeError


def global_hooks() -> dict[int, Hook]:
    """Returns the forward hooks that the user registered for all modules, by number."""
    if not registries._global_forward_pre_hooks and not registries._global_forward_hooks:
        return {}
    found: Any = registries._global_forward_pre_hooks | registries._global_forward_hooks
    return {number: _behind(hook) for number, hook in found.items() if not is_ours(_behind(hook))}


class GlobalHooks:
    """The hooks for all modules that act in a first run."""

    def __init__(self, acting: Acting) -> None:
        self.acting = acting

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes which hooks act while the block runs on this thread."""
        with _gated(_First(self.acting, _thread.run)):
            yield

    @contextlib.contextmanager
    def acting_only(self) -> Iterator[None]:
        """Lets only those fire on this thread that acted in the first run.

        Raises:
            RecomputeError: one of them is gone.
        """
        numbers = {key for key in self.acting.hooks if isinstance(key, int)}
        if not numbers <= global_hooks().keys():
            raise RecomputeError(
                "a hook for all modules, which changed what they compute, was removed between "
                "forward and backward. Remove it after the backward."
            )
        with _gated(_Second(self.acting.hooks)):
            yield


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Lets none fire on this thread, not even torch's own."""
    if not (registries._global_forward_pre_hooks or registries._global_forward_hooks):
        yield
        return
    with _through_gates(_SILENCE):
        yield


class _First:
    """A first run, maybe in another run."""

    def __init__(self, acting: Acting, outer: "_Run | None") -> None:
        self.acting, self.outer = acting, outer

    def fire(self, number: int, hook: Hook, args: Any) -> Any:
        inner = hook if self.outer is None else _passed_to(self.outer, number, hook)
        return self.acting.fire(number, inner, args)


class _Second:
    """A second run; whatever runs around it is another matter."""

    def __init__(self, acting: set[Hashable]) -> None:
        self.acting = acting

    def fire(self, number: int, hook: Hook, args: Any) -> Any:
        return hook(*args) if number in self.acting else None


class _Silence:
    """Work that is no run of the model."""

    def fire(self, number: int, hook: Hook, args: Any) -> Any:
        return None


_Run = _First | _Second | _Silence
_SILENCE = _Silence()


def _passed_to(run: _Run, number: int, hook: Hook) -> Hook:
    return lambda *args: run.fire(number, hook, args)


class _Thread(threading.local):
    run: _Run | None = None


class _Gate:
    """A hook behind a gate."""

    def __init__(self, number: int, hook: Hook) -> None:
        self.number, self.__wrapped__ = number, hook

    def __call__(self, *args: Any) -> Any:
        hook, run = self.__wrapped__, _thread.run
        if run is None or (is_ours(hook) and run is not _SILENCE):
            return hook(*args)
        return run.fire(self.number, hook, args)


_thread = _Thread()
_lock = threading.RLock()
_running = 0


@contextlib.contextmanager
def _gated(run: _Run) -> Iterator[None]:
    if not global_hooks():
        yield
        return
    with _through_gates(run):
        yield


@contextlib.contextmanager
def _through_gates(run: _Run) -> Iterator[None]:
    earlier = _thread.run
    _enter(1)
    _thread.run = run
    try:
        yield
    finally:
        _thread.run = earlier
        _enter(-1)


def _enter(change: int) -> None:
    """Puts up gates for the first that comes, on any thread, and takes them down after the last."""
    global _running  # noqa: PLW0603
    with _lock:
        _running += change
        every: tuple[Any, ...] = (
            registries._global_forward_pre_hooks, registries._global_forward_hooks,
        )  # fmt: skip
        for registry in every:
            for number, hook in list(registry.items()):
                if not _running:
                    registry[number] = _behind(hook)
                elif not isinstance(hook, _Gate) and not is_of_engine(hook):
                    registry[number] = _Gate(number, hook)


def _behind(hook: Hook) -> Hook:
    return hook.__wrapped__ if isinstance(hook, _Gate) else hook
