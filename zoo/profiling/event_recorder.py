"""Records the events of a training step: kernels, storages, saved tensors (`planner.step_events`).

torch's profilers see only real memory. Here tensors may be fake; the bytes are those of real ones.
The forward runs once, as it is written, under a dispatch mode. Then its autograd graph runs node by
node on fake tensors, whatever the forward ran on: a tensor that a node saved becomes a new fake
when the node opens it.
"""

import bisect
import contextlib
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from zoo._torch import (
    Args,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    active_fake_mode,
    is_any_autocast_enabled,
    sequence_number,
)
from zoo.engine.dispatch_keys import kernel_of
from zoo.engine.operator_effects import DETACH, effects_of, is_view, written_by
from zoo.engine.recorder import KernelMode
from zoo.engine.saved_tensors import is_in_graph
from zoo.engine.segments import Pack, Unpack
from zoo.engine.tensor_state import alive, detached
from zoo.planner.step_events import (
    AT_END,
    Allocated,
    Event,
    Freed,
    Gradient,
    KernelRun,
    NodeRun,
    Released,
    Saved,
    StepEvents,
    Viewed,
)
from zoo.profiling.autograd_interpreter import TracedGraph, gradients_of
from zoo.profiling.fake_results import LIFT, note_reserve
from zoo.profiling.fake_tensors import QUESTIONS, answer
from zoo.profiling.kernel_costs import flop_formulas
from zoo.profiling.tensor_spec import CallKey, KernelSpec, TensorSpec, storages_of, tensors_in

CUDNN = torch.ops.aten._cudnn_rnn.default
CONVERSION = torch.ops.aten._to_copy.default
# these start no kernel
FREE = frozenset({DETACH, torch.ops.aten.empty.memory_format})
# the number of all storages without events: of parameters, buffers and constants
LEFT_OUT = -1
# so many autograd nodes may be made after the one that saves a tensor: those of written views
LATE = 8
# the shape and the dtype of a parameter
Form = tuple[tuple[int, ...], torch.dtype]
# bytes that an optimizer takes for a parameter of a form
UpdateBytes = Mapping[Form, int]


def form_of(parameter: Tensor) -> Form:
    """Returns the shape and the dtype of a parameter."""
    return tuple(parameter.shape), parameter.dtype


