"""The predicted cost of plans: a report on one plan, and the Pareto frontier of memory and time.

Both print as tables and are written to files and read back, without torch. `zoo.checkpoint` takes
a report. Pictures need matplotlib, which is imported when one is drawn.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from zoo.errors import PlanError
from zoo.files import write_file
from zoo.planner.json_reader import read, read_file, read_json
from zoo.planner.plan import Plan, thinned
from zoo.report.escaping import markdown_table, to_csv
from zoo.report.pictures import plots
from zoo.units import format_bytes, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPTIMAL = "optimal"
# labels of the categories whose field names are not clear by themselves
_LABELS = {
    "optimizer": "optimizer state",
    "kept": "activations kept",
    "recomputed": "activations recomputed",
    "between": "state between steps",
    "work": "current step",
    "libraries": "workspaces of libraries",
    "others": "held by others",
}


@dataclass(frozen=True)
class FixedBytes:
    """Bytes of a training step that no plan changes.

    `scratch`: temporaries of the optimizer; `libraries`: workspaces that libraries such as cuBLAS
    hold from the first step on; `others`: what other planned models hold, and DDP's buckets.
    """

    parameters: int
    buffers: int
    gradients: int
    inputs: int
    optimizer: int
    scratch: int
    libraries: int = 0
    others: int = 0

    @property
    def beside_activations(self) -> int:
        """Bytes resident in forward and backward, without gradients of parameters."""
        beside = self.libraries + self.others
        return self.parameters + self.buffers + self.inputs + self.optimizer + beside

    @property
    def optimizer_peak(self) -> int:
        """Bytes in the optimizer's step."""
        return self.beside_activations + self.gradients + self.scratch


@dataclass(frozen=True)
class PeakBytes:
    """The bytes of a training step at its predicted peak by category, each storage counted once.

    A storage in several categories counts in the first of them.

    Attributes:
        moment: "forward of layer1.0.add", "recompute of ...", "backward of ...", or "step of the
            optimizer".
        parameters: the model's, trained or not.
        buffers: the model's, such as running statistics.
        inputs: the model's inputs, and tensors that the loss holds, such as targets.
        optimizer: the optimizer's state.
        gradients: of parameters, as far as the backward has made them; in the optimizer's step all,
            and everywhere where they are accumulated.
        kept: activations held since the forward: saved tensors of kept steps, inputs of segments,
            and the outputs of the model.
        recomputed: activations that a recomputation holds: the same, within a segment.
        between: the input of the current step if nothing else holds it, and the gradient with
            which its backward, or that of its segment, begins.
        work: the peak of the current step: outputs, saved tensors, gradients and temporaries; in
            the optimizer's step its temporaries.
        reserve: what torch holds beside the tensors of a program, such as the gradient of the loss.
        libraries: workspaces that libraries such as cuBLAS hold from the first step on.
        others: what other planned models of the program hold, and DDP's buckets.
    """

    moment: str
    parameters: int
    buffers: int
    inputs: int
    optimizer: int
    gradients: int
    kept: int
    recomputed: int
    between: int
    work: int
    reserve: int
    libraries: int = 0
    others: int = 0

    def by_name(self) -> dict[str, int]:
        """Returns the bytes of each category under a label, in order."""
        sizes = {_LABELS.get(name, name): n for name, n in vars(self).items() if name != "moment"}
        for name in ("libraries", "others"):
            # in most steps there are none
            if not getattr(self, name):
                del sizes[_LABELS[name]]
        return sizes

    @property
    def total(self) -> int:
        """The sum of all categories: the predicted peak."""
        return sum(self.by_name().values())


def estimated_for(device: str) -> str:
    """Returns the words for an estimate without kernel workspaces, and for which device it is."""
    where = f"estimated for {device}, " if device else ""
    return f"{where}without kernel workspaces: no kernel was measured"


def peak_table(categories: Mapping[str, int], peak: int) -> str:
    """Returns a Markdown table of the bytes of each category and its share of the peak."""
    rows = [
        (label, format_bytes(size), f"{size / max(peak, 1):.1%}")
        for label, size in {**categories, "total": peak}.items()
    ]
    return markdown_table(("category", "bytes", "share"), rows)


# the format of saved reports; in format 1 steps were other ranges of a model
FORMAT = 2


