"""What a report draws of a cell beside its numbers: a step's memory, the chain, the frontier.

    timeline    the step's memory over time, at a few hundred of its points, what allocated last at
                each of them, and the largest tensors at its peak
    chain       names, blocks, saved bytes and source lines of the steps, over which a plan is drawn
    frontier    predicted peak and time of the best plans and of the classic schemes, if asked for

They are read after everything is measured and change none of it. What fails costs the cell nothing:
it stands under "missing" with the reason.
"""

from collections.abc import Callable, Sequence
from typing import Any

from zoo.api.plan import planner_for
from zoo.harness.cells import Cell
from zoo.harness.data import Batch
from zoo.harness.training import Training
from zoo.planner.plan import thinned
from zoo.policy.report import Frontier
from zoo.profiling.timeline import Timeline

Result = dict[str, Any]

PLANS = 64


def details(training: Training, cell: Cell, batch: Batch, timeline: Timeline) -> Result:
    """Returns what a report draws of a model that has trained; `timeline` is that of a step."""
    readers: dict[str, Callable[[], Result]] = {
        "timeline": lambda: {"timeline": timeline.summary()}
    }
    if cell.kind == "baseline":
        readers["chain"] = lambda: _chain(training, cell, batch, timeline)
    drawn: Result = {"missing": {}}
    for name, read in readers.items():
        try:
            drawn |= read()
        except Exception as error:
            drawn["missing"][name] = " ".join(f"{type(error).__name__}: {error}".split())
    return drawn


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
