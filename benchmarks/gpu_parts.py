"""What each part of `benchmarks/gpu.py` measures, in processes that it starts; rows as they come.

families   a baseline twice and each way once, from the same weights and seeds: which tensors
           differ after three steps, and the peaks of the third
budgets    a plan for a share of the baseline's peak: bytes asked, predicted and taken
speed      seven steps, synchronized: milliseconds, and the peaks in them
graphs     the same as CUDA graphs, beside the same steps without: what of the state differs, too
batches    the largest batch within a budget (`largest_batch.py`)
offload    copies to the host: their bytes per second, alone and beside matrix products; then steps
           with and without offloading, by True and by plans for the same bytes on the device
"""

import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import gpu_cases
import largest_batch
import peers
import torch
import transformers
from gpu_cases import Case
from gpu_rows import Job
from torch import Tensor
from torch.utils._pytree import tree_map_only

import zoo
from zoo.engine.devices import synchronize
from zoo.errors import in_a_line
from zoo.tracing.planned_forward import patched_forward
from zoo.units import parse_bytes
from zoo.verification.state_comparison import same_bits

STEPS, TIMED = 3, 7
# calls of a graphed step until it is one
WARM = 5
BASELINE, AGAIN, SWITCH, TRUE, PLAN = "baseline", "baseline again", "switch", "True", "plan"
IN_BACKWARD = "True, optimizer in the backward"
GRAPH = "True, CUDA graph"
TRUE_OFFLOAD, PLAN_OFFLOAD = "True, offload", "plan, offload"
COPIES, ALONE, BESIDE = "copies", "alone", "beside products"
WAYS: dict[str, Callable[[peers.Training, Any], Any]] = {
    BASELINE: peers.METHODS["plain"].apply,
    AGAIN: peers.METHODS["plain"].apply,
    SWITCH: peers.METHODS[peers.OWN].apply,
    TRUE: peers.METHODS["zoo, True"].apply,
    GRAPH: peers.METHODS["zoo, True"].apply,
    TRUE_OFFLOAD: lambda training, _: zoo.checkpoint(training.model, offload=True),
    IN_BACKWARD: largest_batch.by_true_and_optimizer,
}
# what a user gets who does not set PYTORCH_ALLOC_CONF, for these of SPEED
DEFAULT_SEGMENTS, SEGMENTS = "expandable_segments:False", "expandable_segments:True"
FRAGMENTED = ("DenseNet-121", gpu_cases.TIMM_RESNET)
BATCH_BUDGET, SMALL_BUDGET = "8GiB", "4MiB"
Write = Callable[..., None]


def jobs(part: str, device: str, conf: str, *, small: bool) -> Iterator[Job]:
    """Yields the jobs of a part, the most telling first."""
    make = partial(Job, part, device=device, small=small, conf=conf)
    if part == "families":
        for name, case in gpu_cases.FAMILIES.items():
            ways = (BASELINE, AGAIN, TRUE, IN_BACKWARD)
            yield make(name, with_switch(ways, case), only_on=case.only_on)
    elif part == "budgets":
        for name, (case, shares) in gpu_cases.BUDGETS.items():
            yield make(name, tuple(f"{share:g}" for share in shares), only_on=case.only_on)
    elif part in ("speed", "graphs"):
        for name, case in gpu_cases.SPEED.items():
            ways = (BASELINE, TRUE, GRAPH, PLAN) if part == "speed" else (BASELINE, TRUE, PLAN)
            yield make(name, with_switch(ways, case), only_on=case.only_on)
        if part == "speed" and conf == SEGMENTS:
            for name in FRAGMENTED:
                yield replace(make(name, (BASELINE, TRUE)), conf=DEFAULT_SEGMENTS)
    elif part == "offload":
        yield make(COPIES, (ALONE, BESIDE))
        for name in gpu_cases.OFFLOAD:
            yield make(name, (BASELINE, TRUE, TRUE_OFFLOAD, PLAN, PLAN_OFFLOAD))
    else:
        # in software the search is slow
        for name in ("GPT-2",) if small else largest_batch.MODELS:
            needs = ("monai",) if name == "U-Net" else ()
            yield make(name, tuple(largest_batch.METHODS), needs=needs)


