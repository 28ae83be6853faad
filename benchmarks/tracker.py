"""Holds the tracker against the allocator and memray: peaks of a training step, for each family.

    pip install memray
    OMP_NUM_THREADS=1 python benchmarks/tracker.py               # all
    OMP_NUM_THREADS=1 python benchmarks/tracker.py vit_tiny_patch16

Peaks of one step, forward, backward and optimizer, of the baseline and of `checkpoint=True`:

    allocator   every event of torch's allocator, and what was there before: `profiling.allocator`
    tracker     `zoo.track(..., allocator=True)`: the same events, each with its tensor
    tensors     `zoo.track(...)`: what tensors show; the rest are workspaces of libraries
    memray      every malloc of the process during the step, and what was there before
    fake        `zoo.anatomy(..., device="meta")` against `tensors`, nothing is run
    time        a tracked step over a plain one, of interleaved steps: median

All but `allocator` are shown as their difference from it, in percent. memray also sees what
libraries allocate past torch's allocator; objects of less than 512 bytes are left out.

On one core of an AMD EPYC (torch 2.14.1), over nine models with and without a plan, `tracker` was
equal in all, `tensors` 0 to 15.4 % below (V-Net, whose workspaces are largest), `memray` 0 to 0.9 %
above, `fake` within 0.001 %, and a tracked step took 1.05 to 2.31 times as long.

While a step is tracked, autograd adds the gradients of a tensor that several operators read out of
place, as under every dispatch mode. Where that is at the peak, the tracked step takes up to one
such gradient more for each of these tensors. `zoo.profiling.peak_memory` measures without a mode.
"""

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zoo
from zoo.profiling.peak_memory import measure_step, trace
from zoo.units import format_bytes

Inputs = tuple[Any, ...]


def images(*shape: int) -> Callable[[], Inputs]:
    return lambda: (torch.rand(shape),)


def words(*shape: int) -> Callable[[], Inputs]:
    return lambda: (torch.randint(0, 1000, shape), torch.randint(0, 1000, shape))


def texts(*shape: int) -> Callable[[], Inputs]:
    tokens = words(*shape)
    return lambda: (tokens()[0], None, tokens()[1])


CELLS: dict[str, tuple[dict[str, Any], Callable[[], Inputs]]] = {
    "resnet50": ({}, images(4, 3, 96, 96)),
    "resnext50_32x4d": ({}, images(4, 3, 96, 96)),
    "resnet110": ({}, images(32, 3, 32, 32)),
    "densenet121": ({}, images(4, 3, 96, 96)),
    "vnet": ({}, images(1, 1, 32, 32, 32)),
    "vit_tiny_patch16": ({}, images(2, 3, 224, 224)),
    "gpt2_small": ({"vocabulary": 1000}, words(1, 128)),
    "lstm": ({"vocabulary": 1000}, texts(60, 80)),
    "gru": ({"vocabulary": 1000}, texts(60, 160)),
}
ROUNDS = 3
# bytes: below are objects of Python and nodes of graphs, above the numbers of tensors
SMALL = 512

sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)


def loss_of(outputs: Any) -> Tensor:
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return first.mean()


class Cell:
    """One model in training, with or without a plan."""

    def __init__(self, name: str, checkpoint: bool) -> None:
        torch.manual_seed(0)
        arguments, make = CELLS[name]
        self.model: Any = zoo.create(name, checkpoint=checkpoint, **arguments)
        self.inputs = make()
        self.optimizer = sgd(self.model.parameters())
        self.step()

    def step(self) -> None:
        loss_of(self.model(*self.inputs)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tracked(self, **options: Any) -> zoo.Timeline:
        with zoo.track(
            self.model, optimizer=self.optimizer, inputs=self.inputs, **options
        ) as timeline:
            self.step()
        return timeline

    def allocated(self) -> tuple[int, int]:
        """Returns the peak by the allocator, and what of it was there before."""
        given = [value for value in self.inputs if isinstance(value, Tensor)]
        peak = measure_step(self.step, self.model, self.optimizer, given).peak
        return peak, peak - trace(self.step).peak

    def by_memray(self) -> int:
        """Returns the most bytes that the process allocated at once in a step."""
        import memray

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.bin"
            with memray.Tracker(path):
                self.step()
            with memray.FileReader(path) as reader:
                records = reader.get_high_watermark_allocation_records()
                large = (r.size for r in records if r.size >= SMALL * r.n_allocations)
                return sum(large)

    def predicted(self) -> int:
        """Returns the peak of tensors, from fake ones."""
        found = zoo.anatomy(self.model, self.inputs, optimizer=sgd, loss=loss_of, device="meta")
        return (found.planned or found.baseline).peak

    def overhead(self) -> float:
        """Returns the time of a tracked step over that of a plain one."""
        pairs = [(_seconds(self.step), _seconds(self.tracked)) for _ in range(ROUNDS)]
        return statistics.median(tracked / plain for plain, tracked in pairs)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(name: str, checkpoint: bool) -> list[float]:
    """Prints one line and returns its errors in percent: tracker, tensors, memray, fake."""
    cell = Cell(name, checkpoint)
    allocator, before = cell.allocated()
    tracker = cell.tracked(allocator=True).peak
    tensors = cell.tracked().peak
    found = (tracker, tensors, before + cell.by_memray())
    errors = [100 * (peak / allocator - 1) for peak in found]
    errors.append(100 * (cell.predicted() / tensors - 1))
    print(
        f"{name:18} {checkpoint!s:10} {format_bytes(allocator):>10}",
        *(f"{error:+8.3f}" for error in errors),
        f"   x{cell.overhead():.2f}",
        flush=True,
    )
    return errors


if __name__ == "__main__":
    names = ("model", "checkpoint", "allocator", "tracker", "tensors", "memray", "fake", "time")
    print("{:18} {:10} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8}".format(*names))
    table = [
        compare(name, checkpoint) for name in sys.argv[1:] or CELLS for checkpoint in (False, True)
    ]
    worst = [max(map(abs, column)) for column in zip(*table, strict=True)]
    print(f"{'largest':18} {'':10} {'':10}", *(f"{error:8.3f}" for error in worst))
