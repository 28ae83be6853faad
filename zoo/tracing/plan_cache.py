"""The planned branches of a model's forward, by kinds of inputs.

    a kind           sizes, data types, devices, structure, values that are no tensors, modes
    its branches     one for each path that forwards took; for a budget also plans for larger inputs

A kind that is new starts with the branches of one that differs in sizes alone and contains it. For
larger sizes a budget needs a judgement, first of the plans that are known for the same operators;
without a budget a plan serves sizes up to `SHARED` times as large.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from zoo._torch import Operator
from zoo.engine.kernel_segments import PlannedBranch
from zoo.invocation import InputSpec, Invocation
from zoo.tracing.isolated_trace import StepTrace

# a plan without a budget serves arguments at most so many times as large as those that it was made
# for
SHARED = 2.0
# the forward of a kind before which a budget has a plan of its own chosen for it, if it goes by one
# for arguments so many times as large that recomputes something
PAYS, MUCH_LARGER = 4, 2.0
# how many times as large arguments are planned for where they grow, and how often a plan for these
# may not serve before they are not
AHEAD, MOST_REFUSED = 1.125, 2
# how many known plans are looked at for new sizes
MOST_KNOWN = 4
# the forwards before a path more may be planned for
FIRST = 64
# the most paths that a budget is planned for at first, and those of them that need not come again
MOST_PATHS, EAGER = 4, 3
MOST_HASHES = 1024


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
        plannings: how many new paths of inputs of this kind were planned for.
        path_hashes: of paths that forwards took and that no branch has.
        forwards: how many began.
    """

    spec: InputSpec
    branches: list[PlannedBranch] = field(default_factory=list)
    outside: list[PlannedBranch] = field(default_factory=list)
    fits_autocast: bool = True
    took_no_branch: bool = False
    last_forward: LastForward | None = None
    can_be_planned: bool = True
    plannings: int = 0
    path_hashes: set[int] = field(default_factory=set)
    forwards: int = 0

    @property
    def lacks_branch(self) -> bool:
        """Whether no branch is known that the next forward will probably take."""
        return not self.branches or self.took_no_branch

    def comes_again(self, path_hash: int) -> bool:
        """Notes a path that no branch has; returns whether it was noted before."""
        is_known = path_hash in self.path_hashes
        if len(self.path_hashes) < MOST_HASHES:
            self.path_hashes.add(path_hash)
        return is_known

    def go_by(self, other: "InputKind") -> None:
        """Takes over the branches of a kind that serves these inputs, too."""
        self.spec, self.branches, self.outside = other.spec, [*other.branches], [*other.outside]
        self.fits_autocast = other.fits_autocast

    def pays(self, spec: InputSpec) -> bool:
        """Returns whether a plan of their own may be much faster for arguments that come often."""
        if self.forwards != PAYS or not (self.can_be_planned and self.branches):
            return False
        is_shared = self.spec.elements >= MUCH_LARGER * spec.elements
        return is_shared and not self.branches[-1].keeps_all


class PlanCache:
    """The most recently used kinds of inputs. Threads may use it at once.

    Attributes:
        most_kinds: the number of kinds; the least recently used is dropped first.
        most_waiting: the number of last forwards whose traces keep a process for dry steps.
        most_plannings: how many paths of arguments that differ in sizes alone are planned for,
            and one more each time the number of forwards has doubled since. Paths that are new each
            time do not pay.
        growth: how many times as large arguments a plan serves.
        refused: how often no plan for enlarged arguments served smaller ones well.
    """

    most_kinds = 256
    most_waiting = 2
    most_plannings = 8

    def __init__(self, growth: float = SHARED) -> None:
        self.growth, self.refused = growth, 0
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
                most = [min(branch.room, self.growth) for branch in other.branches]
                roomy = [b for b, room in zip(other.branches, most, strict=True) if growth <= room]
                if roomy:
                    kind = InputKind(other.spec, roomy, fits_autocast=other.fits_autocast)
                    kind.outside = [one for one in other.outside if growth <= one.room]
                    break
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
        """Returns how many paths of arguments that differ in sizes alone were planned for."""
        return sum(kind.plannings for kind in self._alike(spec))

    def may_plan(self, spec: InputSpec) -> bool:
        """Returns whether one more path of arguments like these is planned for."""
        forwards = sum(kind.forwards for kind in self._alike(spec))
        more = int(math.log2(max(1, forwards / FIRST)))
        return self.plannings(spec) < self.most + more

    @property
    def most(self) -> int:
        """How many paths are planned for at first: fewer where each is searched for."""
        return self.most_plannings if self.growth > 1 else min(self.most_plannings, MOST_PATHS)

    def largest(self, spec: InputSpec) -> list[PlannedBranch]:
        """Returns the branches of the largest arguments that differ in sizes alone."""
        alike = [kind for kind in self._alike(spec) if kind.branches]
        return [*max(alike, key=lambda kind: kind.spec.elements).branches] if alike else []

    def enlarged(self, spec: InputSpec) -> tuple[InputSpec, list[PlannedBranch]] | None:
        """Returns larger sizes like these, and the branches of the nearest smaller ones.

        They are larger in the dimensions that grew. None if nothing did, or it does not pay.
        """
        alike = [kind for kind in self._alike(spec) if kind.branches]
        smaller = [kind for kind in alike if kind.spec.growth_over(spec) == 1]
        if self.refused >= MOST_REFUSED or not smaller:
            return None
        nearest = max(smaller, key=lambda kind: kind.spec.elements)
        pairs = [
            [*zip(shape, least, strict=True)]
            for shape, least in zip(spec.sizes, nearest.spec.sizes, strict=True)
        ]
        # all dimensions of a tensor together make it so many times as large
        grown = max(sum(size > least for size, least in pair) for pair in pairs)
        growth = AHEAD ** (1 / grown)
        sizes = tuple(
            tuple(math.ceil(growth * size) if size > least else size for size, least in pair)
            for pair in pairs
        )
        return spec._replace(sizes=sizes), nearest.branches

    def known(self, spec: InputSpec, operators: Sequence[Operator]) -> list[PlannedBranch]:
        """Returns branches of these operators in other sizes, of the nearest larger sizes first."""
        found: dict[object, PlannedBranch] = {}

        def distance(kind: InputKind) -> tuple[bool, float]:
            ratio = (kind.spec.elements + 1) / (spec.elements + 1)
            return ratio < 1, abs(math.log(ratio))

        for kind in sorted(self._alike(spec), key=distance):
            for branch in (*kind.branches[::-1], *kind.outside[::-1]):
                if [*branch.operators] == [*operators]:
                    found.setdefault((branch.plan, branch.offloads), branch)
        return [*found.values()][:MOST_KNOWN]

    def _alike(self, spec: InputSpec) -> list[InputKind]:
        # listed first, since other threads may add kinds
        kinds = [*self.kinds.items()]
        return [kind for other, kind in kinds if other.structure == spec.structure]
