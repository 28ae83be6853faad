"""The interactive pictures of a report's page, as bokeh's own JSON.

They name no color but roles, such as "kept", under a model's `tags`; the page's script paints them
with the style sheet's colors, again when light turns dark. Bytes stay bytes down to the hover, so
that what is shown is what was measured.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from bokeh.embed import json_item
from bokeh.models import (
    AdaptiveTicker,
    BoxAnnotation,
    BoxZoomTool,
    FixedTicker,
    HoverTool,
    Label,
    LogTicker,
    NoOverlap,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure

from zoo.plan import Plan
from zoo.report.chain_axis import chain_axis, segments
from zoo.report.step_axis import EDGES, PARTS, recomputes, step_axis, totals
from zoo.report.words import OFTEN
from zoo.units import format_bytes

Timeline = Mapping[str, Any]
Picture = dict[str, Any]

BYTES = "0.[00] ib"
RESIDENT = ("parameters", "buffers", "optimizer state", "inputs", "gradients")
# the same marks stand in the page's legend
MARKS = {"square": "■", "triangle": "▲", "diamond": "◆", "inverted_triangle": "▼", "plus": "✚"}
RUNS = {1: "kept", 2: "again", 3: "again-twice", 4: "again-often"}
# a longer range of memory is drawn on a logarithmic axis, a slower plan is left to the table
WIDE, SLOW = 8, 2.0


def memory_picture(timelines: Mapping[str, Timeline], activations: bool) -> Picture:
    """Draws the bytes of runs over their step, peaks marked; of activations alone if asked."""
    shown = {
        name: totals(timeline, RESIDENT if activations else ())
        for name, timeline in timelines.items()
    }
    plot = _step_plot(max(map(max, shown.values())), 300)
    if "checkpointed" in timelines:
        _shade(plot, timelines["checkpointed"])
    for name, sizes in shown.items():
        timeline = timelines[name]
        axis = step_axis(timeline)
        places = [axis.place(point) for point in timeline["points"]]
        data = {"place": places, "bytes": sizes, "event": timeline["points"]}
        area = plot.varea_step("place", 0, "bytes", source=data, step_mode="after", fill_alpha=0.14)
        _paint(area.glyph, fill_color=name)
        line = plot.step("place", "bytes", source=data, mode="after", line_width=2, name=name)
        _paint(line.glyph, line_color=name)
        _mark(plot, name, places[sizes.index(max(sizes))], max(sizes))
        tips = [(name, f"@bytes{{{BYTES}}}"), ("event", "@event")]
        plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline"))
    return _item(plot)


def categories_picture(timeline: Timeline, highest: int) -> Picture:
    """Draws one run's categories, stacked, on an axis up to `highest` bytes."""
    plot = _step_plot(highest, 280)
    axis = step_axis(timeline)
    names = list(timeline["bytes"])
    data = {"place": [axis.place(point) for point in timeline["points"]]}
    below = [0] * len(timeline["points"])
    for number, name in enumerate(names):
        data[f"low{number}"] = below
        below = [low + size for low, size in zip(below, timeline["bytes"][name], strict=True)]
    data |= {name: timeline["bytes"][name] for name in names} | {f"low{len(names)}": below}
    source = plot.step("place", f"low{len(names)}", source=data, mode="after", line_width=1)
    _paint(source.glyph, line_color="ink")
    for number, name in enumerate(names):
        area = plot.varea_step(
            "place", f"low{number}", f"low{number + 1}", source=source.data_source,
            step_mode="after", name=name,
        )  # fmt: skip
        _paint(area.glyph, fill_color=name.replace(" ", "-"))
    tips = [(name, f"@{{{name}}}{{{BYTES}}}") for name in reversed(names)]
    tips.append(("in all", f"@low{len(names)}{{{BYTES}}}"))
    plot.add_tools(HoverTool(renderers=[source], tooltips=tips, mode="vline"))
    peak = timeline["peak"]
    _mark(plot, "ink", axis.place(peak["point"]), peak["bytes"])
    return _item(plot)


