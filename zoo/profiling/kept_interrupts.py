"""Ctrl-C (SIGINT) is not lost where Python or a library discards its KeyboardInterrupt.

Python raises KeyboardInterrupt wherever the main thread is. In a callback of a weak reference, in
`__del__` or in a callback of C code it prints the error and goes on; some libraries catch every
error of an optional import, or raise another one in its place. While a step is traced, callbacks
run for each tensor that is freed. So inside `interrupts_kept` an interrupt is raised again until it
has ended the block:

    SIGINT    KeyboardInterrupt    discarded    0.2 s    KeyboardInterrupt    the block ends

Where an exception would end the process by `std::terminate` none is raised at first. As autograd
begins a node, it asks a tensor for its device and sizes, in a C++ function that is `noexcept`; a
fake tensor answers in Python. And while an operator runs below a mode of torch's, a C++ destructor
sets the mode again, which throws if it is set: an interrupt in the `__exit__` that removes it would
leave it there.
"""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

# seconds between two looks at an interrupt
INTERVAL = 0.1
# operators by which torch asks a tensor in C++
QUESTIONS = {"prim::device", "prim::layout"} | {
    f"aten::{name}"
    for name in (
        "dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel",
        "size", "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size",
        "sym_storage_offset", "sym_stride",
    )
}  # fmt: skip


class _InterruptHandler:
    """The handler of SIGINT in a block, which raises a discarded KeyboardInterrupt again.

    An interrupt on its way through frames is in no except or finally for a moment, so that only one
    that is in none twice in succession is discarded.
    """

    def __init__(self) -> None:
        self.arrived = self.is_repeated = self.is_leaving = False
        self.ended, self.lock = threading.Event(), threading.Lock()

    def __call__(self, _: int, frame: FrameType | None) -> None:
        is_repeated, self.is_repeated = self.is_repeated, False
        if is_repeated and (self.is_leaving or not self.arrived):
            # meanwhile the program handled it, or it has ended the block
            return
        if self.is_leaving:
            # the block raises it when the handler before this one is restored
            self.arrived = True
            return
        if not self.arrived:
            self.arrived = True
            main = threading.get_ident()
            threading.Thread(target=self._repeat, args=(main,), daemon=True).start()
        if not _cannot_raise(frame):
            raise KeyboardInterrupt

    def leave(self) -> None:
        """Ends the repetition, and restores the default handler unless the block set another."""
        self.is_leaving = True
        with self.lock:
            self.ended.set()
        # a repeated interrupt that is pending still reaches this handler, which drops it
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self in _handlers:
            _handlers.remove(self)

    def _repeat(self, main: int) -> None:
        was_absent = False
        while not self.ended.wait(INTERVAL):
            is_absent = self.arrived and not _is_handled(main)
            if is_absent and was_absent:
                with self.lock:
                    if not self.ended.is_set():
                        self.is_repeated = True
                        _thread.interrupt_main()
            was_absent = is_absent and not was_absent


_handlers: list[_InterruptHandler] = []


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Ends the block with KeyboardInterrupt, or an error of that kind, if Ctrl-C was pressed in it.

    Only on the main thread, and where nothing else handles SIGINT: another handler, or none of
    background jobs, stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    handler = _InterruptHandler()
    try:
        try:
            _handlers.append(handler)
            signal.signal(signal.SIGINT, handler)
            yield
        finally:
            handler.leave()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if handler.arrived:
            raise KeyboardInterrupt from error
        raise
    finally:
        # an interrupt may have cut the first call short
        handler.leave()
    if handler.arrived:
        raise KeyboardInterrupt


def take_interrupt() -> None:
    """Marks an interrupt as handled: the enclosing block goes on to its end."""
    for handler in _handlers:
        handler.arrived = False


def _cannot_raise(frame: FrameType | None) -> bool:
    """Returns whether an exception in a frame would end the process, as the module describes."""
    while frame is not None:
        if _answers_question(frame) or _changes_mode(frame):
            return True
        frame = frame.f_back
    return False


def _answers_question(frame: FrameType) -> bool:
    """Returns whether a function answers a question of torch's: the operator is an argument."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + 1
    values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    values += [part for value in values if type(value) is tuple for part in value]
    operators: Iterator[Any] = (v for v in values if type(v).__name__ == "OpOverload")
    return any(operator.name() in QUESTIONS for operator in operators)


def _changes_mode(frame: FrameType) -> bool:
    """Returns whether code of torch's is on its way into a `with` block or out of it."""
    if frame.f_code.co_name not in {"__enter__", "__exit__"}:
        return False
    owner = frame.f_back if _module(frame) == "contextlib" else frame
    return owner is not None and _module(owner).startswith("torch.")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _is_handled(thread: int) -> bool:
    """Returns whether a thread is in an except or a finally of a KeyboardInterrupt."""
    handled = sys._current_exceptions().get(thread)
    # a triple before Python 3.12
    error = handled[1] if isinstance(handled, tuple) else handled
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
