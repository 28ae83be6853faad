"""One axis for the training steps of two runs, which allocate unequally often.

A step with a plan has more allocations than one without: its backward recomputes forwards. So each
part of a step gets a width of its own, the same for all runs, and is filled evenly:

    events     0 ........ 900 ......... 1500 .. 1560      without a plan
               0 ... 700 .................. 2100 2160     with one
    axis       forward   backward           optimizer
               0         1                  3         3.4
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

EDGES = (0.0, 1.0, 3.0, 3.4)
PARTS = ("forward", "backward", "optimizer")


class StepAxis(NamedTuple):
    """The events at which forward, backward and optimizer begin and the last one ends."""

    forward: int
    backward: int
    optimizer: int
    end: int

    def place(self, event: float) -> float:
        """Returns where an event lies on the axis."""
        part = min(max(bisect_right(self, event) - 1, 0), 2)
        start, stop = self[part : part + 2]
        left, right = EDGES[part : part + 2]
        return round(left + (right - left) * (event - start) / max(stop - start, 1), 5)


def step_axis(timeline: Mapping[str, Any]) -> StepAxis:
    """Lays out a recorded timeline by its phases."""
    length, phases = timeline["length"], timeline["phases"]
    starts = [start for start, phase in phases if phase in ("backward", "recompute")]
    backward = starts[0] if starts else length
    after = [start for start, phase in phases if phase == "optimizer" and start >= backward]
    return StepAxis(0, backward, after[0] if after else length, length)


def recomputes(timeline: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns where on the axis recomputation begins and ends."""
    place = step_axis(timeline).place
    marks = [*timeline["phases"], [timeline["length"], ""]]
    return [
        (place(start), place(stop))
        for (start, phase), (stop, _) in pairwise(marks)
        if phase == "recompute" and stop > start
    ]


def highest(timeline: Mapping[str, Any]) -> dict[str, int]:
    """Returns the most bytes in each phase, of the points that are drawn."""
    starts = [start for start, _ in timeline["phases"]]
    found: dict[str, int] = {}
    for point, size in zip(timeline["points"], totals(timeline), strict=True):
        number = bisect_right(starts, point) - 1
        phase = timeline["phases"][number][1] if number >= 0 else "before"
        found[phase] = max(found.get(phase, 0), size)
    return found


def totals(timeline: Mapping[str, Any], without: Sequence[str] = ()) -> list[int]:
    """Returns the bytes of all categories but some, at each point that is drawn."""
    kept = [sizes for name, sizes in timeline["bytes"].items() if name not in without]
    return [sum(sizes) for sizes in zip(*kept, strict=True)] or [0] * len(timeline["points"])
