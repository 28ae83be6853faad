"""Logs a dry step: a training step on fake tensors that the engine runs by a plan.

A dispatch mode below the engine sees each kernel, also those of replays, and each storage from its
making to its end (`planner.dry_step` has the rows). It knows nothing of plans and segments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node

from zoo._torch import (
    Args,
    DisableTorchDispatch,
    Kwargs,
    Operator,
    PyTree,
    active_fake_mode,
    sequence_number,
)
from zoo.engine.devices import draws_of
from zoo.engine.operator_effects import effects_of, statistics_of
from zoo.engine.segments import thread
from zoo.planner.dry_step import ForwardEnd, Made, Ran, Returned, Row, There
from zoo.planner.step_events import Freed
from zoo.profiling.fake_results import LIFT
from zoo.profiling.fake_tensors import QUESTIONS, answer
from zoo.profiling.step_mode import (
    StepMode,
    kernel_now,
    starts_kernel,
)
from zoo.profiling.tensor_spec import CallKey, key_of, storages_of, tensors_in


class StepLedger(StepMode):
    """Logs the training step that runs inside of the `with` block.

    Args:
        numbers: of the kernels of the trace, by their keys.
        shares_casts: as in `TracedGraph`.

    Attributes:
        rows: the log.
        operator: returns the number of the operator of the forward that runs.
        regenerates: returns whether an operator that runs is one by which autograd regenerates a
            fake view.
        targets: what the loss makes of nothing and uses with the outputs: in its place a training
            loop has variables. None outside of the loss.
    """

    operator: Callable[[], int]
    regenerates: Callable[[Operator], bool]

    def __init__(self, numbers: Mapping[CallKey, int], *, shares_casts: bool = False) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._kernels: dict[CallKey | None, int] = dict(numbers.items())
        self._graph.shares_casts = shares_casts
        self._made = 0
        self.targets: list[Tensor] | None = None
        # numbers of the storages that the loss has made of nothing
        self._of_loss: set[int] = set()
        self._attributes: list[object] = []

    def note(self, row: Row) -> None:
        """Adds a row to the log."""
        self.rows.append(row)

    def note_owned(
        self, model: nn.Module, inputs: Iterable[Tensor], others: Iterable[UntypedStorage]
    ) -> None:
        """Leaves out what is always there: parameters, buffers, the model's inputs and others."""
        buffers = {s._cdata: s for buffer in model.buffers() for s in storages_of(buffer)}
        owned = [s for p in model.parameters() for s in storages_of(p)]
        for tensor in inputs:
            self._graph.note_input(tensor)
            owned += storages_of(tensor)
        for storage in (*owned, *others):
            if storage._cdata not in buffers:
                self._leave_out(storage)
        # which a forward may replace
        for storage in buffers.values():
            self.note(There(self._number(storage), storage.nbytes()))

    def note_earlier(self, storages: Iterable[UntypedStorage]) -> None:
        """Notes what the program holds of the training step before, until it is replaced."""
        for storage in storages:
            self.note_storage(storage)

    def note_storage(self, storage: UntypedStorage) -> None:
        """Notes a storage unless it is known."""
        if storage._cdata not in self._numbers:
            self._make(storage)

    def remaining(self) -> list[UntypedStorage]:
        """Returns the storages of the step that the program holds now."""
        return self._living()

    def note_resized(self, storage: UntypedStorage) -> None:
        """Notes that a storage has lost its memory, or got other memory."""
        for number in self._numbers_at([storage]):
            self.note(Freed(number))
            self._make(storage)

    def note_state(self, state: Tensor) -> None:
        """Notes a state of a random stream of the CPU, which is no tensor of the step."""
        if state.is_cpu:
            self._note_made([state])

    def run_backward(self, roots: list[Tensor]) -> list[object]:
        """Runs the backward of the sum of these tensors; `roots` is emptied.

        Returns what the program holds as long as its loss, whose graph has it: attributes of each
        `autograd.Function`.
        """
        self._graph.end()
        self._is_forward = False
        self.note(ForwardEnd())
        self._walk(roots)
        attributes, self._attributes = self._attributes, []
        return attributes

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel and logs it."""
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return answer(func, args[0])
        if self.is_of_kept_graph(func):
            return args[0]
        inputs = tensors_in((args, kwargs))
        if self._is_forward:
            new = self.operator() + 1 - len(self._nodes)
            self._nodes += [sequence_number()] * new
            if self.regenerates(func):
                self._note_regenerated(args[0])
            self._graph.note_kernel(inputs, has_hooks=True)
        if func is not LIFT:
            # what was made outside of the trace's sight is there from here on
            self._note_made(inputs)
        # before it runs, since it may change its arguments in place
        key = key_of(func, args, kwargs) if starts_kernel(func) else None
        kernel = kernel_now(func, args, kwargs)
        if effects_of(func).seeded and active_fake_mode() is not None:
            _draw(args, kwargs)
        result = kernel(*args, **kwargs)
        outputs = tensors_in(result)
        self._note_made(outputs)
        if self.targets is not None:
            self._note_targets(self.targets, inputs, outputs)
        if self._is_forward:
            for tensor in outputs:
                self._graph.note_result(tensor)
        if starts_kernel(func):
            operator = len(self._nodes) - 1 if self._is_forward else self._operator_of_node
            number = self._kernels.get(key, -1)
            if statistics := statistics_of(effects_of(func), args):
                # the engine leaves them out of a replay, which takes as long
                without = (*(None if n in statistics else value for n, value in enumerate(args)),)
                self._kernels.setdefault(key_of(func, without, kwargs), number)
            reads = (*self.numbers_of(inputs),) if self._is_forward else ()
            self.note(Ran(number, operator, thread.replaying, reads))
        return result

    def _note_targets(
        self, targets: list[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        used = [tensor for tensor in inputs if self.numbers_of([tensor]) & self._of_loss]
        if len(used) == len(inputs):
            self._of_loss |= self.numbers_of(outputs)
        else:
            targets += used

    def note_returned(self, tensors: Iterable[Tensor]) -> None:
        """Notes what the program holds until the backward is over."""
        self.rows += map(Returned, self.numbers_of(tensors))

    def _note_made(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                self.note_storage(storage)

    def _make(self, storage: UntypedStorage) -> None:
        self.note(Made(self._number(storage), storage.nbytes(), thread.replaying))

    def _number(self, storage: UntypedStorage) -> int:
        number, self._made = self._made, self._made + 1
        self._begin(storage, number)
        return number

    def _on_node(self, node: Node) -> bool:
        if hasattr(node, "__dict__"):
            self._attributes += vars(node).values()
        return super()._on_node(node)


def _draw(args: Args, kwargs: Kwargs) -> None:
    """Draws a number from the CPU's streams of a kernel, which draws none on fake tensors."""
    for stream, _ in draws_of(args, kwargs) or ():
        if isinstance(stream, torch.Generator) and stream.device.type == "cpu":
            with DisableTorchDispatch():
                torch.empty((), device="cpu").uniform_(generator=stream)
