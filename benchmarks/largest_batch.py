"""The largest batch that fits a device's memory, for each way to save memory, and its speed.

    python benchmarks/largest_batch.py                          # the accelerator that is here
    python benchmarks/largest_batch.py --memory-budget 16GiB    # with at most so much of its memory
    python benchmarks/largest_batch.py --device cpu --memory-budget 400MiB --small

It needs the `test` extra. Each row is a search in a process of its own. A batch fits where the
allocator's peak of a whole training step (weights, gradients and optimizer state among it) is
within the budget, after two steps that did not run out of the device's memory. Batches are 1, 2, 3,
4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: four for each power of two.

`zoo, as fast as ...` is the largest batch at which a plan for the same budget trains at least 97 %
of the samples per second that the other method reaches at its own largest batch; samples per second
are taken to fall as the batch grows.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import peers
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zoo
from zoo.engine.devices import free_bytes, synchronize
from zoo.harness.processes import outcome, ran_out
from zoo.profiling.peak_memory import measure_step
from zoo.profiling.tensor_spec import tensors_in
from zoo.report.escaping import markdown_table
from zoo.units import format_bytes, parse_bytes

SIZES = [size for size in range(1, 2**16) if size % (1 << max(0, size.bit_length() - 3)) == 0]
# how many sizes further to try while all fit: from 4 on, twice the batch
DOUBLED = 4
STEPS, ROUNDS, TIMEOUT = 2, 5, 3600.0
# a plan that reaches this share of a method's samples per second counts as equally fast
EQUAL = 0.97
# the default budget, as a share of the free memory
SHARE = 0.9
LEGEND = """\
*batch*: the largest whose training step peaks at {budget} at most, as the device's allocator counts
it; *step peak*: that peak; (×): samples per second over the baseline's. *zoo, as fast as ...*: the
largest batch at which a plan for that budget trains at least {equal} of the samples per second that
the other method reaches at its own largest batch.
"""
# builds a model and its inputs for a batch size
MakeModel = Callable[[int], peers.Model]


def resnet(side: int, batch: int) -> peers.Model:
    build = partial(peers.from_timm, "resnet50", batch, 3, side, side)
    return peers.Model(build, f"timm, 3×{side}×{side}", "Bottleneck", switch=peers.turn_on)


def densenet(side: int, batch: int) -> peers.Model:
    build = partial(peers.from_torchvision, "densenet121", batch, 3, side, side)
    return peers.Model(build, f"torchvision, 3×{side}×{side}", "_DenseBlock", switch=peers.turn_on)


def vit(name: str, side: int, batch: int) -> peers.Model:
    build = partial(peers.from_timm, name, batch, 3, side, side, img_size=side)
    return peers.Model(build, f"timm's {name}, 3×{side}×{side}", "Block", "adamw", peers.turn_on)


def gpt2(tokens: int, settings: dict[str, int], batch: int) -> peers.Model:
    of = partial(peers.from_transformers, GPT2LMHeadModel, GPT2Config)
    build, size = partial(of, batch, tokens, **settings), f"transformers, {tokens} tokens"
    return peers.Model(build, size, "GPT2Block", "adamw", peers.turn_on)


def volumes(side: int, batch: int) -> peers.Model:
    return peers.Model(partial(peers.unet, batch, side), f"MONAI's BasicUNet, {side}³", "TwoConv")


TINY = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocabulary": 100}
# name: (the size that people train on an accelerator, a small one)
MODELS: dict[str, tuple[MakeModel, MakeModel]] = {
    "ResNet-50": (partial(resnet, 224), partial(resnet, 64)),
    "DenseNet-121": (partial(densenet, 224), partial(densenet, 64)),
    "ViT": (partial(vit, "vit_base_patch16_224", 224), partial(vit, "vit_tiny_patch16_224", 64)),
    "GPT-2": (partial(gpt2, 1024, {"vocabulary": 50257}), partial(gpt2, 64, TINY)),
    "U-Net": (partial(volumes, 96), partial(volumes, 32)),
}


def by_true_and_optimizer(training: peers.Training, budget: int | None) -> None:
    """Checkpoints a model and updates its parameters in the backward."""
    zoo.checkpoint(training.model)
    zoo.optimizer_in_backward(training.model, training.optimizer)


IN_BACKWARD = "zoo, True, optimizer in the backward"
METHODS = {
    name: peers.METHODS[name].apply for name in ("plain", peers.BY_BLOCK, peers.OWN, "zoo, True")
}
METHODS[IN_BACKWARD] = by_true_and_optimizer
# methods whose speed a plan must match
OTHERS = ("plain", peers.BY_BLOCK, peers.OWN)


@dataclass(frozen=True)
class Search:
    """A search for the largest batch, from `first` on.

    It takes at most `budget` bytes and trains at least `least` samples a second.
    """

    model: str
    method: str
    device: str
    budget: int
    small: bool = False
    first: int = 1
    least: float = 0.0

    def training(self, batch: int) -> peers.Training:
        """Builds the model and its inputs on the device."""
        with torch.device(self.device):
            return peers.Training(MODELS[self.model][self.small](batch))


@dataclass(frozen=True)
class Trial:
    """A batch that was tried: bytes of the step's peak and samples per second."""

    batch: int
    peak: int
    rate: float


