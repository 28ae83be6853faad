"""Shows a comparison in the terminal, and writes its report: Markdown, CSV and a picture."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from zoo.report.escaping import in_code, in_csv, in_markdown, markdown_table
from zoo.report.plot import draw_comparison
from zoo.report.rows import DEFINITIONS, KINDS, NOT_TIMED, Heading, Row, columns, variants, words
from zoo.report.two_runs import TwoRuns, as_entries, as_markdown

CAPTION = (
    "step peak: of the whole step, what largest_ratio judges; activation peak: less what is "
    "resident; both the allocator's, kernel workspaces included; of tensors alone: without these; "
    "(ratio) to the baseline; times over the baseline's"
)
IN_BACKWARD = "+ optimizer in backward: checkpointed, and each gradient is used and freed at once"
# what a table does without where the terminal is narrow, one after another
LEFT_OUT_FIRST = (
    *("parameters", "batch", "of tensors alone", "activation peak"),
    "step time: + optimizer in backward",
)
# where a heading or a cell goes on in the next line
BREAK = re.compile(r"(?<=:) | (?=[→\[(]|n=|tensors|alone|in backward|peak$)")


def write_report(
    rows: Sequence[Row], heading: Heading, folder: Path, runs: TwoRuns | None = None
) -> Path:
    """Writes report.md, CSV files and comparison.svg/png; returns the page's path.

    The files are models.csv, timings.csv and, of two runs, compared.csv.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw_comparison(rows, heading, [folder / "comparison.svg", folder / "comparison.png"])
    faults = [f"- {in_markdown(fault)}" for row in rows for fault in row.faults]
    meanings = [
        f"- *{in_markdown(word)}*: {in_markdown(DEFINITIONS[word])}" for word in DEFINITIONS
    ]
    shown = variants(rows)
    cells = [[in_markdown(label), *cells] for label, *cells in (words(row, shown) for row in rows)]
    paragraphs = [
        f"# {in_markdown(heading.title)}",
        in_code(heading.command),
        in_markdown(heading.setting),
        markdown_table(columns(shown), cells),
        *(["\n".join(faults)] if faults else []),
        "\n".join(meanings),
        *([] if runs is None else [as_markdown(runs)]),
        "![Step peak and time](comparison.svg)\n",
    ]
    files = {
        "models.csv": models_csv(rows),
        "timings.csv": timings_csv(rows),
        "report.md": "\n\n".join(paragraphs),
        **({} if runs is None else {"compared.csv": to_csv(as_entries(runs))}),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder / "report.md"


def models_csv(rows: Sequence[Row]) -> str:
    """Returns one line per model, bytes and ratios unrounded."""
    given = ("model", "arguments", "checkpoint", "batch", "parameters")
    _, *others = shown = variants(rows)
    return to_csv(
        {
            **{name: getattr(row, name) for name in given},
            **_peaks(row, "peak", shown),
            **{_of("peak_ratio", kind): row.peak.ratio_of(kind) for kind in others},
            **_peaks(row, "activation_peak", KINDS),
            **_peaks(row, "tensor_peak", shown),
            **_peaks(row, "tensor_activation_peak", shown),
            "activation_peak_ratio": row.activation_peak.ratio,
            "tensor_activation_peak_ratio": row.tensor_activation_peak.ratio,
            "largest_ratio": row.largest_ratio,
            **{name: value for kind in others for name, value in _times(row, kind).items()},
            "time_pairs": len(row.times["checkpointed"].pairs),
            "exact": row.exact,
            "faults": "; ".join(row.faults),
        }
        for row in rows
    )


def _of(name: str, kind: str) -> str:
    """Names a column of a variant; that of the checkpointed one has the name alone."""
    return name if kind == "checkpointed" else f"{name}_{kind}"


def _peaks(row: Row, name: str, kinds: Iterable[str]) -> dict[str, int | None]:
    return {f"{name}_bytes_{kind}": getattr(getattr(row, name), kind) for kind in kinds}


def _times(row: Row, kind: str) -> dict[str, float | None]:
    ratios = row.times.get(kind, NOT_TIMED)
    median = None if ratios.spread is None else ratios.spread.median
    return {
        _of("time_ratio_median", kind): median,
        _of("time_ratio_lower_quartile", kind): ratios.quartiles and ratios.quartiles[0],
        _of("time_ratio_upper_quartile", kind): ratios.quartiles and ratios.quartiles[1],
    }


def timings_csv(rows: Sequence[Row]) -> str:
    """Returns one line per timed pair of steps, in seconds."""
    _, *others = shown = variants(rows)
    return to_csv(
        {
            "model": row.model,
            "pair": pair,
            **{f"seconds_{kind}": _at(row.step_seconds.get(kind, []), pair) for kind in shown},
            **{
                _of("time_ratio", kind): _at(row.times.get(kind, NOT_TIMED).pairs, pair)
                for kind in others
            },
        }
        for row in rows
        for pair in range(1, len(row.times["checkpointed"].pairs) + 1)
    )


def _at(values: Sequence[float], pair: int) -> float | None:
    return values[pair - 1] if values else None


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
    every = columns(variants(rows))
    fewer = (
        [column for column in every if column not in LEFT_OUT_FIRST[:count]]
        for count in range(len(LEFT_OUT_FIRST) + 1)
    )
    for shown, broken in ((every, False), *((part, True) for part in fewer)):
        table = _table(rows, title, shown, broken)
        # what it takes, not what it would shrink to
        unlimited = console.options.update(max_width=1000)
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
    as_text: Any = {"markup": False, "highlight": False}
    console.print(table, **as_text)
    console.print(CAPTION, style="dim", **as_text)
    if "optimizer_in_backward" in variants(rows):
        console.print(IN_BACKWARD, style="dim", **as_text)
    for fault in (fault for row in rows for fault in row.faults):
        console.print(fault, style="red", soft_wrap=True, **as_text)


def _table(rows: Sequence[Row], title: str, shown: Sequence[str], broken: bool) -> Table:
    def lines(text: str) -> str:
        return BREAK.sub("\n", text) if broken else text

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        collapse_padding=broken, pad_edge=not broken,
    )  # fmt: skip
    kinds = variants(rows)
    for column in shown:
        left = column in ("model", "batch")
        table.add_column(lines(column), justify="left" if left else "right", no_wrap=True)
    for row in rows:
        cells = dict(zip(columns(kinds), words(row, kinds), strict=True))
        parts = [lines(cells[column]) for column in shown]
        if broken:
            parts[0] = parts[0].replace(", ", ",\n")
        table.add_row(*parts, style="red" if row.faults else None)
    return table
