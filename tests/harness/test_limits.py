"""A cell that takes more than its limit has "does not fit" as its result, and leaves no limit."""

import sys
from dataclasses import dataclass, replace

import pytest
import torch

from zoo.errors import ConfigError
from zoo.harness.cells import expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness.limits import check_limit, limited, ran_out
from zoo.harness.processes import outcome
from zoo.harness.run import run_cell

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
# 40 MiB of scores
TINY = {"vocabulary": 8000, "embedding": 8, "hidden": 8}
MODEL = ModelConfig("lstm", "stream", 16, 80, TINY, repeats=1)
(CELLS,) = expand(Config("mine", (MODEL,), steps=2, threads=1))


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
    assert outcome(takes, Asked(90 * MIB, 100 * MIB), 60) == expected
    result = outcome(takes, Asked(101 * MIB, 100 * MIB), 60)
    assert result["status"] == "does not fit"
    assert result["reason"] == "needs more than its memory_limit of 100 MiB"


@linux
def test_a_cell_that_does_not_fit_says_so_and_where_it_ran():
    peak = run_cell(CELLS["baseline"], 60)["memory"]["peak"]
    record = run_cell(replace(CELLS["baseline"], memory_limit=peak), 60)
    assert (record["status"], record["environment"]["threads"]) == ("does not fit", 1)
    assert run_cell(replace(CELLS["baseline"], memory_limit=4 * peak), 60)["status"] == "done"


def raised(error, cause=None):
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
        (raised(ValueError("no second run"), MemoryError()), True),
        (RuntimeError("Resource temporarily unavailable"), False),
        (ValueError("out of memory of earlier times"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_its_words(error, expected):
    assert ran_out(error) == expected


def test_a_thread_that_does_not_fit_counts_under_a_limit():
    assert ran_out(RuntimeError("Resource temporarily unavailable"), 100)


def test_cuda_is_limited_by_its_allocators_own_cap(monkeypatch):
    fractions = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    device = type("Device", (), {"total_memory": 80 * MIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    with limited(20 * MIB, "cuda"):
        assert fractions == [0.25]
    assert fractions == [0.25, 1.0]


def test_elsewhere_than_on_linux_a_limit_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    check_limit(None, "cpu")
    check_limit("1GiB", "cuda")
    with pytest.raises(ConfigError, match="memory_limit on the CPU needs Linux; this is darwin"):
        check_limit("1GiB", "cpu")
