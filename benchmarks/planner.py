"""Compares the plans for a budget with each block and sqrt(n) segments, on paper.

    python benchmarks/planner.py                 # all
    python benchmarks/planner.py resnet50

Activation peaks are fractions of keeping everything; time and operations those of a training step,
1 for nothing run again. Seconds are measured step by step, operations counted. `at its memory` is
the plan of least time whose peak is no larger; `at its time` that of least peak that takes no
longer.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import zoo
from zoo.chain import Chain, outline
from zoo.measure.profile import profile
from zoo.plan import Plan
from zoo.planner.costs import StepCosts
from zoo.planner.optimal import Table
from zoo.planner.schemes import each_block, sqrt
from zoo.planner.simulate import simulate


def words(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10_000, shape), torch.randint(0, 10_000, shape)


MODELS: dict[str, tuple[Callable[[], Chain], Callable[[], tuple[Any, ...]]]] = {
    "resnet50": (zoo.resnet50, lambda: (torch.rand(8, 3, 224, 224),)),
    "resnet1001": (zoo.resnet1001, lambda: (torch.rand(8, 3, 32, 32),)),
    "densenet121": (zoo.densenet121, lambda: (torch.rand(4, 3, 224, 224),)),
    "densenet201": (zoo.densenet201, lambda: (torch.rand(4, 3, 224, 224),)),
    "vnet": (zoo.vnet, lambda: (torch.rand(1, 1, 64, 64, 64),)),
    "vit_base_patch16": (zoo.vit_base_patch16, lambda: (torch.rand(4, 3, 224, 224),)),
    "gpt2_small": (lambda: zoo.gpt2_small(vocabulary=10_000), lambda: words(1, 256)),
    "lstm": (lambda: zoo.lstm(vocabulary=10_000), lambda: words(60, 10)),
}


class Comparison:
    """Plans of a chain against each other: all numbers are fractions."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.table = Table(costs)
        self.seconds = sum(costs.seconds) + sum(costs.seconds_backward)

    def row(self, found: Plan) -> str:
        """Writes the peak, time and operations of a plan."""
        peak, time, operations = self.numbers(found)
        return f"{peak:.3f} at x{1 + time:.3f}, operations x{1 + operations:.3f}"

    def numbers(self, found: Plan) -> tuple[float, float, float]:
        """Returns the peak, and the extra time and operations; a backward does two forwards'."""
        result = simulate(found, self.costs)
        return (
            result.peak / self.table.baseline,
            result.recomputed_seconds / self.seconds,
            result.recomputed_flops / max(3 * sum(self.costs.flops), 1),
        )

    def against(self, name: str, scheme: Plan) -> None:
        """Prints a scheme and ours at its memory and at its time."""
        result = simulate(scheme, self.costs)
        slim = self.table.plan(result.peak)
        quick = self.table.plan_within(result.recomputed_seconds)
        peak, time, operations = self.numbers(scheme)
        _, less_time, less_operations = self.numbers(slim)
        print(f"  {name:8} {self.row(scheme)}")
        print(
            f"    at its memory {self.row(slim)}: {less_time / time:.2f} of its extra time, "
            f"{less_operations / operations:.2f} of its extra operations"
        )
        print(
            f"    at its time   {self.row(quick)}: {self.numbers(quick)[0] / peak:.2f} of its peak",
            flush=True,
        )


def compare(name: str) -> None:
    """Prints the lines of one model."""
    build, make = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build(), make()
    found = outline(model.steps_for(*inputs))
    costs = profile(model, found, inputs, timed=True)
    print(f"{name}, {len(costs)} steps", flush=True)
    comparison = Comparison(costs)
    comparison.against("blocks", each_block(found.blocks))
    comparison.against("sqrt", sqrt(found.blocks))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        compare(chosen)
