"""Draws charts for a report's page with bokeh: with hover and zoom, as bokeh's own JSON.

No color is named but a role, such as "kept", under a model's `tags`; the page's script paints it
with the style sheet's color, and paints it again when light turns dark.
"""

import json
import re
from html import escape
from typing import Any

from bokeh.embed import json_item
from bokeh.models import (
    AdaptiveTicker,
    BoxZoomTool,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LogTicker,
    NoOverlap,
    PrintfTickFormatter,
)
from bokeh.models.annotations import Label
from bokeh.plotting import figure

from zoo.report.charts import Axis, Bars, Chart, Layer, Marks, Steps

FONT = "system-ui, 'Liberation Sans', sans-serif"
TIPS = (
    "display: grid; grid-template-columns: auto auto; gap: 1px 12px; color: var(--ink); "
    f"font: 13px/1.4 {FONT}; font-variant-numeric: tabular-nums"
)


def interactive(chart: Chart) -> dict[str, Any]:
    """Returns bokeh's JSON of a chart, which is as wide as its place on the page."""
    zoom = BoxZoomTool(dimensions="width")
    ranges: Any = {
        "x_range": (chart.x.start, chart.x.stop),
        "y_range": (chart.y.start, chart.y.stop),
    }
    plot: Any = figure(
        height=chart.height, sizing_mode="stretch_width", toolbar_location=None, tools=[zoom],
        active_drag=zoom, x_axis_type="log" if chart.x.log else "linear", min_border_right=14,
        **ranges,
    )  # fmt: skip
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    _draw_axis(plot.xaxis[0], plot.xgrid[0], chart.x)
    _draw_axis(plot.yaxis[0], plot.ygrid[0], chart.y)
    # what is drawn below zero are no sizes
    plot.yaxis.bounds = (max(chart.y.start, 0), chart.y.stop)
    for layer in chart.layers:
        if isinstance(layer, Bars):
            _draw_bars(plot, layer)
        elif isinstance(layer, Steps):
            _draw_steps(plot, layer)
        elif isinstance(layer, Marks):
            _draw_marks(plot, layer, chart.x)
    # bokeh counts its models in each process; the same chart is to give the same text
    known: dict[str, str] = {}
    text = json.dumps(json_item(plot))
    renamed = re.sub(r'"p\d{4,}"', lambda name: known.setdefault(name[0], f'"m{len(known)}"'), text)
    found: dict[str, Any] = json.loads(renamed)
    return found


def _draw_axis(axis: Any, grid: Any, shown: Axis) -> None:
    axis.minor_tick_line_color = axis.axis_line_color = axis.major_tick_line_color = None
    axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
    axis.axis_label_text_font = axis.major_label_text_font = FONT
    axis.axis_label_text_font_style = "normal"
    axis.axis_label = shown.title or None
    axis.formatter = PrintfTickFormatter(format=shown.format)
    axis.major_label_policy = NoOverlap(min_distance=16)
    if shown.labels:
        texts = {label.middle: label.text for label in shown.labels}
        axis.ticker, axis.major_label_overrides = FixedTicker(ticks=list(texts)), texts
    elif shown.log:
        axis.ticker = LogTicker(base=2, num_minor_ticks=0)
    else:
        axis.ticker = AdaptiveTicker(desired_num_ticks=5, num_minor_ticks=0)
    grid.visible = shown.grid
    _paint(axis, major_label_text_color="faint", axis_label_text_color="faint")
    _paint(grid, grid_line_color="grid")


def _draw_bars(plot: Any, bars: Bars) -> None:
    columns = dict(zip(("left", "right", "bottom", "top"), zip(*bars.boxes, strict=True)))  # noqa: B905
    drawn = plot.quad(
        "left", "right", "top", "bottom", source=_source(bars, columns), name=bars.name,
        line_color=None, level="underlay" if bars.behind else "glyph",
    )  # fmt: skip
    _paint(drawn.glyph, fill_color=bars.color)
    _hover(plot, drawn, bars)


def _draw_steps(plot: Any, steps: Steps) -> None:
    fill = {"low": steps.low} if steps.alpha else {}
    source = _source(steps, {"x": steps.x, "y": steps.y, **fill})
    if fill:
        area = plot.varea_step(
            "x", "low", "y", source=source, step_mode="after", alpha=steps.alpha, name=steps.name
        )
        _paint(area.glyph, fill_color=steps.color)
    if steps.width:
        line = plot.step(
            "x", "y", source=source, mode="after", line_width=steps.width, name=steps.name,
            line_dash="dashed" if steps.dashed else "solid",
        )  # fmt: skip
        _paint(line.glyph, line_color=steps.color)
    if steps.tips:
        # bokeh's steps do not notice the pointer, its lines do
        line = plot.line("x", "y", source=source, line_alpha=0)
        _hover(plot, line, steps, mode="vline", line_policy="prev")


def _draw_marks(plot: Any, marks: Marks, axis: Axis) -> None:
    ring = marks.shape == "ring"
    drawn = plot.scatter(
        "x", "y", source=_source(marks, dict(zip("xy", zip(*marks.spots, strict=True)))),  # noqa: B905
        marker="circle" if ring else marks.shape, size=marks.size, name=marks.name,
        line_width=3 if ring else 1, fill_alpha=0 if ring else 1,
    )  # fmt: skip
    _paint(drawn.glyph, fill_color=marks.color, line_color=marks.color if ring else "card")
    if marks.tips:
        _hover(plot, drawn, marks)
    elif marks.text:
        x, y = marks.spots[0]
        share = (x - axis.start) / (axis.stop - axis.start)
        # bokeh takes a number for each of these, which its annotations do not say
        corners: dict[str, Any] = {"padding": 2, "border_radius": 4}
        text = Label(
            x=x, y=y, text=marks.text, background_fill_alpha=0.8, **corners,
            text_align="left" if share < 0.2 else "right" if share > 0.8 else "center",
            text_baseline="top" if marks.below else "bottom", y_offset=-7 if marks.below else 7,
            text_font_size="12px", text_font_style="bold", text_font=FONT,
        )  # fmt: skip
        color = marks.color if marks.color == "ink" else f"{marks.color}-ink"
        _paint(text, text_color=color, background_fill_color="card")
        plot.add_layout(text)


def _source(layer: Layer, columns: dict[str, Any]) -> ColumnDataSource:
    tips = {f"tip {number}": column for number, column in enumerate(layer.tips.values())}
    return ColumnDataSource({name: list(column) for name, column in {**columns, **tips}.items()})


def _hover(plot: Any, drawn: Any, layer: Layer, **how: Any) -> None:
    """Shows the tips in the page's colors: bokeh's own are for a white page."""
    rows = (
        f'<span style="color: var(--faint)">{escape(name)}</span><b>@{{tip {number}}}</b>'
        for number, name in enumerate(layer.tips)
    )
    if layer.tips:
        shown = f'<div style="{TIPS}">{"".join(rows)}</div>'
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=shown, **how))


def _paint(model: Any, **roles: str) -> None:
    model.tags = [*model.tags, roles]
