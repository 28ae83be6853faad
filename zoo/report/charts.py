"""The charts of a report as data: axes, layers, texts, and colors by their role in `page.css`.

`matplotlib_charts.py` draws them into files, `svg_charts.py` for the page.

    memory       bytes over a training step: all runs, their peaks marked
    categories   bytes of one run, stacked by category
    plan         what each step saves, kept or recomputed; the segments below
    frontier     least time for each peak, the classic schemes, what was measured

A training step with a plan has more allocations than the baseline's, since its backward recomputes
forwards. So that both share an axis, each phase has a fixed width, over which its events are spread
evenly:

    events     0 ........ 900 ......... 1500 .. 1560      baseline
               0 ... 700 .................. 2100 2160     with a plan
    axis       forward   backward           optimizer
               0         1                  3         3.4
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import numpy as np

from zoo.planner.plan import Plan
from zoo.report.escaping import visible
from zoo.report.rows import MISSING, VARIANTS
from zoo.report.step_axis import AxisLabel, StepAxis, segments, step_axis
from zoo.units import format_bytes, unit_of

Timeline = Mapping[str, Any]

EDGES = (0.0, 1.0, 3.0, 3.4)
PHASES = tuple(map(AxisLabel, ("forward", "backward", "optimizer"), EDGES[:-1], EDGES[1:]))
RESIDENT = ("parameters", "buffers", "optimizer state", "inputs", "gradients")
# in the order in which they are stacked, from below, and what they mean
MEANINGS = {
    "parameters": "the weights",
    "buffers": "tensors of the model that are not trained, such as running means",
    "optimizer state": "tensors that the optimizer keeps from step to step, such as momentum",
    "inputs": "the batch and its targets",
    "gradients": "of parameters, from when the backward makes them until they are freed",
    "saved activations": "results of the forward that are kept for the backward",
    "recomputed": "activations that the backward has recomputed, until it has used them",
    "temporaries": "all other tensors: allocated and freed on the way",
    "kernel workspace": "memory that a kernel allocates internally and that belongs to no tensor",
}
CATEGORIES = tuple(MEANINGS)
# by how often a step runs in a training step: color and words; 4 stands for 4 and more
RUNS = {
    1: ("kept", "kept"),
    2: ("recomputed-once", "recomputed"),
    3: ("recomputed-twice", "recomputed twice"),
    4: ("recomputed-often", "recomputed more often"),
}
# the bars below the axis
SEGMENTS = "segments: recomputed in one go, nested ones lower"
# shapes of marks: matplotlib's markers, and characters for a legend
SHAPES = {
    **{"circle": ("o", "●"), "square": ("s", "■"), "triangle": ("^", "▲"), "diamond": ("D", "◆")},
    **{"inverted_triangle": ("v", "▼"), "plus": ("P", "✚"), "ring": ("", "◯")},
}
# a wider range of memory gets a logarithmic axis; a slower plan is drawn at the upper edge
WIDE, SLOW = 8, 2.0
# the distance of bars, in steps
GAP = 0.06


@dataclass(frozen=True)
class Axis:
    """The limits of an axis; `labels` replace its ticks, `numbers` are a smaller second row."""

    start: float
    stop: float
    title: str = ""
    format: str = "%g"
    log: bool = False
    labels: Sequence[AxisLabel] = ()
    numbers: Sequence[AxisLabel] = ()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Shapes in one color; `tips` are columns of text that hovering shows."""

    color: str
    name: str = ""
    tips: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bars(Layer):
    """Rectangles: (left, right, bottom, top)."""

    boxes: Sequence[tuple[float, ...]]
    behind: bool = False


