"""Ctrl-C ends what it was pressed in, wherever it arrives."""

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import zoo
from tests.training import Residuals, images, needs_numpy
from zoo._torch import FakeTensorMode
from zoo.profiling import kept_interrupts
from zoo.profiling.kept_interrupts import interrupts_kept, take_interrupt
from zoo.profiling.progress import shown
from zoo.profiling.step_recorder import StepRecorder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A shell has its background jobs ignore SIGINT; a test is not one."""
    monkeypatch.setattr(kept_interrupts, "INTERVAL", 0.01)
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, earlier)


def press(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


class Freed:
    """Presses Ctrl-C in `__del__`."""

    def __del__(self) -> None:
        press()


class Named:
    """Presses Ctrl-C where Python 3.11 makes another error of it."""

    __set_name__ = press


def freed() -> None:
    Freed()


def called_back() -> None:
    watched = threading.Event()
    weakref.finalize(watched, press)


def suppressed() -> None:
    with contextlib.suppress(BaseException):
        press()


def converted() -> None:
    try:
        press()
    except BaseException:
        raise ValueError("of a library") from None


def named() -> None:
    type("Owner", (), {"name": Named()})


LOST: list[Callable[[], None]] = [freed, called_back, suppressed, converted, named]


# what unraisable errors print is part of the case
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("lose", LOST)
def test_an_interrupt_that_is_discarded_is_raised_again(
    lose: Callable[[], None], goes_on: bool
) -> None:
    @shown("work")
    def work() -> None:
        lose()
        # a long computation, or the end of the block
        ends = time.monotonic() + 30 * goes_on
        while time.monotonic() < ends:
            pass
        assert not goes_on, "30 s without an interrupt"

    with pytest.raises(KeyboardInterrupt):
        work()


def test_what_an_interrupt_has_begun_is_not_interrupted_again() -> None:
    ended = []

    @interrupts_kept()
    def cleans_up() -> None:
        try:
            press()
        finally:
            time.sleep(0.1)
            ended.append("finally")

    with pytest.raises(KeyboardInterrupt):
        cleans_up()
    with interrupts_kept():
        try:
            press()
        except KeyboardInterrupt:
            take_interrupt()
        time.sleep(0.1)
        ended.append("taken")
    assert ended == ["finally", "taken"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_another_handler_stays(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with interrupts_kept():
        assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupt_at_any_line_of_the_block_itself_leaves_no_handler() -> None:
    def run(count: int) -> bool:
        """Presses Ctrl-C at a line of `kept`; returns whether there are so many."""
        lines = iter(range(count + 1))

        def at_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line" and next(lines, None) == count:
                press()
            return at_line

        def at_call(frame: FrameType, event: str, argument: Any) -> Any:
            return at_line if frame.f_code.co_filename == kept_interrupts.__file__ else None

        sys.settrace(at_call)
        try:
            with interrupts_kept():
                pass
        finally:
            sys.settrace(None)
        return next(lines, None) is None

    places = 0
    for places in range(100):
        try:
            if not run(count=places):
                break
        except KeyboardInterrupt:
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not kept_interrupts._handlers
    assert 15 < places < 99


def test_a_handler_that_the_block_sets_stays() -> None:
    def own(*_: Any) -> None:
        pass

    with interrupts_kept():
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Presses:
    """Forks a process at some of the calls of Python functions, each of which presses Ctrl-C there.

    What it was pressed in must end by KeyboardInterrupt; in this process all goes on.
    """

    def __init__(self, places: Collection[int] = ()) -> None:
        self.places, self.is_fork = places, False
        self.calls: list[str] = []  # names of functions
        self.ends: list[tuple[int, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls.append(frame.f_code.co_name)
        if len(self.calls) not in self.places:
            return
        if child := os.fork():
            self.ends.append((os.waitpid(child, 0)[1], frame.f_code.co_name))
            return
        self.is_fork = True
        sys.settrace(None)
        # ends a process that waits for ever
        signal.setitimer(signal.ITIMER_REAL, 60)
        sys.unraisablehook = lambda *_: None
        press()

    def run(self, function: Callable[[], object]) -> None:
        """Calls a function; a fork ends here, with status 0 after KeyboardInterrupt."""
        status = 1
        sys.settrace(self)  # type: ignore[arg-type]
        try:
            function()
        except KeyboardInterrupt:
            status = 0
        finally:
            sys.settrace(None)
            if self.is_fork:
                os._exit(status)


def plan() -> None:
    zoo.plan(Residuals(blocks=1), images(2), max_overhead=9.0, device="a100")


@needs_numpy
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_interrupts_end_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    # in the process to which they are sent, not in one of its own
    monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    plan()
    calls = Presses()
    calls.run(plan)
    # some fewer, since a later plan finds more in caches
    last = len(calls.calls) * 19 // 20
    presses = Presses([1 + number * last // 25 for number in range(25)])
    presses.run(plan)
    assert len(presses.ends) == 25
    assert [(status, inside) for status, inside in presses.ends if status] == []


def asks() -> None:
    """Autograd asks a fake tensor for its device in C++ code that is `noexcept`."""
    with FakeTensorMode():
        leaf = torch.ones(3, requires_grad=True)
    with interrupts_kept():
        torch.mul(leaf, 2)


def sets_modes() -> None:
    """A C++ destructor sets the mode below which an operator is decomposed."""
    with interrupts_kept(), FakeTensorMode(), torch.profiler.record_function("decomposed"):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("function", "inside"), [(asks, "torch_dispatch"), (sets_modes, "__enter__|__exit__")]
)
def test_an_interrupt_where_no_exception_can_pass_ends_the_block(
    function: Callable[[], None], inside: str
) -> None:
    function()  # so that the next two calls are alike
    calls = Presses()
    calls.run(function)
    places = [place for place, name in enumerate(calls.calls, 1) if re.search(inside, name)]
    assert len(places) > 2
    presses = Presses(places)
    presses.run(function)
    assert len(presses.ends) == len(places)
    assert [(status, inside) for status, inside in presses.ends if status] == []


@needs_numpy
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_as_a_tensor_is_freed_ends_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    free: Any = StepRecorder._free
    seen: list[Any] = []

    @functools.wraps(free)
    def pressed(self: Any, *given: Any) -> None:
        if not seen:
            seen.append(given)
            press()
        free(self, *given)

    monkeypatch.setattr(StepRecorder, "_free", pressed)
    with pytest.raises(KeyboardInterrupt):
        plan()
    assert seen
