"""Budgets in many programs: asked, predicted and taken bytes, and what planning costs.

    PYTHONPATH=. python benchmarks/budget_table.py                 # into docs/budgets.csv
    PYTHONPATH=. python benchmarks/budget_table.py gpt2 vit        # some rows, which are printed

A program trains with AdamW by `zoo.checkpoint(model, memory_budget=...)`: three steps on its
inputs, then three on half as many again. The budget lies midway between the least that a plan needs
for the larger inputs and the baseline's peak for the smaller ones, or for the larger ones where
that is no more. Taken is the allocator's peak of the last of three steps. CPU seconds are those of
the first step on each size, without those of the second one, with child processes.

Each row is measured by processes of its own, one after the other, with one thread. Rows of an
interrupted run are kept in results/budget_table.jsonl; delete it for a new one.
"""

import argparse
import csv
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import zoo
from benchmarks import planner
from benchmarks.models import Subject, loss_of, subjects
from zoo.api.plan import planner_for
from zoo.harness.processes import outcome
from zoo.invocation import Invocation
from zoo.profiling.peak_memory import measure_step
from zoo.profiling.tensor_spec import tensors_in
from zoo.report.escaping import markdown_table
from zoo.units import format_bytes

TIMEOUT = 600.0
RESULTS, PAGE = Path("results/budget_table.jsonl"), Path("docs/budgets.csv")
COLUMNS = (
    "program", "library", "asked", "predicted", "taken", "taken / predicted", "first plan, CPU s",
    "taken, larger inputs", "larger inputs, CPU s",
)  # fmt: skip
# an optimizer with its rate
adamw = functools.partial(torch.optim.AdamW, lr=1e-4)
# they take most of the time, and are like others here
LONG = frozenset(
    {
        "r3d_18", "SwinUNETR", "swin_t", "swin_tiny_patch4_window7_224", "convnext_tiny",
        "fasterrcnn's backbone",
    }
)  # fmt: skip


words = functools.partial(planner.words, vocabulary=4000)
text = functools.partial(planner.text, vocabulary=4000)


def own(build: Callable[[], nn.Module], make: Callable[[], tuple[Any, ...]]) -> Any:
    """Returns what builds a model of zoo and its inputs."""
    return lambda: (build(), make(), {})


def image(batch: int, *size: int, channels: int = 3) -> tuple[Tensor]:
    return (torch.rand(batch, channels, *size),)


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "resnet50": (lambda: zoo.resnet50(classes=10), lambda: image(8, 64, 64)),
    "densenet100": (zoo.densenet100, lambda: image(2, 32, 32)),
    "vnet": (lambda: zoo.vnet(classes=3, width=4), lambda: image(2, 32, 32, 32, channels=1)),
    "vit_tiny_patch16": (
        lambda: zoo.vit_tiny_patch16(classes=10, image_size=128), lambda: image(4, 128, 128),
    ),
    "gpt2_small": (
        lambda: zoo.gpt2_small(width=64, heads=4, vocabulary=4000), lambda: words(2, 64),
    ),
    "llama_tiny": (lambda: zoo.llama_tiny(vocabulary=4000), lambda: words(2, 64)),
    "lstm": (
        lambda: zoo.lstm(vocabulary=4000, embedding=64, hidden=64), lambda: text(40, 8),
    ),
}  # fmt: skip


def programs() -> list[Subject]:
    """Lists the programs: other libraries' models, and those of zoo."""
    others = [subject for subject in subjects() if subject.name not in LONG]
    return [*others, *(Subject(name, "zoo", own(*parts)) for name, parts in ZOO.items())]


@dataclass(frozen=True)
class Cell:
    """What one process measures: a program, and its budget in bytes once that is known."""

    program: str
    library: str
    asked: int = 0


