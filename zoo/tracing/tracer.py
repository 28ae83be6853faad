"""The tracer: a dispatch mode that writes the graph of a forward while it runs.

It sees each kernel, on real or on fake tensors, below autograd and autocast, and changes nothing.
Which modules are running stands on Python's stack, so that nothing is attached to the model.
Tensors are told apart by their Python objects, which are referred to weakly:

    known tensor                    the number that it has
    parameter, buffer               its path
    unknown, in a known storage     a new value, by `as_strided`
    unknown, in an unknown storage  a new input
"""

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sized
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakIdKeyDictionary

from zoo._torch import FakeTensor
from zoo.engine.operators import CONSTANTS, KERNELS, effects_of, name_of
from zoo.engine.recording import KernelMode, has_own_storage, is_plain, storage_of, written_by
from zoo.errors import ArgumentError
from zoo.profiling.allocator_events import tensors_in
from zoo.profiling.source_location import modules_around
from zoo.profiling.tensor_spec import TensorSpec
from zoo.tracing.graph import (
    DETACH,
    OWNED,
    REQUIRE,
    Attribute,
    Call,
    Graph,
    Lifetime,
    StandIn,
    Value,
    tensors_held_by,
)

# the sizes of their results depend on numbers
TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
# only with a mask
INDEX, MASKS = torch.ops.aten.index.Tensor, {torch.bool, torch.uint8}
UNTAGGED = frozenset({"torchvision.nms.default"})
# of questions about a tensor's metadata, which only fake tensors dispatch
METADATA = "prim"
# how an operator enters the graph
LEFT_OUT, AS_KERNEL, AS_STAND_IN = "left out", "kernel", "stand-in"


class _Storage(NamedTuple):
    """The first value, or the parameter or buffer, in a storage."""

    dtype: torch.dtype
    first: Value | Attribute

    @property
    def origin(self) -> int:
        return self.first.number if isinstance(self.first, Value) else OWNED


class _Source(NamedTuple):
    """The kernel that returned a value, and the number of its run of kernels without gradients."""

    call: Call
    series: int


