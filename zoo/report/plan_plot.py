"""Draws a plan over its chain: what each step would keep, how often it runs, which segments nest.

      ┌ at the peak   parameters | gradients | ... | kept | again | work          ┐ one bar
MiB   │    █                 █
      │  █ █ ▒ █ ▒ ▒ █ █ ▒ ▒ █ █ ▒      height: bytes that the step saves for its backward
      └───────────────────────────      color: kept, or run how often
         ──── ────────     ────         segments
                ───                     and those inside of them
         conv1  layer1     classify
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zoo.plan import Plan
from zoo.report.chain_axis import (
    ChainAxis,
    Label,
    chain_axis,
    fitting,
    round_numbers,
    segments,
)
from zoo.report.escape import visible
from zoo.report.style import AGAIN, FAINT_INK, GRID, INK, KEPT, STYLE, bare, head, write
from zoo.report.words import OFTEN, scale
from zoo.units import format_bytes

# the categories of a peak: what no plan changes in grays, the plan's share in color
COLORS = (
    *("#6e7781", "#8c959f", "#a8b1bb", "#c3cad2", "#d9dee4"),
    *(KEPT, AGAIN[0], "#56b4e9", "#009e73", "#cc79a7"),
)


@dataclass(frozen=True)
class PlanPicture:
    """What is drawn.

    title, subtitle: lines above.
    plan: the plan.
    names, blocks, saved: for each step its name, its block's number, and the bytes that it saves.
    peak: bytes of each category at the peak, by name, in order.
    limits: other bytes to compare with, by name: the budget, the baseline.
    """

    title: str
    subtitle: str
    plan: Plan
    names: Sequence[str]
    blocks: Sequence[int]
    saved: Sequence[int]
    peak: Mapping[str, int]
    limits: Mapping[str, int]


def draw_plan(picture: PlanPicture, target: str | Path | Axes) -> None:
    """Draws into a file, or the chain alone into axes.

    Raises:
        ArgumentError: a file of no known kind.
    """
    if isinstance(target, Axes):
        _draw_chain(target, picture)
        return
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 6), layout="constrained")
        peak, chain = figure.subplots(2, height_ratios=(1, 4))
        head(figure, picture.title, picture.subtitle)
        _draw_peak(peak, picture)
        _draw_chain(chain, picture)
        write(figure, target)


def _draw_peak(axes: Axes, picture: PlanPicture) -> None:
    total = sum(picture.peak.values())
    most = max(total, *picture.limits.values())
    divisor, unit = scale(most)
    left = 0
    for (name, size), color in zip(picture.peak.items(), COLORS, strict=True):
        # what is too thin to be seen is left to the table
        if size > total / 1000:
            label = f"{name} {format_bytes(size)}"
            axes.barh(0, size / divisor, left=left / divisor, color=color, label=label)
        left += size
    for (name, size), side in zip(picture.limits.items(), _sides(picture.limits), strict=True):
        axes.axvline(size / divisor, color=INK, lw=1, ls=(0, (4, 2)))
        axes.annotate(
            f" {name} {format_bytes(size)} ", (size / divisor, 1), (0, 3), fontsize=8,
            xycoords=("data", "axes fraction"), textcoords="offset points", ha=side,
        )  # fmt: skip
    axes.set_yticks([0], [f"at the peak\n({unit})"])
    axes.set_xlim(0, 1.2 * most / divisor)
    axes.legend(
        frameon=False, ncols=5, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.32),
        handlelength=1, handleheight=1, borderaxespad=0, borderpad=0.2,
    )  # fmt: skip
    bare(axes)


def _sides(limits: Mapping[str, int]) -> list[str]:
    """Writes the larger of two limits to the right of its line and the other to the left."""
    return ["left" if size == max(limits.values()) else "right" for size in limits.values()]


def _draw_chain(axes: Axes, picture: PlanPicture) -> None:
    axis = chain_axis([*map(visible, picture.names)], picture.blocks)
    highest = _draw_steps(axes, picture, axis)
    depth = picture.plan.depth()
    thickness = highest * min(0.045, 0.4 / max(depth, 1))
    for start, stop, level in segments(picture.plan):
        left, right = axis.edges[start], axis.edges[stop]
        gap = min(0.12, 0.2 * (right - left))
        axes.barh(
            -(level + 1) * thickness, right - left - 2 * gap, thickness * 0.55, left=left + gap,
            color=_again(level + 2),
        )  # fmt: skip
    axes.set_ylim(-(depth + 1) * thickness, highest * 1.04)
    axes.set_xlim(0, axis.edges[-1])
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= highest * 1.04])
    bare(axes, "y")
    _label(axes, axis)


def _draw_steps(axes: Axes, picture: PlanPicture, axis: ChainAxis) -> float:
    """Draws a bar per column, colored by how often its steps run; returns the highest."""
    runs = [min(count, 4) for count in picture.plan.runs()]
    heights = [sum(picture.saved[step] for step in column) for column in axis.columns]
    divisor, unit = scale(max(heights, default=0))
    left = [axis.edges[column.start] for column in axis.columns]
    width = [
        axis.edges[column.stop] - start for column, start in zip(axis.columns, left, strict=True)
    ]
    bottom = [0.0] * len(left)
    for count in sorted(set(runs)):
        sizes = [
            sum(picture.saved[step] for step in column if runs[step] == count) / divisor
            for column in axis.columns
        ]
        axes.bar(
            left, sizes, width, bottom, align="edge", color=_again(count), label=OFTEN[count],
            edgecolor="white", linewidth=min(0.5, 40 / len(left)),
        )  # fmt: skip
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    kind = "step" if len(left) == len(runs) else "block"
    axes.set_ylabel(f"saved by each {kind} ({unit})")
    axes.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    return max(heights, default=0) / divisor or 1.0


def _label(axes: Axes, axis: ChainAxis) -> None:
    """Writes the stages below the axis, and between it and them the blocks where they fit."""
    width = axes.get_window_extent().width / axes.figure.dpi
    inch = axis.edges[-1] / width
    crowded = _crowded(axis.stages, inch)
    stages = fitting(axis.stages, 0.2 * inch) if crowded else axis.stages
    numbers = round_numbers(axis.numbers, 0.26 * inch)
    axes.xaxis.remove_overlapping_locs = False
    axes.set_xticks([label.middle for label in stages], [label.text for label in stages])
    axes.set_xticks(
        [label.middle for label in numbers], [label.text for label in numbers], minor=True
    )
    axes.tick_params(axis="x", which="both", length=0)
    axes.tick_params(axis="x", which="minor", labelsize=7, labelcolor=FAINT_INK, pad=2)
    axes.tick_params(axis="x", which="major", pad=13 if numbers else 4)
    if crowded:
        for text in axes.get_xticklabels():
            text.set(rotation=30, ha="right", rotation_mode="anchor")
    for label in stages:
        axes.axvline(label.start, color=GRID, lw=0.8, zorder=0)


def _crowded(labels: Sequence[Label], inch: float) -> bool:
    """Says whether texts of 10 points, centered, would run into each other."""
    return any(
        right.middle - left.middle < 0.045 * inch * (len(left.text) + len(right.text) + 2)
        for left, right in pairwise(labels)
    )


def _again(runs: int) -> str:
    return KEPT if runs == 1 else AGAIN[min(runs, len(AGAIN) + 1) - 2]
