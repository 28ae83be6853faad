"""Draws charts with matplotlib into files (SVG, PNG, PDF), or into axes.

Those of a plan, with the categories of its peak above; of a frontier; and of a comparison.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cbook import pts_to_poststep
from matplotlib.figure import Figure
from matplotlib.path import Path as Line
from matplotlib.text import Annotation
from matplotlib.ticker import FormatStrFormatter
from matplotlib.transforms import Bbox

from zoo.errors import shortened_text
from zoo.planner.plan import Plan
from zoo.report import charts
from zoo.report.chain_axis import fitting, round_numbers
from zoo.report.escaping import visible
from zoo.report.pictures import check_picture
from zoo.report.rows import Heading, Row, variants
from zoo.units import format_bytes

_SHEET = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
# the page's, by day
COLORS = dict(re.findall(r"--([\w-]+): (?:light-dark\()?(#\w+)", _SHEET))
STYLE: Any = {
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), COLORS["ink"]),
    # a name may hold a $
    "text.parse_math": False,
    # the same numbers make the same file
    "svg.hashsalt": "zoo",
}
# of the categories of a peak, in their order
PEAK = (
    *("parameters", "buffers", "inputs", "optimizer-state", "gradients"),
    *("kept", "recomputed-once", "temporaries", "at-work", "kernel-workspace"),
)
# where a name may be written, in points from its mark: preferably to the upper right
DISTANCES = (9, 20, 36, 60)
SIDES = ((1, 1), (-1, 1), (1, 0), (-1, 0), (1, -1), (-1, -1), (0, 1), (0, -1))


def draw_plan(
    target: str | Path | Axes,
    plan: Plan,
    chain: Mapping[str, Any],
    *,
    title: str,
    subtitle: str,
    peak: Mapping[str, int],
    limits: Mapping[str, int],
) -> None:
    """Draws what each step of a chain saves and how often it runs; into a file, also the peak.

    `chain` is that of `plan_chart`; `peak` are bytes of each category at the peak, `limits` other
    bytes to compare with: the budget, the baseline.

    Raises:
        ArgumentError: a file of another format than SVG, PNG and PDF.
    """
    chart = charts.plan_chart(plan, chain)
    if isinstance(target, Axes):
        _draw(target, chart)
        return
    with _picture([target], (11, 6), title, subtitle) as figure:
        above, below = figure.subplots(2, height_ratios=(1, 4))
        _draw_peak(above, peak, limits)
        _draw(below, chart)


def draw_frontier(target: str | Path | Axes, frontier: Mapping[str, Any], title: str) -> None:
    """Draws the frontier that `frontier_chart` shows.

    Raises:
        ArgumentError: a file of another format than SVG, PNG and PDF.
    """
    chart = charts.frontier_chart(frontier)
    if isinstance(target, Axes):
        draw_chart(target, chart)
        return
    least, time = frontier["optimal"][0]
    subtitle = (
        f"peak of a training step: {format_bytes(frontier['baseline'])} for the baseline, "
        f"down to {format_bytes(least)} in ×{time:.2f} of the time"
    )
    with _picture([target], (8.5, 5.2), title, subtitle) as figure:
        draw_chart(figure.subplots(), chart)


def draw_timeline(
    target: str | Path | Axes, timeline: charts.Timeline, title: str, subtitle: str
) -> None:
    """Draws the categories of a step over time, as `categories_chart` shows them.

    Raises:
        ArgumentError: a file of another format than SVG, PNG and PDF.
    """
    chart = charts.categories_chart(timeline, timeline["peak"]["bytes"])
    if isinstance(target, Axes):
        _draw(target, chart)
        # beside the areas, in the order in which they are stacked
        target.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
        _place_names(target, chart)
        return
    with _picture([target], (10, 4.6), title, subtitle) as figure:
        draw_timeline(figure.subplots(), timeline, title, subtitle)


def draw_comparison(rows: Sequence[Row], heading: Heading, paths: Sequence[Path]) -> None:
    """Draws the step peaks of each model, and the time that each variant costs.

    Where a cell has no number, words say why.
    """
    size = 10, 2.2 + 0.31 * len(variants(rows)) * len(rows)
    with _picture(paths, size, heading.title, heading.setting) as figure:
        memory, time = figure.subplots(ncols=2, sharey=True, width_ratios=(2.4, 1))
        _draw_memory(memory, rows)
        _draw_time(time, rows)
        memory.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)


@contextmanager
def _picture(
    paths: Sequence[str | Path], size: tuple[float, float], title: str, subtitle: str
) -> Iterator[Figure]:
    """Yields a figure, its size in inches, with a title and a line below it; then saves it."""
    files = [Path(path) for path in paths]
    for file in files:
        check_picture(file)
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        inch = 1 / size[1]
        engine: Any = figure.get_layout_engine()
        engine.set(rect=(0, 0, 1, 1 - 0.65 * inch))
        above: Any = {"x": 0.01, "va": "top"}
        figure.text(y=1 - 0.12 * inch, s=visible(title), fontsize=13, fontweight="bold", **above)
        figure.text(
            y=1 - 0.4 * inch, s=visible(subtitle), fontsize=9, color=COLORS["faint"], **above
        )
        yield figure
        for file in files:
            undated = {"Date": None} if file.suffix.lower() == ".svg" else {}
            figure.savefig(file, dpi=160, metadata=undated)


def draw_chart(axes: Axes, chart: charts.Chart) -> None:
    """Draws a chart into axes, the texts of its marks where there is room for them."""
    _draw(axes, chart)
    _place_names(axes, chart)


def _place_names(axes: Axes, chart: charts.Chart) -> None:
    # where there is room is known when the layout is
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    _name_marks(axes, chart)


def _draw(axes: Axes, chart: charts.Chart) -> None:
    for order, layer in enumerate(chart.layers):
        style: Any = {"color": COLORS[layer.color], "zorder": 2 + order / 100, "label": layer.name}
        if isinstance(layer, charts.Bars):
            left, right, bottom, top = map(np.array, zip(*layer.boxes, strict=True))
            style |= {"zorder": 0} if layer.behind else {}
            axes.bar(left, top - bottom, right - left, bottom, align="edge", **style)
        elif isinstance(layer, charts.Steps):
            dashes = "--" if layer.dashed else "-"
            if layer.alpha:
                area = style | ({"label": ""} if layer.width else {})
                axes.fill_between(
                    layer.x, layer.low, layer.y, step="post", alpha=layer.alpha, lw=0, **area
                )
            if layer.width:
                axes.step(layer.x, layer.y, where="post", lw=layer.width, ls=dashes, **style)
        elif isinstance(layer, charts.Marks):
            x, y = zip(*layer.spots, strict=True)
            # once for all of the group
            grouped = layer.group not in axes.get_legend_handles_labels()[1]
            style |= {"label": layer.group if grouped else ""}
            axes.plot(x, y, charts.SHAPES[layer.shape][0], ms=0.8 * layer.size, **style)
    if chart.x.log:
        axes.set_xscale("log", base=2)
    axes.set(
        xlim=(chart.x.start, chart.x.stop), ylim=(chart.y.start, chart.y.stop),
        xlabel=chart.x.title, ylabel=chart.y.title,
    )  # fmt: skip
    axes.xaxis.set_major_formatter(FormatStrFormatter(chart.x.format))
    axes.yaxis.set_major_formatter(FormatStrFormatter(chart.y.format))
    # what is drawn below zero are no sizes
    axes.set_yticks([y for y in axes.get_yticks() if max(chart.y.start, 0) <= y <= chart.y.stop])
    axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    bare(axes, "y" if chart.x.labels else "both")
    if chart.x.labels:
        _label(axes, chart.x)


def _label(axes: Axes, axis: charts.Axis) -> None:
    """Writes labels below the axis, and between it and them the numbers that fit."""
    inch = axis.stop * axes.figure.dpi / axes.get_window_extent().width
    # texts of 10 points, centered, would run into each other
    crowded = any(
        right.middle - left.middle < 0.045 * inch * (len(left.text) + len(right.text) + 2)
        for left, right in pairwise(axis.labels)
    )
    labels = fitting(axis.labels, 0.2 * inch) if crowded else axis.labels
    numbers = round_numbers(axis.numbers, 0.26 * inch)
    axes.xaxis.remove_overlapping_locs = False
    for row, minor in ((labels, False), (numbers, True)):
        axes.set_xticks([text.middle for text in row], [text.text for text in row], minor=minor)
    axes.tick_params(axis="x", which="both", length=0)
    axes.tick_params(axis="x", which="minor", labelsize=7, labelcolor=COLORS["faint"], pad=2)
    axes.tick_params(axis="x", which="major", pad=13 if numbers else 4)
    if crowded:
        for text in axes.get_xticklabels():
            text.set(rotation=30, ha="right", rotation_mode="anchor")
    for label in labels:
        axes.axvline(label.start, color=COLORS["grid"], lw=0.8, zorder=0)


def _name_marks(axes: Axes, chart: charts.Chart) -> None:
    """Writes the marks' texts beside them."""
    marks = [layer for layer in chart.layers if isinstance(layer, charts.Marks) and layer.text]
    # to a text that found no room beside its mark a line leads
    lead = {"arrowstyle": "-", "color": COLORS["faint"], "lw": 0.6, "shrinkB": 5}
    style: Any = {"fontsize": 8, "linespacing": 1.1, "va": "bottom", "arrowprops": lead}
    texts = [_annotate(axes, mark.text, mark.spots[0], (0, 0), **style) for mark in marks]
    lines = [
        axes.transData.transform_path(Line(np.transpose(pts_to_poststep(layer.x, layer.y))))
        for layer in chart.layers
        if isinstance(layer, charts.Steps)
    ]
    spots = [axes.transData.transform(mark.spots[0]) for mark in marks]
    sizes = [text.get_window_extent().size for text in texts]
    # the file may have other pixels than the screen
    point = axes.figure.dpi / 72
    boxes = place(spots, sizes, axes.get_window_extent(), lines, point)
    for text, spot, box in zip(texts, spots, boxes, strict=True):
        text.set_position(tuple((box.min - spot) / point))


