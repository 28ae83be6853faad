"""Compilers and exporters: the same results, and no break where there was none."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zoo
from tests.engine.pitfalls.program import (
    WAYS,
    Call,
    Way,
    assert_exact,
    compare,
    frozen,
    gradients,
    images,
    module,
    net,
    plain,
    rows,
    train,
)

compiled: Any = torch.compile


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Checkpointed(nn.Module):
    """A model whose forward calls its body as a segment."""

    def __init__(self, call: Call, convolution: bool = False) -> None:
        super().__init__()
        self.call = call
        self.body: nn.Module = net(nn.BatchNorm1d(4), nn.Linear(4, 4))
        if convolution:
            self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return self.call(self.body, x).sin()


def twins(convolution: bool = False) -> tuple[nn.Module, nn.Module]:
    models = Checkpointed(plain, convolution), Checkpointed(zoo.recompute, convolution)
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model(fullgraph: bool) -> None:
    """pytorch#97436, pytorch#121966, pytorch#135816; graph breaks: pytorch#139989."""

    def program(call: Call) -> Any:
        model = Checkpointed(call)
        forward = compiled(model, backend="aot_eager", fullgraph=fullgraph)
        return train(plain, model, rows, lambda call, model, x: forward(x), 2)

    assert_exact(program)


@pytest.mark.parametrize("kind", ["norm", "dropout"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_inside(kind: str) -> None:
    """pytorch#166926, anemoi-core#1330: a compiled block in a segment that is not."""

    def program(call: Call) -> Any:
        model = net(nn.BatchNorm1d(4) if kind == "norm" else nn.Dropout(0.4), nn.Linear(4, 4))
        forward = compiled(model, backend="aot_eager")
        return train(call, model, rows, lambda call, model, x: call(forward, x), 2)

    assert_exact(program)


class Broken(nn.Module):
    """Cannot be compiled whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        linear = nn.Linear(4, 4)
        self.kind, self.count = kind, 0
        self.linear = nn.utils.parametrizations.spectral_norm(linear) if kind == "norm" else linear
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "break":
            torch._dynamo.graph_break()
        if self.kind == "count":
            self.count += 1
        return (self.norm(self.linear(x)) * (1 + self.count)).tanh().sin()


@pytest.mark.parametrize("kind", ["break", "count", "norm"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_segment_that_cannot_be_compiled(kind: str) -> None:
    """torch's checkpoint would run it, and count a batch twice, when the compiler gives up."""

    def program(call: Call) -> Any:
        model = Broken(kind)
        forward = compiled(lambda x: call(model, x), backend="aot_eager")
        return train(plain, model, rows, lambda call, model, x: forward(x), 2)

    assert_exact(program)


def test_an_exported_model() -> None:
    """pytorch PR#179021: torch.export in eval mode, with and without gradients around it."""
    baseline, model = (each.eval() for each in twins(convolution=True))
    (x,) = images()
    found = [torch.export.export(each, (x.detach(),)).module()(x) for each in (model, baseline)]
    assert torch.equal(*found)
    with torch.no_grad():
        exported = torch.export.export(model, (x.detach(),))
    assert torch.equal(exported.module()(x), baseline(x))


def test_a_traced_model() -> None:
    """pytorch#40912: torch.jit.trace in eval mode."""
    baseline, model = (each.eval() for each in twins(convolution=True))
    (x,) = images()
    with torch.no_grad():
        traced = torch.jit.trace(model, x.detach())
    assert torch.equal(traced(x), baseline(x))
    assert torch.equal(torch.jit.trace(model, x.detach())(x), baseline(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_scripted_module_in_a_segment(way: Way) -> None:
    """Its buffers are not Python's; its code is called once, and its kernels are torch's."""

    def make() -> nn.Module:
        inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()))
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), inner, nn.Linear(4, 3))

    # the first of all has other bits, without segments, too
    trained_script(plain, make(), way)
    assert_exact(lambda call: trained_script(call, make(), way))


def trained_script(call: Call, model: nn.Module, way: Way) -> Any:
    """Trains five steps: the code is compiled anew in the first of them."""
    found = []
    for _ in range(5):
        (x,) = rows()
        y = way(call, model, x)
        model.zero_grad()
        y.square().sum().backward()
        found.append(frozen([y, x.grad, gradients(model), dict(model.named_buffers())]))
    return found


def test_a_symbolically_traced_model() -> None:
    """torch.fx: a graph of the plain calls, which trains as the baseline."""
    baseline, model = twins()
    graphs = [torch.fx.symbolic_trace(each) for each in (baseline, model)]
    found = []
    for graph in graphs:
        torch.manual_seed(0)
        found.append(train(plain, graph, rows, module, 1))
    compare(found[1][0][:3], found[0][0][:3])


def test_a_segment_of_the_recording_of_a_graph() -> None:
    """make_fx of forward and backward: the graph computes the gradient."""
    (x,) = rows()

    def step(call: Call) -> Any:
        def function(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            y = call(lambda x: x.sin().exp().sin(), x)
            return torch.autograd.grad(y.sum(), x)[0]

        return make_fx(function)(x.detach())(x.detach())

    assert torch.equal(step(zoo.recompute), step(plain))
