"""Times the engine against `torch.utils.checkpoint` with the same segments.

    python benchmarks/engine.py               # all
    python benchmarks/engine.py resnet50      # at batch 32
    python benchmarks/engine.py overhead      # what a segment and a kernel cost beside the work
    python benchmarks/engine.py check         # what zoo.check_replays costs on the accelerator here

Every block of the model is a segment in both; a round runs them in the order A B B A, and the ratio
is that of their seconds in a round: median, and in brackets the quartiles. torch's updates running
statistics twice, ours once; otherwise they do the same work. The plain model is beside them. Small
inputs show what a segment costs beside its kernels. Peaks are allocator bytes of one step.

`overhead` runs on one thread and counts its seconds alone. Per small block: a step less a plain one
and a forward without gradients, where each of 100 blocks is a segment (`zoo.recompute`; any model
by "blocks"), and where 200 are one. A plan that keeps 200 blocks beside plain. Per kernel: recorded
and between segments over a dispatch mode that does nothing, and replayed over called directly. Then
the backward of a small transformer, each of its 12 blocks a segment.

`check` trains ResNet-50 by blocks, with and without the check in the order A B B A, and waits for
the device after each step. Operators and bytes are those of one step beyond one without the check.

On Linux at large batches most of a step may be the kernel's, giving pages that the last step gave
back. These let the process keep them, and the ratios stand still:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999 python benchmarks/engine.py resnet50
"""

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import zoo
from zoo.engine.devices import accelerator, allocated, is_available, synchronize
from zoo.engine.kernel_segments import Conductor, PlannedBranch
from zoo.engine.recompute import segment
from zoo.engine.replay import Scheduled, replay
from zoo.engine.replay_check import checking
from zoo.engine.segments import thread
from zoo.planner.plan import Plan
from zoo.profiling.peak_memory import trace
from zoo.tracing.partition import paths_of
from zoo.units import format_bytes

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "resnet50": (zoo.resnet50, (32, 3, 224, 224), 8),
    "vit_small_patch16": (zoo.vit_small_patch16, (4, 3, 224, 224), 6),
    "resnet1001": (zoo.resnet1001, (4, 3, 32, 32), 6),
    "densenet121": (zoo.densenet121, (2, 3, 32, 32), 20),
}
HOW: dict[str, Callable[..., Any]] = {
    "plain": lambda block, *args, **kwargs: block(*args, **kwargs),
    "ours": zoo.recompute,
    "torch": functools.partial(checkpoint, use_reentrant=False),
}


class InSegments:
    """Runs a model with each of its blocks plainly, or as a segment of ours or of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.how = model, "plain"
        for path in paths_of(model, None):
            block = model.get_submodule(path)
            block.forward = functools.partial(self.run, block.forward)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # torch's calls a block again, when a list that the model appends to has grown
        args, kwargs = tree_map(lambda value: value, (args, kwargs))
        return HOW[self.how](forward, *args, **kwargs)

    def __call__(self, how: str, x: Tensor) -> Any:
        self.how = how
        return self.model(x)


def timed(run: InSegments, how: str, x: Tensor) -> float:
    run.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    run(how, x).square().mean().backward()
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
    run, x = InSegments(build()), torch.randn(shape)
    peaks: dict[str, int] = {}
    for how in HOW:
        timed(run, how, x)
        run.model.zero_grad(set_to_none=True)
        peaks[how] = trace(lambda how=how: run(how, x).square().mean().backward()).peak
    seconds: dict[str, list[float]] = {how: [] for how in HOW}
    for _ in range(rounds):
        there = {how: timed(run, how, x) for how in HOW}
        back = {how: timed(run, how, x) for how in reversed(HOW)}
        for how in HOW:
            seconds[how].append(there[how] + back[how])
    pairs = (("ours", "plain"), ("torch", "plain"), ("ours", "torch"))
    print(
        f"{name:18} {'x'.join(map(str, shape)):12} time",
        "   ".join(f"{a}/{b} {ratio(seconds[a], seconds[b])}" for a, b in pairs),
        f"  peak ours {format_bytes(peaks['ours'])}, torch {format_bytes(peaks['torch'])}:",
        f"x{peaks['ours'] / peaks['torch']:.4f}",
        flush=True,
    )


class Pointwise(nn.Module):
    """Two pointwise kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid() * 1.01


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "Linear LayerNorm": lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)),
    "Linear BatchNorm Dropout": lambda: nn.Sequential(
        nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1)
    ),
    "two pointwise": Pointwise,
}


