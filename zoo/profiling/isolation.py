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
import weakref
from collections.abc import Callable
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

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
# the most requests that are answered in a process which cannot be forked
MOST_HERE = 12
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
def _import_for_fakes() -> None:
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
    return isolated_service(function, None, failed)[0]


def isolated_service(
    function: Callable[[bool], T],
    serve: Callable[[Any], Any] | None,
    failed: Callable[[str], ZooError],
) -> tuple[T, Callable[[Any], Any]]:
    """Calls a function as `isolated` does; returns also what answers requests, there, by `serve`.

    Each request finds what the function has left there. Without a fork it finds what the one before
    has left, and those after `MOST_HERE` are refused.
    """
    _import_for_fakes()
    answer: T | FailedCall = FailedCall(NO_FORK)
    ask: Callable[[Any], Any] = _ServedHere(serve)
    if can_fork():
        child = ForkedCall(lambda: _answer(function, True), serve)
        answer, ask = child.receive(), child.ask
        if serve is None or isinstance(answer, FailedCall):
            child.close()
    if isinstance(answer, FailedCall) and NO_FORK in answer.text:
        ask = _ServedHere(serve)
        with random_state_restored():
            answer = _answer(function, False)
    if isinstance(answer, FailedCall):
        raise answer.error or failed(answer.text)
    return answer, ask


class _ServedHere:
    """Answers requests in this process, as few as `MOST_HERE`: what user code changes remains."""

    def __init__(self, serve: Callable[[Any], Any] | None) -> None:
        self.serve, self.left = serve, 0 if serve is None else MOST_HERE

    def __call__(self, request: Any) -> Any:
        if self.serve is None or not self.left:
            return FailedCall("user code would run in this process once more")
        self.left -= 1
        with random_state_restored():
            return _answer_to(self.serve, request)


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
    child = ForkedCall(function)
    try:
        return child.receive()  # type: ignore[no-any-return]
    finally:
        child.close()


class ForkedCall:
    """A forked process that calls a function, and then answers requests, each in a fork of its own.

        parent    fork -------- result ------- ask ---------- answer -- close
        child        function                    fork                     end
        its child                                    serve

    So what a request changes is undone before the next one. Without `serve` it ends at once.
    """

    def __init__(
        self, function: Callable[[], Any], serve: Callable[[Any], Any] | None = None
    ) -> None:
        (reading, to_parent), (from_parent, writing) = os.pipe(), os.pipe()
        # Python seeds its generator anew in a forked process, and a forward may branch by it
        stream = random.getstate()
        with warnings.catch_warnings():
            # Python warns of the parent's threads, for which the child does not wait
            warnings.simplefilter("ignore", DeprecationWarning)
            self.child = os.fork()
        if not self.child:
            os.close(reading)
            os.close(writing)
            random.setstate(stream)
            _be_child(function, serve, from_parent, to_parent)
        os.close(to_parent)
        os.close(from_parent)
        self._reader = os.fdopen(reading, "rb")
        # unbuffered: what is written to a child that has ended is not written again at the close
        self._writer = os.fdopen(writing, "wb", buffering=0)
        is_serving = serve is not None
        pipes = self._reader, self._writer
        self._end = weakref.finalize(self, _end_child, self.child, is_serving, *pipes)

    def ask(self, request: object) -> Any:
        """Returns the answer to a request, which is pickled, or a `FailedCall`."""
        if not self._end.alive:
            return FailedCall("its process has ended")
        try:
            _send(self._writer, pickle.dumps(request))
        except OSError:
            return FailedCall("it has ended the process")
        return self.receive()

    def receive(self) -> Any:
        """Returns what the child sends next, or a `FailedCall` if it ends instead."""
        try:
            sent = _receive(self._reader)
        except BaseException:
            os.kill(self.child, signal.SIGKILL)
            self.close()
            raise
        if sent is None:
            status = self.close()
            return FailedCall(f"it ended the process, with status {status}")
        return pickle.loads(sent)

    def close(self) -> int | None:
        """Ends the child; returns its status, unless other code has waited for it."""
        return self._end()


def _end_child(child: int, is_serving: bool, *pipes: IO[bytes]) -> int | None:
    for pipe in pipes:
        pipe.close()
    # other code may have waited for all children
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if is_serving:
            # another process that was forked meanwhile may hold the pipe by which it would see
            # the end
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None


def _send(pipe: IO[bytes], data: bytes) -> None:
    """Sends a pickled value."""
    data = len(data).to_bytes(8, "little") + data
    while data:
        # unbuffered, it may take a part
        data = data[pipe.write(data) :]


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Returns the next pickled value; None at the end."""
    size = int.from_bytes(pipe.read(8), "little")
    data = pipe.read(size)
    return data if size and len(data) == size else None


def _be_child(
    function: Callable[[], object],
    serve: Callable[[Any], Any] | None,
    from_parent: int,
    to_parent: int,
) -> NoReturn:
    """Sends answers and ends the process at once, without the cleanup that is the parent's."""
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
        reader, writer = os.fdopen(from_parent, "rb"), os.fdopen(to_parent, "wb", buffering=0)
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
        with answering:
            _send(writer, answer)
            # an interrupt is the parent's, which may go on with what it has
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            while serve is not None and (request := _receive(reader)) is not None:
                answer_to = functools.partial(_answer_to, serve, pickle.loads(request))
                _send(writer, pickle.dumps(in_fork(answer_to)))
    finally:
        os._exit(0)


def _answer_to(serve: Callable[[Any], Any], request: Any) -> Any:
    return _answer(lambda _: serve(request), True)


def _watch(watched: int, writer: IO[bytes], answering: threading.Lock) -> None:
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
    with answering:
        _send(writer, pickle.dumps(FailedCall(text)))
        os._exit(0)


def _waits_for_process(watched: int) -> bool:
    """Returns whether a thread waits for a process that it started, such as a compiler."""
    frame = sys._current_frames().get(watched)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in STARTING:
            return True
        frame = frame.f_back
    return False
