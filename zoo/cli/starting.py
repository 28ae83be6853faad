"""Ctrl-C while the package is imported for the command, which torch makes a second or two.

Python imports the package before the command's first line, by `python -m zoo` as by the `zoo`
script, and an interrupt there would be a traceback through torch's files. So the package begins
with this file. It is a handler of the signal that ends the process and no `except`: libraries catch
whatever is raised while they look for optional parts of themselves.

A program that imports zoo keeps what it does about Ctrl-C; one that is called `zoo`, too, from when
the package is there.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path


def end_on_interrupt() -> None:
    """Has Ctrl-C end the process with exit code 130, where the process is the command's."""
    if not _is_command() or os.environ.get("ZOO_TRACEBACK"):
        return
    is_main = threading.current_thread() is threading.main_thread()
    # a shell has its background jobs ignore it
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Has Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Says whether Python was started as `python -m zoo`, or with the `zoo` script.

    A process that the command starts has its `sys.argv`, but another line of its own.
    """
    # what the arguments stand behind: the file, or the module's name while its file is "-m"
    named = "".join(sys.orig_argv[-len(sys.argv) :][:1])
    if sys.argv[:1] == ["-m"]:
        return named in ("zoo", "-mzoo")
    return sys.argv[:1] == [named] and Path(named).stem == "zoo"


def _end(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"zoo: interrupted\n")
    os._exit(130)


end_on_interrupt()
