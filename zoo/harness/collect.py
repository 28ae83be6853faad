"""What a report draws of a cell beside its numbers: a step's memory, the chain, the frontier.

    timeline    the step's memory over time, at a few hundred of its points, what allocated last at
                each of them, and the largest tensors at its peak
    chain       names, blocks, saved bytes and source lines of the steps, over which a plan is drawn
    frontier    predicted peak and time of the best plans and of the classic schemes, if asked for

They are read after everything is measured and change none of it. What fails costs the cell nothing:
it stands under "missing" with the reason.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
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
        readers["chain"] = lambda: _chain(training, cell, batch, timeline)
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
        "places": _places(timeline, chosen),
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


def _places(timeline: Timeline, points: Sequence[int]) -> Result:
    """Returns step, module and line of the latest allocation at each point, each of them once."""
    made = sorted((a.start, (a.step, a.module, a.line)) for a in timeline.allocations if a.start)
    starts = [start for start, _ in made]
    # where the step begins nothing of it is allocated
    latest = [bisect_right(starts, point) for point in points]
    places = [made[number - 1][1] if number else ("", "", "") for number in latest]
    names = list(dict.fromkeys(places))
    numbers = {place: number for number, place in enumerate(names)}
    return {"names": [list(place) for place in names], "at": [numbers[place] for place in places]}


def _lines(names: Sequence[str], timeline: Timeline) -> dict[str, list[int]]:
    """Returns the numbers of the steps whose first allocation is at a line, by lines."""
    lines = {a.step: a.line for a in reversed(timeline.allocations) if a.phase == "forward"}
    found: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        if line := lines.get(name):
            found.setdefault(line, []).append(number)
    return found


def _chain(training: Training, cell: Cell, batch: Batch, timeline: Timeline) -> Result:
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
            "lines": _lines(planner.names, timeline),
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
