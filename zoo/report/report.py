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

from zoo.report.markdown import in_code, in_csv, in_markdown, markdown_table
from zoo.report.plot import draw_comparison
from zoo.report.rows import COLUMNS, DEFINITIONS, KINDS, Heading, Row, words

CAPTION = (
    "step peak and activation peak: the allocator's, kernel workspaces included; of tensors alone: "
    "the same on every machine, what largest_ratio judges; (ratio) to the baseline"
)
# what a table does without where the terminal is narrow
LEFT_OUT_FIRST = ("batch", "parameters")
BREAKS = (" → ", " [", " peak", " (", " tensors", " alone", " n=")


def write_report(rows: Sequence[Row], heading: Heading, folder: Path) -> Path:
    """Writes report.md, models.csv, timings.csv and comparison.svg/png; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_comparison(rows, heading, [folder / "comparison.svg", folder / "comparison.png"])
    faults = [f"- {in_markdown(fault)}" for row in rows for fault in row.faults]
    meanings = [
        f"- *{in_markdown(word)}*: {in_markdown(DEFINITIONS[word])}" for word in DEFINITIONS
    ]
    cells = [[in_markdown(label), *cells] for label, *cells in map(words, rows)]
    paragraphs = [
        f"# {in_markdown(heading.title)}",
        in_code(heading.command),
        in_markdown(heading.setting),
        markdown_table(COLUMNS, cells),
        *(["\n".join(faults)] if faults else []),
        "\n".join(meanings),
        "![Step peak and time](comparison.svg)\n",
    ]
    files = {
        "models.csv": models_csv(rows),
        "timings.csv": timings_csv(rows),
        "report.md": "\n\n".join(paragraphs),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder / "report.md"


def models_csv(rows: Sequence[Row]) -> str:
    """Returns one line per model, bytes and ratios unrounded."""
    given = ("model", "arguments", "checkpoint", "batch", "parameters")
    peaks = ("peak", "activation_peak", "tensor_peak", "tensor_activation_peak")
    return to_csv(
        {
            **{name: getattr(row, name) for name in given},
            **{
                f"{peak}_bytes_{kind}": getattr(getattr(row, peak), kind)
                for peak in peaks
                for kind in KINDS
            },
            "peak_ratio": row.peak.ratio,
            "activation_peak_ratio": row.activation_peak.ratio,
            "tensor_activation_peak_ratio": row.tensor_activation_peak.ratio,
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
            **{f"seconds_{kind}": row.step_seconds[kind][pair - 1] for kind in KINDS},
            "time_ratio": ratio,
        }
        for row in rows
        for pair, ratio in enumerate(row.time_ratios, start=1)
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
    for columns, breaks in ((COLUMNS, ()), (COLUMNS, BREAKS), (fewer, BREAKS)):
        table = _table(rows, title, columns, breaks)
        # what it takes, not what it would shrink to
        unlimited = console.options.update(max_width=1000)
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
    as_text: Any = {"markup": False, "highlight": False}
    console.print(table, **as_text)
    console.print(CAPTION, style="dim", **as_text)
    for fault in (fault for row in rows for fault in row.faults):
        console.print(fault, style="red", soft_wrap=True, **as_text)


def _table(rows: Sequence[Row], title: str, columns: Sequence[str], breaks: Sequence[str]) -> Table:
    def lines(text: str) -> str:
        for start in breaks:
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
