"""What a plan should cost, as data: for people to read, for files, for `zoo.checkpoint`.

It knows no torch. Pictures need matplotlib, which is imported when one is asked for.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import ArgumentError, PlanError
from zoo.plan import Plan
from zoo.planner.simulate import Moment
from zoo.report.markdown import markdown_table
from zoo.serialization import read, read_file, read_json
from zoo.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# what is not among bytes that are predicted on paper
ON_PAPER = "without what kernels take inside of themselves"


@dataclass(frozen=True)
class FixedBytes:
    """Bytes of a training step that no plan changes. `scratch` is the optimizer's, in its step."""

    parameters: int
    buffers: int
    gradients: int
    inputs: int
    optimizer: int
    scratch: int

    @property
    def beside_activations(self) -> int:
        """Bytes that are there in forward and backward, the gradients of parameters left out."""
        return self.parameters + self.buffers + self.inputs + self.optimizer

    @property
    def optimizer_peak(self) -> int:
        """Bytes in the optimizer's step."""
        return self.beside_activations + self.gradients + self.scratch


@dataclass(frozen=True)
class PeakBytes:
    """What the bytes of a training step are at its predicted peak, each counted once.

    A storage that is two of these counts as the first: parameters, buffers, inputs, kept, again.

    Attributes:
        moment: when that is: "forward of layer1.0.add", "second run of ...", "backward of ...", or
            "step of the optimizer".
        parameters: the model's, trained or not.
        buffers: the model's, such as running statistics.
        inputs: what the model is called with.
        optimizer: the optimizer's state.
        gradients: of parameters, as far as later steps have left them; in the optimizer's step all.
        kept: activations held since the first run: what kept steps save, what segments begin with,
            and what the model returned.
        again: activations that second runs have made and hold: likewise, inside of a segment.
        between: the state from which the step at work starts where nobody holds it, and the
            gradient with which its backward, or that of its segment, begins.
        work: the most that the step at work allocates: what it returns and saves, gradients that it
            makes, and what it needs meanwhile; in the optimizer's step what that allocates.
        reserve: states of random streams that second runs swap, and a margin where there is one.
    """

    moment: str
    parameters: int
    buffers: int
    inputs: int
    optimizer: int
    gradients: int
    kept: int
    again: int
    between: int
    work: int
    reserve: int

    def by_name(self) -> dict[str, int]:
        """Returns the bytes of each category under the words for it, in order."""
        return {words: getattr(self, field) for field, words in CATEGORIES.items()}

    @classmethod
    def in_optimizer(cls, fixed: FixedBytes, peak: int) -> "PeakBytes":
        """Tells a peak in the optimizer's step apart."""
        return cls._beside(
            fixed, peak, "step of the optimizer", gradients=fixed.gradients, work=fixed.scratch
        )

    @classmethod
    def in_run(
        cls, fixed: FixedBytes, peak: int, moment: Moment, gradients: int, step: str
    ) -> "PeakBytes":
        """Tells a peak in forward or backward apart; `gradients` is the parameters' share."""
        return cls._beside(
            fixed,
            peak,
            f"{moment.phase} of {step}",
            gradients=gradients,
            kept=moment.kept,
            again=moment.again,
            between=moment.state + moment.gradient - gradients,
            work=moment.work,
        )

    @classmethod
    def _beside(cls, fixed: FixedBytes, peak: int, moment: str, **parts: int) -> "PeakBytes":
        known = {"kept": 0, "again": 0, "between": 0, **parts}
        return cls(
            moment=moment,
            parameters=fixed.parameters,
            buffers=fixed.buffers,
            inputs=fixed.inputs,
            optimizer=fixed.optimizer,
            reserve=peak - fixed.beside_activations - sum(known.values()),
            **known,
        )

    @property
    def total(self) -> int:
        """The sum of all categories: the predicted peak."""
        return sum(self.by_name().values())


CATEGORIES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "inputs": "inputs",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "kept": "activations kept",
    "again": "activations run again",
    "between": "between steps",
    "work": "step at work",
    "reserve": "reserve",
}


