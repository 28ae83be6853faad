"""Charts as SVG for a report's page: colors from its style sheet, tips as `<title>`, no script.

A chart fills any width, and its texts keep their size: places across are in per cent, those up and
down in pixels, and curves are paths that are stretched.

    allocated (MiB)  512 |------------------------     y: texts of the SVG, left of it
                       0 |________________________
                          forward    backward          x: texts of the page, cut where they end
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

from markupsafe import Markup

from zoo.report.charts import Axis, Bars, Chart, Marks, StepCurve
from zoo.report.step_axis import AxisLabel

# pixels up and down; units of a path across
HEIGHT, WIDE = 250, 10_000
# as many parts of a curve have a tip each
PARTS = 80
TICKS = 5
# with sides of 1
SHAPES = {
    "circle": "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z",
    "square": "M-.9-.9h1.8v1.8h-1.8z",
    "triangle": "M0-1.1L1.1.9h-2.2z",
    "inverted_triangle": "M0 1.1L1.1-.9h-2.2z",
    "diamond": "M0-1.3L1.2 0L0 1.3L-1.2 0z",
    "plus": "M-.4-1.1h.8v.7h.7v.8h-.7v.7h-.8v-.7h-.7v-.8h.7z",
}
SHAPES["ring"] = SHAPES["circle"]


def svg(chart: Chart) -> Markup:
    """Returns a chart as an SVG, and the labels below it, for a page in the style of `page.css`."""
    plot = _Plot(chart)
    # more than the phases of a step: on a phone in two rows
    stages = " stages" * (len(chart.x.labels) > 3)
    return Markup(
        f'<svg width="100%" height="{HEIGHT}">{"".join(plot.shapes())}</svg>'
        f'<div class="labels{stages}">{"".join(plot.labels())}</div>'
    )


def ticks(axis: Axis) -> list[float]:
    """Returns the round numbers at which an axis has ticks; of a logarithmic one powers of two."""
    if axis.log:
        ends = math.ceil(math.log2(axis.start)), math.floor(math.log2(axis.stop))
        return [2.0**power for power in range(ends[0], ends[1] + 1)]
    # shapes below zero are not sizes
    start = max(axis.start, 0)
    least = (axis.stop - start) / TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)
    ends = math.ceil(start / step), math.floor(axis.stop / step)
    return [number * step for number in range(ends[0], ends[1] + 1)]


class _Plot:
    """The shapes of a chart."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart

    def across(self, x: float) -> float:
        """Returns the position of an x as a share of the width."""
        axis = self.chart.x
        start, stop, x = map(math.log2, (axis.start, axis.stop, x)) if axis.log else (
            axis.start, axis.stop, x
        )  # fmt: skip
        return (x - start) / (stop - start)

    def down(self, y: float) -> float:
        """Returns the position of a y in pixels below the upper edge."""
        axis = self.chart.y
        return round((axis.stop - y) / (axis.stop - axis.start) * HEIGHT, 1)

    def shapes(self) -> Iterator[str]:
        """Yields grid, layers, tips of curves and marks, the first at the back."""
        layers = self.chart.layers
        bars = [layer for layer in layers if isinstance(layer, Bars)]
        curves = [layer for layer in layers if isinstance(layer, StepCurve)]
        yield from (self._bars(layer) for layer in bars if layer.behind)
        yield from self._grid()
        yield from (self._bars(layer) for layer in bars if not layer.behind)
        paths = "".join(self._curve(layer) for layer in curves)
        yield (
            f'<svg viewBox="0 0 {WIDE} {HEIGHT}" width="100%" height="{HEIGHT}" '
            f'preserveAspectRatio="none">{paths}</svg>'
        )
        yield from self._parts([layer for layer in curves if layer.tips])
        yield from (self._marks(layer) for layer in layers if isinstance(layer, Marks))

    def labels(self) -> Iterator[str]:
        """Yields what is written below the axis."""
        axis = self.chart.x
        if axis.numbers:
            yield f'<div class="labels">{"".join(self._texts(axis.numbers))}</div>'
        yield from self._texts(axis.labels)
        for tick in () if axis.labels else ticks(axis):
            style = f"--middle: {_percent(self.across(tick))}; --room: 60px"
            yield f'<span style="{style}"><span>{axis.format % tick}</span></span>'
        if axis.title:
            yield f'<span class="axis">{escape(axis.title)}</span>'

    def _texts(self, labels: Sequence[AxisLabel]) -> Iterator[str]:
        """Yields a row of labels, each as wide as the nearest other leaves room for.

        `--rooms` is the width in two rows, in which every second label is lower.
        """
        middles = [self.across(label.middle) for label in labels]
        for number, (label, middle) in enumerate(zip(labels, middles, strict=True)):
            room, rooms = (
                min((abs(middle - other) for other in others if other != middle), default=1.0)
                for others in (middles, middles[number % 2 :: 2])
            )
            style = f"--middle: {_percent(middle)}; --room: {_percent(room)}"
            style += f"; --rooms: {_percent(rooms)}"
            text = escape(label.text)
            yield f'<span title="{text}" style="{style}"><span>{text}</span></span>'

    def _grid(self) -> Iterator[str]:
        x, y = self.chart.x, self.chart.y
        lines = [label.start for label in x.labels[1:]] if x.labels else ticks(x)
        for across in map(_percent, map(self.across, lines)):
            yield f'<line class="grid" x1="{across}" x2="{across}" y2="{HEIGHT}"/>'
        for tick in ticks(y):
            down = self.down(tick)
            yield f'<line class="grid" x2="100%" y1="{down}" y2="{down}"/>'
            yield f'<text x="-8" y="{down}" dy=".35em" text-anchor="end">{y.format % tick}</text>'
        yield f'<text transform="translate(-54 {HEIGHT / 2}) rotate(-90)">{escape(y.title)}</text>'

    def _bars(self, bars: Bars) -> str:
        shapes = []
        for number, (left, right, bottom, top) in enumerate(bars.boxes):
            x, width = self.across(left), self.across(right) - self.across(left)
            upper = self.down(top)
            shapes.append(
                f'<rect x="{_percent(x)}" y="{upper}" width="{_percent(width)}" '
                f'height="{round(self.down(bottom) - upper, 1)}">'
                f"{_title(_told(bars.tips, number))}</rect>"
            )
        return f'<g fill="var(--{bars.color})">{"".join(shapes)}</g>'

    def _curve(self, curve: StepCurve) -> str:
        path = self._steps(curve.x, curve.y)
        shapes = ""
        if curve.alpha and list(curve.low) != list(curve.y):
            back = self._steps(curve.x[::-1], curve.low[::-1], is_back=True)
            shapes += (
                f'<path d="M{path}L{back}z" fill="var(--{curve.color})" '
                f'fill-opacity="{curve.alpha}"/>'
            )
        if curve.width:
            dashed = ' stroke-dasharray="6 4"' if curve.dashed else ""
            shapes += (
                f'<path d="M{path}" fill="none" stroke="var(--{curve.color})" '
                f'stroke-width="{curve.width}"{dashed} vector-effect="non-scaling-stroke"/>'
            )
        return shapes

    def _steps(self, x: Sequence[float], y: Sequence[float], *, is_back: bool = False) -> str:
        """Returns the path of a step curve, which is constant up to the next x to the right."""
        across, downs = [round(WIDE * self.across(value)) for value in x], [*map(self.down, y)]
        path = f"{across[0]} {downs[0]:g}"
        for (before, last), (end, down) in pairwise(zip(across, downs, strict=True)):
            if down != last:
                # a value holds up to the next x on its right
                path += f"H{before if is_back else end}V{down:g}"
        return f"{path}H{across[-1]}"

    def _parts(self, curves: Sequence[StepCurve]) -> Iterator[str]:
        """Yields a shape with a tip for each part of the width, of the highest point in it."""
        points: list[dict[int, int]] = [{} for _ in range(PARTS)]
        for number, curve in enumerate(curves):
            latest = 0
            parts = [min(int(PARTS * self.across(x)), PARTS - 1) for x in curve.x]
            for part in range(PARTS):
                within = [n for n in range(latest, len(parts)) if parts[n] == part]
                points[part][number] = max([latest, *within], key=curve.y.__getitem__)
                latest = max([latest, *within])
        for part, latest_points in enumerate(points if curves else ()):
            lines = [_told(curves[number].tips, point) for number, point in latest_points.items()]
            # those of several curves are a line each
            told = lines[0] if len(lines) == 1 else [", ".join(line) for line in lines]
            yield (
                f'<rect class="part" x="{_percent(part / PARTS)}" width="{_percent(1 / PARTS)}" '
                f'height="{HEIGHT}">{_title(told)}</rect>'
            )

    def _marks(self, marks: Marks) -> str:
        is_ring = marks.shape == "ring"
        size = marks.size / 2
        edge = 1 if marks.size > 6 else 0
        look = f'd="{SHAPES[marks.shape]}" transform="scale({size:g})" stroke-width='
        look += f'"{3 / size:.2f}" stroke="var(--{marks.color})" fill="none"' if is_ring else (
            f'"{edge / size:.2f}" stroke="var(--card)" fill="var(--{marks.color})"'
        )  # fmt: skip
        shapes = [
            f'<svg x="{_percent(self.across(x))}" y="{self.down(y)}" overflow="visible">'
            f"<path {look}>{_title(_told(marks.tips, number))}</path></svg>"
            for number, (x, y) in enumerate(marks.spots)
        ]
        if not marks.tips and marks.text:
            (x, y), color = marks.spots[0], marks.color
            share = self.across(x)
            anchor = "start" if share < 0.2 else "end" if share > 0.8 else "middle"
            color = color if color == "ink" else f"{color}-ink"
            shapes.append(
                f'<text class="mark-text" x="{_percent(share)}" y="{self.down(y)}" '
                f'dy="{18 if marks.below else -9}" '
                f'style="text-anchor: {anchor}; fill: var(--{color})">{escape(marks.text)}</text>'
            )
        return "".join(shapes)


def _told(tips: Mapping[str, Sequence[str]], number: int) -> list[str]:
    """Returns the lines of a tip, without what takes no bytes."""
    told = ((name, column[number]) for name, column in tips.items())
    return [f"{name}: {value}" for name, value in told if value != "0 B"]


def _title(lines: Sequence[str]) -> str:
    return f"<title>{escape(chr(10).join(lines))}</title>" if lines else ""


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"
