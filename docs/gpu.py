"""Compares the families on the accelerator that is here and writes docs/gpu.md: `make gpu`.

    python docs/gpu.py                          the accelerator that torch finds
    python docs/gpu.py soft build/gpu.md        the one in software, at small sizes

The page has the device's name, the command and the table that it printed, of batches as they are
on an accelerator (`accelerator_batch_size` of configs/default.yaml).
"""

import subprocess
import sys
from pathlib import Path

import torch

from tests.accelerator import software
from zoo.engine.devices import name_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
# what shows that this runs, and no more
SMALL = ["--model", "densenet100", "--size", "32", "--batch-size", "2"]
NOTE = """
Each *peak* is the baseline's → the checkpointed model's, as the device's allocator counts it. Where
the allocator keeps no history, there is no activation peak. *Exact*: loss, every gradient, buffer
and parameter and the random states are equal bit for bit after each optimizer step.
"""


def main(kind: str, page: Path) -> None:
    """Compares on a kind of device and writes the page."""
    options: list[str] = []
    if kind == software.NAME:
        if (fault := software.missing()) is not None:
            print(f"nothing is compared on {kind}: {fault}")
            return
        software.register()
        software.offer()
        options = [*SMALL, "--steps", "2", "--repeats", "1", "--largest-ratio", "1"]
    results = ROOT / "results" / f"gpu-{kind}"
    words = ["test_memory_optimized.py", "--device", kind, *options]
    subprocess.run([sys.executable, *words, "--output", str(results)], cwd=ROOT, check=True)
    written = max(results.glob("*/report.md"), key=lambda path: path.stat().st_mtime)
    report = written.read_text().splitlines()
    table = "\n".join(line for line in report if line.startswith("|"))
    title = f"# {name_of(kind)}, torch {torch.__version__}"
    page.parent.mkdir(exist_ok=True)
    page.write_text(f"{title}\n\n`python {' '.join(words)}`\n\n{table}\n{NOTE}")


if __name__ == "__main__":
    found = torch.accelerator.current_accelerator(check_available=True)
    chosen = sys.argv[1] if sys.argv[1:] else found and found.type
    if chosen is None:
        sys.exit(
            "torch finds no accelerator here; `python docs/gpu.py soft build/gpu.md` tries this"
        )
    main(chosen, Path(sys.argv[2]) if sys.argv[2:] else PAGE)
