"""`make` sets up what its target needs, and the comparison's needs are small."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.documents import ROOT

INPUTS = ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt")
EVERYTHING = {"compare", "test", "notebooks", "lint"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh machine's: nothing is set up."""
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def installed(checkout: Path, target: str, *options: str) -> list[set[str]]:
    """The extras that each installation on the way to a target would bring."""
    command = ["make", "--dry-run", "-C", str(checkout), target, *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [set(found.split(",")) for found in re.findall(r"install .*'\.\[([\w,]+)\]'", shown)]


def test_the_comparison_installs_what_it_needs_and_no_more(checkout: Path) -> None:
    assert installed(checkout, "compare") == [{"compare"}]


@pytest.mark.parametrize("target", ["test", "test-avx2", "lint", "check-notebooks"])
def test_what_a_check_needs_is_installed_at_once(checkout: Path, target: str) -> None:
    assert installed(checkout, target) == [EVERYTHING]


@pytest.mark.parametrize("target", ["gpu", "test-device", "gpu-page"])
def test_a_python_that_is_given_is_taken_as_it_is(checkout: Path, target: str) -> None:
    assert installed(checkout, target) == [EVERYTHING]
    assert installed(checkout, target, "PYTHON=python3") == []


def test_what_is_there_is_not_installed_again(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".compare").touch()
    assert installed(checkout, "compare") == []
    assert installed(checkout, "test") == [EVERYTHING]


def test_what_ci_calls_is_there_and_one_part_runs_as_on_another_processor(checkout: Path) -> None:
    called = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert "test-avx2" in called
    shown = [
        subprocess.run(
            ["make", "--dry-run", "-C", str(checkout), target],
            capture_output=True, text=True, check=True,
        ).stdout
        for target in called
    ]  # fmt: skip
    assert any("ONEDNN_MAX_CPU_ISA=AVX2" in text for text in shown)
    files = re.findall(r"\b(?:tests/)?\w+(?:/\w+)*\.py\b", shown[called.index("test-avx2")])
    assert files
    assert all((ROOT / name).exists() for name in files)


def test_tests_that_a_target_names_are_there() -> None:
    named = re.findall(
        r"\b(?:tests|benchmarks|docs)/[\w/]+(?:\.\w+)?", (ROOT / "Makefile").read_text()
    )
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