class Blocks(nn.Module):
    """A number of small blocks, each a segment by `how`, or all of them one if it is `whole`."""

    def __init__(self, name: str, count: int, how: str = "plain", whole: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[name]() for _ in range(count))
        self.how, self.whole = HOW[how], whole

    def chained(self, x: Tensor, how: Callable[..., Any]) -> Tensor:
        for block in self.blocks:
            x = how(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return self.how(self.chained, x, HOW["plain"])  # type: ignore[no-any-return]
        return self.chained(x, self.how)


class Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that only passes kernels on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def chained(blocks: list[nn.Module], x: Tensor, how: str) -> Tensor:
    for block in blocks:
        x = HOW[how](block, x)
    return x


def seconds_of(function: Callable[[], Any]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


def step_seconds(model: nn.Module, x: Tensor) -> float:
    seconds = seconds_of(lambda: model(x).sum().backward())
    model.zero_grad(set_to_none=True)
    return seconds


def segments(name: str, count: int, ways: dict[str, nn.Module], rounds: int = 40) -> None:
    """Prints what a block costs beside its kernels, in microseconds, each way beside torch's."""
    x, found = torch.randn(8, 32, requires_grad=True), {way: list[float]() for way in ways}
    plain = Blocks(name, count)
    for index in range(rounds):
        with torch.no_grad():
            forward = seconds_of(lambda: plain(x))
        base = step_seconds(plain, x) + forward
        for way in [*ways][:: 1 if index % 2 else -1]:
            found[way].append((step_seconds(ways[way], x) - base) / count * 1e6)
    (*others, last) = (seconds[5:] for seconds in found.values())
    for way, seconds in zip(ways, others, strict=False):
        middle, other = statistics.median(seconds), statistics.median(last)
        print(f"{way:40} {middle:8.1f} {other:8.1f} us a block, {ratio(seconds, last)}", flush=True)


def kept(name: str = "Linear LayerNorm", count: int = 200, rounds: int = 40) -> None:
    """Prints a step by a plan that keeps all beside a plain one."""
    x, plain = torch.randn(8, 32, requires_grad=True), Blocks(name, count)
    model = zoo.checkpoint(Blocks(name, count), memory_budget="4GiB", optimizer="sgd")
    pairs = [(step_seconds(model, x), step_seconds(plain, x)) for _ in range(rounds)][5:]
    some, others = [one * 1e3 for one, _ in pairs], [other * 1e3 for _, other in pairs]
    middle, other = statistics.median(some), statistics.median(others)
    print(
        f"{'200 by a plan that keeps all':40} {middle:8.1f} {other:8.1f} ms, {ratio(some, others)}"
    )


def fastest(function: Callable[[], Any], rounds: int = 200) -> float:
    return min(seconds_of(function) for _ in range(rounds)) * 1e6


def kernels(count: int = 20) -> None:
    """Prints what it costs to record a kernel and to replay it, in microseconds."""
    scheduled: list[Scheduled] = []

    def call(x: Tensor) -> None:
        for _ in range(count):
            torch.mul(x, x)

    def recorded() -> float:
        with segment():
            made = x.sin()
            seconds = seconds_of(lambda: call(made))
            assert thread.segment is not None
            kernels = thread.segment.recording.kernels
            scheduled[:] = [item for kernel in kernels for item in (kernel, *kernel.results)]
            # the first makes what the others read
            del scheduled[1]
        return seconds

    def direct() -> None:
        multiply = torch.ops.aten.mul.Tensor
        with torch._C._AutoDispatchBelowAutograd():
            for _ in range(count):
                multiply(x, x)

    x = torch.rand(8, 32)
    with Nothing():
        empty = fastest(lambda: call(x)) / count
    with Conductor([]) as conductor:
        call(x)
    branch = PlannedBranch(conductor.operators, range(count), Plan(range(count)), {})

    def followed() -> float:
        with Conductor([branch]):
            return seconds_of(lambda: call(x))

    between = min(followed() for _ in range(200)) * 1e6 / count
    recording = min(recorded() for _ in range(200)) * 1e6 / count
    for title, taken in ("recorded", recording), ("between segments", between):
        print(f"{'a kernel ' + title:40} {taken:8.2f} {empty:8.2f} us, x{taken / empty:.2f}")
    replayed, called = fastest(lambda: replay(scheduled)) / count, fastest(direct) / count
    print(f"{'a kernel replayed':40} {replayed:8.2f} {called:8.2f} us, x{replayed / called:.2f}")


def transformer(rounds: int = 30) -> None:
    """Prints the backward of 12 blocks of width 64 in milliseconds, ours and torch's."""
    model = Blocks("two pointwise", 0)
    model.blocks = nn.ModuleList(
        nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(12)
    )
    x, found = torch.randn(4, 16, 64, requires_grad=True), {"ours": [0.0], "torch": [0.0]}
    for index in range(rounds):
        for how in ("ours", "torch") if index % 2 else ("torch", "ours"):
            loss = model.chained(x, HOW[how]).square().mean()
            found[how].append(seconds_of(loss.backward) * 1e3)
    some, others = found["ours"][5:], found["torch"][5:]
    middle, other = statistics.median(some), statistics.median(others)
    print(f"{'transformer, backward':40} {middle:8.1f} {other:8.1f} ms, {ratio(some, others)}")


def overhead() -> None:
    """Prints the table of what the engine costs beside the kernels."""
    torch.set_num_threads(1)
    print(f"{'':40} {'ours':>8} {'other':>8}")
    for name in ("Linear LayerNorm", "Linear BatchNorm Dropout"):
        by_blocks = zoo.checkpoint(Blocks(name, 100), "blocks")
        ways = {name: Blocks(name, 100, "ours"), f"{name}, any model": by_blocks}
        segments(name, 100, {**ways, "torch": Blocks(name, 100, "torch")})
    for name in ("Linear LayerNorm", "two pointwise"):
        ours, other = (Blocks(name, 200, how, whole=True) for how in ("ours", "torch"))
        segments(name, 200, {f"{name}, 200 in a segment": ours, "torch": other})
    kept()
    kernels()
    transformer()


CHECKED = {"aten::clone", "aten::cat", "aten::ne", "aten::logical_or_"}


def check(rounds: int = 8, shape: tuple[int, ...] = (32, 3, 224, 224)) -> None:
    """Prints what the check of replays costs a training step on the accelerator."""
    kind = accelerator()
    if kind is None or not is_available(kind):
        print("torch finds no accelerator here; on the CPU replays are checked as they come")
        return
    torch.manual_seed(0)
    device = torch.ones((), device=kind).device
    model, x = zoo.resnet50().to(device), torch.randn(shape, device=device)
    zoo.checkpoint(model, "blocks")

    def step(is_checked: bool) -> tuple[float, int]:
        with checking() if is_checked else contextlib.nullcontext():
            model.zero_grad(set_to_none=True)
            synchronize(device)
            start, before = time.perf_counter(), allocated(device)
            loss = model(x).square().mean()
            held = allocated(device) - before
            loss.backward()
            synchronize(device)
            return time.perf_counter() - start, held

    def operators(is_checked: bool) -> int:
        with profile() as profiler:
            step(is_checked)
        return sum(event.count for event in profiler.key_averages() if event.key in CHECKED)

    step(False), step(True)
    count = operators(True) - operators(False)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    held = {True: 0, False: 0}
    for _ in range(rounds):
        runs = [(is_checked, step(is_checked)) for is_checked in (True, False, False, True)]
        for is_checked in (True, False):
            pair = [run for which, run in runs if which is is_checked]
            seconds[is_checked].append(sum(duration for duration, _ in pair))
            held[is_checked] = max(size for _, size in pair)
    print(
        f"resnet50 {'x'.join(map(str, shape))} on {kind}: {count} operators and",
        f"{format_bytes(held[True] - held[False])} of samples, time "
        f"{ratio(seconds[True], seconds[False])}",
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["check"]:
        check()
        sys.exit()
    if sys.argv[1:] == ["overhead"]:
        overhead()
        sys.exit()
    for chosen in sys.argv[1:] or MODELS:
        compare(chosen)
