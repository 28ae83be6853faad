"""What a report draws of a cell beside its numbers: a step's memory, the chain, the curve.

    timeline    the step's memory over time, at a few hundred of its points, and who held its peak
    chain       names, blocks and saved bytes of the steps, over which a plan is drawn
    frontier    predicted peak and time of the best plans and of the classic schemes, if asked for

They are read after everything is measured and change none of it. What cannot be had costs the cell
nothing: it stands under "missing" with the reason.
"""

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ahead import look_ahead
from zoo.harness.cells import Cell
from zoo.harness.data import Batch
from zoo.harness.training import Training
from zoo.measure.timeline import CATEGORIES, RESIDENT, Allocation, Timeline
from zoo.plan_frontier import Frontier
from zoo.planning import Prospect

Result = dict[str, Any]

# a curve drawn over a page's width shows no more
POINTS = 240
PLANS = 64
HOLDERS = 10


def details(training: Training, cell: Cell, batch: Batch, timeline: Timeline) -> Result:
    """Returns what a report draws of a model that has trained; `timeline` is that of a step."""
    wanted: dict[str, Callable[[], Result]] = {"timeline": lambda: {"timeline": summary(timeline)}}
    if cell.kind == "baseline":
        wanted["chain"] = lambda: _outlook(training, cell, batch)
    found: Result = {"missing": {}}
    for name, read in wanted.items():
        try:
            found |= read()
        except Exception as error:
            found["missing"][name] = " ".join(f"{type(error).__name__}: {error}".split())
    return found


def summary(timeline: Timeline, points: int = POINTS) -> Result:
    """Returns a timeline of about so many of its points, the peaks among them.

    Of each stretch the points of most and of fewest bytes stay, so that what is drawn was so.
    """
    curves = {name: curve for name, curve in timeline.curves().items() if any(curve)}
    total = timeline.total()
    activations = timeline.total(name for name in CATEGORIES if name not in RESIDENT)
    most = {timeline.peak_point, activations.index(max(activations))}
    chosen = sorted(most.union(_chosen(total, points)))
    return {
        "length": timeline.length,
        "allocator": timeline.allocator,
        "points": chosen,
        "bytes": {name: [curve[point] for point in chosen] for name, curve in curves.items()},
        "phases": _phases(timeline),
        "peak": {
            "point": timeline.peak_point,
            "bytes": timeline.peak,
            "phase": timeline.phase_at(timeline.peak_point),
            "categories": {name: curve[timeline.peak_point] for name, curve in curves.items()},
        },
        "holders": [_holder(allocation) for allocation in timeline.holders(HOLDERS)],
    }


def thinned(curve: list[list[float]], most: int = PLANS) -> list[list[float]]:
    """Returns at most so many plans of a curve of rising peaks, its ends among them."""
    if len(curve) <= most:
        return curve
    (low, _), (high, _) = curve[0], curve[-1]
    width = (high - low) / (most - 2) or 1
    first_of = {int((point[0] - low) / width): point for point in reversed(curve)}
    return sorted({tuple(point): point for point in (*first_of.values(), curve[-1])}.values())


def _outlook(training: Training, cell: Cell, batch: Batch) -> Result:
    """Returns the chain of a model that keeps everything, and its frontier if that is wanted."""
    inputs, loss = _call(cell.model.data, batch)
    options = training.optimizer.defaults
    training.optimizer.zero_grad(set_to_none=True)
    with torch.autocast(training.device, torch.bfloat16, enabled=training.half):
        prospect = look_ahead(
            training.model,
            inputs,
            optimizer=lambda parameters: type(training.optimizer)(parameters, **options),
            loss=loss,
            # the rates of a device, any, where no time is wanted: nothing is run
            device=None if cell.frontier else "cpu",
        )
        curve = {"frontier": _drawn(prospect.frontier())} if cell.frontier else {}
    return {"chain": _drawn_chain(prospect), **curve}


def _drawn_chain(prospect: Prospect) -> Result:
    steps = slice(prospect.steps)
    saved = prospect.costs.newly_saved()
    return {
        "names": prospect.names,
        "blocks": prospect.costs.blocks[steps],
        "saved": saved[steps],
    }


def _drawn(curve: Frontier) -> Result:
    return {
        "optimal": thinned([[point.peak, point.time_ratio] for point in curve.optimal]),
        "schemes": {point.name: [point.peak, point.time_ratio] for point in curve.schemes},
        "baseline": curve.baseline.peak,
        "lower_bound": curve.lower_bound,
    }


def _call(data: str, batch: Batch) -> tuple[tuple[Any, ...], Any]:
    """Returns what the model is called with, and the loss where that is outside of it."""
    if data == "text":
        return (batch.inputs, batch.targets), None
    if data == "stream":
        return (batch.inputs, None, batch.targets), None

    def loss(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores, batch.targets)

    return (batch.inputs,), loss


def _chosen(total: list[int], points: int) -> Iterator[int]:
    stretch = max(math.ceil(2 * len(total) / points), 1)
    for start in range(0, len(total), stretch):
        part = range(start, min(start + stretch, len(total)))
        yield max(part, key=total.__getitem__)
        yield min(part, key=total.__getitem__)
    yield len(total) - 1


def _phases(timeline: Timeline) -> list[list[Any]]:
    """Returns the start of each phase that differs from the one before."""
    runs = groupby(timeline.phases, key=lambda mark: mark.phase)
    return [[next(marks).point, phase] for phase, marks in runs]


def _holder(allocation: Allocation) -> Result:
    return {
        "bytes": allocation.bytes,
        "category": allocation.category,
        "shape": allocation.shape,
        "dtype": allocation.dtype,
        "place": allocation.place,
        "phase": allocation.phase,
        "line": allocation.line,
    }
