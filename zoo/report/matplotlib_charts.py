"""Draws charts with matplotlib into files (SVG, PNG, PDF), or into axes.

Charts of a plan with its peak by category, of a frontier, of a timeline and of a comparison.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from operator import itemgetter
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
from zoo.files import replaced_file
from zoo.planner.plan import Plan
from zoo.report import charts
from zoo.report.escaping import visible
from zoo.report.pictures import check_picture
from zoo.report.rows import Heading, ModelRow, graphs, median, quartiles, variants
from zoo.report.step_axis import fitting, round_numbers
from zoo.units import format_bytes, unit_of

Target = str | Path | Sequence[Path] | Axes
_SHEET = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
# the page's colors in light mode
COLORS = dict(re.findall(r"--([\w-]+): (?:light-dark\()?(#\w+)", _SHEET))
STYLE: Any = {
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), COLORS["ink"]),
    # a name may hold a $
    "text.parse_math": False,
    # the same data make the same file
    "svg.hashsalt": "zoo",
}
# colors of the categories of a peak, in their order
PEAK = (
    *("parameters", "buffers", "inputs", "optimizer-state", "gradients"),
    *("kept", "recomputed-once", "temporaries", "at-work", "kernel-workspace"),
    "kernel-workspace",  # of libraries; there are none on most devices
)
# behind a text: no line of the grid crosses it
CLEAR: Any = {"facecolor": COLORS["card"], "edgecolor": "none", "pad": 1}
# where a name may be written: points from its mark, and sides in the order of preference
DISTANCES = (9, 20, 36, 60)
# a text that is no farther away needs no line to its mark
BESIDE = 11
SIDES = ((1, 1), (-1, 1), (1, 0), (-1, 0), (1, -1), (-1, -1), (0, 1), (0, -1))


def draw_plan(
    target: Target,
    plan: Plan,
    steps: Mapping[str, Any],
    *,
    title: str,
    subtitle: str,
    peak: Mapping[str, int],
    limits: Mapping[str, int],
) -> None:
    """Draws `plan_chart` and, into a file, the bytes of each category at the peak above it.

    `limits` are other bytes to compare the peak with: the budget, the baseline.
    """
    heights = {"nrows": 2, "height_ratios": (1, 4)}
    with _axes(target, (11, 6), title, subtitle, **heights) as (*above, axes):
        for rest in above:
            _draw_peak(rest, peak, limits)
        # so small that the words for all of a plan's colors fit in a row or two
        small: Any = {"fontsize": 8, "handlelength": 1.5, "columnspacing": 1.2}
        draw_chart(axes, charts.plan_chart(plan, steps), **small)


def draw_frontier(target: Target, frontier: Mapping[str, Any], title: str) -> None:
    """Draws `frontier_chart`."""
    least, time = frontier["optimal"][0]
    subtitle = (
        f"peak of a training step: {format_bytes(frontier['baseline'])} for the baseline, "
        f"down to {format_bytes(least)} in ×{time:.2f} of the time"
    )
    with _axes(target, (8.5, 5.2), title, subtitle) as (axes,):
        draw_chart(axes, charts.frontier_chart(frontier))


def draw_timeline(target: Target, timeline: charts.Timeline, title: str, subtitle: str) -> None:
    """Draws `categories_chart`, with a legend in the order of the areas."""
    chart = charts.categories_chart(timeline, timeline["peak"]["bytes"])
    with _axes(target, (10, 4.6), title, subtitle) as (axes,):
        draw_chart(axes, chart, loc="upper left", ncols=1, reverse=True)


def draw_memory(
    target: Target, timelines: Mapping[str, charts.Timeline], title: str, subtitle: str
) -> None:
    """Draws `memory_chart`."""
    with _axes(target, (10, 4.6), title, subtitle) as (axes,):
        draw_chart(axes, charts.memory_chart(timelines))


def draw_comparison(rows: Sequence[ModelRow], heading: Heading, paths: Sequence[Path]) -> None:
    """Draws the step peaks of each model, and the time of each variant.

    If a cell has no number, the reason is written instead. What the allocator reserved is a frame
    around the bar of the step peak.
    """
    shown = variants(rows)
    peaks, reserved = (
        {kind: [row.peaks[name][kind] or 0 for row in rows] for kind in shown}
        for name in ("peak", "reserved_peak")
    )
    divisor, unit = unit_of(max(map(max, [*peaks.values(), *reserved.values()])))
    height = 0.72 / len(shown)
    size = 10, 2.2 + 0.31 * len(shown) * len(rows)
    widths: Any = {"ncols": 2, "sharey": True, "width_ratios": (2.4, 1)}
    with _axes(paths, size, heading.title, heading.setting, **widths) as (memory, time):
        for order, (kind, name) in enumerate(shown.items()):
            offset = (order - (len(shown) - 1) / 2) * height
            color = COLORS[charts.color_of(kind)]
            sizes = np.array(peaks[kind]) / divisor
            centers = np.arange(len(rows)) + offset
            memory.barh(centers, sizes, height, color=color, label=name)
            ends = np.maximum(sizes, np.array(reserved[kind]) / divisor)
            frames = memory.barh(centers, ends, height, ec=color, fc="none", lw=0.8)
            texts = [_peak_text(row, kind) for row in rows]
            memory.bar_label(frames, texts, padding=4, fontsize=9, bbox=CLEAR, zorder=1)
            for number, row in enumerate(rows):
                # beside its bar; one alone in the middle
                y = number + offset * (len(shown) > 2)
                _draw_time(time, y, row.time_ratios(kind), color)
                replay, middle = row.replay(kind), median(row.time_ratios(kind)).value
                if replay.value is not None:
                    time.plot([replay.value], [y], "o", color=color, ms=7, mfc="white")
                    # away from the time of the eager step
                    left = middle is not None and replay.value < middle
                    style: Any = {"ha": "right" if left else "left", "va": "center", "fontsize": 9}
                    spot, away = (replay.value, y), (-8 if left else 8, 0)
                    _annotate(time, replay.text, spot, away, bbox=CLEAR, zorder=1, **style)
        # more does not fit beside the bars
        named = ((row.model, row.arguments, row.batch) for row in rows)
        names = ["\n".join(shortened_text(line, 60) for line in lines if line) for lines in named]
        memory.set_yticks(range(len(rows)), names)
        shows_reserved = any(row.shows_reserved for row in rows)
        memory.margins(x=0.5 if shows_reserved else 0.16)
        framed = "\nframe: reserved by the device's allocator" * shows_reserved
        memory.set_xlabel(f"peak of the whole training step ({unit}){framed}")
        memory.invert_yaxis()
        memory.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
        time.axvline(1, color=COLORS["baseline"], lw=1.5, zorder=0)
        time.margins(x=0.3)
        rings = "\nring: a replay as a CUDA graph" * bool(graphs(rows))
        time.set_xlabel(f"step time,\nbaseline = 1 (median;\nquartiles from 5 pairs){rings}")
        bare(memory, "x")
        bare(time, "x")


def _peak_text(row: ModelRow, kind: str) -> str:
    if kind not in row.variants:
        return ""
    text, ratio = row.size(kind, missing="failed").text, row.ratio(kind)
    if kind != "baseline" and ratio is not None:
        text += f"  ({ratio:.1%})"
    reserved = row.peaks["reserved_peak"][kind]
    return text if reserved is None else f"{text}, {format_bytes(reserved)} reserved"


def _draw_time(axes: Axes, y: float, pairs: Sequence[float], color: str) -> None:
    text, middle, _ = median(pairs)
    if middle is not None:
        ends = quartiles(pairs) or [middle, middle]
        axes.plot(ends, [y, y], color=color, lw=2)
        axes.plot([middle], [y], "o", color=color, ms=7)
        _annotate(axes, text, (ends[1], y), (8, 0), fontsize=9, va="center", bbox=CLEAR, zorder=1)


@contextmanager
def _axes(
    target: Target, size: tuple[float, float], title: str, subtitle: str, **grid: Any
) -> Iterator[list[Axes]]:
    """Yields the target if it is axes; else axes of a figure (size in inches), which it saves.

    Raises:
        ArgumentError: a file of another format than SVG, PNG and PDF.
    """
    if isinstance(target, Axes):
        yield [target]
        return
    files = [Path(target)] if isinstance(target, str | Path) else target
    for file in files:
        check_picture(file)
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        inch = 1 / size[1]
        engine: Any = figure.get_layout_engine()
        engine.set(rect=(0, 0, 1, 1 - 0.65 * inch))
        faint = COLORS["faint"]
        figure.text(0.01, 1 - 0.12 * inch, visible(title), va="top", fontsize=13, fontweight="bold")
        figure.text(0.01, 1 - 0.4 * inch, visible(subtitle), va="top", fontsize=9, color=faint)
        yield [*figure.subplots(squeeze=False, **grid).flat]
        for file in files:
            kind = file.suffix.lower()[1:]
            undated = {"Date": None} if kind == "svg" else {}
            with replaced_file(file) as new:
                figure.savefig(new, format=kind or None, dpi=160, metadata=undated)


def draw_chart(axes: Axes, chart: charts.Chart, **legend: Any) -> None:
    """Draws a chart into axes, and the texts of its marks where there is room."""
    for order, layer in enumerate(chart.layers):
        style: Any = {"color": COLORS[layer.color], "zorder": 2 + order / 100, "label": layer.name}
        if isinstance(layer, charts.Bars):
            left, right, bottom, top = map(np.array, zip(*layer.boxes, strict=True))
            style |= {"zorder": 0} if layer.behind else {}
            axes.bar(left, top - bottom, right - left, bottom, align="edge", **style)
        elif isinstance(layer, charts.StepCurve):
            if layer.alpha:
                area = {"alpha": layer.alpha, "lw": 0, "step": "post"} | style
                area["label"] = "" if layer.width else layer.name
                axes.fill_between(layer.x, layer.low, layer.y, **area)
            if layer.width:
                style |= {"lw": layer.width, "ls": "--" if layer.dashed else "-"}
                axes.step(layer.x, layer.y, where="post", **style)
        elif isinstance(layer, charts.Marks):
            # once per group
            labels = axes.get_legend_handles_labels()[1]
            style["label"] = "" if layer.group in labels else layer.group
            shape = charts.SHAPES[layer.shape][0]
            axes.plot(*zip(*layer.spots, strict=True), shape, ms=0.8 * layer.size, **style)
    if chart.x.log:
        axes.set_xscale("log", base=2)
    for name, axis, shown in (("x", axes.xaxis, chart.x), ("y", axes.yaxis, chart.y)):
        axes.set(**{f"{name}lim": (shown.start, shown.stop), f"{name}label": shown.title})
        axis.set_major_formatter(FormatStrFormatter(shown.format))
    # shapes below zero are not sizes
    axes.set_yticks([y for y in axes.get_yticks() if max(chart.y.start, 0) <= y <= chart.y.stop])
    above: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2, "ncols": 4}
    axes.legend(frameon=False, **above | legend)
    bare(axes, "y" if chart.x.labels else "both")
    if chart.x.labels:
        _label(axes, chart.x)
    if any(isinstance(layer, charts.Marks) for layer in chart.layers):
        _name_marks(axes, chart)


def _label(axes: Axes, axis: charts.Axis) -> None:
    """Writes labels below the axis, and above them the numbers that fit."""
    inch = axis.stop * axes.figure.dpi / axes.get_window_extent().width
    # centered texts of 10 points would overlap
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
    # free room is known only after the layout
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    marks = [layer for layer in chart.layers if isinstance(layer, charts.Marks) and layer.text]
    # a line leads to a text that found no room beside its mark
    lead = {"arrowstyle": "-", "color": COLORS["faint"], "lw": 0.6, "shrinkB": 5}
    style: Any = {"fontsize": 8, "linespacing": 1.1, "va": "bottom", "arrowprops": lead}
    # over the grid and below the curves
    style |= {"bbox": CLEAR, "zorder": 1}
    texts = [_annotate(axes, mark.text, mark.spots[0], (0, 0), **style) for mark in marks]
    to_pixels, curves = axes.transData, (c for c in chart.layers if isinstance(c, charts.StepCurve))
    lines = [
        to_pixels.transform_path(Line(np.transpose(pts_to_poststep(curve.x, curve.y))))
        for curve in curves
    ]
    spots = [to_pixels.transform(mark.spots[0]) for mark in marks]
    sizes = [text.get_window_extent().size for text in texts]
    # the file may have another resolution than the screen
    point = axes.figure.dpi / 72
    boxes = text_boxes(spots, sizes, axes.get_window_extent(), lines, point)
    for text, spot, box in zip(texts, spots, boxes, strict=True):
        text.set_position(tuple((box.min - spot) / point))
        away = np.maximum(np.maximum(box.min - spot, spot - box.max), 0)
        if text.arrow_patch is not None:
            text.arrow_patch.set_visible(bool(np.hypot(*away) > BESIDE * point))


def text_boxes(
    spots: Sequence[Any], sizes: Sequence[Any], frame: Bbox, lines: Sequence[Line], point: float
) -> list[Bbox]:
    """Returns positions for texts of given widths and heights beside spots, in pixels.

    Inside the frame, if possible over no other text or mark, and over as few lines as possible, as
    is what leads to them; matplotlib does not avoid overlaps. `point` is the size of a point in
    pixels.
    """
    boxes: list[Bbox] = []
    for spot, size in zip(spots, sizes, strict=True):
        marks = [Bbox([other, other]).padded(5 * point) for other in spots if other is not spot]
        costs = []
        for distance, side in product(DISTANCES, SIDES):
            across_and_up = np.array(side)
            start = spot + across_and_up * (distance * point, 0.6 * distance * point)
            box = Bbox.from_bounds(*(start + (across_and_up - 1) / 2 * size), *size)
            outside = frame.count_contains(box.get_points()) < 2
            near = box.padded(2 * point)
            crossed = sum(line.intersects_bbox(near, filled=False) for line in lines)
            # matplotlib draws the line to the text's middle and cuts it off at its edge
            middle = np.mean(box.get_points(), axis=0)
            lead = Line([spot, middle])
            crossed_marks = sum(lead.intersects_bbox(mark) for mark in [*marks, *boxes])
            overlaps = box.count_overlaps([*boxes, *marks]) + outside + crossed_marks
            # from the edge of the spot's own mark on, which may lie on a line
            way = middle - spot
            rest = Line([spot + way * min(5 * point / np.hypot(*way), 1), middle])
            led_across = sum(line.intersects_path(rest, filled=False) for line in lines)
            costs.append((overlaps, crossed, led_across, box))
        boxes.append(min(costs, key=itemgetter(0, 1, 2))[3])
    return boxes


def _draw_peak(axes: Axes, peak: Mapping[str, int], limits: Mapping[str, int]) -> None:
    total = sum(peak.values())
    most = max(total, *limits.values())
    divisor, unit = unit_of(most)
    left = 0
    for (name, size), color in zip(peak.items(), PEAK, strict=False):
        # parts too thin to be seen are only in the table
        if size > total / 1000:
            label = f"{name} {format_bytes(size)}"
            axes.barh(0, size / divisor, left=left / divisor, color=COLORS[color], label=label)
        left += size
    for name, size in limits.items():
        axes.axvline(size / divisor, color=COLORS["ink"], lw=1, ls=(0, (4, 2)))
        # the larger of two limits to the right of its line, the other to the left
        side = "left" if size == max(limits.values()) else "right"
        above: Any = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "ha": side}
        _annotate(axes, f" {name} {format_bytes(size)} ", (size / divisor, 1), (0, 3), **above)
    axes.set_yticks([0], [f"at the peak\n({unit})"])
    axes.set_xlim(0, 1.2 * most / divisor)
    axes.legend(
        frameon=False, ncols=5, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.32),
        handlelength=1, handleheight=1, borderaxespad=0, borderpad=0.2, columnspacing=1,
    )  # fmt: skip
    bare(axes, "x")


def _annotate(axes: Axes, text: str, spot: Any, points: Any, **style: Any) -> Annotation:
    """Writes a text beside a spot, at an offset in points."""
    return axes.annotate(text, spot, points, textcoords="offset points", **style)


def bare(axes: Axes, grid: Literal["x", "y", "both"]) -> None:
    """Removes frame and ticks, and draws a grid."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=COLORS["grid"], lw=0.8)
