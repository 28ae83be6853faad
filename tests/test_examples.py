"""Each example trains for real, resumes in the middle, and ends with the bits of plain training."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
# the libraries that each needs
LIBRARIES = {
    "lightning_callback": ("lightning", "sklearn"),
    "accelerate_loop": ("accelerate", "sklearn"),
    "transformers_trainer": ("transformers", "accelerate", "sklearn"),
    "memory_budget": ("timm", "monai", "transformers", "accelerate"),
}
# one process for all: the imports take longer than the trainings
PROGRAM = """
import runpy, sys
from zoo.profiling import isolation

isolation.can_fork = lambda: False  # plans are the same, in half the time
for path in sys.argv[1:]:
    print("==", path)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        print("exit code", ended.code)
"""


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"digits"} == set(LIBRARIES)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns what each example prints whose libraries are here."""
    here = [
        name for name, needed in LIBRARIES.items() if all(map(importlib.util.find_spec, needed))
    ]
    paths = os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(EXAMPLES / f"{name}.py") for name in here)],
        cwd=tmp_path_factory.mktemp("examples"),
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(here, done.stdout.split("== ")[1:], strict=True))


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_example_ends_with_the_bits_of_plain_training(
    name: str, printed: dict[str, str]
) -> None:
    if name not in printed:
        pytest.skip(f"one of {LIBRARIES[name]} is not installed")
    trainings = (
        ("timm", "monai", "transformers")
        if name == "memory_budget"
        else ("checkpointed", "resumed")
    )
    for training in trainings:
        assert re.search(rf"^{training}: .*bit for bit as plain", printed[name], re.MULTILINE)
    assert printed[name].endswith("exit code 0\n")
