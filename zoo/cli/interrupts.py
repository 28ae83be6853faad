"""Handles Ctrl-C (SIGINT) while the `zoo` command imports torch, which takes a second or two.

Python imports the package before the first line of the command, so `zoo/__init__.py` imports this
file first. A signal handler ends the process; libraries that try optional imports would catch an
exception. Any other program that imports zoo keeps its own handler.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

# the exit code
INTERRUPTED = 130


def end_on_interrupt() -> None:
    """Makes Ctrl-C end the process with exit code 130, if it was started as the `zoo` command."""
    # a process that the command starts has the same sys.argv, but another orig_argv
    started = "".join(sys.orig_argv[-len(sys.argv) :][:1])
    # sys.argv[0] is -m until the module is found
    is_command = sys.argv[:1] in (["-m"], [started]) and Path(started).stem in ("zoo", "-mzoo")
    is_main = threading.current_thread() is threading.main_thread()
    # in a shell's background jobs SIGINT is ignored
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_command and is_main and is_default and not os.environ.get("ZOO_TRACEBACK"):
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"zoo: interrupted\n")
    os._exit(INTERRUPTED)


end_on_interrupt()
