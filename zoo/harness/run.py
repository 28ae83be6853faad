"""Runs the cells of a config, each in a fresh process, and keeps every result.

A cell that fails, runs out of memory or is killed has that as its result and costs no other one.
What ran before is not run again: after an interruption the same command goes on where it stopped.
That a cell does not fit in memory is a result as any; what failed is tried again.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zoo.errors import ConfigError
from zoo.harness.cells import KINDS, Cell, Kind, expand, timed_by
from zoo.harness.check import check_cells
from zoo.harness.config import Config
from zoo.harness.limits import check_limit
from zoo.harness.processes import outcome
from zoo.harness.progress import Shown
from zoo.harness.results import Record, Results
from zoo.harness.worker import locate, work

Comparison = dict[str, Any]
"""A model's config under "model" and the records of its cells under their kinds."""


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
    _check_device(config.device)
    check_limit(config.memory_limit, config.device)
    results, cells = results_of(config), expand(config)
    results.check()
    if config.fresh:
        results.clear()
    names = [model.name for model in config.models for _ in KINDS]
    with Shown(console, names) as shown:
        session = Session(results, shown, config.timeout)
        check_cells([entry["checkpointed"] for entry in cells if session.lacks(entry)])
        return [
            {"model": asdict(model), **session.compare(entry)}
            for model, entry in zip(config.models, cells, strict=True)
        ]


class Session:
    """Runs cells one at a time and keeps their results, except those that are known already."""

    def __init__(self, results: Results, shown: Shown, timeout: float) -> None:
        self.results, self.shown, self.timeout = results, shown, timeout
        records = results.read().items()
        self.known = {key: record for key, record in records if record["status"] != "failed"}

    def lacks(self, cells: Mapping[Kind, Cell]) -> bool:
        """Says whether a model's memory has yet to be measured."""
        return not all(cells[kind].key() in self.known for kind in ("baseline", "checkpointed"))

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


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda: torch finds no CUDA device here; --device cpu runs anywhere"
        )
