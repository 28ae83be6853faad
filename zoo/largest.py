"""The largest batch, sequence or volume whose whole training step keeps to a memory budget.

Trying sizes until one runs out of memory, as Lightning's batch size finder and its kind do, needs
the device, finds a power of two or some size near the limit, and cannot ask about another device or
about less memory than there is. Here each size is looked at on paper, by the bytes of `zoo.plan`:

    on fake tensors                nothing of the model's size is allocated
    with what kernels hide         each kind of step runs once, alone, at this size or a smaller one
    one real training step         of a copy of the model, where it fits beside the model: measured

The last two need the device and are left out where it is not here; see `zoo.looks` for the first
two. The logger "zoo.largest" says at level INFO which size was looked at.
"""

import copy
import functools
import logging
import math
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from zoo.checkpointing import Checkpoint
from zoo.entry import Inputs, Loss, check_loss, explained, nothing_trained, place_of
from zoo.errors import ArgumentError, BudgetError
from zoo.looks import UNBOUNDED, Choice, Looks, Question
from zoo.measure.optimizer import MakeOptimizer
from zoo.measure.rehearsal import rehearse
from zoo.plan import Plan
from zoo.planner.search import MOST, Needed, largest_within
from zoo.planning import Prospect
from zoo.tracing.api import checkpoint as put_in_force
from zoo.units import at_least, exact_bytes, format_bytes, format_seconds
from zoo.vary import Vary, varied
from zoo.verification.records import read_streams, set_streams

# seconds that a real step may take which nobody asked for
QUICK = 20.0
# where memory ran out, the search ends when so small a part of the budget is undecided
NEAR = 32
_log = logging.getLogger("zoo.largest")


