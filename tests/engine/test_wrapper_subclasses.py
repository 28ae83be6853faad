"""Tensor classes with a `__torch_dispatch__` of their own that torch cannot flatten."""

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.utils._pytree import tree_map

import zoo
from tests.training import Call, assert_exact, plain


class Held(Tensor):
    """A wrapper that holds another tensor, in a slot."""

    __slots__ = ["elem"]
    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> "Held":
        made: Held = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, elem.size(), strides=elem.stride(), dtype=elem.dtype, device=elem.device
        )
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def taken_out(leaf: Any) -> Any:
            return leaf.elem if isinstance(leaf, cls) else leaf

        out = func(*tree_map(taken_out, args), **tree_map(taken_out, kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda leaf: cls(leaf) if isinstance(leaf, Tensor) else leaf, out)


class OfItsOwn(Tensor):
    """Has memory of its own, unlike a wrapper."""

    @staticmethod
    def __new__(cls, elem: Tensor) -> Self:
        return Tensor._make_subclass(cls, elem)  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            out = func(*args, **(kwargs or {}))
        return tree_map(lambda leaf: cls(leaf) if type(leaf) is Tensor else leaf, out)


Make = Callable[[Tensor], Tensor]
CLASSES: list[Make] = [LoggingTensor, Held]


def inner(tensor: Tensor) -> Tensor:
    return getattr(tensor, "elem", tensor)


def argument(make: Make) -> Tensor:
    return make(torch.rand(4, 4)).detach().requires_grad_()


def gradient(output: Tensor, x: Tensor, make: Make, **options: Any) -> Tensor:
    return torch.autograd.grad(output, x, make(torch.ones(output.shape)), **options)[0]


def a_chain(call: Call, make: Make) -> list[Tensor]:
    x = argument(make)
    return [gradient(call(lambda x: x.cos().exp().tanh(), x), x, make)]


def a_weight(call: Call, make: Make) -> list[Tensor]:
    weight, x = argument(make), make(torch.rand(4, 4))
    return [gradient(call(lambda x: torch.tanh(x @ weight).exp(), x), weight, make)]


def a_plain_weight(call: Call, make: Make) -> list[Tensor]:
    weight, x = torch.rand(4, 4, requires_grad=True), make(torch.rand(4, 4))
    return [gradient(call(lambda x: torch.tanh(x @ weight).exp(), x), weight, make)]


def views(call: Call, make: Make) -> list[Tensor]:
    x = argument(make)
    return [gradient(call(lambda x: x.t()[0].exp().sin() * 2, x), x, make)]


def a_write(call: Call, make: Make) -> list[Tensor]:
    def written(x: Tensor) -> Tensor:
        y = x.cos()
        z = y.exp()
        y.mul_(2)
        return z * y

    x = argument(make)
    return [gradient(call(written, x), x, make)]


def a_second_gradient(call: Call, make: Make) -> list[Tensor]:
    x = argument(make)
    first = gradient(call(lambda x: x.cos().exp(), x), x, make, create_graph=True)
    return [first, gradient(first, x, make)]


def gradients_inside(call: Call, make: Make) -> list[Tensor]:
    def both() -> tuple[Tensor, Tensor]:
        x = argument(make)
        first = gradient(x.cos().exp(), x, make, create_graph=True)
        return first.detach(), gradient(first, x, make)

    return [*call(both)]


def two_backwards(call: Call, make: Make) -> list[Tensor]:
    x = argument(make)
    y = call(lambda x: x.cos().exp().tanh(), x)
    return [gradient(y, x, make, retain_graph=True), gradient(y, x, make)]


PROGRAMS = [
    a_chain, a_weight, a_plain_weight, views, a_write, a_second_gradient, gradients_inside,
    two_backwards,
]  # fmt: skip


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_class_that_cannot_be_flattened(
    program: Callable[[Call, Make], list[Tensor]], make: Make
) -> None:
    assert_exact(lambda call: [inner(tensor) for tensor in program(call, make)])


@pytest.mark.parametrize("program", [a_chain, a_weight, views, a_second_gradient, two_backwards])
def test_a_class_with_memory_of_its_own(program: Callable[[Call, Make], list[Tensor]]) -> None:
    assert_exact(lambda call: [t.as_subclass(Tensor) for t in program(call, OfItsOwn)])


@pytest.mark.parametrize("call", [plain, zoo.recompute])
@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("part", ["argument", "result"])
def test_a_later_write_is_refused_as_in_the_baseline(part: str, make: Make, call: Call) -> None:
    x, factor = argument(make), make(torch.rand(4, 4))
    y = call(lambda x: (x * factor).sin().exp(), x)
    (factor if part == "argument" else y.detach()).mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        gradient(y, x, make)


def test_a_kept_result_does_not_hold_its_own_node() -> None:
    x = argument(Held)
    y = zoo.recompute(lambda x: x.exp().exp(), x)
    assert y.grad_fn is not None
    # a node has no weak references, and what it holds lives as long
    y.grad_fn.metadata["held"] = held = torch.ones(1)
    held_by_node = weakref.ref(held)
    del y, held
    gc.collect()
    assert held_by_node() is None


def test_a_class_whose_tensors_are_kept_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Held):
        pass

    with caplog.at_level(logging.WARNING, "zoo"):
        for _ in range(2):
            zoo.recompute(torch.sin, argument(Other))
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "Other has its own __torch_dispatch__ and no __tensor_flatten__, so that what autograd "
        "saves of it inside of a segment is kept, not recomputed"
    ]
