"""Draws a comparison: for each model its two step peaks, and what the second one costs."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from zoo.errors import shortened_text
from zoo.report.heading import Heading
from zoo.report.rows import Row
from zoo.report.style import BASELINE, FAINT_INK, STYLE, bare
from zoo.report.style import KEPT as CHECKPOINTED
from zoo.report.words import size_or_why
from zoo.units import BINARY

HEIGHT = 0.36


def draw(rows: Sequence[Row], heading: Heading, paths: Sequence[Path]) -> None:
    """Draws the rows and saves the figure under each path, by its suffix.

    Where a cell has no number, words say why.
    """
    with pyplot.rc_context(STYLE):
        figure, (memory, time) = pyplot.subplots(
            ncols=2,
            sharey=True,
            figsize=(10, 1.8 + 0.62 * len(rows)),
            width_ratios=(2.4, 1),
            layout="constrained",
        )
        figure.suptitle(heading.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.supxlabel(heading.setting, x=0.01, ha="left", fontsize=8, color=FAINT_INK)
        _draw_memory(memory, rows)
        _draw_time(time, rows)
        for path in paths:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else {})
        pyplot.close(figure)


def _draw_memory(axes: Axes, rows: Sequence[Row]) -> None:
    baseline = [row.peak.baseline or 0 for row in rows]
    checkpointed = [row.peak.checkpointed or 0 for row in rows]
    whole = [_size(row.peak.baseline, row.fits.baseline) for row in rows]
    saved = [_size(row.peak.checkpointed, row.fits.checkpointed) for row in rows]
    saved = [
        text if row.step_ratio is None else f"{text}  ({row.step_ratio:.1%})"
        for text, row in zip(saved, rows, strict=True)
    ]
    largest = max([*baseline, *checkpointed], default=0)
    unit = max(power for power in range(len(BINARY)) if largest >= 1024**power or not power)
    places = range(len(rows))
    for offset, sizes, labels, color, name in (
        (-HEIGHT / 2, baseline, whole, BASELINE, "baseline"),
        (HEIGHT / 2, checkpointed, saved, CHECKPOINTED, "checkpointed"),
    ):
        bars = axes.barh(
            [place + offset for place in places],
            [size / 1024**unit for size in sizes],
            HEIGHT,
            color=color,
            label=name,
        )
        axes.bar_label(bars, labels, padding=4, fontsize=9)
    names = [filter(None, (row.model, row.arguments, row.batch)) for row in rows]
    axes.set_yticks(places, ["\n".join(map(_beside, lines)) for lines in names])
    axes.margins(x=0.16)
    axes.set_xlabel(f"peak of the whole training step ({BINARY[unit]})")
    axes.invert_yaxis()
    axes.figure.legend(frameon=False, loc="upper right", ncols=2)
    bare(axes)


def _beside(text: str) -> str:
    """Shortens what stands beside the bars, or there is no room for them."""
    return shortened_text(text, 60)


def _size(count: int | None, fits: bool) -> str:
    return "failed" if count is None and fits else size_or_why(count, fits)


def _draw_time(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        if row.time is None:
            continue
        if row.quartiles is not None:
            axes.plot(row.quartiles, [place, place], color=CHECKPOINTED, lw=2)
        axes.plot(row.time.median, place, "o", color=CHECKPOINTED, ms=7)
        axes.annotate(
            f"×{row.time.median:.2f}",
            (row.time.median, place),
            (0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.axvline(1, color=BASELINE, lw=1.5, zorder=0)
    axes.margins(x=0.15)
    axes.set_xlabel("step time, baseline = 1\n(median; quartiles from 5 pairs)")
    bare(axes)
