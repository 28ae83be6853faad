"""Draws memory over time: categories stacked, phases shaded, the peak marked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.errors import ArgumentError, shortened
from zoo.report.escape import visible
from zoo.units import BINARY, format_bytes

# matplotlib has others, of which not all take what is asked of them here
PICTURES = (".svg", ".png", ".pdf")
INK, FAINT_INK, GRID = "#24292f", "#57606a", "#e6e8eb"
# resident bytes are gray, activations colored
COLORS = {
    "parameters": "#8c96a3",
    "buffers": "#6e7781",
    "optimizer state": "#b8bec8",
    "inputs": "#d5d9df",
    "gradients": "#c39bd3",
    "saved activations": "#1f6feb",
    "recomputed": "#e8912d",
    "temporaries": "#8ec5ff",
    "unseen": "#e5534b",
}
SHADES = {"backward": "#eef2f7", "recompute": "#fdf0de", "optimizer": "#eef7ee"}


def draw_timeline(
    path: str | Path,
    *,
    title: str,
    curves: Mapping[str, Sequence[int]],
    phases: Sequence[tuple[int, str]],
    peak: tuple[int, int],
) -> None:
    """Draws curves of bytes at points, each a category, to a file whose suffix says its kind.

    Raises:
        ArgumentError: matplotlib is missing, or does not know such a file.
    """
    try:
        # an extra; a Figure without pyplot leaves the program's backend alone
        import matplotlib as library  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ArgumentError(
            "drawing needs matplotlib: pip install 'zoo-checkpoint[compare]'"
        ) from error
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURES:
        raise ArgumentError(f"{shortened(str(path))} must end in one of {', '.join(PICTURES)}")
    # the same numbers make the same file
    style: Any = {"svg.hashsalt": "zoo", "font.size": 10, "text.color": INK}
    # nor does a title hold a formula
    with library.rc_context({**style, "text.parse_math": False}):
        axes = figure.subplots()
        figure.suptitle(visible(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
        _shade(axes, phases, max(map(len, curves.values()), default=1) - 1)
        _stack(axes, curves, peak)
        figure.savefig(path, dpi=160, metadata={"Date": None} if suffix == ".svg" else {})


def _stack(axes: Any, curves: Mapping[str, Sequence[int]], peak: tuple[int, int]) -> None:
    point, most = peak
    unit = max(power for power in range(len(BINARY)) if most >= 1024**power or not power)
    scaled = {name: [size / 1024**unit for size in curve] for name, curve in curves.items()}
    points = range(max(map(len, curves.values()), default=0))
    colors = [COLORS[name] for name in scaled]
    axes.stackplot(points, *scaled.values(), labels=scaled, colors=colors, step="post", lw=0)
    height = most / 1024**unit
    axes.plot(point, height, "v", color=INK, ms=7, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(most)}", (point, height), (0, 8), textcoords="offset points",
        ha="center", fontsize=9,
    )  # fmt: skip
    axes.set_xlim(0, max(len(points) - 1, 1))
    axes.set_ylim(0, height * 1.12 or 1)
    axes.set_ylabel(BINARY[unit])
    axes.set_xlabel("allocations and releases, in their order", color=FAINT_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.figure.legend(frameon=False, loc="outside right upper", reverse=True, fontsize=9)


def _shade(axes: Any, phases: Sequence[tuple[int, str]], end: int) -> None:
    ends = [*(point for point, _ in phases[1:]), end]
    named: set[str] = set()
    for (start, phase), stop in zip(phases, ends, strict=False):
        if phase in SHADES and stop > start:
            label = {"label": f"in {phase}"} if phase not in named else {}
            named.add(phase)
            axes.axvspan(start, stop, color=SHADES[phase], lw=0, zorder=0, **label)
