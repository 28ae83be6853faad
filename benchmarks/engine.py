"""Times the engine against `torch.utils.checkpoint` with the same segments.

    python benchmarks/engine.py               # all
    python benchmarks/engine.py resnet50      # at batch 32

Every block is a segment in both; a round runs them in the order A B B A, and the ratio is that of
their seconds in a round: median, and in brackets the quartiles. torch's updates running statistics
twice, ours once; otherwise they do the same work. The plain chain is beside them. Small inputs show
what a segment costs beside its kernels. Peaks are allocator bytes of one step.

On Linux at large batches most of a step may be the kernel's, giving pages that the last step gave
back. These let the process keep them, and the ratios stand still:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999 python benchmarks/engine.py resnet50
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zoo
from zoo.chain import Chain, fold, outline
from zoo.engine.schedule import run_plan
from zoo.measure.memory import trace
from zoo.planner.schemes import each_block
from zoo.units import format_bytes

MODELS: dict[str, tuple[Callable[[], Chain], tuple[int, ...], int]] = {
    "resnet50": (zoo.resnet50, (32, 3, 224, 224), 8),
    "vit_small_patch16": (zoo.vit_small_patch16, (4, 3, 224, 224), 6),
    "resnet1001": (zoo.resnet1001, (4, 3, 32, 32), 6),
    "densenet121": (zoo.densenet121, (2, 3, 32, 32), 20),
}


def by_torch(items: Any, steps: Any, *state: Any) -> Any:
    """Runs a plan without nesting through torch's checkpoint."""
    value: Any = state
    for item in items:
        state = value if isinstance(value, tuple) else (value,)
        if isinstance(item, int):
            value = steps[item](*state)
        else:
            inner = functools.partial(fold_items, [steps[index] for index in item])
            value = checkpoint(inner, *state, use_reentrant=False)
    return value


def fold_items(steps: Any, *state: Any) -> Any:
    return fold(steps, state)


def timed(forward: Callable[[Tensor], Tensor], model: Chain, x: Tensor) -> float:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    forward(x).square().mean().backward()
    return time.perf_counter() - start


def ratio(some: list[float], others: list[float]) -> str:
    """Returns the median of the ratios and their quartiles as text."""
    ratios = [one / other for one, other in zip(some, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"x{middle:.3f} [{low:.3f}, {high:.3f}]"


def compare(name: str) -> None:
    """Prints one line: the time ratios, and the peaks of ours and torch's."""
    build, shape, rounds = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    found = outline(model.steps_for(x))
    plan = each_block(found.blocks)
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": model,
        "ours": lambda x: run_plan(plan, found.steps, (x,)),
        "torch": lambda x: by_torch(plan, found.steps, x),
    }
    peaks: dict[str, int] = {}
    for key, forward in forwards.items():
        timed(forward, model, x)
        model.zero_grad(set_to_none=True)
        peaks[key] = trace(lambda run=forward: run(x).square().mean().backward()).peak
    seconds: dict[str, list[float]] = {key: [] for key in forwards}
    for _ in range(rounds):
        there = {key: timed(forward, model, x) for key, forward in forwards.items()}
        back = {key: timed(forwards[key], model, x) for key in reversed(forwards)}
        for key in forwards:
            seconds[key].append(there[key] + back[key])
    pairs = (("ours", "plain"), ("torch", "plain"), ("ours", "torch"))
    print(
        f"{name:18} {'x'.join(map(str, shape)):12} time",
        "   ".join(f"{a}/{b} {ratio(seconds[a], seconds[b])}" for a, b in pairs),
        f"  peak ours {format_bytes(peaks['ours'])}, torch {format_bytes(peaks['torch'])}:",
        f"x{peaks['ours'] / peaks['torch']:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        compare(chosen)