def place(
    spots: Sequence[Any], sizes: Sequence[Any], frame: Bbox, lines: Sequence[Line], point: float
) -> list[Bbox]:
    """Returns where the text of a given width and height beside each spot goes, in pixels.

    Inside the frame, over no other text and no mark if possible, and over as few lines as possible:
    matplotlib writes a text where it is told to, over whatever is there. `point` is that in pixels.
    """
    boxes: list[Bbox] = []
    for spot, (width, height) in zip(spots, sizes, strict=True):
        marks = [Bbox([other, other]).padded(5 * point) for other in spots if other is not spot]
        taken = [*boxes, *marks]
        best = inf
        for distance, (across, up) in product(DISTANCES, SIDES):
            left = spot[0] + across * distance * point + (across - 1) / 2 * width
            low = spot[1] + up * distance * point * 0.6 + (up - 1) / 2 * height
            box = Bbox.from_bounds(left, low, width, height)
            outside = frame.count_contains(box.get_points()) < 2
            crossed = sum(line.intersects_bbox(box, filled=False) for line in lines)
            cost = 1000 * (box.count_overlaps(taken) + outside) + crossed
            if cost < best:
                best, chosen = cost, box
        boxes.append(chosen)
    return boxes


def _draw_peak(axes: Axes, peak: Mapping[str, int], limits: Mapping[str, int]) -> None:
    total = sum(peak.values())
    most = max(total, *limits.values())
    divisor, unit = charts.scale(most)
    left = 0
    for (name, size), color in zip(peak.items(), PEAK, strict=True):
        # what is too thin to be seen is left to the table
        if size > total / 1000:
            label = f"{name} {format_bytes(size)}"
            axes.barh(0, size / divisor, left=left / divisor, color=COLORS[color], label=label)
        left += size
    for name, size in limits.items():
        axes.axvline(size / divisor, color=COLORS["ink"], lw=1, ls=(0, (4, 2)))
        # the larger of two to the right of its line, the other to the left
        side = "left" if size == max(limits.values()) else "right"
        above: Any = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "ha": side}
        _annotate(axes, f" {name} {format_bytes(size)} ", (size / divisor, 1), (0, 3), **above)
    axes.set_yticks([0], [f"at the peak\n({unit})"])
    axes.set_xlim(0, 1.2 * most / divisor)
    axes.legend(
        frameon=False, ncols=5, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.32),
        handlelength=1, handleheight=1, borderaxespad=0, borderpad=0.2,
    )  # fmt: skip
    bare(axes, "x")


