"""Charts as bokeh's JSON, with hover and zoom, for a report's page.

The `tags` of a bokeh model name the role of each color, such as "kept"; page.js looks the color up
in the style sheet, and again whenever the color scheme changes.
"""

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from bokeh import models
from bokeh.embed import json_item
from bokeh.models.annotations import Label
from bokeh.plotting import figure

from zoo.report.charts import Axis, Bars, Chart, Layer, Marks, StepCurve

FONT = "system-ui, 'Liberation Sans', sans-serif"
TIPS = (
    "display: grid; grid-template-columns: auto auto; gap: 1px 12px; color: var(--ink); "
    f"font: 13px/1.4 {FONT}; font-variant-numeric: tabular-nums"
)


def interactive(chart: Chart) -> Any:
    """Returns bokeh's JSON of a chart, which fills the width of its place on the page."""
    zoom = models.BoxZoomTool(dimensions="width")
    x, y = ((axis.start, axis.stop) for axis in (chart.x, chart.y))
    # figure accepts these, but its type stubs do not say so
    ranges: Any = {"x_range": x, "y_range": y}
    plot: Any = figure(
        height=300, sizing_mode="stretch_width", toolbar_location=None, tools=[zoom],
        active_drag=zoom, x_axis_type="log" if chart.x.log else "linear", min_border_right=14,
        background_fill_color=None, border_fill_color=None, outline_line_color=None, **ranges,
    )  # fmt: skip
    _draw_axis(plot.xaxis[0], plot.xgrid[0], chart.x)
    _draw_axis(plot.yaxis[0], plot.ygrid[0], chart.y)
    # shapes below zero are not sizes
    plot.yaxis.bounds = (max(chart.y.start, 0), chart.y.stop)
    draw: Any = {Bars: _draw_bars, StepCurve: _draw_steps, Marks: _draw_marks}
    for layer in chart.layers:
        draw[type(layer)](plot, layer)
        if layer.tips:
            # bokeh's steps have no hover, its lines do
            line: Any = (
                {"mode": "vline", "line_policy": "prev"} if isinstance(layer, StepCurve) else {}
            )
            drawn = plot.renderers[-1:]
            plot.add_tools(models.HoverTool(renderers=drawn, tooltips=_tips(layer.tips), **line))
    # bokeh numbers the models of a process; renumbered, the same chart gives the same text
    names: dict[str, str] = {}
    text = json.dumps(json_item(plot))
    return json.loads(
        re.sub(r'"p\d{4,}"', lambda name: names.setdefault(name[0], f'"m{len(names)}"'), text)
    )


def _draw_axis(axis: Any, grid: Any, shown: Axis) -> None:
    axis.update(
        minor_tick_line_color=None, axis_line_color=None, major_tick_line_color=None,
        major_label_text_font_size="12px", axis_label_text_font_size="12px",
        major_label_text_font=FONT, axis_label_text_font=FONT, axis_label_text_font_style="normal",
        axis_label=shown.title or None, major_label_policy=models.NoOverlap(min_distance=16),
        formatter=models.PrintfTickFormatter(format=shown.format),
    )  # fmt: skip
    if shown.labels:
        texts = {label.middle: label.text for label in shown.labels}
        axis.update(ticker=models.FixedTicker(ticks=list(texts)), major_label_overrides=texts)
    elif shown.log:
        axis.ticker = models.LogTicker(base=2, num_minor_ticks=0)
    else:
        axis.ticker = models.AdaptiveTicker(desired_num_ticks=5, num_minor_ticks=0)
    grid.visible = not shown.labels
    _paint(axis, major_label_text_color="faint", axis_label_text_color="faint")
    _paint(grid, grid_line_color="grid")


def _draw_bars(plot: Any, bars: Bars) -> None:
    left, right, bottom, top = zip(*bars.boxes, strict=True)
    drawn = plot.quad(
        "left", "right", "top", "bottom", name=bars.name, line_color=None,
        source=_source(bars, left=left, right=right, top=top, bottom=bottom),
        level="underlay" if bars.behind else "glyph",
    )  # fmt: skip
    _paint(drawn.glyph, fill_color=bars.color)


def _draw_steps(plot: Any, steps: StepCurve) -> None:
    low = {"low": steps.low} if steps.alpha else {}
    shown: Any = {"source": _source(steps, x=steps.x, y=steps.y, **low), "name": steps.name}
    if steps.alpha:
        area = plot.varea_step("x", "low", "y", step_mode="after", alpha=steps.alpha, **shown)
        _paint(area.glyph, fill_color=steps.color)
    if steps.width:
        dash = "dashed" if steps.dashed else "solid"
        line = plot.step("x", "y", mode="after", line_width=steps.width, line_dash=dash, **shown)
        _paint(line.glyph, line_color=steps.color)
    if steps.tips:
        plot.line("x", "y", source=shown["source"], line_alpha=0)


def _draw_marks(plot: Any, marks: Marks) -> None:
    x, y = zip(*marks.spots, strict=True)
    ring = marks.shape == "ring"
    look: Any = {"marker": marks.shape, "line_width": 1, "fill_alpha": 1}
    if ring:
        look = {"marker": "circle", "line_width": 3, "fill_alpha": 0}
    drawn = plot.scatter(
        "x", "y", source=_source(marks, x=x, y=y), size=marks.size, name=marks.name, **look
    )
    _paint(drawn.glyph, fill_color=marks.color, line_color=marks.color if ring else "card")
    if marks.tips:
        return
    share = (x[0] - plot.x_range.start) / (plot.x_range.end - plot.x_range.start)
    # bokeh accepts a number for each of these, but its annotations do not say so
    corners: Any = {"padding": 2, "border_radius": 4}
    text = Label(
        x=x[0], y=y[0], text=marks.text, background_fill_alpha=0.8, **corners,
        text_align="left" if share < 0.2 else "right" if share > 0.8 else "center",
        text_baseline="top" if marks.below else "bottom", y_offset=-7 if marks.below else 7,
        text_font_size="12px", text_font_style="bold", text_font=FONT,
    )  # fmt: skip
    color = marks.color if marks.color == "ink" else f"{marks.color}-ink"
    _paint(text, text_color=color, background_fill_color="card")
    plot.add_layout(text)


def _source(layer: Layer, **columns: Any) -> models.ColumnDataSource:
    tips = {f"tip {number}": column for number, column in enumerate(layer.tips.values())}
    return models.ColumnDataSource({name: [*column] for name, column in (columns | tips).items()})


def _tips(names: Iterable[str]) -> str:
    """Returns the HTML of tips in the page's colors: bokeh's own are for a white page."""
    rows = (
        f'<span style="color: var(--faint)">{escape(name)}</span><b>@{{tip {number}}}</b>'
        for number, name in enumerate(names)
    )
    return f'<div style="{TIPS}">{"".join(rows)}</div>'


def _paint(model: Any, **roles: str) -> None:
    model.tags = [*model.tags, roles]
