"""Runs the cells of a config, each in a fresh process, and keeps every result.

A cell that fails, runs out of memory or is killed has that as its result and costs no other one.
What ran before is not run again: after an interruption the same command goes on where it stopped.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zoo.errors import ConfigError
from zoo.harness.cells import KINDS, Cell, Kind, expand, timed_by
from zoo.harness.config import Config
from zoo.harness.processes import outcome
from zoo.harness.results import Record, Results
from zoo.harness.worker import work
from zoo.units import format_bytes, format_seconds

Comparison = dict[str, Any]
"""A model's config under "model" and the records of its cells under their kinds."""


def results_of(config: Config) -> Results:
    """Returns the results that belong to a config: `results/<config>.jsonl`."""
    return Results(Path(config.output) / f"{config.name}.jsonl")


def run(config: Config, console: Console) -> list[Comparison]:
    """Runs every cell of a config that has no result yet and returns the results by model.

    Raises:
        ConfigError: the device is not there, or the folder for results cannot be written.
        KeyboardInterrupt: passed on; the cells that finished are on disk.
    """
    _check_device(config.device)
    results_of(config).check()
    if config.fresh:
        results_of(config).clear()
    with Shown(console, total=len(KINDS) * len(config.models)) as shown:
        session = Session(results_of(config), shown, config.timeout)
        return [
            {"model": asdict(model), **session.compare(cells)}
            for model, cells in zip(config.models, expand(config), strict=True)
        ]


class Session:
    """Runs cells one at a time and keeps their results, except those that are known already."""

    def __init__(self, results: Results, shown: "Shown", timeout: float) -> None:
        self.results, self.shown, self.timeout = results, shown, timeout
        records = results.read().items()
        self.known = {key: record for key, record in records if record.get("status") == "done"}

    def compare(self, cells: Mapping[Kind, Cell]) -> Comparison:
        """Returns the records of a model's cells; what is timed is the plan that was measured."""
        baseline = self.record(cells["baseline"])
        checkpointed = self.record(cells["checkpointed"])
        timing = self.record(timed_by(checkpointed.get("plan"), cells["timing"]))
        return {"baseline": baseline, "checkpointed": checkpointed, "timing": timing}

    def record(self, cell: Cell) -> Record:
        """Returns the record of a cell, which runs if need be."""
        self.shown.start(cell)
        known = self.known.get(cell.key())
        record = known | {"cached": True} if known else run_cell(cell, self.timeout)
        if not known:
            self.results.append(record)
        self.shown.finish(cell, record)
        return record


class Shown:
    """Shows how far a run is: a line for each cell that ended and, in a terminal, a bar."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done = console, total, 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.bar = Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> "Shown":
        self.bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.stop()

    def start(self, cell: Cell) -> None:
        """Says what runs now."""
        self.bar.update(self.task, description=f"{cell.model.name} {cell.kind}")

    def finish(self, cell: Cell, record: Record) -> None:
        """Says what came of it."""
        self.done += 1
        text = f"[{self.done:>{len(str(self.total))}}/{self.total}] {line(cell, record)}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.bar.advance(self.task)


def line(cell: Cell, record: Record) -> str:
    """Says in a line what came of a cell."""
    start = f"{cell.model.name} {cell.kind}: "
    if record["status"] == "failed":
        return f"{start}failed, {record['reason']}"
    again = ", measured before" if record.get("cached") else ""
    took = f" ({record['seconds']:.0f} s{again})"
    if cell.kind == "timing":
        fastest = {name: min(values) for name, values in record["step_seconds"].items()}
        steps = f"{format_seconds(fastest['baseline'])}, checkpointed "
        return f"{start}a step takes {steps}{format_seconds(fastest['checkpointed'])}{took}"
    return f"{start}activation peak {format_bytes(record['memory']['activation_peak'])}{took}"


def run_cell(cell: Cell, timeout: float) -> Record:
    """Runs a cell in a fresh process and returns its record, whatever happens to the process."""
    start = time.monotonic()
    result = outcome(work, cell, timeout)
    return {
        "key": cell.key(),
        "kind": cell.kind,
        "cell": asdict(cell),
        "status": "failed" if "reason" in result else "done",
        "seconds": round(time.monotonic() - start, 2),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **result,
    }


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda: torch finds no CUDA device here; --device cpu runs anywhere"
        )
