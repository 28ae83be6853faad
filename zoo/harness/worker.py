"""What runs in a process of its own: the measurement of a cell, and a check of cells before.

One cell's allocator, caches and crash stay away from the next. What goes wrong in Python is a
result; what ends the process is noticed by `processes`, which started it.
"""

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from zoo.api.track import track
from zoo.catalog import create
from zoo.errors import ZooError
from zoo.harness.cells import Cell
from zoo.harness.collect import details
from zoo.harness.data import Batch, batches
from zoo.harness.environment import environment
from zoo.harness.processes import limited
from zoo.harness.training import Training, step_digests
from zoo.invocation import Invocation, capture_first_state
from zoo.planner.plan import Plan
from zoo.planner.schemes import segments
from zoo.profiling.allocator import measure_step
from zoo.profiling.timeline import Timeline
from zoo.report.rows import spread

Result = dict[str, Any]
Also = Callable[[Training, Cell, Batch, Timeline], Result]


def work(cell: Cell, also: Also = details) -> Result:
    """Runs a cell in this process and returns its numbers, and what `also` reads afterwards."""
    torch.set_num_threads(cell.threads)
    if cell.device == "cuda" and cell.kind != "timing":
        # two processes give the same bits only with algorithms that add in a fixed order
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with limited(cell.memory_limit, cell.device):
        result = _time(cell) if cell.kind == "timing" else _measure(cell, also)
    return result | locate(cell)


def locate(cell: Cell) -> Result:
    """Says under "environment" where a cell is measured, also one of which nothing else came."""
    torch.set_num_threads(cell.threads)
    return {"environment": environment(cell.device)}


def _measure(cell: Cell, also: Also) -> Result:
    """Takes digests after each step and traces the last, when the optimizer has its state.

    One more step is tracked tensor by tensor. Its bytes are the same wherever it runs; what the
    allocator hands out holds kernel workspaces, too, which each processor and number of threads has
    its own of.
    """
    training = Training(cell)
    *first, last = _batches(cell, cell.steps)
    digests = [step_digests(training.model, training.step(batch)) for batch in first]
    losses: list[Tensor] = []
    inputs = [last.inputs, last.targets]
    memory = measure_step(
        lambda: losses.append(training.step(last)), training.model, training.optimizer, inputs
    )
    # kernel workspaces are in the timeline on the CPU
    with track(
        training.model,
        optimizer=training.optimizer,
        inputs=inputs,
        allocator=cell.device == "cpu",
    ) as timeline:
        training.step(last)
    result = {
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "plan": None if training.model.plan is None else training.model.plan.text(),
        "digests": [*digests, step_digests(training.model, losses[0])],
        "memory": {
            **asdict(memory),
            "tensor_peak": timeline.tensor_peak,
            "tensor_activation_peak": timeline.tensor_activation_peak,
        },
    }
    # what a report draws is read when all is measured
    return result | also(training, cell, last, timeline)


def _time(cell: Cell) -> Result:
    """Times steps of one model in training, in turn as the baseline and by its plan."""
    training = Training(cell)
    runners = {"baseline": None, "checkpointed": training.model.runner}
    warm_up, *data = _batches(cell, 1 + cell.repeats)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        training.model.runner = runner
        training.step(warm_up)
    gc.collect()
    gc.disable()
    try:
        for number, batch in enumerate(data):
            # A B, B A, A B, ...: what disturbs the machine for a while disturbs both, and neither
            # is always the one that finds the caches warmed by the other
            for name in list(runners)[:: -1 if number % 2 else 1]:
                training.model.runner = runners[name]
                seconds[name].append(_seconds(training, batch))
    finally:
        gc.enable()
    return {"step_seconds": seconds, "spread": _spreads(seconds)}


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


def _batches(cell: Cell, count: int) -> list[Batch]:
    return [batch.to(cell.device) for batch in batches(cell.model, count, cell.seed)]


def first_fault(cells: Sequence[Cell]) -> dict[str, str | None]:
    """Returns under "fault" what is wrong with the first cell that cannot run.

    Of a config's ten models the last would otherwise say after an hour that its text is too long.
    Models and batches are meta tensors, which take no memory.
    """
    for cell in cells:
        try:
            _build(cell)
        except Exception as error:
            kind = "" if isinstance(error, ZooError) else f"{type(error).__name__}: "
            text = " ".join(f"{kind}{error}".split())
            name = cell.model.name
            return {"fault": text if text.startswith(name) else f"{name}: {text}"}
    return {"fault": None}


def _build(cell: Cell) -> None:
    """Builds a model, has it check inputs of the shape of a batch, and checks its plan."""
    with torch.device("meta"):
        chain = create(cell.model.name, **cell.model.arguments)
    # a chain refuses inputs before its first step: its forward, seconds for a thousand layers even
    # on meta tensors, would find no more
    found, _ = capture_first_state(chain, Invocation(_meta_batch(cell).arguments(cell.model.data)))
    if isinstance(cell.checkpoint, Plan):
        cell.checkpoint.check(len(found.steps))
    elif type(cell.checkpoint) is int:
        segments(found.blocks, cell.checkpoint)


def _meta_batch(cell: Cell) -> Batch:
    """Returns a batch as shapes; of images and volumes only one sample is made."""
    model = cell.model
    is_text = model.data in ("text", "stream")
    (batch,) = batches(model if is_text else replace(model, batch_size=1), 1, seed=0)

    def grown(tensor: Tensor) -> Tensor:
        shape = tensor.shape if is_text else (model.batch_size, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return Batch(grown(batch.inputs), grown(batch.targets))
