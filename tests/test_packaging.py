"""What `pip install` gives a stranger: a wheel made of the source archive holds all that zoo needs.

pip installs it, without anything else, in an environment that finds the other libraries where the
tests find them, but no checkout. By `make package` the environment is empty, and pip installs the
newest of whatever zoo asks for.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from tests.documents import ROOT

BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
STEP = (
    "import sys, torch, zoo\n"
    "assert zoo.__file__.startswith(sys.prefix), zoo.__file__\n"
    "model = zoo.resnet18(checkpoint=True)\n"
    "model(torch.rand(2, 3, 32, 32)).sum().backward()\n"
    "assert max(zoo.plan_of(model).runs()) == 2"
)


def run(*command: str | Path, at: Path) -> str:
    """Runs a command in a folder and returns what it prints."""
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def build(kind: str, source: Path, to: Path) -> Path:
    """Builds an archive of a source tree, as pip has it built."""
    run(sys.executable, "-c", BUILD, f"build_{kind}", to, at=source)
    (archive,) = to.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of what the source archive holds, and of nothing else."""
    folder = tmp_path_factory.mktemp("archives")
    clone = folder / "clone"
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "results", "build", "dist")
    shutil.copytree(ROOT, clone, ignore=left_out)
    with tarfile.open(build("sdist", clone, folder)) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    return build("wheel", source, folder)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment into which pip installed the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, at=ROOT)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    if "ZOO_PACKAGE" in os.environ:
        run(*pip, f"{wheel}[compare]", at=folder)
    else:
        (packages,) = folder.glob("lib/python*/site-packages")
        # what leads from there to the checkout is not followed
        (packages / "others.pth").write_text(str(Path(torch.__file__).parents[1]))
        run(*pip, "--no-deps", "--no-index", wheel, at=folder)
    return folder / "bin"


def test_the_wheel_holds_types_and_data_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zoo").rglob("*.py")}
    assert sources <= names
    data = {f"zoo/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert {"zoo/py.typed", "zoo/report/page.html", "zoo/report/page.js"} | data <= names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_a_step_of_an_installed_zoo_is_trained(environment: Path, tmp_path: Path) -> None:
    run(environment / "python", "-c", STEP, at=tmp_path)


def test_an_installed_zoo_has_its_command_and_compares(environment: Path, tmp_path: Path) -> None:
    assert "compare" in run(environment / "zoo", "--help", at=tmp_path)
    small = ["--model", "llama_tiny", "--repeats", "1", "--no-optimizer-in-backward"]
    shown = run(environment / "zoo", "compare", "quick", *small, at=tmp_path)
    assert "yes" in shown
    assert list(tmp_path.glob("results/quick*/report.html"))
