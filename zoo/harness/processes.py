"""Process isolation: runs a function on a cell in a fresh process; there is always a result.

Importing torch for each of twenty cells would take longer than the cells. So, on Linux, the
processes are forked from a server (multiprocessing's forkserver) that has imported everything and
run nothing: it has no threads, no device and no tensor of another cell. On other systems they are
spawned.

torch can limit the memory of accelerators, but not that of the CPU. So `memory_limit` bounds

    cuda, xpu, ...   what torch's caching allocator reserves; neither the driver's context nor host
                     memory
    cpu              private writable memory beyond that at the start (RLIMIT_DATA, Linux only):
                     tensors, Python objects, libraries' buffers, stacks of threads, blocks the C
                     library keeps

Both exceed the peak of the tensors: ResNet-18, whose step peaks at 145 MiB, fails with 200 MiB or
less and runs with 220 MiB or more. RLIMIT_AS would count every mapped library, gigabytes with
CUDA's; limiting the resident set needs rights that a test runner lacks.
"""

import errno
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from zoo.engine.devices import total_bytes
from zoo.errors import ConfigError, in_a_line
from zoo.harness.environment import proc_entry
from zoo.report.rows import UNFIT
from zoo.units import format_bytes

Result = dict[str, Any]
Work = TypeVar("Work")

# macOS could fork, too, but its system libraries break in the child
_FORKS = sys.platform == "linux"
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
# modules that a cell would otherwise import itself
_PRELOADED = ("__main__", "torch._dynamo", "sklearn.datasets", "nibabel")

# how libraries below torch report that memory ran out; torch and Python have their own exceptions
WORDS = (
    *("can't allocate memory", "out of memory", "bad_alloc", "alloc_failed"),
    "could not create a memory object",
)
# with a limit also a thread whose stack does not fit, without one there were too many threads; what
# oneDNN says if the failing allocation is its own; a library that cannot be loaded; and what Python
# says of C code that could not even make an exception
LIMITED_WORDS = (
    *(*WORDS, "resource temporarily unavailable"),
    *("could not create a primitive", "could not execute a primitive"),
    *("failed to map segment", "cannot allocate memory"),
    *("error return without exception set", "returned null without setting an exception"),
)
# torch reads the first; versions before 2.10 know only the second
ALLOCATOR_SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_CAP = "set_per_process_memory_fraction"


def outcome(function: Callable[[Work], Result], cell: Work, timeout: float) -> Result:
    """Returns a module-level function's result for a cell, or else "status" and "reason".

    The status is "does not fit" if memory ran out, and otherwise "failed", with the end of the
    process's output under "printed". `timeout` is in seconds.
    """
    if _FORKS:
        _start_server(function.__module__)
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, receiver:
        output = Path(folder) / "output"
        output.touch()
        arguments = (function, cell, sender, output, dict(os.environ))
        process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        # how many processes Linux has killed so far because memory ran out
        kills = proc_entry("vmstat", "oom_kill ")
        process.start()
        sender.close()
        try:
            if receiver.poll(timeout):
                result: Result = receiver.recv()
            else:
                reason = f"not done after {timeout:g} s; --timeout allows more"
                result = {"status": "failed", "reason": reason}
        except EOFError:
            process.join()
            by_system = proc_entry("vmstat", "oom_kill ") != kills
            result = _ended(process.exitcode, by_system, output.read_text(errors="replace"))
        finally:
            process.kill()
            process.join()
        if "reason" in result:
            result["printed"] = output.read_text(errors="replace")[-4000:]
        return result


def check_limit(size: int | str | None, device: str) -> None:
    """Raises ConfigError if the memory of a process cannot be limited."""
    if size is None:
        return
    if device == "cpu" and sys.platform != "linux":
        raise ConfigError(
            f"memory_limit on the CPU needs Linux; this is {sys.platform}. Leave it out"
        )
    if device != "cpu" and not hasattr(torch.get_device_module(device), _CAP):
        raise ConfigError(
            f"memory_limit on {device} needs torch.{device}.{_CAP}, which this torch lacks. "
            "Leave it out"
        )


