"""What torch's own checkpoint makes of these programs: the column *torch* of docs/pitfalls.md.

A test that fails here may mean that torch has become better: then the page changes, too.
"""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zoo
from tests.training import Call, assert_same, needs_numpy, numpy, outcome, plain, rows, state_of

by_torch = functools.partial(checkpoint, use_reentrant=False)


def trained(call: Call, block: nn.Module) -> Any:
    """Trains a block that is one segment for two steps."""
    for _ in range(2):
        call(block, torch.rand(6, 4)).square().sum().backward()
    return state_of(block)


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))


def batch_norm(call: Call) -> Any:
    return trained(call, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))


def spectral_norm(call: Call) -> Any:
    return trained(call, parametrizations.spectral_norm(nn.Linear(4, 4)))


class Average(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean).tanh()


def moving_average(call: Call) -> Any:
    return trained(call, Average())


class Recurrent(nn.GRUCell):
    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.state = super().forward(x, None if self.state is None else self.state.detach())
        return self.state


def state_carried_on_the_module(call: Call) -> Any:
    return trained(call, Recurrent(4, 4))


class Scaled(nn.Linear):
    """Scales by what a function returns: a counter, an iterator, a random stream."""

    def __init__(self, scale: Callable[[], Any]) -> None:
        super().__init__(4, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.scale()).tanh()


def iterator_in_the_forward(call: Call) -> Any:
    numbers: Iterator[int] = iter(range(1, 9))
    return trained(call, Scaled(lambda: next(numbers)))


def generator_of_its_own(call: Call) -> Any:
    generator = torch.Generator().manual_seed(0)
    return trained(call, Scaled(lambda: torch.rand(4, generator=generator))), generator.get_state()


def random_of_python(call: Call) -> Any:
    return trained(call, Scaled(random.random))


def random_of_numpy(call: Call) -> Any:
    return trained(call, Scaled(lambda: float(numpy.random.rand())))


def log_in_a_list(call: Call) -> Any:
    seen: list[int] = []
    call(lambda x: (seen.append(1), x.tanh())[1], rows()[0]).sum().backward()
    return seen


def eval_before_the_backward(call: Call) -> Any:
    loss = call(block := deep(), *rows()).square().sum()
    block.eval()
    loss.backward()
    return state_of(block)


def frozen_before_the_backward(call: Call) -> Any:
    loss = call(block := deep(), *rows()).square().sum()
    block[0].requires_grad_(False)
    loss.backward()
    return block[2].weight.grad


class Calling(nn.Module):
    def __init__(self, call: Call, block: nn.Module) -> None:
        super().__init__()
        self.call, self.block = call, block

    def forward(self, x: Tensor) -> Any:
        return self.call(self.block, x)


def functional_call(call: Call) -> Any:
    model = Calling(call, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    weights = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, weights, tuple(rows())).square().sum().backward()
    return [p.grad for p in weights.values()]


def variable_changed_before_the_backward(call: Call) -> Any:
    scale, layer = 2.0, nn.Linear(4, 4)
    loss = call(lambda x: (layer(x) * scale).tanh(), *rows()).sum()
    scale = 3.0
    loss.backward()
    return layer.weight.grad


def optimizer_stepped_too_early(call: Call) -> Any:
    loss = call(block := deep(), *rows()).square().sum()
    with torch.no_grad():
        block[2].weight.mul_(0.5)
    loss.backward()
    return state_of(block)


def autocast(call: Call) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = call(block := deep(), *rows())
    y.float().square().sum().backward()
    return state_of(block)


def default_type_around_the_forward(call: Call) -> Any:
    layer, (x,) = nn.Linear(4, 4), rows()
    torch.set_default_dtype(torch.float64)
    try:
        y = call(lambda x: (layer(x) * torch.linspace(0, 1, 4)).tanh(), x)
    finally:
        torch.set_default_dtype(torch.float32)
    y.sum().backward()
    return layer.weight.grad


def hook_that_counts(call: Call) -> Any:
    block, calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    block[0].register_forward_hook(lambda *_: calls.append(1))
    call(block, *rows()).sum().backward()
    return calls


def hook_put_on_a_weight_inside(call: Call) -> Any:
    layer = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        layer.weight.register_hook(lambda gradient: gradient * 0.5)
        return layer(x).tanh()

    call(function, *rows()).sum().backward()
    return layer.weight.grad


def in_place_at_the_start(call: Call) -> Any:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    call(nn.Sequential(nn.ReLU(inplace=True), second), first(*rows())).square().sum().backward()
    return first.weight.grad


def list_that_grows_after_the_call(call: Call) -> Any:
    layer, features = nn.Linear(4, 4), rows()
    features.append(call(lambda found: layer(torch.stack(found).sum(0)).tanh(), features))
    features[-1].sum().backward()
    return layer.weight.grad


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return gradient * ctx.saved_tensors[0].exp()


def saved_tensors_read_twice(call: Call) -> Any:
    layer = nn.Linear(4, 4)
    call(lambda x: Twice.apply(layer(x)).tanh(), *rows()).sum().backward()
    return layer.weight.grad


def function_transform_around_it(call: Call) -> Any:
    layer = nn.Linear(4, 4)
    return torch.func.grad(lambda x: call(layer, x).tanh().sum())(torch.rand(6, 4))


def gradient_penalty(call: Call) -> Any:
    x = torch.rand(6, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(call(block := deep(), x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return block[0].weight.grad


PROGRAMS = {
    "WRONG": [
        *(batch_norm, spectral_norm, moving_average, state_carried_on_the_module),
        *(iterator_in_the_forward, generator_of_its_own, random_of_python),
        pytest.param(random_of_numpy, marks=needs_numpy),
        *(log_in_a_list, functional_call, variable_changed_before_the_backward),
        *(list_that_grows_after_the_call, hook_that_counts, hook_put_on_a_weight_inside),
    ],
    "raises": [
        *(eval_before_the_backward, frozen_before_the_backward, default_type_around_the_forward),
        *(in_place_at_the_start, saved_tensors_read_twice),
        function_transform_around_it,
    ],
    "right": [autocast, gradient_penalty],
}


@pytest.mark.parametrize("program", PROGRAMS["WRONG"])
def test_torch_leaves_other_bits(program: Callable[[Call], Any]) -> None:
    assert verdict(program, by_torch) == "WRONG"
    assert verdict(program, zoo.recompute) == "right"


@pytest.mark.parametrize("program", PROGRAMS["raises"])
def test_torch_raises(program: Callable[[Call], Any]) -> None:
    assert verdict(program, by_torch) == "raises"
    assert verdict(program, zoo.recompute) == "right"


@pytest.mark.parametrize("program", PROGRAMS["right"])
def test_torch_is_right(program: Callable[[Call], Any]) -> None:
    assert verdict(program, by_torch) == verdict(program, zoo.recompute) == "right"


def test_torch_does_not_notice_an_optimizer_that_steps_too_early() -> None:
    for call in plain, zoo.recompute:
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
            optimizer_stepped_too_early(call)
    optimizer_stepped_too_early(by_torch)


def verdict(program: Callable[[Call], Any], call: Call) -> str:
    """Compares what a program leaves with what it leaves plainly."""
    expected = outcome(program, plain)
    try:
        assert_same(outcome(program, call), expected)
    except AssertionError:
        return "WRONG"
    except (RuntimeError, TypeError):
        return "raises"
    return "right"