def _draw_memory(axes: Axes, rows: Sequence[Row]) -> None:
    shown = variants(rows)
    peaks = [getattr(row.peak, kind) or 0 for row in rows for kind in shown]
    divisor, unit = charts.scale(max(peaks, default=0))
    offsets, height = _offsets(len(shown))
    for (kind, name), offset in zip(shown.items(), offsets, strict=True):
        places = [number + offset for number in range(len(rows))]
        widths = [(getattr(row.peak, kind) or 0) / divisor for row in rows]
        color = COLORS[charts.color_of(kind)]
        bars = axes.barh(places, widths, height, color=color, label=name)
        axes.bar_label(bars, [_peak_text(row, kind) for row in rows], padding=4, fontsize=9)
    # there is no room for more beside the bars
    named = ((row.model, row.arguments, row.batch) for row in rows)
    names = ["\n".join(shortened_text(line, 60) for line in lines if line) for lines in named]
    axes.set_yticks(range(len(rows)), names)
    axes.margins(x=0.16)
    axes.set_xlabel(f"peak of the whole training step ({unit})")
    axes.invert_yaxis()
    bare(axes, "x")


def _offsets(count: int) -> tuple[list[float], float]:
    """Returns where the bars of variants lie beside their model's place, and their height."""
    height = 0.72 / count
    return [(number - (count - 1) / 2) * height for number in range(count)], height


