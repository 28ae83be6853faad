"""Writes by NumPy and `Tensor.data` into memory that autograd saved, after it was used."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import Call, assert_exact

Write = Callable[[Tensor], object]


def by_numpy(tensor: Tensor) -> None:
    array = tensor.detach().numpy()
    array *= 0.5


def by_numpy_in_a_thread(tensor: Tensor) -> None:
    thread = threading.Thread(target=by_numpy, args=(tensor.detach(),))
    thread.start()
    thread.join()


def by_dlpack(tensor: Tensor) -> None:
    other = torch.from_dlpack(tensor.detach())
    other.numpy()[...] *= 0.5


USES: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "its result": lambda e, layer: (e + 1).tanh(),
    "its argument": lambda e, layer: layer(e),
    "a view": lambda e, layer: e[:, ::3].sin(),
    "both": lambda e, layer: layer(e) * e.mean(),
}


@pytest.mark.parametrize("write", [by_numpy, by_numpy_in_a_thread, by_dlpack])
@pytest.mark.parametrize("use", USES)
def test_a_write_inside_of_a_segment_into_what_dies_there(use: str, write: Write) -> None:
    def program(call: Call) -> list[Tensor | None]:
        x, layer = torch.rand(200, 60, requires_grad=True), nn.Linear(60, 8)

        def body(x: Tensor) -> Tensor:
            e = (x * 2).exp()
            y = USES[use](e, layer)
            write(e)
            return y

        call(body, x).sum().backward()
        return [x.grad, layer.weight.grad]

    assert_exact(program)


PARTS: list[Callable[[Tensor], Tensor]] = [
    lambda y: y[:, :5], lambda y: y[:, 3], lambda y: y[::2], lambda y: y.view(8, 8, 64)[:, 1],
]  # fmt: skip


@pytest.mark.parametrize("count", ["all", "the first"])
@pytest.mark.parametrize("part", PARTS)
def test_a_write_after_the_segment_into_a_saved_view_that_has_gaps_is_refused(
    part: Callable[[Tensor], Tensor], count: str
) -> None:
    x, held = torch.rand(64, 64, requires_grad=True), list[Tensor]()

    def body(x: Tensor) -> Tensor:
        held.append(x * 2)
        return part(held[0]).sin().sum() + held[0].sum()

    loss = zoo.recompute(body, x)
    array = part(held[0].detach()).numpy()
    array[... if count == "all" else (0,) * array.ndim] *= 0.5
    with pytest.raises(zoo.RecomputeError, match="changed in place after it was saved"):
        loss.backward()


@pytest.mark.parametrize("when", ["inside", "after"])
def test_a_write_into_what_has_no_gradient_is_refused(when: str) -> None:
    x, held = torch.rand(64, 64, requires_grad=True), list[Tensor]()

    def body(x: Tensor) -> Tensor:
        held.append(x * 2)
        y = held[0] * held[0].detach()
        if when == "inside":
            by_numpy(held[0])
        return y.sum()

    loss = zoo.recompute(body, x)
    if when == "after":
        by_numpy(held[0])
    with pytest.raises(zoo.RecomputeError, match="changed in place after it was saved"):
        loss.backward()


def test_a_write_by_an_array_that_outlives_the_segment_is_refused() -> None:
    x, arrays = torch.rand(64, 64, requires_grad=True), list[Any]()

    def body(x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin() + y.exp()
        arrays.append(y.detach().numpy())
        arrays[0] *= 0.5
        return z.sum()

    loss = zoo.recompute(body, x)
    arrays.clear()
    with pytest.raises(zoo.RecomputeError, match="changed in place after it was saved"):
        loss.backward()


class SavesAResultOfItsGraph(torch.autograd.Function):
    """Its forward makes autograd nodes of its own, after the one of the function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.exp() * 1.5
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


@pytest.mark.parametrize("when", ["inside", "after"])
def test_memory_of_a_result_with_a_graph_that_is_exchanged(when: str) -> None:
    """Autograd holds the memory of a function's result, not the tensor."""

    def program(call: Call) -> Tensor | None:
        x, held = torch.rand(300, requires_grad=True), list[Tensor]()

        def body(x: Tensor) -> Tensor:
            held.append(SavesAResultOfItsGraph.apply(x * 2))
            y = held[0] * 3
            if when == "inside":
                held[0].data = torch.zeros(300)
            return y

        y = call(body, x)
        if when == "after":
            held[0].data = torch.zeros(300)
        y.sum().backward()
        return x.grad

    assert_exact(program)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_the_segment_made_is_detached() -> None:
    def program(call: Call) -> list[Tensor | None]:
        a, b = torch.rand(2, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)

        def body(a: Tensor, b: Tensor) -> Tensor:
            nested = torch.nested.as_nested_tensor([a.sin(), b.sin()])
            fixed = nested.detach().to_padded_tensor(0.0)
            return (nested * 2).to_padded_tensor(0.0).exp() + fixed

        call(body, a, b).sum().backward()
        return [a.grad, b.grad]

    assert_exact(program)