@dataclass(frozen=True, kw_only=True)
class StepCurve(Layer):
    """A step curve, constant up to the next x; `alpha` is the opacity of the area down to `low`."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    alpha: float = 0.0
    width: float = 2.0
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Marks(Layer):
    """Marks; `text` is written beside the first, except on the page if hovering shows `tips`.

    `group` is their name in the legend of a picture that shows the texts.
    """

    spots: Sequence[tuple[float, float]]
    shape: str = "circle"
    size: float = 8
    text: str = ""
    group: str = ""
    below: bool = False


@dataclass(frozen=True)
class Chart:
    """Layers, the first at the back; layers with a name are in the legend."""

    x: Axis
    y: Axis
    layers: Sequence[Layer]


def phase_starts(timeline: Timeline) -> tuple[int, int, int, int]:
    """Returns the events at which forward, backward and optimizer begin, and the last event."""
    length, phases = timeline["length"], timeline["phases"]
    starts = (start for start, phase in phases if phase in ("backward", "recompute"))
    backward = next(starts, length)
    after = (start for start, phase in phases if phase == "optimizer" and start >= backward)
    return 0, backward, next(after, length), length


def axis_positions(timeline: Timeline, events: Sequence[float]) -> list[float]:
    """Maps events of a recorded timeline to the axis of a training step."""
    *starts, end = phase_starts(timeline)
    # without an optimizer the step ends where the optimizer would begin
    on_axis = np.interp(events, [*starts, max(end, starts[-1] + 1)], EDGES)
    return [round(position, 5) for position in on_axis.tolist()]


def recomputations(timeline: Timeline) -> list[list[float]]:
    """Returns the ranges of recomputation on the axis of a training step."""
    marks = [*timeline["phases"], [timeline["length"], ""]]
    return [
        axis_positions(timeline, (start, stop))
        for (start, phase), (stop, _) in pairwise(marks)
        if phase == "recompute" and stop > start
    ]


def totals(timeline: Timeline, without: Sequence[str] = ()) -> list[int]:
    """Returns the bytes of all categories but `without`, at each point that is drawn."""
    shown = [sizes for name, sizes in timeline["bytes"].items() if name not in without]
    return [sum(sizes) for sizes in zip(*shown, strict=True)] or [0] * len(timeline["points"])


def phase_peaks(timelines: Mapping[str, Timeline]) -> dict[str, dict[str, int]]:
    """Returns each run's peak in each phase, among the points that are drawn."""
    order = ("before", "forward", "recompute", "backward", "optimizer")
    peaks: dict[str, dict[str, int]] = {phase: {} for phase in order}
    for run, timeline in timelines.items():
        starts = [start for start, _ in timeline["phases"]]
        names = ["before", *(phase for _, phase in timeline["phases"])]
        for point, size in zip(timeline["points"], totals(timeline), strict=True):
            sizes = peaks.setdefault(names[bisect_right(starts, point)], {})
            sizes[run] = max(sizes.get(run, 0), size)
    return {phase: sizes for phase, sizes in peaks.items() if sizes}


def color_of(name: str) -> str:
    """Returns the role of the color of a variant or a category."""
    return name.replace("_", "-").replace(" ", "-")


def memory_chart(timelines: Mapping[str, Timeline], *, without: Sequence[str] = ()) -> Chart:
    """Shows the bytes of runs over a training step, without some categories, peaks marked."""
    shown = {name: totals(timeline, without) for name, timeline in timelines.items()}
    x, y, divisor, layers = _step(max(map(max, shown.values())))
    if spans := recomputations(timelines.get("checkpointed", {"phases": [], "length": 0})):
        boxes = [(*span, y.start, y.stop) for span in spans]
        layers.append(Bars(color="in-recompute", name="recomputation", boxes=boxes, behind=True))
    peaks: list[Marks] = []
    for kind, sizes in shown.items():
        ends, tips = _points(timelines[kind])
        heights, name, color = [*sizes, sizes[-1]], VARIANTS.get(kind, kind), color_of(kind)
        # no more for several runs, whose tips are side by side
        tips = {name: [*map(format_bytes, heights)], "event": tips["event"]}
        curve: Any = {"x": ends, "y": _scaled(heights, divisor), "low": [0.0] * len(ends)}
        layers.append(StepCurve(color=color, name=name, alpha=0.1, tips=tips, **curve))
        most = max(sizes)
        peak_x = ends[sizes.index(most)]
        # the last of several runs is the lowest; its text goes below, off the others'
        peaks.append(_peak(color, peak_x, most, divisor, below=len(peaks) == len(shown) - 1 > 0))
    return Chart(x, y, [*layers, *peaks])


