"""Draws the picture of README.md: `python docs/picture.py`; needs matplotlib.

One training step of ResNet-50 by SGD with momentum, at the size of the README's table, without
recomputation, with it, and with the optimizer in the backward, too: the bytes of torch's CPU
allocator, event by event. Writes docs/memory-light.svg and docs/memory-dark.svg, prints the peaks.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.nn import functional as F

import zoo

HERE = Path(__file__).parent
BATCH = 5
WARM_UP = 2  # steps: the plan is made in the first, the optimizer's state is there after it
POINTS = 160  # in a panel
MIB = 2**20

# what is drawn, from the bottom: its categories in a timeline and its color on light and on dark
LAYERS = {
    "weights, optimizer state, batch": (
        ("parameters", "buffers", "optimizer state", "inputs"),
        ("#8c959f", "#6e7681"),
    ),
    "gradients": (("gradients",), ("#d4a72c", "#bb8009")),
    "activations": (("saved activations", "temporaries"), ("#54aeff", "#388bfd")),
    "recomputed": (("recomputed",), ("#4ac26b", "#3fb950")),
    "kernel workspaces": (("kernel workspace",), ("#c297ff", "#a371f7")),
}
THEMES = {"light": ("#1f2328", "#d1d9e0"), "dark": ("#f0f6fc", "#3d444d")}  # ink, lines


def measured(checkpoint: bool, optimizer_in_backward: bool) -> zoo.Timeline:
    """Trains some steps of ResNet-50 and tracks the last one."""
    torch.manual_seed(0)
    model = zoo.resnet50(checkpoint=checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if optimizer_in_backward:
        zoo.optimizer_in_backward(model, optimizer)
    images, labels = torch.rand(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    inputs = (images, labels)
    with zoo.track(model, optimizer=optimizer, inputs=inputs, allocator=True) as timeline:
        step()
    return timeline


def thinned(total: Sequence[int]) -> list[int]:
    """Returns the points to draw: the first and the last, of each range the one of most bytes."""
    edges = [len(total) * number // POINTS for number in range(POINTS + 1)]
    spans = [range(*span) for span in itertools.pairwise(edges)]
    highest = (max(span, key=total.__getitem__) for span in spans if span)
    return sorted({0, len(total) - 1, *highest})


def draw(axes: Axes, title: str, timeline: zoo.Timeline, most: int, theme: str) -> None:
    """Draws one step: its bytes by category and a line at its peak."""
    number, (ink, line) = list(THEMES).index(theme), THEMES[theme]
    total = timeline.total()
    points = thinned(total)
    curves = [timeline.total(categories) for categories, _ in LAYERS.values()]
    colors = [shades[number] for _, shades in LAYERS.values()]
    heights = [[curve[point] / MIB for point in points] for curve in curves]
    axes.stackplot(points, heights, colors=colors, labels=list(LAYERS), linewidth=0)
    for phase, align in {"forward": "left", "backward": "left", "optimizer": "right"}.items():
        start = next((mark.point for mark in timeline.phases if mark.phase == phase), None)
        if start is None:  # in the backward
            continue
        axes.vlines(start, 0, total[start] / MIB, color=ink, linewidth=0.7, linestyle=(0, (2, 2)))
        spot = (timeline.length if align == "right" else start, 0)
        axes.annotate(
            phase, spot, (0, -5), textcoords="offset points", ha=align, va="top", fontsize=9.5,
            color=ink,
        )  # fmt: skip
    peak = timeline.peak
    share = f"  (×{peak / most:.2f})" if peak < most else ""
    axes.axhline(peak / MIB, color=ink, linewidth=1)
    axes.annotate(
        f"peak {peak / MIB:.0f} MiB{share}", (0, peak / MIB), (0, 4), textcoords="offset points",
        fontsize=11, fontweight="bold", color=ink,
    )  # fmt: skip
    axes.set_title(title, fontsize=11, color=ink, family="monospace", loc="left", pad=10)
    axes.set_xlim(0, timeline.length)
    axes.set_xticks([])
    axes.tick_params(axis="y", colors=ink, length=0, labelsize=9.5)
    axes.set_yticks([0, 200, 400, 600], ["0", "200", "400", "600 MiB"])
    axes.grid(axis="y", color=line, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.patch.set_alpha(0)


def picture(timelines: Mapping[str, zoo.Timeline], theme: str) -> Figure:
    """Draws the steps side by side on the same scale."""
    figure = Figure(figsize=(10, 3.9))
    panels = figure.subplots(1, len(timelines), sharey=True)
    most = max(timeline.peak for timeline in timelines.values())
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        draw(axes, title, timeline, most, theme)
    panels[0].set_ylim(0, most / MIB * 1.1)
    found = panels[0].get_legend_handles_labels()
    figure.legend(
        *found, loc="lower center", ncols=len(LAYERS), frameon=False, fontsize=10,
        labelcolor=THEMES[theme][0], handlelength=1, handleheight=1, columnspacing=1.6,
    )  # fmt: skip
    figure.subplots_adjust(left=0.07, right=0.995, top=0.9, bottom=0.17, wspace=0.06)
    return figure


def main() -> None:
    """Measures, draws and prints."""
    variants: dict[str, Callable[[], zoo.Timeline]] = {
        "zoo.resnet50()": lambda: measured(False, False),
        "zoo.resnet50(checkpoint=True)": lambda: measured(True, False),
        "+ zoo.optimizer_in_backward": lambda: measured(True, True),
    }
    timelines = {title: run() for title, run in variants.items()}
    for title, timeline in timelines.items():
        print(f"{title:32} {timeline.peak / MIB:.0f} MiB")
    # letters as outlines look alike everywhere; no date, so that a picture changes with its numbers
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "zoo"}):
        for theme in THEMES:
            path = HERE / f"memory-{theme}.svg"
            picture(timelines, theme).savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
