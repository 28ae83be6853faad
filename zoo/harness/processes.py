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
from typing import Any

from zoo.harness.cells import Cell

Result = dict[str, Any]

# macOS could fork too, but its own libraries do not survive it
_FORKS = sys.platform == "linux"
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
_IMPORTED = ["__main__", "torch._dynamo", "zoo.harness.worker", "sklearn.datasets", "nibabel"]


def outcome(function: Callable[[Cell], Result], cell: Cell, timeout: float) -> Result:
    """Returns what a function of a module returns for a cell, or why not under "reason"."""
    if _FORKS:
        _start_server()
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, receiver:
        said = Path(folder) / "said"
        process = _CONTEXT.Process(target=_serve, args=(function, cell, sender, said), daemon=True)
        process.start()
        sender.close()
        try:
            return _await(process, receiver, said, timeout)
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


def _await(process: Any, receiver: Connection, said: Path, timeout: float) -> Result:
    if not receiver.poll(timeout):
        return {"reason": f"not done after {timeout:g} s; --timeout allows more"}
    try:
        result: Result = receiver.recv()
    except EOFError:
        process.join()
        result = {"reason": _end(process.exitcode)}
    return result | {"said": _tail(said)} if "reason" in result else result


def _end(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as happens when memory runs out; a smaller batch_size needs less"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tail(said: Path) -> str:
    return said.read_text(errors="replace")[-4000:] if said.is_file() else ""


def _serve(function: Callable[[Cell], Result], cell: Cell, sender: Connection, said: Path) -> None:
    """Runs in the new process; what it prints goes to a file, not between the lines of progress."""
    # Ctrl-C reaches the whole group; the process that waits decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        sender.send(function(cell))
    except Exception as error:
        traceback.print_exc()
        sender.send({"reason": " ".join(f"{type(error).__name__}: {error}".split())})


def _end_with_parent() -> None:
    """Ends this process with the one that waits for it, however that one ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
