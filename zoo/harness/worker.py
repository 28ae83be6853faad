"""The code that runs in a process of its own: the measurement of a cell, and a check before it.

So one cell's allocator, caches and crash do not affect the next. A Python exception is a result;
`processes`, which starts the process, handles every other end.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.api.checkpoint import outline_of, plan_of
from zoo.api.plan import planner_for
from zoo.api.track import track
from zoo.catalog.factories import create_on_meta
from zoo.cuda_graphs.graphed_step import check_replays
from zoo.engine.devices import release_cached, synchronize
from zoo.engine.recorder import KernelMode
from zoo.errors import GraphError, ZooError, in_a_line
from zoo.harness.comparison_cells import EAGER_STEPS, GRAPHS, Cell, Kind
from zoo.harness.data import Batch, batches
from zoo.harness.environment import environment
from zoo.harness.optimizers import OPTIMIZERS
from zoo.harness.processes import limited
from zoo.harness.training import Training, step_digests
from zoo.invocation import Invocation
from zoo.planner.plan import Plan, thinned
from zoo.planner.schemes import segments
from zoo.profiling.peak_memory import StepMemory, measure_step
from zoo.profiling.timeline import Timeline
from zoo.report.rows import REFUSED
from zoo.verification.determinism import deterministic_algorithms

Result = dict[str, Any]
Also = Callable[[Training, Cell, Batch, Timeline], Result]
# plans of a frontier that a report draws
PLANS = 64


def details(training: Training, cell: Cell, batch: Batch, timeline: Timeline) -> Result:
    """Returns a report's data of a trained model; `timeline` is that of one of its steps.

    For a baseline this includes the steps and, if wanted, its frontier; one that is trained again
    is compared and not drawn. A part that fails does not fail the cell; the reason is under
    "missing".
    """
    if cell.kind == "baseline_again":
        return {}
    readers: dict[str, Callable[[], Result]] = {
        "timeline": lambda: {"timeline": timeline.summary()},
        "steps": lambda: _steps(training, cell, batch) if cell.kind == "baseline" else {},
    }
    drawn: Result = {"missing": {}}
    for name, read in readers.items():
        try:
            drawn |= read()
        except Exception as error:
            drawn["missing"][name] = in_a_line(error)
    return drawn


def work(cell: Cell, also: Also = details) -> Result:
    """Measures a cell in this process; returns its numbers and the result of `also`."""
    with deterministic_algorithms(cell.deterministic):
        _set_device(cell)
        with limited(cell.memory_limit, cell.device):
            if cell.kind in GRAPHS:
                result = _measure_graph(cell)
            else:
                result = _time(cell) if cell.kind == "timing" else _measure(cell, also)
    return result | {"environment": environment(cell.device)}


def locate(cell: Cell) -> Result:
    """Returns the environment of a cell, under "environment"."""
    _set_device(cell)
    return {"environment": environment(cell.device)}


def _set_device(cell: Cell) -> None:
    """Sets threads and device; each process of a launcher gets its own device."""
    torch.set_num_threads(cell.threads)
    if cell.device != "cpu":
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())


def _measure(cell: Cell, also: Also) -> Result:
    """Computes digests after each step and traces the last, when the optimizer has its state.

    One more step is tracked tensor by tensor. Its bytes are the same on every machine; those of the
    allocator include kernel workspaces, which depend on the processor and the number of threads.
    """
    training = Training(cell)
    training.switch(cell.kind)
    model = training.model
    *first, last = batches(cell.model, cell.steps, cell.seed, cell.device)
    digests = [step_digests(model, training.step(batch)) for batch in first]
    loss, memory = _traced_step(training, last)
    digests.append(step_digests(model, loss))
    # kernel workspaces are in the timeline on the CPU
    on_cpu = cell.device == "cpu"
    inputs = [last.inputs, last.targets]
    # as `measure_step` does: gradients of an earlier step would be at the start of some curves only
    training.optimizer.zero_grad(set_to_none=True)
    with track(model, optimizer=training.optimizer, inputs=inputs, allocator=on_cpu) as timeline:
        training.step(last)
    tensors = {name: getattr(timeline, name) for name in ("tensor_peak", "tensor_activation_peak")}
    result = _described(model, digests) | {"memory": _known(asdict(memory) | tensors)}
    if training.library is not None:
        result["switch"] = training.library.words
    if cell.kind == "optimizer_in_backward":
        # the allocator's events do not show which blocks were gradients
        del result["memory"]["activation_peak"]
    return result | also(training, cell, last, timeline)


def _traced_step(training: Training, batch: Batch) -> tuple[Tensor, StepMemory]:
    """Trains on a batch and returns the loss and the memory of the step."""
    losses: list[Tensor] = []
    inputs = [batch.inputs, batch.targets]
    memory = measure_step(
        lambda: losses.append(training.step(batch)), training.model, training.optimizer, inputs
    )
    return losses[0], memory


def _described(model: nn.Module, digests: Sequence[Mapping[str, str]]) -> Result:
    plan = plan_of(model)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plan": None if plan is None else plan.text(),
        "digests": digests,
    }


def _known(memory: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what is reserved on the CPU, where nothing is."""
    return {name: size for name, size in memory.items() if (name, size) != ("reserved_peak", None)}


