"""What surrounds a forward: autocast, default device and type, kernels, modes."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from tests.training import WAYS, Call, Counting, Way, assert_exact, elsewhere, net, rows, state_of


def autocast(dtype: torch.dtype = torch.bfloat16, **options: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype, **options)


def record(
    call: Call, model: nn.Module, way: Way, around: AbstractContextManager[Any], inside: bool
) -> Any:
    (x,) = rows()
    with around:
        output = way(call, model, x)
        loss = output.float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return output, x.grad, state_of(model)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_autocast(way: Way, dtype: torch.dtype, inside: bool) -> None:
    """autocast, the backward inside or outside | exact | exact

    fairscale#1199, pytorch#141896: the backward outside of the context, and inside.
    """
    assert_exact(lambda call: record(call, net(nn.BatchNorm1d(4)), way, autocast(dtype), inside))


@pytest.mark.parametrize("way", WAYS)
def test_autocast_around_the_backward_only(way: Way) -> None:
    """The replay has the precision of the forward."""

    def program(call: Call) -> Any:
        model, (x,) = net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), rows()
        loss = way(call, model, x).square().sum()
        with autocast():
            loss.backward()
        return x.grad, state_of(model)

    assert_exact(program)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_autocast_of_one_weight_in_several_places(before: bool, inside: bool, cache: bool) -> None:
    """one weight in two segments, autocast's cache | exact | exact

    pytorch#141896, pytorch#193338: two segments, and outside of them, with a cached cast.
    """

    def program(call: Call) -> Any:
        layer = nn.Linear(4, 4)
        (x,) = rows()
        with autocast(cache_enabled=cache):
            y = layer(x) if before else x
            y = call(lambda y: torch.tanh(layer(y)), y)
            y = layer(call(lambda y: torch.tanh(layer(y)) * layer(y), y))
            loss = y.float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return y, x.grad, state_of(layer)

    assert_exact(program)


@pytest.mark.parametrize("around", [nullcontext, autocast])
def test_autocast_entered_and_left_inside(around: Callable[[], Any]) -> None:
    """Nested contexts, enabled and disabled, in the segment."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with autocast():
                y = self.first(x)
                with autocast(enabled=False):
                    y = torch.tanh(self.second(y.float()))
            return self.second(torch.tanh(self.first(y)))

    for way in WAYS:
        assert_exact(lambda call, way=way: record(call, Mixed(), way, around(), False))


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_choice_of_kernels_around_the_forward_only(backend: SDPBackend) -> None:
    """`sdpa_kernel(...)` around the forward only | raises | exact

    pytorch#84864: thread-local state is not captured.
    """

    def program(call: Call) -> Any:
        layer, x = nn.Linear(8, 24), torch.randn(2, 2, 64, 8).requires_grad_()
        with sdpa_kernel(backend):
            y = call(lambda x: F.scaled_dot_product_attention(*layer(x).chunk(3, -1)), x)
        y.square().sum().backward()
        return y, x.grad, state_of(layer), torch.backends.cuda.flash_sdp_enabled()

    assert_exact(program)


def set_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def set_deterministic() -> None:
    torch.use_deterministic_algorithms(True)


def set_warning() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.mark.parametrize("change", [set_default_dtype, set_deterministic, set_warning])
def test_global_switches_around_the_forward_only(change: Callable[[], None]) -> None:
    """default dtype, deterministic mode, oneDNN, cuDNN | those of the backward | exact

    pytorch#84864: a factory call in the segment sees what the forward saw.
    """

    def function(x: Tensor) -> Tensor:
        flags = torch.are_deterministic_algorithms_enabled()
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        return (x.exp() * torch.linspace(0, 1 + flags + 2 * warn, 3)).sin()

    def program(call: Call) -> Any:
        x = torch.rand(3).requires_grad_()
        try:
            change()
            y = call(function, x)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
        y.sum().backward()
        return y, x.grad, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()

    assert_exact(program)


def test_a_switch_that_the_function_sets_and_resets_is_reset_in_the_backward() -> None:
    """A replay has the switches of each kernel, and ends where the last one of them is set."""

    def function(x: Tensor) -> Tensor:
        set_default_dtype()
        set_deterministic()
        y = (x * 2).sin()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        return y

    zoo.recompute(function, torch.rand(3).requires_grad_()).sum().backward()
    try:
        assert torch.get_default_dtype() == torch.float32
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


KERNELS = ["flash", "mem_efficient", "math", "cudnn"]
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    name: (
        getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
        getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        lambda enabled: not enabled,
    )
    for name in KERNELS
} | {
    "priority": (
        torch._C._get_sdp_priority_order,
        torch._C._set_sdp_priority_order,
        lambda order: order[::-1],
    )
}