def with_switch(ways: tuple[str, ...], case: Case) -> tuple[str, ...]:
    return ways if case.switch is None else (*ways, SWITCH)


def measure(job: Job, write: Write) -> None:
    """Measures a job's variants and writes a row for each; runs in a process of its own."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if job.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # what has no such kernel shows in whether the baseline repeats itself
        torch.use_deterministic_algorithms(True, warn_only=True)
    if job.conf == DEFAULT_SEGMENTS:
        torch.cuda.memory._set_allocator_settings(job.conf)
    parts = {"families": families, "budgets": budgets, "speed": speed, "graphs": graphs}
    parts |= {"offload": copies if job.case == COPIES else speed}
    parts.get(job.part, batches)(job, write)


def families(job: Job, write: Write) -> None:
    """Compares what three steps leave with what those of the baseline did, bit for bit."""
    case = gpu_cases.FAMILIES[job.case]
    expected: dict[Any, Any] = {}
    for variant in job.variants:
        with row_of(job, variant, write, case) as row:
            training, took = begun(case, variant, job)
            row.update(took)
            losses = [float(training.step(step)) for step in range(1, STEPS)]
            reset_peaks(job.device)
            loss = training.step(STEPS)
            row.update(peaks(job.device))
            # an optimizer in the backward leaves no gradients
            left_out = "parameter gradient" if variant == IN_BACKWARD else ""
            state = {
                key: to_host(value)
                for key, value in training.state(loss).items()
                if key[0] != left_out
            }
            row.update(losses=[*losses, float(loss)])
            del training
            state["losses", ""] = row["losses"]
            if variant == BASELINE:
                expected = state
            else:
                differing = [key for key in state if not same(expected[key], state[key])]
                row.update(differing=len(differing), of=len(state))
                row.update({"repeats": not differing} if variant == AGAIN else {})
                row["first"] = " ".join(differing[0]) if differing else ""


def same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return same_bits(expected, actual)
    return type(expected) is type(actual) and repr(expected) == repr(actual)


def to_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def budgets(job: Job, write: Write) -> None:
    """Plans for shares of the baseline's peak and trains by the plans."""
    case, _ = gpu_cases.BUDGETS[job.case]
    for variant in job.variants:
        with row_of(job, variant, write, case) as row:
            training = built(case, job)
            started = time.perf_counter()
            report = planned(training, float(variant), job)
            row.update(
                share=float(variant),
                plan_s=round(time.perf_counter() - started, 2),
                asked=report.budget,
                predicted=report.predicted_peak,
                baseline=report.baseline_peak,
            )
            for step in range(1, STEPS):
                training.step(step)
            reset_peaks(job.device)
            for step in range(STEPS, 2 * STEPS):
                training.step(step)
            row.update(peaks(job.device))


def speed(job: Job, write: Write) -> None:
    """Times steps: until the last kernel was launched, and until all are done."""
    case = (gpu_cases.OFFLOAD if job.part == "offload" else gpu_cases.SPEED)[job.case]
    for variant in job.variants:
        with row_of(job, variant, write, case) as row:
            time_steps(case, variant, job, row)


