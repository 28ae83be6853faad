"""Measures on the accelerator that is here and writes docs/gpu.md: `make gpu`.

    python docs/gpu.py                          the accelerator that torch finds
    python docs/gpu.py soft build/gpu.md        the one in software, at small sizes

The page has the device's name and two tables, each below the command that printed it: the families
at batches as they are on an accelerator (`accelerator_batch_size` of configs/default.yaml), and the
largest batch that the device holds by zoo and by what people use instead.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.accelerator import software
from zoo.engine.devices import name_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
# what shows that this runs, and no more
SMALL = ["--model", "densenet100", "--size", "32", "--batch-size", "2"]
SMALL += ["--steps", "2", "--repeats", "1", "--largest-ratio", "1"]
SMALL_BATCHES = ["--small", "--models", "GPT-2", "--memory-budget", "4MiB"]
SMALL_BATCHES += ["--methods", "plain", "zoo, True"]
NOTE = """\
Each *peak* is the baseline's → the checkpointed model's, as the device's allocator counts it. Where
the allocator keeps no history, there is no activation peak. *Exact*: loss, every gradient, buffer
and parameter and the random states are equal bit for bit after each optimizer step.
"""


def main(kind: str, page: Path) -> None:
    """Measures on a kind of device and writes the page."""
    sizes, batch_sizes = [], []
    if kind == software.NAME:
        if (fault := software.missing()) is not None:
            print(f"nothing is measured on {kind}: {fault}")
            return
        software.register()
        software.offer()
        sizes, batch_sizes = SMALL, SMALL_BATCHES
    comparison = ["test_memory_optimized.py", "--device", kind, *sizes]
    batches = ["benchmarks/largest_batch.py", "--device", kind, *batch_sizes]
    results = ROOT / "results" / f"gpu-{kind}"
    run([*comparison, "--output", str(results)])
    written = max(results.glob("*/report.md"), key=lambda path: path.stat().st_mtime)
    report = written.read_text().splitlines()
    families = "\n".join(line for line in report if line.startswith("|"))
    parts = [
        f"# {name_of(kind)}, torch {torch.__version__}",
        "## Families",
        f"`python {shlex.join(comparison)}`",
        families,
        NOTE,
        "## The largest batch",
        f"`python {shlex.join(batches)}`",
        run(batches, stdout=subprocess.PIPE),
    ]
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def run(words: list[str], **options: Any) -> str:
    """Runs a program of this project and returns what it printed, if that is piped."""
    found = subprocess.run([sys.executable, *words], cwd=ROOT, check=True, text=True, **options)
    return found.stdout or ""


if __name__ == "__main__":
    found = torch.accelerator.current_accelerator(check_available=True)
    chosen = sys.argv[1] if sys.argv[1:] else found and found.type
    if chosen is None:
        sys.exit(
            "torch finds no accelerator here; `python docs/gpu.py soft build/gpu.md` tries this"
        )
    main(chosen, Path(sys.argv[2]) if sys.argv[2:] else PAGE)
