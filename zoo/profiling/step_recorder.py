"""Records a training step: its operators, kernels, storages and saved tensors (`step_events`).

torch's profilers see only real memory. Here tensors may be fake; the bytes are those of real ones.
The forward runs once, as it is written: a dispatch mode sees each operator, below autograd and
autocast, and changes nothing. Python's stack shows which modules are running, so that nothing is
attached to the model. Then the autograd graph runs node by node on fake tensors, whatever the
forward ran on: a tensor that a node saved becomes a new fake when the node opens it.
"""

import functools
import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from types import FrameType
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from zoo._torch import (
    Args,
    FakeTensor,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    active_fake_mode,
    current_backward,
    sequence_number,
)
from zoo.engine.operands import External
from zoo.engine.operator_effects import (
    DETACH,
    Effects,
    bytes_returned,
    effects_of,
    is_counted,
    is_view,
    name_of,
    written_by,
)
from zoo.engine.saved_tensors import is_in_graph
from zoo.engine.segments import thread
from zoo.engine.tensor_state import alive, detached, has_own_storage, storage_of
from zoo.errors import ArgumentError
from zoo.planner.step_events import (
    AT_END,
    Allocated,
    Call,
    Event,
    Freed,
    KernelRun,
    NodeRun,
    Released,
    Saved,
    StepEvents,
    Viewed,
)
from zoo.profiling.cast_cache import caches_casts, is_cached
from zoo.profiling.fake_results import LIFT, note_reserve
from zoo.profiling.fake_tensors import QUESTIONS, answer
from zoo.profiling.kernel_costs import flop_formulas
from zoo.profiling.source_location import Instruction, line_of_frame, modules_around
from zoo.profiling.step_mode import (
    LEFT_OUT,
    SavedMemory,
    SavedTensor,
    StepMode,
    at_end,
    kernel_now,
    roots_of,
    starts_kernel,
)
from zoo.profiling.tensor_spec import CallKey, KernelSpec, TensorSpec, storages_of, tensors_in

