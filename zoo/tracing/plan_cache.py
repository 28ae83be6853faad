"""The planned branches of a model's forward, by kinds of inputs.

    a kind           sizes, data types, devices, structure, values that are no tensors, modes
    its branches     one for each path that forwards took; for a budget also plans for larger inputs

A kind that is new starts with the branches of one that differs in sizes alone and has room for it.
"""

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from zoo.engine.kernel_segments import PlannedBranch
from zoo.invocation import InputSpec, Invocation
from zoo.tracing.isolated_trace import StepTrace

# a plan serves arguments at most so many times as large as those that it was made for
SHARED = 2.0


class LastForward(NamedTuple):
    """A forward that was traced, and the modules and parameters that its trace names."""

    invocation: Invocation
    trace: StepTrace
    modules: dict[str, weakref.ref[nn.Module]]
    parameters: list[str]

    @classmethod
    def of(cls, invocation: Invocation, trace: StepTrace, model: nn.Module) -> "LastForward":
        """Notes the modules that a model has now."""
        modules = {path: weakref.ref(module) for path, module in model.named_modules()}
        return cls(invocation, trace, modules, [name for name, _ in model.named_parameters()])

    def is_of(self, model: nn.Module) -> bool:
        """Returns whether the model has the same modules and parameters still."""
        return self[2:] == LastForward.of(self.invocation, self.trace, model)[2:]


@dataclass
class InputKind:
    """The plans for inputs of one kind, and what the last forward on them did.

    Attributes:
        spec: the spec of the inputs that were planned for last.
        branches: the branch to begin with last; for a budget those of plans for larger inputs, too.
        outside: those to take in their place if the backward leaves the autocast of the forward.
        fits_autocast: whether the branches are for a backward inside of it, too.
        took_no_branch: whether the last forward went by none of them; `last_forward` is its trace,
            if it could be traced ahead.
        can_be_planned: whether no planning failed.
        plannings: how often inputs of this kind were planned for.
    """

    spec: InputSpec
    branches: list[PlannedBranch] = field(default_factory=list)
    outside: list[PlannedBranch] = field(default_factory=list)
    fits_autocast: bool = True
    took_no_branch: bool = False
    last_forward: LastForward | None = None
    can_be_planned: bool = True
    plannings: int = 0

    @property
    def lacks_branch(self) -> bool:
        """Whether no branch is known that the next forward will probably take."""
        return not self.branches or self.took_no_branch


class PlanCache:
    """The most recently used kinds of inputs. Threads may use it at once.

    Attributes:
        most_kinds: the number of kinds; the least recently used is dropped first.
        most_waiting: the number of last forwards whose traces keep a process for dry steps.
        most_plannings: how often arguments that differ in sizes alone are planned for. Forwards may
            branch, and for sizes that are new each time planning does not pay.
    """

    most_kinds = 64
    most_waiting = 2
    most_plannings = 8

    def __init__(self) -> None:
        # the most recently used last
        self.kinds: dict[InputSpec, InputKind] = {}

    def kind_of(self, spec: InputSpec) -> InputKind:
        """Returns the kind of inputs like these; a new one has the branches that have room."""
        kind = self.kinds.pop(spec, None)
        if kind is None:
            # the smallest kind that contains these inputs first, else the smallest that has room
            alike = sorted(
                (kind for kind in self._alike(spec) if kind.branches),
                key=lambda kind: (spec.growth_over(kind.spec) > 1, kind.spec.elements),
            )
            kind = InputKind(spec)
            for other in alike:
                growth = spec.growth_over(other.spec)
                roomy = [branch for branch in other.branches if growth <= min(branch.room, SHARED)]
                if roomy:
                    kind = InputKind(other.spec, roomy, fits_autocast=other.fits_autocast)
                    kind.outside = [one for one in other.outside if growth <= one.room]
                    break
            if alike and not kind.branches and self.plannings(spec) >= self.most_plannings:
                kind.branches = [*alike[-1].branches]
        self.kinds[spec] = kind
        for oldest in [*self.kinds][: -self.most_kinds]:
            self.kinds.pop(oldest, None)
        return kind

    def note_last_forward(self, kind: InputKind, last: LastForward) -> None:
        """Keeps a forward to plan for; of older ones no process waits to run dry steps."""
        kind.last_forward = last
        waiting = [other for other in self.kinds.values() if other.last_forward is not None]
        for other in waiting[: -self.most_waiting]:
            if other.last_forward is not None:
                trace = other.last_forward.trace._replace(dry_step=None)
                other.last_forward = other.last_forward._replace(trace=trace)

    def plannings(self, spec: InputSpec) -> int:
        """Returns how often arguments that differ from these in sizes alone were planned for."""
        return sum(kind.plannings for kind in self._alike(spec))

    def _alike(self, spec: InputSpec) -> list[InputKind]:
        # listed first, since other threads may add kinds
        kinds = [*self.kinds.items()]
        return [kind for other, kind in kinds if other.structure == spec.structure]
