"""Shows a comparison in the terminal, and writes its report: Markdown, CSV and a picture."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from zoo.report.markdown import in_code, in_csv, in_markdown
from zoo.report.plot import draw_comparison
from zoo.report.rows import COLUMNS, DEFINITIONS, Heading, Row, words

CAPTION = (
    "step peak and activation peak: the allocator's, kernel workspaces included; of tensors alone: "
    "the same on every machine, what largest_ratio judges; (ratio) to the baseline"
)
LEFT_OUT_FIRST = ("batch", "parameters")
BREAKS = (" → ", " [", " peak", " (", " tensors", " alone", " n=")


def write_report(rows: Sequence[Row], heading: Heading, folder: Path) -> Path:
    """Writes report.md, models.csv, timings.csv and comparison.svg/png; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.md"
    draw_comparison(rows, heading, [folder / "comparison.svg", folder / "comparison.png"])
    for name, text in (("models.csv", models_csv(rows)), ("timings.csv", timings_csv(rows))):
        (folder / name).write_text(text, encoding="utf-8", newline="")
    faults = [f"- {in_markdown(fault)}" for row in rows for fault in row.faults]
    table = [
        COLUMNS,
        ["---" if name in ("model", "batch") else "---:" for name in COLUMNS],
        *([in_markdown(label), *cells] for label, *cells in map(words, rows)),
    ]
    paragraphs = [
        f"# {in_markdown(heading.title)}",
        in_code(heading.command),
        in_markdown(heading.setting),
        "\n".join(f"| {' | '.join(cells)} |" for cells in table),
        *(["\n".join(faults)] if faults else []),
        "\n".join(
            f"- *{in_markdown(word)}*: {in_markdown(meaning)}"
            for word, meaning in DEFINITIONS.items()
        ),
        "![Step peak and time](comparison.svg)\n",
    ]
    page.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return page


def models_csv(rows: Sequence[Row]) -> str:
    """Returns one line per model, bytes and ratios unrounded."""
    return to_csv(
        {
            "model": row.model,
            "arguments": row.arguments,
            "checkpoint": row.checkpoint,
            "batch": row.batch,
            "parameters": row.parameters,
            **{
                f"{peak}_bytes_{kind}": getattr(getattr(row, peak), kind)
                for peak in ("peak", "activation_peak", "tensor_peak", "tensor_activation_peak")
                for kind in ("baseline", "checkpointed")
            },
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
    )


def timings_csv(rows: Sequence[Row]) -> str:
    """Returns one line per timed pair of steps, in seconds."""
    return to_csv(
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
    )


def to_csv(entries: Iterable[dict[str, Any]]) -> str:
    """Returns entries of the same keys as CSV under these."""
    entries = list(entries)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(entries[0]) if entries else ["model"])
    writer.writeheader()
    writer.writerows({key: in_csv(value) for key, value in entry.items()} for entry in entries)
    return text.getvalue()


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    """Prints the table and below it, in red, what makes the comparison fail.

    Where it does not fit, a cell's numbers stand below each other; where that does not fit
    either, some columns are left out. The report on disk has them all.
    """
    fewer = [column for column in COLUMNS if column not in LEFT_OUT_FIRST]
    layouts = [
        _table(rows, title, COLUMNS, stacked=False),
        _table(rows, title, COLUMNS, stacked=True),
        _table(rows, title, fewer, stacked=True),
    ]
    # what a table takes, not what it would shrink to
    unlimited = console.options.update(max_width=1000)
    widths = [Measurement.get(console, unlimited, table).maximum for table in layouts]
    fitting = (
        table for table, width in zip(layouts, widths, strict=True) if width <= console.width
    )
    console.print(next(fitting, layouts[-1]), markup=False, highlight=False)
    console.print(CAPTION, style="dim", markup=False, highlight=False)
    for fault in (fault for row in rows for fault in row.faults):
        console.print(fault, style="red", markup=False, highlight=False, soft_wrap=True)


def _table(rows: Sequence[Row], title: str, columns: Sequence[str], stacked: bool) -> Table:
    def lines(text: str) -> str:
        for start in BREAKS if stacked else ():
            text = text.replace(start, f"\n{start[1:]}")
        return text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        left = column in ("model", "batch")
        table.add_column(lines(column), justify="left" if left else "right", no_wrap=True)
    for row in rows:
        cells = dict(zip(COLUMNS, words(row), strict=True))
        shown = [lines(cells[column]) for column in columns]
        table.add_row(*shown, style="red" if row.faults else None)
    return table