class Tracer(KernelMode):
    """Writes down the kernels that this thread runs inside of `with`.

    A fault of its own never reaches the forward: it ends the graph, and `graph` raises.
    """

    # a compiled block is not recomputed
    keeps_compiled = True

    def __init__(self, model: nn.Module, *, sees_lifetimes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        # not where an engine holds what its segments are given
        self.sees_lifetimes = sees_lifetimes
        self._watched: list[weakref.ref[Tensor]] = []
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.thread = threading.get_ident()
        self.operators: list[str] = []
        self.fault: Exception | None = None
        self._graph = Graph()
        self._references: MutableMapping[Tensor, Value | Attribute] = WeakIdKeyDictionary()
        self._storages: MutableMapping[Any, _Storage] = WeakIdKeyDictionary()
        self._sources: dict[int, _Source] = {}
        self._count = 0
        self._series = 0
        self._visits: Counter[str] = Counter()
        self._is_loss = False
        self._required: set[int] = set()
        self._views: list[str] = []
        self._views_at: tuple[int, int] = (0, 0)
        self._note_owned()

    @property
    def graph(self) -> Graph:
        """The graph so far; raises ArgumentError where something could not be written down."""
        if self.fault is not None:
            raise ArgumentError(
                f"the kernels of {type(self.model).__name__} cannot be planned for "
                f"({type(self.fault).__name__}: {self.fault})"
            ) from self.fault
        self._graph.operators = tuple(self.operators)
        return self._graph

    def note_input(self, number: int, tensor: Tensor) -> None:
        """Notes a value that comes from outside."""
        self._graph.inputs[number] = TensorSpec.of(tensor)

    def enter(self, block: str) -> None:
        """Notes that a block begins, as `engine.ranges.Conductor` does."""
        self._graph.visits[block, self._visits[block]] = len(self.operators)
        self._visits[block] += 1

    def leave(self) -> None:
        """Ignores that a block ends."""

    def note_outputs(self, outputs: Any) -> None:
        """Notes what the model returned; what runs from now on is the loss."""
        self._graph.outputs = self._guarded(self._numbers_in, outputs) or ()
        self._graph.model_calls = len(self._graph.calls)
        self._is_loss = True

    def note_loss(self, loss: Any) -> None:
        """Notes the loss, which may be one of the outputs."""
        self._graph.loss = next(iter(self._guarded(self._numbers_in, loss) or ()), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a kernel and writes it down."""
        if types and not all(map(has_own_storage, types)):
            # its own dispatch takes it apart, and the parts come here again
            return NotImplemented
        kwargs = kwargs or {}
        if threading.get_ident() != self.thread or self._is_of_fakes(func):
            return func(*args, **kwargs)
        index = len(self.operators)
        self.operators.append(name_of(func))
        call = self._guarded(self._before, func, index, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            self._guarded(self._expect_views, call, args)
            # for a real tensor among fake ones it returns another object
            returns_argument = isinstance(result, FakeTensor) and _returns_first(func)
            self._guarded(self._after, call, args[0] if returns_argument else result)
        return result

    def _is_of_fakes(self, func: Any) -> bool:
        """Says whether an operator is dispatched on fake tensors, and not on real ones."""
        if getattr(func, "namespace", "") == METADATA:
            return True
        is_same = bool(self._views) and self._views_at == _instruction(sys._getframe(2))
        if is_same and name_of(func) == self._views[-1]:
            self._views.pop()
            return True
        self._views = []
        return False

    def _expect_views(self, call: Call, args: Any) -> None:
        """Foresees that autograd makes a fake view anew after it was written in place."""
        if not call.writes or not args or not isinstance(args[0], FakeTensor):
            return
        number = self._number_of(args[0])
        while number is not None and (source := self._sources.get(number)) is not None:
            if source.call.makes_storage:
                break
            if not source.call.writes:
                self._views.append(str(source.call.operator))
            number = next(iter(source.call.reads()), None)
        self._views_at = _instruction(sys._getframe(3))

    def _guarded(self, note: Callable[..., Any], *arguments: Any) -> Any:
        """Calls one of the tracer's own functions; what it raises is a fault of the tracer."""
        if self.fault is not None:
            return None
        try:
            return note(*arguments)
        except Exception as error:
            self.fault = error
            return None

    # kernels

    def _before(self, func: Any, index: int, args: Any, kwargs: Any) -> Call | None:
        """Begins to write a kernel down; None for one that no plan has to know."""
        how = _how_traced(func)
        if func is INDEX and MASKS.isdisjoint(index.dtype for index in tensors_in(args[1:])):
            how = AS_KERNEL
        if how is LEFT_OUT:
            return None
        within, line = modules_around(sys._getframe(3), self.paths)
        within = () if self._is_loss else within
        call = Call(name_of(func), (), {}, (), index, within, torch.is_grad_enabled(), line=line)
        if how is AS_STAND_IN:
            call.operator = StandIn(name_of(func), ())
            call.args = tuple(
                self._reference(tensor, call) for tensor in tensors_in((args, kwargs))
            )
            return call
        effects = effects_of(func)
        written = [args[0]] if effects.reshapes else written_by(effects, args, kwargs)
        if any(map(self._is_parameter, written)):
            # it takes no bytes, and parameters are not the planner's to change
            return None
        encode = functools.partial(self._encoded, call)
        call.args, call.kwargs = map_aggregate((tuple(args), dict(kwargs)), encode)
        call.writes = frozenset(map(self._origin, written)) - {OWNED}
        return call

    def _after(self, call: Call, result: Any) -> None:
        """Numbers what a kernel returned."""
        tensors = tensors_in(result)
        if isinstance(call.operator, StandIn):
            tensors = [tensor for tensor in tensors if self._storage(tensor) is None]
        if not tensors and not call.writes:
            return
        call.results = tuple(map(self._number, tensors))
        call.origins = tuple(map(self._origin, tensors))
        if isinstance(call.operator, StandIn):
            call.operator = call.operator._replace(results=tuple(map(TensorSpec.of, tensors)))
        self._add(call)

    def _add(self, call: Call) -> None:
        calls = self._graph.calls
        if call.grad or not calls or calls[-1].grad:
            self._series += 1
        calls.append(call)
        for number in call.results:
            self._sources[number] = _Source(call, self._series)

    # tensors

    def _encoded(self, call: Call, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._reference(leaf, call)
        if isinstance(leaf, torch.Generator):
            # steps are measured on the default streams
            return None
        if isinstance(leaf, CONSTANTS):
            return leaf
        raise TypeError(f"{call.operator} takes a {type(leaf).__name__}")

    def _reference(self, tensor: Tensor, call: Call) -> Value | Attribute:
        if (reference := self._references.get(tensor)) is not None:
            if isinstance(reference, Value):
                self._note_history(reference.number, tensor, call)
            return reference
        known = self._storage(tensor)
        if known is None or known.dtype is not tensor.dtype:
            number = self._number(tensor)
            self.note_input(number, tensor)
            return Value(number)
        return self._view(tensor, known, call)

    def _view(self, tensor: Tensor, known: _Storage, call: Call) -> Value:
        """Numbers a view of a known storage that no operator returned."""
        args = (known.first, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        number = self._number(tensor)
        grad, origins = call.grad and tensor.requires_grad, (self._origin(tensor),)
        place = call.index - 1, call.within, grad, origins
        self._add(Call("aten.as_strided.default", args, {}, (number,), *place))
        return Value(number)

    def _number(self, tensor: Tensor) -> int:
        """Numbers a tensor, anew if it has a number."""
        value = Value(self._count)
        self._count += 1
        self._references[plain(tensor)] = value
        self._storages.setdefault(storage_of(tensor), _Storage(tensor.dtype, value))
        if self.sees_lifetimes:
            self._watch(tensor)
        return value.number

    def _watch(self, tensor: Tensor) -> None:
        """Notes until when somebody holds a tensor."""
        size, lifetimes = tensor.untyped_storage().nbytes(), self._graph.lifetimes
        made = Lifetime(size, len(self.operators))
        lifetime = lifetimes.setdefault(self._origin(tensor), made)
        lifetime.holders, lifetime.freed = lifetime.holders + 1, None
        let_go = functools.partial(_let_go, lifetime, self.operators)
        self._watched.append(weakref.ref(tensor, let_go))

    def _number_of(self, tensor: Tensor) -> int | None:
        reference = self._references.get(tensor)
        return reference.number if isinstance(reference, Value) else None

    def _storage(self, tensor: Tensor) -> _Storage | None:
        storage = storage_of(tensor)
        return None if storage is None else self._storages.get(storage)

    def _origin(self, tensor: Tensor) -> int:
        known = self._storage(tensor)
        return OWNED if known is None else known.origin

    def _is_parameter(self, tensor: Tensor) -> bool:
        known = self._storage(tensor)
        if known is None or isinstance(known.first, Value):
            return False
        return known.first.name in self.model.get_submodule(known.first.owner)._parameters

    def _note_owned(self) -> None:
        for path, module in self.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor in self._references:
                    continue
                self._references[tensor] = attribute = Attribute(path, name)
                if (storage := storage_of(tensor)) is not None:
                    self._storages.setdefault(storage, _Storage(tensor.dtype, attribute))

    def _numbers_in(self, outputs: Any) -> tuple[int, ...]:
        numbers = []
        for tensor in tensors_held_by(outputs):
            if (number := self._number_of(tensor)) is not None:
                self._note_history(number, tensor, None)
                numbers.append(number)
        return tuple(numbers)

    # what autograd knows and its kernels do not

    def _note_history(self, number: int, tensor: Tensor, call: Call | None) -> None:
        """Notes that a tensor needs a gradient which the kernel that made it did not record."""
        if not tensor.requires_grad:
            return
        source = self._sources.get(number)
        if source is None:
            spec = self._graph.inputs[number]
            self._graph.inputs[number] = spec._replace(requires_grad=True)
        elif not tensor.is_leaf:
            if not source.call.grad:
                self._record(number, source.series)
        elif call is not None and call.grad and number not in self._required:
            # by `requires_grad_`, which is no kernel
            self._required.add(number)
            origins = frozenset({self._origin(tensor)})
            args, place = (Value(number),), (call.index - 1, call.within, True)
            self._add(Call(REQUIRE, args, {}, (), *place, writes=origins, line=call.line))

    def _record(self, number: int, series: int) -> None:
        """Has autograd record the kernels without gradients that a value comes from.

        They are those of a custom function, which gives its result a history of its own.
        """
        waiting = [number]
        while waiting:
            source = self._sources.get(waiting.pop())
            if source is None or source.call.grad or source.series != series:
                continue
            source.call.grad = True
            if source.call.operator == DETACH:
                source.call.operator = "aten.alias.default"
            waiting += source.call.reads()


def _let_go(lifetime: Lifetime, operators: Sized, _: Any) -> None:
    """Is told that a tensor of a storage is gone."""
    lifetime.holders -= 1
    if not lifetime.holders:
        lifetime.freed = len(operators)


def plain(tensor: Tensor) -> Tensor:
    """Returns a tensor; raises TypeError for one that is no plain strided storage."""
    if not is_plain(tensor):
        raise TypeError(f"a tensor of layout {tensor.layout} and class {type(tensor).__name__}")
    return tensor


def _instruction(frame: FrameType) -> tuple[int, int]:
    """Names an instruction of a running frame."""
    return id(frame), frame.f_lasti


@functools.cache
def _how_traced(operator: Any) -> str:
    """Says whether an operator is left out, as a mere question, is a kernel or needs a stand-in."""
    schema = getattr(operator, "_schema", None)
    if schema is None or operator.namespace not in KERNELS:
        return AS_STAND_IN
    effects = effects_of(operator)
    returns = any("Tensor" in str(result.type) for result in schema.returns)
    if not (returns or effects.writes or effects.reshapes):
        return LEFT_OUT
    is_dynamic = not TAGS.isdisjoint(operator.tags) or name_of(operator) in UNTAGGED
    return AS_STAND_IN if is_dynamic else AS_KERNEL


@functools.cache
def _returns_first(operator: Any) -> bool:
    """Says whether an operator returns its first argument, which it writes in place."""
    returns = operator._schema.returns if hasattr(operator, "_schema") else ()
    aliases = [result.alias_info for result in returns]
    return len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write
