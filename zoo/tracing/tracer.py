"""Traces a forward: a dispatch mode that notes its operators and the modules that call them.

It sees each operator, on real or on fake tensors, below autograd and autocast, and changes nothing.
Python's stack shows which modules are running, so that nothing is attached to the model. Storages,
saved tensors and costs of the operators are events (`profiling.event_recorder`), which have the
indices of this graph:

    index   operator            within
    0       aten.view.default   ("", "fc")
    1       aten.t.default      ("", "fc")
    2       aten.addmm.default  ("", "fc")
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zoo._torch import Args, FakeTensor, Kwargs, Operator, PyTree, current_backward
from zoo.engine.dispatch_keys import kernel_of, with_present_keys
from zoo.engine.kernel_segments import Visit
from zoo.engine.operands import External
from zoo.engine.operator_effects import (
    DETACH,
    bytes_returned,
    effects_of,
    is_counted,
    is_view,
    name_of,
    written_by,
)
from zoo.engine.recorder import KernelMode
from zoo.engine.segments import thread
from zoo.engine.tensor_state import has_own_storage, is_plain, storage_of
from zoo.errors import ArgumentError
from zoo.profiling.fake_tensors import QUESTIONS, answer
from zoo.profiling.source_location import Instruction, line_of_frame, modules_around
from zoo.profiling.tensor_spec import tensors_in

Parameters = ParamSpec("Parameters")
T = TypeVar("T")
SETS_STORAGE = frozenset(
    {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
)


@dataclass(slots=True)
class Call:
    """One operator that may matter to a plan: it returns tensors, views included, or writes them.

    Attributes:
        operator: its name, such as "aten.add.Tensor".
        index: how many operators were dispatched before it.
        within: paths of the modules whose forward was running, outermost first.
        line: "file:line" of the model's code that called it; "" if there is none.
        shapes: the shapes of the tensors that it returned; `bytes` are those of all of them.
        parameters: numbers of the model's parameters among its arguments.
        function: the number and the name of the call of a torch function that dispatched it; 0 and
            "" if there is none.
    """

    operator: str
    index: int
    within: tuple[str, ...]
    line: str = field(default="", compare=False)
    shapes: tuple[tuple[int, ...], ...] = ()
    bytes: int = field(default=0, compare=False)
    parameters: frozenset[int] = frozenset()
    function: tuple[int, str] = field(default=(0, ""), compare=False)

    @property
    def verb(self) -> str:
        """The name of the function, else the operator's: 'add' of "aten.add.Tensor"."""
        return self.function[1] or self.operator.split(".")[1]


