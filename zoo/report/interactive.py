"""The interactive pictures of a report's page, from the records of its results.

memory        bytes over a step: the runs on one axis, their peaks marked
categories    one run's bytes, stacked by what they are for
plan          what each step saves, kept or run again; the segments below
frontier      least time for each peak, the classic schemes, what was measured
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from bokeh.models import (
    ColumnDataSource,
    LogTicker,
    PrintfTickFormatter,
)
from bokeh.models.annotations import BoxAnnotation, Span
from bokeh.transform import stack

from zoo.plan import Plan
from zoo.report.canvas import (
    Picture,
    Unit,
    as_json,
    blank,
    blank_step,
    follow,
    hover,
    label,
    label_bytes,
    mark,
    paint,
)
from zoo.report.chain_axis import ChainAxis, chain_axis, segments
from zoo.report.step_axis import EDGES, recomputes, step_axis, totals
from zoo.report.words import OFTEN
from zoo.units import format_bytes

Timeline = Mapping[str, Any]
Spot = tuple[int, float]

RESIDENT = ("parameters", "buffers", "optimizer state", "inputs", "gradients")
# in the order in which they are stacked, from below
CATEGORIES = (*RESIDENT, "saved activations", "recomputed", "temporaries", "unseen")
# the same marks stand in the page's legend
MARKS = {"square": "■", "triangle": "▲", "diamond": "◆", "inverted_triangle": "▼", "plus": "✚"}
RUNS = {1: "kept", 2: "again", 3: "again-twice", 4: "again-often"}
# a longer range of memory is drawn on a logarithmic axis, a slower plan is left to the table
WIDE, SLOW = 8, 1.5
# between bars, in steps
GAP = 0.06


def memory_picture(timelines: Mapping[str, Timeline], *, without: Sequence[str] = ()) -> Picture:
    """Draws the bytes of runs over their step, less some categories, with the peaks marked."""
    shown = {name: totals(timeline, without) for name, timeline in timelines.items()}
    highest = max(map(max, shown.values()))
    unit = Unit.of(highest)
    plot = blank_step(highest, 300)
    if "checkpointed" in timelines:
        _shade_recomputes(plot, timelines["checkpointed"])
    for name, sizes in shown.items():
        places = _places(timelines[name])
        data = {"place": places, "size": unit.of_bytes([*sizes, sizes[-1]])}
        source = ColumnDataSource(data | {"event": _events(timelines[name])})
        area = plot.varea_step("place", 0, "size", source=source, step_mode="after", alpha=0.1)
        paint(area.glyph, fill_color=name)
        line = plot.step("place", "size", source=source, mode="after", line_width=2, name=name)
        paint(line.glyph, line_color=name)
        follow(plot, source, "size", [(name, f"@size{unit.format}"), ("event", "@event")])
    for name, sizes in shown.items():
        most = max(sizes)
        spot = _places(timelines[name])[sizes.index(most)], most / unit.bytes
        mark(plot, name, spot, f"peak {format_bytes(most)}", below=name == "checkpointed")
    return as_json(plot)


def categories_picture(timeline: Timeline, highest: int) -> Picture:
    """Draws one run's categories, stacked, on an axis up to `highest` bytes."""
    unit, plot = Unit.of(highest), blank_step(highest, 280)
    names = [name for name in CATEGORIES if name in timeline["bytes"]]
    sizes = {name: timeline["bytes"][name] for name in names}
    data = {name: unit.of_bytes([*values, values[-1]]) for name, values in sizes.items()}
    source = ColumnDataSource({"place": _places(timeline), "event": _events(timeline)} | data)
    for number, name in enumerate(names):
        area = plot.varea_step(
            "place", stack(*names[:number]), stack(*names[: number + 1]), source=source,
            step_mode="after", name=name,
        )  # fmt: skip
        paint(area.glyph, fill_color=name.replace(" ", "-"))
    top = plot.step("place", stack(*names), source=source, mode="after", line_width=1, alpha=0.5)
    paint(top.glyph, line_color="ink")
    tips = [(name, f"@{{{name}}}{unit.format}") for name in reversed(names)]
    follow(plot, source, stack(*names), [*tips, ("event", "@event")])
    peak = timeline["peak"]
    spot = step_axis(timeline).place(peak["point"]), peak["bytes"] / unit.bytes
    mark(plot, "ink", spot, f"peak {format_bytes(peak['bytes'])}", below=False)
    return as_json(plot)


