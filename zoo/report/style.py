"""What the pictures of this package share: colors that the color-blind tell apart, and type."""

from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zoo.errors import ArgumentError
from zoo.report.escape import visible

PICTURES = (".svg", ".png", ".pdf")
BASELINE, KEPT, INK, FAINT_INK, GRID = "#b8bec8", "#1f6feb", "#24292f", "#57606a", "#e6e8eb"
# by how often a step runs: the darker the more often, and blue beside them for any eye
AGAIN = ("#f2b134", "#d9730d", "#8f3d06")
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    # a name may hold a $
    "text.parse_math": False,
    # the same numbers make the same file
    "svg.hashsalt": "zoo",
}


def bare(axes: Axes, grid: Literal["x", "y", "both"] = "x") -> None:
    """Leaves a grid of one axis and nothing else that holds no number."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID, lw=0.8)


def head(figure: Figure, title: str, subtitle: str) -> None:
    """Writes a title and a line below it above everything else."""
    inch = 1 / figure.get_figheight()
    figure.text(0.01, 1 - 0.12 * inch, visible(title), va="top", fontsize=13, fontweight="bold")
    line = visible(subtitle)
    figure.text(0.01, 1 - 0.4 * inch, line, va="top", fontsize=9, color=FAINT_INK)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, 0, 1, 1 - 0.65 * inch))


def write(figure: Figure, path: str | Path) -> None:
    """Saves a figure in the format of the path's suffix: svg, png, pdf.

    Raises:
        ArgumentError: a suffix of no format.
    """
    place = Path(path)
    kind = place.suffix.lower()
    if kind not in PICTURES:
        raise ArgumentError(
            f"{place.name!r} names no kind of picture; end it with .svg, .png or .pdf"
        )
    with rc_context(STYLE):
        figure.savefig(place, dpi=160, metadata={"Date": None} if kind == ".svg" else {})
