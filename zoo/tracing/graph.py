"""The computation graph of one forward: its kernels as data, without tensors, that pickles.

It is below autograd, as an ATen graph of `torch.fx` is, which runs in the place of a model; this
one is only planned with. Tensors are numbers:

    owned   0: ("fc", "weight"), 1: ("fc", "bias")
    inputs  2: float32 (3, 8)

    index   operator               args                          results   within
    0       aten.view.default      (Value(2), [6, 4])            3         ("", "fc")
    1       aten.t.default         (Value(0),)                   4
    2       aten.addmm.default     (Value(1), Value(3), Value(4))  5
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from zoo.engine.kernel_segments import Visit
from zoo.engine.operators import resolved
from zoo.profiling.tensor_spec import TensorSpec


def _require_gradient(tensor: Tensor) -> None:
    tensor.requires_grad_()


DETACH, REQUIRE = "aten.detach.default", "aten.requires_grad_.default"
# a forward may have read `Tensor.data`, whose writes autograd ignores; the other one is no kernel
REPLACED: dict[str, Callable[..., Any]] = {
    DETACH: lambda tensor: tensor.data,
    REQUIRE: _require_gradient,
}


# no named tuple, into which `map_aggregate` would go
@dataclass(frozen=True, slots=True)
class Value:
    """Stands for a tensor among the arguments of a kernel."""

    number: int


class _StandIn(torch.autograd.Function):
    """Makes zeros like the results of an operator that must not run; saves these and its own."""

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
        args, kwargs: with a `Value` in the place of each tensor.
        index: how many of the graph's `operators` were dispatched before it.
        within: paths of the modules whose forward was running, outermost first.
        grad: whether autograd recorded it.
        results: the numbers that the tensors among its results get, in order.
        origins: for each result the number of the value that first had its storage.
        writes: origins of the storages that it wrote in place.
        line: "file:line" of the model's code that called it, "" where there is none.
        stands_in: specs of the results of an operator that must not run again: a collective, for
            which other processes would wait, code that is no kernel of torch's, or an operator
            whose results' sizes depend on data.
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
                return _StandIn.apply(self.stands_in, *args)
            return (REPLACED.get(self.operator) or resolved(self.operator))(*args, **kwargs)

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
        return [leaf.number for leaf in leaves if type(leaf) is Value]


@dataclass(slots=True)
class Graph:
    """The kernels of one forward, in order.

    Attributes:
        owned: parameters and buffers by number: the path of the module, and the name there.
        inputs: other tensors from outside: the model's inputs, and what else it has.
        calls: those that a plan must know: they return tensors, views included, or write them.
        operators: the names of all that were dispatched, with those that only answer a question.
            Without `saved_tensors_hooks` autograd dispatches a `detach` for each result it saves.
        visits: for each call of a block the operators dispatched before it, where marks told.
        outputs: numbers of the values that the model returned.
        model_calls: how many of the calls are the model's; those behind it are the loss's.
        loss: the number of the loss, where one was computed.
        sizes: bytes of each value's storage, where lifetimes were traced.
        freed: by value how many operators were dispatched before the last name in the forward, or
            call under way, let go of it. What autograd saves holds none.
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
            parts = list(getattr(value, "__dict__", {}).values())
            if isinstance(value, Mapping):
                parts = [*value.values(), *parts]
            elif isinstance(value, list | tuple | set | frozenset):
                parts = [*value, *parts]
            waiting += reversed(parts)
    return list(tensors.values())
