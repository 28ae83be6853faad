"""Runs the cells of a config one after another, each in a fresh process, and keeps every result.

A cell that fails, runs out of memory or is killed has that as its result and costs no other one.
What ran before is not run again: after an interruption the same command goes on where it stopped.
"""

import json
import os
import signal
import subprocess
import sys
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
from zoo.harness.cells import KINDS, Cell, expand
from zoo.harness.config import Config
from zoo.harness.results import Record, Results
from zoo.units import format_bytes, format_seconds

WORKER = (sys.executable, "-m", "zoo.harness.worker")

Comparison = dict[str, Any]
"""A model's config under "model" and the records of its cells under their kinds."""


def results_of(config: Config) -> Results:
    """Returns the results that belong to a config: `results/<config>.jsonl`."""
    return Results(Path(config.output) / f"{config.name}.jsonl")


def run(config: Config, console: Console) -> list[Comparison]:
    """Runs every cell of a config that has no result yet and returns the results by model.

    Raises:
        ConfigError: the device is not there.
        KeyboardInterrupt: passed on; the cells that finished are on disk.
    """
    _check_device(config.device)
    results = results_of(config)
    if config.fresh:
        results.clear()
    known = {key: record for key, record in results.read().items() if record["status"] == "done"}
    found: list[Comparison] = []
    with Shown(console, total=len(KINDS) * len(config.models)) as shown:
        for model, cells in zip(config.models, expand(config), strict=True):
            comparison: Comparison = {"model": asdict(model)}
            for kind, cell in cells.items():
                shown.start(cell)
                comparison[kind] = _result(cell, config.timeout, known, results)
                shown.finish(cell, comparison[kind])
            found.append(comparison)
    return found


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
    outcome = _outcome(cell, timeout)
    return {
        "key": cell.key(),
        "kind": cell.kind,
        "cell": asdict(cell),
        "status": "failed" if "reason" in outcome else "done",
        "seconds": round(time.monotonic() - start, 2),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        **outcome,
    }


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device cuda: torch finds no CUDA device here; --device cpu runs anywhere"
        )


def _result(cell: Cell, timeout: float, known: Mapping[str, Record], results: Results) -> Record:
    if cell.key() in known:
        return known[cell.key()] | {"cached": True}
    record = run_cell(cell, timeout)
    results.append(record)
    return record


def _outcome(cell: Cell, timeout: float) -> dict[str, Any]:
    process = subprocess.Popen(
        WORKER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(cell),
    )
    try:
        output, errors = process.communicate(cell.to_json() + "\n", timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"reason": f"not done after {timeout:g} s; --timeout allows more"}
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return _read(process.returncode, output, errors)


def _read(code: int, output: str, errors: str) -> dict[str, Any]:
    detail = errors[-4000:]
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as happens when memory runs out; a smaller batch_size needs less"
        return {"reason": f"killed by {name}{hint if name == 'SIGKILL' else ''}", "detail": detail}
    try:
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        return {"reason": f"ended with exit code {code}: {last}", "detail": detail}
    return result | {"detail": detail} if "reason" in result else result


def _environment(cell: Cell) -> dict[str, str]:
    """The process must find this package, installed or not, and add in a fixed order on CUDA."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    changed = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "KINETO_LOG_LEVEL": "99",
    }
    if cell.threads:
        changed["OMP_NUM_THREADS"] = str(cell.threads)
    return {**os.environ, **changed}