def _peak_text(row: Row, kind: str) -> str:
    if kind not in row.variants:
        return ""
    text, ratio = row.size(kind, missing="failed").text, row.peak.ratio(kind)
    return text if kind == "baseline" or ratio is None else f"{text}  ({ratio:.1%})"


def _draw_time(axes: Axes, rows: Sequence[Row]) -> None:
    _, *timed = shown = variants(rows)
    offsets = dict(zip(shown, _offsets(len(shown))[0], strict=True))
    for number, row in enumerate(rows):
        for kind in timed:
            ratios, color = row.time(kind), COLORS[charts.color_of(kind)]
            if ratios.spread is None:
                continue
            # beside its bar; one alone in the middle
            place, median = number + offsets[kind] * (len(timed) > 1), ratios.spread.median
            ends = ratios.quartiles or (median, median)
            axes.plot(ends, [place, place], color=color, lw=2)
            axes.plot(median, place, "o", color=color, ms=7)
            _annotate(axes, f"×{median:.2f}", (ends[1], place), (8, 0), fontsize=9, va="center")
    axes.axvline(1, color=COLORS["baseline"], lw=1.5, zorder=0)
    axes.margins(x=0.25)
    axes.set_xlabel("step time, baseline = 1\n(median; quartiles from 5 pairs)")
    bare(axes, "x")


def _annotate(axes: Axes, text: str, spot: Any, points: Any, **style: Any) -> Annotation:
    """Writes a text so many points beside a spot."""
    return axes.annotate(text, spot, points, textcoords="offset points", **style)


def bare(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """Removes frame and ticks, and draws a grid."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=COLORS["grid"], lw=0.8)
