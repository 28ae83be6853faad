"""Each example trains for real, resumes in the middle, and ends with the bits of plain training."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# those that resume, with the libraries that they need
EXAMPLES = {
    "lightning_callback": ("lightning", "sklearn"),
    "accelerate_loop": ("accelerate", "sklearn"),
    "transformers_trainer": ("transformers", "accelerate", "sklearn"),
}


def test_every_example_is_run() -> None:
    written = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"digits"}
    assert written == {*EXAMPLES, "memory_budget"}


def run(name: str, folder: Path, libraries: tuple[str, ...]) -> str:
    """Runs an example, which must end well; returns what it prints."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_with_the_bits_of_plain_training(name: str, tmp_path: Path) -> None:
    printed = run(name, tmp_path, EXAMPLES[name])
    for kind in ("checkpointed", "resumed"):
        assert f"{kind}: bit for bit as plain" in printed


def test_models_of_three_libraries_keep_to_a_budget(tmp_path: Path) -> None:
    printed = run("memory_budget", tmp_path, ("timm", "monai", "transformers", "accelerate"))
    assert printed.count("bit for bit as plain") == 3
