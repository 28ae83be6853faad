"""Shows a comparison in the terminal, and writes its report: Markdown, CSV and a picture."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from zoo.report.escaping import in_code, in_csv, in_markdown, markdown_table
from zoo.report.plot import draw_comparison
from zoo.report.rows import DEFINITIONS, KINDS, Heading, Row, median, quartiles, variants
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
    shown = variants(rows)
    cells = [{**row.cells(shown), "model": in_markdown(row.label)} for row in rows]
    faults = [f"- {in_markdown(fault)}" for row in rows for fault in row.faults]
    meanings = [
        f"- *{in_markdown(word)}*: {in_markdown(DEFINITIONS[word])}" for word in DEFINITIONS
    ]
    paragraphs = [
        f"# {in_markdown(heading.title)}",
        in_code(heading.command),
        in_markdown(heading.setting),
        markdown_table([*cells[0]], [[*map(str, row.values())] for row in cells]),
        "\n".join(faults),
        "\n".join(meanings),
        "" if runs is None else as_markdown(runs),
        "![Step peak and time](comparison.svg)\n",
    ]
    files = {"report.md": "\n\n".join(filter(None, paragraphs)), **csv_files(rows, runs)}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder / "report.md"


def csv_files(rows: Sequence[Row], runs: TwoRuns | None) -> dict[str, str]:
    """Returns the CSV files of a report by name: models, timings and, of two runs, compared."""
    files = {"models.csv": to_csv(_models(rows)), "timings.csv": to_csv(_timings(rows))}
    return files if runs is None else {**files, "compared.csv": to_csv(as_entries(runs))}


def _models(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yields an entry per model, bytes and ratios unrounded."""
    _, *others = shown = variants(rows)
    for row in rows:
        given = ("model", "arguments", "checkpoint", "batch", "parameters")
        entry = {name: getattr(row, name) for name in given}
        entry |= _peaks(row, "peak", shown)
        entry |= {_of("peak_ratio", kind): row.ratio(kind) for kind in others}
        entry |= _peaks(row, "activation_peak", KINDS)
        entry |= _peaks(row, "tensor_peak", shown)
        entry |= _peaks(row, "tensor_activation_peak", shown)
        for peak in ("activation_peak", "tensor_activation_peak"):
            entry[f"{peak}_ratio"] = row.ratio(peak=peak)
        entry["largest_ratio"] = row.largest_ratio
        for kind in others:
            ratios = row.time_ratios(kind)
            found = (median(ratios).value, *(quartiles(ratios) or (None, None)))
            for name, value in zip(
                ("median", "lower_quartile", "upper_quartile"), found, strict=True
            ):
                entry[_of(f"time_ratio_{name}", kind)] = value
        entry["time_pairs"] = len(row.time_ratios("checkpointed"))
        yield {**entry, "exact": row.exact, "faults": "; ".join(row.faults)}


def _of(name: str, kind: str) -> str:
    """Names a column of a variant; that of the checkpointed one has the name alone."""
    return name if kind == "checkpointed" else f"{name}_{kind}"


def _peaks(row: Row, name: str, kinds: Iterable[str]) -> dict[str, int | None]:
    return {f"{name}_bytes_{kind}": row.peaks[name][kind] for kind in kinds}


def _timings(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yields an entry per timed pair of steps, in seconds."""
    _, *others = shown = variants(rows)
    for row in rows:
        columns = {f"seconds_{kind}": row.step_seconds.get(kind) for kind in shown}
        columns |= {_of("time_ratio", kind): row.time_ratios(kind) for kind in others}
        for pair in range(len(row.time_ratios("checkpointed"))):
            cells = {name: column[pair] if column else None for name, column in columns.items()}
            yield {"model": row.model, "pair": pair + 1, **cells}


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
    tables = [(LEFT_OUT_FIRST[:count], True) for count in range(len(LEFT_OUT_FIRST) + 1)]
    for left_out, broken in ((), False), *tables:
        table = _table(rows, title, left_out, broken)
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


def _table(rows: Sequence[Row], title: str, left_out: Sequence[str], broken: bool) -> Table:
    def lines(text: str) -> str:
        return BREAK.sub("\n", text) if broken else text

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        collapse_padding=broken, pad_edge=not broken,
    )  # fmt: skip
    for row in rows:
        cells = row.cells(variants(rows))
        if broken:
            cells["model"] = cells["model"].replace(", ", ",\n")
        shown = {name: str(cell) for name, cell in cells.items() if name not in left_out}
        if not table.columns:
            for name in shown:
                left = name in ("model", "batch")
                table.add_column(lines(name), justify="left" if left else "right", no_wrap=True)
        table.add_row(*map(lines, shown.values()), style="red" if row.faults else None)
    return table
