"""Hooks of modules and tensors fire as often as without, and act once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.training import WAYS, Call, Way, assert_exact, net, rows, state_of

Log = list[Any]


class Book:
    """Notes what hooks see."""

    def __init__(self) -> None:
        self.entries: Log = []
        self.note = self.entries.append


def trace_of(call: Call, way: Way, add: Callable[[nn.Sequential, Book], Any]) -> Any:
    """Trains two steps with the hooks that `add` registers, and returns all they saw."""
    model, book = net(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4)), Book()
    add(model, book)
    found: Log = []
    for _ in range(2):
        (x,) = rows()
        output = way(call, model, x)
        book.note("between")
        output.square().sum().backward()
        found += [output.detach(), x.grad]
    return found, book.entries, state_of(model)


def looks(model: nn.Sequential, book: Book) -> None:
    model.register_forward_pre_hook(lambda m, xs: book.note(("pre", xs[0].detach())))
    model.register_forward_hook(lambda m, xs, y: book.note(("post", y.detach())))
    model[2].register_forward_hook(lambda m, xs, y: book.note(("inner", y.detach())))


def modifies(model: nn.Sequential, book: Book) -> None:
    model[2].register_forward_pre_hook(lambda m, xs: (xs[0] * 2,))
    model[2].register_forward_hook(lambda m, xs, y: y.sin() * 3)
    model[4].register_forward_hook(lambda m, xs, y: y.cos(), always_call=True)
    model[4].register_forward_hook(lambda m, xs, y: y.exp(), prepend=True)


def modifies_in_place(model: nn.Sequential, book: Book) -> None:
    def double(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        output.mul_(2)

    model[2].register_forward_hook(double)


def modifies_sometimes(model: nn.Sequential, book: Book) -> None:
    """Returns None for its first call and something else from then on."""
    calls: Log = []

    def sometimes(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        calls.append(1)
        return output * 2 if len(calls) > 1 else None

    model[2].register_forward_hook(sometimes)


def moves_a_buffer(model: nn.Sequential, book: Book) -> None:
    """In place, by a hook that returns nothing; the forward reads what it left."""
    model[2].register_buffer("scale", torch.ones(4))

    def move(layer: Any, inputs: Any) -> None:
        layer.scale.mul_(1.5)

    model[2].register_forward_pre_hook(move)
    model[2].register_forward_hook(lambda m, xs, y: y * m.scale)


def prunes(model: nn.Sequential, book: Book) -> None:
    prune.l1_unstructured(model[2], "weight", amount=0.5)


def removes_itself(model: nn.Sequential, book: Book) -> None:
    handle = model[2].register_forward_hook(
        lambda m, xs, y: (book.note("once"), handle.remove())[0]
    )


def looks_at_gradients(model: nn.Sequential, book: Book) -> None:
    model[2].register_full_backward_hook(
        lambda m, down, up: book.note(("full", down[0].clone(), up[0].clone()))
    )
    model[2].register_full_backward_pre_hook(lambda m, up: book.note(("pre", up[0].clone())))
    model.register_full_backward_hook(lambda m, down, up: book.note("whole"))


def modifies_gradients(model: nn.Sequential, book: Book) -> None:
    model[2].register_full_backward_hook(lambda m, down, up: (down[0] * 2,))
    model[4].register_full_backward_pre_hook(lambda m, up: (up[0] * 3,))


def hooks_tensors(model: nn.Sequential, book: Book) -> None:
    def on_output(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: book.note(("tensor", gradient.clone())))

    model[2].register_forward_hook(on_output)
    model[2].weight.register_hook(lambda gradient: gradient * 2)


HOOKS = [
    looks, modifies, modifies_in_place, modifies_sometimes, moves_a_buffer, prunes, removes_itself,
    looks_at_gradients, modifies_gradients, hooks_tensors,
]  # fmt: skip


@pytest.mark.parametrize("add", HOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_every_kind(add: Callable[[nn.Sequential, Book], None], way: Way) -> None:
    """module hooks | fire twice | fire once

    pytorch#143573: they fire once per forward, those that act as well as those that look.
    """
    assert_exact(lambda call: trace_of(call, way, add))


def for_all(model: nn.Sequential, book: Book) -> list[Any]:
    everywhere = torch.nn.modules.module
    return [
        everywhere.register_module_forward_pre_hook(lambda m, xs: book.note(type(m).__name__)),
        everywhere.register_module_forward_hook(
            lambda m, xs, ks, y: book.note((type(m).__name__, y.detach())), with_kwargs=True
        ),
        everywhere.register_module_full_backward_hook(lambda m, a, b: book.note("backward")),
    ]


def for_all_that_act(model: nn.Sequential, book: Book) -> list[Any]:
    """The second scales by how often it was called; the last looks at what the others did."""
    calls, everywhere = Book(), torch.nn.modules.module

    def scale(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls.entries = [*calls.entries, 1]
        return output.tanh() * len(calls.entries)

    return [
        everywhere.register_module_forward_pre_hook(lambda m, xs: (xs[0] * 2,)),
        everywhere.register_module_forward_hook(scale, always_call=True),
        everywhere.register_module_forward_hook(lambda m, xs, y: book.note(y.detach())),
    ]


@pytest.mark.parametrize("add", [for_all, for_all_that_act])
@pytest.mark.parametrize("way", WAYS)
def test_global_hooks_fire_once_per_forward(add: Any, way: Way) -> None:
    """a profiler's global module hooks | fire twice | fire once

    register_module_forward_hook and its like, as profilers use them.
    """

    def program(call: Call) -> Any:
        handles: list[Any] = []
        try:
            found = trace_of(call, way, lambda *given: handles.extend(add(*given)))
        finally:
            for handle in handles:
                handle.remove()
                # torch leaves this behind and counts it as a hook
                torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        return found, len(torch.nn.modules.module._global_forward_hooks)

    assert_exact(program)


@pytest.mark.parametrize("change", ["removed", "added"])
def test_global_hooks_that_come_and_go_before_the_backward(change: str) -> None:
    """What acted in the forward has acted; what comes later has nothing to do with it."""
    everywhere = torch.nn.modules.module

    def program(call: Call) -> Any:
        model, (x,), book = net(nn.Linear(4, 4)), rows(), Book()

        def hook(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            book.note(type(layer).__name__)
            return output * 2

        handles = [everywhere.register_module_forward_hook(hook)] if change == "removed" else []
        loss = call(model, x).square().sum()
        if change == "removed":
            handles.pop().remove()
        else:
            handles.append(everywhere.register_module_forward_hook(hook))
        try:
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        return book.entries, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("place", ["parameter", "closure"])
@pytest.mark.parametrize(
    "register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook]
)
def test_a_leaf_hooked_inside_is_hooked_once(register: Any, place: str) -> None:
    """a hook put on a weight in the forward | scales the gradient twice | once

    pytorch#81296: a hook that scales a gradient must not scale it twice.
    """

    def program(call: Call) -> Any:
        layer, weight, fired = nn.Linear(4, 4), torch.rand(4).requires_grad_(), list[int]()
        leaf = layer.weight if place == "parameter" else weight

        def hook(tensor: Tensor) -> Any:
            fired.append(1)
            return None if tensor is leaf else tensor * 2

        def function(x: Tensor) -> Tensor:
            register(leaf, hook)
            return torch.tanh(layer(x) * weight)

        for _ in range(2):
            call(function, *rows()).sum().backward()
        return weight.grad, state_of(layer), len(fired)

    assert_exact(program)


def test_a_tensor_hooked_inside_fires_once() -> None:
    """pytorch#81296: reentrant cannot register; the backward must not fire it again."""

    def program(call: Call) -> Any:
        layer, (x,), book = nn.Linear(4, 4), rows(), Book()

        def function(x: Tensor) -> Tensor:
            y = torch.tanh(layer(x))
            y.register_hook(lambda gradient: book.note(gradient.clone()))
            z = y.exp()
            z.register_hook(lambda gradient: gradient * 2)
            return z.sin()

        output = call(function, x)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        return book.entries, x.grad, state_of(layer)

    assert_exact(program)


def test_a_hook_that_always_fires_does_so_after_an_exception() -> None:
    """always_call=True: the forward of the module raises, in the segment."""

    def program(call: Call) -> Any:
        model, book = net(nn.Linear(4, 4)), Book()
        model.register_forward_hook(lambda m, xs, y: book.note(y is None), always_call=True)

        def function(x: Tensor) -> Tensor:
            try:
                return model(x[:, :3])
            except RuntimeError:
                return model(x).sin()

        (x,) = rows()
        call(function, x).sum().backward()
        return book.entries, x.grad, state_of(model)

    assert_exact(program)