def plan_picture(chain: Mapping[str, Any], plan: Plan) -> Picture:
    """Draws what each step saves, colored by how often it runs, and the plan's segments below."""
    names, saved = chain["names"], chain["saved"]
    axis = chain_axis(names, chain["blocks"])
    runs = [min(count, 4) for count in plan.runs()]
    highest = max((sum(saved[step] for step in column) for column in axis.columns), default=0) or 1
    plot = _plot(260, Range1d(0, axis.edges[-1], bounds="auto"), Range1d(0, 1))
    bottom = [0] * len(axis.columns)
    for count in sorted(set(runs)):
        parts = [[step for step in column if runs[step] == count] for column in axis.columns]
        sizes = [sum(saved[step] for step in part) for part in parts]
        tops = [low + size for low, size in zip(bottom, sizes, strict=True)]
        bars = [place for place, part in enumerate(parts) if part]
        data = {
            "left": [axis.edges[axis.columns[place].start] for place in bars],
            "right": [axis.edges[axis.columns[place].stop] for place in bars],
            "bottom": [bottom[place] for place in bars],
            "top": [tops[place] for place in bars],
            "size": [sizes[place] for place in bars],
            "step": [_steps(parts[place], names) for place in bars],
        }
        drawn = plot.quad(source=data, name=OFTEN[count], line_width=min(0.7, 60 / len(runs)))
        _paint(drawn.glyph, fill_color=RUNS[count], line_color="card")
        tips = [("step", "@step"), ("saves", f"@size{{{BYTES}}}"), ("in this plan", OFTEN[count])]
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
        bottom = tops
    depth = plan.depth()
    thickness = highest * min(0.06, 0.4 / max(depth, 1))
    _draw_segments(plot, plan, axis.edges, thickness)
    plot.y_range.start, plot.y_range.end = -(depth + 0.7) * thickness, highest * 1.05
    plot.yaxis.ticker = FixedTicker(ticks=_ticks(highest))
    middles = {label.middle: label.text for label in axis.stages}
    plot.xaxis.ticker = FixedTicker(ticks=list(middles))
    plot.xaxis.major_label_overrides = middles
    plot.xaxis.major_label_policy = NoOverlap(min_distance=8)
    plot.xaxis.major_tick_line_color = None
    plot.xgrid.grid_line_color = None
    return _item(plot)


def frontier_picture(
    frontier: Mapping[str, Any], measured: Mapping[str, tuple[int, float]]
) -> Picture:
    """Draws the least time for each peak, the classic schemes, and what was measured."""
    curve, bound, whole = frontier["optimal"], frontier["lower_bound"], frontier["baseline"]
    peaks = [peak for peak, _ in [*curve, *frontier["schemes"].values(), *measured.values()]]
    left, right = min(bound, *peaks) or 1, max(whole, *peaks)
    wide = right > WIDE * left
    room = (right / left) ** 0.06 if wide else 0.06 * (right - left or right)
    low, high = (left / room, right * room) if wide else (left - room, right + room)
    slow = max([SLOW, *(1.1 * time for _, time in frontier["schemes"].values())])
    times = [time for _, time in [*curve, *frontier["schemes"].values(), *measured.values()]]
    top = 1 + 1.15 * max(min(slow, max(times)) - 1, 0.02)
    bottom = min([1.0, *times])
    plot = _plot(
        320, Range1d(low, high), Range1d(bottom - 0.08 * (top - bottom), top),
        x_axis_type="log" if wide else "linear",
    )  # fmt: skip
    _shade_bound(plot, bound)
    data = {"peak": [*(p for p, _ in curve), whole], "time": [*(t for _, t in curve), curve[-1][1]]}
    line = plot.step("peak", "time", source=data, mode="after", line_width=2.4, name="optimal")
    _paint(line.glyph, line_color="kept")
    dots = plot.scatter("peak", "time", source=data, size=5, name="plans")
    _paint(dots.glyph, fill_color="kept", line_color="kept")
    _hover(plot, dots, "best plan")
    for (name, (peak, time)), shape in zip(frontier["schemes"].items(), cycle(MARKS)):  # noqa: B905
        mark = plot.scatter(
            "peak", "time", source={"peak": [peak], "time": [time]}, marker=shape, size=12, name=name
        )
        _paint(mark.glyph, fill_color="scheme", line_color="card")
        _hover(plot, mark, name)
    for name, (peak, time) in measured.items():
        mark = plot.scatter(
            "peak", "time", source={"peak": [peak], "time": [time]}, size=13, line_width=3,
            fill_alpha=0, name=f"measured {name}",
        )  # fmt: skip
        _paint(mark.glyph, line_color=name)
        _hover(plot, mark, f"measured: {name}")
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[0] ib")
    plot.xaxis.ticker = LogTicker(base=2, num_minor_ticks=0) if wide else _byte_ticker()
    plot.xaxis.major_label_policy = NoOverlap(min_distance=8)
    plot.yaxis.formatter = PrintfTickFormatter(format="×%.2f")
    plot.yaxis.ticker = AdaptiveTicker(desired_num_ticks=5, num_minor_ticks=0)
    plot.xaxis.axis_label = "peak of a training step"
    plot.yaxis.axis_label = "time, keeping everything = ×1"
    return _item(plot)


