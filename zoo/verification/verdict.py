"""The result of a verification, in numbers and words: no tensors, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from zoo.errors import VerifyError
from zoo.planner.plan import Plan
from zoo.units import counted


@dataclass(frozen=True)
class Place:
    """A step of the chain: its number from 0, its name, and what it did, as a relative clause."""

    number: int
    name: str
    what: str


@dataclass(frozen=True)
class Difference:
    """The first tensor or value that differs.

    Attributes:
        kind: output, loss, input gradient, parameter gradient, buffer, parameter, optimizer state,
            attribute or random state; they are compared in this order.
        name: which one, as `named_parameters` and the like name it.
        training_step: the step of training after which it was seen, from 1.
        differing, elements: how many numbers differ in a bit, of how many.
        largest: the largest absolute difference; inf where one of the two is not a number.
        note: what differs when it is not numbers, else ''.
        place: the first step of the chain whose output or gradient differs; None if unknown.
    """

    kind: str
    name: str
    training_step: int
    differing: int = 0
    elements: int = 0
    largest: float = 0.0
    note: str = ""
    place: Place | None = None

    def __str__(self) -> str:
        count = f"{self.differing} of {self.elements} elements, by at most {self.largest:.3g}"
        name = "" if self.name == self.kind else f" {self.name}"
        text = f"{self.kind}{name} after training step {self.training_step} ({self.note or count})."
        if (place := self.place) is None:
            return text
        return f"{text} First in the chain is step {place.number} ({place.name}), {place.what}."


@dataclass(frozen=True)
class Report:
    """The result of `verify`: plain data without tensors, which prints as a sentence.

    Attributes:
        exact: whether checkpointed training was that of the baseline in every bit.
        deterministic: whether the baseline was equal to itself; if not, `first` is about that.
        steps: how many steps of training were asked for.
        compared: how many tensors and values of each kind were compared after each of them.
        plan: the plan in force at last; None where nothing was checkpointed.
        first: the first difference; None when exact.
        model, checkpoint: what was verified, in words.
        optimizer_in_backward: whether the optimizer stepped in the backward.
    """

    exact: bool
    deterministic: bool
    steps: int
    compared: Mapping[str, int]
    plan: Plan | None
    first: Difference | None
    model: str
    checkpoint: str
    optimizer_in_backward: bool = False

    def check(self) -> None:
        """Raises VerifyError, with the report as its message, unless training was exact."""
        if not self.exact:
            raise VerifyError(str(self))

    def __str__(self) -> str:
        if not self.deterministic:
            return (
                f"nondeterministic baseline: two trainings of {self.model} without recomputation "
                f"from the same state differ, first in {self.first} Nothing is said about "
                "checkpointing; look for a nondeterministic kernel "
                "(torch.use_deterministic_algorithms), the clock, or state outside the model."
            )
        subject = f"{self.model} with checkpoint={self.checkpoint}"
        if self.optimizer_in_backward:
            subject += " and the optimizer in the backward"
        if self.first is not None:
            return f"not exact: {subject} differs from its baseline, first in {self.first}"
        compared = ", ".join(counted(count, kind) for kind, count in self.compared.items())
        same = (
            f"is bit for bit its baseline after each of {counted(self.steps, 'training step')}: "
            f"{compared}."
        )
        if recomputed := self._recomputed():
            return f"exact: {subject}, {recomputed}, {same}"
        return (
            f"exact, with nothing recomputed: {subject} keeps every step and {same} This says "
            "nothing about recomputation; verify another plan, such as checkpoint='blocks'."
        )

    def _recomputed(self) -> str:
        """Says how much the plan in force at last recomputes; '' for nothing."""
        if self.plan is None:
            return "" if self.checkpoint == "False" else "each block recomputed as a whole"
        runs = self.plan.runs()
        recomputed = sum(count > 1 for count in runs)
        return f"{recomputed} of {len(runs)} steps recomputed" if recomputed else ""
