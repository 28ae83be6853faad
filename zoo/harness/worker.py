"""What runs in a process of its own: the measurement of a cell, and a check of cells before.

One cell's allocator, caches and crash stay away from the next. An exception in Python is a result;
`processes`, which started the process, notices whatever ends it.
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
from zoo.engine.devices import synchronize
from zoo.errors import ZooError
from zoo.harness.cells import Cell, Kind
from zoo.harness.collect import details
from zoo.harness.data import Batch, batches
from zoo.harness.environment import environment
from zoo.harness.processes import limited
from zoo.harness.training import Training, step_digests
from zoo.invocation import Invocation, capture_first_state
from zoo.planner.plan import Plan
from zoo.planner.schemes import segments
from zoo.profiling.allocator_events import measure_step
from zoo.profiling.timeline import Timeline
from zoo.report.rows import spread

Result = dict[str, Any]
Also = Callable[[Training, Cell, Batch, Timeline], Result]
# the spreads of seconds over the baseline's, by variant
RATIOS = {"checkpointed": "ratio", "optimizer_in_backward": "optimizer_in_backward_ratio"}


def work(cell: Cell, also: Also = details) -> Result:
    """Measures a cell in this process; returns its numbers and what `also` reads afterwards."""
    torch.set_num_threads(cell.threads)
    if cell.device != "cpu" and cell.kind != "timing":
        # two processes give the same bits only with algorithms that add in a fixed order
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    choose_device(cell.device)
    with limited(cell.memory_limit, cell.device):
        result = _time(cell) if cell.kind == "timing" else _measure(cell, also)
    return result | locate(cell)


def locate(cell: Cell) -> Result:
    """Returns under "environment" where a cell is measured, also one that returns nothing else."""
    torch.set_num_threads(cell.threads)
    choose_device(cell.device)
    return {"environment": environment(cell.device)}


def choose_device(kind: str) -> None:
    """Makes one of several devices the current one, each of a launcher's processes its own."""
    if kind != "cpu":
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())


def _measure(cell: Cell, also: Also) -> Result:
    """Takes digests after each step and traces the last, when the optimizer has its state.

    One more step is tracked tensor by tensor. Its bytes are the same wherever it runs; those of the
    allocator include kernel workspaces, which go by the processor and the number of threads.
    """
    training = Training(cell)
    training.switch(cell.kind)
    model, optimizer = training.model, training.optimizer
    *first, last = _batches(cell, cell.steps)
    digests = [step_digests(model, training.step(batch)) for batch in first]
    losses: list[Tensor] = []
    inputs = [last.inputs, last.targets]
    memory = measure_step(lambda: losses.append(training.step(last)), model, optimizer, inputs)
    # kernel workspaces are in the timeline on the CPU
    on_cpu = cell.device == "cpu"
    with track(model, optimizer=optimizer, inputs=inputs, allocator=on_cpu) as timeline:
        training.step(last)
    tensors = {name: getattr(timeline, name) for name in ("tensor_peak", "tensor_activation_peak")}
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plan": None if model.plan is None else model.plan.text(),
        "digests": [*digests, step_digests(model, losses[0])],
        "memory": asdict(memory) | tensors,
    }
    if cell.kind == "optimizer_in_backward":
        # the allocator's events do not say which of its blocks were gradients
        del result["memory"]["activation_peak"]
    # what a report draws is read when all is measured
    return result | also(training, cell, last, timeline)


def _time(cell: Cell) -> Result:
    """Times steps of one model in training, in turn as each variant."""
    training = Training(cell)
    variants: list[Kind] = ["baseline", "checkpointed"]
    if cell.optimizer_in_backward:
        variants.append("optimizer_in_backward")
    warm_up, *data = _batches(cell, 1 + cell.repeats)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for variant in variants:
        training.switch(variant)
        training.step(warm_up)
    gc.collect()
    gc.disable()
    try:
        for number, batch in enumerate(data):
            # A B C, C B A, A B C, ...: what disturbs the machine for a while disturbs all, and none
            # is always the one that finds the caches warmed by another
            for variant in variants[:: -1 if number % 2 else 1]:
                training.switch(variant)
                seconds[variant].append(_seconds(training, batch))
    finally:
        gc.enable()
    return {"step_seconds": seconds, "spread": _spreads(seconds)}


def _spreads(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns median and quartiles of each variant's seconds, and of their ratios to baseline's."""
    found = dict(seconds)
    for variant, name in RATIOS.items():
        if variant in seconds:
            pairs = zip(seconds[variant], seconds["baseline"], strict=True)
            found[name] = [second / baseline for second, baseline in pairs]
    return {name: asdict(spread(values)) for name, values in found.items()}


def _seconds(training: Training, batch: Batch) -> float:
    device = batch.inputs.device
    synchronize(device)
    start = time.perf_counter()
    training.step(batch)
    synchronize(device)
    return time.perf_counter() - start


def _batches(cell: Cell, count: int) -> list[Batch]:
    return [batch.to(cell.device) for batch in batches(cell.model, count, cell.seed)]


def first_fault(cells: Sequence[Cell]) -> dict[str, str | None]:
    """Returns under "fault" what is wrong with the first cell that cannot run.

    Of a config's ten models the last would otherwise fail after an hour because its text is too
    long. Models and batches are meta tensors, which take no memory.
    """
    for cell in cells:
        try:
            _build(cell)
        except Exception as error:
            own = isinstance(error, ZooError)
            text = " ".join((str(error) if own else f"{type(error).__name__}: {error}").split())
            name = cell.model.name
            return {"fault": text if text.startswith(name) else f"{name}: {text}"}
    return {"fault": None}


def _build(cell: Cell) -> None:
    """Builds a model, has it check inputs of the shape of a batch, and checks its plan."""
    with torch.device("meta"):
        chain = create(cell.model.name, **cell.model.arguments)
    # a chain refuses inputs before its first step: its forward, seconds for a thousand layers even
    # on meta tensors, would find no more
    inputs = Invocation(_meta_batch(cell).arguments(cell.model.data))
    outline, _ = capture_first_state(chain, inputs)
    if isinstance(cell.checkpoint, Plan):
        cell.checkpoint.check(len(outline.steps))
    elif type(cell.checkpoint) is int:
        segments(outline.blocks, cell.checkpoint)


def _meta_batch(cell: Cell) -> Batch:
    """Returns a batch as shapes; of images and volumes only one sample is made."""
    model = cell.model
    if model.data in ("text", "stream"):
        return batches(model, 1, seed=0)[0].to("meta")
    sample = batches(replace(model, batch_size=1), 1, seed=0)[0].to("meta")
    tensors = (sample.inputs, sample.targets)
    return Batch(*(tensor.repeat_interleave(model.batch_size, 0) for tensor in tensors))
