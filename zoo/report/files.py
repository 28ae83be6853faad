"""Writes a comparison as Markdown and CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zoo.report.escape import in_code, in_csv, in_markdown
from zoo.report.heading import Heading
from zoo.report.rows import Row
from zoo.report.words import COLUMNS, words

NOTES = """\
Each *peak* is the baseline's → the checkpointed model's (their ratio). *Step peak*: the most bytes
that the allocator handed out at once in a training step, parameters, optimizer state and inputs
included. *Activation peak*: the same less parameters, buffers, optimizer state, inputs and the
gradients that exist at that moment. Both hold kernel workspaces, which differ from processor to
processor and with the threads. *Of tensors alone*: the activation peak without them, the same on
every machine; a config's `largest_ratio` judges this one. *Step time*: checkpointed over baseline,
taken in turn on the same batches, the median of n pairs and, from 5 pairs on, quartiles. *Exact*:
loss, every gradient, buffer and parameter and the random state are equal bit for bit after each
optimizer step. The optimizer is SGD with momentum unless the model's name is followed by another.
"""


def write_markdown(rows: Sequence[Row], heading: Heading, picture: str, path: Path) -> None:
    """Writes the table, the picture, the command that makes them, and what failed."""
    faults = [f"- {in_markdown(fault)}" for row in rows for fault in row.faults]
    lines = [
        f"# {in_markdown(heading.title)}",
        "",
        in_code(heading.command),
        "",
        in_markdown(heading.setting),
        "",
        _line(COLUMNS),
        _line("---" if name in ("model", "batch") else "---:" for name in COLUMNS),
        *(_line([in_markdown(label), *cells]) for label, *cells in map(words, rows)),
        "",
        *([*faults, ""] if faults else []),
        NOTES,
        f"![Step peak and time]({picture})",
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def write_models(rows: Sequence[Row], path: Path) -> None:
    """Writes `models_csv` to a file."""
    path.write_text(models_csv(rows), encoding="utf-8", newline="")


def write_timings(rows: Sequence[Row], path: Path) -> None:
    """Writes `timings_csv` to a file."""
    path.write_text(timings_csv(rows), encoding="utf-8", newline="")


def models_csv(rows: Sequence[Row]) -> str:
    """Returns one line per model, bytes and ratios unrounded."""
    return to_csv(
        (
            {
                "model": row.model,
                "arguments": row.arguments,
                "checkpoint": row.checkpoint,
                "batch": row.batch,
                "parameters": row.parameters,
                "peak_bytes_baseline": row.peak.baseline,
                "peak_bytes_checkpointed": row.peak.checkpointed,
                "activation_peak_bytes_baseline": row.activation_peak.baseline,
                "activation_peak_bytes_checkpointed": row.activation_peak.checkpointed,
                "tensor_peak_bytes_baseline": row.tensor_peak.baseline,
                "tensor_peak_bytes_checkpointed": row.tensor_peak.checkpointed,
                "tensor_activation_peak_bytes_baseline": of_tensors.baseline,
                "tensor_activation_peak_bytes_checkpointed": of_tensors.checkpointed,
                "peak_ratio": row.step_ratio,
                "activation_peak_ratio": row.ratio,
                "tensor_activation_peak_ratio": row.tensor_ratio,
                "largest_ratio": row.largest_ratio,
                "time_ratio_median": row.time and row.time.median,
                "time_ratio_lower_quartile": row.quartiles and row.quartiles[0],
                "time_ratio_upper_quartile": row.quartiles and row.quartiles[1],
                "time_pairs": len(row.time_ratios),
                "exact": row.exact,
                "faults": "; ".join(row.faults),
            }
            for row in rows
            for of_tensors in [row.tensor_activation_peak]
        ),
    )


def timings_csv(rows: Sequence[Row]) -> str:
    """Returns one line per timed pair of steps, in seconds."""
    return to_csv(
        (
            {
                "model": row.model,
                "pair": pair,
                "seconds_baseline": baseline,
                "seconds_checkpointed": checkpointed,
                "time_ratio": checkpointed / baseline,
            }
            for row in rows
            for pair, (baseline, checkpointed) in enumerate(
                zip(row.step_seconds.baseline, row.step_seconds.checkpointed, strict=True), start=1
            )
        ),
    )


def to_csv(entries: Iterable[dict[str, Any]]) -> str:
    """Returns entries of the same keys as CSV under these."""
    entries = list(entries)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(entries[0]) if entries else ["model"])
    writer.writeheader()
    writer.writerows({key: in_csv(value) for key, value in entry.items()} for entry in entries)
    return text.getvalue()


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
