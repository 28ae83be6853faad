"""The comparison: runs the cells of a config, each in a fresh process, and stores every result.

A cell that fails, runs out of memory or is killed has that as its result and affects no other one.
No cell is measured twice: after an interruption the same command resumes. Only failures are tried
again; that a cell does not fit in memory is a result.

    [5/28] resnet1001 baseline: step peak 622 MiB (9 s)
    resnet1001 checkpointed ━━━━━╺━━━━━━━━━━━━━━━━━━  5/28 0:00:48 left: resnet1001, vnet, lstm +2

Each finished cell has a line; a terminal shows a progress bar below.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from zoo.cuda_graphs.graphed_step import has_graphs
from zoo.engine.devices import is_available
from zoo.errors import ConfigError
from zoo.harness.comparison_cells import Cell, again, expand
from zoo.harness.config import Config
from zoo.harness.processes import check_limit, outcome
from zoo.harness.results import Comparison, Record, Results
from zoo.harness.worker import first_fault, locate, work
from zoo.profiling.progress import is_wanted
from zoo.report.rows import is_unlike_baseline, quartiles
from zoo.units import format_bytes, format_seconds

CHECK_TIMEOUT = 600  # seconds
NO_GRAPHS = "cuda_graph is not in force: device {} has no CUDA graphs; all steps are eager ones"


def results_of(config: Config) -> Results:
    """Returns the results that belong to a config: `results/<config>.jsonl`."""
    return Results(Path(config.output) / f"{config.name}.jsonl")


def run(config: Config, console: Console) -> list[Comparison]:
    """Runs every cell of a config that has no result yet and returns the results by model.

    Raises:
        ConfigError: before anything is measured, if a device, a package or the folder for results
            is missing, or a model cannot be built or run as the config says.
        KeyboardInterrupt: by Ctrl-C; the finished cells are on disk.
    """
    if config.device != "cpu" and not is_available(config.device):
        raise ConfigError(
            f"device {config.device}: torch finds none on this machine; --device cpu runs anywhere"
        )
    check_limit(config.memory_limit, config.device)
    if config.cuda_graph and not has_graphs(torch.device(config.device)):
        config = replace(config, cuda_graph=False)
        console.print(NO_GRAPHS.format(config.device), highlight=False, soft_wrap=True)
    results = results_of(config)
    results.prepare(fresh=config.fresh)
    records = results.read().items()
    done = {key: record for key, record in records if record["status"] != "failed"}
    cells = expand(config)
    every = [cell for entry in cells for cell in entry.values()]
    models = [cell.model.name for cell in every]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
        console=console,
        disable=not (console.is_terminal and is_wanted()),
    )
    task = bar.add_task("", total=len(models), left="")

    def record_of(cell: Cell) -> Record:
        number, total = int(bar.tasks[0].completed) + 1, len(models)
        bar.update(task, description=str(cell), left=names_left(models[number:]), total=total)
        if cell.key() in done:
            record = done[cell.key()] | {"cached": True}
        else:
            measured = number + sum(any(map(one.is_key, done)) for one in every[number:])
            of_run = {"run": {"cells": total, "measured": measured}}
            record = run_cell(cell, config.timeout) | of_run
            results.append(record)
        line = f"[{number:>{len(str(total))}}/{total}] {cell}: {_result_words(record)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        bar.advance(task)
        return record

    comparisons = []
    with bar:
        # the timing follows, with the plans that were measured
        new = [
            e for e in cells if not {e["baseline"].key(), e["checkpointed"].key()} <= done.keys()
        ]
        check_cells([entry["checkpointed"] for entry in new])
        for model, entry in zip(config.models, cells, strict=True):
            comparison: Comparison = {"model": asdict(model)}
            for kind, cell in entry.items():
                plans = {} if kind != "timing" else _measured_plans(comparison)
                comparison[kind] = record_of(replace(cell, **plans))
            if is_unlike_baseline(comparison):
                repeated = again(entry["baseline"])
                models.insert(int(bar.tasks[0].completed), model.name)
                every.insert(int(bar.tasks[0].completed), repeated)
                comparison["baseline_again"] = record_of(repeated)
            comparisons.append(comparison)
    return comparisons


def _measured_plans(comparison: Comparison) -> dict[str, Any]:
    names = {"plan": "checkpointed", "plan_in_backward": "optimizer_in_backward"}
    return {name: comparison.get(kind, {}).get("plan") for name, kind in names.items()}


def check_cells(cells: Sequence[Cell]) -> None:
    """Raises ConfigError for a cell that cannot run; a process of its own checks that."""
    # failures of that process itself are left to the cells
    if cells and (fault := outcome(first_fault, tuple(cells), CHECK_TIMEOUT).get("fault")):
        raise ConfigError(fault)


def run_cell(cell: Cell, timeout: float) -> Record:
    """Runs a cell in a fresh process and returns its record, however the process ends."""
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


def names_left(models: Sequence[str], most: int = 3) -> str:
    """Names the first few models whose cells are left: 'left: vnet, gpt2_small, lstm +2'."""
    names = list(dict.fromkeys(models))
    more = f" +{len(names) - most}" if len(names) > most else ""
    return f"left: {', '.join(names[:most])}{more}" if names else ""


def _result_words(record: Record) -> str:
    if record["status"] == "failed":
        return f"failed, {record['reason']}"
    took = f" ({record['seconds']:.0f} s{', measured before' if record.get('cached') else ''})"
    if "reason" in record:
        return f"{record['status']}, {record['reason']}{took}"
    if record["kind"] != "timing":
        replays = record.get("replay_seconds")
        time = f", a replay takes {format_seconds(median(replays))}" if replays else ""
        return f"step peak {format_bytes(record['memory']['peak'])}{time}{took}"
    baseline = record["step_seconds"]["baseline"]
    times = f"a step takes {format_seconds(median(baseline))}"
    for variant, seconds in record["step_seconds"].items():
        if variant != "baseline":
            ratios = [own / whole for own, whole in zip(seconds, baseline, strict=True)]
            ends = quartiles(ratios)
            between = " [{:.2f}, {:.2f}]".format(*ends) if ends else ""
            # the ratios of rounds, since a slow round slows all variants alike
            times += f", {variant.replace('_', ' ')} ×{median(ratios):.2f}{between}"
    return f"{times}{took}"