def plan_picture(chain: Mapping[str, Any], plan: Plan) -> Picture:
    """Draws what each step saves, colored by how often it runs, and the plan's segments below."""
    axis = chain_axis(chain["names"], chain["blocks"])
    highest = max((sum(chain["saved"][step] for step in part) for part in axis.columns), default=0)
    unit = Unit.of(highest)
    top, depth = highest / unit.bytes or 1.0, plan.depth()
    thickness = top * min(0.06, 0.4 / max(depth, 1))
    low = -(depth + 0.7) * thickness
    plot = blank(260, (0, axis.edges[-1]), (low, 1.05 * top))
    _draw_steps(plot, chain, plan, axis, unit)
    _draw_segments(plot, plan, axis.edges, thickness)
    label_bytes(plot.yaxis[0], unit)
    plot.yaxis.bounds = (0, 1.05 * top)
    label(plot.xaxis[0], {part.middle: part.text for part in axis.stages})
    plot.xgrid.visible = False
    return as_json(plot)


def frontier_picture(frontier: Mapping[str, Any], measured: Mapping[str, Spot]) -> Picture:
    """Draws the least time for each peak, the classic schemes, and what was measured."""
    curve, schemes, whole = frontier["optimal"], frontier["schemes"], frontier["baseline"]
    unit = Unit.of(whole)
    plot = _blank_frontier(frontier, measured, unit)
    _draw_bounds(plot, frontier["lower_bound"] / unit.bytes)
    last = [whole, curve[-1][1]]
    source = _spots([*curve, last], unit)
    line = plot.step("peak", "time", source=source, mode="after", line_width=2.4, name="optimal")
    paint(line.glyph, line_color="kept")
    dots = plot.scatter("peak", "time", source=source, size=5, name="plans")
    paint(dots.glyph, fill_color="kept", line_color="kept")
    _name(plot, dots, "best plan", unit)
    for (name, spot), shape in zip(schemes.items(), cycle(MARKS), strict=False):
        source = _spots([spot], unit)
        drawn = plot.scatter("peak", "time", source=source, marker=shape, size=12, name=name)
        paint(drawn.glyph, fill_color="scheme", line_color="card")
        _name(plot, drawn, name, unit)
    for name, spot in measured.items():
        source = _spots([spot], unit)
        ring = plot.scatter("peak", "time", source=source, size=13, line_width=3, fill_alpha=0)
        paint(ring.glyph, line_color=name)
        _name(plot, ring, f"measured: {name}", unit)
    return as_json(plot)


def _places(timeline: Timeline) -> list[float]:
    """Returns where the points lie, and the end of the step, up to which nothing changes."""
    axis = step_axis(timeline)
    return [*map(axis.place, timeline["points"]), EDGES[-1]]


def _events(timeline: Timeline) -> list[int]:
    return [*timeline["points"], timeline["length"]]


def _shade_recomputes(plot: Any, timeline: Timeline) -> None:
    axis = step_axis(timeline)
    spans = [(axis.place(start), axis.place(stop)) for start, stop in recomputes(timeline)]
    data = {"left": [start for start, _ in spans], "right": [stop for _, stop in spans]}
    bands = plot.quad(
        "left", "right", bottom=0, top=plot.y_range.end, source=ColumnDataSource(data),
        line_color=None, level="underlay", name="recompute",
    )  # fmt: skip
    paint(bands.glyph, fill_color="in-recompute")


def _draw_steps(
    plot: Any, chain: Mapping[str, Any], plan: Plan, axis: ChainAxis, unit: Unit
) -> None:
    """Draws a bar per column, parts that run equally often in a color of their own."""
    runs = [min(count, 4) for count in plan.runs()]
    bottom = [0] * len(axis.columns)
    for count in sorted(set(runs)):
        parts = [[step for step in column if runs[step] == count] for column in axis.columns]
        sizes = [sum(chain["saved"][step] for step in part) for part in parts]
        tops = [low + size for low, size in zip(bottom, sizes, strict=True)]
        bars = [place for place, part in enumerate(parts) if part]
        data = {
            **_sides([axis.columns[place] for place in bars], axis.edges, GAP),
            "bottom": unit.of_bytes(bottom[place] for place in bars),
            "top": unit.of_bytes(tops[place] for place in bars),
            "size": [format_bytes(sizes[place]) for place in bars],
            "step": [spoken(parts[place], chain["names"]) for place in bars],
        }
        drawn = plot.quad(source=ColumnDataSource(data), name=OFTEN[count], line_color=None)
        paint(drawn.glyph, fill_color=RUNS[count])
        hover(plot, drawn, [("step", "@step"), ("saves", "@size"), ("is", OFTEN[count])])
        bottom = tops


