"""Whatever ends a process is a result that says what happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
        (prints_and_raises, "ValueError: several lines"),
        (is_killed, "killed by SIGKILL, by hand or as memory ran out"),
        (crashes, "killed by SIGSEGV"),
        (exits, "ended with exit code 3"),
    ],
)
def test_the_reason_says_what_ended_it(function, reason):
    result = outcome(function, "a cell", 60)
    assert (result["status"], result["reason"]) == ("failed", reason)


def test_what_does_not_fit_is_told_from_what_fails():
    result = outcome(raises, "a cell", 60)
    assert result["status"] == "does not fit"
    assert "there is (MemoryError: no room for 3 GiB); a smaller batch_size" in result["reason"]


def test_what_it_said_is_kept_and_stays_off_the_screen(capfd):
    result = outcome(prints_and_raises, "a cell", 60)
    assert result["reason"] == "ValueError: several lines"
    assert "on standard output" in result["said"]
    assert "Traceback" in result["said"]
    assert capfd.readouterr() == ("", "")


def test_a_process_that_hangs_is_ended():
    result = outcome(hangs, "a cell", 0.5)
    assert result.pop("said") == ""
    reason = "not done after 0.5 s; --timeout allows more"
    assert result == {"status": "failed", "reason": reason}


def tells_its_number_and_hangs(cell):
    Path(cell).write_text(str(os.getpid()))
    hangs(cell)


@pytest.mark.skipif(sys.platform != "linux", reason="looks the process up in /proc")
@pytest.mark.timeout(60)
def test_a_process_ends_with_the_one_that_waits_for_it(tmp_path):
    said = tmp_path / "number"
    code = f"""if __name__ == "__main__":
    import sys; sys.path[:] = {sys.path!r}
    from zoo.harness.processes import outcome
    from test_processes import tells_its_number_and_hangs
    outcome(tells_its_number_and_hangs, {str(said)!r}, 60)"""
    waiting = subprocess.Popen([sys.executable, "-c", code])
    while not (said.is_file() and said.read_text()):
        time.sleep(0.05)
    waiting.kill()
    waiting.wait()
    while Path(f"/proc/{said.read_text()}").exists():
        time.sleep(0.05)
