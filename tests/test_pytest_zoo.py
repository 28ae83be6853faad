"""`memory_budget` fails a test whose block takes more than its budget, and no other."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytest_zoo"]

TESTS = """
import pytest, torch

def floats(mib):
    return torch.empty(int(mib * 2**18))

def test_fits(memory_budget):
    with memory_budget("3MiB") as spent:
        floats(3)
        floats(2)
    assert (spent.peak, spent.peaks) == (3 * 2**20, {"cpu": 3 * 2**20})

def test_grows(memory_budget):
    with memory_budget("3MiB"):
        kept = floats(2), floats(1.5)

def test_several_blocks(memory_budget):
    with memory_budget(2**20):
        floats(1)
    with memory_budget(2**20, device="cpu"):
        floats(1.25)

def test_errors_pass(memory_budget):
    with pytest.raises(KeyError):
        with memory_budget("1KiB"):
            floats(1)
            raise KeyError

def test_no_size(memory_budget):
    with memory_budget("2GiBs"):
        pass
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_them.py").write_text(TESTS)
    options = ["-p", "pytest_zoo", "-p", "no:cacheprovider", "--junit-xml", "results.xml"]
    command = [sys.executable, "-m", "pytest", "--rootdir", ".", *options]
    path = {"PYTHONPATH": ":".join(entry or "." for entry in sys.path)}
    run = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True, check=False)
    return run.stdout, (folder / "results.xml").read_text()


def test_what_fits_passes_and_what_grows_fails(results):
    assert "3 failed, 2 passed" in results[0]
    for name in ("test_grows", "test_several_blocks", "test_no_size"):
        assert f"FAILED test_them.py::{name}" in results[0]


def test_the_failure_tells_the_measured_peak(results):
    sentence = (
        "the block allocated 3.50 MiB at once on cpu (largest then: 2.00 MiB, 1.50 MiB), "
        "524,288 B more than its memory_budget of 3.00 MiB"
    )
    assert sentence in results[0]
    assert "memory_budget='2GiBs' is no size; write bytes as an int" in results[0]


def test_the_measured_peak_goes_into_the_report(results):
    assert '<property name="peak_bytes_cpu" value="3145728" />' in results[1]
    assert '<property name="peak_bytes_cpu" value="3670016" />' in results[1]


def test_pytest_starts_without_torch():
    code = "import sys, pytest_zoo; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "."})


def test_it_is_there_as_a_fixture(memory_budget):
    with memory_budget("1MiB") as spent:
        pass
    assert spent.peak == 0