def _plot(height: int, across: Range1d, up: Range1d, **more: Any) -> Any:
    """Makes an empty plot as wide as its place, with bytes on its upright axis."""
    zoom = BoxZoomTool(dimensions="width")
    plot: Any = figure(
        height=height, sizing_mode="stretch_width", toolbar_location=None, tools=[zoom],
        active_drag=zoom, x_range=across, y_range=up, min_border_right=12, **more,
    )  # fmt: skip
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.yaxis.formatter = NumeralTickFormatter(format=BYTES)
    for axis in (plot.xaxis[0], plot.yaxis[0]):
        axis.minor_tick_line_color = axis.axis_line_color = axis.major_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui, sans-serif"
        _paint(axis, major_label_text_color="faint", axis_label_text_color="faint")
    for grid in (plot.xgrid[0], plot.ygrid[0]):
        _paint(grid, grid_line_color="grid")
    return plot


def _step_plot(highest: int, height: int) -> Any:
    """Makes a plot over a training step, up to so many bytes."""
    plot = _plot(height, Range1d(0, EDGES[-1], bounds="auto"), Range1d(0, highest * 1.16 or 1))
    plot.yaxis.ticker = FixedTicker(ticks=_ticks(highest))
    middles = [(left + right) / 2 for left, right in zip(EDGES, EDGES[1:], strict=False)]
    plot.xaxis.ticker = FixedTicker(ticks=middles)
    plot.xaxis.major_label_overrides = dict(zip(middles, PARTS, strict=True))
    plot.xaxis.major_label_policy = NoOverlap(min_distance=4)
    plot.xgrid.visible = False
    shade = BoxAnnotation(left=EDGES[1], right=EDGES[2], level="underlay", line_color=None)
    _paint(shade, fill_color="in-backward")
    plot.add_layout(shade)
    return plot


def _shade(plot: Any, timeline: Timeline) -> None:
    axis = step_axis(timeline)
    spans = [(axis.place(start), axis.place(stop)) for start, stop in recomputes(timeline)]
    data = {"left": [start for start, _ in spans], "right": [stop for _, stop in spans]}
    bands = plot.quad(
        "left", "right", bottom=0, top=plot.y_range.end, source=data, line_color=None,
        level="underlay", name="recompute",
    )  # fmt: skip
    _paint(bands.glyph, fill_color="in-recompute")


