"""Runs a function on a cell in a fresh process and turns whatever happens into a result.

Importing torch anew for each of twenty cells would take longer than the cells. So the processes are
forked, where the system can, from one that has imported everything and run nothing: no threads, no
device and no tensor of another cell are in it. Elsewhere each starts from nothing.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from zoo.harness.limits import be_killed_first, kills, ran_out, too_much

Result = dict[str, Any]
Work = TypeVar("Work")

# macOS could fork too, but its own libraries do not survive it
_FORKS = sys.platform == "linux"
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
_IMPORTED = ["__main__", "torch._dynamo", "zoo.harness.worker", "sklearn.datasets", "nibabel"]


def outcome(function: Callable[[Work], Result], cell: Work, timeout: float) -> Result:
    """Returns what a function of a module returns for a cell, or else "status" and "reason".

    The status is "does not fit" where memory ran out, and "failed" otherwise.
    """
    if _FORKS:
        _start_server()
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, receiver:
        said = Path(folder) / "said"
        process = _CONTEXT.Process(target=_serve, args=(function, cell, sender, said), daemon=True)
        killed = kills()
        process.start()
        sender.close()
        try:
            result = _await(process, receiver, timeout, killed)
            return result | {"said": _tail(said)} if "reason" in result else result
        finally:
            process.kill()
            process.join()


def _start_server() -> None:
    """Starts what cells are forked from; Ctrl-C is not for it, least of all while it imports."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    if threading.current_thread() is not threading.main_thread():
        return
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, earlier)


def _await(process: Any, receiver: Connection, timeout: float, killed: int) -> Result:
    if not receiver.poll(timeout):
        return _failed(f"not done after {timeout:g} s; --timeout allows more")
    try:
        result: Result = receiver.recv()
    except EOFError:
        process.join()
        result = _end(process.exitcode, kills() > killed)
    return result


def _end(code: int, by_system: bool) -> Result:
    if code == -signal.SIGKILL and by_system:
        return {
            "status": "does not fit",
            "reason": "killed by the system as memory ran out; a smaller batch_size needs less",
        }
    if code == -signal.SIGKILL:
        return _failed("killed by SIGKILL, by hand or as memory ran out")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return _failed(how)


def _failed(reason: str) -> Result:
    return {"status": "failed", "reason": reason}


def _tail(said: Path) -> str:
    return said.read_text(errors="replace")[-4000:] if said.is_file() else ""


def _serve(function: Callable[[Work], Result], cell: Work, sender: Connection, said: Path) -> None:
    """Runs in the new process; what it prints goes to a file, not between the lines of progress."""
    # Ctrl-C reaches the whole group; the process that waits decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_killed_first()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        result = function(cell)
    except Exception as error:
        traceback.print_exc()
        result = _raised(error, getattr(cell, "memory_limit", None))
    # whoever gets the result reads the file and ends this process
    sys.stdout.flush()
    sender.send(result)


def _raised(error: Exception, limit: int | None) -> Result:
    if ran_out(error, limit):
        return {"status": "does not fit", "reason": too_much(error, limit)}
    return _failed(" ".join(f"{type(error).__name__}: {error}".split()))


def _end_with_parent() -> None:
    """Ends this process with the one that waits for it, however that one ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
