"""Every way to ask for gradients, and what happens inside of a backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import WAYS, Call, Way, assert_exact, assert_trains, net, rows, state_of
from zoo._torch import sequence_number


def mixed() -> nn.Sequential:
    return net(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_some_tensors(way: Way) -> None:
    """`autograd.grad`, `backward(inputs=...)` | raises, if reentrant | exact

    torch's docs: reentrant supports neither autograd.grad nor backward(inputs=...).
    """

    def program(call: Call) -> Any:
        model, (x,) = mixed(), rows()
        loss = way(call, model, x).square().sum()
        found = torch.autograd.grad(loss, [x, model[4].weight], retain_graph=True)
        loss.backward(inputs=[model[0].weight])
        return found, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
def test_double_backward(way: Way) -> None:
    """double backward, `retain_graph` | raises, if reentrant | exact

    Gradient penalty: create_graph=True, which reentrant does not support.
    """

    def program(call: Call) -> Any:
        model, (x,) = mixed(), rows()
        loss = way(call, model, x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        return gradient, x.grad, state_of(model)

    assert_exact(program)


def views(x: Tensor) -> Tensor:
    y = x.sin()
    return y.exp().sum() + y.t().square().sum() + (y[1:] * y[:-1]).sum()


def written_views(x: Tensor) -> Tensor:
    y = x * 2
    read = y.exp()
    y[1:].mul_(read[1:])
    return y.sin().sum() + y[1:].cos().sum()


@pytest.mark.parametrize("function", [views, written_views])
def test_double_backward_through_views_of_what_a_kernel_reads(function: Any) -> None:
    """The backward that makes a graph opens views of a value that a replayed kernel reads, too."""

    def program(call: Call) -> Any:
        (x,) = rows()
        (first,) = torch.autograd.grad(call(function, x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return first, second, torch.autograd.grad(second.sum(), x)

    assert_exact(program)


def stale(y: Tensor, view: Tensor) -> Tensor:
    read = view * 3
    y.mul_(2)
    return read.sum() * y


def stale_without_gradient(y: Tensor, view: Tensor) -> Tensor:
    with torch.no_grad():
        read = y[1:].exp()
    y.mul_(2)
    return read.sum() * y


def stale_of_several(y: Tensor, view: Tensor) -> Tensor:
    read = y.split(2)[0] * 3
    y.mul_(2)
    return read.sum() * y


@pytest.mark.parametrize("function", [stale, stale_without_gradient, stale_of_several])
def test_a_view_whose_base_was_written_keeps_its_history(function: Any) -> None:
    """Autograd makes it anew when it is asked for: a node more, so another order, or an error."""

    def program(call: Call) -> Any:
        (x,) = rows()
        y = x * 1
        view, before = y[1:], sequence_number()
        call(function, y, view).sum().backward()
        return sequence_number() - before, x.grad

    assert_exact(program)


def test_what_was_written_after_it_was_saved_is_refused_only_where_it_is_needed() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        needed, written = x.sin().exp(), x.tanh()
        of_a_view = written[1:].sin()
        written[:, 1:] = 0.25
        return needed, written, of_a_view

    def program(call: Call) -> Any:
        (x,) = rows()
        needed, *others = call(function, x)
        needed.sum().backward()
        return others, x.grad

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
def test_a_retained_graph(way: Way) -> None:
    """retain_graph=True: a replay per backward, with norm and dropout, three times."""

    def program(call: Call) -> Any:
        model, (x,) = mixed(), rows()
        loss = way(call, model, x).square().sum()
        loss.backward(retain_graph=True)
        torch.rand(2)
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad, state_of(model)

    assert_exact(program)


def test_two_outputs_and_two_backwards() -> None:
    """Partial backward: a replay for each."""

    def program(call: Call) -> Any:
        model, other, (x,) = mixed(), mixed(), rows()
        one, two = call(lambda x: (model(x), other(x)), x)
        one.square().sum().backward(retain_graph=True)
        middle = x.grad.clone()
        two.exp().sum().backward()
        return middle, x.grad, state_of(model), state_of(other)

    assert_exact(program)


def test_several_forwards_before_one_backward() -> None:
    """several forwards before a backward | state of the last one | exact

    Statistics, counters and masks of each forward are its own, in any order of backwards.
    """

    def program(call: Call) -> Any:
        model, batches = mixed(), [rows() for _ in range(4)]
        losses = [call(model, *x).square().sum() for x in batches]
        (losses[0] + losses[2]).backward()
        losses[3].backward()
        losses[1].backward()
        return state_of(model), [x.grad for (x,) in batches]

    assert_exact(program)


@pytest.mark.parametrize("norm", [True, False])
def test_segments_three_deep(norm: bool) -> None:
    """nested segments | inner state updated three times | exact

    pytorch#90105: nested segments, with norm and dropout, and without the norm.
    """

    def program(call: Call) -> Any:
        parts = [net(nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)]
        for part in parts:
            part[-1] = nn.Linear(4, 4)
        (x,) = rows()

        def inner(x: Tensor) -> Any:
            return parts[2](call(parts[1], x).sin())

        def outer(x: Tensor) -> Any:
            return call(inner, call(parts[0], x)) + call(parts[0], x)

        call(outer, x).square().sum().backward()
        return x.grad, [state_of(part) for part in parts]

    assert_exact(program)


@pytest.mark.parametrize("create", [True, False])
def test_a_backward_inside_the_forward(create: bool) -> None:
    """pytorch#90105, rule 6: autograd.grad in the segment, around it and of another segment."""

    def program(call: Call) -> Any:
        model, (x,) = mixed(), rows()

        def penalized(x: Tensor) -> Any:
            y = call(model, x * 1)
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return y.sum(1) + (gradient if create else gradient.detach()).square().sum(1)

        call(penalized, x).sin().sum().backward()
        return x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
