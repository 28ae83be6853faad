"""`zoo.recompute` for one function: exact, runs once, or refuses before a gradient is used."""

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from tests.engine.kernels import Made, bytes_left, replayed
from tests.training import assert_same, everything, generator, images, train
from zoo.engine import saved_tensors
from zoo.engine.recompute import recompute
from zoo.errors import ArgumentError, RecomputeError
from zoo.profiling.peak_memory import trace


def block() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 2, 3)
    )


def test_a_module_trains_as_without() -> None:
    expected = train(block(), lambda: [images().requires_grad_()])
    model = block()
    actual = train(
        model, lambda: [images().requires_grad_()], forward=lambda x: recompute(model, x)
    )
    assert_same(actual, expected)


def test_a_norm_reached_through_a_closure_moves_once() -> None:
    model = block()
    recompute(lambda *parts: model(sum(parts)), images(), images()).sum().backward()
    assert int(model[1].num_batches_tracked) == 1


def test_nested_calls_are_exact() -> None:
    model, other = block(), block()

    def twice(x: Tensor) -> Tensor:
        return model[3:](recompute(model[:3], x))

    expected = train(other, lambda: [images()])
    assert_same(train(model, lambda: [images()], forward=lambda x: recompute(twice, x)), expected)


def test_arguments_that_are_one_tensor_are_one() -> None:
    def trained(call: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        # projects once where query, key and value are one tensor, thrice where they are not
        attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        x = torch.rand(5, 2, 8).requires_grad_()
        call(attention, x, x, x)[0].sum().backward()
        return everything(attention) | {"gradient of x": x.grad}

    assert_same(trained(recompute), trained(lambda function, *args: function(*args)))


def test_keywords_lists_and_other_values_reach_the_function() -> None:
    def function(parts: list[Tensor], *, scale: dict[str, Tensor], power: int) -> dict[str, Any]:
        return {"y": (parts[0] * parts[1] * scale["s"]).exp() ** power, "n": power, "none": None}

    def gradients(call: Any) -> list[Tensor]:
        torch.manual_seed(0)
        a, b, s = (torch.rand(3).requires_grad_() for _ in range(3))
        result = call([a, b], scale={"s": s}, power=2)
        assert (result["n"], result["none"]) == (2, None)
        result["y"].sum().backward()
        return [a.grad, b.grad, s.grad]

    actual = gradients(lambda *args, **kwargs: recompute(function, *args, **kwargs))
    assert all(map(torch.equal, actual, gradients(function)))


def test_a_list_that_grows_after_the_call_does_not_matter() -> None:
    features = [torch.rand(3).requires_grad_(), torch.rand(3).requires_grad_()]
    out = recompute(lambda parts: torch.stack(parts).exp().prod(0).exp(), features)
    features.append(torch.rand(3))
    out.sum().backward()
    assert features[0].grad is not None


def test_the_function_may_catch_exceptions_of_its_own() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        try:
            y = x.exp()
            return (y * y).sin()
        except Exception:
            calls.append("caught")
            raise

    x = torch.rand(3).requires_grad_()
    recompute(function, x).sum().backward()
    assert not calls
    assert torch.equal(x.grad, torch.autograd.grad(function(x).sum(), x)[0])


def test_saved_tensors_may_be_read_twice() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1)
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
            return gradients[0] * (first + second)

    x = torch.rand(3).requires_grad_()
    recompute(lambda x: Square.apply(x.exp()), x).sum().backward(retain_graph=True)
    assert torch.equal(x.grad, torch.autograd.grad(Square.apply(x.exp()).sum(), x)[0])


def test_noise_that_a_kernel_writes_after_saving_it_is_complete() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000).requires_grad_()
    y = recompute(lambda x: F.rrelu(x.sin(), training=True), x)
    (actual,) = torch.autograd.grad(y.sum(), x)
    slope = torch.where(x.sin() < 0, y / x.sin(), 1.0)
    torch.testing.assert_close(actual, (slope * x.cos()).detach(), rtol=1e-4, atol=1e-5)


def test_a_backward_inside_the_function_is_exact() -> None:
    def penalty(x: Tensor) -> Tensor:
        y = recompute(torch.sin, x * x)
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (inner * y).exp()

    def gradient(call: Any) -> Tensor:
        x = torch.linspace(0, 1, 5).requires_grad_()
        call(x).sum().backward()
        return x.grad

    assert torch.equal(gradient(lambda x: recompute(penalty, x)), gradient(penalty))


def test_an_input_changed_in_place_is_refused() -> None:
    x = torch.rand(3).requires_grad_()
    y = x * 1
    loss = recompute(lambda y: y.exp().sin(), y).sum()
    y.data.add_(0)
    loss.backward(retain_graph=True)  # .data hides the change from the version, and here it is none
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(
        RecomputeError, match=r"a tensor \(3,\) that this gradient needs was changed"
    ):
        loss.backward()


