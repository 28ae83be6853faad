"""Isolates a run of user code in a forked process, whose side effects end with it.

    parent    fork ------------------------- the function's result or error
    child        the function, end

Whatever the code counts, caches, draws, prints or takes from an iterator, it does so in the child.
A thread of the parent, which the child lacks, may have held a lock at the fork; so a watchdog ends
a child that has stopped.

If the process cannot be forked, since a device is in use, the code runs in the parent on copies
that the caller made. Then only the random streams are restored: other changes remain.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import logging
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

import torch

from zoo._torch import active_fake_mode, disable_current_modes, leave_out_compiler
from zoo.engine.devices import devices_in_use, random_state_restored
from zoo.errors import ZooError
from zoo.profiling.source_location import line_of_frame

T = TypeVar("T")
# held while a plan is made: else a process would be forked while another thread is at it, whose
# locks the fork waits for, and the profiler of a thread that measures kernels would end another's
PLANNING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PLANNING._at_fork_reinit)  # type: ignore[attr-defined]
# part of the error of autograd's engine in a forked process where it has threads for a device
NO_FORK = "fork-based multiprocessing"
# seconds without CPU time after which a child is taken to be blocked forever
PATIENCE = 30
# packages that start processes and wait for them
STARTING = ("subprocess", "multiprocessing", "concurrent")
# modules that fake tensors need; each takes up to 0.2 s to import
FOR_FAKES = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._functorch.config",
    *(("torch.distributed.tensor",) if torch.distributed.is_available() else ()),
    "torch.utils.flop_counter",
)


class FailedCall(NamedTuple):
    """The text of a function's error; for one of zoo's own also the error."""

    text: str
    error: ZooError | None = None


def _failed(error: Exception) -> FailedCall:
    own = error if isinstance(error, ZooError) else None
    return FailedCall(f"{type(error).__name__}: {error}", own)


@functools.cache
def import_for_fakes() -> None:
    """Imports what fake tensors need, once and not in each forked process."""
    for name in FOR_FAKES:
        importlib.import_module(name)


def can_fork() -> bool:
    """Returns whether this process can be forked; one that uses a device cannot."""
    return hasattr(os, "fork") and not devices_in_use()


def isolated(function: Callable[[bool], T], failed: Callable[[str], ZooError]) -> T:
    """Calls a function isolated from the program, and returns its result, which must pickle.

    The function's argument is whether it runs in a forked process, where its changes have no effect
    on this one. Dispatch modes and anomaly detection are off.

    Raises:
        ZooError: the function's own, or `failed` of the text of any other error.
    """
    answer: T | FailedCall = FailedCall(NO_FORK)
    if can_fork():
        answer = in_fork(lambda: _answer(function, True))
    if isinstance(answer, FailedCall) and NO_FORK in answer.text:
        with random_state_restored():
            answer = _answer(function, False)
    if isinstance(answer, FailedCall):
        raise answer.error or failed(answer.text)
    return answer


def _answer(function: Callable[[bool], T], is_forked: bool) -> T | FailedCall:
    # inside a FakeTensorMode the modes must stay
    modes = disable_current_modes() if active_fake_mode() is None else contextlib.nullcontext()
    try:
        with modes, torch.autograd.set_detect_anomaly(False):
            return function(is_forked)
    except Exception as error:
        return _failed(error)


def in_fork(function: Callable[[], T | FailedCall]) -> T | FailedCall:
    """Calls a function in a forked process; returns its result or a `FailedCall`."""
    reader, writer = os.pipe()
    # Python seeds its generator anew in a forked process, and a forward may branch by it
    stream = random.getstate()
    with warnings.catch_warnings():
        # Python warns of the parent's threads, for which the child does not wait
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(reader)
        random.setstate(stream)
        _be_child(function, writer)
    os.close(writer)
    status: int | None = None
    try:
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        # other code may have waited for all children
        with contextlib.suppress(ChildProcessError):
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answer:
        return FailedCall(f"it ended the process, with status {status}")
    result: T | FailedCall = pickle.loads(answer)
    return result


def _be_child(function: Callable[[], object], writer: int) -> NoReturn:
    """Sends the answer and ends the process at once, without the cleanup that is the parent's."""
    try:
        gc.disable()
        faulthandler.disable()
        logging.disable(logging.CRITICAL)
        nowhere = sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
        # the threads of kernels exist only in the parent
        torch.set_num_threads(1)
        leave_out_compiler()
        answering = threading.Lock()
        watch = threading.Thread(
            target=_watch, args=(threading.get_ident(), writer, answering), daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no more threads
            watch.start()
        try:
            answer = pickle.dumps(function())
        except Exception as error:
            answer = pickle.dumps(_failed(error))
        _end(writer, answer, answering)
    finally:
        os._exit(0)


def _watch(watched: int, writer: int, answering: threading.Lock) -> None:
    """Ends this process with a failure when the watched thread has stopped."""
    idle = 0
    while idle < PATIENCE:
        before = time.process_time()
        time.sleep(1.0)
        works = time.process_time() - before > 0.01
        # frames are read only while it is idle: a reference to one keeps tensors alive
        idle = 0 if works or _waits_for_process(watched) else idle + 1
    text = (
        f"for {PATIENCE} s nothing has run at {line_of_frame(sys._current_frames().get(watched))}: "
        "it waits for a lock that another thread held when this process was forked, or for another "
        "thread's work"
    )
    _end(writer, pickle.dumps(FailedCall(text)), answering)


def _waits_for_process(watched: int) -> bool:
    """Returns whether a thread waits for a process that it started, such as a compiler."""
    frame = sys._current_frames().get(watched)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in STARTING:
            return True
        frame = frame.f_back
    return False


def _end(writer: int, answer: bytes, answering: threading.Lock) -> NoReturn:
    """Sends the first answer and ends the process."""
    with answering:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
