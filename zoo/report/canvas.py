"""What the interactive pictures of a page share: empty plots, colors by role, bokeh's own JSON.

No color is named but a role, such as "kept", under a model's `tags`; the page's script paints it
with the style sheet's color, again when light turns dark. Bytes are drawn in one unit for the whole
picture, to four decimals.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from bokeh.embed import json_item
from bokeh.models import (
    AdaptiveTicker,
    BoxZoomTool,
    FixedTicker,
    HoverTool,
    NoOverlap,
    PrintfTickFormatter,
    Range1d,
)
from bokeh.models.annotations import BoxAnnotation, Label
from bokeh.plotting import figure

from zoo.report.step_axis import EDGES, PARTS
from zoo.report.words import scale

Picture = dict[str, Any]
Range = tuple[float, float]
TIPS = (
    "display: grid; grid-template-columns: auto auto; gap: 1px 12px; color: var(--ink); "
    "font: 13px/1.4 system-ui, 'Liberation Sans', sans-serif; font-variant-numeric: tabular-nums"
)
FONT = "system-ui, 'Liberation Sans', sans-serif"


class Unit(NamedTuple):
    """What bytes are divided by in a picture, and its name."""

    bytes: int
    name: str

    @classmethod
    def of(cls, highest: int) -> "Unit":
        """Returns the unit of a picture that shows up to so many bytes."""
        return cls(*scale(highest))

    def of_bytes(self, sizes: Iterable[int]) -> list[float]:
        """Returns bytes in this unit."""
        return [round(size / self.bytes, 4) for size in sizes]

    @property
    def format(self) -> str:
        """How a hover writes a size."""
        return f"{{0.00}} {self.name}"


def blank(height: int, across: Range, up: Range, **more: Any) -> Any:
    """Makes an empty plot as wide as its place on the page, its axes from and to so much."""
    zoom = BoxZoomTool(dimensions="width")
    plot: Any = figure(
        height=height, sizing_mode="stretch_width", toolbar_location=None, tools=[zoom],
        active_drag=zoom, x_range=_range(across),
        y_range=_range(up), min_border_right=14, **more,
    )  # fmt: skip
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    for axis in (plot.xaxis[0], plot.yaxis[0]):
        axis.minor_tick_line_color = axis.axis_line_color = axis.major_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.ticker = AdaptiveTicker(desired_num_ticks=5, num_minor_ticks=0)
        axis.major_label_policy = NoOverlap(min_distance=16)
        paint(axis, major_label_text_color="faint", axis_label_text_color="faint")
    for grid in (plot.xgrid[0], plot.ygrid[0]):
        paint(grid, grid_line_color="grid")
    return plot


def blank_step(highest: int, height: int) -> Any:
    """Makes an empty plot over a training step, up to so many bytes."""
    unit = Unit.of(highest)
    plot = blank(height, (0, EDGES[-1]), (0, 1.16 * highest / unit.bytes or 1))
    label_bytes(plot.yaxis[0], unit)
    label(plot.xaxis[0], {(left + right) / 2: text for (left, right), text in _parts()})
    plot.xgrid.visible = False
    shade = BoxAnnotation(left=EDGES[1], right=EDGES[2], level="underlay", line_color=None)
    paint(shade, fill_color="in-backward")
    plot.add_layout(shade)
    return plot


def label(axis: Any, texts: dict[float, str]) -> None:
    """Writes texts at places of an axis, as many as do not overlap."""
    axis.ticker = FixedTicker(ticks=list(texts))
    axis.major_label_overrides = texts


def label_bytes(axis: Any, unit: Unit) -> None:
    """Writes sizes along an axis."""
    axis.formatter = PrintfTickFormatter(format=f"%g {unit.name}")


def mark(plot: Any, role: str, spot: tuple[float, float], text: str, *, below: bool) -> None:
    """Marks a spot and writes a text above or below it."""
    place, height = spot
    dot = plot.scatter([place], [height], size=9, line_width=2, name=text)
    paint(dot.glyph, fill_color=role, line_color="card")
    share = place / EDGES[-1]
    # bokeh takes a number for each of these, which its annotations do not say
    corners: dict[str, Any] = {"padding": 2, "border_radius": 4}
    words = Label(
        x=place, y=height, text=text, background_fill_alpha=0.8, **corners,
        text_align="left" if share < 0.2 else "right" if share > 0.8 else "center",
        text_baseline="top" if below else "bottom", y_offset=-7 if below else 7,
        text_font_size="12px", text_font_style="bold", text_font=FONT,
    )  # fmt: skip
    paint(words, text_color="ink" if role == "ink" else f"{role}-ink", background_fill_color="card")
    plot.add_layout(words)


def hover(plot: Any, drawn: Any, tips: Sequence[tuple[str, str]]) -> None:
    """Shows names and values beside the pointer when it is on what was drawn."""
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=_written(tips)))


def follow(plot: Any, source: Any, height: Any, tips: Sequence[tuple[str, str]]) -> None:
    """Shows names and values of a curve over a step's places wherever the pointer is above it."""
    # a step does not notice the pointer, a line does
    line = plot.line("place", height, source=source, line_alpha=0)
    plot.add_tools(
        HoverTool(renderers=[line], tooltips=_written(tips), mode="vline", line_policy="prev")
    )


def paint(model: Any, **roles: str) -> None:
    """Says by which of the page's colors the model's properties are painted."""
    model.tags = [*model.tags, roles]


def as_json(plot: Any) -> Picture:
    """Returns bokeh's JSON of a plot; the same plot gives the same, whatever was drawn before."""
    known: dict[str, str] = {}
    renamed: Picture = _renamed(dict(json_item(plot)), known)
    return renamed


def _written(tips: Sequence[tuple[str, str]]) -> str:
    """Writes names and values in the page's colors: bokeh's own are for a white page."""
    rows = (
        f'<span style="color: var(--faint)">{escape(name)}</span><b>{escape(value)}</b>'
        for name, value in tips
    )
    return f'<div style="{TIPS}">{"".join(rows)}</div>'


def _range(edges: Range) -> Range1d:
    return Range1d(start=edges[0], end=edges[1])


def _parts() -> list[tuple[tuple[float, float], str]]:
    return list(zip(pairwise(EDGES), PARTS, strict=True))


def _renamed(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(part, known) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(part, known) for part in value]
    if isinstance(value, str) and re.fullmatch(r"p\d{4,}", value):
        return known.setdefault(value, f"m{len(known)}")
    return value