def test_a_parameter_changed_before_the_backward_is_refused() -> None:
    model = nn.Linear(3, 3)
    loss = recompute(lambda x: model(x.exp()), torch.rand(2, 3).requires_grad_()).sum()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RecomputeError, match=r"a tensor \(3, 3\) .*changed in place"):
        loss.backward()


def test_a_function_that_needs_no_gradient_keeps_nothing() -> None:
    out = recompute(lambda x: x.exp(), torch.rand(3))
    assert not out.requires_grad


def test_under_torch_func_the_function_just_runs() -> None:
    x = torch.rand(3)
    expected = torch.func.grad(lambda x: x.exp().sin().sum())(x)
    actual = torch.func.grad(lambda x: recompute(lambda x: x.exp().sin(), x).sum())(x)
    assert torch.equal(actual, expected)
    y = torch.func.vmap(lambda x: recompute(lambda x: x.exp().sin(), x))(x.requires_grad_())
    assert not replayed(y.sum().backward)


def test_nothing_waits_for_the_garbage_collector() -> None:
    # once before, for what a check of the replays on a device holds until it ends
    recompute(block(), images()).sum().backward()
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(found), Tensor) for found in gc.get_objects())
        for _ in range(3):
            model = block()
            recompute(model, images()).sum().backward()
            recompute(model, images())
            del model
        assert sum(issubclass(type(found), Tensor) for found in gc.get_objects()) == before
    finally:
        gc.enable()


def test_an_input_given_other_data_afterwards_does_not_matter() -> None:
    def gradient(call: Any) -> Tensor:
        x = torch.rand(3, generator=generator()).requires_grad_()
        y = x * 1
        loss = call(lambda y: y.exp().sin(), y).sum()
        y.data = torch.zeros(3)
        loss.backward()
        return x.grad

    assert torch.equal(gradient(recompute), gradient(lambda function, y: function(y)))


def test_a_retained_graph_holds_no_replays() -> None:
    """Without this, a backward with retain_graph would end with everything in memory."""

    def peak(retain: bool) -> int:
        x = torch.rand(100_000).requires_grad_()

        def step() -> None:
            y = x * 1
            for _ in range(6):
                y = recompute(lambda y: y.sin().sin().sin().sin(), y)
            torch.autograd.grad(y.sum(), x, retain_graph=retain)

        step()
        return trace(step, torch.get_default_device()).peak

    assert peak(retain=True) <= peak(retain=False) + 500_000


def test_gradients_are_those_of_the_parameters_of_functional_call() -> None:
    class Call(nn.Module):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
            self.call = call

        def forward(self, x: Tensor) -> Tensor:
            return self.call(self.inner, x)

    model, plain = Call(recompute), Call(lambda f, x: f(x))
    doubled = {k: (v.detach() * 2).requires_grad_() for k, v in model.named_parameters()}
    x = torch.rand(2, 3)
    gradients = [
        torch.autograd.grad(torch.func.functional_call(m, doubled, (x,)).sum(), [*doubled.values()])
        for m in (model, plain)
    ]
    assert all(map(torch.equal, *gradients))


def test_a_frozen_weight_changed_before_the_backward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    loss = recompute(model, torch.rand(2, 3).requires_grad_()).sum()
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(RecomputeError, match=r"a tensor \(3, 3\) .*changed in place"):
        loss.backward()


def test_it_is_called_as_torchs_checkpoint_is() -> None:
    x = torch.rand(3).requires_grad_()
    assert torch.equal(recompute(torch.sin, x, use_reentrant=False), x.sin())
    with pytest.raises(ArgumentError, match="use_reentrant=True cannot be exact"):
        recompute(torch.sin, x, use_reentrant=True)


def test_an_inference_tensor_may_be_an_input() -> None:
    with torch.inference_mode():
        x = torch.rand(3)
    w = torch.rand(3).requires_grad_()
    recompute(lambda x, w: (x + w).sin().sin(), x, w).sum().backward()
    assert w.grad is not None


