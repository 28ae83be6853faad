"""Logs a dry step: a training step on fake tensors that the engine runs by a plan.

A dispatch mode below the engine sees each kernel, also those of replays, and each storage from its
making to its end (`planner.dry_step` has the rows). It knows nothing of plans and segments. The
backward runs node by node, as in a trace (`autograd_interpreter`): a forked process may have no
other, and what fails on fake tensors gives zeros.
"""

import bisect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node, saved_tensors_hooks

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
from zoo.engine.dispatch_keys import kernel_of, with_present_keys
from zoo.engine.operator_effects import effects_of, is_view
from zoo.engine.recorder import KernelMode
from zoo.engine.saved_tensors import Packed, pack, unpack
from zoo.engine.segments import thread
from zoo.engine.tensor_state import alive
from zoo.planner.dry_step import ForwardEnd, Made, Ran, Returned, Row, There
from zoo.planner.step_events import AT_END, Freed, Gradient
from zoo.profiling.autograd_interpreter import TracedGraph, gradients_of
from zoo.profiling.event_recorder import FREE, form_of
from zoo.profiling.fake_results import LIFT
from zoo.profiling.fake_tensors import QUESTIONS, answer
from zoo.profiling.tensor_spec import CallKey, key_of, storages_of, tensors_in

# what has no rows: storages of parameters, buffers, inputs and constants
LEFT_OUT = -1


@dataclass(slots=True, weakref_slot=True)
class PackedHere:
    """What the engine packed; autograd's nodes hold it until they have run.

    A write to a view is numbered after its node: what it saves `is_late`, and belongs to one before
    the node by which it was noted.
    """

    packed: Packed | None
    is_late: bool
    is_opened: bool = False