def search(asked: Search) -> dict[str, Any]:
    """Finds the largest batch; runs in a process of its own."""
    torch.manual_seed(0)
    tried: dict[int, Trial | None] = {}

    def fits(size: int) -> bool:
        tried[size] = trial = attempt(asked, SIZES[size])
        return trial is not None and trial.peak <= asked.budget and trial.rate >= asked.least

    found = tried.get(last(fits, SIZES.index(asked.first)))
    if found is None:
        return {"status": "none is as fast" if asked.least else "none fits"}
    return {"status": "done", **asdict(found)}


def last(fits: Callable[[int], bool], first: int) -> int:
    """Returns the last index that fits if all before it do; the one before `first` if none does."""
    low, high = first - 1, len(SIZES)
    while high - low > 1:
        index = (low + high) // 2
        if high == len(SIZES):
            index = first if low < first else min(low + DOUBLED, high - 1)
        if fits(index):
            low = index
        else:
            high = index
    return low


def attempt(asked: Search, batch: int) -> Trial | None:
    """Trains a few steps with a batch; None where the memory or the budget does not suffice."""
    device = torch.device(asked.device)
    free_memory(device)
    try:
        training = asked.training(batch)
        apply = peers.by_budget if asked.least else METHODS[asked.method]
        apply(training, asked.budget)
        for step in range(STEPS):
            training.step(step)
        inputs = tensors_in((training.args, training.kwargs))
        last_step = partial(training.step, STEPS)
        memory = measure_step(last_step, training.model, training.optimizer, inputs)
        seconds = statistics.median(timed(last_step, device) for _ in range(ROUNDS))
        return Trial(batch, memory.peak, batch / seconds)
    except Exception as error:
        if isinstance(error, zoo.BudgetError) or ran_out(error):
            return None
        raise


def free_memory(device: torch.device) -> None:
    """Collects what the attempt before left and empties the allocator's cache."""
    gc.collect()
    getattr(torch.get_device_module(device), "empty_cache", int)()


def timed(step: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


def table(
    models: Sequence[str], methods: Sequence[str], device: str, budget: int, *, small: bool
) -> str:
    """Searches for each model and method and returns the table."""
    rows = []
    for model in models:
        about = MODELS[model][small](1)
        known: dict[str, dict[str, Any]] = {}
        ask = partial(Search, model, device=device, budget=budget, small=small)
        for method in methods:
            if method != peers.OWN or about.switch is not None:
                known[method] = run(ask(method))
        for other in OTHERS:
            if "rate" in known.get(other, {}):
                first, least = known[other]["batch"], EQUAL * known[other]["rate"]
                method = f"zoo, as fast as {other}"
                known[method] = run(ask(method, first=first, least=least))
        rows += [
            (f"{model} ({about.size})", renamed(method), *shown(found, known.get("plain", {})))
            for method, found in known.items()
        ]
    return markdown_table(
        ("model", "method", "batch", "of the baseline's", "step peak", "samples/s"), rows
    )


def renamed(method: str) -> str:
    return method.replace("plain", "baseline")


def run(asked: Search) -> dict[str, Any]:
    found = outcome(search, asked, TIMEOUT)
    print(f"# {asked.model}: {asked.method}: {found}", file=sys.stderr, flush=True)
    return found


def shown(found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    if "rate" not in found:
        return [": ".join(filter(None, (found["status"], found.get("reason")))), "", "", ""]
    times, share = (
        f"×{found[key] / plain[key]:.2f}" if key in plain else "" for key in ("batch", "rate")
    )
    rate = f"{found['rate']:.3g}"
    return [
        str(found["batch"]),
        times,
        format_bytes(found["peak"]),
        f"{rate} ({share})" if share else rate,
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda, xpu, cpu, ...; default: the one found")
    parser.add_argument("--memory-budget", help=f"such as 16GiB; default: {SHARE:.0%}% of the free")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--small", action="store_true", help="small models and inputs")
    given = parser.parse_args()
    found = torch.accelerator.current_accelerator(check_available=True)
    device = given.device or (found.type if found else "cpu")
    # torch does not count the free memory of the CPU
    if given.memory_budget is None and device == "cpu":
        parser.error("--memory-budget is needed on the CPU, such as 2GiB")
    budget = (
        parse_bytes(given.memory_budget)
        if given.memory_budget
        else int(SHARE * free_bytes(torch.device(device)))
    )
    print(LEGEND.format(budget=format_bytes(budget), equal=f"{EQUAL:.0%}"))
    print(table(given.models, given.methods, device, budget, small=given.small))


if __name__ == "__main__":
    main()
