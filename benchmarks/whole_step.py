"""Budgets of the whole step: asked, predicted and taken bytes; and the bits of ten steps.

    python benchmarks/whole_step.py                       # budgets of all models of default.yaml
    python benchmarks/whole_step.py --models gpt2_small
    python benchmarks/whole_step.py --exact               # digests, by four optimizers

A budget lies midway between the baseline's peak and the least that a plan needs. `taken` is the
allocator's peak of the third step by the plan found, when optimizer and model have their state;
`error` is what was predicted less that, relative to it. Forward and loss are under bfloat16
autocast where it says so, the backward outside of it.

`--exact` trains ten steps after the backward and ten with `zoo.optimizer_in_backward` and
`checkpoint=True`, from the same weights and seeds, and compares loss, buffers, parameters and the
state of the random number generators after each, bit for bit.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zoo.api.plan import planner_for
from zoo.harness.comparison_cells import Cell, Kind, expand
from zoo.harness.config import read
from zoo.harness.data import Batch, batches
from zoo.harness.optimizers import OPTIMIZERS
from zoo.harness.training import Training, step_digests
from zoo.profiling.peak_memory import measure_step
from zoo.profiling.tensor_spec import tensors_in
from zoo.units import format_bytes

BUDGETS, EXACT = Path("configs/default.yaml"), Path("configs/quick.yaml")
STEPS = 10
FOUR: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=(), help="all of the config by default")
    parser.add_argument("--exact", action="store_true", help="compare bits, not bytes")
    arguments = parser.parse_args()
    config = read(EXACT if arguments.exact else BUDGETS, arguments.models, {})
    cells = [entry["checkpointed"] for entry in expand(config)]
    lines = exact_lines(cells) if arguments.exact else budget_lines(cells)
    for line in lines:
        print(line, flush=True)


def budget_lines(cells: list[Cell]) -> Iterator[str]:
    """Yields the lines of the table of budgets."""
    yield "| model | type | in the backward | baseline | asked | predicted | taken | error |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for cell, dtype, in_backward in itertools.product(
        cells, ("float32", "bfloat16"), (False, True)
    ):
        training, (first, second, _) = _prepared(replace(cell, dtype=dtype, plan=None))
        training.switch("baseline")
        training.step(first)
        with training.autocast:
            planner = planner_for(
                training.model,
                training.arguments(second),
                optimizer=OPTIMIZERS[cell.model.optimizer],
                loss=training.outer_loss(second),
                optimizer_in_backward=in_backward,
            )
            asked = (planner.least.peak + planner.baseline.peak) // 2
            report = planner.report(asked, None)
        taken = peak(replace(cell, dtype=dtype, plan=report.plan.text()), in_backward)
        yield (
            f"| {cell.model.name} | {dtype} | {'yes' if in_backward else 'no'} | "
            f"{format_bytes(report.baseline_peak)} | {format_bytes(asked)} | "
            f"{format_bytes(report.predicted_peak)} | {format_bytes(taken)} | "
            f"{report.predicted_peak / taken - 1:+.2%}{'' if taken <= asked else ' above asked'} |"
        )


def peak(cell: Cell, in_backward: bool) -> int:
    """Returns the allocator's peak of the third step, in bytes.

    A name for the model's outputs outlives the backward, as in a training loop and as is predicted.
    """
    training, given = _prepared(cell)
    names: dict[str, Any] = {}
    training.model.register_forward_hook(lambda *call: names.update(outputs=call[-1]))
    training.switch("optimizer_in_backward" if in_backward else "checkpointed")
    *first, last = given
    for batch in first:
        training.step(batch)
    run = partial(training.step, last)
    inputs = tensors_in((training.arguments(last), last.targets))
    return measure_step(run, training.model, training.optimizer, inputs).peak


def exact_lines(cells: list[Cell]) -> Iterator[str]:
    """Yields the lines of the table of bits."""
    yield f"| model | {' | '.join(FOUR)} |"
    yield "|---|" + "---|" * len(FOUR)
    for cell in cells:
        found = []
        for make in FOUR.values():
            one, other = (
                _digests(cell, kind, make) for kind in ("baseline", "optimizer_in_backward")
            )
            found.append("equal" if one == other else f"differs at step {_first(one, other)}")
        yield f"| {cell.model.name} | {' | '.join(found)} |"


def _digests(
    cell: Cell, kind: Kind, make: Callable[..., torch.optim.Optimizer]
) -> list[dict[str, str]]:
    training, given = _prepared(cell, STEPS)
    training.optimizer = make(training.model.parameters())
    training.switch(kind)
    digests = [step_digests(training.model, training.step(batch)) for batch in given]
    # the gradients of one of both are freed; the parameters show them
    return [{name: value for name, value in d.items() if name != "gradients"} for d in digests]


def _first(one: list[dict[str, str]], other: list[dict[str, str]]) -> int:
    return next(n for n, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] != pair[1])


def _prepared(cell: Cell, steps: int = 3) -> tuple[Training, list[Batch]]:
    torch.set_num_threads(cell.threads)
    return Training(cell), batches(cell.model, steps, cell.seed)


if __name__ == "__main__":
    main()