def _mark(plot: Any, name: str, place: float, size: int) -> None:
    data = {"place": [place], "bytes": [size]}
    mark = plot.scatter("place", "bytes", source=data, size=9, line_width=2, name=f"peak {name}")
    _paint(mark.glyph, fill_color=name, line_color="card")
    share = place / EDGES[-1]
    side = "left" if share < 0.2 else "right" if share > 0.8 else "center"
    label = Label(
        x=place, y=size, text=f"peak {format_bytes(size)}", text_align=side, y_offset=7,
        text_font_size="12px", text_font_style="bold", text_font="system-ui, sans-serif",
    )  # fmt: skip
    _paint(label, text_color="ink" if name == "ink" else f"{name}-ink")
    plot.add_layout(label)


def _draw_segments(plot: Any, plan: Plan, edges: Sequence[float], thickness: float) -> None:
    found = list(segments(plan))
    data = {
        "left": [edges[start] for start, _, _ in found],
        "right": [edges[stop] for _, stop, _ in found],
        "top": [-(level + 0.75) * thickness for _, _, level in found],
        "bottom": [-(level + 1.35) * thickness for _, _, level in found],
        "steps": [f"{start} to {stop - 1}" for start, stop, _ in found],
        "level": [level + 1 for _, _, level in found],
    }
    for level in {level for _, _, level in found}:
        chosen = [place for place, (_, _, depth) in enumerate(found) if depth == level]
        part = {key: [values[place] for place in chosen] for key, values in data.items()}
        bars = plot.quad(source=part, line_width=1.5, name=f"segments {level + 1}")
        _paint(bars.glyph, fill_color=RUNS[min(level + 2, 4)], line_color="card")
        tips = [("segment of steps", "@steps"), ("nested", "@level deep")]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips))


def _shade_bound(plot: Any, bound: int) -> None:
    box = BoxAnnotation(right=bound, level="underlay", line_color=None)
    _paint(box, fill_color="below")
    plot.add_layout(box)
    for options in ({"location": bound, "dimension": "height", "line_dash": "dashed"},
                    {"location": 1, "dimension": "width"}):  # fmt: skip
        line = Span(level="underlay", **options)
        _paint(line, line_color="faint")
        plot.add_layout(line)


def _hover(plot: Any, drawn: Any, name: str) -> None:
    tips = [("", name), ("peak", f"@peak{{{BYTES}}}"), ("time", "×@time{0.000}")]
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))


def _steps(part: Sequence[int], names: Sequence[str]) -> str:
    if not part:
        return ""
    return names[part[0]] if len(part) == 1 else f"{names[part[0]]} to {names[part[-1]]}"


def _byte_ticker() -> AdaptiveTicker:
    """Puts ticks on round numbers of KiB, MiB or GiB."""
    return AdaptiveTicker(
        base=1024, mantissas=[1, 2, 5, 10, 20, 50, 100, 200, 500], desired_num_ticks=5,
        num_minor_ticks=0,
    )  # fmt: skip


def _ticks(highest: int) -> list[int]:
    """Returns round numbers of bytes from 0 on, five or so."""
    unit = 1024 ** (max(highest.bit_length() - 1, 0) // 10)
    steps = (size * scale * unit / 10 for scale in (1, 10, 100, 1000) for size in (1, 2, 5))
    step = next(step for step in steps if highest / step <= 5)
    return [round(step * number) for number in range(int(highest / step) + 1)]


def _paint(model: Any, **roles: str) -> None:
    """Says by which of the page's colors the model's properties are painted."""
    model.tags = [*model.tags, roles]


def _item(plot: Any) -> Picture:
    """Returns bokeh's JSON of a plot; the same plot gives the same, whatever was drawn before."""
    item: Picture = dict(json_item(plot))
    known: dict[str, str] = {}
    renamed: Picture = _renamed(item, known)
    return renamed


def _renamed(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(part, known) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(part, known) for part in value]
    if isinstance(value, str) and re.fullmatch(r"p\d{4,}", value):
        return known.setdefault(value, f"m{len(known)}")
    return value
