"""The largest batch, sequence or volume whose whole training step keeps to a memory budget.

Trying sizes until one runs out of memory, as Lightning's batch size finder and its kind do, needs
the device, finds a power of two or some size near the limit, and cannot ask about another device or
about less memory than there is. Here each size is looked at on paper, by the bytes of `zoo.plan`:

    on fake tensors                nothing of the model's size is allocated; finds a first answer
    with what kernels hide         each kind of step runs once, alone: corrects it by some sizes
    one real training step         of a copy of the model, where it fits beside the model: measured

The last two need the device and are left out where it is not here.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from zoo.adapter.entry import runner_of
from zoo.adapter.front import checkpoint as put_in_force
from zoo.ahead import look_ahead
from zoo.checkpointing import Checkpoint, Decide, PlannedRunner, runner_for
from zoo.entry import Inputs, Loss, place_of
from zoo.errors import ArgumentError, BudgetError, InputError
from zoo.measure.optimizer import MakeOptimizer
from zoo.measure.rehearsal import rehearse
from zoo.plan import Plan
from zoo.planner.search import Needed, largest_within
from zoo.planning import Prospect
from zoo.units import format_bytes
from zoo.vary import Varied, Vary, varied
from zoo.verification.records import read_streams, set_streams


@dataclass(frozen=True)
class Largest:
    """The largest size that keeps to a budget, and what its training step takes.

    Attributes:
        size: of the batch, or of what else varies.
        budget: bytes.
        predicted_peak: bytes of the whole training step.
        next_peak: bytes, at the least, that the next larger size needs; None where the model takes
            no larger inputs.
        measured_peak: bytes of a real step; None where there was no device or no room for one.
        plan: which steps are kept.
        predicted_time_ratio: seconds of forward and backward against keeping everything.
    """

    size: int
    budget: int
    predicted_peak: int
    next_peak: int | None
    measured_peak: int | None
    plan: Plan
    predicted_time_ratio: float

    def __str__(self) -> str:
        measured, larger = "not measured", "the model takes no larger size"
        if self.measured_peak is not None:
            measured = f"measured {format_bytes(self.measured_peak)}"
        if self.next_peak is not None:
            larger = f"the next size needs {format_bytes(self.next_peak)}"
        return (
            f"size {self.size}: {format_bytes(self.predicted_peak)} of "
            f"{format_bytes(self.budget)}, {measured}; {larger}; "
            f"time x{self.predicted_time_ratio:.2f} of keeping everything"
        )


class Options(TypedDict, total=False):
    """The options of `largest`."""

    memory_budget: int | str
    checkpoint: Checkpoint | None
    max_overhead: float | None
    optimizer: MakeOptimizer | None
    loss: Loss | None
    vary: Vary
    multiple_of: int
    device: str | None
    verify: bool


def max_batch_size(
    model: nn.Module, sample: Inputs | None = None, **options: Unpack[Options]
) -> int:
    """Returns the largest batch whose training step keeps to a memory budget.

    Options and errors are those of `zoo.largest`, which also says what the step takes.
    """
    return largest(model, sample, **options).size


def largest(
    model: nn.Module,
    sample: Inputs | None = None,
    *,
    memory_budget: int | str = "device",
    checkpoint: Checkpoint | None = None,
    max_overhead: float | None = None,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    loss: Loss | None = None,
    vary: Vary = 0,
    multiple_of: int = 1,
    device: str | None = None,
    verify: bool = True,
) -> Largest:
    """Finds the largest size whose whole training step keeps to a budget in bytes.

    The size found keeps to it and the next two do not, which makes it exact where bytes grow with
    the size. The model is left as it is; nothing of its size is allocated, but for a real step.

    Args:
        model: in training mode; on the meta device if it is nowhere yet.
        sample: what the model is called with: a tensor, a tuple or a dict of keyword arguments, in
            any size, also of meta tensors. A real step repeats its values; meta tensors become
            zeros.
        memory_budget: bytes, "8GiB", or "device" for what is free where the model is.
        checkpoint: what `zoo.create` takes; by default what is in force on the model. "auto" stands
            for any plan that keeps to the budget, and chooses the fastest for the size found.
        max_overhead: with "auto", at most so much more time: 0.2 for a fifth.
        optimizer, loss, device: those of `zoo.plan`.
        vary: what grows: a dimension of every tensor in the sample, or several of one size, such as
            `(2, 3, 4)` for a volume; or, without a sample, a function of the size that makes the
            inputs, best of meta tensors.
        multiple_of: only multiples of this are sizes.
        verify: whether a copy of the model trains at the size found, if the device is here and has
            room beside the model. If that takes more than the budget, the size is lowered.

    Raises:
        ArgumentError: no module, one that cannot be followed, or an argument of no such form.
        BudgetError: no size keeps to the budget, with the least bytes that one needs.
        InputError: the model does not take inputs like the sample.
    """
    _check(model, memory_budget, multiple_of)
    question = _Question(
        model,
        varied(sample, vary),
        _choice(model, checkpoint, max_overhead),
        multiple_of,
        optimizer,
        loss,
        device,
        max_overhead is None,
    )
    with torch.inference_mode(False), torch.enable_grad():
        return _answered(question, memory_budget, verify)


def _check(model: Any, memory_budget: Any, multiple_of: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a largest size needs a torch.nn.Module; got {type(model).__name__}")
    if isinstance(memory_budget, float):
        raise ArgumentError(
            f"memory_budget={memory_budget} is a fraction of what keeping everything takes, which "
            "grows with the size; give bytes, '8GiB' or 'device'"
        )
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise ArgumentError(f"multiple_of={multiple_of!r} is no number from 1")


@dataclass(frozen=True)
class _Look:
    """What a training step of some size needs, and the plan that it would run by."""

    needed: int
    peak: int
    plan: Plan
    time_ratio: float


# what a size needs by the plan that an option decides for it; the budget is for "auto"
Choose = Callable[[Prospect, int], _Look]


def _choice(model: nn.Module, checkpoint: Any, max_overhead: float | None) -> Choose:
    """Returns how the plan for a size is chosen: as in a training with this option."""
    if checkpoint == "auto" or (max_overhead is not None and checkpoint in (None, False)):
        return functools.partial(_fastest, max_overhead)
    asked = checkpoint is not None
    runner = runner_for(checkpoint, None, max_overhead) if asked else runner_of(model)
    if runner is None:
        return _keep_all
    if isinstance(runner, PlannedRunner):
        return functools.partial(_decided, runner.decide, model)
    raise ArgumentError(f"the plans of a {type(runner).__name__} are not known; pass checkpoint=")


def _keep_all(prospect: Prospect, budget: int) -> _Look:
    return _by_plan(prospect, Plan.keep_all(prospect.steps))


def _decided(decide: Decide, model: nn.Module, prospect: Prospect, budget: int) -> _Look:
    try:
        plan = decide(model, prospect.outline, prospect.state)  # type: ignore[arg-type]
        return _by_plan(prospect, plan)
    except BudgetError as error:
        raise ArgumentError(
            "the model already has a budget, which ends the search; pass checkpoint='auto'"
        ) from error


def _by_plan(prospect: Prospect, plan: Plan) -> _Look:
    point = prospect.point(plan)
    return _Look(point.peak, point.peak, plan, point.time_ratio)


def _fastest(max_overhead: float | None, prospect: Prospect, budget: int) -> _Look:
    """Looks for the fastest plan within a budget, or the smallest within an overhead."""
    if max_overhead is not None:
        report = prospect.report(None, max_overhead)
        needed = report.predicted_peak
    else:
        needed = prospect.points[0].peak
        report = prospect.report(max(budget, needed), None)
    return _Look(needed, report.predicted_peak, report.plan, report.predicted_time_ratio)


@dataclass(frozen=True)
class _Question:
    """What is asked: the inputs of a size, and all else but the budget."""

    model: nn.Module
    inputs: Varied
    choose: Choose
    unit: int
    optimizer: MakeOptimizer | None
    loss: Loss | None
    device: str | None
    seconds_are_free: bool

    def prospect(self, count: int, device: str | None) -> Prospect:
        """Looks at the model at a multiple of the unit."""
        size = count * self.unit
        inputs = self.inputs.on_paper(size)
        try:
            return look_ahead(
                self.model, inputs, optimizer=self.optimizer, loss=self.loss, device=device
            )
        except Exception as error:
            error.add_note(f"the size looked at was {size}")
            raise


class _Looks:
    """Looks at sizes, each once: on paper, and where that fits also with what kernels hide."""

    def __init__(self, question: _Question, budget: int, first: Mapping[int, Prospect]) -> None:
        self.question, self.budget = question, budget
        self.paper: dict[int, _Look | None] = {}
        self.tried: dict[int, _Look | None] = {}
        for count, prospect in first.items():
            self.paper[count] = question.choose(prospect, budget)

    def on_paper(self, count: int) -> int | None:
        """Returns bytes by fake tensors."""
        return _needed(self._look(self.paper, count, self.question.device or "cpu"))

    def for_real(self, count: int) -> int | None:
        """Returns bytes with those that kernels allocate inside, where without them it fits."""
        least = self.on_paper(count)
        if least is None or (self.question.seconds_are_free and least > self.budget):
            return least
        return _needed(self._look(self.tried, count, None))

    def _look(self, known: dict[int, _Look | None], count: int, device: str | None) -> _Look | None:
        if count not in known:
            try:
                prospect = self.question.prospect(count, device)
                known[count] = self.question.choose(prospect, self.budget)
            except InputError:
                known[count] = None
        return known[count]


def _needed(look: _Look | None) -> int | None:
    return None if look is None else look.needed


def _answered(question: _Question, memory_budget: int | str, verify: bool) -> Largest:
    """Searches until a real step keeps to the budget, where one can be run."""
    start, first = _first(question)
    budget = first.bytes_of(memory_budget)
    room = _room(first) if verify else 0
    target = budget
    while True:
        found = _found(question, first, start, target)
        measured = _measured(question, found) if found.predicted_peak <= room else None
        if measured is None or measured <= budget:
            return replace(found, budget=budget, measured_peak=measured)
        target = found.predicted_peak - (measured - budget)


def _first(question: _Question) -> tuple[int, Prospect]:
    """Looks at the sample's size, or at twice that: one example may be too few for a norm."""
    start = max(question.inputs.start // question.unit, 1)
    device = question.device or "cpu"
    try:
        return start, question.prospect(start, device)
    except InputError as error:
        try:
            return 2 * start, question.prospect(2 * start, device)
        except InputError:
            raise error from None


def _found(question: _Question, first: Prospect, start: int, budget: int) -> Largest:
    """Searches by what is predicted."""
    looks = _Looks(question, budget, {start: first})
    base = first.fixed.beside_activations - first.fixed.inputs
    count = largest_within(looks.on_paper, budget, start, base)
    needed, seen = looks.on_paper, looks.paper
    if count and question.device is None and first.place.type != "meta":
        needed, seen = looks.for_real, looks.tried
        count = _corrected(looks, start, count, base)
    if not count:
        raise _too_small(question, budget, seen)
    look = seen[count]
    assert look is not None
    following = needed(count + 1)
    _check_multiple(question, needed, count)
    return Largest(
        count * question.unit, budget, look.peak, following, None, look.plan, look.time_ratio
    )


def _corrected(looks: _Looks, start: int, count: int, base: int) -> int:
    """Searches with what kernels hide: first by what they hide at the start, which may be small."""
    if start < count:
        hidden = (looks.for_real(start) or 0) - (looks.on_paper(start) or 0)
        count = largest_within(looks.on_paper, looks.budget - hidden, start, base) or start
    return largest_within(looks.for_real, looks.budget, count, base)


def _check_multiple(question: _Question, needed: Needed, count: int) -> None:
    """Raises ArgumentError when the model refuses the next size, but not a much larger one."""
    if needed(count + 1) is None and needed(2 * count) is not None:
        size = count * question.unit
        raise ArgumentError(
            f"the model takes size {size} and {2 * size}, but not {size + question.unit}; pass "
            "multiple_of= what its sizes are multiples of"
        )


def _too_small(question: _Question, budget: int, seen: Mapping[int, _Look | None]) -> BudgetError:
    least, count = min((look.needed, count) for count, look in seen.items() if look is not None)
    return BudgetError(
        f"a training step of size {count * question.unit} needs at least {format_bytes(least)} "
        f"({least} bytes); the budget is {format_bytes(budget)} ({budget} bytes). Choose "
        "checkpoint='auto', or an optimizer of less state."
    )


def _room(prospect: Prospect) -> int:
    """Returns the bytes that are free beside the model where it is."""
    if prospect.place.type not in ("cpu", "cuda"):
        return 0
    return prospect.bytes_of("device") - prospect.fixed.parameters - prospect.fixed.buffers


def _measured(question: _Question, found: Largest) -> int:
    """Trains a copy of the model for real and returns the peak of its step in bytes."""
    streams = read_streams()
    try:
        model, loss = copy.deepcopy((question.model, question.loss))
        put_in_force(model, found.plan if found.plan.depth() else False)
        inputs = question.inputs.filled(found.size, place_of(model))
        return rehearse(model, inputs, question.optimizer, loss)
    except torch.OutOfMemoryError:
        return found.budget + 1
    finally:
        set_streams(streams)