@dataclass(frozen=True)
class PlanReport:
    """A plan and what it should cost.

    Attributes:
        plan: the plan.
        predicted_peak: bytes of the whole training step at its peak.
        predicted_time_ratio: seconds of forward and backward against keeping everything.
        predicted_activations: bytes of activations at their peak, gradients of parameters left out.
        budget: bytes, None where time was given.
        baseline_peak: `predicted_peak` when everything is kept.
        least_peak: the smallest that any plan reaches; in a chain of more than 150 steps, any whose
            long segments begin and end at some 400 states of it, chosen between blocks.
        fixed: bytes that no plan changes.
        at_peak: `predicted_peak` by category.
        flops: operations of the forward, and those that are run again.
        names: the steps.
        blocks: for each step, the number of its block.
        saved: for each step, bytes that it saves for its backward and no step before it does.
        title: the model and its inputs.
        tried: whether each kind of step was run, so that what its kernels allocate inside of
            themselves counts; on paper it does not.
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
    tried: bool = True

    def to_json(self) -> str:
        """Writes the report as JSON."""
        return json.dumps(vars(self), indent=1, default=vars)

    @classmethod
    def from_json(cls, text: str) -> "PlanReport":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: it is no such text. A plan alone, nested lists, is read by `Plan.from_json`.
        """
        return read_json(text, "report of a plan", PlanError, _report)

    def save(self, path: str | Path) -> None:
        """Writes the report to a file, as JSON: `load` reads it, and `--checkpoint` takes it."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "PlanReport":
        """Reads a file that `save` wrote.

        Raises:
            FileError: there is no such file, or it cannot be read.
            PlanError: it is no such file. One that holds a plan alone, as nested lists, is read by
                `zoo.Plan.from_json(Path(path).read_text())`.
        """
        return cls.from_json(read_file(path))

    def draw(self) -> str:
        """Draws the plan, one line per step."""
        return self.plan.draw(self.names)

    def table(self) -> str:
        """Returns what is predicted and the peak by category, as text that is also Markdown."""
        return "\n".join(
            (
                f"{self.title}, one training step\n",
                markdown_table(
                    ("predicted", "", "of keeping everything"), list(self._predictions())
                ),
                f"\nAt the peak, {self.at_peak.moment}:\n",
                markdown_table(("what", "bytes", "share"), list(self._shares())),
                *([] if self.tried else [f"\n{ON_PAPER}"]),
                f"\n{self.plan}",
            )
        )

    def plot(self, target: "str | Path | Axes") -> None:
        """Draws the plan over its chain into a file (.svg, .png, .pdf) or a matplotlib Axes.

        A bar per step, or per block of a long chain, is as high as what the step saves and colored
        by whether that is kept or how often the step runs; below it are the segments, nested ones
        below those around them. A file also gets the peak by category.

        Raises:
            ArgumentError: matplotlib is not installed, or a file of no known kind.
        """
        try:
            # drawing is optional, and so is what it needs
            from zoo.report.plan_plot import PlanPicture, draw_plan  # noqa: PLC0415
        except ImportError as error:
            raise no_matplotlib() from error
        picture = PlanPicture(
            title=f"A plan for {self.title}",
            subtitle=self._subtitle(),
            plan=self.plan,
            names=self.names,
            blocks=self.blocks,
            saved=self.saved,
            peak=self.at_peak.by_name(),
            limits=self._limits(),
        )
        draw_plan(picture, target)

    def __str__(self) -> str:
        return self.table()

    def _predictions(self) -> Iterator[tuple[str, str, str]]:
        yield "peak", format_bytes(self.predicted_peak), self._of_baseline(self.predicted_peak)
        for name, size in self._limits().items():
            yield name, format_bytes(size), self._of_baseline(size)
        yield "least of any plan", format_bytes(self.least_peak), self._of_baseline(self.least_peak)
        yield "activations", format_bytes(self.predicted_activations), ""
        yield "time of forward and backward", "", f"×{self.predicted_time_ratio:.2f}"
        yield "operations of the forward run again", "", f"{self._again():.1%}"

    def _shares(self) -> Iterator[tuple[str, str, str]]:
        for words, size in {**self.at_peak.by_name(), "in all": self.predicted_peak}.items():
            yield words, format_bytes(size), f"{size / max(self.predicted_peak, 1):.1%}"

    def _limits(self) -> dict[str, int]:
        budget = {} if self.budget is None else {"budget": self.budget}
        return {**budget, "keeping everything": self.baseline_peak}

    def _subtitle(self) -> str:
        return (
            f"predicted peak of a training step {format_bytes(self.predicted_peak)}, "
            f"{self._of_baseline(self.predicted_peak)} of keeping everything; "
            f"time ×{self.predicted_time_ratio:.2f}; "
            f"{self._again():.1%} of the forward's operations run again"
        )

    def _of_baseline(self, size: int) -> str:
        return f"×{size / max(self.baseline_peak, 1):.2f}"

    def _again(self) -> float:
        return self.recomputed_flops / max(self.flops, 1)


def _report(values: Any) -> PlanReport:
    if isinstance(values, list):
        raise PlanError(
            "it holds a list, as a plan without its costs does; zoo.Plan.from_json reads that, and "
            "checkpoint= takes the plan"
        )
    report = read(PlanReport, values)
    steps = len(report.plan.flatten())
    for field in ("names", "blocks", "saved"):
        found = len(getattr(report, field))
        if found != steps:
            raise PlanError(f"its plan has {steps} steps, its {field} are those of {found}")
    return report


def no_matplotlib() -> ArgumentError:
    """Returns the error that a picture raises without what draws it."""
    return ArgumentError("a picture needs matplotlib: pip install 'zoo-checkpoint[compare]'")
