"""The computation graph of one forward: its kernels as data, without tensors, that pickles.

It is below autograd, as an ATen graph of `torch.fx` is, which runs in the place of a model; this
one is only planned with. Tensors are numbers, parameters and buffers are paths:

    index   operator               args                          results   within
    0       aten.view.default      (Value(0), [6, 4])            1         ("", "fc")
    1       aten.t.default         (Attribute("fc", "weight"),)  2
    2       aten.addmm.default     (Attribute("fc", "bias"), Value(1), Value(2))  3
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from zoo.engine.kernel_segments import Visit
from zoo.engine.operators import resolved
from zoo.profiling.tensor_spec import TensorSpec

# in the place of a value's number: the storage is that of a parameter or buffer
OWNED = -1
DETACH, REQUIRE = "aten.detach.default", "aten.requires_grad_.default"
Leaf = TypeVar("Leaf")


# no named tuple, into which `map_aggregate` would go
@dataclass(frozen=True, slots=True)
class Value:
    """Stands for a tensor that an earlier kernel returned, or that is an input."""

    number: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """Stands for a parameter or buffer: the path of its module, and its name there."""

    owner: str
    name: str


class StandIn(NamedTuple):
    """Stands for an operator that must not be recomputed: returns tensors like its results.

    Such are collectives, which other processes would wait for, code that is no kernel of torch's,
    and operators whose results' sizes depend on data.
    """

    name: str
    results: tuple[TensorSpec, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Makes the results; autograd saves the arguments and the results."""
        made: tuple[Tensor, ...] = _StandIn.apply(self.results, *tensors)
        return made


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, specs: tuple[TensorSpec, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        made = tuple(spec._replace(requires_grad=False).empty().zero_() for spec in specs)
        ctx.mark_non_differentiable(
            *(out for out in made if not (out.is_floating_point() or out.is_complex()))
        )
        ctx.save_for_backward(*tensors, *made)
        ctx.count = len(tensors)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        pairs = zip(ctx.saved_tensors[: ctx.count], ctx.needs_input_grad[1:], strict=True)
        return (None, *(torch.zeros_like(tensor) if needed else None for tensor, needed in pairs))


@dataclass(slots=True)
class Call:
    """One kernel.

    Attributes:
        operator: its name, such as "aten.add.Tensor", or what stands for it.
        args, kwargs: with a `Value` or an `Attribute` in the place of each tensor.
        results: the numbers that the tensors among its results get, in order.
        index: how many of the graph's `operators` were dispatched before it.
        within: paths of the modules whose forward was running, outermost first.
        grad: whether autograd recorded it.
        origins: for each result the number of the value that first had its storage.
        writes: origins of the storages that it wrote in place.
        line: "file:line" of the model's code that called it, "" where there is none.
    """

    operator: str | StandIn
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    index: int
    within: tuple[str, ...]
    grad: bool
    origins: tuple[int, ...] = ()
    writes: frozenset[int] = frozenset()
    line: str = field(default="", compare=False)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the operator with these arguments, recorded by autograd as in the forward."""
        function: Any = self.operator
        if isinstance(function, str):
            function = REPLACED.get(function) or resolved(function)
        with contextlib.nullcontext() if self.grad else torch.no_grad():
            return function(*args, **kwargs)

    @property
    def verb(self) -> str:
        """The operator's short name: 'add' of "aten.add.Tensor"."""
        if isinstance(self.operator, StandIn):
            return self.operator.name.split(".")[-2 if self.operator.name.count(".") > 1 else -1]
        return self.operator.split(".")[1]

    @property
    def makes_storage(self) -> bool:
        """Whether a result has a storage of its own."""
        return not set(self.results).isdisjoint(self.origins)

    def reads(self) -> list[int]:
        """Returns the numbers of the values among the arguments."""
        return [value.number for value in self._leaves(Value)]

    def attributes(self) -> list[Attribute]:
        """Returns the parameters and buffers among the arguments."""
        return self._leaves(Attribute)

    def _leaves(self, wanted: type[Leaf]) -> list[Leaf]:
        leaves: list[Leaf] = []

        def note(leaf: Any) -> None:
            if type(leaf) is wanted:
                leaves.append(leaf)

        map_aggregate((self.args, self.kwargs), note)
        return leaves


@dataclass(slots=True)
class Lifetime:
    """How long somebody holds tensors of a storage that a kernel of the forward made.

    Attributes:
        size: its bytes.
        made: how many operators were dispatched before it was there.
        holders: how many tensors of it there are now.
        freed: how many operators were dispatched before the last was gone; None while there is one.
    """

    size: int
    made: int
    holders: int = 0
    freed: int | None = None


@dataclass(slots=True)
class Graph:
    """The kernels of one forward, in order.

    Attributes:
        calls: those that a plan must know: they return tensors, views included, or write them.
        operators: the names of all that were dispatched, with those that only answer a question.
            Without `saved_tensors_hooks` autograd dispatches a `detach` for each result it saves.
        inputs: the values that came from outside, by number: the model's inputs, and tensors of
            its own that are no parameters or buffers.
        visits: for each call of a block the operators dispatched before it, where marks told.
        outputs: numbers of the values that the model returned.
        model_calls: how many of the calls are the model's; those behind it are the loss's.
        loss: the number of the loss, where one was computed.
        lifetimes: of storages, by the number of their first value, where the trace told: how long
            names in the forward and calls under way hold them. What autograd saves holds none.
    """

    calls: list[Call] = field(default_factory=list)
    operators: tuple[str, ...] = ()
    inputs: dict[int, TensorSpec] = field(default_factory=dict)
    visits: dict[Visit, int] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    model_calls: int = 0
    loss: int | None = None
    lifetimes: dict[int, Lifetime] = field(default_factory=dict)

    def overloads(self) -> tuple[Callable[..., Any], ...]:
        """Returns the operators themselves, to compare those of a forward with them."""
        return tuple(map(resolved, self.operators))


def tensors_held_by(value: Any) -> list[Tensor]:
    """Returns the tensors that an object holds, also in attributes: a dataclass's, a cache's."""
    tensors: dict[int, Tensor] = {}
    # keeps each object alive, so that no other gets its id
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            tensors.setdefault(id(value), value)
        elif id(value) not in seen and not callable(value):
            seen[id(value)] = value
            waiting += reversed(_parts_of(value))
    return list(tensors.values())


def _parts_of(value: Any) -> list[Any]:
    parts = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, Mapping):
        return [*value.values(), *parts]
    return [*value, *parts] if isinstance(value, list | tuple | set | frozenset) else parts


def _require_gradient(tensor: Tensor) -> None:
    tensor.requires_grad_()


# a forward may have read `Tensor.data`, whose writes autograd ignores; the other one is no kernel
REPLACED: dict[str, Callable[..., Any]] = {
    DETACH: lambda tensor: tensor.data,
    REQUIRE: _require_gradient,
}
