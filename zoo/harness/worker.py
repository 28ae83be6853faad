"""Runs one cell and measures it.

Done in a process of its own, one cell's allocator, caches and crash stay away from the next. What
goes wrong in Python is a result; what ends the process is noticed by `processes`, which started it.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from zoo.harness.cells import Cell
from zoo.harness.collect import details
from zoo.harness.data import Batch, batches
from zoo.harness.digests import step_digests
from zoo.harness.environment import environment
from zoo.harness.limits import limited
from zoo.harness.training import Training
from zoo.measure.memory import measure_step
from zoo.measure.timeline import Timeline
from zoo.report.rows import spread
from zoo.tracking import track

Result = dict[str, Any]
Also = Callable[[Training, Cell, Batch, Timeline], Result]


def work(cell: Cell, also: Also = details) -> Result:
    """Runs a cell in this process and returns its numbers, and what `also` reads afterwards."""
    _prepare(cell)
    with limited(cell.memory_limit, cell.device):
        result = _time(cell) if cell.kind == "timing" else _measure(cell, also)
    return result | locate(cell)


def locate(cell: Cell) -> Result:
    """Says under "environment" where a cell is measured, also one of which nothing else came."""
    torch.set_num_threads(cell.threads)
    return {"environment": environment(cell.device)}


def _prepare(cell: Cell) -> None:
    torch.set_num_threads(cell.threads)
    if cell.device == "cuda" and cell.kind != "timing":
        # two processes give the same bits only with algorithms that add in a fixed order
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _measure(cell: Cell, also: Also) -> Result:
    """Takes digests after each step and traces the last, when the optimizer has its state.

    One more step is tracked tensor by tensor. Its bytes are the same wherever it runs; what the
    allocator hands out holds kernel workspaces, too, which each processor and number of threads has
    its own of.
    """
    training = _training(cell, cell.model.checkpoint)
    *first, last = _batches(cell, cell.steps)
    digests = [step_digests(training.model, training.step(batch)) for batch in first]
    losses: list[Tensor] = []
    memory = measure_step(
        lambda: losses.append(training.step(last)),
        training.model,
        training.optimizer,
        [last.inputs, last.targets],
    )
    timeline = _tracked(training, last)
    of_tensors = {
        "tensor_peak": timeline.tensor_peak,
        "tensor_activation_peak": timeline.tensor_activation_peak,
    }
    result = {
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "plan": None if training.model.plan is None else training.model.plan.text(),
        "digests": [*digests, step_digests(training.model, losses[0])],
        "memory": asdict(memory) | of_tensors,
    }
    # what a report draws is read when all is measured
    return result | also(training, cell, last, timeline)


def _tracked(training: Training, batch: Batch) -> Timeline:
    """Runs a step and returns its timeline; kernel workspaces are in it on the CPU."""
    with track(
        training.model,
        optimizer=training.optimizer,
        inputs=[batch.inputs, batch.targets],
        allocator=training.device == "cpu",
    ) as timeline:
        training.step(batch)
    return timeline


def _time(cell: Cell) -> Result:
    """Times steps of one model in training, which now keeps everything and now follows its plan."""
    training = _training(cell, cell.plan or cell.model.checkpoint)
    runners = {"baseline": None, "checkpointed": training.model.runner}
    warm_up, *data = _batches(cell, 1 + cell.repeats)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        training.model.runner = runner
        training.step(warm_up)
    gc.collect()
    gc.disable()
    try:
        for batch, order in zip(data, turns(tuple(runners)), strict=False):
            for name in order:
                training.model.runner = runners[name]
                seconds[name].append(_seconds(training, batch))
    finally:
        gc.enable()
    return {"step_seconds": seconds, "spread": _spreads(seconds)}


def turns(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yields the order in which variants run on each batch: A B, B A, A B, ... without end.

    What disturbs the machine for a while disturbs all of them, and none is always the one that
    finds the caches warmed by another.
    """
    while True:
        yield names
        names = names[::-1]


def _spreads(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns median and quartiles of each variant's seconds, and of the ratio of each pair."""
    pairs = zip(seconds["checkpointed"], seconds["baseline"], strict=True)
    ratios = [checkpointed / baseline for checkpointed, baseline in pairs]
    return {name: asdict(spread(values)) for name, values in (*seconds.items(), ("ratio", ratios))}


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