def built(cell: Cell) -> tuple[nn.Module, list[Invocation]]:
    """Returns a model, its inputs, and half as many again."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    named = {(subject.name, subject.library): subject for subject in programs()}
    model, args, kwargs = named[cell.program, cell.library].build()

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[: (len(tensor) + 1) // 2]])

    larger = pytree.tree_map_only(Tensor, longer, (args, kwargs))
    return model.train(), [Invocation(args, kwargs), Invocation(*larger)]


def bounds(cell: Cell) -> dict[str, Any]:
    """Returns the budget that is asked for, and what is predicted of the plan for it."""
    model, (inputs, larger) = built(cell)
    options = {"optimizer": adamw, "loss": loss_of, "holds_outputs": False}
    own_size = planner_for(model, inputs, **options)
    beyond = planner_for(model, larger, **options)
    least, most = beyond.lowest().peak, own_size.baseline.peak
    if least >= most:
        most = beyond.baseline.peak
    asked = (least + most) // 2
    return {"asked": asked, "predicted": own_size.report(asked, None).predicted_peak}


def trained(cell: Cell) -> dict[str, Any]:
    """Trains by a budget; returns bytes taken and CPU seconds of planning for each size."""
    model, sizes = built(cell)
    optimizer = adamw(model.parameters())
    zoo.checkpoint(model, memory_budget=cell.asked, optimizer=optimizer, loss=loss_of)
    taken, seconds = [], []
    for inputs in sizes:

        def step(inputs: Invocation = inputs) -> None:
            optimizer.zero_grad()
            loss_of(inputs.on(model)).backward()
            optimizer.step()

        first, second = (cpu_seconds(step) for _ in range(2))
        seconds.append(max(first - second, 0.0))
        taken.append(measure_step(step, model, optimizer, tensors_in(inputs.tensors)).peak)
    return {"taken": taken, "seconds": seconds}


def cpu_seconds(run: Callable[[], object]) -> float:
    """Runs a function and returns its CPU seconds, with those of the processes that it started."""
    before = os.times()
    run()
    after = os.times()
    return sum(after[:4]) - sum(before[:4])


def row(subject: Subject) -> list[str]:
    """Measures a row of the table."""
    asked = outcome(bounds, Cell(subject.name, subject.library), TIMEOUT)
    if "reason" in asked:
        return [subject.name, subject.library, asked["reason"], *[""] * (len(COLUMNS) - 3)]
    found = outcome(trained, Cell(subject.name, subject.library, asked["asked"]), TIMEOUT)
    if "reason" in found:
        return [subject.name, subject.library, found["reason"], *[""] * (len(COLUMNS) - 3)]

    def beside(taken: int) -> str:
        return format_bytes(taken) + (" (above asked)" if taken > asked["asked"] else "")

    (first, larger), seconds = found["taken"], [f"{value:.2f}" for value in found["seconds"]]
    return [
        subject.name,
        subject.library,
        format_bytes(asked["asked"]),
        format_bytes(asked["predicted"]),
        beside(first),
        f"{first / asked['predicted']:.4f}",
        seconds[0],
        beside(larger),
        seconds[1],
    ]


def earlier() -> dict[tuple[str, str], list[str]]:
    """Returns the rows of an interrupted run."""
    if not RESULTS.exists():
        return {}
    rows = map(json.loads, RESULTS.read_text().splitlines())
    return {(found[0], found[1]): found for found in rows}


def measured(chosen: list[Subject]) -> Iterator[list[str]]:
    """Yields rows, those that were measured before as they are."""
    known = earlier()
    RESULTS.parent.mkdir(exist_ok=True)
    for subject in chosen:
        found = known.get((subject.name, subject.library))
        if found is None:
            found = row(subject)
            with RESULTS.open("a") as results:
                results.write(json.dumps(found) + "\n")
        print(*found, sep=", ", flush=True)
        yield found


def main() -> int:
    """Writes the table, or prints some rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of programs' names; all by default")
    names = parser.parse_args().names
    every = programs()
    if names:
        chosen = [subject for subject in every if any(name in subject.name for name in names)]
        print(markdown_table(COLUMNS, [row(subject) for subject in chosen]))
        return 0
    rows = [*measured(every)]
    with PAGE.open("w", newline="") as page:
        csv.writer(page, lineterminator="\n").writerows([COLUMNS, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