@dataclass(slots=True)
class Graph:
    """The operators of one forward, in order.

    Attributes:
        calls: the operators that may matter to a plan.
        operators: the names of all operators dispatched, also of metadata queries, but for those
            that only some forwards of a path call.
        visits: for each call of a block the operators dispatched before it, if blocks were marked.
        model_operators: how many of the operators are the model's; the rest are the loss's.
        has_backward: whether a backward ran, within the forward.
    """

    calls: list[Call] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    visits: dict[Visit, int] = field(default_factory=dict)
    model_operators: int = 0
    has_backward: bool = False


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module is compiled, by `torch.compile` or its own `compile`."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class Tracer(KernelMode):
    """Notes the operators that this thread runs inside the `with` block.

    An error of the tracer never reaches the forward: the graph ends there, and `graph` raises.

    Attributes:
        dispatched: all operators, also those that only fake tensors dispatch.
        positions: for each operator of the graph its index among these.
    """

    # a compiled block is not recomputed
    keeps_compiled = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.thread = threading.get_ident()
        self.fault: Exception | None = None
        self.fault_line = ""  # the line of the model's code
        self._graph = Graph()
        self.has_ended = False
        self.dispatched: list[Operator] = []
        self.positions: list[int] = []
        self._parameters = {id(owned): n for n, owned in enumerate(model.parameters())}
        # for a view, the names of the operators that made it from its base, the latest first
        self._view_operators: MutableMapping[Tensor, tuple[str, ...]] = WeakIdKeyDictionary()
        # views that autograd is about to regenerate, the next one last, and at which instruction
        self._views: list[str] = []
        self._views_at: list[tuple[int, int]] = []
        # the results of the calls
        self._results: list[list[weakref.ref[Tensor]]] = []
        # the latest call of a torch function: its number and name, modules and instruction, kernels
        self._function = (0, "")
        self._called_at: tuple[tuple[str, ...], Instruction] | None = None
        self._kernels: list[Operator] = []

    @property
    def graph(self) -> Graph:
        """The graph so far; raises ArgumentError if something could not be noted."""
        if self.fault is not None:
            at = f"{self.fault_line}: " if self.fault_line else ""
            raise ArgumentError(
                f"the kernels of {type(self.model).__name__} cannot be planned for "
                f"({at}{type(self.fault).__name__}: {self.fault})"
            ) from self.fault
        return self._graph

    def operators_so_far(self) -> int:
        """Returns how many operators were dispatched."""
        return len(self._graph.operators)

    def enter(self, block: str, args: Args = ()) -> None:
        """Notes that a block begins, as `engine.kernel_segments.Conductor` does."""
        if self.has_ended:
            # another forward, of a dry step
            return
        count = sum(name == block for name, _ in self._graph.visits)
        self._graph.visits[block, count] = len(self._graph.operators)

    def leave(self) -> None:
        """Ignores that a block ends."""

    def note_saved(self, external: External) -> None:
        """Ignores what is saved outside of all segments."""

    def mark(self, blocks: Iterable[str]) -> None:
        """Marks modules of the model, whose calls are noted as long as the model lives.

        Those that a plan in force has marked, and compiled ones, stay as they are.
        """
        for path in blocks:
            module = self.model.get_submodule(path)
            before = vars(module).get("forward")
            if not hasattr(before, "only_marks") and not is_compiled(module):
                vars(module)["forward"] = self._marked(module.forward, path, before is None)

    def _marked(
        self, forward: Callable[..., PyTree], path: str, only_marks: bool
    ) -> Callable[..., PyTree]:
        @functools.wraps(forward)
        def marked(*args: PyTree, **kwargs: PyTree) -> PyTree:
            self.enter(path)
            return forward(*args, **kwargs)

        marked.only_marks = only_marks  # type: ignore[attr-defined]
        return marked

    def note_end_of_model(self) -> None:
        """Notes that the model has returned; later calls are those of the loss, in no module."""
        self._graph.model_operators = len(self._graph.operators)
        self.paths, self.has_ended = {}, True

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if types and not all(map(has_own_storage, types)):
            # its own dispatch unwraps it and calls operators on the inner tensors
            return NotImplemented
        if func in QUESTIONS:
            return answer(func, args[0])
        kwargs = kwargs or {}
        # kernels that a backward inside the forward replays; the conductor skips them, too
        if thread.replaying:
            return with_present_keys(func, args, kwargs)(*args, **kwargs)
        kernel = kernel_of(func, effects_of(func), args, kwargs)
        if threading.get_ident() != self.thread:
            # a device's thread of autograd, which has no frames of Python
            return kernel(*args, **kwargs)
        frame = sys._getframe(1)
        is_question = getattr(func, "namespace", "") == "prim"
        if not is_question and is_counted(func, args, kwargs):
            self.dispatched.append(func)
        if not is_counted(func, args, kwargs) or self._is_of_fakes(func, frame):
            result = kernel(*args, **kwargs)
            if func is DETACH and self._results:
                # in place of the result of the latest call, which the program holds by this one
                self._results[-1].append(weakref.ref(result))
            return result
        self._graph.operators.append(name_of(func))
        self.positions.append(len(self.dispatched) - 1)
        self._graph.has_backward |= current_backward() != -1
        is_noted = self._guarded(self._before, func, args, kwargs, frame)
        result = kernel(*args, **kwargs)
        if is_noted:
            self._guarded(self._after, func, args, kwargs, result, frame)
        return result

    def _guarded(
        self, note: Callable[Parameters, T], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> T | None:
        """Calls one of the tracer's own functions; any error ends the graph."""
        if self.fault is not None:
            return None
        try:
            return note(*args, **kwargs)
        except Exception as error:
            self.fault, self.fault_line = error, line_of_frame(sys._getframe(1))
            return None

    def _is_of_fakes(self, func: Operator, frame: FrameType) -> bool:
        """Returns whether an operator is dispatched only because tensors are fake."""
        if getattr(func, "namespace", "") == "prim":
            # a query of a tensor's metadata
            return True
        is_next = self._views[-1:] == [name_of(func)] and self._views_at == _instruction(frame)
        self._views = self._views[:-1] if is_next else []
        return is_next

    def _forget_regenerated(self, tensor: Tensor, line: str) -> None:
        """Forgets the calls by which autograd has just regenerated a fake view.

        It does so before a kernel reads a view whose base was written through another view. The
        program does not hold these results.
        """
        views, graph = self._view_operators.get(tensor, ()), self._graph
        calls, start = graph.calls[-len(views) :], len(graph.operators) - 1 - len(views)
        if (
            views
            and [(call.operator, call.index, call.line) for call in calls]
            == [(name, start + number, line) for number, name in enumerate(reversed(views))]
            and not any(
                result() is not None for call in self._results[-len(views) :] for result in call
            )
        ):
            del graph.calls[-len(views) :], graph.operators[start:-1], self._results[-len(views) :]
            del self.positions[start:-1]

    def _before(self, func: Operator, args: Args, kwargs: Kwargs, frame: FrameType) -> bool:
        """Notes an operator; returns False for one that does not matter to a plan."""
        effects = effects_of(func)
        if not effects.opaque and _is_question(func):
            return False
        if func in SETS_STORAGE:
            self._view_operators.pop(args[0], None)
            return False
        within, line, instruction = modules_around(frame, self.paths)
        for tensor in reversed(tensors_in((args, kwargs))):
            if isinstance(tensor, FakeTensor):
                self._forget_regenerated(tensor, line)
        call = Call(name_of(func), len(self._graph.operators) - 1, within, line)
        call.function = self._function_of(func, within, instruction)
        owned = map(self._parameters.get, map(id, tensors_in((args, kwargs))))
        call.parameters = frozenset(number for number in owned if number is not None)
        self._graph.calls.append(call)
        self._results.append([])
        return True

    def _function_of(
        self, func: Operator, within: tuple[str, ...], instruction: Instruction | None
    ) -> tuple[int, str]:
        """Returns the number and the name of the torch function's call that dispatched an operator.

        All operators that one instruction of the caller dispatches in a row are one call. A loop,
        as that of `sum` in C or around a function that calls one of torch, repeats a kernel.
        """
        name = None if instruction is None else instruction.name()
        if instruction is None or name is None:
            self._called_at = None
            return 0, ""
        goes_on = (within, instruction) == self._called_at
        begins_again = (
            self._kernels[:1] == [func] and sum(not is_view(kernel) for kernel in self._kernels) < 2
        )
        if not goes_on or begins_again:
            self._function = self._function[0] + 1, name
            self._called_at, self._kernels = (within, instruction), []
        self._kernels.append(func)
        return self._function

    def _after(
        self, func: Operator, args: Args, kwargs: Kwargs, result: PyTree, frame: FrameType
    ) -> None:
        """Notes which results are views, and which views autograd makes anew for fake tensors."""
        effects = effects_of(func)
        written = [args[0]] if effects.reshapes else written_by(effects, args, kwargs)
        arguments = tensors_in((args, kwargs))
        has_history = torch.is_grad_enabled() and any(t.requires_grad for t in arguments)
        if written and args and isinstance(args[0], FakeTensor) and has_history:
            # the argument is written in place, and autograd regenerates it
            self._views_at = _instruction(frame)
            self._views += self._view_operators.get(args[0], ())
        storages = {id(storage_of(tensor)) for tensor in arguments}
        results = tensors_in(result)
        call = self._graph.calls[-1]
        call.shapes = tuple(tuple(tensor.shape) for tensor in results)
        call.bytes = bytes_returned(result)
        for tensor in results:
            if any(tensor is argument for argument in arguments):
                continue
            self._results[-1].append(weakref.ref(tensor))
            is_view = bool(arguments) and id(storage_of(tensor)) in storages
            before = self._view_operators.get(arguments[0], ()) if is_view else ()
            own = (name_of(func),) if is_view and not written else ()
            self._view_operators[tensor] = (*own, *before)


def plain(tensor: Tensor) -> Tensor:
    """Returns a tensor; raises TypeError unless it is a plain strided one."""
    if not is_plain(tensor):
        kinds = {"nested ": tensor.is_nested, "quantized ": tensor.is_quantized}
        kinds["memoryless zero "] = tensor._is_zerotensor()
        kind = next((kind for kind, is_it in kinds.items() if is_it), "")
        way_out = "" if tensor.layout is torch.strided else "; one that is a buffer can be"
        raise TypeError(
            f"a {kind}tensor of {tensor.layout} and class {type(tensor).__name__}{way_out}"
        )
    return tensor


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
def _is_question(operator: Operator) -> bool:
    """Returns whether an operator is a query: it neither returns a tensor nor writes one."""
    effects = effects_of(operator)
    returns = any("Tensor" in str(result.type) for result in operator._schema.returns)
    return not (returns or effects.writes or effects.reshapes)