def categories_chart(timeline: Timeline, highest: int) -> Chart:
    """Shows the categories of one run, stacked, on an axis up to `highest` bytes."""
    x, y, divisor, layers = _step(max([highest, *timeline.get("host", ())]))
    ends, tips = _points(timeline)
    top = [0] * len(ends)
    for name in (name for name in CATEGORIES if name in timeline["bytes"]):
        sizes = [*timeline["bytes"][name], timeline["bytes"][name][-1]]
        low, top = top, [below + size for below, size in zip(top, sizes, strict=True)]
        area: Any = {"x": ends, "y": _scaled(top, divisor), "low": _scaled(low, divisor)}
        layers.append(StepCurve(color=color_of(name), name=name, alpha=1.0, width=0, **area))
        # hovering lists the areas in the order of the stack, the topmost first
        tips = {name: [*map(format_bytes, sizes)], **tips}
    (peak_x,) = axis_positions(timeline, [timeline["peak"]["point"]])
    outline = StepCurve(color="faint", x=ends, y=_scaled(top, divisor), width=1, tips=tips)
    if "host" in timeline:
        line = _scaled([*timeline["host"], timeline["host"][-1]], divisor)
        layers.append(StepCurve(color="ink", name="on the host", x=ends, y=line, dashed=True))
    return Chart(x, y, [*layers, outline, _peak("ink", peak_x, timeline["peak"]["bytes"], divisor)])


def _step(highest: int) -> tuple[Axis, Axis, int, list[Layer]]:
    """Returns the axes of a training step, the divisor of bytes, and the backward's shade."""
    divisor, unit = unit_of(highest)
    # room for the text above the peak
    y = Axis(0, 1.16 * highest / divisor or 1, f"allocated ({unit})")
    box = EDGES[1], EDGES[2], y.start, y.stop
    backward = Bars(color="in-backward", name="backward", boxes=[box], behind=True)
    return Axis(EDGES[0], EDGES[-1], labels=PHASES), y, divisor, [backward]


def _points(timeline: Timeline) -> tuple[list[float], dict[str, list[str]]]:
    """Returns the x positions and the tips of points, and of the end, which has nothing new.

    Module and line are those of the latest allocation.
    """
    tips = {"event": [*map(str, [*timeline["points"], timeline["length"]])]}
    if "places" in timeline:
        names, at = (timeline["places"][key] for key in ("names", "at"))
        for kind, column in enumerate(("module", "line")):
            if any(texts := [visible(names[number][kind]) for number in at]):
                tips[column] = [text or MISSING for text in (*texts, texts[-1])]
    return [*axis_positions(timeline, timeline["points"]), EDGES[-1]], tips


def _peak(color: str, x: float, size: int, divisor: int, below: bool = False) -> Marks:
    text = f"peak {format_bytes(size)}"
    return Marks(color=color, spots=[(x, size / divisor)], text=text, below=below)


