"""Compares frontiers with and without offloading, by an H200's peak rates: no device is needed.

    python benchmarks/offload.py                    # all models: some minutes
    python benchmarks/offload.py resnet50 --device h100

A line is a budget, as a share of the baseline's predicted peak: the least predicted time of any
plan within it, as a ratio to the baseline's, without and with offloading, and the bytes on the host
by the latter. Models are in bfloat16, with AdamW. Kernels' seconds come from the device's peak
rates, and those of copies from its link (`zoo.profiling.kernel_costs`).
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo.policy.plan_report import Frontier, Point
from zoo.units import format_bytes

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
Built = tuple[nn.Module, tuple[Any, ...]]


def tokens(*shape: int) -> tuple[Tensor, Tensor]:
    drawn = torch.zeros(shape, dtype=torch.int64)
    return drawn, drawn


MODELS: dict[str, Callable[[], Built]] = {
    "resnet50": lambda: (zoo.resnet50(), (torch.zeros(256, 3, 224, 224),)),
    "vit_base_patch16": lambda: (zoo.vit_base_patch16(), (torch.zeros(128, 3, 224, 224),)),
    "gpt2_small": lambda: (zoo.gpt2_small(), tokens(16, 1024)),
    "llama3_2_1b": lambda: (zoo.create("llama3_2_1b"), tokens(4, 2048)),
}


def frontier_of(name: str, device: str, *, offload: bool) -> Frontier:
    """Returns the frontier of a model on the meta device."""
    with torch.device("meta"):
        model, inputs = MODELS[name]()
    inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    return zoo.frontier(model.bfloat16(), inputs, device=device, offload=offload)


def fastest(frontier: Frontier, budget: float) -> Point | None:
    """Returns the plan of least time within a budget in bytes."""
    within = [point for point in (*frontier, frontier.baseline) if point.peak <= budget]
    return min(within, key=lambda point: point.time_ratio, default=None)


def lines(name: str, device: str) -> Iterator[str]:
    """Yields the lines of a model's table."""
    kept, offloaded = (frontier_of(name, device, offload=offload) for offload in (False, True))
    whole = kept.baseline.peak
    for share in (*SHARES, min(point.peak for point in offloaded) / whole):
        plain, found = (fastest(frontier, share * whole) for frontier in (kept, offloaded))
        times = (f"×{point.time_ratio:.3f}" if point else "-" for point in (plain, found))
        host = format_bytes(found.offloaded) if found else "-"
        yield f"| {name} | {format_bytes(int(share * whole))} | ×{share:.2f} | " + " | ".join(
            (*times, f"{host} |")
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[*MODELS])
    parser.add_argument("--device", default="h200")
    arguments = parser.parse_args()
    print("| model | budget | of the baseline | time without | time with | on the host |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in arguments.models:
        for line in lines(name, arguments.device):
            print(line, flush=True)


if __name__ == "__main__":
    main()