def bytes_moved(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's numbers, of a sparse one with its indices."""
    if tensor.layout is torch.strided:
        return int(tensor.nbytes)
    return sum(storage.nbytes() for storage in storages_of(tensor))


def caches_casts() -> bool:
    """Returns whether autocast holds casts of weights until the forward is over."""
    return is_any_autocast_enabled() and torch.is_autocast_cache_enabled()


def is_cached(func: Operator, args: Args, result: PyTree) -> bool:
    """Returns whether autocast caches a result: a cast of what is trained, a weight or an input."""
    if func is not CONVERSION:
        return False
    source: Tensor = args[0]
    is_trained = source.requires_grad and source.is_leaf and not source._is_view()
    is_lower = result.dtype is torch.get_autocast_dtype(source.device.type)
    return is_trained and is_lower and source.dtype is torch.float32


def autocast_left(device: torch.device) -> AbstractContextManager[object]:
    """Runs the block outside of the autocasts of a device."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def roots_of(outputs: Sequence[Tensor], loss: Tensor | None) -> list[Tensor]:
    """Returns the tensors at which a backward begins: the loss, or all outputs if it is not known.

    Of a language model that returns its loss and then its logits, that is the loss.
    """
    if loss is not None:
        return [loss] if loss.grad_fn is not None else []
    roots = [output for output in outputs if output.grad_fn is not None]
    return roots[:1] if roots and not roots[0].shape else roots


@dataclass(slots=True)
class SavedMemory:
    """The storages of a tensor that autograd saved, and whether a node has opened it."""

    storages: frozenset[int]
    is_opened: bool = False


@dataclass(slots=True, weakref_slot=True)
class SavedTensor:
    """Autograd's stand-in for a tensor that it saved; `spec` is None if it is not strided."""

    packed: PyTree
    spec: TensorSpec | None
    memory: SavedMemory


# hooks that pack and unpack a tensor that autograd saves
Hooks = tuple[Pack, Unpack]


def _without_graph(tensor: Tensor) -> Tensor:
    """Returns a tensor that holds the same memory without the autograd graph."""
    # a graph that is being written knows fake tensors by their identity
    is_itself = (tensor.is_leaf and tensor.requires_grad) or is_in_graph()
    return tensor if is_itself else detached(tensor)


@functools.cache
def _returns_argument(operator: Operator) -> bool:
    """Returns whether an operator writes an argument and returns it."""
    schema = getattr(operator, "_schema", None)
    aliases = [] if schema is None else [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and alias.is_write for alias in aliases)


class EventRecorder(KernelMode):
    """Records the training step that runs inside the `with` block, on the thread that makes this.

    Args:
        count: returns how many operators of the forward were dispatched so far.
        caches_casts: autocast holds casts of weights until the forward is over.
        hooks: pack and unpack saved tensors in a real training step, whose own backward follows
            the recorded one. Without them the step runs for its events alone.

    Attributes:
        events: the events so far.
    """

    # a compiled block is one operator
    keeps_compiled = True

    def __init__(
        self, count: Callable[[], int], *, caches_casts: bool, hooks: Hooks | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events = StepEvents()
        self._count, self._caches_casts, self._hooks = count, caches_casts, hooks
        self._graph = TracedGraph()
        self._model: nn.Module | None = None
        # the number and the spec of each different kernel call, by the spec's repr
        self._kernels: dict[str, tuple[int, KernelSpec | None]] = {}
        # numbers of storages by address
        self._numbers: dict[int, int] = {}
        # storages that are held, so that no other one gets the address
        self._owned: list[UntypedStorage] = []
        # numbers of reserves, which cuDNN's networks keep for their backward
        self._reserves = frozenset[int]()
        # storages that were made and not written yet
        self._blank: set[int] = set()
        # those of the forward that are alive, in a step that runs for its events alone
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        # how many autograd nodes there were when each operator was dispatched
        self._nodes: list[int] = []
        self._saved: list[weakref.ref[SavedTensor]] = []
        self._saved_by: dict[int, list[SavedMemory]] = {}  # by the autograd node
        # events of the node that runs; None in the forward
        self._of_node: list[Event] | None = None
        self._node = 0
        self._made_before = 0  # storages of the forward
        # the number of fakes of each saved storage, and the storages that a gradient lies in
        self._fakes: Counter[int] = Counter()
        self._living: set[int] = set()
        # the mode in which saved tensors are opened as fakes; None in the forward
        self._fake_mode: FakeTensorMode | None = None
        # autograd nodes whose real counterparts copy the gradient
        self._copying: set[int] = set()

    @property
    def specs(self) -> list[KernelSpec | None]:
        """The different kernel calls by their numbers; None for one that cannot be called alone."""
        return [spec for _, spec in self._kernels.values()]

    def note_owned(self, model: nn.Module) -> None:
        """Leaves the storages of a model's parameters and buffers out of the events."""
        self._model = model
        for parameter in model.parameters():
            for storage in storages_of(parameter):
                self._leave_out(storage)
        for buffer in model.buffers():
            for storage in storages_of(buffer):
                self._leave_out(storage)
        self.events.trained += [p.nbytes for p in model.parameters() if p.requires_grad]

    def note_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Numbers the storages of the model's inputs."""
        for tensor in tensors:
            self._graph.note_input(tensor)
            for storage in storages_of(tensor):
                if storage._cdata not in self._numbers:
                    self._owned.append(storage)
                    self.events.inputs.add(self._add(storage))

    def note_ends(self, outputs: Sequence[Tensor], loss: Tensor | None) -> list[Tensor]:
        """Notes the model's outputs, and returns the tensors at which the backward begins."""
        self.events.outputs = self.numbers_of(outputs)
        self.events.ends = self.numbers_of([] if loss is None else [loss])
        return roots_of(outputs, loss)

    @property
    def kernels(self) -> dict[CallKey, int]:
        """The numbers of the different kernel calls, by the keys of their specs."""
        specs = reversed([*enumerate(self.specs)])
        return {spec.key: number for number, spec in specs if spec is not None}

    @property
    def constants(self) -> list[UntypedStorage]:
        """Storages that neither the program made nor the model owns, and what it owns."""
        return self._owned

    def remaining(self) -> list[UntypedStorage]:
        """Returns the storages of the forward that the program holds, when the backward is over."""
        held = self.events.remaining
        return [s for s in alive([*self._alive.values()]) if self._numbers_at([s]) & held]

    def numbers_of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Returns the numbers of the storages of tensors, without those that are left out."""
        return self._numbers_at(storage for tensor in tensors for storage in storages_of(tensor))

    def _numbers_at(self, storages: Iterable[UntypedStorage]) -> frozenset[int]:
        numbers = {self._numbers.get(storage._cdata, LEFT_OUT) for storage in storages}
        return frozenset(numbers - {LEFT_OUT})

    def hooks(self) -> saved_tensors_hooks:
        """Returns hooks that note saved tensors; enter them around the forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def run_backward(self, roots: list[Tensor]) -> None:
        """Runs the backward of the sum of these tensors, under a `FakeTensorMode`.

        `roots` is emptied. From here on autograd holds no saved tensor.
        """
        self._made_before = len(self.events.sizes)
        self._graph.end()
        self._begin_node(AT_END)
        self._fake_mode = active_fake_mode()
        is_real = self._hooks is not None
        for reference in () if is_real else self._saved:
            if (saved := reference()) is not None and saved.spec is not None:
                saved.packed = None
        gradients, leaf, gradient = [], None, None
        walk = gradients_of(
            roots, self._on_node, self._on_end, graph=self._graph, keeps_graph=is_real
        )
        try:
            with self:
                for leaf, gradient in walk:
                    # held, as the `grad` of the parameter would hold it
                    gradients.append(gradient)
                    if isinstance(leaf, nn.Parameter):
                        for number in self.numbers_of([gradient]):
                            self._note(Gradient(number, form_of(leaf)))
            self._release(self._saved_by.pop(self._node, ()))
        finally:
            # the program's own backward opens what was saved
            self._of_node, self._fake_mode = [], None
        del gradients, leaf, gradient, walk
        # not what only reference cycles hold: when it is freed depends on the collector
        if self._held_of_forward():
            gc.collect()
        self.events.remaining = self._held_of_forward()

    def _held_of_forward(self) -> frozenset[int]:
        held = self._numbers_at(alive([*self._alive.values()]))
        # one that has become a buffer is counted as what was the buffer before
        buffers = () if self._model is None else self._model.buffers()
        return frozenset(held - self.events.casts - self.events.inputs - self.numbers_of(buffers))

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return answer(func, args[0])
        if self._of_node is None:
            new = self._count() - len(self._nodes)
            self._nodes += [sequence_number()] * new
            if not new and is_view(func) and func is not DETACH:
                self._note_regenerated(args[0])
        inputs = tensors_in((args, kwargs))
        if self._of_node is None:
            # the forward itself made what lies in memory that one of its kernels has allocated
            others = (t for t in inputs if self.numbers_of([t]) <= self.events.inputs)
            self._graph.note_kernel(others, has_hooks=self._hooks is not None)
        storages = [storage for tensor in inputs for storage in storages_of(tensor)]
        # the code itself makes the data of `torch.tensor`
        if func is not LIFT:
            self._note_constants(storages)
        effects = effects_of(func)
        kernel = kernel_of(func, effects, args, kwargs)
        # before it runs, since it may change its arguments in place
        starts_kernel = not (is_view(func) or func in FREE)
        spec = KernelSpec.of(func, args, kwargs) if starts_kernel else None
        written = written_by(effects, args, kwargs)
        reads = self._numbers_at(storages)
        result = kernel(*args, **kwargs)
        outputs = tensors_in(result)
        allocated = self._note_results(func, storages, outputs)
        if effects.empty:
            self._blank |= allocated
        if func is CUDNN:
            self._reserves |= self.numbers_of([result[3]])
        writes = self.numbers_of(written)
        self._blank -= writes
        if self._caches_casts and is_cached(func, args, result):
            self.events.casts |= allocated
        if not starts_kernel:
            for storage in reads:
                self._note(Viewed(storage))
            return result
        number, _ = self._kernels.setdefault(repr(spec), (len(self._kernels), spec))
        count = flop_formulas().get(getattr(func, "_overloadpacket", None))
        dtypes = (tensor.dtype for tensor in outputs if tensor.dtype.is_floating_point)
        self._note(
            KernelRun(
                number=number,
                flops=count(*args, **kwargs, out_val=result) if count is not None else 0,
                moved=sum(map(bytes_moved, (*inputs, *outputs))),
                itemsize=next(dtypes, torch.float32).itemsize,
                reads=reads,
                writes=writes,
                keeps=allocated | writes if effects.keeps_results(args, kwargs) else frozenset(),
            )
        )
        return result

    def _note_regenerated(self, base: Tensor) -> None:
        """Notes an operator by which autograd regenerates a fake view that was written in place.

        For a real one it makes a single node instead, whose backward allocates the whole gradient
        of the view's base; views of complex numbers are regenerated as fake ones are.
        """
        if not base.is_complex() and not base._is_view():
            self._copying.add(sequence_number() - 1)

    def _note(self, event: Event) -> None:
        if self._of_node is None:
            self.events.forward.append((len(self._nodes) - 1, event))
        else:
            self._of_node.append(event)

    def _add(self, storage: UntypedStorage) -> int:
        """Gives a storage the next number."""
        self._numbers[storage._cdata] = number = len(self.events.sizes)
        self.events.sizes.append(storage.nbytes())
        return number

    def _leave_out(self, storage: UntypedStorage) -> None:
        self._owned.append(storage)
        self._numbers[storage._cdata] = LEFT_OUT

    def _note_constants(self, storages: Iterable[UntypedStorage]) -> None:
        """Notes storages that neither the program made nor the model owns."""
        for storage in storages:
            if storage._cdata not in self._numbers:
                self._leave_out(storage)
                self.events.constants.append(storage.nbytes())

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
                weakref.finalize(storage, self._free, storage._cdata, number).atexit = False
                if self._of_node is None and self._hooks is None:
                    self._alive[storage._cdata] = weakref.ref(storage)
                self._note(Allocated(number))
                allocated.add(number)
            if self._of_node is None:
                self._graph.note_result(tensor)
        return frozenset(allocated)

    def _free(self, key: int, number: int) -> None:
        del self._numbers[key]
        self._alive.pop(key, None)
        self._blank.discard(number)
        # a storage of the forward exists in the backward until autograd releases it
        if self._of_node is None or number >= self._made_before:
            self._note(Freed(number))

    def _pack(self, tensor: Tensor) -> SavedTensor | Tensor:
        # all that a higher-order operator compiles is one operator
        if torch.compiler.is_compiling():
            return tensor
        numbers, node = self.numbers_of([tensor]), sequence_number() - 1
        for number in numbers:
            event = Saved(number, is_blank=number in self._blank)
            self.events.forward.append((self._operator_of(node), event))
        memory = SavedMemory(numbers)
        self._saved_by.setdefault(node, []).append(memory)
        is_strided = tensor.layout is torch.strided
        saved = SavedTensor(
            _without_graph(tensor) if self._hooks is None else self._hooks[0](tensor),
            TensorSpec.of(tensor) if is_strided else None,
            memory,
        )
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: SavedTensor | Tensor) -> Tensor:
        """Returns a saved tensor; in the backward a fake one, which its node alone holds."""
        if isinstance(saved, Tensor):
            return saved
        if self._fake_mode is None or saved.spec is None:
            return self._hooks[1](saved.packed) if self._hooks else saved.packed
        fake = saved.spec.fake(self._fake_mode)
        saved.memory.is_opened = True
        storage, number = fake.untyped_storage(), next(iter(saved.memory.storages), LEFT_OUT)
        if number in self._reserves:
            note_reserve(storage)
        self._numbers[storage._cdata] = number
        self._fakes[number] += 1
        weakref.finalize(storage, self._free_fake, storage._cdata, number).atexit = False
        return fake

    def _free_fake(self, key: int, number: int) -> None:
        del self._numbers[key]
        self._fakes[number] -= 1
        if number in self._living and not self._fakes[number]:
            self._living.remove(number)
            self._note(Freed(number))

    def _operator_of(self, node: int) -> int:
        """Returns the number of the operator that made an autograd node."""
        return bisect.bisect_right(self._nodes, node)

    def _begin_node(self, operator: int) -> None:
        self._of_node = []
        self.events.backward.append(NodeRun(operator, self._of_node))

    def _on_node(self, node: Node) -> bool:
        before, self._node = self._node, node._sequence_nr()
        if left := self._saved_by.pop(before, None):
            # the result of a write to a view was saved after the view had got a node of its own
            if self._node > before - LATE:
                self._saved_by.setdefault(self._node, []).extend(left)
            else:
                self._release(left)
        self._begin_node(self._operator_of(self._node))
        return self._node in self._copying

    def _on_end(self) -> None:
        saved = self._saved_by.pop(self._node, [])
        self._release([memory for memory in saved if memory.is_opened])
        self._saved_by[self._node] = [memory for memory in saved if not memory.is_opened]

    def _release(self, saved: Iterable[SavedMemory]) -> None:
        for number in {number for memory in saved for number in memory.storages}:
            lives_on = self._fakes[number] > 0
            self._living |= {number} if lives_on else set()
            self._note(Released(number, lives_on))