def test_a_derivative_inside_the_forward_by_a_double_backward(way: Way) -> None:
    class Directional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def inner(self, x: Tensor) -> Tensor:
            return self.second(x).tanh()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            given = x.detach(), torch.ones_like(x)
            return x + torch.autograd.functional.jvp(self.inner, *given, create_graph=True)[1]

    assert_trains(Directional, way=way)


@pytest.mark.parametrize("leaf", [True, False])
def test_a_training_step_inside_the_forward(leaf: bool) -> None:
    """a backward or training step in the forward | gradients added twice | once

    backward() of a detached part in the segment: no gradient may be added twice.
    """

    def program(call: Call) -> Any:
        inner, outer, (x,) = mixed(), nn.Linear(4, 4), rows()

        def function(x: Tensor) -> Any:
            inside = (x.detach() if leaf else x.detach() * 2).requires_grad_()
            inner(inside).square().sum().backward(inputs=[inside])
            return outer(x).sin() * inside.grad

        call(function, x).sum().backward()
        return x.grad, state_of(inner), state_of(outer)

    assert_exact(program)


def test_a_second_backward_raises_as_without() -> None:
    """Guard: without retain_graph the graph is gone."""
    loss = zoo.recompute(mixed(), *rows()).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_retained_gradient_of_an_intermediate(way: Way) -> None:
    """Grad-CAM: retain_grad() on a tensor kept on the module."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.tanh(self.first(x))
            self.seen.retain_grad()
            return torch.tanh(self.second(self.seen)).exp()

    def program(call: Call) -> Any:
        model, (x,) = Kept(), rows()
        way(call, model, x).sum().backward()
        return model.seen.grad, x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("shared", ["none", "weight", "container"])
def test_an_optimizer_in_the_backward(shared: str) -> None:
    """an optimizer in a gradient hook | exact | exact

    pytorch#81296: a parameter is stepped as soon as its gradient is there.
    """

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    def program(call: Call) -> Any:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        if shared == "weight":
            model[2][0].weight = model[0][0].weight
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            (y,) = rows()
            for number in range(3):
                part = (lambda y, n=number: model[n](y)) if shared == "container" else model[number]
                y = call(part, y)
            y.square().sum().backward()
        return state_of(model)

    assert_exact(program)


def test_accumulation_and_clipping() -> None:
    """Guard: three micro-batches with a norm, clipped together."""

    def program(call: Call) -> Any:
        model = mixed()
        for _ in range(3):
            (call(model, *rows()).square().mean() / 3).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return norm, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("way", WAYS)
def test_anomaly_mode(way: Way) -> None:
    """Guard: detect_anomaly keeps tracebacks of the forward."""
    with torch.autograd.set_detect_anomaly(True):
        assert_trains(mixed, way=way, steps=1)


def test_random_shapes_are_exact() -> None:
    """shapes that are drawn | raises, if drawn by Python | exact

    torch's 'different metadata' check: shapes that depend on drawn numbers.
    """

    def program(call: Call) -> Any:
        (x,) = rows()

        def function(x: Tensor) -> Tensor:
            return x[: int(torch.randint(1, 6, ()))].sin().exp()

        for _ in range(4):
            call(function, x).sum().backward()
        return x.grad

    assert_exact(program)
