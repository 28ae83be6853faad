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

from zoo.api.plan import planner_for
from zoo.harness.cells import Cell
from zoo.harness.data import Batch
from zoo.harness.training import Training
from zoo.policy.report import Frontier
from zoo.profiling.timeline import CATEGORIES, RESIDENT, Timeline

Result = dict[str, Any]

# a curve drawn over a page's width shows no more
POINTS = 240
PLANS = 64
HOLDERS = 10
HOLDER_FIELDS = ("bytes", "category", "shape", "dtype", "place", "phase", "line")


def details(training: Training, cell: Cell, batch: Batch, timeline: Timeline) -> Result:
    """Returns what a report draws of a model that has trained; `timeline` is that of a step."""
    wanted: dict[str, Callable[[], Result]] = {"timeline": lambda: {"timeline": summary(timeline)}}
    if cell.kind == "baseline":
        wanted["chain"] = lambda: _chain(training, cell, batch)
    found: Result = {"missing": {}}
    for name, read in wanted.items():
        try:
            found |= read()
        except Exception as error:
            found["missing"][name] = " ".join(f"{type(error).__name__}: {error}".split())
    return found


def summary(timeline: Timeline, points: int = POINTS) -> Result:
    """Returns a timeline of about so many of its points, the peaks among them."""
    curves = {name: curve for name, curve in timeline.curves().items() if any(curve)}
    total = timeline.total()
    activations = timeline.total(name for name in CATEGORIES if name not in RESIDENT)
    peak = timeline.peak_point
    chosen = sorted({peak, activations.index(max(activations)), *_extremes(total, points)})
    phases = groupby(timeline.phases, key=lambda mark: mark.phase)
    return {
        "length": timeline.length,
        "allocator": timeline.allocator,
        "points": chosen,
        "bytes": {name: [curve[point] for point in chosen] for name, curve in curves.items()},
        "phases": [[next(marks).point, phase] for phase, marks in phases],
        "peak": {
            "point": peak,
            "bytes": timeline.peak,
            "phase": timeline.phase_at(peak),
            "categories": {name: curve[peak] for name, curve in curves.items()},
        },
        "holders": [
            {name: getattr(allocation, name) for name in HOLDER_FIELDS}
            for allocation in timeline.holders(HOLDERS)
        ],
    }


def thinned(curve: list[list[float]], most: int = PLANS) -> list[list[float]]:
    """Returns at most so many plans of a curve, evenly, its ends among them."""
    places = torch.linspace(0, len(curve) - 1, min(most, len(curve))).round().long()
    return [curve[place] for place in places.tolist()]


def _chain(training: Training, cell: Cell, batch: Batch) -> Result:
    """Returns the chain of a baseline, and its frontier if that is wanted."""
    optimizer = training.optimizer
    optimizer.zero_grad(set_to_none=True)
    with training.autocast:
        prospect = planner_for(
            training.model,
            batch.arguments(cell.model.data),
            optimizer=lambda parameters: type(optimizer)(parameters, **optimizer.defaults),
            loss=training.outer_loss(batch),
            # the rates of a device, any, where no time is wanted: nothing is run
            device=None if cell.frontier else "cpu",
        )
        steps = slice(prospect.steps)
        chain = {
            "names": prospect.names,
            "blocks": prospect.costs.blocks[steps],
            "saved": prospect.costs.newly_saved()[steps],
        }
        curve = {"frontier": _frontier(prospect.frontier())} if cell.frontier else {}
    return {"chain": chain, **curve}


def _frontier(curve: Frontier) -> Result:
    return {
        "optimal": thinned([[point.peak, point.time_ratio] for point in curve.optimal]),
        "schemes": {point.name: [point.peak, point.time_ratio] for point in curve.schemes},
        "baseline": curve.baseline.peak,
        "lower_bound": curve.lower_bound,
    }


def _extremes(total: list[int], points: int) -> Iterator[int]:
    """Yields the points of most and of fewest bytes of each stretch, so that both are drawn."""
    stretch = max(math.ceil(2 * len(total) / points), 1)
    for start in range(0, len(total), stretch):
        part = range(start, min(start + stretch, len(total)))
        yield max(part, key=total.__getitem__)
        yield min(part, key=total.__getitem__)
    yield len(total) - 1
