"""Runs functions so that nothing of it shows afterwards, and nobody who watches sees it.

Before it has a plan for a chain, the planner runs its steps: on fake tensors, which write to
counters, logs and small real tensors all the same, and for real, which also draws random numbers.
What the first forward then finds must be what it would have found without.

    containers, small tensors    a copy stands in their place, the same wherever they stand
    iterators                    a copy, or one that refuses where Python makes none
    objects                      themselves, their attributes put back afterwards
    random streams               put back afterwards

What has gradients, or is large, is not copied: see "Limits" for what reading a function finds.
"""

import ast
import contextlib
import copy
import itertools
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.nn.modules import module as registries
from torch.utils._python_dispatch import _disable_current_modes

from zoo.errors import PlanError
from zoo.measure.reach import BOOKKEEPING, PLAIN, Variable, reach
from zoo.verification.records import read_streams, set_streams

# bytes of a tensor, and entries of a container, that are copied
SMALL = 1 << 16
LONG = 64
EMPTY: tuple[Any, ...] = ([], (), "", b"", range(0))
# iterators that Python copies
COPIED = frozenset(type(iter(empty)) for empty in EMPTY)


@contextlib.contextmanager
def on_scratch(roots: Sequence[Any]) -> Iterator[None]:
    """Lets functions run on copies of what they change."""
    reached, copies = reach(roots), _Copies()
    streams = read_streams()
    states = [(value, _state_of(value)) for value in reached.generators.values()]
    with contextlib.ExitStack() as undo:
        undo.callback(set_streams, streams)
        for generator, state in states:
            undo.callback(_set_state, generator, state)
        for variable in reached.variables.values():
            undo.callback(_rebind, variable, variable.read())
            _rebind(variable, copies.of(variable.read()))
        for value in (*reached.objects.values(), *reached.modules.values()):
            undo.callback(_put_back, value, dict(vars(value)))
            vars(value).update(copies.of_attributes(value))
        yield


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Hides the block from dispatch modes, hooks for all modules and anomaly detection.

    Counters of operations and profilers of modules would take a step on fake tensors for one of the
    model's. Inside of a mode for fake tensors all modes stay: nothing there is for real.
    """
    modes = _disable_current_modes() if active_fake_mode() is None else contextlib.nullcontext()
    with modes, _silenced(), torch.autograd.set_detect_anomaly(False):
        yield


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _rebind(variable: Variable, value: Any) -> None:
    if variable.read() is not value:
        variable.write(value)


def _put_back(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


class _Copies:
    """Copies of values, one for each."""

    def __init__(self) -> None:
        # the value stays alive beside its copy, so that no other gets its id
        self.known: dict[int, tuple[Any, Any]] = {}

    def of_attributes(self, owner: Any) -> dict[str, Any]:
        """Copies the attributes of an object; of a module also small parameters without gradients.

        Other buffers and parameters are left to who runs it.
        """
        found = {
            name: self.of(value)
            for name, value in vars(owner).items()
            if not (isinstance(owner, nn.Module) and name in BOOKKEEPING)
        }
        if isinstance(owner, nn.Module):
            found["_parameters"] = {name: self.of(p) for name, p in owner._parameters.items()}
        return found

    def of(self, value: Any) -> Any:
        """Returns a copy of a value, or the value where it is not one to copy."""
        if isinstance(value, PLAIN):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = (value, self._made(value))
        return self.known[id(value)][1]

    def _made(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _copy_of_tensor(value)
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            return _copy_of_iterator(value)
        if isinstance(value, dict):
            made = copy.copy(value)
            if len(value) <= LONG:
                made.update((key, self.of(part)) for key, part in value.items())
            return made
        if type(value) in (list, tuple, deque):
            parts = map(self.of, value) if len(value) <= LONG else value
            return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)
        return value.copy() if type(value) is set else value


def _copy_of_tensor(tensor: Tensor) -> Tensor:
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.requires_grad
    if not plain or tensor.nbytes > SMALL:
        return tensor
    made = tensor.detach().clone()
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _copy_of_iterator(value: Any) -> Any:
    if type(value) in COPIED:
        return copy.copy(value)
    if type(value) is itertools.count:
        # the next number and the step, where these are Python's own
        with contextlib.suppress(ValueError, SyntaxError):
            return itertools.count(*ast.literal_eval(repr(value)[len("count") : -1] + ",)"))
    return _Untaken(value)


class _Untaken:
    """Stands in for an iterator that nobody can take from twice."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __iter__(self) -> "_Untaken":
        return self

    def __next__(self) -> NoReturn:
        raise PlanError(
            f"a step takes what comes next from a {type(self._value).__name__}, which planning "
            "cannot give back. Pass checkpoint= a number of segments or a Plan, which need no "
            "measuring."
        )

    def __getattr__(self, name: str) -> Any:
        return self.__next__ if name in ("send", "throw") else getattr(self._value, name)


_lock = threading.Lock()
# how often each thread is silenced now
_silent: dict[int, int] = {}


class _Gate:
    """A hook for all modules that does not fire on threads that are silenced."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        return None if threading.get_ident() in _silent else self.hook(*args)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Lets no hook for all modules fire on this thread; other threads go on."""
    thread = threading.get_ident()
    _change_silence(thread, 1)
    try:
        yield
    finally:
        _change_silence(thread, -1)


def _change_silence(thread: int, change: int) -> None:
    """Puts up gates for the first thread that comes, and takes them down after the last."""
    with _lock:
        _silent[thread] = _silent.get(thread, 0) + change
        if not _silent[thread]:
            del _silent[thread]
        every: tuple[Any, ...] = (
            registries._global_forward_pre_hooks, registries._global_forward_hooks,
        )  # fmt: skip
        for registry in every:
            for number, hook in list(registry.items()):
                if not _silent:
                    registry[number] = hook.hook if isinstance(hook, _Gate) else hook
                elif not isinstance(hook, _Gate):
                    registry[number] = _Gate(hook)
