"""The kernels of one forward as data: a graph without tensors, without modules, that pickles.

`torch.fx` holds graphs that run in the place of a model; this one is only planned with. Tensors are
numbers, parameters and buffers are paths, operators are names:

    index   operator               args                          results   within
    0       aten.view.default      (Value(0), [6, 4])            1         ("", "fc")
    1       aten.t.default         (Attribute("fc", "weight"),)  2
    2       aten.addmm.default     (Attribute("fc", "bias"), Value(1), Value(2))  3
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.engine.operators import resolved
from zoo.profiling.tensor_spec import TensorSpec

# a storage of a parameter or buffer, as the origin of a value that looks at it
OWNED = -1
DETACH, REQUIRE = "aten.detach.default", "aten.requires_grad_.default"


class Value(NamedTuple):
    """The place of a tensor that an earlier kernel made, or that is an input."""

    number: int


class Attribute(NamedTuple):
    """The place of a parameter or buffer: the path of its module, and its name there."""

    owner: str
    name: str


class StandIn(NamedTuple):
    """Stands for an operator that must not run twice: it makes tensors like its results.

    Such are collectives, which other processes would wait for, code that is no kernel of torch's,
    and operators whose results' sizes depend on numbers.
    """

    name: str
    results: tuple[TensorSpec, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Makes the results; autograd keeps the arguments and the results."""
        found: tuple[Tensor, ...] = _StandIn.apply(self.results, *tensors)
        return found


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, specs: tuple[TensorSpec, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        made = tuple(spec._replace(requires_grad=False).empty().zero_() for spec in specs)
        ctx.mark_non_differentiable(*(out for out in made if not _is_differentiable(out)))
        ctx.save_for_backward(*tensors, *made)
        ctx.count = len(tensors)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        tensors = ctx.saved_tensors[: ctx.count]
        gives = ctx.needs_input_grad[1:]
        pairs = zip(tensors, gives, strict=True)
        return (None, *(torch.zeros_like(tensor) if gets else None for tensor, gets in pairs))


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(slots=True)
class Call:
    """One kernel.

    Attributes:
        operator: its name, such as "aten.add.Tensor", or what stands for it.
        args, kwargs: as given, a `Value` or an `Attribute` in the place of each tensor.
        results: the numbers that the tensors among its results get, in order.
        index: how many of the graph's `operators` were dispatched before it.
        within: paths of the modules whose forward was running, outermost first.
        grad: whether autograd recorded it.
        origins: for each result the number of the value that first had its storage.
        writes: such numbers of the storages that it wrote in place.
        line: "file:line" of the code that called it, "" where it is none of the model's.
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

    @property
    def function(self) -> Callable[..., Any]:
        """What runs it."""
        if isinstance(self.operator, StandIn):
            return self.operator.__call__
        return INSTEAD.get(self.operator) or resolved(self.operator)

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

    def reads(self) -> Iterator[int]:
        """Yields the numbers of the values among the arguments."""
        for leaf in leaves_of((self.args, self.kwargs)):
            if type(leaf) is Value:
                yield leaf.number

    def attributes(self) -> Iterator[Attribute]:
        """Yields the parameters and buffers among the arguments."""
        for leaf in leaves_of((self.args, self.kwargs)):
            if type(leaf) is Attribute:
                yield leaf


@dataclass(slots=True)
class Graph:
    """The kernels of one forward, in order.

    Attributes:
        calls: those that a plan must know: they make or look at tensors, or write them.
        operators: the names of all that were dispatched, views and questions included. Without
            `saved_tensors_hooks` autograd dispatches a `detach` for each result that it saves.
        inputs: the values that came from outside, by number: what the model was called with, and
            tensors that it has and that are no parameters or buffers.
        visits: for each call of a module its path, and the operators dispatched before it; empty
            where nobody noted them.
        outputs: numbers of the values that the model returned.
        model_calls: how many of the calls are the model's; those behind it are the loss's.
        loss: the number of the loss, where one was computed.
    """

    calls: list[Call] = field(default_factory=list)
    operators: tuple[str, ...] = ()
    inputs: dict[int, TensorSpec] = field(default_factory=dict)
    visits: list[tuple[str, int]] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    model_calls: int = 0
    loss: int | None = None

    def overloads(self) -> tuple[Callable[..., Any], ...]:
        """Returns the operators themselves, to compare those of a forward with them."""
        return tuple(map(resolved, self.operators))


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields what containers hold; `Value` and `Attribute` count as leaves."""
    kind = type(value)
    if kind is list or kind is tuple:
        for part in value:
            yield from leaves_of(part)
    elif kind is dict:
        for part in value.values():
            yield from leaves_of(part)
    else:
        yield value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a value with every leaf changed; containers are new ones."""
    kind = type(value)
    if kind is list:
        return [mapped(part, change) for part in value]
    if kind is tuple:
        return tuple([mapped(part, change) for part in value])
    if kind is dict:
        return {key: mapped(part, change) for key, part in value.items()}
    return change(value)


def tensors_held_by(value: Any) -> list[Tensor]:
    """Returns the tensors that an object holds, also in attributes: a dataclass's, a cache's."""
    found: dict[int, Tensor] = {}
    # what was seen stays alive meanwhile, so that no other gets its id
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.setdefault(id(value), value)
        elif id(value) not in seen:
            seen[id(value)] = value
            waiting += reversed(_parts_of(value))
    return list(found.values())


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, type | torch.nn.Module) or callable(value):
        return []
    parts = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if isinstance(value, Mapping):
        return [*value.values(), *parts]
    return [*value, *parts] if isinstance(value, list | tuple | set | frozenset) else parts


def _detached(tensor: Tensor) -> Tensor:
    """Detaches: a forward may have read `Tensor.data`, whose writes autograd does not mind."""
    return tensor.data


def _required(tensor: Tensor) -> None:
    """Does what a forward did that is no kernel."""
    tensor.requires_grad_()


# what runs for some operators
INSTEAD: dict[str, Callable[..., Any]] = {DETACH: _detached, REQUIRE: _required}