class StepLedger(KernelMode):
    """Logs the training step that runs inside of the `with` block.

    Args:
        numbers: of the kernels of the trace, by their keys.
        shares_casts: as in `TracedGraph`.

    Attributes:
        rows: the log.
        operator: returns the number of the operator of the forward that runs.
    """

    keeps_compiled = True

    operator: Callable[[], int]

    def __init__(self, numbers: Mapping[CallKey, int], *, shares_casts: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[Row] = []
        self._kernels = numbers
        self._graph = TracedGraph()
        self._graph.shares_casts = shares_casts
        # numbers of storages by address; those left out are held, so that no other gets the address
        self._storages: dict[int, int] = {}
        self._held: list[UntypedStorage] = []
        self._made = 0
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        # how many autograd nodes there were when each operator was dispatched
        self._nodes: list[int] = []
        self._saved_by: dict[int, list[weakref.ref[PackedHere]]] = {}  # by the autograd node
        # the node that runs, and the operator that made it; None in the forward
        self._node, self._operator_of_node = 0, AT_END
        self._is_forward = True
        self._attributes: list[object] = []

    def note_owned(
        self, model: nn.Module, inputs: Iterable[Tensor], others: Iterable[UntypedStorage]
    ) -> None:
        """Leaves out what is always there: parameters, buffers, the model's inputs and others."""
        buffers = {s._cdata for buffer in model.buffers() for s in storages_of(buffer)}
        owned = [s for p in model.parameters() for s in storages_of(p)]
        for tensor in inputs:
            self._graph.note_input(tensor)
            owned += storages_of(tensor)
        self._held += (s for s in (*owned, *others) if s._cdata not in buffers)
        self._storages.update((storage._cdata, LEFT_OUT) for storage in self._held)
        # which a forward may replace
        for storage in (s for buffer in model.buffers() for s in storages_of(buffer)):
            if storage._cdata not in self._storages:
                self.rows.append(There(self._number(storage), storage.nbytes()))

    def note_earlier(self, storages: Iterable[UntypedStorage]) -> None:
        """Notes what the program holds of the training step before, until it is replaced."""
        for storage in storages:
            self.note_storage(storage)

    def note_storage(self, storage: UntypedStorage) -> None:
        """Notes a storage unless it is known."""
        if storage._cdata not in self._storages:
            self._begin(storage)

    def remaining(self) -> list[UntypedStorage]:
        """Returns the storages of the step that the program holds now."""
        return alive([*self._alive.values()])

    def note_resized(self, storage: UntypedStorage) -> None:
        """Notes that a storage has lost its memory, or got other memory."""
        key = storage._cdata
        number = self._storages.get(key)
        if number is None or number == LEFT_OUT:
            return
        self.rows.append(Freed(number))
        self._begin(storage)

    def note_state(self, state: Tensor) -> None:
        """Notes a state of a random stream of the CPU, which is no tensor of the step."""
        if state.is_cpu:
            self._note_made([state])

    def hooks(self) -> saved_tensors_hooks:
        """Returns hooks for saved tensors around the engine's own."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def run_backward(self, roots: list[Tensor]) -> list[object]:
        """Runs the backward of the sum of these tensors; `roots` is emptied.

        Returns what the program holds as long as its loss, whose graph has it: attributes of each
        `autograd.Function`.
        """
        self._graph.end()
        self._is_forward = False
        self.rows.append(ForwardEnd())
        gradients, leaf, gradient = [], None, None
        walk = gradients_of(roots, self._on_node, self._on_end, graph=self._graph)
        with self:
            for leaf, gradient in walk:
                # held, as the `grad` of the parameter would hold it
                gradients.append(gradient)
                if isinstance(leaf, nn.Parameter):
                    numbers = self._numbers_of([gradient])
                    self.rows += (Gradient(number, form_of(leaf)) for number in numbers)
        self._release(self._saved_by.pop(self._node, ()))
        attributes, self._attributes = self._attributes, []
        return attributes

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel and logs it."""
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return answer(func, args[0])
        inputs = tensors_in((args, kwargs))
        if self._is_forward:
            new = self.operator() + 1 - len(self._nodes)
            self._nodes += [sequence_number()] * new
            self._graph.note_kernel(inputs, has_hooks=True)
        if func is not LIFT:
            # what was made outside of the trace's sight is there from here on
            self._note_made(inputs)
        starts_kernel = not (is_view(func) or func in FREE)
        # before it runs, since it may change its arguments in place
        key = key_of(func, args, kwargs) if starts_kernel else None
        effects = effects_of(func)
        if thread.replaying:
            kernel = with_present_keys(func, args, kwargs)
        else:
            kernel = kernel_of(func, effects, args, kwargs)
        if effects.seeded and active_fake_mode() is not None:
            _draw(args, kwargs)
        result = kernel(*args, **kwargs)
        outputs = tensors_in(result)
        self._note_made(outputs)
        if self._is_forward:
            for tensor in outputs:
                self._graph.note_result(tensor)
        if starts_kernel:
            operator = len(self._nodes) - 1 if self._is_forward else self._operator_of_node
            number = -1 if key is None else self._kernels.get(key, -1)
            reads = self._numbers_of(inputs) if self._is_forward else ()
            self.rows.append(Ran(number, operator, thread.replaying, reads))
        return result

    def note_returned(self, tensors: Iterable[Tensor]) -> None:
        """Notes what the program holds until the backward is over."""
        self.rows += map(Returned, self._numbers_of(tensors))

    def _numbers_of(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Returns the numbers of the storages of tensors, without those that are left out."""
        numbers = {self._storages[s._cdata] for tensor in tensors for s in storages_of(tensor)}
        return tuple(numbers - {LEFT_OUT})

    def _note_made(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for storage in storages_of(tensor):
                self.note_storage(storage)

    def _begin(self, storage: UntypedStorage) -> None:
        self.rows.append(Made(self._number(storage), storage.nbytes(), thread.replaying))

    def _number(self, storage: UntypedStorage) -> int:
        key, number = storage._cdata, self._made
        if key not in self._storages:
            self._alive[key] = weakref.ref(storage)
            weakref.finalize(storage, self._free, key).atexit = False
        self._storages[key], self._made = number, number + 1
        return number

    def _free(self, key: int) -> None:
        del self._alive[key]
        self.rows.append(Freed(self._storages.pop(key)))

    def _pack(self, tensor: Tensor) -> PackedHere | Tensor:
        # all that a higher-order operator compiles is one operator
        if torch.compiler.is_compiling():
            return tensor
        is_late = tensor._base is not None and tensor._version > 0
        saved = PackedHere(pack(tensor), is_late)
        self._saved_by.setdefault(sequence_number() - 1, []).append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: PackedHere | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        saved.is_opened = True
        assert saved.packed is not None, "its node has not run"
        return unpack(saved.packed)

    def _on_node(self, node: Node) -> bool:
        before, self._node = self._node, node._sequence_nr()
        if late := self._saved_by.pop(before, None):
            self._saved_by.setdefault(self._node, []).extend(late)
        self._operator_of_node = bisect.bisect_right(self._nodes, self._node)
        if hasattr(node, "__dict__"):
            self._attributes += vars(node).values()
        return False

    def _on_end(self) -> None:
        saved = self._saved_by.pop(self._node, [])
        late = [one for one in saved if (s := one()) is not None and s.is_late and not s.is_opened]
        self._release(one for one in saved if one not in late)
        if late:
            self._saved_by[self._node] = late

    @staticmethod
    def _release(saved: Iterable["weakref.ref[PackedHere]"]) -> None:
        """Frees what a node has saved; a node may be alive after it ran."""
        for reference in saved:
            if (one := reference()) is not None:
                one.packed = None


def _draw(args: Args, kwargs: Kwargs) -> None:
    """Draws a number from the CPU's streams of a kernel, which draws none on fake tensors."""
    for stream, _ in draws_of(args, kwargs) or ():
        if isinstance(stream, torch.Generator) and stream.device.type == "cpu":
            with DisableTorchDispatch():
                torch.empty((), device="cpu").uniform_(generator=stream)
