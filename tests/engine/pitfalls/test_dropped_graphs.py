"""Graphs that a program drops: nothing of them stays, and no garbage collector is needed.

Autograd's nodes are C++, where Python's collector sees no cycle: what waits in one waits for good.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.training import Call, plain

Segment = Callable[..., Tensor]


class Stopped(Exception):
    """Ends a forward or a backward."""


class Product(torch.autograd.Function):
    """Saves its arguments and its result."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        made = h * w
        ctx.save_for_backward(h, w, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        h, w, _ = ctx.saved_tensors
        return gradient * w, (gradient * h).sum(0)


def added(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    h += run(lambda h: (h + w).tanh(), h)
    return h


def multiplied(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    return h.mul_(run(lambda h: (h.exp() + w).sin(), h))


def a_slice(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    h[:2] += run(lambda h: (h[:2] + w).tanh(), h)
    return h


def a_view_of_a_view(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    view = h.view(2, 2, 8)[1:]
    view[:, 0].add_(run(lambda part: (part + w).tanh(), view[:, 0]))
    return h


def copied_into(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    return h.copy_(run(lambda h: (h.detach() + w).tanh() + h.sin() + w, h))


def by_out(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    def function(h: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(h, 2, out=h)
        return (h + w).tanh()

    h += run(function, h)
    return h


def written_inside_and_after(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    def function(h: Tensor) -> Tensor:
        h.mul_((h.sin() + w).tanh())
        return (h + w).sigmoid()

    h += run(function, h)
    return h


def the_result(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    y = run(lambda h: (h + w).tanh() + 1, h)
    y += h
    h += y
    return y[1:].mul_(h[1:].sum())


def by_a_function_of_its_own(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    y = run(lambda h: Product.apply((h + 1).sin(), w).tanh(), h)
    h.add_(y)
    return h


def what_a_function_of_its_own_saved(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    h += run(lambda h: Product.apply(h, w).tanh(), h)
    return h


def saved_as_it_is(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    h += run(lambda h: (h * w).tanh(), h)
    return h


def in_segments_of_segments(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        h += run(lambda h: (run(lambda h: (h + w).tanh(), h) + h).exp(), h)
    return h


def by_a_hook(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    y = run(lambda h: (h + w).tanh(), h)
    h.requires_grad_()
    h.register_hook(lambda gradient: gradient * y.sum().detach())
    return y + h


def by_an_attribute(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    y = run(lambda h: (h + w).tanh(), h)
    h.result = y  # type: ignore[attr-defined]
    return y * 2


def a_frozen_weight(run: Segment, h: Tensor, w: Tensor) -> Tensor:
    weight = torch.nn.Parameter(torch.ones(8))

    def function(h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = weight.exp()
        return (h * scale + w).tanh()

    y = run(function, h)
    weight.requires_grad_(False).mul_(y[0])
    return y + weight


HISTORIES = [
    added, multiplied, a_slice, a_view_of_a_view, copied_into, by_out, written_inside_and_after,
    the_result, by_a_function_of_its_own, what_a_function_of_its_own_saved, saved_as_it_is,
    in_segments_of_segments, by_a_hook, by_an_attribute, a_frozen_weight,
]  # fmt: skip


def dropped(call: Call, history: Callable[..., Tensor], h: Tensor, w: Tensor) -> list[Any]:
    return marks(history(call, h, w))


def after_a_backward(call: Call, history: Callable[..., Tensor], h: Tensor, w: Tensor) -> list[Any]:
    y = history(call, h, w)
    found = marks(y)
    # where the history was written over, what plain training refuses is refused
    with contextlib.suppress(RuntimeError):
        y.sum().backward()
    return found


def retained(call: Call, history: Callable[..., Tensor], h: Tensor, w: Tensor) -> list[Any]:
    y = history(call, h, w)
    found = marks(y)
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            y.sum().backward(retain_graph=True)
    return found


def a_part_of_it(call: Call, history: Callable[..., Tensor], h: Tensor, w: Tensor) -> list[Any]:
    y = history(call, h, w)
    found = marks(y)
    with contextlib.suppress(RuntimeError):
        torch.autograd.grad(y[0].sum(), w, retain_graph=True)
    return found


def stopped_in_a_backward(
    call: Call, history: Callable[..., Tensor], h: Tensor, w: Tensor
) -> list[Any]:
    def stop(gradient: Tensor) -> None:
        raise Stopped

    w = w * 1
    w.register_hook(stop)
    y = history(call, h, w)
    found = marks(y)
    with contextlib.suppress(RuntimeError, Stopped):
        y.sum().backward()
    return found


def stopped_in_the_forward(
    call: Call, history: Callable[..., Tensor], h: Tensor, w: Tensor
) -> list[Any]:
    found: list[Any] = []

    def stopping(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        def whole(*args: Tensor) -> Tensor:
            made = function(*args)
            found.extend(marks(made))
            args[0].add_(made.sum())
            raise Stopped

        made: Tensor = call(whole, *args)
        return made

    with contextlib.suppress(Stopped, RuntimeError):
        history(stopping, h, w)
    return found


FATES = [
    dropped, after_a_backward, retained, a_part_of_it, stopped_in_a_backward,
    stopped_in_the_forward,
]  # fmt: skip


class Mark:
    """Lives as long as a node of autograd's."""


def marks(result: Tensor) -> list[Any]:
    """Returns weak references that tell which nodes of a graph live."""
    waiting, seen, found = [result.grad_fn], set(), []
    while waiting:
        node: Any = waiting.pop()
        # that of a parameter lives as long as the parameter
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        mark = node.metadata["mark"] = Mark()
        found.append(weakref.ref(mark))
        waiting += [following for following, _ in node.next_functions]
    return found


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disables the collector, and hides from it what there is, which is fast to count then."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def left(call: Call, fate: Callable[..., list[Any]], history: Callable[..., Tensor]) -> Any:
    """Returns how many tensors and nodes of autograd's live after graphs were dropped."""
    with without_collection():
        w, nodes = torch.ones(8, requires_grad=True), []
        for _ in range(3):
            nodes += fate(call, history, torch.rand(4, 8), w)
        w.grad = None
        living = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        return len(living), sum(mark() is not None for mark in nodes)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("fate", FATES)
def test_nothing_stays_of_a_graph(
    fate: Callable[..., list[Any]], history: Callable[..., Tensor]
) -> None:
    # what the engine makes once for each type
    dropped(zoo.recompute, added, torch.rand(4, 8), torch.ones(8, requires_grad=True))
    tensors, nodes = left(zoo.recompute, fate, history)
    expected_tensors, expected_nodes = left(plain, fate, history)
    assert nodes <= expected_nodes
    assert tensors <= expected_tensors
