"""The base of the dispatch modes that log a training step (`step_recorder`, `step_ledger`).

    forward     runs as it is written; storages get numbers, and hooks note what autograd saves
    backward    runs node by node (`autograd_interpreter`): a forked process may have no other, and
                what fails on fake tensors gives zeros

A storage has its number until it is freed. What autograd saves belongs to the node that it makes
next, and each node to the operator that made it.
"""

import bisect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from zoo._torch import Args, Kwargs, Operator, sequence_number
from zoo.engine.dispatch_keys import kernel_of, with_present_keys
from zoo.engine.operator_effects import DETACH, Kernel, effects_of, is_view
from zoo.engine.recorder import KernelMode
from zoo.engine.saved_tensors import pack, unpack
from zoo.engine.segments import thread
from zoo.engine.tensor_state import alive, gone
from zoo.planner.step_events import AT_END, Freed, Gradient
from zoo.profiling.autograd_interpreter import TracedGraph, gradients_of
from zoo.profiling.tensor_spec import TensorSpec, storages_of

# the number of all storages that are not logged, such as those of parameters
LEFT_OUT = -1
# these start no kernel
FREE = frozenset({DETACH, torch.ops.aten.empty.memory_format})
# nodes that copy the reserve of their forward where the graph is kept; only autograd's own engine
# tells them that it is not
COPIES_RESERVE = frozenset(
    {
        "CudnnRnnBackward0",
        "MiopenRnnBackward0",
        "CudnnBatchNormBackward0",
        "BatchNormWithUpdateBackward0",
        "BatchNormNoUpdateBackward0",
    }
)
# the shape and the dtype of a parameter
Form = tuple[tuple[int, ...], torch.dtype]
# bytes that an optimizer takes for a parameter of a form
UpdateBytes = Mapping[Form, int]


def form_of(parameter: Tensor) -> Form:
    """Returns the shape and the dtype of a parameter."""
    return tuple(parameter.shape), parameter.dtype


def roots_of(outputs: Sequence[Tensor], loss: Tensor | None) -> list[Tensor]:
    """Returns the tensors at which a backward begins: the loss, or all outputs if it is not known.

    Of a language model that returns its loss and then its logits, that is the loss.
    """
    if loss is not None:
        return [loss] if loss.grad_fn is not None else []
    roots = [output for output in outputs if output.grad_fn is not None]
    return roots[:1] if roots and not roots[0].shape else roots


def starts_kernel(operator: Operator) -> bool:
    """Returns whether an operator runs a kernel, as one that returns a view does not."""
    return not (is_view(operator) or operator in FREE)


def kernel_now(operator: Operator, args: Args, kwargs: Kwargs) -> Kernel:
    """Returns the function by which a mode runs an operator, in a replay or not."""
    if thread.replaying:
        return with_present_keys(operator, args, kwargs)
    return kernel_of(operator, effects_of(operator), args, kwargs)


@dataclass(slots=True)
class SavedMemory:
    """What autograd saved, and whether its node has opened it.

    A write to a view is numbered after its node: what it saves `is_late`, and belongs to one before
    the node by which it was noted.
    """

    storages: frozenset[int]
    is_late: bool
    is_opened: bool = False
    # returns what stands for it, as long as autograd holds that
    stand_in: "Callable[[], SavedTensor | None]" = gone


@dataclass(slots=True, weakref_slot=True)
class SavedTensor:
    """Autograd's stand-in for a tensor that it saved, which its node holds until it has run.

    `packed` is what the engine, or the log, made of it; None once it is released.
    """

    packed: Any
    spec: TensorSpec | None
    memory: SavedMemory


def at_end(storage: UntypedStorage, call: Callable[..., object], *args: object) -> None:
    """Calls a method with arguments when a storage ends, unless its object has ended before.

    What is to be called is alive as long as the storage, and may itself hold it by its object.
    """
    method = weakref.WeakMethod(call)

    def ended() -> None:
        if (alive_call := method()) is not None:
            alive_call(*args)

    weakref.finalize(storage, ended).atexit = False


