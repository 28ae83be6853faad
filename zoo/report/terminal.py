"""Shows a comparison in the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from zoo.report.rows import Row
from zoo.report.words import CAPTION, COLUMNS, words

LEFT_OUT_FIRST = ("batch", "parameters")
BREAKS = (" → ", " [", " peak", " (", " tensors", " alone", " n=")


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
    fitting = (table for table in layouts if _width(table, console) <= console.width)
    console.print(next(fitting, layouts[-1]), markup=False, highlight=False)
    console.print(CAPTION, style="dim", markup=False, highlight=False)
    for fault in (fault for row in rows for fault in row.faults):
        console.print(fault, style="red", markup=False, highlight=False, soft_wrap=True)


def _table(rows: Sequence[Row], title: str, columns: Sequence[str], stacked: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        left = column in ("model", "batch")
        table.add_column(_lines(column, stacked), justify="left" if left else "right", no_wrap=True)
    for row in rows:
        cells = dict(zip(COLUMNS, words(row), strict=True))
        shown = [_lines(cells[column], stacked) for column in columns]
        table.add_row(*shown, style="red" if row.faults else None)
    return table


def _width(table: Table, console: Console) -> int:
    # what it takes, not what it would shrink to
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def _lines(text: str, stacked: bool) -> str:
    if not stacked:
        return text
    for start in BREAKS:
        text = text.replace(start, f"\n{start[1:]}")
    return text
