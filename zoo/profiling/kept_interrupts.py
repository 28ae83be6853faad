"""Ctrl-C (SIGINT) is not lost where Python or a library discards its KeyboardInterrupt.

Python raises KeyboardInterrupt wherever the main thread is. In a callback of a weak reference, in
`__del__` or in a callback of C code it prints the error and goes on; some libraries catch every
error of an optional import, or raise another one in its place. While a step is traced, callbacks run
for each tensor that is freed. So inside `kept` an interrupt is raised again until it has ended the
block:

    SIGINT    KeyboardInterrupt    discarded    0.2 s    KeyboardInterrupt    the block ends
"""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

# seconds after which a discarded interrupt is raised again
INTERVAL = 0.2


class _Kept:
    """Whether an interrupt has arrived, and whether a handler of this program has taken it."""

    def __init__(self) -> None:
        self.arrived, self.ended = False, threading.Event()

    def __call__(self, *_: object) -> None:
        if not self.arrived:
            self.arrived = True
            threading.Thread(
                target=self._repeat, args=(threading.get_ident(),), daemon=True
            ).start()
        raise KeyboardInterrupt

    def _repeat(self, main: int) -> None:
        while not self.ended.wait(INTERVAL):
            if self.arrived and not _is_handled(main):
                _thread.interrupt_main()


_kept: list[_Kept] = []


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Ends the block with KeyboardInterrupt, or an error of that kind, if Ctrl-C was pressed in it.

    Only on the main thread, and where nobody else handles SIGINT: another handler, or none of
    background jobs, stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    this = _Kept()
    _kept.append(this)
    signal.signal(signal.SIGINT, this)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if this.arrived:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        this.ended.set()
        _kept.remove(this)
    if this.arrived:
        raise KeyboardInterrupt


def take_interrupt() -> None:
    """Marks an interrupt as handled: the enclosing block goes on to its end."""
    for this in _kept:
        this.arrived = False


def _is_handled(thread: int) -> bool:
    """Returns whether a thread is in an except or a finally of a KeyboardInterrupt."""
    handled = sys._current_exceptions().get(thread)
    # a triple before Python 3.12
    error = handled[1] if isinstance(handled, tuple) else handled
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
