"""Whatever ends a process is a result that says what happened."""

import os
import signal
import sys
import time

import pytest

from zoo.harness.processes import outcome


def returns(cell):
    return {"got": cell, "process": os.getpid()}


def raises(cell):
    raise MemoryError("no room for 3 GiB")


def prints_and_raises(cell):
    print("on standard output")
    raise ValueError("several\n  lines")


def is_killed(cell):
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(cell):
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(cell):
    sys.exit(3)


def hangs(cell):
    time.sleep(600)


def test_a_result_comes_from_a_process_of_its_own():
    first, second = outcome(returns, "a cell", 60), outcome(returns, "a cell", 60)
    assert first["got"] == "a cell"
    assert len({first["process"], second["process"], os.getpid()}) == 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "MemoryError: no room for 3 GiB"),
        (is_killed, "killed by SIGKILL, as happens when memory runs out; a smaller batch_size"),
        (crashes, "killed by SIGSEGV"),
        (exits, "ended with exit code 3"),
    ],
)
def test_the_reason_says_what_ended_it(function, reason):
    assert outcome(function, "a cell", 60)["reason"].startswith(reason)


def test_what_it_said_is_kept_and_stays_off_the_screen(capfd):
    result = outcome(prints_and_raises, "a cell", 60)
    assert result["reason"] == "ValueError: several lines"
    assert "on standard output" in result["said"]
    assert "Traceback" in result["said"]
    assert capfd.readouterr() == ("", "")


def test_a_process_that_hangs_is_ended():
    result = outcome(hangs, "a cell", 0.5)
    assert result == {"reason": "not done after 0.5 s; --timeout allows more"}
