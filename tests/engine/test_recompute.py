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

from tests.engine.kernels import Made, bytes_left, replayed
from tests.training import assert_same, everything, images, train
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


def test_arguments_that_are_one_tensor_are_one() -> None:
    def trained(call: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        # projects once where query, key and value are one tensor, thrice where they are not
        attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        x = torch.rand(5, 2, 8).requires_grad_()
        call(attention, x, x, x)[0].sum().backward()
        return everything(attention) | {"gradient of x": x.grad}

    assert_same(trained(recompute), trained(lambda function, *args: function(*args)))


def test_noise_that_a_kernel_writes_after_saving_it_is_complete() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000).requires_grad_()
    y = recompute(lambda x: F.rrelu(x.sin(), training=True), x)
    (actual,) = torch.autograd.grad(y.sum(), x)
    slope = torch.where(x.sin() < 0, y / x.sin(), 1.0)
    torch.testing.assert_close(actual, (slope * x.cos()).detach(), rtol=1e-4, atol=1e-5)


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


def test_a_parameter_that_is_an_input_and_is_written() -> None:
    """Written before it is read: the numbers written are those of the gradient."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            weight.clamp_(0.2, 0.4)
        return (x * weight).sin().exp()

    x, weight = torch.rand(3).requires_grad_(), nn.Parameter(torch.rand(3))
    recompute(function, x, weight).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(function(x, weight).sum(), x)[0])
