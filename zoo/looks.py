"""What a training step of some size needs: each size is looked at once, as cheaply as will do.

    on fake tensors     the model is watched and its steps measured, once for each size
    for real            where it fits so far, each kind of step adds what its kernels hide, or what
                        they hid at a smaller size, where running it takes seconds
    the least peak      of all plans is what a search asks; the best plan is for the size found

What no size changes, such as the optimizer's state, is counted once.
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zoo.ahead import look_ahead
from zoo.checkpointing import Decide, PlannedRunner, runner_for
from zoo.entry import Loss
from zoo.errors import ArgumentError, BudgetError, InputError
from zoo.measure.optimizer import MakeOptimizer, OptimizerBytes
from zoo.measure.scaling import PATIENCE, Patient
from zoo.plan import Plan
from zoo.planning import Prospect
from zoo.tracing.entry import runner_of
from zoo.tracing.isolated import TraceError
from zoo.units import format_bytes
from zoo.vary import Varied

UNBOUNDED = 2**63
_log = logging.getLogger("zoo.largest")


@dataclass(frozen=True)
class Look:
    """What a training step of some size needs, and the plan that it would run by."""

    needed: int
    peak: int
    plan: Plan
    time_ratio: float


@dataclass(frozen=True)
class Choice:
    """How the plan of a size is chosen: what it needs at the least, and the plan for a budget."""

    least: Callable[[Prospect], Look]
    within: Callable[[Prospect, Look, int], Look]
    seconds_are_free: bool = True

    @classmethod
    def of(cls, model: nn.Module, checkpoint: Any, max_overhead: float | None) -> "Choice":
        """Returns how a training with this option would choose.

        Raises:
            ArgumentError: no such option, or the plans of what runs the model are not known.
        """
        if checkpoint == "auto" or (max_overhead is not None and checkpoint in (None, False)):
            if max_overhead is None:
                return cls(_least_of_all, _fastest)
            return cls(functools.partial(_within_time, max_overhead), _settled, False)
        asked = checkpoint is not None
        runner = runner_for(checkpoint, None, max_overhead) if asked else runner_of(model)
        if runner is None:
            return cls(lambda prospect: _by_plan(prospect, Plan.keep_all(prospect.steps)), _settled)
        if isinstance(runner, PlannedRunner):
            return cls(functools.partial(_decided, runner.decide, model), _settled)
        raise ArgumentError(
            f"the plans of a {type(runner).__name__} are not known; pass checkpoint="
        )


def _settled(prospect: Prospect, look: Look, budget: int) -> Look:
    return look


def _decided(decide: Decide, model: nn.Module, prospect: Prospect) -> Look:
    try:
        plan = decide(model, prospect.outline, prospect.state)  # type: ignore[arg-type]
        return _by_plan(prospect, plan)
    except BudgetError as error:
        raise ArgumentError(
            "the model already has a budget, which ends the search; pass checkpoint='auto'"
        ) from error


def _by_plan(prospect: Prospect, plan: Plan) -> Look:
    point = prospect.point(plan)
    return Look(point.peak, point.peak, plan, point.time_ratio)


def _least_of_all(prospect: Prospect) -> Look:
    least = prospect.least
    return Look(least.peak, least.peak, least.plan, least.time_ratio)


def _fastest(prospect: Prospect, look: Look, budget: int) -> Look:
    report = prospect.report(max(budget, look.needed), None)
    return Look(look.needed, report.predicted_peak, report.plan, report.predicted_time_ratio)


def _within_time(max_overhead: float, prospect: Prospect) -> Look:
    report = prospect.report(None, max_overhead)
    peak = report.predicted_peak
    return Look(peak, peak, report.plan, report.predicted_time_ratio)


def _is_of_size(error: InputError | TraceError) -> bool:
    """Says whether the model may take another size."""
    return isinstance(error, InputError) or error.raised


@dataclass(frozen=True)
class Question:
    """What is asked: the inputs of a size, and all else but the budget."""

    model: nn.Module
    inputs: Varied
    choice: Choice
    unit: int
    optimizer: MakeOptimizer | None
    loss: Loss | None
    device: str | None


@dataclass
class Looks:
    """What was seen of a model at sizes, counted in units; None where it takes no such size."""

    question: Question
    paper: dict[int, Prospect | None] = field(default_factory=dict)
    real: dict[int, Prospect] = field(default_factory=dict)
    known: dict[tuple[int, bool], Look] = field(default_factory=dict)
    patient: Patient = field(default_factory=Patient)
    optimizer: OptimizerBytes | None = None

    def first(self) -> tuple[int, Prospect]:
        """Looks at the sample's size, or at twice that: one example may be too few for a norm."""
        start = max(self.question.inputs.start // self.question.unit, 1)
        refused: InputError | TraceError | None = None
        for count in (start, 2 * start):
            try:
                found = self.paper[count] = self._prospect(count)
                return count, found
            except (InputError, TraceError) as error:
                if not _is_of_size(error):
                    raise
                self.paper[count], refused = None, refused or error
        assert refused is not None
        raise refused

    def needed(self, count: int, budget: int) -> int | None:
        """Returns the bytes that a size needs: with what kernels hide, where it fits without."""
        prospect = self._on_paper(count)
        if prospect is None:
            return None
        found = None
        if not self._is_tried(prospect) or self.question.choice.seconds_are_free:
            found = self._look(count, prospect, is_real=False).needed
        if self._is_tried(prospect) and (found is None or found <= budget):
            found = self._look(count, self._for_real(count), is_real=True).needed
        assert found is not None
        _log.info("size %d needs %s", count * self.question.unit, format_bytes(found))
        return found

    def within(self, count: int, budget: int) -> Look:
        """Returns what a size needs that fits, and its plan for a budget."""
        prospect = self.real.get(count) or self.paper[count]
        assert prospect is not None
        look = self.known[count, count in self.real]
        return self.question.choice.within(prospect, look, budget)

    def smallest(self) -> tuple[int, int]:
        """Returns the least bytes that any size seen needs, and that size."""
        return min((look.needed, count) for (count, _), look in self.known.items())

    def seconds(self, count: int) -> float:
        """Returns about how long forward and backward take, infinite where that is not known."""
        found = self.real.get(count)
        if found is None:
            return math.inf
        return sum(found.costs.seconds) + sum(found.costs.seconds_backward)

    def _is_tried(self, prospect: Prospect) -> bool:
        return self.question.device is None and prospect.place.type != "meta"

    def _look(self, count: int, prospect: Prospect, is_real: bool) -> Look:
        if (count, is_real) not in self.known:
            self.known[count, is_real] = self.question.choice.least(prospect)
        return self.known[count, is_real]

    def _for_real(self, count: int) -> Prospect:
        if count not in self.real:
            prospect = self.paper[count]
            assert prospect is not None
            self._get_ready(count, prospect)
            self.real[count] = prospect.tried(self.patient.trials(prospect.profile))
        return self.real[count]

    def _get_ready(self, count: int, prospect: Prospect) -> None:
        """Runs the steps at the largest size where that takes seconds, before larger ones.

        Small sizes do not tell how long larger ones take: what starts a kernel takes time, too.
        """
        start = min(n for n, found in self.paper.items() if found is not None)
        sizes = [n for n in self.real if n < count] or [min(start, count)]
        while (size := max(sizes)) < count and self.patient.seconds(prospect.profile) > PATIENCE:
            if size not in self.real and not self._run(size):
                return
            taken = self.seconds(size)
            if len(self.real) > 1 and taken > PATIENCE / 2:
                return
            sizes.append(size * max(2, int(PATIENCE / max(taken, 1e-9))))

    def _run(self, count: int) -> bool:
        """Runs the steps at a size; False where there is none."""
        found = self._on_paper(count)
        if found is not None:
            self.real[count] = found.tried(self.patient.run(found.profile))
        return found is not None

    def _on_paper(self, count: int) -> Prospect | None:
        if count not in self.paper:
            try:
                self.paper[count] = self._prospect(count)
            except (InputError, TraceError) as error:
                if not _is_of_size(error):
                    raise
                self.paper[count] = None
        return self.paper[count]

    def _prospect(self, count: int) -> Prospect:
        """Looks at a size on fake tensors."""
        question, size = self.question, count * self.question.unit
        try:
            found = look_ahead(
                question.model,
                question.inputs.on_paper(size),
                optimizer=self.optimizer or question.optimizer,
                loss=question.loss,
                device=question.device or "cpu",
            )
        except Exception as error:
            error.add_note(f"the size looked at was {size}")
            raise
        self.optimizer = found.optimizer
        return found