def plan_chart(plan: Plan, steps: Mapping[str, Any]) -> Chart:
    """Shows the bytes that each step saves, colored by how often it runs, and the segments below.

    `steps` holds "names", "blocks" (their numbers) and "saved" (bytes), an entry for each step, and
    "on_host" (bytes that are offloaded, of what a step saves or a segment starts from) if there are
    any.
    """
    names, saved, lines = [*map(visible, steps["names"])], steps["saved"], lines_of(steps)
    axis, depth, on_host = step_axis(names, steps["blocks"]), plan.depth(), steps.get("on_host")
    runs = [min(count, len(RUNS)) for count in plan.runs()]
    # from which segments start, beside what their steps save
    beside = [size * (count > 1) for size, count in zip(on_host or saved, runs, strict=True)]
    both = [*map(sum, zip(saved, beside, strict=True))] if on_host else saved
    most = max((sum(both[step] for step in column) for column in axis.columns), default=0)
    divisor, unit = unit_of(most)
    height = most / divisor or 1.0
    tops = [0] * len(axis.columns)
    layers = []
    for count in sorted(set(runs)):
        color, words = RUNS[count]
        boxes, tips = [], defaultdict[str, list[str]](list)
        for position, column in enumerate(axis.columns):
            if part := [step for step in column if runs[step] == count]:
                low, size = tops[position], sum(saved[step] for step in part)
                tops[position] += size
                boxes.append((*_sides(column, axis, GAP), *_scaled((low, low + size), divisor)))
                tips["step"].append(spoken(part, names))
                tips["saves"].append(format_bytes(size))
                tips["is"].append(words)
                if any(lines):
                    tips["line"].append(lines[part[0]] or MISSING)
        number = runs.count(count)
        name = f"{words}: {number} step{'s' * (number != 1)}"
        layers.append(Bars(color=color, name=name, boxes=boxes, tips=tips))
    if on_host:
        layers.append(_host_bars(on_host, beside, tops, axis, divisor))
    # rows below zero: the segments within 0, 1, ... other segments
    thickness = height * min(0.05, 0.4 / max(depth, 1))
    for level in range(depth):
        row = -(level + 1.35) * thickness, -(level + 0.75) * thickness
        spans = [span for span, around in segments(plan) if around == level]
        told = {
            "segment of steps": [f"{span[0]} to {span[-1]}" for span in spans],
            "modules": [spoken(span, names) for span in spans],
            "depth": [str(level + 1)] * len(spans),
        }
        boxes = [(*_sides(span, axis, 2 * GAP), *row) for span in spans]
        # colors are for how often a step runs
        name = "" if level else SEGMENTS
        layers.append(Bars(color="faint", name=name, boxes=boxes, tips=told))
    entry = "step" if len(axis.columns) == len(names) else "block"
    title = f"saved by each {entry} ({unit})"
    return Chart(
        Axis(0, axis.edges[-1], labels=axis.stages, numbers=axis.numbers),
        Axis(-(depth + 0.8) * thickness, 1.05 * height, title),
        layers,
    )


def _host_bars(
    on_host: Sequence[int],
    beside: Sequence[int],
    tops: Sequence[int],
    axis: StepAxis,
    divisor: int,
) -> Bars:
    """Returns the bytes on the host: of kept steps as a part of their bars, others on top."""
    boxes, sizes = [], []
    for top, column in zip(tops, axis.columns, strict=True):
        if size := sum(on_host[step] for step in column):
            high = top + sum(beside[step] for step in column)
            boxes.append(
                (*_sides(column, axis, GAP), *_scaled((max(0, high - size), high), divisor))
            )
            sizes.append(format_bytes(size))
    name = f"on the host: {format_bytes(sum(on_host))}"
    return Bars(color="on-host", name=name, boxes=boxes, tips={"on the host": sizes})