def time_steps(case: Case, variant: str, job: Job, row: dict[str, Any]) -> None:
    """Trains by a way and adds times and peaks; a graph's memory is freed before the next way."""
    training, took = begun(case, variant, job)
    row.update(took)
    step: Callable[[int], Any] = training.step
    if variant == GRAPH:
        graphed = by_graph(training, job)
        step = partial(seeded, graphed, training)
    row["first_s"] = round(timed(partial(step, 0), job.device)[1], 2)
    for number in range(1, STEPS):
        step(number)
    reset_peaks(job.device)
    # the capture allocates what replays use
    for number in range(STEPS, WARM if variant == GRAPH else STEPS):
        step(number)
    steps = 1 if job.small else TIMED
    pairs = [timed(partial(step, number), job.device) for number in range(steps)]
    launched, done = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    row.update(ms=round(done, 2), cpu_ms=round(launched, 2), steps=steps)
    row.update(peaks(job.device))
    if variant == GRAPH:
        row["replays"] = graphed.replays
    if job.part == "offload":
        # equal for all ways, unless a kernel of the baseline does not repeat its numbers
        row["loss"] = float(training.step(0))
        host = patched_forward(training.model)
        row["host"] = 0 if host is None or host.host is None else host.host.peak


def copies(job: Job, write: Write) -> None:
    """Times copies of 64 MiB to the host and back, and matrix products alone and beside them."""
    size, times = (1 << 20, 2) if job.small else (1 << 26, 20)
    side = torch.Stream(device=job.device)
    x = torch.randn(size >> 10, 256, device=job.device)
    slab = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    whole = torch.zeros(size, dtype=torch.uint8, device=job.device)
    weight = torch.randn(256, 4096 if not job.small else 256, device=job.device)

    def copy() -> None:
        with side:
            slab.copy_(whole, non_blocking=True)
            whole.copy_(slab, non_blocking=True)

    def product() -> None:
        for _ in range(times):
            x @ weight

    both = [copy, product]
    for variant in job.variants:
        row: dict[str, Any] = {"case": job.case, "variant": variant}
        for run in both:
            timed(run, job.device)
        if variant == ALONE:
            _, seconds = timed(copy, job.device)
            row["bytes_per_second"] = 2 * size / seconds
            _, seconds = timed(product, job.device)
        else:
            _, seconds = timed(lambda: [run() for run in both], job.device)
        write(part=job.part, **row, ms=round(1e3 * seconds, 3), conf=job.conf)


def graphs(job: Job, write: Write) -> None:
    """Times steps as CUDA graphs, and compares what they leave with what eager ones do."""
    case = gpu_cases.SPEED[job.case]
    for variant in job.variants:
        with row_of(job, variant, write, case) as row:
            state, row["eager_ms"] = after_steps(case, variant, job, row, graphed=False)
            graphed, row["graph_ms"] = after_steps(case, variant, job, row, graphed=True)
            row["differing"] = sum(not same(state[key], graphed[key]) for key in state)
            row["of"] = len(state)


def by_graph(training: peers.Training, job: Job) -> zoo.GraphedStep:
    """Returns the step of a training as a CUDA graph, where the device has graphs."""
    for group in training.optimizer.param_groups:
        # it counts its steps on the device
        group.update({"capturable": job.device == "cuda"} if "capturable" in group else {})

    def step(*args: Any, **kwargs: Any) -> Tensor:
        with training.autocast():
            loss = training.loss(training.call(*args, **kwargs))
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    return zoo.make_graphed_step(
        step, model=training.model, optimizer=training.optimizer, check_every=None
    )


def seeded(train: Callable[..., Tensor], training: peers.Training, seed: int) -> Tensor:
    """Runs a step on a training's batch, with these random numbers."""
    torch.manual_seed(seed)
    return train(*training.args, **training.kwargs)


