"""Prints a comparison in the terminal, and writes its report: Markdown, CSV and a picture."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from zoo.files import write_file
from zoo.report.escaping import in_code, in_markdown, markdown_table, to_csv
from zoo.report.matplotlib_charts import draw_comparison
from zoo.report.rows import (
    DEFINITIONS,
    KINDS,
    VARIANTS,
    Heading,
    ModelRow,
    graphs,
    median,
    quartiles,
    variants,
)
from zoo.report.two_runs import CellChanges, TwoRuns, as_entries, as_markdown

CAPTION = (
    "step peak: of the whole step, judged by largest_ratio; activation peak: without resident "
    "memory; both the allocator's, with kernel workspaces; without workspaces: the tensors only; "
    "(ratio) to the baseline; times relative to the baseline's"
)
IN_BACKWARD = "+ optimizer in backward: checkpointed, and each gradient is used and freed at once"
AS_GRAPHS = (
    "as CUDA graphs: each variant by zoo.make_graphed_step; the peak of the step that is captured, "
    "the time of a replay relative to the baseline's eager step"
)
# explanations below a table, by the variant that has to be in it
ABOUT = {
    "baseline": CAPTION,
    "library_checkpointing": f"library's own: {DEFINITIONS[VARIANTS['library_checkpointing']]}",
    "optimizer_in_backward": IN_BACKWARD,
}
# columns that a table leaves out in a narrow terminal, in this order
LEFT_OUT_FIRST = (
    *("parameters", "batch", "without workspaces", "activation peak", "reserved"),
    "step time: + optimizer in backward",
    "step time: library's own",
)
# where a heading or a cell may break into the next line
BREAK = re.compile(r"(?<=:) | (?=[→\[(]|n=|workspaces|in backward|peak$)")


def write_report(
    rows: Sequence[ModelRow], heading: Heading, folder: Path, runs: TwoRuns | None = None
) -> Path:
    """Writes report.md, CSV files and comparison.svg/png; returns the page's path.

    The files are models.csv, timings.csv and, of two runs, compared.csv.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw_comparison(rows, heading, [folder / "comparison.svg", folder / "comparison.png"])
    shown = variants(rows)
    cells = [{**row.cells(shown), "model": in_markdown(row.label)} for row in rows]
    faults = [f"- {in_markdown(text)}" for row in rows for text in (*row.faults, *row.notes)]
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
        "![Step peak and step time of each model and variant, as in the table](comparison.svg)\n",
    ]
    files = {"report.md": "\n\n".join(filter(None, paragraphs)), **csv_files(rows, runs)}
    for name, text in files.items():
        write_file(folder / name, text)
    return folder / "report.md"


def tables(rows: Sequence[ModelRow], runs: TwoRuns | None) -> dict[str, list[dict[str, Any]]]:
    """Returns the numbers of a report by table: models, timings and, of two runs, compared."""
    by_name = {"models": [*_models(rows)], "timings": [*_timings(rows)]}
    return by_name if runs is None else {**by_name, "compared": as_entries(runs)}


def csv_files(rows: Sequence[ModelRow], runs: TwoRuns | None) -> dict[str, str]:
    """Returns the tables as CSV files by name."""
    return {f"{name}.csv": to_csv(entries) for name, entries in tables(rows, runs).items()}


def _models(rows: Sequence[ModelRow]) -> Iterator[dict[str, Any]]:
    """Yields an entry per model, bytes and ratios unrounded."""
    shown = variants(rows)
    _, *others = whole = [*shown, *graphs(rows)]
    for row in rows:
        columns = ("model", "arguments", "checkpoint", "batch", "parameters")
        entry = {name: getattr(row, name) for name in columns}
        entry |= _peaks(row, "peak", whole)
        entry |= {_of("peak_ratio", kind): row.ratio(kind) for kind in others}
        entry |= _peaks(row, "activation_peak", KINDS)
        entry |= _peaks(row, "tensor_peak", shown)
        entry |= _peaks(row, "tensor_activation_peak", shown)
        entry |= _peaks(row, "reserved_peak", whole) if row.shows_reserved else {}
        names = ("activation_peak", "tensor_activation_peak")
        entry |= {f"{name}_ratio": row.ratio(peak=name) for name in names}
        entry["largest_ratio"] = row.largest_ratio
        for kind in others:
            ratios = row.time_ratios(kind)
            lower, upper = quartiles(ratios) or (None, None)
            entry[_of("time_ratio_median", kind)] = median(ratios).value
            entry[_of("time_ratio_lower_quartile", kind)] = lower
            entry[_of("time_ratio_upper_quartile", kind)] = upper
        entry["time_pairs"] = len(row.time_ratios("checkpointed"))
        verdict = {"exact": row.exact, "baseline_repeats": row.baseline_repeats}
        yield {**entry, **verdict, "faults": row.faults, "notes": row.notes}