class StepMode(KernelMode):
    """Numbers the storages of a training step, and runs its backward."""

    # a compiled block is one operator
    keeps_compiled = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = TracedGraph()
        # numbers of storages by address; those left out are held, so that no other gets the address
        self._numbers: dict[int, int] = {}
        self._held: list[UntypedStorage] = []
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        # how many autograd nodes there were when each operator was dispatched
        self._nodes: list[int] = []
        self._saved_by: dict[int, list[SavedMemory]] = {}  # by the autograd node
        self._opened: list[SavedMemory] = []  # by the node that runs
        # nodes whose real counterparts copy the gradient
        self._copying: set[int] = set()
        self._is_forward = True
        # the autograd node that runs, and the operator that made it
        self._node, self._operator_of_node = 0, AT_END
        self._has_reserve = False

    def note(self, row: Any) -> None:
        """Adds a row to the log."""
        raise NotImplementedError

    def freed(self, number: int) -> None:
        """Notes that a storage is freed."""
        self.note(Freed(number))

    def pack(self, tensor: Tensor, storages: frozenset[int]) -> tuple[Any, TensorSpec | None]:
        """Returns what stands for a tensor that autograd saves, and its spec if that is needed."""
        return pack(tensor), None

    def unpack(self, saved: SavedTensor) -> Tensor:
        """Returns a saved tensor to its node."""
        assert saved.packed is not None, "its node has not run"
        return unpack(saved.packed)

    def release(self, saved: Iterable[SavedMemory]) -> None:
        """Frees what a node has saved, which may be alive after it ran."""
        for stand_in in alive(memory.stand_in for memory in saved):
            stand_in.packed = None

    def hooks(self) -> saved_tensors_hooks:
        """Returns hooks that note saved tensors; enter them around the forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def numbers_of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Returns the numbers of the storages of tensors, without those that are left out."""
        return self._numbers_at(storage for tensor in tensors for storage in storages_of(tensor))

    def _numbers_at(self, storages: Iterable[UntypedStorage]) -> frozenset[int]:
        numbers = {self._numbers.get(storage._cdata, LEFT_OUT) for storage in storages}
        return frozenset(numbers - {LEFT_OUT})

    def _leave_out(self, storage: UntypedStorage) -> None:
        self._held.append(storage)
        self._numbers[storage._cdata] = LEFT_OUT

    def _begin(self, storage: UntypedStorage, number: int) -> None:
        """Gives a storage a number until it is freed, or gets another."""
        key = storage._cdata
        if key not in self._numbers:
            self._alive[key] = weakref.ref(storage)
            at_end(storage, self._free, key)
        self._numbers[key] = number

    def _free(self, key: int) -> None:
        del self._alive[key]
        self.freed(self._numbers.pop(key))

    def _living(self) -> list[UntypedStorage]:
        """Returns the storages of the step that are there now."""
        return alive([*self._alive.values()])

    def _walk(self, roots: list[Tensor], *, keeps_graph: bool = False) -> list[object]:
        """Runs the backward of the sum of these tensors; returns what holds the gradients.

        `roots` is emptied.
        """
        gradients, leaf, gradient = list[object](), None, None
        walk = gradients_of(
            roots, self._on_node, self._on_end, graph=self._graph, keeps_graph=keeps_graph
        )
        with self:
            for leaf, gradient in walk:
                # held, as the `grad` of the parameter would hold it
                gradients.append(gradient)
                if isinstance(leaf, nn.Parameter):
                    for number in self.numbers_of([gradient]):
                        self.note(Gradient(number, form_of(leaf)))
        self.release(self._saved_by.pop(self._node, ()))
        return gradients

    def _pack(self, tensor: Tensor) -> SavedTensor | Tensor:
        # all that a higher-order operator compiles is one operator
        if torch.compiler.is_compiling():
            return tensor
        is_late = tensor._base is not None and tensor._version > 0
        memory = SavedMemory(self.numbers_of([tensor]), is_late)
        self._saved_by.setdefault(sequence_number() - 1, []).append(memory)
        saved = SavedTensor(*self.pack(tensor, memory.storages), memory)
        memory.stand_in = weakref.ref(saved)
        return saved

    def _unpack(self, saved: SavedTensor | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not (self._is_forward or saved.memory.is_opened):
            saved.memory.is_opened = True
            self._opened.append(saved.memory)
        return self.unpack(saved)

    def _note_regenerated(self, base: Tensor) -> None:
        """Notes an operator by which autograd regenerates a fake view that was written in place.

        For a real one it makes a single node instead, whose backward allocates the whole gradient
        of the view's base; views of complex numbers are regenerated as fake ones are.
        """
        if not base.is_complex() and not base._is_view():
            self._copying.add(sequence_number() - 1)

    def is_of_kept_graph(self, func: Operator) -> bool:
        """Returns whether a node runs an operator only since it takes the graph to be kept."""
        return self._has_reserve and func is torch.ops.aten.clone.default

    def _operator_of(self, node: int) -> int:
        """Returns the number of the operator that made an autograd node."""
        return bisect.bisect_right(self._nodes, node)

    def _on_node(self, node: Node) -> bool:
        before, self._node = self._node, node._sequence_nr()
        if late := self._saved_by.pop(before, None):
            self._saved_by.setdefault(self._node, []).extend(late)
        self._operator_of_node = self._operator_of(self._node)
        self._has_reserve = node.name() in COPIES_RESERVE
        return self._node in self._copying

    def _on_end(self) -> None:
        self._has_reserve = False
        left = [one for one in self._saved_by.pop(self._node, []) if not one.is_opened]
        # what it has opened is its own, by whichever number that was noted
        opened, self._opened = self._opened, []
        self.release([*opened, *(memory for memory in left if not memory.is_late)])
        if late := [memory for memory in left if memory.is_late]:
            self._saved_by[self._node] = late