def after_steps(
    case: Case, variant: str, job: Job, row: dict[str, Any], *, graphed: bool
) -> tuple[dict[Any, Any], float]:
    """Returns what steps with different batches leave, and the milliseconds of one."""
    gc.collect()
    torch.accelerator.empty_cache()
    training, took = begun(case, variant, job)
    train = by_graph(training, job)

    def roll(number: int) -> Tensor:
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.roll(number, 0), (training.args, training.kwargs)
        )
        return (train if graphed else train.step)(*args, **kwargs)

    torch.manual_seed(1)
    for number in range(STEPS):
        roll(number)
    torch.accelerator.empty_cache()
    reset_peaks(job.device)
    # the capture, which allocates what replays use, and a replay
    for number in range(STEPS, WARM):
        roll(number)
    timings = [
        timed(partial(roll, number), job.device) for number in range(1 if job.small else TIMED)
    ]
    loss = roll(WARM)
    row.update(took | peaks(job.device))
    if graphed:
        row.update(captures=train.captures, replays=train.replays)
    state = {key: to_host(value) for key, value in training.state(loss).items()}
    return state, round(1e3 * statistics.median(done for _, done in timings), 2)


def batches(job: Job, write: Write) -> None:
    """Searches for the largest batch by each method."""
    budget = parse_bytes(SMALL_BUDGET if job.small else BATCH_BUDGET)
    model = largest_batch.MODELS[job.case][job.small](1)
    ask = partial(largest_batch.Search, job.case, device=job.device, budget=budget, small=job.small)
    for method in job.variants:
        if method == peers.OWN and model.switch is None:
            continue
        with row_of(job, method, write, model) as row:
            row.update(budget=budget, **largest_batch.search(ask(method)))


@contextmanager
def row_of(
    job: Job, variant: str, write: Write, model: Case | peers.Model
) -> Iterator[dict[str, Any]]:
    """Writes a row when the block ends; an error is a row, too, and the next variant follows."""
    dtype = str(model.dtype or torch.float32).removeprefix("torch.")
    row: dict[str, Any] = {"case": job.case, "variant": variant, "size": model.size, "dtype": dtype}
    row |= {"deterministic": True} if job.deterministic else {}
    try:
        yield row
    except Exception as error:  # of whatever kind: the others are still to be measured
        row["error"] = in_a_line(error)[:600]
    write(part=job.part, **row, conf=job.conf)
    gc.collect()
    torch.accelerator.empty_cache()


def built(case: Case, job: Job) -> peers.Training:
    with torch.device(job.device):
        return peers.Training(case.model(small=job.small))


def begun(case: Case, variant: str, job: Job) -> tuple[peers.Training, dict[str, Any]]:
    """Returns a training put under a way, and what that took."""
    training = built(case, job)
    started = time.perf_counter()
    if variant not in (PLAN, PLAN_OFFLOAD):
        WAYS[variant](training, None)
        return training, {}
    report = planned(training, case.share, job, offload=variant == PLAN_OFFLOAD)
    seconds = round(time.perf_counter() - started, 2)
    took = {"share": case.share, "plan_s": seconds, "predicted": report.predicted_peak}
    return training, {**took, "plan": str(report.plan).partition("\n")[0]}


def planned(
    training: peers.Training, share: float, job: Job, *, offload: bool = False
) -> zoo.PlanReport:
    """Plans for a share of the baseline's peak; a small model by halves of what a plan can save."""
    try:
        return peers.by_budget(training, share, offload=offload)
    except zoo.BudgetError as error:
        if not job.small:
            raise
        half = (error.least + error.baseline) // 2
        return peers.by_budget(training, half, offload=offload)


def timed(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Returns the seconds until a step had launched its kernels, and until they were done."""
    where = torch.device(device)
    synchronize(where)
    started = time.perf_counter()
    step()
    launched = time.perf_counter() - started
    synchronize(where)
    return launched, time.perf_counter() - started


def reset_peaks(device: str) -> None:
    synchronize(torch.device(device))
    torch.accelerator.reset_peak_memory_stats()


def peaks(device: str) -> dict[str, int | None]:
    """Returns the most bytes since `reset_peaks`, as the allocator counts them."""
    synchronize(torch.device(device))
    return {
        "allocated": torch.accelerator.max_memory_allocated(),
        "requested": torch.accelerator.memory_stats().get("requested_bytes.all.peak"),
        "reserved": torch.accelerator.max_memory_reserved(),
    }