def _of(name: str, kind: str) -> str:
    """Names a column of a variant; for the checkpointed one it is the bare name."""
    return name if kind == "checkpointed" else f"{name}_{kind}"


def _peaks(row: ModelRow, name: str, kinds: Iterable[str]) -> dict[str, int | None]:
    return {f"{name}_bytes_{kind}": row.peaks[name][kind] for kind in kinds}


def _timings(rows: Sequence[ModelRow]) -> Iterator[dict[str, Any]]:
    """Yields an entry per timed pair of steps, in seconds."""
    _, *others = shown = [*variants(rows), *graphs(rows)]
    for row in rows:
        columns = {f"seconds_{kind}": row.step_seconds.get(kind) for kind in shown}
        columns |= {_of("time_ratio", kind): row.time_ratios(kind) for kind in others}
        for pair in range(len(row.time_ratios("checkpointed"))):
            cells = {name: column[pair] if column else None for name, column in columns.items()}
            yield {"model": row.model, "pair": pair + 1, **cells}


def show(rows: Sequence[ModelRow], title: str, console: Console) -> None:
    """Prints the table and below it the faults of the comparison, in red, and the notes.

    If the table is too wide, the numbers of a cell go below each other; if that is still too wide,
    some columns are left out. The report on disk has them all.
    """
    tries = [(LEFT_OUT_FIRST[:count], True) for count in range(len(LEFT_OUT_FIRST) + 1)]
    for left_out, broken in ((), False), *tries:
        table = _table(rows, title, left_out, broken)
        # the full width, not the one to which rich would shrink it
        unlimited = console.options.update(max_width=1000)
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
    about = [ABOUT[kind] for kind in variants(rows) if kind in ABOUT] + [AS_GRAPHS] * bool(
        graphs(rows)
    )
    for part, style in (table, None), *((words, "dim") for words in about):
        console.print(part, style=style, markup=False, highlight=False)
    for row in rows:
        for text, style in (*((f, "red") for f in row.faults), *((n, "yellow") for n in row.notes)):
            say(console, text, style)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a line verbatim: without rich's markup and highlighting."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def has_grown(runs: TwoRuns, tolerance: float, console: Console) -> bool:
    """Prints the changes; returns whether a peak is missing or has grown beyond the tolerance.

    Bytes come from the allocator and are the same in every run. Other changes (seconds, bits,
    versions) are no failure: another torch may round differently, and times count as different only
    if the quartiles do not overlap.
    """
    lines = [(f"measured elsewhere: {words}", False) for words in runs.differs]
    lines += [(f"{name} was not measured before", False) for name in runs.only_now]
    lines += [(words, True) for words in runs.untimed]
    lines += [line for cell in runs.cells for line in _grown(cell, tolerance)]
    sizes = [change for cell in runs.cells for change in [*cell.changes.values()][:-1]]
    peaks = sum(None not in (change.before.value, change.now.value) for change in sizes)
    worse = sum(is_worse for _, is_worse in lines)
    verdict = f"{worse} worse" if worse else "nothing worse"
    end = f"compared with {runs.name}: {peaks} peaks, tolerance {tolerance:.2%}: {verdict}"
    for text, is_worse in [*lines, (end, worse > 0)]:
        say(console, text, "red" if is_worse else None)
    return worse > 0


def _grown(cell: CellChanges, tolerance: float) -> Iterator[tuple[str, bool]]:
    """Yields the changes of a cell, and whether each is worse."""
    *sizes, (_, time) = cell.changes.items()
    for name, change in sizes:
        before, now = change.before.value, change.now.value
        line, is_worse = f"{cell.name}: {name} {change.cell}", False
        if before is not None and now is not None:
            is_worse = now > before * (1 + tolerance)
            line += f", {now - before:+,} bytes"
            line += f", more than the tolerance of {tolerance:.2%}" * is_worse
        elif name == "step peak":
            is_worse = now is None
            line += f": {cell.reason}" * is_worse
        if before != now:
            yield line, is_worse
    if time.is_clear and time.before != time.now:
        yield f"{cell.name}: step time {time.cell}", False
    if cell.other_bits:
        yield f"{cell.name}: other bits in {', '.join(cell.other_bits)}", False


def _table(rows: Sequence[ModelRow], title: str, left_out: Sequence[str], broken: bool) -> Table:
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
                table.add_column(lines(name), justify="left" if left else "right", overflow="fold")
        table.add_row(*map(lines, shown.values()), style="red" if row.faults else None)
    return table