def test_what_a_module_remembers_of_the_last_step_is_freed_as_without() -> None:
    """The graph of an attribute that the forward replaces is gone, also without a backward."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.linear(x).tanh()
            return self.last.sin()

    def kept(steps: int, call: Any) -> int:
        model = Remembering()

        def run() -> None:
            for _ in range(steps):
                call(model, torch.rand(512, 64))

        return bytes_left(run)

    gc.disable()
    try:
        # the first one on a device may leave a library's workspace
        assert kept(2, recompute)
        assert kept(12, recompute) == kept(2, recompute)
    finally:
        gc.enable()


def test_two_backwards_at_once_take_turns_in_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its thread, from an output of its own, over the same retained graph."""
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    gradients, running, together = dict[int, Tensor](), list[int](), list[int]()
    replay = saved_tensors.replay

    def slowly(*given: Any) -> None:
        running.append(0)
        time.sleep(0.1)
        together.append(len(running))
        replay(*given)
        running.pop()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layers(x).sin()
        return y.exp(), y.cos()

    def work(number: int) -> None:
        (gradients[number],) = torch.autograd.grad(outputs[number].sum(), x, retain_graph=True)

    monkeypatch.setattr(saved_tensors, "replay", slowly)
    x = torch.rand(3, 8).requires_grad_()
    outputs = recompute(function, x)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(together) == {1}
    for number, y in enumerate(function(x)):
        (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(gradients[number], expected)


class Storages:
    """Weak references to storages."""

    def __init__(self) -> None:
        self.references: list[StorageWeakRef] = []

    def note(self, tensor: Tensor) -> Tensor:
        self.references.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor


def test_a_segment_inside_a_segment_keeps_no_inputs() -> None:
    """They are made by the outer one's replay, and dropped after the backward."""
    inputs = Storages()

    def outer(x: Tensor) -> Tensor:
        return recompute(lambda y: y.sin().exp(), inputs.note(x * 2)).cos()

    loss = recompute(outer, torch.rand(3).requires_grad_()).sum()
    assert [found.expired() for found in inputs.references] == [True]
    loss.backward(retain_graph=True)
    assert len(inputs.references) == 1


def test_what_a_segment_inside_starts_from_is_freed_once_it_is_replayed() -> None:
    """Its backward needs what it saved, and not what its first kernel read."""
    left: list[str] = []

    def inner(y: Tensor) -> Tensor:
        z = (y + 1).sin()
        # called between two operations of which each saved a tensor
        z.register_hook(lambda gradient: left.extend(made.alive()))
        return z.exp()

    with Made() as made:
        loss = recompute(lambda x: recompute(inner, x.neg()), torch.rand(3).requires_grad_()).sum()
        loss.backward()
    names = {name.split()[0] for name in left}
    assert "add" in names, "the input of the sine, which is saved and comes next"
    assert "neg" not in names


def test_what_a_segment_inside_starts_from_may_be_written_after_it() -> None:
    def gradient(call: Any) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            y = x * 2
            z = call(lambda y: (y + 1).sin(), y)
            y.mul_(3)
            return z * y.exp()

        x = torch.linspace(0, 1, 5).requires_grad_()
        call(outer, x).sum().backward()
        return x.grad

    assert torch.equal(gradient(recompute), gradient(lambda function, x: function(x)))


def test_a_parameter_that_is_reached_by_no_name_and_changed_is_refused() -> None:
    class Hidden:
        __slots__ = ("weight",)

    hidden = Hidden()
    hidden.weight, scale = nn.Parameter(torch.rand(3)), torch.rand(3).requires_grad_()
    x = torch.rand(3).requires_grad_()
    loss = recompute(lambda x: ((x * hidden.weight).sin() * scale).exp(), x).sum()
    with torch.no_grad():
        hidden.weight.add_(1)
    with pytest.raises(RecomputeError, match=r"a tensor \(3,\) .*was changed in place"):
        loss.backward()
    assert scale.grad is None


def test_a_function_runs_once_also_where_a_backward_runs_inside_of_it() -> None:
    """Each call gives another number, which no second call could give."""
    given: list[float] = []

    def number() -> float:
        given.append(len(given) + 2.0)
        return given[-1]

    def outer(x: Tensor) -> Tensor:
        y = recompute(lambda x: (x * number()).sin().exp(), x * 1)
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return (x * number()).sin().exp() * gradient.detach()

    x = torch.rand(3).requires_grad_()
    recompute(outer, x).sum().backward()
    assert given == [2.0, 3.0]
    inner = torch.autograd.grad((x * 2.0).sin().exp().sum(), x)[0]
    assert torch.equal(x.grad, torch.autograd.grad((x * 3.0).sin().exp().mul(inner).sum(), x)[0])


@pytest.mark.parametrize("grad", [True, False])
def test_a_convolution_at_the_end_is_not_repeated(grad: bool) -> None:
    """Neither what it gets nor its weight is written by its kernel."""

    def flops(call: Any) -> int:
        conv, x = nn.Conv2d(4, 4, 3), images().requires_grad_(grad)
        with FlopCounterMode(display=False) as counter:
            call(conv, x).sum().backward()
        return counter.get_total_flops()

    assert flops(recompute) == flops(lambda function, x: function(x))


def test_a_look_at_a_saved_tensor_leaves_nothing_behind() -> None:
    """As tools that draw a graph do, outside of a backward."""
    seen = Storages()
    y = recompute(
        lambda x: seen.note(seen.note(x.sin()).exp()).sin(), torch.rand(3, requires_grad=True)
    )
    assert y.grad_fn is not None
    assert y.grad_fn._saved_self.shape == (3,)
    assert all(found.expired() for found in seen.references)


def test_a_parameter_that_is_an_input_and_is_written() -> None:
    """Written before it is read: the numbers written are those of the gradient."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            weight.clamp_(0.2, 0.4)
        return (x * weight).sin().exp()

    x, weight = torch.rand(3).requires_grad_(), nn.Parameter(torch.rand(3))
    recompute(function, x, weight).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(function(x, weight).sum(), x)[0])
