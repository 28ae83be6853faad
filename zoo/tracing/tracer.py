"""Writes the graph of a forward while it runs, on real or on fake tensors.

A dispatch mode sees each kernel, below autograd and autocast, and changes nothing. Which modules
are running stands on Python's stack, so that nothing is attached to the model. Tensors are told
apart by their Python objects, which are referred to weakly:

    known tensor                    the number that it has
    parameter, buffer               its path
    unknown, in a known storage     a new value, by `as_strided`
    unknown, in an unknown storage  a new input
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo._torch import FakeTensor
from zoo.engine.operators import CONSTANTS, KERNELS, effects_of, name_of
from zoo.engine.recording import KernelMode, has_own_storage, is_plain, storage_of, written_by
from zoo.errors import ArgumentError
from zoo.profiling.allocator import tensors_in
from zoo.profiling.source_location import modules_around
from zoo.profiling.tensor_spec import TensorSpec
from zoo.tracing.graph import (
    DETACH,
    OWNED,
    REQUIRE,
    Attribute,
    Call,
    Graph,
    StandIn,
    Value,
    mapped,
    tensors_held_by,
)

# the sizes of their results depend on numbers
TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
# only with a mask
INDEX = torch.ops.aten.index.Tensor
UNTAGGED = frozenset({"torchvision.nms.default"})
# a look at what a tensor is, which only fake tensors dispatch
LOOKS = "prim"
# what to do with an operator
ASKS, RUNS, STANDS = "asks", "runs", "stands in"


class _Known(NamedTuple):
    """A tensor that has a number."""

    tensor: "weakref.ref[Tensor]"
    number: int


class _Owned(NamedTuple):
    """A parameter or buffer of the model."""

    tensor: "weakref.ref[Tensor]"
    place: Attribute


class _Storage(NamedTuple):
    """A storage that was met, and the number of its first value or whose it is."""

    storage: "weakref.ref[Any]"
    dtype: torch.dtype
    origin: int
    owner: Attribute | None = None


class _Made(NamedTuple):
    """The kernel that made a value, and in which row of kernels without gradients."""

    call: Call
    row: int


class Tracer(KernelMode):
    """Writes down the kernels that this thread runs inside of `with`.

    A fault of its own never reaches the forward: it ends the graph, and `graph` raises.
    """

    # a compiled block does not run again
    keeps_compiled = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.thread = threading.get_ident()
        self.operators: list[str] = []
        self.fault: Exception | None = None
        self._graph = Graph()
        self._known: dict[int, _Known] = {}
        self._owned: dict[int, _Owned] = {}
        self._storages: dict[int, _Storage] = {}
        self._made: dict[int, _Made] = {}
        self._count = 0
        self._row = 0
        self._is_loss = False
        self._required: set[int] = set()
        self._views: list[str] = []
        self._views_at: tuple[int, int] = (0, 0)
        self._note_owned()

    @property
    def graph(self) -> Graph:
        """The graph so far.

        Raises:
            ArgumentError: something could not be written down.
        """
        if self.fault is not None:
            raise ArgumentError(
                f"the kernels of {type(self.model).__name__} cannot be planned for "
                f"({type(self.fault).__name__}: {self.fault})"
            ) from self.fault
        self._graph.operators = tuple(self.operators)
        if not self._is_loss:
            self._graph.model_calls = len(self._graph.calls)
        return self._graph

    def note_input(self, number: int, tensor: Tensor) -> None:
        """Notes a value that comes from outside."""
        self._graph.inputs[number] = spec_of(tensor)

    def note_visit(self, module: nn.Module) -> None:
        """Notes that a module of the model is called."""
        path = self.paths.get(id(module))
        if path is not None and threading.get_ident() == self.thread:
            self._graph.visits.append((path, len(self.operators)))

    def note_outputs(self, outputs: Any) -> None:
        """Notes what the model returned; what runs from now on is the loss."""
        self._tried(self._note_outputs, outputs)

    def note_loss(self, loss: Any) -> None:
        """Notes the loss, which may be one of the outputs."""
        self._tried(self._note_loss, loss)

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
        call = self._tried(self._before, func, index, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            self._tried(self._expect_views, call, args)
            # of a real tensor among fake ones it returns another than it was given
            is_given = isinstance(result, FakeTensor) and _returns_first(func)
            self._tried(self._after, call, args[0] if is_given else result)
        return result

    def _is_of_fakes(self, func: Any) -> bool:
        """Says whether an operator is dispatched on fake tensors, and not on real ones."""
        if getattr(func, "namespace", "") == LOOKS:
            return True
        is_same = bool(self._views) and self._views_at == _moment(sys._getframe(2))
        if is_same and name_of(func) == self._views[-1]:
            self._views.pop()
            return True
        self._views = []
        return False

    def _expect_views(self, call: Call, args: Any) -> None:
        """Foresees that autograd makes a fake view again after it was written in place."""
        if not call.writes or not args or not isinstance(args[0], FakeTensor):
            return
        number = self._number_of(args[0])
        while number is not None and (made := self._made.get(number)) is not None:
            if made.call.makes_storage:
                break
            if not made.call.writes:
                self._views.append(str(made.call.operator))
            number = next(made.call.reads(), None)
        self._views_at = _moment(sys._getframe(3))

    def _tried(self, note: Callable[..., Any], *given: Any) -> Any:
        if self.fault is not None:
            return None
        try:
            return note(*given)
        except Exception as error:
            self.fault = error
            return None

    # kernels

    def _before(self, func: Any, index: int, args: Any, kwargs: Any) -> Call | None:
        """Begins to write a kernel down; None for one that no plan has to know."""
        kind = RUNS if func is INDEX and not _has_mask(args) else _kind_of(func)
        if kind is ASKS:
            return None
        frame = sys._getframe(3)
        within, line = modules_around(frame, self.paths)
        within = () if self._is_loss else within
        call = Call(name_of(func), (), {}, (), index, within, torch.is_grad_enabled(), line=line)
        if kind is STANDS:
            call.operator = StandIn(name_of(func), ())
            call.args = tuple(self._place(tensor, call) for tensor in tensors_in((args, kwargs)))
            return call
        effects = effects_of(func)
        written = [args[0]] if effects.reshapes else written_by(effects, args, kwargs)
        if any(map(self._is_parameter, written)):
            # it takes no bytes, and parameters are not the planner's to change
            return None
        encode = functools.partial(self._encoded, call)
        call.args, call.kwargs = mapped(tuple(args), encode), mapped(dict(kwargs), encode)
        call.writes = frozenset(map(self._origin, written)) - {OWNED}
        return call

    def _after(self, call: Call, result: Any) -> None:
        """Numbers what a kernel returned."""
        found = tensors_in(result)
        if isinstance(call.operator, StandIn):
            found = [tensor for tensor in found if self._storage(tensor) is None]
            specs = tuple(map(spec_of, found))
            call.operator = call.operator._replace(results=specs)
        if not found and not call.writes:
            return
        pairs = [self._number(plain(tensor)) for tensor in found]
        call.results = tuple(number for number, _ in pairs)
        call.origins = tuple(origin for _, origin in pairs)
        self._add(call)

    def _add(self, call: Call) -> None:
        calls = self._graph.calls
        if call.grad or not calls or calls[-1].grad:
            self._row += 1
        calls.append(call)
        for number in call.results:
            self._made[number] = _Made(call, self._row)

    def _note_outputs(self, outputs: Any) -> None:
        self._graph.outputs = tuple(self._numbers_in(outputs))
        self._graph.model_calls = len(self._graph.calls)
        self._is_loss = True

    def _note_loss(self, loss: Any) -> None:
        self._graph.loss = next(self._numbers_in(loss), None)

    # tensors

    def _encoded(self, call: Call, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._place(leaf, call)
        if isinstance(leaf, torch.Generator):
            # steps are measured on the default streams
            return None
        if isinstance(leaf, CONSTANTS):
            return leaf
        raise TypeError(f"{call.operator} takes a {type(leaf).__name__}")

    def _place(self, tensor: Tensor, call: Call) -> Value | Attribute:
        if (number := self._number_of(tensor)) is not None:
            self._note_history(number, tensor, call)
            return Value(number)
        owned = self._owned.get(id(tensor))
        if owned is not None and owned.tensor() is tensor:
            return owned.place
        met = self._storage(tensor)
        if met is None or met.dtype is not tensor.dtype:
            number, _ = self._number(tensor)
            self.note_input(number, tensor)
            return Value(number)
        return self._look(tensor, met, call)

    def _look(self, tensor: Tensor, met: _Storage, call: Call) -> Value:
        """Numbers another look at a storage, one that no operator told of."""
        base = Value(met.origin) if met.owner is None else met.owner
        args = (base, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        number, origin = self._number(tensor)
        operator, grad = "aten.as_strided.default", call.grad and tensor.requires_grad
        before = call.index - 1
        self._add(Call(operator, args, {}, (number,), before, call.within, grad, (origin,)))
        return Value(number)

    def _number_of(self, tensor: Tensor) -> int | None:
        known = self._known.get(id(tensor))
        return known.number if known is not None and known.tensor() is tensor else None

    def _number(self, tensor: Tensor) -> tuple[int, int]:
        """Numbers a tensor and returns with that the origin of its storage.

        One that has a number gets another, by which it goes from now on.
        """
        number, self._count = self._count, self._count + 1
        self._known[id(tensor)] = _Known(weakref.ref(tensor), number)
        met = self._storage(tensor)
        if met is not None:
            return number, met.origin
        if (storage := storage_of(tensor)) is not None:
            self._storages[id(storage)] = _Storage(weakref.ref(storage), tensor.dtype, number)
        return number, number

    def _storage(self, tensor: Tensor) -> _Storage | None:
        storage = storage_of(tensor)
        met = self._storages.get(id(storage))
        return met if met is not None and met.storage() is storage else None

    def _origin(self, tensor: Tensor) -> int:
        met = self._storage(tensor)
        return OWNED if met is None else met.origin

    def _is_parameter(self, tensor: Tensor) -> bool:
        met = self._storage(tensor)
        if met is None or met.owner is None:
            return False
        path, name = met.owner
        return name in self.model.get_submodule(path)._parameters

    def _note_owned(self) -> None:
        for path, module in self.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or id(tensor) in self._owned:
                    continue
                place = Attribute(path, name)
                self._owned[id(tensor)] = _Owned(weakref.ref(tensor), place)
                storage = storage_of(tensor)
                if storage is not None and self._storage(tensor) is None:
                    met = _Storage(weakref.ref(storage), tensor.dtype, OWNED, place)
                    self._storages[id(storage)] = met

    def _numbers_in(self, outputs: Any) -> Iterator[int]:
        for tensor in tensors_held_by(outputs):
            number = self._number_of(tensor)
            if number is not None:
                self._note_history(number, tensor, None)
                yield number

    # what autograd knows and its kernels do not

    def _note_history(self, number: int, tensor: Tensor, call: Call | None) -> None:
        """Notes that a tensor needs a gradient which the kernel that made it did not record."""
        if not tensor.requires_grad:
            return
        made = self._made.get(number)
        if made is None:
            spec = self._graph.inputs[number]
            self._graph.inputs[number] = spec._replace(requires_grad=True)
        elif not tensor.is_leaf:
            if not made.call.grad:
                self._record(number, made.row)
        elif call is not None and call.grad and number not in self._required:
            # by `requires_grad_`, which is no kernel
            self._required.add(number)
            origins = frozenset({self._origin(tensor)})
            args, place = (Value(number),), (call.index - 1, call.within, True)
            self._add(Call(REQUIRE, args, {}, (), *place, writes=origins, line=call.line))

    def _record(self, number: int, row: int) -> None:
        """Has autograd record the kernels without gradients that a value comes from.

        They are those of a custom function, which gives its result a history of its own.
        """
        waiting = [number]
        while waiting:
            made = self._made.get(waiting.pop())
            if made is None or made.call.grad or made.row != row:
                continue
            made.call.grad = True
            if made.call.operator == DETACH:
                made.call.operator = "aten.alias.default"
            waiting += made.call.reads()


def spec_of(tensor: Tensor) -> TensorSpec:
    """Describes a tensor.

    Raises:
        TypeError: see `plain`.
    """
    return TensorSpec.of(plain(tensor))


def plain(tensor: Tensor) -> Tensor:
    """Returns a tensor.

    Raises:
        TypeError: it is sparse, nested or of another kind whose bytes its storage does not tell.
    """
    if not is_plain(tensor):
        raise TypeError(f"a tensor of layout {tensor.layout} and class {type(tensor).__name__}")
    return tensor


def _moment(frame: FrameType) -> tuple[int, int]:
    """Names an instruction of a running frame."""
    return id(frame), frame.f_lasti


@functools.cache
def _kind_of(operator: Any) -> str:
    """Says whether an operator only answers a question, runs, or needs a stand-in."""
    schema = getattr(operator, "_schema", None)
    if schema is None or operator.namespace not in KERNELS:
        return STANDS
    effects = effects_of(operator)
    returns = any("Tensor" in str(result.type) for result in schema.returns)
    if not (returns or effects.writes or effects.reshapes):
        return ASKS
    is_dynamic = not TAGS.isdisjoint(operator.tags) or name_of(operator) in UNTAGGED
    return STANDS if is_dynamic else RUNS


@functools.cache
def _returns_first(operator: Any) -> bool:
    """Says whether an operator returns its first argument, which it writes in place."""
    returns = operator._schema.returns if hasattr(operator, "_schema") else ()
    aliases = [result.alias_info for result in returns]
    return len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write


def _has_mask(args: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1:]))
