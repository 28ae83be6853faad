"""Traces a forward into a graph: a dispatch mode that records the kernels while they run.

It sees each kernel, on real or on fake tensors, below autograd and autocast, and changes nothing.
Python's stack shows which modules are running, so that nothing is attached to the model. Tensors
are identified by their Python objects, with weak references:

    known tensor, parameter, buffer  its number
    unknown, in a known storage      a new number, by `as_strided`
    unknown, in an unknown storage   a new input

The graph is data without tensors, and can be pickled. Like an ATen graph of `torch.fx` it is below
autograd; but it never runs in place of the model and is only for planning:

    owned   0: ("fc", "weight"), 1: ("fc", "bias")
    inputs  2: float32 (3, 8)

    index   operator            args                                           results   within
    0       aten.view.default   (GraphValue(2), [6, 4])                        3         ("", "fc")
    1       aten.t.default      (GraphValue(0),)                               4
    2       aten.addmm.default  (GraphValue(1), GraphValue(3), GraphValue(4))  5
"""

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakIdKeyDictionary

from zoo._torch import (
    WITHOUT_GRADIENTS,
    FakeTensor,
    creation_of_view,
    is_traceable_wrapper_subclass,
)
from zoo.engine.dispatch_keys import kernel_of, with_present_keys
from zoo.engine.kernel_segments import Visit
from zoo.engine.operands import has_own_storage, is_plain, parts_of_wrapper
from zoo.engine.operator_effects import (
    CONSTANTS,
    effects_of,
    makes_dropout_state,
    name_of,
    resolved,
)
from zoo.engine.recording import (
    KernelMode,
    storage_of,
    thread,
    written_by,
)
from zoo.errors import ArgumentError
from zoo.profiling.chain_step_profile import note_made_once
from zoo.profiling.source_location import line_of_frame, modules_around
from zoo.profiling.tensor_spec import TensorSpec, tensors_in

# tags of operators whose results' sizes depend on data
TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
UNTAGGED = frozenset({"torchvision.nms.default", "aten._pack_padded_sequence.default"})
# of which this holds only with a mask
INDEX, MASKS = torch.ops.aten.index.Tensor, {torch.bool, torch.uint8}


@functools.cache
def _returned(operator: Any) -> tuple[int, str] | None:
    """Returns the position and name of the argument that an operator writes and returns."""
    schema = getattr(operator, "_schema", None)
    aliases = [] if schema is None else [result.alias_info for result in schema.returns]
    arguments = [] if schema is None else schema.arguments
    if len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write:
        for place, argument in enumerate(arguments):
            info = argument.alias_info
            if info is not None and info.before_set == aliases[0].before_set:
                return place, argument.name
    return None


