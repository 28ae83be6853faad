"""What a report draws of a cell beside its numbers: a step's memory, the chain, the frontier.

    timeline    the step's memory over time, at a few hundred of its points, and the largest tensors
                at its peak
    chain       names, blocks and saved bytes of the steps, over which a plan is drawn
    frontier    predicted peak and time of the best plans and of the classic schemes, if asked for

They are read after everything is measured and change none of it. What fails costs the cell nothing:
it stands under "missing" with the reason.
"""

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from zoo.api.plan import planner_for
from zoo.harness.cells import Cell
from zoo.harness.data import Batch
from zoo.harness.training import Training
from zoo.planner.plan import thinned
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
    readers: dict[str, Callable[[], Result]] = {"timeline": lambda: {"timeline": summary(timeline)}}
    if cell.kind == "baseline":
        readers["chain"] = lambda: _chain(training, cell, batch)
    drawn: Result = {"missing": {}}
    for name, read in readers.items():
        try:
            drawn |= read()
        except Exception as error:
            drawn["missing"][name] = " ".join(f"{type(error).__name__}: {error}".split())
    return drawn


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


def _chain(training: Training, cell: Cell, batch: Batch) -> Result:
    """Returns the chain of a baseline, and its frontier if that is wanted."""
    optimizer = training.optimizer
    optimizer.zero_grad(set_to_none=True)
    with training.autocast:
        planner = planner_for(
            training.model,
            batch.arguments(cell.model.data),
            optimizer=lambda parameters: type(optimizer)(parameters, **optimizer.defaults),
            loss=training.outer_loss(batch),
            # the rates of any device where no time is wanted: nothing is run
            device=None if cell.frontier else "cpu",
        )
        steps = slice(planner.steps)
        chain = {
            "names": planner.names,
            "blocks": planner.costs.blocks[steps],
            "saved": planner.costs.newly_saved()[steps],
        }
        curve = {"frontier": _frontier(planner.frontier())} if cell.frontier else {}
    return {"chain": chain, **curve}


def _frontier(curve: Frontier) -> Result:
    optimal = [[point.peak, point.time_ratio] for point in curve.optimal]
    return {
        "optimal": thinned(optimal, PLANS),
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