@dataclass(frozen=True)
class PlanReport:
    """A plan and its predicted costs.

    Attributes:
        plan: the plan.
        predicted_peak: bytes of the whole training step at its peak.
        predicted_time_ratio: seconds of forward and backward against the baseline's.
        predicted_activations: bytes of activations at their peak, without parameters' gradients.
        budget: bytes; None if a time was given.
        baseline_peak: `predicted_peak` of the baseline.
        least_peak: the least of any plan; beyond 150 steps long segments begin and end at some 400
            states between steps only.
        fixed: bytes that no plan changes.
        at_peak: `predicted_peak` by category.
        flops, recomputed_flops: operations of the forward, and those that are recomputed.
        names, blocks, saved: for each step, its name, its block's number, the bytes that it is the
            first to save.
        title: the model and its inputs.
        kernels_measured: whether kernels were measured, so that their workspaces count.
        device, optimizer, accumulates, holds_outputs, forwards: what it was made for.
        offloaded: bytes that the host holds until the backward, beside all others.
        on_host: those bytes for each step, or for the segment that begins with it; empty if none.
        format: how the steps are numbered.
    """

    plan: Plan
    predicted_peak: int
    predicted_time_ratio: float
    predicted_activations: int
    budget: int | None
    baseline_peak: int
    least_peak: int
    fixed: FixedBytes
    at_peak: PeakBytes
    flops: int
    recomputed_flops: int
    names: tuple[str, ...]
    blocks: tuple[int, ...]
    saved: tuple[int, ...]
    title: str
    kernels_measured: bool = True
    device: str = ""
    optimizer: str = ""
    accumulates: bool = False
    holds_outputs: bool = True
    offloaded: int = 0
    on_host: tuple[int, ...] = ()
    forwards: int = 1
    format: int = FORMAT

    def to_json(self) -> str:
        """Writes the report as JSON."""
        return json.dumps(vars(self), indent=1, default=vars)

    @classmethod
    def from_json(cls, text: str) -> "PlanReport":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: the text holds no report. `Plan.from_json` reads a plan without its costs.
        """
        return read_json(text, "report of a plan", PlanError, _report)

    def save(self, path: str | Path) -> None:
        """Writes the report to a file, as JSON: `load` reads it, and `--checkpoint` takes it."""
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "PlanReport":
        """Reads a file that `save` wrote.

        Raises:
            FileError: the file does not exist or cannot be read.
            PlanError: the file holds no report. A plan without its costs is read by
                `zoo.Plan.from_json(Path(path).read_text())`.
        """
        return cls.from_json(read_file(path))

    @property
    def offloads(self) -> tuple[int, ...]:
        """The kept steps, and first steps of segments, of which the host holds something."""
        return tuple(step for step, size in enumerate(self.on_host) if size)

    def draw(self) -> str:
        """Draws the plan, one line per step, with the bytes on the host."""
        lines = self.plan.draw(self.names).splitlines()
        for step in self.offloads:
            lines[step] += f", {format_bytes(self.on_host[step])} on the host"
        return "\n".join(lines)

    def table(self) -> str:
        """Returns the predictions and the peak by category, as text that is also Markdown."""
        peaks = {
            "peak": self.predicted_peak,
            **self._limits(),
            "least of any plan": self.least_peak,
        }
        predicted = [
            *((name, format_bytes(size), self._of_baseline(size)) for name, size in peaks.items()),
            ("activations", format_bytes(self.predicted_activations), ""),
            *([("on the host", format_bytes(self.offloaded), "")] if self.offloaded else []),
            ("time of forward and backward", "", f"×{self.predicted_time_ratio:.2f}"),
            ("operations of the forward recomputed", "", f"{self._recomputed():.1%}"),
        ]
        optimizer = f" with {self.optimizer}" if self.optimizer else ""
        accumulated = f", {self.forwards} forwards" if self.forwards > 1 else ""
        accumulated += ", gradients accumulated" if self.accumulates else ""
        parts = (
            f"{self.title}, one training step{optimizer}{accumulated}",
            markdown_table(("predicted", "", "of the baseline"), predicted),
            f"At the peak, {self.at_peak.moment}:",
            peak_table(self.at_peak.by_name(), self.predicted_peak),
            "" if self.kernels_measured else estimated_for(self.device),
            str(self.plan),
        )
        return "\n\n".join(filter(None, parts))

    __str__ = table

    def plot(self, target: "str | Path | Axes") -> None:
        """Draws the plan over its steps into a file (.svg, .png, .pdf) or a matplotlib Axes.

        The bar of a step, or of a block where there are many, is as high as the bytes that it
        saves, and colored by how often it runs; on it are those on the host, of a kept step or of
        what a segment starts from. Below are the segments, nested ones below those around them. A
        file also gets the peak by category.

        Raises:
            ArgumentError: matplotlib is not installed, or a file of no known kind.
        """
        plots().draw_plan(
            target,
            self.plan,
            {
                **{"names": self.names, "blocks": self.blocks, "saved": self.saved},
                "on_host": self.on_host,
            },
            title=f"A plan for {self.title}",
            subtitle=f"predicted peak of a training step {format_bytes(self.predicted_peak)}, "
            f"{self._of_baseline(self.predicted_peak)} of the baseline; "
            f"time ×{self.predicted_time_ratio:.2f}; "
            f"{self._recomputed():.1%} of the forward's operations recomputed"
            + (f"; {format_bytes(self.offloaded)} on the host" if self.offloaded else ""),
            peak=self.at_peak.by_name(),
            limits=self._limits(),
        )

    def _limits(self) -> dict[str, int]:
        budget = {} if self.budget is None else {"budget": self.budget}
        return {**budget, "baseline": self.baseline_peak}

    def _of_baseline(self, size: int) -> str:
        return f"×{size / max(self.baseline_peak, 1):.2f}"

    def _recomputed(self) -> float:
        return self.recomputed_flops / max(self.flops, 1)


def _report(values: Any) -> PlanReport:
    if isinstance(values, list):
        raise PlanError(
            "it holds a list, as a plan without its costs is; zoo.Plan.from_json reads that, and "
            "checkpoint= takes the plan"
        )
    if isinstance(values, Mapping) and "plan" in values and values.get("format") != FORMAT:
        raise PlanError(
            "it was saved by another version of zoo, which numbered other steps; make the plan "
            "anew, by zoo.plan(model, inputs, ...).save(file) or `zoo plan ... --save file`"
        )
    report = read(PlanReport, values)
    steps = len(report.plan.flatten())
    for field in ("names", "blocks", "saved", *["on_host"] * bool(report.on_host)):
        count = len(getattr(report, field))
        if count != steps:
            raise PlanError(f"its plan has {steps} steps, its {field} are those of {count}")
    return report


@dataclass(frozen=True)
class Point:
    """A plan on the frontier, or a scheme: peak of a training step in bytes, time ratio.

    `recomputed_share` is a share of the forward's floating-point operations; above 1 if steps are
    recomputed more than once. `offloaded`: bytes that the host holds until the backward; `offloads`
    as in `PlanReport`.
    """

    peak: int
    time_ratio: float
    plan: Plan
    name: str = OPTIMAL
    recomputed_share: float = 0.0
    offloaded: int = 0
    offloads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frontier(Sequence[Point]):
    """The best plans by rising peak and falling time, then the classic schemes: a sequence.

    Attributes:
        points: the plans, each with `name`, `plan`, `peak` (bytes of a whole training step) and
            `time_ratio` (of forward and backward against the baseline's).
        baseline: the plan without recomputation, time ratio 1.
        lower_bound: bytes that no schedule of whole steps goes below without offloading: what no
            plan changes, plus the largest single step or the optimizer's.
        title, kernels_measured, device: as in `PlanReport`.
    """

    points: tuple[Point, ...]
    baseline: Point
    lower_bound: int
    title: str
    kernels_measured: bool = True
    device: str = ""
    format: int = FORMAT

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

    def table(self, points: int = 12) -> str:
        """Returns a line per plan, by rising peak, as text that is also Markdown.

        At most `points` of the best plans are shown, evenly spread, including the first and the
        last, and all classic schemes and the baseline.
        """
        best = self.optimal
        shown = [*thinned(best, points), *self.schemes, self.baseline]
        columns = ("plan", "step peak", "of the baseline", "time", "operations recomputed")
        host = ("on the host",) if any(point.offloaded for point in shown) else ()
        rows = [
            (
                point.name,
                format_bytes(point.peak),
                f"×{self._of_baseline(point):.2f}",
                f"×{point.time_ratio:.2f}",
                f"{point.recomputed_share:.1%}",
                *(format_bytes(point.offloaded) for _ in host),
            )
            for point in sorted(shown, key=lambda point: point.peak)
        ]
        left_out = f", {points} of them shown" if len(best) > points else ""
        return (
            f"{self.title}, one training step: {plural(len(best), 'best plan')}{left_out}\n\n"
            f"{markdown_table((*columns, *host), rows)}\n\n"
            f"no plan goes below {format_bytes(self.lower_bound)}"
            f"{'' if self.kernels_measured else f'; {estimated_for(self.device)}'}"
        )

    __str__ = table

    def _of_baseline(self, point: Point) -> float:
        return point.peak / max(self.baseline.peak, 1)

    def to_json(self) -> str:
        """Writes all of it as JSON."""
        return json.dumps(vars(self), indent=1, default=vars)

    @classmethod
    def from_json(cls, text: str) -> "Frontier":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: the text holds no frontier.
        """
        return read_json(text, "frontier", PlanError, functools.partial(read, cls))

    def to_csv(self) -> str:
        """Writes a line per plan: its name, bytes, ratios, and the text that `Plan.parse` reads."""
        names = ("name", "peak_bytes", "peak_ratio", "time_ratio", "plan")
        values = (
            (point.name, point.peak, self._of_baseline(point), point.time_ratio, point.plan.text())
            for point in (*self.points, self.baseline)
        )
        return to_csv(dict(zip(names, row, strict=True)) for row in values)

    def plot(self, target: "str | Path | Axes") -> None:
        """Draws peak memory against predicted time into a file (.svg, .png, .pdf) or an Axes.

        It shows the least time for every budget as a staircase, the classic schemes by name, the
        baseline, the least memory of any plan and the lower bound.

        Raises:
            ArgumentError: matplotlib is not installed, or the file's suffix is another one.
        """
        plots().draw_frontier(target, self.summary(), f"Memory and time of {self.title}")

    def summary(self) -> dict[str, Any]:
        """Returns what a picture shows, in bytes: pairs of peak and time ratio, and two peaks."""
        return {
            "optimal": [(point.peak, point.time_ratio) for point in self.optimal],
            "schemes": {point.name: (point.peak, point.time_ratio) for point in self.schemes},
            "baseline": self.baseline.peak,
            "lower_bound": self.lower_bound,
        }
