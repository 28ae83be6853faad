"""Runs the cells of a config, each in a fresh process, and keeps every result.

A cell that fails, runs out of memory or is killed has that as its result and costs no other one.
What ran before is not run again: after an interruption the same command goes on where it stopped.
That a cell does not fit in memory is a result as any; what failed is tried again.

    [4/21] resnet1001 baseline: activation peak 584 MiB (9 s)
    resnet1001 checkpointed ━━━━━╺━━━━━━━━━━━━━━━━━━  4/21 0:00:48 left: resnet1001, vnet, lstm +2

A line tells of each cell that ended; a terminal has a bar below them.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from zoo.errors import ConfigError
from zoo.harness.cells import KINDS, Cell, expand
from zoo.harness.config import Config
from zoo.harness.processes import check_limit, outcome
from zoo.harness.results import Comparison, Record, Results
from zoo.harness.worker import first_fault, locate, work
from zoo.report.rows import FEWEST
from zoo.units import format_bytes, format_seconds

NAMED = 3
CHECK_TIMEOUT = 600  # seconds


def results_of(config: Config) -> Results:
    """Returns the results that belong to a config: `results/<config>.jsonl`."""
    return Results(Path(config.output) / f"{config.name}.jsonl")


def run(config: Config, console: Console) -> list[Comparison]:
    """Runs every cell of a config that has no result yet and returns the results by model.

    Raises:
        ConfigError: before anything is measured, that a device, a package or the folder for results
            is not there, or that a model cannot be built or run as the config says.
        KeyboardInterrupt: passed on; the cells that finished are on disk.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda: torch finds no CUDA device here; --device cpu runs anywhere"
        )
    check_limit(config.memory_limit, config.device)
    results = results_of(config)
    results.check()
    if config.fresh:
        results.clear()
    records = results.read().items()
    known = {key: record for key, record in records if record["status"] != "failed"}
    shown = Shown(console, [model.name for model in config.models for _ in KINDS])

    def record_of(cell: Cell) -> Record:
        shown.start(cell)
        if cell.key() in known:
            record = known[cell.key()] | {"cached": True}
        else:
            record = run_cell(cell, config.timeout)
            results.append(record)
        shown.finish(cell, record)
        return record

    with shown.bar:
        cells = expand(config)
        check_cells(
            [
                entry["checkpointed"]
                for entry in cells
                if not known.keys() >= {entry["baseline"].key(), entry["checkpointed"].key()}
            ]
        )
        comparisons = []
        for model, entry in zip(config.models, cells, strict=True):
            found = {kind: record_of(entry[kind]) for kind in ("baseline", "checkpointed")}
            # just the plan that was measured is timed
            timing = replace(entry["timing"], plan=found["checkpointed"].get("plan"))
            comparisons.append({"model": asdict(model), **found, "timing": record_of(timing)})
    return comparisons


def check_cells(cells: Sequence[Cell]) -> None:
    """Raises ConfigError for a cell that cannot run: its data, size, argument or plan."""
    # what goes wrong with the process itself is left to the cells
    if cells and (fault := outcome(first_fault, tuple(cells), CHECK_TIMEOUT).get("fault")):
        raise ConfigError(fault)


def run_cell(cell: Cell, timeout: float) -> Record:
    """Runs a cell in a fresh process and returns its record, whatever happens to the process."""
    start = time.monotonic()
    result = outcome(work, cell, timeout)
    took = round(time.monotonic() - start, 2)
    if "environment" not in result:
        result["environment"] = outcome(locate, cell, timeout).get("environment")
    return {
        "key": cell.key(),
        "kind": cell.kind,
        "cell": asdict(cell),
        "status": "done",
        "seconds": took,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **result,
    }


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

    def start(self, cell: Cell) -> None:
        """Says what runs now and what is left after it."""
        left = names_left(self.models[self.done + 1 :])
        self.bar.update(self.task, description=f"{cell.model.name} {cell.kind}", left=left)

    def finish(self, cell: Cell, record: Record) -> None:
        """Says what came of it."""
        self.done += 1
        total = len(self.models)
        text = f"[{self.done:>{len(str(total))}}/{total}] {_line(cell, record)}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.bar.advance(self.task)


def names_left(models: Sequence[str]) -> str:
    """Names the models whose cells are left, the first few: 'left: vnet, gpt2_small, lstm +2'."""
    names = list(dict.fromkeys(models))
    if not names:
        return ""
    more = f" +{len(names) - NAMED}" if len(names) > NAMED else ""
    return f"left: {', '.join(names[:NAMED])}{more}"


def _line(cell: Cell, record: Record) -> str:
    """Says in a line what came of a cell."""
    start = f"{cell.model.name} {cell.kind}: "
    again = ", measured before" if record.get("cached") else ""
    took = f" ({record['seconds']:.0f} s{again})"
    if record["status"] == "failed":
        return f"{start}failed, {record['reason']}"
    if record["status"] == "does not fit":
        return f"{start}does not fit, {record['reason']}{took}"
    if cell.kind != "timing":
        return f"{start}activation peak {format_bytes(record['memory']['activation_peak'])}{took}"
    spread, ratio = record["spread"], record["spread"]["ratio"]
    baseline, checkpointed = (
        format_seconds(spread[kind]["median"]) for kind in ("baseline", "checkpointed")
    )
    enough = len(record["step_seconds"]["baseline"]) >= FEWEST
    quartiles = f" [{ratio['lower']:.2f}, {ratio['upper']:.2f}]" if enough else ""
    times = f"a step takes {baseline}, checkpointed {checkpointed}, ×{ratio['median']:.2f}"
    return f"{start}{times}{quartiles}{took}"