def _measure_graph(cell: Cell) -> Result:
    """Computes digests after each step, the last ones replays of a graph; then times replays.

    The memory is that of the step that is captured: it allocates what the graph keeps, and replays
    allocate nothing. A step that cannot be a graph has the reason for that as its result.
    """
    training = Training(cell)
    training.switch(GRAPHS[cell.kind])
    data = batches(cell.model, cell.steps + cell.repeats, cell.seed, cell.device)
    digests, peaks, seconds = [], {}, []
    try:
        graphed = training.as_graph()
        for batch in data[: cell.steps]:
            replays = graphed.replays
            # as torch does before a capture
            release_cached(batch.inputs.device)
            loss, memory = _traced_step(training, batch)
            if not replays:
                peaks = _known({"peak": memory.peak, "reserved_peak": memory.reserved_peak})
            digests.append(step_digests(training.model, loss))
        with _garbage_kept():
            for batch in data[cell.steps :]:
                # a traced step begins without gradients, and another beginning is another graph
                training.optimizer.zero_grad()
                seconds.append(_seconds(training, batch))
        check_replays(graphed, len(data) - EAGER_STEPS)
    except GraphError as error:
        return {"status": REFUSED, "reason": str(error)}
    return _described(training.model, digests) | {"memory": peaks, "replay_seconds": seconds}


def _steps(training: Training, cell: Cell, batch: Batch) -> Result:
    """Returns the steps of a baseline, and its frontier if that is wanted."""
    training.optimizer.zero_grad(set_to_none=True)
    with training.autocast:
        planner = planner_for(
            training.model,
            training.arguments(batch),
            optimizer=OPTIMIZERS[cell.model.optimizer],
            loss=training.outer_loss(batch),
            # without a frontier no times are needed: any device's rates will do, and nothing runs
            device=None if cell.frontier else "small-cpu",
        )
        step, steps = planner.step, slice(planner.step.steps)
        lines: dict[str, list[int]] = {}
        for number, line in enumerate(step.outline.lines):
            lines.setdefault(line, []).append(number)
        result: Result = {
            "steps": {
                "names": step.outline.names,
                "blocks": step.costs.blocks[steps],
                "saved": step.costs.newly_saved()[steps],
                "lines": lines,
            }
        }
        if cell.frontier:
            curve = planner.frontier().summary()
            result["frontier"] = curve | {"optimal": thinned(curve["optimal"], PLANS)}
    return result


def _time(cell: Cell) -> Result:
    """Times training steps of one model, with the variants in turn."""
    training = Training(cell)
    further: list[Kind] = ["optimizer_in_backward", "library_checkpointing"]
    variants: list[Kind] = ["baseline", "checkpointed"]
    variants += [kind for kind in further if getattr(cell, kind)]
    warm_up, *data = batches(cell.model, 1 + cell.repeats, cell.seed, cell.device)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for variant in variants:
        training.switch(variant)
        training.step(warm_up)
    with _garbage_kept():
        for number, batch in enumerate(data):
            # A B C, C B A, A B C, ...: a disturbance of the machine affects all variants, and none
            # always finds the caches warmed by another
            for variant in variants[:: -1 if number % 2 else 1]:
                training.switch(variant)
                seconds[variant].append(_seconds(training, batch))
    return {"step_seconds": seconds}


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collects garbage, and none within the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _seconds(training: Training, batch: Batch) -> float:
    device = batch.inputs.device
    synchronize(device)
    start = time.perf_counter()
    training.step(batch)
    synchronize(device)
    return time.perf_counter() - start


def first_fault(cells: Sequence[Cell]) -> Result:
    """Returns under "fault" the reason that a cell cannot run, if any: its data, size, plan, ...

    Otherwise the last of ten models might fail after an hour because its text is too long. Models
    and batches are meta tensors, which take no memory.
    """
    for cell in cells:
        try:
            _build(cell)
        except Exception as error:
            text = " ".join(str(error).split()) if isinstance(error, ZooError) else in_a_line(error)
            name = cell.model.name
            return {"fault": text if text.startswith(name) else f"{name}: {text}"}
    return {}


def _build(cell: Cell) -> None:
    """Builds a model, lets it check inputs of a batch's shape, and checks its plan."""
    model = create_on_meta(cell.model.name, **cell.model.arguments)
    # only one sample is made of images and volumes
    is_text = cell.model.data in ("text", "stream")
    config = cell.model if is_text else replace(cell.model, batch_size=1)
    (batch,) = batches(config, 1, seed=0, device="meta")
    if not is_text:
        tensors = (batch.inputs, batch.targets)
        batch = Batch(*(tensor.repeat_interleave(cell.model.batch_size, 0) for tensor in tensors))
    invocation = Invocation.of(batch.arguments(cell.model))
    if isinstance(cell.checkpoint, Plan):
        cell.checkpoint.check(len(outline_of(model, invocation)))
    elif type(cell.checkpoint) is int:
        segments(outline_of(model, invocation).blocks, cell.checkpoint)
    else:
        # a model checks inputs before its first kernel; the whole forward, which takes seconds for
        # a thousand layers even on meta tensors, would find nothing more
        with contextlib.suppress(_FirstKernel), _StopsAtKernel():  # type: ignore[no-untyped-call]
            invocation.on(model)


class _FirstKernel(BaseException):
    """Ends a forward at its first kernel."""


class _StopsAtKernel(KernelMode):
    def __torch_dispatch__(self, *_: Any) -> Any:
        raise _FirstKernel