def written_result(operator: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Returns the argument that an operator returned, where the result is a fake of it.

    That is so where it is a real tensor among fake ones.
    """
    if not isinstance(result, FakeTensor) or (returned := _returned(operator)) is None:
        return result
    place, name = returned
    return args[place] if place < len(args) else kwargs.get(name, result)


def _require_gradient(tensor: Tensor) -> None:
    tensor.requires_grad_()


SETS_STORAGE = frozenset(
    {torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset}
)
ALIAS, DETACH = "aten.alias.default", "aten.detach.default"
REQUIRE = "aten.requires_grad_.default"
# what a step calls instead: the forward may have read `Tensor.data`, whose writes autograd ignores,
# and `requires_grad_` is no kernel
REPLACED: dict[str, Callable[..., Any]] = {
    DETACH: lambda tensor: tensor.data,
    REQUIRE: _require_gradient,
}


def _lacks_derivative(tensor: Tensor) -> bool:
    """Says whether torch has no derivative for the operator that returned a tensor."""
    return tensor.grad_fn is not None and tensor.grad_fn.name().endswith("NotImplemented")


# no NamedTuple, since `map_aggregate` would recurse into it
@dataclass(frozen=True, slots=True)
class GraphValue:
    """Stands for a tensor among the arguments of a kernel."""

    number: int


class _StandIn(torch.autograd.Function):
    """Returns zeros like the results of an operator that must not run; saves inputs and results."""

    @staticmethod
    def forward(ctx: Any, specs: tuple[TensorSpec, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        made = tuple(spec._replace(requires_grad=False).empty().zero_() for spec in specs)
        ctx.save_for_backward(*tensors, *made)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=False)
        return (None, *(torch.zeros_like(tensor) if needed else None for tensor, needed in pairs))


@dataclass(slots=True)
class Call:
    """One kernel.

    Attributes:
        operator: its name, such as "aten.add.Tensor".
        args, kwargs: with a `GraphValue` in the place of each tensor.
        index: how many of the graph's `operators` were dispatched before it.
        within: paths of the modules whose forward was running, outermost first.
        grad: whether autograd recorded it.
        results: the numbers of the tensors among its results, in order.
        origins: for each result the number of the value that first had its storage.
        writes: origins of the storages that it wrote in place.
        line: "file:line" of the model's code that called it; "" if there is none.
        stands_in: specs of the results, for an operator that must not run again: a collective,
            which waits for other processes; code that is no kernel of torch's; an operator whose
            results' sizes depend on data.
    """

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    within: tuple[str, ...]
    grad: bool
    results: tuple[int, ...] = ()
    origins: tuple[int, ...] = ()
    writes: frozenset[int] = frozenset()
    line: str = field(default="", compare=False)
    stands_in: tuple[TensorSpec, ...] | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the operator with these arguments, recorded by autograd as in the forward."""
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            if self.stands_in is not None:
                results = _StandIn.apply(self.stands_in, *args)
                if effects_of(resolved(self.operator)).keeps_results(args, kwargs):
                    note_made_once(results)
                return results
            made = (REPLACED.get(self.operator) or resolved(self.operator))(*args, **kwargs)
            if not any(map(_lacks_derivative, tensors_in(made) if self.grad else ())):
                return made
            # of a custom function, which has its own derivative
            return _StandIn.apply(
                tuple(map(TensorSpec.of, tensors_in(made))), *tensors_in((args, kwargs))
            )

    @property
    def verb(self) -> str:
        """The operator's short name: 'add' of "aten.add.Tensor"."""
        return self.operator.split(".")[1]

    @property
    def makes_storage(self) -> bool:
        """Whether a result has a storage of its own."""
        return not set(self.results).isdisjoint(self.origins)

    def reads(self) -> list[int]:
        """Returns the numbers of the tensors among the arguments."""
        leaves: list[Any] = []
        map_aggregate((self.args, self.kwargs), leaves.append)
        return [leaf.number for leaf in leaves if type(leaf) is GraphValue]


@dataclass(slots=True)
class Graph:
    """The kernels of one forward, in order.

    Attributes:
        owned: parameters and buffers by number: the path of the module, and the name there.
        inputs: other tensors from outside: the model's inputs, and tensors that it holds otherwise.
        calls: those that matter to a plan: they return tensors, views included, or write them.
        operators: the names of all that were dispatched, also of metadata queries. Without
            `saved_tensors_hooks` autograd dispatches a `detach` for each result that it saves.
        visits: for each call of a block the operators dispatched before it, if blocks were marked.
        outputs: numbers of the values that the model returned.
        model_calls: how many of the calls are the model's; the rest are the loss's.
        loss: the number of the loss, if one was computed.
        sizes: bytes of each value's storage, if lifetimes were traced.
        freed: for each value the operators dispatched before the forward's last reference to it
            was gone. References of autograd's saved tensors do not count.
    """

    owned: dict[int, tuple[str, str]] = field(default_factory=dict)
    inputs: dict[int, TensorSpec] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    visits: dict[Visit, int] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    model_calls: int = 0
    loss: int | None = None
    sizes: dict[int, int] = field(default_factory=dict)
    freed: dict[int, int] = field(default_factory=dict)


def tensors_held_by(value: Any) -> list[Tensor]:
    """Returns the tensors that an object holds, also in attributes, as of a dataclass or cache."""
    tensors: dict[int, Tensor] = {}
    # keeps each object alive, so that its id is not reused
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors.setdefault(id(value), value)
        elif id(value) not in seen and not callable(value):
            seen[id(value)] = value
            parts = list(getattr(value, "__dict__", {}).values())
            if isinstance(value, Mapping):
                parts = [*value.values(), *parts]
            elif isinstance(value, list | tuple | set | frozenset):
                parts = [*value, *parts]
            waiting += reversed(parts)
    return list(tensors.values())


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module is compiled, by `torch.compile` or its own `compile`."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class Tracer(KernelMode):
    """Records the kernels that this thread runs inside the `with` block.

    An error of the tracer never reaches the forward: the graph ends there, and `graph` raises.
    """

    # a compiled block is not recomputed
    keeps_compiled = True

    def __init__(self, model: nn.Module, *, sees_lifetimes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # no lifetimes where the engine holds the inputs of segments
        self.model, self.sees_lifetimes = model, sees_lifetimes
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.thread = threading.get_ident()
        self.fault: Exception | None = None
        self.fault_line = ""  # of the model's code
        self._graph = Graph()
        self._count = itertools.count()
        self._numbers: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        # the number of the first tensor in each storage, and of that tensor type and geometry
        self._storages: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._geometries: dict[int, tuple[torch.dtype, list[int], list[int], int]] = {}
        self._parameters: set[int] = set()
        # for each value the call that returned it, and the number of its run of calls without
        # gradients
        self._sources: dict[int, tuple[Call, int]] = {}
        self._series = 0
        self._required: set[int] = set()
        # views that autograd is about to regenerate, the next one last, and in which instruction
        self._views: list[str] = []
        self._views_at: list[tuple[int, int]] = []
        self._watched: list[weakref.ref[Tensor]] = []
        self._note_owned()

    def _note_owned(self) -> None:
        for path, module in self.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor in self._numbers:
                    continue
                number = self._register(tensor)
                self._graph.owned[number] = path, name
                if name in module._parameters:
                    self._parameters.add(number)

    def _register(self, tensor: Tensor) -> int:
        """Gives a tensor the next number, and returns it."""
        self._numbers[tensor] = number = next(self._count)
        if is_plain(tensor):
            self._geometries[number] = _geometry(tensor)
        if (storage := storage_of(tensor)) is not None:
            self._storages.setdefault(storage, number)
        return number

    @property
    def graph(self) -> Graph:
        """The graph so far; raises ArgumentError if something could not be recorded."""
        if self.fault is not None:
            at = f"{self.fault_line}: " if self.fault_line else ""
            raise ArgumentError(
                f"the kernels of {type(self.model).__name__} cannot be planned for "
                f"({at}{type(self.fault).__name__}: {self.fault})"
            ) from self.fault
        return self._graph

    def note_input(self, number: int, tensor: Tensor) -> None:
        """Records a value from outside."""
        self._graph.inputs[number] = TensorSpec.of(tensor)

    def enter(self, block: str) -> None:
        """Records that a block begins, as `engine.kernel_segments.Conductor` does."""
        count = sum(name == block for name, _ in self._graph.visits)
        self._graph.visits[block, count] = len(self._graph.operators)

    def leave(self) -> None:
        """Ignores that a block ends."""

    def note_outputs(self, outputs: Any) -> None:
        """Records the model's outputs; later calls are the loss's."""
        self._graph.outputs = self._guarded(self._numbers_in, outputs) or ()
        self._graph.model_calls = len(self._graph.calls)
        # the loss belongs to no module
        self.paths = {}

    def note_loss(self, loss: Any) -> None:
        """Records the loss, which may be one of the outputs."""
        self._graph.loss = next(iter(self._guarded(self._numbers_in, loss) or ()), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not all(map(has_own_storage, types)):
            # its own dispatch unwraps it and calls operators on the inner tensors
            return NotImplemented
        kwargs, frame = kwargs or {}, sys._getframe(1)
        is_elsewhere = threading.get_ident() != self.thread
        # kernels that a backward inside the forward replays; the conductor skips them, too
        if thread.replaying:
            return with_present_keys(func, args, kwargs)(*args, **kwargs)
        kernel = kernel_of(func, effects_of(func), args, kwargs)
        is_extra = self._is_of_fakes(func, frame) or makes_dropout_state(func, args, kwargs)
        if is_elsewhere or is_extra:
            return kernel(*args, **kwargs)
        self._graph.operators.append(name_of(func))
        call = self._guarded(self._before, func, args, kwargs, frame)
        result = kernel(*args, **kwargs)
        if call is not None:
            written = written_result(func, args, kwargs, result)
            self._guarded(self._after, func, call, args, written, frame)
        return result

    def _guarded(self, note: Callable[..., Any], *arguments: Any) -> Any:
        """Calls one of the tracer's own functions; any error ends the graph."""
        if self.fault is not None:
            return None
        try:
            return note(*arguments)
        except Exception as error:
            self.fault, self.fault_line = error, line_of_frame(sys._getframe(1))
            return None

    def _is_of_fakes(self, func: Any, frame: FrameType) -> bool:
        """Says whether an operator is dispatched only because tensors are fake."""
        if getattr(func, "namespace", "") == "prim":
            # a query of a tensor's metadata
            return True
        is_next = self._views[-1:] == [name_of(func)] and self._views_at == _instruction(frame)
        self._views = self._views[:-1] if is_next else []
        return is_next

    def _views_of(self, tensor: Tensor) -> list[str]:
        """Lists the operators that made a view of the tensor that has the storage, latest first."""
        views, number = [], self._numbers.get(tensor)
        while (source := self._sources.get(number)) is not None:  # type: ignore[arg-type]
            call, _ = source
            if call.makes_storage:
                break
            if not call.writes:
                views.append(call.operator)
            number = next(iter(call.reads()), None)
        return views

    def _expect_views(self, tensor: Tensor, frame: FrameType) -> None:
        """Expects that autograd regenerates a fake view after it was written in place."""
        self._views_at = _instruction(frame)
        self._views += self._views_of(tensor)

    def _forget_regenerated(self, tensor: Tensor, line: str) -> None:
        """Forgets the calls by which autograd has just regenerated a fake view.

        It does so before a kernel reads a view if what the view lies in was written by way of
        another one. Nobody holds the results.
        """
        views, graph = self._views_of(tensor), self._graph
        calls, start = graph.calls[-len(views) :], len(graph.operators) - 1 - len(views)
        if (
            views
            and [(call.operator, call.index, call.line) for call in calls]
            == [(name, start + place, line) for place, name in enumerate(reversed(views))]
            and all(number in graph.freed for call in calls for number in call.results)
        ):
            del graph.calls[-len(views) :], graph.operators[start:-1]

    def _before(self, func: Any, args: Any, kwargs: Any, frame: FrameType) -> Call | None:
        """Begins to record a kernel; None for one that does not matter to a plan."""
        effects = effects_of(func)
        if not effects.opaque and _is_question(func):
            return None
        if func in SETS_STORAGE:
            # what reads it reads a view of the tensor that has the storage
            self._numbers.pop(args[0], None)
            return None
        within, line = modules_around(frame, self.paths)
        for tensor in reversed(tensors_in((args, kwargs))):
            if isinstance(tensor, FakeTensor):
                self._forget_regenerated(tensor, line)
        index, grad = len(self._graph.operators) - 1, torch.is_grad_enabled()
        call = Call(name_of(func), (), {}, index, within, grad, line=line)
        if effects.opaque or _is_dynamic(func, args):
            tensors = tensors_in((args, kwargs))
            call.args, call.stands_in = tuple(self._value(one, call) for one in tensors), ()
            return call
        written = [args[0]] if effects.reshapes else written_by(effects, args, kwargs)
        if effects.dropping is not None:
            # the state of its dropout is the device's, and no step's alone
            written = []
        if not self._parameters.isdisjoint(map(self._origin, written)):
            # it takes no bytes, and plans do not change parameters
            return None
        encode = functools.partial(self._encoded, call)
        call.args, call.kwargs = map_aggregate((tuple(args), dict(kwargs)), encode)
        call.writes = frozenset(map(self._origin, written)).difference(self._graph.owned, [-1])
        return call

    def _after(self, func: Any, call: Call, args: Any, result: Any, frame: FrameType) -> None:
        """Numbers a kernel's results."""
        if call.writes and args and isinstance(args[0], FakeTensor):
            self._expect_views(args[0], frame)
        tensors = tensors_in(result)
        if call.stands_in is not None:
            # a collective may return a wrapper, whose own dispatch hands on what is in it
            tensors = [part for tensor in tensors for part in _unwrapped(tensor)]
            tensors = [tensor for tensor in tensors if self._origin(tensor) < 0]
            call.stands_in = tuple(map(TensorSpec.of, tensors))
        if tensors or call.writes:
            self._add(call, tensors)

    def _add(self, call: Call, tensors: list[Tensor]) -> None:
        """Appends a call that returned tensors."""
        call.results = tuple(map(self._number, tensors))
        call.origins = tuple(map(self._origin, tensors))
        calls = self._graph.calls
        if call.grad or not calls or calls[-1].grad:
            self._series += 1
        calls.append(call)
        self._sources |= dict.fromkeys(call.results, (call, self._series))

    def _encoded(self, call: Call, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._value(leaf, call)
        if isinstance(leaf, torch.Generator):
            # steps are measured with the default generators
            return None
        if isinstance(leaf, CONSTANTS):
            return leaf
        raise TypeError(f"{call.operator} takes a {type(leaf).__name__}")

    def _value(self, tensor: Tensor, call: Call) -> GraphValue:
        """Returns the `GraphValue` of a tensor argument."""
        number = self._numbers.get(tensor)
        if number is not None:
            self._note_history(number, tensor, call)
            return GraphValue(number)
        first = self._origin(tensor)
        known = self._geometries.get(first)
        if known is None or known[0] is not tensor.dtype:
            number = self._number(tensor)
            self.note_input(number, tensor)
            return GraphValue(number)
        # a view that no operator returned
        geometry = _geometry(tensor)
        operator, args = ("alias", ()) if known == geometry else ("as_strided", geometry[1:])
        place = call.index - 1, call.within, call.grad and tensor.requires_grad
        if first in self._parameters and not tensor.requires_grad:
            # a view of a parameter requires a gradient, whatever it is made under
            self._add(Call(DETACH, (GraphValue(first),), {}, *place), [tensor])
            first = self._numbers[tensor]
        self._add(
            Call(f"aten.{operator}.default", (GraphValue(first), *args), {}, *place), [tensor]
        )
        return GraphValue(self._numbers[tensor])

    def _number(self, tensor: Tensor) -> int:
        """Gives a tensor a number, or a new one."""
        number = self._register(plain(tensor))
        if self.sees_lifetimes:
            self._graph.sizes[number] = tensor.untyped_storage().nbytes()
            let_go = functools.partial(_let_go, self._graph, number)
            self._watched.append(weakref.ref(tensor, let_go))
        return number

    def _origin(self, tensor: Tensor) -> int:
        """Returns the number of the first tensor in the storage of one; -1 if it is unknown."""
        storage = storage_of(tensor)
        return -1 if storage is None else self._storages.get(storage, -1)

    def _numbers_in(self, outputs: Any) -> tuple[int, ...]:
        numbers = []
        for tensor in tensors_held_by(outputs):
            number = self._numbers.get(tensor)
            if number is not None and number not in self._graph.owned:
                self._note_history(number, tensor, None)
                numbers.append(number)
        return tuple(numbers)

    def _note_history(self, number: int, tensor: Tensor, call: Call | None) -> None:
        """Handles a tensor that requires a gradient although its kernel recorded none."""
        if not tensor.requires_grad or number in self._graph.owned or _is_without_history(tensor):
            return
        if number in self._graph.inputs:
            spec = self._graph.inputs[number]
            self._graph.inputs[number] = spec._replace(requires_grad=True)
        elif _is_made(tensor):
            self._record(number)
        elif call is not None and call.grad and number not in self._required:
            # set by `requires_grad_`, which is no kernel
            self._required.add(number)
            place = call.index - 1, call.within, True
            require = Call(REQUIRE, (GraphValue(number),), {}, *place, line=call.line)
            require.writes = frozenset({self._origin(tensor)})
            self._add(require, [])

    def _record(self, number: int) -> None:
        """Marks the kernels without gradients that a value comes from as recorded by autograd.

        They are those of a custom function, which gives its result its own grad_fn; or autograd
        opened a saved tensor, a view of a detached one, and gave it back its history.
        """
        waiting, (made, series) = [number], self._sources[number]
        if made.grad and made.operator == DETACH:
            made.operator, waiting = ALIAS, made.reads()
            _, series = self._sources.get(waiting[0], (None, 0))
        while waiting:
            call, its_series = self._sources.get(waiting.pop(), (None, 0))
            if call is None or call.grad or its_series != series:
                continue
            call.grad = True
            if call.operator == DETACH:
                call.operator = ALIAS
            waiting += call.reads()


def _is_without_history(tensor: Tensor) -> bool:
    """Says whether a tensor is a view that was made without gradients, of one that has some.

    It says itself that it requires a gradient, and none flows through it.
    """
    is_view_of_it = tensor._base is not None and tensor._base.requires_grad
    return is_view_of_it and bool(creation_of_view(tensor) == WITHOUT_GRADIENTS)


def _is_made(tensor: Tensor) -> bool:
    """Says whether an operator made a tensor that requires a gradient.

    Asked below autograd whether it is a leaf, a view of complex numbers whose base was written
    loses its history, which autograd makes anew then.
    """
    base = tensor._base
    return (base is not None and base.requires_grad) or not tensor.is_leaf


def _let_go(graph: Graph, number: int, _: Any) -> None:
    """Records that the last reference to a tensor is gone."""
    graph.freed[number] = len(graph.operators)


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


def _unwrapped(tensor: Tensor) -> list[Tensor]:
    """Lists the tensors inside of a wrapper, or the tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        return [inner for part in parts_of_wrapper(tensor) for inner in _unwrapped(part)]
    return [tensor]


def _geometry(tensor: Tensor) -> tuple[torch.dtype, list[int], list[int], int]:
    """Returns a tensor's type, sizes, strides and offset."""
    return tensor.dtype, [*tensor.shape], [*tensor.stride()], int(tensor.storage_offset())


def _instruction(frame: FrameType | None) -> list[tuple[int, int]]:
    """Identifies the current instructions of a frame and of those that called it.

    A function mode of the program calls all operators at one instruction, and its frame may lie
    where the last one did.
    """
    found = []
    while frame is not None:
        found.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return found


@functools.cache
def _is_question(operator: Any) -> bool:
    """Says whether an operator is a query: it neither returns a tensor nor writes one."""
    effects = effects_of(operator)
    returns = any("Tensor" in str(result.type) for result in operator._schema.returns)
    return not (returns or effects.writes or effects.reshapes)


def _is_dynamic(operator: Any, args: Any) -> bool:
    """Says whether the sizes of an operator's results depend on data."""
    if operator is INDEX:
        return any(index.dtype in MASKS for index in tensors_in(args[1:]))
    return not TAGS.isdisjoint(operator.tags) or name_of(operator) in UNTAGGED