@contextmanager
def limited(size: int | None, device: str) -> Iterator[None]:
    """Limits the memory of this process to `size` bytes within a block, as the module describes.

    If that is too little, allocators raise errors that `ran_out` recognizes.
    """
    with ExitStack() as undo:
        if size is not None and device != "cpu":
            cap = getattr(torch.get_device_module(device), _CAP)
            cap(min(size / total_bytes(torch.device(device)), 1.0))
            undo.callback(cap, 1.0)
        elif size is not None:
            resource: Any = import_module("resource")  # Windows has none
            # starts torch's threads, whose stacks of 8 MiB would otherwise count as the cell's
            torch.ones(1 << 17).add_(1)
            # the private writable memory in KiB, as RLIMIT_DATA counts it
            before = 1024 * int(proc_entry("self/status", "VmData").split()[0])
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (before + size, hard))
            undo.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))
        yield


def ran_out(error: BaseException, limit: int | None = None) -> bool:
    """Returns whether memory ran out: by an error, its cause, or what it was raised during."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    words = WORDS if limit is None else LIMITED_WORDS
    by_words = isinstance(error, RuntimeError | SystemError | ImportError)
    if by_words and _has_words(str(error), words):
        return True
    earlier = error.__cause__ if error.__suppress_context__ else error.__context__
    return earlier is not None and ran_out(earlier, limit)


def _has_words(text: str, words: Sequence[str]) -> bool:
    return any(word in text.lower() for word in words)


def _start_server(module: str) -> None:
    """Starts the server from which cells are forked; Ctrl-C must not end it while it imports."""
    _CONTEXT.set_forkserver_preload([*_PRELOADED, module])
    if threading.current_thread() is threading.main_thread():
        earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, earlier)


def _ended(code: int, by_system: bool, printed: str) -> Result:
    """Returns the result of a process that ended without one.

    Where C++ code lets no exception pass, one of memory that ran out ends the process.
    """
    is_aborted = code == -signal.SIGABRT and _has_words(printed, WORDS)
    if is_aborted or (code == -signal.SIGKILL and by_system):
        who = "C++ code" if is_aborted else "the system"
        reason = f"killed by {who} as memory ran out; a smaller batch_size needs less"
        return {"status": UNFIT, "reason": reason}
    reason = (
        f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )
    by_hand = ", by hand or as memory ran out" * (code == -signal.SIGKILL)
    return {"status": "failed", "reason": f"{reason}{by_hand}"}


def _raised(error: Exception, limit: int | None) -> Result:
    """Returns the result of a process whose function raised."""
    words = in_a_line(error)
    if not ran_out(error, limit):
        return {"status": "failed", "reason": words}
    needs = f"more memory than there is ({words[:200]}); a smaller batch_size needs less"
    if limit is not None:
        needs = f"more than its memory_limit of {format_bytes(limit)}"
    return {"status": UNFIT, "reason": f"needs {needs}"}


def _serve(
    function: Callable[[Work], Result],
    cell: Work,
    sender: Connection,
    out: Path,
    environment: dict[str, str],
) -> None:
    """Runs in the new process; its output goes to a file, not into the progress display.

    `environment` is that of the waiting process now; the server has the one of its start.
    """
    os.environ.clear()
    os.environ.update(environment)
    # Ctrl-C reaches the whole group; the waiting process handles it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    score = Path("/proc/self/oom_score_adj")
    if score.is_file():
        # when memory runs out, Linux kills this process, not the waiting one
        score.write_text("1000")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(out, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _use_expandable_segments()
    try:
        result = function(cell)
    except Exception as error:
        traceback.print_exc()
        result = _raised(error, getattr(cell, "memory_limit", None))
    # the waiting process reads the file and ends this one
    sys.stdout.flush()
    sender.send(result)


def _use_expandable_segments() -> None:
    """Sets the allocator so that it reserves little beyond what a cell allocates, unless it is set.

    This process has not used a device yet, so that the allocator reads it.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def _end_with_parent() -> None:
    """Ends this process when the waiting one ends, however it ends."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