def frontier_chart(
    frontier: Mapping[str, Any], measured: Mapping[str, tuple[int, float]] | None = None
) -> Chart:
    """Shows the least time for each peak, the classic schemes, and measured runs by name.

    `frontier` holds pairs of peak bytes and time ratio: "optimal", a list by rising peak, and
    "schemes", by name; and the bytes of "baseline" and "lower_bound".
    """
    curve, whole, bound = frontier["optimal"], frontier["baseline"], frontier["lower_bound"]
    measured = measured or {}
    schemes = zip(frontier["schemes"].items(), cycle([*SHAPES][1:-1]), strict=False)
    marks = [
        ("best plan", curve, "kept", "circle", 5),
        ("baseline", [(whole, 1.0)], "ink", "circle", 9),
        ("least memory", curve[:1], "kept", "circle", 9),
        *((visible(name), [spot], "scheme", shape, 9) for (name, spot), shape in schemes),
        *((f"measured: {run}", [spot], run, "ring", 13) for run, spot in measured.items()),
    ]
    peaks, times = zip(*(spot for _, spots, *_ in marks for spot in spots), strict=True)
    divisor, unit = unit_of(whole)
    title = f"{'' if measured else 'predicted '}peak of a training step ({unit})"
    x = _memory_axis(min(bound, *peaks) / divisor, max(peaks) / divisor, title)
    # the best plans may be cut off; all others are in view
    cut = max([SLOW, *(1.1 * time for time in times[len(curve) + 2 :])])
    least, most = min(times), min(cut, max(times))
    height = max(most - least, 0.02)
    low, high = least - 0.08 * height, least + 1.15 * height
    edge = high - 0.03 * (high - low)
    floor = bound / divisor
    stairs = [*curve, (whole, curve[-1][1]), (whole, 1.0)]
    stair_x, stair_y = _scaled((peak for peak, _ in stairs), divisor), [time for _, time in stairs]
    below = [(x.start, floor, low, high)]
    layers: list[Layer] = [
        Bars(color="below", name="below any plan", behind=True, boxes=below),
        StepCurve(color="faint", x=[floor] * 2, y=[low, high], width=1.2, dashed=True),
        StepCurve(color="baseline", x=[x.start, x.stop], y=[1, 1], width=1.2),
        StepCurve(color="kept", name="least time for each budget", x=stair_x, y=stair_y, width=2.4),
    ]
    for name, spots, color, shape, size in marks:
        peak, time = spots[0]
        # at ×1 and ×1 numbers say nothing, and for the best plans they are too many
        ratios = f"{name}\n×{peak / max(whole, 1):.2f} memory, ×{time:.2f} time"
        text = {"best plan": "", "baseline": name}.get(name, ratios)
        # a mark that is too high is at the upper edge; that of the least memory points up
        is_cut = name == "least memory" and time > edge
        cut_spots = [(round(p / divisor, 4), min(round(t, 5), edge)) for p, t in spots]
        tips = {
            "plan": [name] * len(spots),
            "peak": [format_bytes(peak) for peak, _ in spots],
            "time": [f"×{time:.3f}" for _, time in spots],
        }
        look: Any = {"color": color, "shape": "triangle" if is_cut else shape, "size": size}
        group = "classic schemes" if color == "scheme" else ""
        layers.append(Marks(name=name, text=text, group=group, spots=cut_spots, tips=tips, **look))
    return Chart(x, Axis(low, high, "time; the baseline is ×1", "×%.2f"), layers)


def lines_of(steps: Mapping[str, Any]) -> list[str]:
    """Returns the "file:line" of each step; "" if unknown."""
    lines = {step: line for line, numbers in steps.get("lines", {}).items() for step in numbers}
    return [visible(lines.get(step, "")) for step in range(len(steps["names"]))]


def spoken(part: Sequence[int], names: Sequence[str]) -> str:
    """Names a step, or the first and last of several in a row."""
    return names[part[0]] if len(part) == 1 else f"{names[part[0]]} to {names[part[-1]]}"


def _scaled(sizes: Iterable[int], divisor: int) -> list[float]:
    return [round(size / divisor, 4) for size in sizes]


def _sides(span: range, axis: StepAxis, gap: float) -> tuple[float, float]:
    """Returns the left and right edges of the bar over some steps, with a gap to the next."""
    left, right = axis.edges[span.start], axis.edges[span.stop]
    gap = min(gap, gap * (right - left))
    return round(left + gap, 5), round(right - gap, 5)


def _memory_axis(left: float, right: float, title: str) -> Axis:
    """Returns an axis with room for names, more of it on the right."""
    if right > WIDE * left > 0:
        ratio = right / left
        return Axis(left / ratio**0.08, right * ratio**0.16, title, log=True)
    width = right - left or right
    return Axis(left - 0.08 * width, right + 0.16 * width, title)