def _draw_segments(plot: Any, plan: Plan, edges: Sequence[float], thickness: float) -> None:
    found = list(segments(plan))
    for level in sorted({level for _, _, level in found}):
        spans = [range(start, stop) for start, stop, depth in found if depth == level]
        steps = [f"{span.start} to {span.stop - 1}" for span in spans]
        data = {**_sides(spans, edges, 2 * GAP), "steps": steps}
        top, bottom = -(level + 0.75) * thickness, -(level + 1.35) * thickness
        bars = plot.quad(
            "left", "right", top=top, bottom=bottom, source=ColumnDataSource(data), line_color=None,
            name=f"segments {level + 1}",
        )  # fmt: skip
        paint(bars.glyph, fill_color=RUNS[min(level + 2, 4)])
        hover(plot, bars, [("segment of steps", "@steps"), ("depth", str(level + 1))])


def _sides(spans: Sequence[range], edges: Sequence[float], gap: float) -> dict[str, list[float]]:
    """Returns where bars over ranges of steps begin and end, a little apart from each other."""
    pairs = [(edges[span.start], edges[span.stop]) for span in spans]
    gaps = [min(gap, gap * (right - left)) for left, right in pairs]
    return {
        "left": [round(left + gap, 5) for (left, _), gap in zip(pairs, gaps, strict=True)],
        "right": [round(right - gap, 5) for (_, right), gap in zip(pairs, gaps, strict=True)],
    }


def _blank_frontier(frontier: Mapping[str, Any], measured: Mapping[str, Spot], unit: Unit) -> Any:
    others = [*frontier["schemes"].values(), *measured.values()]
    spots = [*frontier["optimal"], *others, (frontier["baseline"], 1.0)]
    left = min(frontier["lower_bound"], *(peak for peak, _ in spots)) / unit.bytes
    right = max(peak for peak, _ in spots) / unit.bytes
    wide = right > WIDE * left > 0
    across = (
        (left * (left / right) ** 0.06, right * (right / left) ** 0.06)
        if wide
        else (left - 0.06 * (right - left or right), right + 0.06 * (right - left or right))
    )
    times = [time for _, time in spots]
    low, cut = min(times), max([SLOW, *(1.1 * time for _, time in others)])
    height = max(min(cut, max(times)) - low, 0.02)
    up = low - 0.08 * height, low + 1.12 * height
    plot = blank(320, across, up, x_axis_type="log" if wide else "linear")
    if wide:
        plot.xaxis.ticker = LogTicker(base=2, num_minor_ticks=0)
    label_bytes(plot.xaxis[0], unit)
    plot.yaxis.formatter = PrintfTickFormatter(format="×%.2f")
    plot.xaxis.axis_label = "peak of a training step"
    plot.yaxis.axis_label = "time; keeping everything is ×1"
    return plot


def _draw_bounds(plot: Any, bound: float) -> None:
    box = BoxAnnotation(right=bound, level="underlay", line_color=None)
    paint(box, fill_color="below")
    edge = Span(location=bound, dimension="height", line_dash="dashed", level="underlay")
    least = Span(location=1, dimension="width", level="underlay")
    paint(edge, line_color="faint")
    paint(least, line_color="faint")
    for part in (box, edge, least):
        plot.add_layout(part)


def _spots(spots: Sequence[Any], unit: Unit) -> ColumnDataSource:
    times = [round(time, 5) for _, time in spots]
    return ColumnDataSource({"peak": unit.of_bytes(peak for peak, _ in spots), "time": times})


def _name(plot: Any, drawn: Any, name: str, unit: Unit) -> None:
    hover(plot, drawn, [("", name), ("peak", f"@peak{unit.format}"), ("time", "×@time{0.000}")])


def spoken(part: Sequence[int], names: Sequence[str]) -> str:
    """Names a step, or the first and last of several in a row."""
    if len(part) < 2:
        return "".join(names[step] for step in part)
    return f"{names[part[0]]} to {names[part[-1]]}"
