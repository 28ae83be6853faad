"""Shows a comparison in the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from zoo.report.rows import Row
from zoo.report.words import COLUMNS, words


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    """Prints the table and below it, in red, what makes the comparison fail."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, column in enumerate(COLUMNS):
        left = column in ("model", "batch")
        table.add_column(column, justify="left" if left else "right", no_wrap=place == 0)
    for row in rows:
        table.add_row(*words(row), style="red" if row.faults else None)
    console.print(table)
    for fault in (fault for row in rows for fault in row.faults):
        console.print(fault, style="red", markup=False, highlight=False, soft_wrap=True)
