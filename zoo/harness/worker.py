"""Runs one cell: `python -m zoo.harness.worker` reads it as JSON and writes its result as JSON.

A process of its own keeps one cell's allocator, caches and crash away from the next. What goes
wrong in Python is the result; what kills the process is noticed by `run`, which started it.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from zoo.harness.cells import Cell
from zoo.harness.data import Batch, batches
from zoo.harness.digests import step_digests
from zoo.harness.environment import environment
from zoo.harness.training import Training
from zoo.measure.memory import measure_step

Result = dict[str, Any]
WARM_UP = 2


def work(cell: Cell) -> Result:
    """Runs a cell in this process and returns its numbers."""
    _prepare(cell)
    result = _time(cell) if cell.kind == "timing" else _measure(cell)
    return result | {"environment": environment(cell.device)}


def _prepare(cell: Cell) -> None:
    if cell.threads:
        torch.set_num_threads(cell.threads)
    if cell.device == "cuda" and cell.kind != "timing":
        # two processes give the same bits only with algorithms that add in a fixed order
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _measure(cell: Cell) -> Result:
    training = _training(cell, cell.model.checkpoint)
    data = _batches(cell, cell.steps + 1)
    digests = [step_digests(training.model, training.step(batch)) for batch in data[:-1]]
    memory = measure_step(
        lambda: training.step(data[-1]),
        training.model,
        training.optimizer,
        [data[-1].inputs, data[-1].targets],
    )
    return {
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "plan": None if training.model.plan is None else str(training.model.plan),
        "digests": digests,
        "memory": asdict(memory),
    }


def _time(cell: Cell) -> Result:
    baseline = _training(cell, False)
    checkpointed = _training(cell, cell.model.checkpoint)
    data = _batches(cell, cell.repeats)
    for batch in (data * WARM_UP)[:WARM_UP]:
        baseline.step(batch)
        checkpointed.step(batch)
    seconds: dict[str, list[float]] = {"baseline": [], "checkpointed": []}
    order = [("baseline", baseline), ("checkpointed", checkpointed)]
    gc.collect()
    gc.disable()
    try:
        for batch in data:
            for name, training in order:
                seconds[name].append(_seconds(training, batch))
            # A B  B A  A B ...: whoever comes second finds warmer caches
            order.reverse()
    finally:
        gc.enable()
    return {"step_seconds": seconds}


def _seconds(training: Training, batch: Batch) -> float:
    wait: Callable[[], object] = torch.cuda.synchronize if training.device == "cuda" else int
    wait()
    start = time.perf_counter()
    training.step(batch)
    wait()
    return time.perf_counter() - start


def _training(cell: Cell, checkpoint: bool | int | str) -> Training:
    return Training(cell.model, checkpoint, cell.device, cell.dtype, cell.seed)


def _batches(cell: Cell, count: int) -> list[Batch]:
    return [batch.to(cell.device) for batch in batches(cell.model, count, cell.seed)]


def main() -> int:
    """Reads a cell from standard input and writes its result to standard output."""
    try:
        result = work(Cell.from_json(sys.stdin.readline()))
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        result = {"reason": reason}
    print(json.dumps(result), flush=True)
    return "reason" in result


if __name__ == "__main__":
    sys.exit(main())
