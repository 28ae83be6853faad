"""Isolates a run of a user's code: a forked process, whose side effects end with it.

    parent    fork ------------------------- what the function returned, or raised
    child        the function, end

What the code counts, caches, draws, prints or takes from an iterator, it does in the child. Where a
process cannot be forked, since a device is in use, the code runs in the parent on what the caller
copied. Then only the random streams are restored: what it changes beside these copies stays so.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from zoo._torch import active_fake_mode, disable_current_modes, leave_out_compiler
from zoo.chain import GLOBAL_HOOKS
from zoo.engine.devices import devices_in_use
from zoo.errors import ZooError
from zoo.verification.state_comparison import random_state_restored

# what autograd's engine says in a forked process where it has threads for a device
NO_FORK = "fork-based multiprocessing"


class Raised(NamedTuple):
    """What a function raised: the name of its class and its text; an error of zoo's also itself."""

    kind: str
    text: str
    error: ZooError | None = None


class Died(NamedTuple):
    """The child ended without an answer; `status` as `os.waitstatus_to_exitcode` has it."""

    status: int | None


def can_fork() -> bool:
    """Says whether this process can be forked; one that uses a device cannot."""
    return hasattr(os, "fork") and not devices_in_use()


def isolated(function: Callable[[bool], Any], *, fires_hooks: bool = False) -> Any:
    """Calls a function where nobody sees it, and returns what it returns, `Raised` or `Died`.

    It is told whether nothing that it changes is seen afterwards. In another process it must
    return what pickles. Dispatch modes and anomaly detection do not see it, nor do hooks for all
    modules unless it `fires_hooks`, as the forward of a user does.
    """
    if can_fork():
        answer = in_fork(lambda: _answer(function, True, fires_hooks))
        if not (isinstance(answer, Raised) and NO_FORK in answer.text):
            return answer
    with random_state_restored(), contextlib.nullcontext() if fires_hooks else _hooks_silenced():
        return _answer(function, False, fires_hooks)


def _answer(function: Callable[[bool], Any], is_apart: bool, fires_hooks: bool) -> Any:
    if is_apart and not fires_hooks:
        for hooks in GLOBAL_HOOKS:
            hooks.clear()
    # inside of a mode for fake tensors nothing is for real
    modes = disable_current_modes() if active_fake_mode() is None else contextlib.nullcontext()
    try:
        with modes, torch.autograd.set_detect_anomaly(False):
            return function(is_apart)
    except ZooError as error:
        return Raised(type(error).__name__, str(error), error)
    except Exception as error:
        return Raised(type(error).__name__, str(error))


def in_fork(function: Callable[[], Any]) -> Any:
    """Calls a function in a child; returns what it returns, `Raised` or `Died`."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of threads, which the child does not have and does not wait for
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(reader)
        _be_child(function, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = _end(child)
    return pickle.loads(answer) if answer else Died(status)


def _end(child: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        # somebody else waits for all children
        return None


def _be_child(function: Callable[[], Any], writer: int) -> NoReturn:
    """Answers and ends at once: what is here belongs to the parent, which cleans it up."""
    try:
        gc.disable()
        faulthandler.disable()
        logging.disable(logging.CRITICAL)
        _hush()
        # the threads of kernels stayed in the parent
        torch.set_num_threads(1)
        leave_out_compiler()
        try:
            answer = pickle.dumps(function())
        except Exception as error:
            answer = pickle.dumps(Raised(type(error).__name__, str(error)))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _hush() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for place in (1, 2):
        os.dup2(nowhere, place)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


# held by the thread on which no hook for all modules fires
_silence = threading.RLock()


@contextlib.contextmanager
def _hooks_silenced() -> Iterator[None]:
    """Lets no hook for all modules fire on this thread; on other threads they go on."""
    with _silence:
        hooks = [dict(registry) for registry in GLOBAL_HOOKS[:2]]
        for registry, originals in zip(GLOBAL_HOOKS, hooks, strict=False):
            registry.update({key: _elsewhere(hook) for key, hook in originals.items()})
        try:
            yield
        finally:
            for registry, originals in zip(GLOBAL_HOOKS, hooks, strict=False):
                # another thread may have removed some
                registry.update({key: originals[key] for key in originals if key in registry})


def _elsewhere(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that fires on all threads but this one."""
    thread = threading.get_ident()
    return lambda *args: None if threading.get_ident() == thread else hook(*args)