@dataclass(frozen=True)
class Largest:
    """The largest size that keeps to a budget, and what its training step takes.

    Attributes:
        size: of the batch, or of what else varies.
        budget: bytes.
        predicted_peak: bytes of the whole training step.
        next_peak: bytes, at the least, that the next larger size needs, with what real steps took
            beyond what was predicted; None where the model takes no larger inputs.
        measured_peak: bytes of a real step; None where none was run.
        plan: which steps are kept.
        predicted_time_ratio: seconds of forward and backward against keeping everything.
        predicted_seconds: of forward and backward here; None where the steps were not run.
    """

    size: int
    budget: int
    predicted_peak: int
    next_peak: int | None
    measured_peak: int | None
    plan: Plan
    predicted_time_ratio: float
    predicted_seconds: float | None = None

    def __str__(self) -> str:
        measured, larger = "not measured", "the model takes no larger size"
        if self.measured_peak is not None:
            measured = f"measured {format_bytes(self.measured_peak)}"
        elif self.predicted_seconds is not None:
            step = f"a step takes about {format_seconds(self.predicted_seconds)}"
            measured = f"not measured ({step}; verify=True runs two)"
        if self.next_peak is not None:
            excess = format_bytes(self.next_peak - self.budget)
            larger = f"the next size needs {format_bytes(self.next_peak)}, {excess} too much"
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
    verify: bool | None


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
    verify: bool | None = None,
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
            room beside the model. If that takes more than the budget, the size is lowered. By
            default it does where its steps were run and one takes less than 20 seconds.

    Raises:
        ArgumentError: no module, one that cannot be followed, or an argument of no such form.
        BudgetError: no size keeps to the budget, with the least bytes that one needs; or memory
            runs out in a real step of the smallest.
        InputError: the model does not take inputs like the sample.
    """
    _check(model, memory_budget, multiple_of)
    check_loss(loss)
    question = Question(
        model,
        varied(sample, vary),
        Choice.of(model, checkpoint, max_overhead),
        multiple_of,
        optimizer,
        loss,
        device,
    )
    with torch.inference_mode(False), torch.enable_grad():
        return _answered(question, memory_budget, verify)


def _check(model: Any, memory_budget: Any, multiple_of: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a largest size needs a torch.nn.Module; got {type(model).__name__}")
    if isinstance(memory_budget, float):
        raise ArgumentError(
            f"memory_budget={memory_budget}, a float, is a fraction of what keeping everything "
            "takes, which grows with the size; give an int of bytes, '8GiB' or 'device'"
        )
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
        raise ArgumentError(f"multiple_of={multiple_of!r} is no number from 1")


def _check_trained(question: Question, start: int) -> None:
    """Raises ArgumentError where a step has no backward."""
    tensors = question.inputs.on_paper(start * question.unit).tensors
    if not any(tensor.requires_grad for tensor in (*question.model.parameters(), *tensors)):
        raise ArgumentError(nothing_trained(question.model))


def _answered(question: Question, memory_budget: int | str, verify: bool | None) -> Largest:
    """Searches until a real step keeps to the budget, where one can be run."""
    looks = Looks(question)
    start, first = looks.first()
    _check_trained(question, start)
    budget = first.bytes_of(memory_budget)
    room = 0 if verify is False else _room(first)
    trials = _Trials(budget, looks)
    while not trials.are_over():
        found = _found(looks, first, start, trials.target)
        if found is None:
            raise trials.refusal(first.place)
        if trials.fitted is not None and found.size <= trials.fitted.size:
            trials.low = trials.target
            trials.halve()
            continue
        # what real steps took beyond what was predicted, the next size would, too
        following = found.next_peak and found.next_peak + (budget - trials.target)
        found = replace(found, budget=budget, next_peak=following)
        is_quick = verify or looks.seconds(found.size // question.unit) <= QUICK
        if not is_quick or found.predicted_peak > room:
            return trials.fitted or found
        _log.info("size %d: a real step", found.size)
        # keeping everything, whose steps may be others in number, must have room
        small = start * question.unit
        has_room = small < found.size and first.baseline.peak <= budget // 2
        trials.note(found, _measured(question, found, small if has_room else None))
    assert trials.fitted is not None
    return trials.fitted


class _Trials:
    """What real steps took, and the bytes, as predicted, to search by after them.

    By how much memory ran out is not known, so the bytes that it ran out with and those of the
    least size, or of what had room, are halved between until they are near.
    """

    def __init__(self, budget: int, looks: Looks) -> None:
        self.budget, self.looks, self.target = budget, looks, budget
        self.fitted: Largest | None = None
        self.low: int | None = None
        self.high: int | None = None
        # of the last real step that did not keep to the budget
        self.ran_out: Largest | None = None
        self.beyond = 0

    def are_over(self) -> bool:
        """Says whether what had room is near enough to what had not."""
        if self.fitted is None or self.high is None:
            return self.fitted is not None
        return self.high - (self.low or 0) <= self.budget // NEAR

    def note(self, found: Largest, measured: int | None) -> None:
        """Notes the peak of a real step; None where memory ran out."""
        if measured is not None and measured <= self.budget:
            self.fitted, self.low = replace(found, measured_peak=measured), self.target
        else:
            self.ran_out = found if measured is None else None
            self.beyond = 0 if measured is None else measured - found.predicted_peak
            if measured is None or self.high is not None:
                self.high = found.predicted_peak
            else:
                self.target = self.budget - self.beyond
        self.halve()

    def halve(self) -> None:
        """Chooses what to search by between what had room and what had not."""
        if self.high is None:
            return
        if self.low is None:
            self.low = self.looks.needed(1, UNBOUNDED) or self.looks.smallest()[0]
        self.target = min((self.low + self.high) // 2, self.high - 1)

    def refusal(self, place: torch.device) -> BudgetError:
        """Says why no size is left to search for."""
        if self.ran_out is None:
            return _too_small(self.looks, self.budget, self.beyond)
        return BudgetError(
            f"memory ran out in a real training step of size {self.ran_out.size}, the smallest, "
            f"which is predicted to take {exact_bytes(self.ran_out.predicted_peak)}; the budget is "
            f"{exact_bytes(self.budget)}. Free memory on {place}, or pass verify=False to go by "
            "what is predicted."
        )


def _found(looks: Looks, first: Prospect, start: int, budget: int) -> Largest | None:
    """Searches by what is predicted; None where no size keeps to the budget."""
    needed = functools.partial(looks.needed, budget=budget)
    base = first.fixed.beside_activations - first.fixed.inputs
    count = largest_within(needed, budget, start, base)
    if not count:
        return None
    _check_multiple(looks.question, needed, count)
    if count >= MOST and needed(count) == needed(start):
        raise ArgumentError(
            f"sizes {start * looks.question.unit} and {count * looks.question.unit} need the same "
            f"{format_bytes(needed(start) or 0)}, so that no size is the largest; pass vary= what "
            "makes inputs that grow with the size"
        )
    look, seconds = looks.within(count, budget), looks.seconds(count)
    return Largest(
        count * looks.question.unit,
        budget,
        look.peak,
        needed(count + 1),
        None,
        look.plan,
        look.time_ratio,
        seconds * look.time_ratio if seconds < math.inf else None,
    )


def _check_multiple(question: Question, needed: Needed, count: int) -> None:
    """Raises ArgumentError when the model refuses the next size, but not a much larger one."""
    if needed(count + 1) is None and needed(2 * count) is not None:
        size = count * question.unit
        raise ArgumentError(
            f"the model takes size {size} and {2 * size}, but not {size + question.unit}; pass "
            "multiple_of= what its sizes are multiples of"
        )


def _too_small(looks: Looks, budget: int, beyond: int) -> BudgetError:
    """Says what the smallest size needs; `beyond` are bytes that only a real step showed."""
    least, count = looks.smallest()
    least = (looks.needed(count, UNBOUNDED) or least) + beyond
    shown = f", {format_bytes(beyond)} of it as a real step showed" if beyond else ""
    return BudgetError(
        f"a training step of size {count * looks.question.unit} needs at least "
        f"{exact_bytes(least)}{shown}; the budget is {exact_bytes(budget)}. Raise the budget to "
        f"{at_least(least)!r}, choose checkpoint='auto', or an optimizer of less state."
    )


def _room(prospect: Prospect) -> int:
    """Returns the bytes that are free beside the model where it is."""
    if prospect.place.type not in ("cpu", "cuda"):
        return 0
    return prospect.bytes_of("device") - prospect.fixed.parameters - prospect.fixed.buffers


def _measured(question: Question, found: Largest, small: int | None) -> int | None:
    """Trains a copy of the model for real and returns the peak of its step in bytes.

    None where memory runs out.

    The optimizer's state comes of a plain step of a small size, else of one that is the same.
    """
    streams = read_streams()
    try:
        model, loss = copy.deepcopy((question.model, question.loss))
        place = place_of(model)
        inputs = question.inputs.filled(found.size, place)
        first = question.inputs.filled(small, place) if small is not None else None

        def begin() -> None:
            put_in_force(model, found.plan if found.plan.depth() else False)

        if first is None:
            begin()
        else:
            put_in_force(model, False)
        loss = loss and explained(loss, place)
        return rehearse(model, inputs, question.optimizer, loss, first=first, then=begin)
    except torch.OutOfMemoryError:
        return None
    finally:
        set_streams(streams)
