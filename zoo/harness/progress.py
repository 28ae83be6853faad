"""Shows how far a run is: a line for each cell that ended and, in a terminal, a bar below them.

    [4/21] resnet1001 baseline: activation peak 584 MiB (9 s)
    resnet1001 checkpointed ━━━━━╺━━━━━━━━━━━━━━━━━━  4/21 0:00:48 left: resnet1001, vnet, lstm +2

Where there is no terminal, only the lines are there: a log keeps what it is sent.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from zoo.harness.cells import Cell
from zoo.harness.results import Record
from zoo.report.rows import FEWEST
from zoo.units import format_bytes, format_seconds

NAMED = 3


class Shown:
    """Shows the cells of a run, whose models are given in the order in which they run."""

    def __init__(self, console: Console, models: Sequence[str]) -> None:
        self.console, self.models, self.done = console, models, 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=len(models), left="")

    def __enter__(self) -> "Shown":
        self.bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.stop()

    def start(self, cell: Cell) -> None:
        """Says what runs now and what is left after it."""
        left = names_left(self.models[self.done + 1 :])
        self.bar.update(self.task, description=f"{cell.model.name} {cell.kind}", left=left)

    def finish(self, cell: Cell, record: Record) -> None:
        """Says what came of it."""
        self.done += 1
        total = len(self.models)
        text = f"[{self.done:>{len(str(total))}}/{total}] {line(cell, record)}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.bar.advance(self.task)


def names_left(models: Sequence[str]) -> str:
    """Names the models whose cells are left, the first few: 'left: vnet, gpt2_small, lstm +2'."""
    names = list(dict.fromkeys(models))
    if not names:
        return ""
    more = f" +{len(names) - NAMED}" if len(names) > NAMED else ""
    return f"left: {', '.join(names[:NAMED])}{more}"


def line(cell: Cell, record: Record) -> str:
    """Says in a line what came of a cell."""
    start = f"{cell.model.name} {cell.kind}: "
    again = ", measured before" if record.get("cached") else ""
    took = f" ({record['seconds']:.0f} s{again})"
    if record["status"] == "failed":
        return f"{start}failed, {record['reason']}"
    if record["status"] == "does not fit":
        return f"{start}does not fit, {record['reason']}{took}"
    if cell.kind == "timing":
        return f"{start}{_steps(record)}{took}"
    return f"{start}activation peak {format_bytes(record['memory']['activation_peak'])}{took}"


def _steps(record: Record) -> str:
    spread = record["spread"]
    baseline = format_seconds(spread["baseline"]["median"])
    checkpointed = format_seconds(spread["checkpointed"]["median"])
    enough = len(record["step_seconds"]["baseline"]) >= FEWEST
    between = f"[{spread['ratio']['lower']:.2f}, {spread['ratio']['upper']:.2f}]"
    ratio = f"×{spread['ratio']['median']:.2f}" + (f" {between}" if enough else "")
    return f"a step takes {baseline}, checkpointed {checkpointed}, {ratio}"