Parameters = ParamSpec("Parameters")
T = TypeVar("T")
CUDNN = torch.ops.aten._cudnn_rnn.default
SETS_STORAGE = frozenset(
    {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
)


class StepRecorder(StepMode):
    """Records the training step that runs inside the `with` block, on the thread that makes this.

    An error of the recorder never reaches the forward: the log ends there, and `events` raises.

    Args:
        model: its parameters and buffers are left out of the events; None for none.
        inputs: the model's inputs, whose storages get the first numbers.
        is_real: the program's own backward follows, and opens what the engine's hooks have packed.
            Otherwise the step runs for its events alone.

    Attributes:
        dispatched: all operators of the forward, also those that only fake tensors dispatch.
        positions: for each operator of the events its index among these.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        inputs: Iterable[Tensor] = (),
        *,
        is_real: bool = False,
    ) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.dispatched: list[Operator] = []
        self.positions: list[int] = []
        self._model, self._is_real, self._caches_casts = model, is_real, caches_casts()
        self._fault: Exception | None = None
        self._fault_line = ""  # the line of the model's code
        self._events = StepEvents()
        # the number and the spec of each different kernel call, by the spec's repr
        self._kernels: dict[str, tuple[int, KernelSpec | None]] = {}
        # numbers of reserves, which cuDNN's networks keep for their backward
        self._reserves = frozenset[int]()
        # storages that were made and not written yet
        self._blank: set[int] = set()
        self._functions, self._views = _Functions(), _FakeViews()
        # events of the node that runs; None in the forward
        self._of_node: list[Event] | None = None
        self._made_before = 0  # storages of the forward
        # the number of fakes of each saved storage, and the storages that a gradient lies in
        self._fakes: Counter[int] = Counter()
        self._gradients: set[int] = set()
        # the mode in which saved tensors are opened as fakes; None in the forward
        self._fake_mode: FakeTensorMode | None = None
        self._paths = {} if model is None else {id(m): path for path, m in model.named_modules()}
        owned = [] if model is None else [*model.parameters()]
        self._parameters = {id(parameter): number for number, parameter in enumerate(owned)}
        self._events.trained = [p.nbytes for p in owned if p.requires_grad]
        for tensor in (*owned, *([] if model is None else model.buffers())):
            for storage in storages_of(tensor):
                self._leave_out(storage)
        for tensor in inputs:
            self._graph.note_input(tensor)
            for storage in storages_of(tensor):
                if storage._cdata not in self._numbers:
                    self._held.append(storage)
                    self._numbers[storage._cdata] = number = self._add(storage)
                    self._events.inputs.add(number)

    @property
    def events(self) -> StepEvents:
        """The events so far; raises ArgumentError if something could not be noted."""
        if self._fault is not None:
            at = f"{self._fault_line}: " if self._fault_line else ""
            raise ArgumentError(
                f"the kernels of {type(self._model).__name__} cannot be planned for "
                f"({at}{type(self._fault).__name__}: {self._fault})"
            ) from self._fault
        return self._events

    @property
    def specs(self) -> list[KernelSpec | None]:
        """The different kernel calls by their numbers; None for one that cannot be called alone."""
        return [spec for _, spec in self._kernels.values()]

    @property
    def kernels(self) -> dict[CallKey, int]:
        """The numbers of the different kernel calls, by the keys of their specs."""
        specs = reversed([*enumerate(self.specs)])
        return {spec.key: number for number, spec in specs if spec is not None}

    @property
    def constants(self) -> list[UntypedStorage]:
        """Storages that neither the program made nor the model owns, and what it owns."""
        return self._held

    def note_earlier(self, tensors: Iterable[Tensor]) -> list[int]:
        """Notes what the program holds already as if it were made now; returns its storages."""
        storages = {s._cdata: s for tensor in tensors for s in storages_of(tensor)}
        numbers = [self._add(storage) for storage in storages.values()]
        for number, storage in zip(numbers, storages.values(), strict=True):
            self._begin(storage, number)
            self.note(Allocated(number))
        return numbers

    def enter(self, block: str, args: Args = ()) -> None:
        """Notes that a block begins, as `engine.kernel_segments.Conductor` does."""
        # other forwards are those of dry steps
        if not self._events.model_operators:
            visits = self._events.visits
            count = sum(name == block for name, _ in visits)
            visits[block, count] = len(self._events.operators)

    def leave(self) -> None:
        """Ignores that a block ends."""

    def note_saved(self, external: External) -> None:
        """Ignores what is saved outside of all segments."""

    def note_end_of_model(self) -> None:
        """Notes that the model has returned; later calls are those of the loss, in no module."""
        self._events.model_operators = len(self._events.operators)
        self._paths = {}

    def note_ends(self, outputs: Sequence[Tensor], loss: Tensor | None) -> list[Tensor]:
        """Notes the model's outputs, and returns the tensors at which the backward begins."""
        self._events.outputs = self.numbers_of(outputs)
        self._events.ends = self.numbers_of([] if loss is None else [loss])
        return roots_of(outputs, loss)

    def remaining(self) -> list[UntypedStorage]:
        """Returns the storages of the forward that the program holds, when the backward is over."""
        held = self._events.remaining
        return [storage for storage in self._living() if self._numbers_at([storage]) & held]

    def run_backward(self, roots: list[Tensor]) -> None:
        """Runs the backward of the sum of these tensors, under a `FakeTensorMode`.

        `roots` is emptied. From here on autograd holds no saved tensor.
        """
        self._made_before = len(self._events.sizes)
        self._graph.end()
        self._is_forward = False
        self._begin_node(AT_END)
        self._fake_mode = active_fake_mode()
        if not self._is_real:
            self._drop_saved()
        gradients: list[object] = []
        try:
            gradients = self._walk(roots, keeps_graph=self._is_real)
        finally:
            # the program's own backward opens what was saved
            self._of_node, self._fake_mode = [], None
        del gradients
        # not what only reference cycles hold: when it is freed depends on the collector
        if self._held_of_forward():
            gc.collect()
        self._events.remaining = self._held_of_forward()

    def _drop_saved(self) -> None:
        """Lets autograd hold no saved tensor that a fake will stand for: one that is strided."""
        saved = (memory.stand_in for memories in self._saved_by.values() for memory in memories)
        for stand_in in alive(saved):
            if stand_in.spec is not None:
                stand_in.packed = None

    def _held_of_forward(self) -> frozenset[int]:
        if self._is_real:
            return frozenset()
        held = {n for n in self._numbers_at(self._living()) if n < self._made_before}
        # one that has become a buffer is counted as what was the buffer before
        buffers = () if self._model is None else self._model.buffers()
        return frozenset(held - self._events.casts - self.numbers_of(buffers))

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs an operator and records it."""
        if types and not all(map(has_own_storage, types)):
            # its own dispatch unwraps it and calls operators on the inner tensors
            return NotImplemented
        if func in QUESTIONS:
            return answer(func, args[0])
        if self.is_of_kept_graph(func):
            return args[0]
        kwargs = kwargs or {}
        # a thread of autograd has none around this
        frame = sys._getframe().f_back or sys._getframe()
        running = self._guarded(self._before, func, args, kwargs, frame)
        kernel = kernel_now(func, args, kwargs)
        result = kernel(*args, **kwargs)
        if running is not None:
            self._guarded(self._after, running, args, kwargs, result)
        return result

    def _guarded(
        self, note: Callable[Parameters, T], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> T | None:
        """Calls one of the recorder's own functions; in the forward any error ends the log."""
        if self._fault is not None:
            return None
        try:
            return note(*args, **kwargs)
        except Exception as error:
            if not self._is_forward:
                raise
            self._fault, self._fault_line = error, line_of_frame(sys._getframe(1))
            return None

    def _before(self, func: Operator, args: Args, kwargs: Kwargs, frame: FrameType) -> "_Running":
        """Notes that an operator begins, which may change its arguments in place."""
        inputs, effects = tensors_in((args, kwargs)), effects_of(func)
        call = None
        if self._is_forward:
            is_own = threading.get_ident() == self._thread and not thread.replaying
            if is_own and getattr(func, "namespace", "") != "prim":
                call = self._call(func, inputs, args, kwargs, frame)
            # the forward itself made what lies in memory that one of its kernels has allocated
            others = (t for t in inputs if self.numbers_of([t]) <= self._events.inputs)
            self._graph.note_kernel(others, has_hooks=self._is_real)
        storages = [storage for tensor in inputs for storage in storages_of(tensor)]
        # the code itself makes the data of `torch.tensor`
        if func is not LIFT:
            self._note_constants(storages)
        spec = KernelSpec.of(func, args, kwargs) if starts_kernel(func) else None
        written = written_by(effects, args, kwargs)
        reads = self._numbers_at(storages)
        return _Running(func, effects, call, inputs, storages, spec, written, reads, frame)

    def _after(self, running: "_Running", args: Args, kwargs: Kwargs, result: PyTree) -> None:
        """Notes what an operator returned, and the events of its kernel."""
        func, effects, call, inputs, storages, spec, written, reads, _ = running
        outputs = tensors_in(result)
        if call is not None:
            call.shapes = tuple(tuple(tensor.shape) for tensor in outputs)
            call.bytes = bytes_returned(result)
            self._views.note_results(running, args, outputs)
        elif func is DETACH and self._is_forward:
            self._views.note_detached(result)
        allocated = self._note_results(func, storages, outputs)
        if effects.empty:
            self._blank |= allocated
        if func is CUDNN:
            self._reserves |= self.numbers_of([result[3]])
        writes = self.numbers_of(written)
        self._blank -= writes
        if self._caches_casts and is_cached(func, args, result):
            self._events.casts |= allocated
        if not starts_kernel(func):
            for storage in reads:
                self.note(Viewed(storage))
            return
        number, _ = self._kernels.setdefault(repr(spec), (len(self._kernels), spec))
        count = flop_formulas().get(getattr(func, "_overloadpacket", None))
        dtypes = (tensor.dtype for tensor in outputs if tensor.dtype.is_floating_point)
        self.note(
            KernelRun(
                number=number,
                flops=count(*args, **kwargs, out_val=result) if count is not None else 0,
                moved=sum(map(_bytes_moved, (*inputs, *outputs))),
                itemsize=next(dtypes, torch.float32).itemsize,
                reads=reads,
                writes=writes,
                keeps=allocated | writes if effects.keeps_results(args, kwargs) else frozenset(),
            )
        )

    def _call(
        self,
        func: Operator,
        inputs: Sequence[Tensor],
        args: Args,
        kwargs: Kwargs,
        frame: FrameType,
    ) -> Call | None:
        """Numbers an operator, if a plan counts it; returns its row if it may matter to a plan."""
        if not is_counted(func, args, kwargs):
            return None
        self.dispatched.append(func)
        name, events = name_of(func), self._events
        if self._views.is_next(name, frame):
            self._note_regenerated(args[0])
            return None
        events.has_backward |= current_backward() != -1
        call = Call(name, is_query=func in SETS_STORAGE or _is_query(func))
        call.verb = name.split(".")[1]
        if call.is_query:
            self._number(call)
            if func in SETS_STORAGE:
                self._views.forget(args[0])
            return None
        call.within, call.line, instruction = modules_around(frame, self._paths)
        for tensor in reversed(inputs):
            if isinstance(tensor, FakeTensor):
                count = self._views.regenerated(tensor, events.operators, call.line)
                self._forget_latest(count)
        self._number(call)
        self._views.note_call()
        self._functions.note(call, func, instruction)
        owned = map(self._parameters.get, map(id, inputs))
        call.parameters = frozenset(number for number in owned if number is not None)
        return call

    def _number(self, call: Call) -> None:
        """Gives an operator the next number."""
        call.index = len(self._events.operators)
        self._events.operators.append(call)
        self.positions.append(len(self.dispatched) - 1)
        self._nodes.append(sequence_number())

    def _forget_latest(self, count: int) -> None:
        """Forgets the latest operators, as far as their events are those of the next one."""
        if not count:
            return
        start, forward = len(self._nodes) - count, self._events.forward
        del self._events.operators[start:], self.positions[start:], self._nodes[start:]
        for position in range(len(forward) - 1, -1, -1):
            operator, event = forward[position]
            if operator <= start:
                break
            forward[position] = start, event

    def note(self, row: Event) -> None:
        """Adds an event to those of the operator, or of the autograd node, that runs."""
        if self._of_node is None:
            self._events.forward.append((len(self._nodes) - 1, row))
        else:
            self._of_node.append(row)

    def _add(self, storage: UntypedStorage) -> int:
        """Returns the next number, for a storage."""
        self._events.sizes.append(storage.nbytes())
        return len(self._events.sizes) - 1

    def _note_constants(self, storages: Iterable[UntypedStorage]) -> None:
        """Notes storages that neither the program made nor the model owns."""
        for storage in storages:
            if storage._cdata not in self._numbers:
                self._leave_out(storage)
                self._events.constants.append(storage.nbytes())

    def _note_results(
        self, func: Operator, arguments: Sequence[UntypedStorage], outputs: Sequence[Tensor]
    ) -> frozenset[int]:
        """Notes the storages that an operator made, and returns them."""
        allocated = set()
        # the fake of a real tensor has another storage than that: here a written argument, or a
        # view
        is_left_out = _returns_argument(func) or (
            is_view(func)
            and any(self._numbers.get(storage._cdata) == LEFT_OUT for storage in arguments)
        )
        for tensor in outputs:
            for storage in storages_of(tensor):
                if storage._cdata in self._numbers:
                    continue
                if is_left_out:
                    self._leave_out(storage)
                    continue
                number = self._add(storage)
                self._begin(storage, number)
                self.note(Allocated(number))
                allocated.add(number)
            if self._is_forward:
                self._graph.note_result(tensor)
        return frozenset(allocated)

    def freed(self, number: int) -> None:
        """Notes that a storage is freed: one of the forward when autograd releases it."""
        self._blank.discard(number)
        if self._is_forward or number >= self._made_before:
            self.note(Freed(number))

    def pack(self, tensor: Tensor, storages: frozenset[int]) -> tuple[PyTree, TensorSpec | None]:
        """Notes what autograd saves; the engine's hooks pack it in a real step."""
        operator = self._operator_of(sequence_number() - 1)
        for number in storages:
            saved = Saved(number, is_blank=number in self._blank)
            self._events.forward.append((operator, saved))
        spec = TensorSpec.of(tensor) if tensor.layout is torch.strided else None
        return super().pack(tensor, storages)[0] if self._is_real else _without_graph(tensor), spec

    def unpack(self, saved: SavedTensor) -> Tensor:
        """Returns a saved tensor; in the backward a fake one, which its node alone holds."""
        if self._fake_mode is None or saved.spec is None:
            return super().unpack(saved) if self._is_real else saved.packed
        fake = saved.spec.fake(self._fake_mode)
        storage, number = fake.untyped_storage(), next(iter(saved.memory.storages), LEFT_OUT)
        if number in self._reserves:
            note_reserve(storage)
        self._numbers[storage._cdata] = number
        self._fakes[number] += 1
        at_end(storage, self._free_fake, storage._cdata, number)
        return fake

    def _free_fake(self, key: int, number: int) -> None:
        del self._numbers[key]
        self._fakes[number] -= 1
        if number in self._gradients and not self._fakes[number]:
            self._gradients.remove(number)
            self.note(Freed(number))

    def release(self, saved: Iterable[SavedMemory]) -> None:
        """Notes what a node has released, and in which of it the gradient lies."""
        for number in {number for memory in saved for number in memory.storages}:
            lives_on = self._fakes[number] > 0
            self._gradients |= {number} if lives_on else set()
            self.note(Released(number, lives_on))

    def _begin_node(self, operator: int) -> None:
        self._of_node = []
        self._events.backward.append(NodeRun(operator, self._of_node))

    def _on_node(self, node: Node) -> bool:
        is_copied = super()._on_node(node)
        self._begin_node(self._operator_of_node)
        return is_copied


class _Running(NamedTuple):
    """An operator that runs: its row, if it may matter to a plan, and what its kernel is given."""

    func: Operator
    effects: Effects
    call: Call | None
    inputs: Sequence[Tensor]
    storages: Sequence[UntypedStorage]
    spec: KernelSpec | None
    written: Sequence[Tensor]
    reads: frozenset[int]
    frame: FrameType


class _Functions:
    """Numbers the calls of torch's functions: what one instruction of the caller dispatches.

    A loop, as that of `sum` in C or around a function that calls one of torch, repeats a kernel.
    """

    def __init__(self) -> None:
        self._count = 0
        # the latest call: its modules and instruction, its kernels
        self._called_at: tuple[tuple[str, ...], Instruction] | None = None
        self._kernels: list[Operator] = []

    def note(self, call: Call, func: Operator, instruction: Instruction | None) -> None:
        """Gives an operator the number and the name of the function's call that dispatched it."""
        name = None if instruction is None else instruction.name()
        if instruction is None or name is None:
            self._called_at = None
            return
        goes_on = (call.within, instruction) == self._called_at
        begins_again = (
            self._kernels[:1] == [func] and sum(not is_view(kernel) for kernel in self._kernels) < 2
        )
        if not goes_on or begins_again:
            self._count += 1
            self._called_at, self._kernels = (call.within, instruction), []
        self._kernels.append(func)
        call.function, call.verb = self._count, name or call.verb


class _FakeViews:
    """Knows the operators by which autograd regenerates views of fake tensors.

    It does so after a write to a view, and before a kernel reads a view whose base was written
    through another view. For real tensors it dispatches none of them.
    """

    def __init__(self) -> None:
        # for a view, the names of the operators that made it from its base, the latest first
        self._operators: MutableMapping[Tensor, tuple[str, ...]] = WeakIdKeyDictionary()
        # those that come after a write, the next one last, and at which instruction
        self._expected: list[str] = []
        self._at: list[tuple[int, int]] = []
        # the results of the calls
        self._results: list[list[weakref.ref[Tensor]]] = []

    def is_next(self, operator: str, frame: FrameType) -> bool:
        """Returns whether an operator regenerates a view that was just written."""
        is_next = self._expected[-1:] == [operator] and self._at == _instruction(frame)
        self._expected = self._expected[:-1] if is_next else []
        return is_next

    def regenerated(self, tensor: Tensor, operators: Sequence[Call], line: str) -> int:
        """Returns how many of the latest operators have just regenerated a view that is read.

        The program does not hold their results.
        """
        views = self._operators.get(tensor, ())
        latest = [(call.operator, call.line) for call in operators[-len(views) :]]
        results = self._results[-len(views) :]
        if (
            not views
            or latest != [(name, line) for name in reversed(views)]
            or any(result() is not None for call in results for result in call)
        ):
            return 0
        del self._results[-len(views) :]
        return len(views)

    def note_call(self) -> None:
        """Notes that an operator begins."""
        self._results.append([])

    def forget(self, tensor: Tensor) -> None:
        """Forgets how a view was made, which gets another storage."""
        self._operators.pop(tensor, None)

    def note_detached(self, result: Tensor) -> None:
        """Notes by what the program holds the result of the latest call."""
        if self._results:
            self._results[-1].append(weakref.ref(result))

    def note_results(self, running: _Running, args: Args, results: Sequence[Tensor]) -> None:
        """Notes which results are views, and which views autograd regenerates."""
        inputs, written = running.inputs, running.written
        has_history = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if written and args and has_history and isinstance(args[0], FakeTensor):
            # the argument is written in place, and autograd regenerates it
            self._at = _instruction(running.frame)
            self._expected += self._operators.get(args[0], ())
        storages = {id(storage_of(tensor)) for tensor in inputs}
        for tensor in results:
            if any(tensor is argument for argument in inputs):
                continue
            self._results[-1].append(weakref.ref(tensor))
            is_view = bool(inputs) and id(storage_of(tensor)) in storages
            before = self._operators.get(inputs[0], ()) if is_view else ()
            own = (name_of(running.func),) if is_view and not written else ()
            self._operators[tensor] = (*own, *before)


def _instruction(frame: FrameType | None) -> list[tuple[int, int]]:
    """Identifies the current instructions of a frame and of those that called it.

    A function mode of the program calls all operators at one instruction, and its frame may have
    the address of the last one.
    """
    stack = []
    while frame is not None:
        stack.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return stack


@functools.cache
def _is_query(operator: Operator) -> bool:
    """Returns whether an operator neither returns a tensor nor writes one."""
    effects = effects_of(operator)
    if effects.opaque:
        return False
    returns = any("Tensor" in str(result.type) for result in operator._schema.returns)
    return not (returns or effects.writes or effects.reshapes)


@functools.cache
def _returns_argument(operator: Operator) -> bool:
    """Returns whether an operator writes an argument and returns it."""
    schema = getattr(operator, "_schema", None)
    aliases = [] if schema is None else [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and alias.is_write for alias in aliases)


def _bytes_moved(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's numbers, of a sparse one with its indices."""
    if tensor.layout is torch.strided:
        return int(tensor.nbytes)
    return sum(storage.nbytes() for storage in storages_of(tensor))


def _without_graph(tensor: Tensor) -> Tensor:
    """Returns a tensor that holds the same memory without the autograd graph."""
    # a graph that is being written knows fake tensors by their identity
    is_itself = (tensor.is_leaf and tensor.requires_grad) or is_in_graph()
    return tensor if is_itself else detached(tensor)