@pytest.mark.parametrize(("read", "write", "another"), SWITCHES.values(), ids=SWITCHES)
def test_choices_of_kernels_are_those_of_the_forward(
    read: Callable[[], Any], write: Callable[[Any], object], another: Callable[[Any], Any]
) -> None:
    """Also of those that only a GPU has; after the backward they are the user's again."""
    before = read()

    def program(call: Call) -> Any:
        layer, x = nn.Linear(8, 24), torch.randn(2, 2, 64, 8).requires_grad_()
        try:
            write(another(before))
            y = call(lambda x: F.scaled_dot_product_attention(*layer(x).chunk(3, -1)).sin(), x)
        finally:
            write(before)
        y.square().sum().backward()
        assert read() == before
        return y, x.grad, state_of(layer)

    assert_exact(program)


def test_the_default_device_around_the_forward_only() -> None:
    """pytorch#84864, fixed in torch 2.14: forward inside of the context, backward outside."""

    def program(call: Call) -> Any:
        x = torch.rand(3).requires_grad_()
        with torch.device("meta"):
            y = call(scaled_by_device, x)
        y.sum().backward()
        return y, x.grad, torch.empty(()).device

    assert_exact(program)


def scaled_by_device(x: Tensor) -> Tensor:
    """Computes with where a factory call works."""
    return (x.exp() * (2 if torch.empty(()).is_meta else 3)).sin()


@pytest.mark.parametrize("thread", [False, True])
def test_the_default_device_does_not_leak(thread: bool) -> None:
    """Fixed in torch 2.14: entering the captured context again leaks it, also to a thread."""
    x, weight = torch.rand(3).requires_grad_(), torch.rand(3)
    with torch.device("meta"):
        loss = zoo.recompute(lambda x: (x.exp() * weight).sin(), x).sum()
        run(loss.backward, thread)
        assert torch.empty(()).device.type == "meta"
    assert torch.empty(()).device.type == "cpu"
    assert torch.equal(x.grad, torch.autograd.grad((x.exp() * weight).sin().sum(), x)[0])


def run(function: Callable[[], Any], thread: bool) -> None:
    """Calls the function here, or on another thread until it has ended there."""
    if not thread:
        function()
        return
    failures: list[BaseException] = []

    def target() -> None:
        try:
            function()
            assert torch.empty(()).device.type == "cpu"
        except BaseException as failure:
            failures.append(failure)

    elsewhere(target)
    assert not failures


def test_shapes_on_the_meta_device() -> None:
    """pytorch#133550, pytorch#132684: forward and backward inside of `torch.device("meta")`."""
    with torch.device("meta"):
        model = net(nn.BatchNorm1d(4), nn.Dropout(0.3))
        x = torch.empty(6, 4).requires_grad_()
        zoo.recompute(model, x).sum().backward()
    assert x.grad.shape == (6, 4)
    assert all(parameter.grad.is_meta for parameter in model.parameters())
    with torch.device("meta"):
        y = zoo.recompute(model, torch.empty(6, 4).requires_grad_())
    y.sum().backward()


def grad_mode(x: Tensor, layer: nn.Module) -> Tensor:
    with torch.no_grad():
        y = layer(x)
        with torch.enable_grad():
            z = layer(y * x.detach())
    with torch.set_grad_enabled(False):
        w = z.exp()
    return torch.tanh(layer(x) * z * w) if torch.is_grad_enabled() else x


def test_grad_mode_changed_and_asked_for_inside() -> None:
    """Megatron-LM#1330: user code asks is_grad_enabled; reentrant runs without."""

    def program(call: Call) -> Any:
        layer = nn.Linear(4, 4)
        (x,) = rows()
        call(grad_mode, x, layer).square().sum().backward()
        return x.grad, state_of(layer)

    assert_exact(program)


def test_an_inference_mode_forward_changes_nothing() -> None:
    """Guard: no graph, and statistics that move once."""

    def program(call: Call) -> Any:
        model = net(nn.BatchNorm1d(4))
        with torch.inference_mode():
            y = call(model, *rows())
        return y.clone(), y.requires_grad, y.is_inference()

    assert_exact(program)


def test_no_warning_without_a_gradient_of_the_input() -> None:
    """'None of the inputs have requires_grad=True', 'use_reentrant should be passed'."""
    model = net(nn.Dropout(0.1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        zoo.recompute(model, torch.rand(3, 4)).sum().backward()
    assert not found
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
def test_a_mode_that_counts_functions(way: Way) -> None:
    def program(call: Call) -> Any:
        model, (x,) = net(nn.BatchNorm1d(4), nn.Dropout(0.3)), rows()
        with Counting() as mode:
            way(call, model, x).square().sum().backward()
        return dict(mode.calls)

    assert_exact(program)


def test_a_recurrent_layer_without_gradients_rounds_as_in_the_forward() -> None:
    """Its kernel on the CPU does something else where a backward may follow."""

    def program(call: Call) -> Any:
        teacher, model, (x,) = nn.LSTM(4, 4), nn.Linear(4, 4), rows()

        def function(x: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher(x)[0]
            return model(x) * target.tanh()

        call(function, x).sum().backward()
        return x.grad, model.weight.grad

    assert_exact(program)
