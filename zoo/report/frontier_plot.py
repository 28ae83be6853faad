"""Draws what memory costs in time: the best plans as a staircase, and the schemes of the field.

time │ ░░│ └┐          ▲ blocks       ░░: where no plan goes
     │ ░░│  └──┐   ■ sqrt
     │ ░░│     └────┐
   1 │ ░░│──────────└─────● everything
     └──── peak memory ────
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zoo.report.escape import visible
from zoo.report.labels import Box, Spot, along, place
from zoo.report.style import (
    BASELINE,
    FAINT_INK,
    GRID,
    INK,
    KEPT,
    STYLE,
    bare,
    head,
    write,
)
from zoo.report.words import scale
from zoo.units import format_bytes

SCHEME = "#d9730d"
SHAPES = ("s", "^", "D", "v", "P")
FONT = 8
# a longer range of memory is drawn on a logarithmic axis, a slower plan at the upper edge
WIDE, SLOW = 8, 2.0


@dataclass(frozen=True)
class FrontierPicture:
    """What is drawn; each point is bytes of a training step's peak and a time ratio.

    title: the line above.
    curve: the best plans by rising peak.
    schemes: others, by name.
    baseline: the peak when everything is kept, in bytes.
    lower_bound: bytes that no plan goes below.
    """

    title: str
    curve: Sequence[tuple[int, float]]
    schemes: Mapping[str, tuple[int, float]]
    baseline: int
    lower_bound: int


class _Numbers(NamedTuple):
    """A picture in the units of its axes: the curve up to keeping everything, marks by name."""

    unit: str
    bound: float
    curve: list[Spot]
    marks: dict[str, Spot]

    @property
    def whole(self) -> float:
        return self.marks["keep everything"][0]


def draw_frontier(picture: FrontierPicture, target: str | Path | Axes) -> None:
    """Draws into a file or into axes.

    Raises:
        ArgumentError: a file of no known kind.
    """
    numbers = _numbers(picture)
    if isinstance(target, Axes):
        _draw(target, numbers)
        _name(target, numbers)
        return
    with rc_context(STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        head(figure, picture.title, _subtitle(picture))
        axes = figure.subplots()
        _draw(axes, numbers)
        # where there is room for names is known when the layout is
        figure.draw_without_rendering()
        _name(axes, numbers)
        write(figure, target)


def _numbers(picture: FrontierPicture) -> _Numbers:
    divisor, unit = scale(picture.baseline)
    curve = [(peak / divisor, time) for peak, time in picture.curve]
    schemes = {name: (peak / divisor, time) for name, (peak, time) in picture.schemes.items()}
    whole = picture.baseline / divisor
    marks = {"keep everything": (whole, 1.0), "least memory": curve[0], **schemes}
    return _Numbers(unit, picture.lower_bound / divisor, [*curve, (whole, curve[-1][1])], marks)


def _subtitle(picture: FrontierPicture) -> str:
    least, time = picture.curve[0]
    return (
        f"peak of a training step: {format_bytes(picture.baseline)} when everything is kept, "
        f"down to {format_bytes(least)} in ×{time:.2f} of the time"
    )


def _draw(axes: Axes, numbers: _Numbers) -> None:
    _limit(axes, numbers.bound, list(numbers.marks.values()))
    _draw_bounds(axes, numbers.bound)
    xs, ys = zip(*numbers.curve, strict=True)
    axes.step(xs, ys, where="post", color=KEPT, lw=2.2, label="least time for each budget")
    _draw_marks(axes, _shown(axes, numbers.marks))
    axes.set_xlabel(f"predicted peak of a training step ({numbers.unit})")
    axes.set_ylabel("predicted time, keeping everything = ×1")
    axes.legend(
        frameon=False, ncols=3, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
    )  # fmt: skip
    bare(axes, "both")


def _limit(axes: Axes, bound: float, marks: Sequence[Spot]) -> None:
    """Leaves room for names, and cuts off the times of plans that nobody would choose."""
    left, right = bound, max(x for x, _ in marks)
    if right > WIDE * left > 0:
        axes.set_xscale("log", base=2)
        axes.set_xlim(left * (left / right) ** 0.08, right * (right / left) ** 0.16)
    else:
        axes.set_xlim(left - 0.08 * (right - left), right + 0.16 * (right - left or right))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("×{x:.2f}")
    cut = max([SLOW, *(1.1 * y for _, y in marks[2:])])
    height = max(min(cut, max(y for _, y in marks)) - 1, 0.02)
    axes.set_ylim(1 - 0.08 * height, 1 + 1.15 * height)


def _draw_bounds(axes: Axes, bound: float) -> None:
    axes.axvspan(axes.get_xlim()[0], bound, color=GRID, lw=0, zorder=0, label="below any plan")
    axes.axvline(bound, color=FAINT_INK, lw=1.2, ls=(0, (4, 2)))
    axes.axhline(1, color=BASELINE, lw=1.2, zorder=0)


def _draw_marks(axes: Axes, spots: Mapping[str, Spot]) -> None:
    whole, least, *schemes = spots.values()
    axes.plot(*whole, "o", color=INK, ms=7)
    axes.plot(*least, "o" if least[1] < _top(axes) else "^", color=KEPT, ms=7)
    for spot, shape in zip(schemes, itertools.cycle(SHAPES), strict=False):
        axes.plot(*spot, shape, color=SCHEME, ms=8, mec="white")
    axes.plot([], [], SHAPES[0], color=SCHEME, ms=7, ls="", label="classic schemes")


def _shown(axes: Axes, marks: Mapping[str, Spot]) -> dict[str, Spot]:
    """Returns where marks are drawn: those that are too high at the upper edge."""
    return {name: (x, min(y, _top(axes))) for name, (x, y) in marks.items()}


def _top(axes: Axes) -> float:
    low, high = axes.get_ylim()
    return float(high - 0.03 * (high - low))


def _name(axes: Axes, numbers: _Numbers) -> None:
    """Writes the marks' names and numbers beside them."""
    point = axes.figure.dpi / 72

    def points(spot: Spot) -> Spot:
        x, y = axes.transData.transform(spot)
        return x / point, y / point

    frame = axes.get_window_extent()
    texts = _texts(numbers)
    spots = {name: points(spot) for name, spot in _shown(axes, numbers.marks).items()}
    bound, whole = numbers.bound, numbers.whole
    lines = (numbers.curve, [(bound, 1.0), (bound, SLOW)], [(bound, 1.0), (whole, 1.0)])
    boxes = place(
        spots,
        {name: _size(text) for name, text in texts.items()},
        Box(*(edge / point for edge in (frame.x0, frame.y0, frame.x1, frame.y1))),
        [spot for line in lines for spot in along([points(spot) for spot in _stairs(line)])],
    )
    for name, box in boxes.items():
        x, y = spots[name]
        axes.annotate(
            texts[name], _shown(axes, numbers.marks)[name], (box.left - x, box.low - y),
            textcoords="offset points", fontsize=FONT, linespacing=1.1, va="bottom",
        )  # fmt: skip


def _texts(numbers: _Numbers) -> dict[str, str]:
    found = {
        name: f"{visible(name)}\n×{x / numbers.whole:.2f} memory, ×{y:.2f} time"
        for name, (x, y) in numbers.marks.items()
    }
    return {**found, "keep everything": "keep everything"}


def _size(text: str) -> Spot:
    """Returns about how wide and high a text will be, in points."""
    lines = text.split("\n")
    return 0.6 * FONT * max(map(len, lines)), 1.25 * FONT * len(lines)


def _stairs(line: Sequence[Spot]) -> Iterator[Spot]:
    """Yields the corners of a line that keeps its height up to the next spot."""
    yield line[0]
    for (_, y), (x, later) in itertools.pairwise(line):
        yield x, y
        yield x, later
