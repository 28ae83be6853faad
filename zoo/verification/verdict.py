"""The result of a verification, in numbers and words: no tensors, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from zoo.errors import VerifyError
from zoo.planner.plan import Plan
from zoo.units import plural


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module: its number from 0, the module's path, and what it did, as a clause."""

    number: int
    name: str
    what: str


@dataclass(frozen=True)
class Difference:
    """The first tensor or value that differs.

    Attributes:
        kind: output, loss, input gradient, parameter gradient, buffer, parameter, optimizer state,
            attribute or random state; they are compared in this order. Where all of them are equal,
            a replayed tensor on an accelerator, of which 64 bytes are compared.
        name: which one, as `named_parameters` and the like name it.
        training_step: the step of training after which it was seen, from 1.
        differing, elements: how many numbers differ in a bit, of how many.
        largest: the largest absolute difference; inf where one of the two is not a number.
        note: what differs when it is not numbers, else ''.
        module: the first module whose output or gradient differs; None if unknown.
    """

    kind: str
    name: str
    training_step: int
    differing: int = 0
    elements: int = 0
    largest: float = 0.0
    note: str = ""
    module: ModuleCall | None = None

    def __str__(self) -> str:
        count = f"{self.differing} of {self.elements} elements, by at most {self.largest:.3g}"
        name = "" if self.name == self.kind else f" {self.name}"
        text = f"{self.kind}{name} after training step {self.training_step} ({self.note or count})."
        if (module := self.module) is None:
            return text
        return f"{text} The first of its modules is {module.name}, {module.what}."


@dataclass(frozen=True)
class Report:
    """The result of `verify`: plain data without tensors, which prints as a sentence.

    Attributes:
        exact: whether checkpointed training was that of the baseline in every bit; None where the
            baseline does not repeat its own numbers, and `first` is about that.
        steps: how many steps of training were compared, unless two differed before.
        compared: how many tensors and values of each kind were compared after each of them.
        plan: the plan in force at last; None where nothing was checkpointed.
        first: the first difference; None when exact.
        model, checkpoint: what was verified, in words.
        optimizer_in_backward: whether the optimizer stepped in the backward.
        replays: how many of the steps were replays of a CUDA graph.
        deterministic: whether all trained by torch's deterministic algorithms.
    """

    exact: bool | None
    steps: int
    compared: Mapping[str, int]
    plan: Plan | None
    first: Difference | None
    model: str
    checkpoint: str
    optimizer_in_backward: bool = False
    replays: int = 0
    deterministic: bool = False

    def check(self) -> None:
        """Raises VerifyError, with the report as its message, unless training was exact."""
        if not self.exact:
            raise VerifyError(str(self))

    def __str__(self) -> str:
        if self.exact is None:
            return (
                "the baseline does not repeat its own numbers: two trainings of "
                f"{self.model} without recomputation from the same state differ, first in "
                f"{self.first} Nothing can be compared bit for bit. {self._way_out()}"
            )
        subject = f"{self.model} with checkpoint={self.checkpoint}"
        if self.optimizer_in_backward:
            subject += " and the optimizer in the backward"
        if self.replays:
            subject += " as a CUDA graph"
        if self.first is not None:
            return f"not exact: {subject} differs from its baseline, first in {self.first}"
        compared = ", ".join(plural(count, kind) for kind, count in self.compared.items())
        same = (
            f"is bit for bit its baseline after each of {plural(self.steps, 'training step')}"
            f"{f', the last {self.replays} of them replays' * (self.replays > 0)}: {compared}."
        )
        if recomputed := self._recomputed():
            return f"exact: {subject}, {recomputed}, {same}"
        return (
            f"exact, with nothing recomputed: {subject} keeps every step and {same} This says "
            "nothing about recomputation; verify another plan, such as checkpoint='blocks'."
        )

    def _way_out(self) -> str:
        others = "the clock, random numbers from outside of torch, or state outside of the model"
        if self.deterministic:
            return (
                f"torch's deterministic algorithms were on; look for {others}, or, of an LSTM on "
                "CUDA, start the process with CUBLAS_WORKSPACE_CONFIG=:4096:8."
            )
        return (
            "Pass deterministic=True (--deterministic), for kernels that do not repeat theirs; "
            f"else look for {others}."
        )

    def _recomputed(self) -> str:
        """Returns in words how much the plan in force at last recomputes; '' for nothing."""
        if self.plan is None:
            return "" if self.checkpoint == "False" else "each block recomputed as a whole"
        runs = self.plan.runs()
        recomputed = sum(count > 1 for count in runs)
        return f"{recomputed} of {len(runs)} steps recomputed" if recomputed else ""
