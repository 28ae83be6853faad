"""Progress is shown late, on stderr, once, in the form that the place has, or not at all."""

import io
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed

from zoo.profiling import progress
from zoo.profiling.progress import each, is_wanted, shown


class Stream(io.StringIO):
    """A stderr that can be waited for."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self.is_terminal, self.changed = is_terminal, threading.Condition()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        with self.changed:
            self.changed.notify_all()
            return super().write(text)

    def wait_for(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.getvalue(), 60), self.getvalue()


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stream]:
    """Puts a stream in the place of stderr, on which progress is shown at once."""

    def put(is_terminal: bool = False) -> Stream:
        stream = Stream(is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    monkeypatch.delenv("ZOO_PROGRESS")
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    return put


def threads() -> int:
    return sum(thread._target is progress._show for thread in threading.enumerate())  # type: ignore[attr-defined]


def test_a_pipe_has_a_line_for_each_part(
    stderr: Callable[..., Stream], capsys: pytest.CaptureFixture[str]
) -> None:
    stream = stderr()
    with shown("zoo.plan"), shown("Net"):
        stream.wait_for("zoo.plan: Net\n")
        for _ in each("kernels", range(3)):
            stream.wait_for("zoo.plan: Net: kernels 0/3\n")
            with shown("one"):
                stream.wait_for("zoo.plan: Net: kernels 0/3: one\n")
                break
    assert "zoo.plan\n" not in stream.getvalue(), "a name alone tells nothing"
    assert capsys.readouterr().out == ""
    assert threads() == 0


def test_a_pipe_shows_how_a_count_rises(stderr: Callable[..., Stream]) -> None:
    stream = stderr()
    with shown("zoo.plan"):
        for number in each("kernels", range(3)):
            stream.wait_for(f"zoo.plan: kernels {number}/3\n")
    lines = stream.getvalue().splitlines()
    assert lines == list(dict.fromkeys(lines)), "no line is there twice"


def test_a_call_that_makes_another_of_its_name_is_named_once(stderr: Callable[..., Stream]) -> None:
    stream = stderr()
    with shown("zoo.checkpoint"), shown("zoo.checkpoint"), shown("Net"):
        stream.wait_for("zoo.checkpoint: Net\n")
    assert "zoo.checkpoint: zoo.checkpoint" not in stream.getvalue()


def test_a_terminal_has_a_bar_which_is_gone_at_the_end(stderr: Callable[..., Stream]) -> None:
    pytest.importorskip("tqdm", reason="the bar is that of tqdm")
    stream = stderr(is_terminal=True)
    with shown("zoo.plan"):
        for number in each("kernels", range(3)):
            stream.wait_for(f"| {number}/3 ")
    stream.wait_for("zoo.plan: kernels |")
    assert stream.getvalue().split("\r")[-2].strip() == ""
    assert "\n" not in stream.getvalue()


def test_a_terminal_has_lines_where_tqdm_is_not_installed(
    stderr: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    stream = stderr(is_terminal=True)
    with shown("zoo.plan"), shown("Net"):
        stream.wait_for("zoo.plan: Net\n")


def test_what_ends_before_the_delay_shows_nothing(
    stderr: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 3600)
    stream = stderr()
    with shown("zoo.plan"):
        assert threads() == 1
    assert stream.getvalue() == ""
    assert threads() == 0


def test_the_switch_shows_nothing(
    stderr: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_PROGRESS", "0")
    stream = stderr()
    with shown("zoo.plan"):
        assert threads() == 0
        assert list(each("kernels", [1, 2])) == [1, 2]
    assert stream.getvalue() == ""


def test_one_of_many_processes_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZOO_PROGRESS")
    assert is_wanted()
    for rank, is_first in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert is_wanted() == is_first
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert not is_wanted()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    for group_rank in (0, 1):
        monkeypatch.setattr(distributed, "get_rank", lambda rank=group_rank: rank)
        assert is_wanted() == (group_rank == 0)


def test_a_pipe_that_is_closed_stops_nothing(
    stderr: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def fail(text: str) -> int:
        tried.set()
        raise BrokenPipeError

    stream: Any = stderr()
    monkeypatch.setattr(stream, "write", fail)
    with shown("zoo.plan"), shown("Net"):
        assert tried.wait(60)


def test_an_interrupt_ends_it_and_the_next_begins_anew(stderr: Callable[..., Stream]) -> None:
    @shown("zoo.plan")
    def interrupted() -> None:
        for _ in each("kernels", [1, 2]):
            raise KeyboardInterrupt("here")

    stderr()
    with pytest.raises(KeyboardInterrupt, match="here"):
        interrupted()
    assert threads() == 0
    stream = stderr()
    with shown("zoo.verify"), shown("Net"):
        stream.wait_for("zoo.verify: Net\n")


def test_a_thread_shows_what_it_does_itself(stderr: Callable[..., Stream]) -> None:
    stream = stderr()

    def work() -> None:
        with shown("zoo.track"), shown("Net"):
            stream.wait_for("zoo.track: Net\n")

    with shown("zoo.plan"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
