"""Whatever ends a process is a result that says what happened; too little memory is one of them."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from zoo.errors import ConfigError
from zoo.harness import processes, run, worker
from zoo.harness.comparison_cells import expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness.processes import (
    ALLOCATOR_SETTINGS,
    check_limit,
    limited,
    outcome,
    ran_out,
)
from zoo.harness.run import run_cell

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc and RLIMIT_DATA are Linux's")
MIB = 2**20
# 40 MiB of logits
TINY = {"vocabulary": 8000, "embedding": 8, "hidden": 8}
MODEL = ModelConfig("lstm", "stream", 16, 80, TINY, repeats=1)
(CELLS,) = expand(Config("mine", (MODEL,), steps=2, threads=1))


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
    first, second = outcome(returns, "a cell", 300), outcome(returns, "a cell", 300)
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
    result = outcome(function, "a cell", 300)
    assert (result["status"], result["reason"]) == ("failed", reason)


def test_what_does_not_fit_is_told_from_what_fails():
    result = outcome(raises, "a cell", 300)
    assert result["status"] == "does not fit"
    assert "there is (MemoryError: no room for 3 GiB); a smaller batch_size" in result["reason"]


def test_what_it_said_is_kept_and_stays_off_the_screen(capfd):
    result = outcome(prints_and_raises, "a cell", 300)
    assert result["reason"] == "ValueError: several lines"
    assert "on standard output" in result["printed"]
    assert "Traceback" in result["printed"]
    assert capfd.readouterr() == ("", "")


def tells_its_settings(cell):
    return {name: os.environ.get(name) for name in ALLOCATOR_SETTINGS}


def tells_its_environment(cell):
    return dict(os.environ)


def test_a_process_has_the_environment_of_now_and_not_of_the_first_one(monkeypatch):
    monkeypatch.setenv("ZOO_BEFORE", "set")
    assert outcome(tells_its_environment, "a cell", 300)["ZOO_BEFORE"] == "set"
    monkeypatch.delenv("ZOO_BEFORE")
    monkeypatch.setenv("ZOO_AFTER", "set")
    found = outcome(tells_its_environment, "a cell", 300)
    assert "ZOO_BEFORE" not in found
    assert found["ZOO_AFTER"] == "set"


@pytest.mark.parametrize("name", [None, *ALLOCATOR_SETTINGS])
def test_a_process_has_expandable_segments_unless_the_user_sets_the_allocator(name, monkeypatch):
    for known in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(known, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "backend:native")
    processes._use_expandable_segments()
    expected = ("expandable_segments:True", None)
    if name is not None:
        expected = tuple(
            "backend:native" if known == name else None for known in ALLOCATOR_SETTINGS
        )
    assert tuple(tells_its_settings(None).values()) == expected


def test_a_process_of_a_cell_sets_the_allocator():
    found = outcome(tells_its_settings, "a cell", 300)
    assert any(found.values())


def test_a_process_that_hangs_is_ended():
    result = outcome(hangs, "a cell", 0.5)
    assert result.pop("printed") == ""
    reason = "not done after 0.5 s; --timeout allows more"
    assert result == {"status": "failed", "reason": reason}


def tells_its_number_and_hangs(cell):
    Path(cell).write_text(str(os.getpid()))
    hangs(cell)


@linux
@pytest.mark.timeout(60)
def test_a_process_ends_with_the_one_that_waits_for_it(tmp_path):
    said = tmp_path / "number"
    code = f"""if __name__ == "__main__":
    import sys; sys.path[:] = {sys.path!r}
    from zoo.harness import processes, run, worker
    from test_processes import tells_its_number_and_hangs
    processes._PRELOADED = ()  # imports that this needs not
    processes.outcome(tells_its_number_and_hangs, {str(said)!r}, 300)"""
    waiting = subprocess.Popen([sys.executable, "-c", code])
    while not (said.is_file() and said.read_text()):
        time.sleep(0.05)
    waiting.kill()
    waiting.wait()
    while Path(f"/proc/{said.read_text()}").exists():
        time.sleep(0.05)


@dataclass
class Asked:
    """Stands in for a cell: how much is taken, of how much."""

    takes: int
    memory_limit: int


def takes(asked):
    with limited(asked.memory_limit, "cpu"):
        blocks = [torch.ones(MIB, dtype=torch.uint8) for _ in range(asked.takes // MIB)]
    after = torch.ones(2 * asked.memory_limit, dtype=torch.uint8)
    return {"blocks": len(blocks), "after": len(after)}


@linux
def test_a_limit_bounds_what_is_taken_beyond_the_start():
    expected = {"blocks": 90, "after": 200 * MIB}
    assert outcome(takes, Asked(90 * MIB, 100 * MIB), 300) == expected
    result = outcome(takes, Asked(101 * MIB, 100 * MIB), 300)
    assert result["status"] == "does not fit"
    assert result["reason"] == "needs more than its memory_limit of 100 MiB"


def aborts(words):
    os.write(2, words.encode())
    os.abort()


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("terminate called after throwing an instance of 'std::bad_alloc'", "does not fit"),
        ("terminate called after throwing an instance of 'c10::Error'", "failed"),
    ],
)
def test_a_process_that_aborts_as_memory_ran_out_does_not_fit(words, status):
    assert outcome(aborts, words, 300)["status"] == status


def works_alone(cell):
    """Measures a cell without what a report draws."""
    return worker.work(cell, also=lambda *_: {})


@linux
def test_a_cell_that_does_not_fit_says_so_and_where_it_ran(monkeypatch):
    monkeypatch.setattr(run, "work", works_alone)
    peak = run_cell(CELLS["baseline"], 300)["memory"]["peak"]
    record = run_cell(replace(CELLS["baseline"], memory_limit=peak // 2), 300)
    assert record["status"] == "does not fit", (record["reason"], record["printed"])
    assert record["environment"]["threads"] == 1
    assert run_cell(replace(CELLS["baseline"], memory_limit=4 * peak), 300)["status"] == "done"


def raised(error, cause=None, context=None):
    error.__context__ = context
    if cause is not None:
        error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (raised(ValueError("no recomputation"), MemoryError()), True),
        (raised(AttributeError("while an exit handled it"), context=MemoryError()), True),
        (raised(ValueError("of something else"), KeyError(), MemoryError()), False),
        (RuntimeError("Resource temporarily unavailable"), False),
        (ValueError("out of memory of earlier times"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_its_words(error, expected):
    assert ran_out(error) == expected


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Resource temporarily unavailable"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not execute a primitive"),
        ImportError("libx.so: failed to map segment from shared object"),
        SystemError("error return without exception set"),
        SystemError("<method 'mm' of ...> returned NULL without setting an exception"),
    ],
)
def test_what_may_mean_that_memory_ran_out_counts_under_a_limit(error):
    assert ran_out(error, 100)
    assert not ran_out(error)


def test_cuda_is_limited_by_its_allocators_own_cap(monkeypatch):
    fractions = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * MIB, 80 * MIB))
    with limited(20 * MIB, "cuda"):
        assert fractions == [0.25]
    assert fractions == [0.25, 1.0]


def test_elsewhere_than_on_linux_a_limit_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    check_limit(None, "cpu")
    check_limit("1GiB", "cuda")
    with pytest.raises(ConfigError, match="memory_limit on the CPU needs Linux; this is darwin"):
        check_limit("1GiB", "cpu")
