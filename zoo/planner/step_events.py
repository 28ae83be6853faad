"""The log of a training step, as data: its operators, and what kernels allocate, free and save.

    operators   0  aten.t       fc      1  aten.addmm    fc      2  aten.relu     act
    forward     linear   allocate 3, kernel       relu   allocate 4, kernel, save 4
    backward    relu     allocate 9, kernel, release 4, free 8
                linear   allocate 10, kernel, gradient 10, free 9

Storages are numbers, and so are the operators of the forward, in the order in which they were
dispatched. Each event belongs to an operator; what an autograd node saves, and does in the
backward, to the operator that made the node. So a step of a plan may begin at any operator, and
its costs are read from the events between two of these cuts (`event_costs`); nothing runs alone.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# the operator of the events between the forward and the first autograd node
AT_END = 1 << 62


class Allocated(NamedTuple):
    """A storage was allocated."""

    storage: int


class Freed(NamedTuple):
    """The memory of a storage was freed."""

    storage: int


class Viewed(NamedTuple):
    """An operator without a kernel, such as one that returns a view, took a storage."""

    storage: int


class Saved(NamedTuple):
    """Autograd saved a tensor; `is_blank` if nothing was written to the storage yet."""

    storage: int
    is_blank: bool = False


class Released(NamedTuple):
    """An autograd node released a tensor that it had saved.

    The storage `lives_on` if the gradient that the node returned lies in it.
    """

    storage: int
    lives_on: bool = False


class Gradient(NamedTuple):
    """The gradient of a parameter is complete; `form` tells what an optimizer allocates for it."""

    storage: int
    form: Hashable = None


# not a NamedTuple, whose fields take three times as long to read
@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel ran.

    Attributes:
        number: of its call; equal calls share one.
        flops: floating-point operations.
        moved: bytes of its arguments and results.
        itemsize: bytes of an element of its first floating-point result; 4 if there is none.
        reads, writes: storages of its arguments.
        keeps: storages that it makes or writes and that no recomputation makes again.
    """

    number: int = 0
    flops: int = 0
    moved: int = 0
    itemsize: int = 4
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    keeps: frozenset[int] = frozenset()


Event = Allocated | Freed | Viewed | Saved | Released | Gradient | KernelRun


class NodeRun(NamedTuple):
    """The events of an autograd node, which `operator` made."""

    operator: int
    events: list[Event]


@dataclass(slots=True)
class Call:
    """One operator that the forward dispatched.

    Attributes:
        operator: its name, such as "aten.add.Tensor".
        index: how many operators were dispatched before it.
        is_query: whether it neither returns a tensor nor writes one; then the rest is not known.
        within: paths of the modules whose forward was running, outermost first.
        line: "file:line" of the model's code that called it; "" if there is none.
        shapes: the shapes of the tensors that it returned; `bytes` are those of all of them.
        parameters: numbers of the model's parameters among its arguments.
        function: the number of the call of a torch function that dispatched it; 0 if there is none.
        verb: the name of the function, else the operator's: "add" of "aten.add.Tensor".
    """

    operator: str
    index: int = -1
    is_query: bool = False
    within: tuple[str, ...] = ()
    line: str = field(default="", compare=False)
    shapes: tuple[tuple[int, ...], ...] = ()
    bytes: int = field(default=0, compare=False)
    parameters: frozenset[int] = frozenset()
    function: int = field(default=0, compare=False)
    verb: str = field(default="", compare=False)


@dataclass
class StepEvents:
    """The operators and events of a training step.

    Storages of parameters and buffers have no number.

    Attributes:
        operators: all that were dispatched, views and queries included, but for those that only
            some forwards of a path call.
        visits: for each call of a block the operators dispatched before it, if blocks were marked.
        model_operators: how many of the operators are the model's; the rest are the loss's.
        has_backward: whether a backward ran, within the forward.
        sizes: bytes of each storage.
        inputs: storages of the model's inputs.
        forward: events of the model and its loss, each with its operator.
        backward: the autograd nodes in the order in which they ran.
        outputs: storages of what the model returned.
        remaining: storages of the forward that the program holds when forward and backward are
            over and what the model returned is gone, as in attributes of a module.
        ends: the storage of the loss; empty if the backward begins at the outputs.
        casts: storages of casts of weights, which autocast holds until the forward is over.
        trained: bytes of each parameter that is trained.
        constants: bytes of each tensor that the functions of the step hold, such as targets.
    """

    sizes: list[int] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    forward: list[tuple[int, Event]] = field(default_factory=list)
    backward: list[NodeRun] = field(default_factory=list)
    outputs: frozenset[int] = frozenset()
    remaining: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    casts: set[int] = field(default_factory=set)
    trained: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    operators: list[Call] = field(default_factory=list)
    visits: dict[tuple[str, int], int] = field(default_factory=dict)
    model_operators: int = 0
    has_backward: bool = False

    def before(self, operator: int) -> "StepEvents":
        """Returns the events before an operator: those of a model without its loss.

        The backward of the loss comes before that of the model, and leaves its gradients.
        """
        behind = [run for run in self.backward if run.operator >= operator]
        events = [event for run in behind for event in run.events]
        forward = [(at, event) for at, event in self.forward if at < operator]
        made = {event.storage for _, event in forward if isinstance(event, Allocated)}
        return replace(
            self,
            forward=forward,
            remaining=self.remaining & made,
            backward=[NodeRun(AT_END, events), *self.backward[len(behind) :]],
            ends=frozenset(),
        )

    def rounded(self, rounding: Callable[[int], int]) -> "StepEvents":
        """Returns the events with bytes as an allocator counts them."""
        return replace(
            self,
            sizes=list(map(rounding, self.sizes)),
            trained=list(map(rounding, self.trained)),
            constants=list(map(rounding, self.constants)),
        )
