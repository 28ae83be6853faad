"""The curve of the best plans: how much memory costs how much time, as data and as a picture.

It knows no torch. Pictures need matplotlib, which is imported when one is asked for.
"""

import csv
import functools
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

from zoo.errors import PlanError
from zoo.plan import Plan
from zoo.plan_report import ON_PAPER, no_matplotlib
from zoo.planner.thinned import thinned
from zoo.report.markdown import markdown_table
from zoo.serialization import read, read_json
from zoo.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPTIMAL = "optimal"


@dataclass(frozen=True)
class Point:
    """A plan on the frontier, or a scheme beside it: peak of a training step, time ratio.

    `run_again` is the share of the forward's floating point operations that are done again; it may
    be above 1, where steps run more than twice.
    """

    peak: int
    time_ratio: float
    plan: Plan
    name: str = OPTIMAL
    run_again: float = 0.0


@dataclass(frozen=True)
class Frontier(Sequence[Point]):
    """The best plans by rising peak and falling time, then the classic schemes: a sequence.

    Peaks are bytes of a whole training step, time ratios those of forward and backward against
    keeping everything.

    Attributes:
        points: the plans.
        baseline: the plan that keeps everything, time ratio 1.
        lower_bound: bytes that no plan goes below: what no plan changes (parameters, buffers,
            inputs, optimizer state), and the most that one step takes, alone: in its forward the
            state that it starts from and what it allocates; in its backward what it saved, what
            the model returned, the gradients that are there when it comes, and what it allocates;
            or the optimizer's step.
            It holds for any other schedule of these steps, too, but one that moves states off the
            device or runs parts of a step. Time has a bound as well: 1, as nothing is run again.
        title: the model and its inputs.
        tried: whether each kind of step was run, so that what its kernels allocate inside of
            themselves counts; on paper it does not.
    """

    points: tuple[Point, ...]
    baseline: Point
    lower_bound: int
    title: str
    tried: bool = True

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Point, ...]: ...
    def __getitem__(self, index: int | slice) -> Point | tuple[Point, ...]:
        return self.points[index]

    def __len__(self) -> int:
        return len(self.points)

    @property
    def optimal(self) -> tuple[Point, ...]:
        """The best plans, by rising peak and falling time."""
        return tuple(point for point in self.points if point.name == OPTIMAL)

    @property
    def schemes(self) -> tuple[Point, ...]:
        """The classic schemes."""
        return tuple(point for point in self.points if point.name != OPTIMAL)

    def __str__(self) -> str:
        return self.table()

    def table(self, points: int = 12) -> str:
        """Returns a line per plan as text that is also Markdown, of `points` of the best at most.

        These are spread evenly, the first and the last among them; then come the classic schemes
        and keeping everything, all by rising peak.
        """
        best = self.optimal
        shown = [*thinned(best, points), *self.schemes, self.baseline]
        columns = ("plan", "step peak", "of keeping all", "time", "operations run again")
        rows = list(self._rows(sorted(shown, key=lambda point: point.peak)))
        count = "1 best plan" if len(best) == 1 else f"{len(best)} best plans"
        left_out = f", {points} of them shown" if len(best) > points else ""
        return (
            f"{self.title}, one training step: {count}{left_out}\n\n"
            f"{markdown_table(columns, rows)}\n\n"
            f"no plan goes below {format_bytes(self.lower_bound)}"
            f"{'' if self.tried else f'; {ON_PAPER}'}"
        )

    def _rows(self, points: Sequence[Point]) -> Iterator[tuple[str, ...]]:
        for point in points:
            share = point.peak / max(self.baseline.peak, 1)
            times = f"×{share:.2f}", f"×{point.time_ratio:.2f}"
            yield point.name, format_bytes(point.peak), *times, f"{point.run_again:.1%}"

    def to_json(self) -> str:
        """Writes all of it as JSON."""
        return json.dumps(vars(self), indent=1, default=vars)

    @classmethod
    def from_json(cls, text: str) -> "Frontier":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: it is no such text.
        """
        return read_json(text, "frontier", PlanError, functools.partial(read, cls))

    def to_csv(self) -> str:
        """Writes a line per plan: its name, bytes, ratios, and the text that `Plan.parse` reads."""
        with io.StringIO(newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "peak_bytes", "peak_ratio", "time_ratio", "plan"])
            for point in (*self.points, self.baseline):
                ratio = point.peak / max(self.baseline.peak, 1)
                writer.writerow(
                    [point.name, point.peak, ratio, point.time_ratio, point.plan.text()]
                )
            return file.getvalue()

    def plot(self, target: "str | Path | Axes") -> None:
        """Draws the curve into a file (.svg, .png, .pdf) or a matplotlib Axes.

        Peak memory against predicted time: the least time for every budget as a staircase, the
        classic schemes by name, keeping everything, the least memory of any plan and the lower
        bound.

        Raises:
            ArgumentError: matplotlib is not installed, or a file of no known kind.
        """
        try:
            # drawing is optional, and so is what it needs
            from zoo.report.frontier_plot import FrontierPicture, draw_frontier  # noqa: PLC0415
        except ImportError as error:
            raise no_matplotlib() from error
        picture = FrontierPicture(
            title=f"Memory and time of {self.title}",
            curve=[(point.peak, point.time_ratio) for point in self.optimal],
            schemes={point.name: (point.peak, point.time_ratio) for point in self.schemes},
            baseline=self.baseline.peak,
            lower_bound=self.lower_bound,
        )
        draw_frontier(picture, target)
