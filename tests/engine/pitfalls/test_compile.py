"""Compilers and exporters: the same results, and no break where there was none."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zoo
from tests.training import (
    WAYS,
    Call,
    Way,
    assert_exact,
    assert_same,
    frozen,
    gradients,
    module,
    net,
    pictures,
    plain,
    rows,
    train,
    train_by,
)
from zoo.errors import RecomputeError

pytestmark = pytest.mark.usefixtures("without_fork")

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
        return train_by(plain, model, rows, lambda call, model, x: forward(x), 2)

    assert_exact(program)


@pytest.mark.parametrize("kind", ["norm", "dropout"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_inside(kind: str) -> None:
    """pytorch#166926, anemoi-core#1330: a compiled block in a segment that is not."""

    def program(call: Call) -> Any:
        model = net(nn.BatchNorm1d(4) if kind == "norm" else nn.Dropout(0.4), nn.Linear(4, 4))
        forward = compiled(model, backend="aot_eager")
        return train_by(call, model, rows, lambda call, model, x: call(forward, x), 2)

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
    """a segment that cannot be compiled | its Python runs twice | runs uncompiled, or raises

    torch's checkpoint would run it, and count a batch twice, when the compiler gives up.
    """

    def program(call: Call) -> Any:
        model = Broken(kind)
        forward = compiled(lambda x: call(model, x), backend="aot_eager")
        return train_by(plain, model, rows, lambda call, model, x: forward(x), 2)

    assert_exact(program)


class Writing(nn.Module):
    """Reads memory that it, or what is around it, writes."""

    def __init__(self, writes: Callable[["Writing", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(4, 4), writes
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.scales = [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.writes(self, x)
        return self.linear((x - self.mean) * self.scales[0]).tanh().sin()


def moving_average(block: Writing, x: Tensor) -> Tensor:
    block.mean.lerp_(x.detach().mean(0), 0.1)
    return x


def decayed(block: Writing, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.linear.weight.mul_(0.9)
    return x


def views(block: Writing, x: Tensor) -> Tensor:
    torch._foreach_add_([block.mean[:2], block.scales[0][1:]], 0.5)
    return x


WRITES = [
    moving_average, decayed, views,
    lambda block, x: x.mul_(2),
    lambda block, x: torch.mul(x.detach()[0], 2, out=block.mean) * x,
    lambda block, x: block.mean.normal_() * x,
]  # fmt: skip


class Around(nn.Module):
    """A segment in a frame that is compiled, which may write before the segment."""

    def __init__(self, call: Call, block: nn.Module, write: float = 1) -> None:
        super().__init__()
        self.first, self.call, self.block, self.write = nn.Linear(4, 4), call, block, write

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.write != 1:
            self.block.mean.mul_(self.write)
        return self.call(self.block, x)


def assert_refused(make: Callable[[Call], nn.Module], backend: str, message: str) -> None:
    """Asserts that a graph is refused when it is compiled, and without it all is as uncompiled."""

    def program(call: Call) -> Any:
        model = make(call)
        forward = model if call is plain else compiled(model, backend=backend)
        return train_by(plain, model, rows, lambda call, model, x: forward(x), 2)

    assert_exact(program)
    torch._dynamo.reset()
    whole = compiled(make(zoo.recompute), backend=backend, fullgraph=True)
    with pytest.raises(RecomputeError, match=message):
        whole(*rows())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("writes", WRITES)
def test_a_compiled_segment_of_memory_that_is_written(writes: Any) -> None:
    """a compiled segment that writes what it reads | wrong gradients | uncompiled, or raises

    Its recomputation would read what was written; pytorch gives gradients of that.
    """
    assert_refused(
        lambda call: Around(call, Writing(writes)), "aot_eager", "reads .*, which the graph writes"
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_segment_of_memory_that_is_written_before() -> None:
    def make(call: Call) -> nn.Module:
        return Around(call, Writing(lambda block, x: x), 0.5)

    assert_refused(make, "aot_eager", r"reads self\.block\.mean, which the graph writes")


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_segment_of_a_compiler_that_runs_it_twice() -> None:
    """pytorch's backend "eager" counted each batch twice in a segment, and drew other numbers."""
    for block, message in (
        (
            nn.BatchNorm1d(4),
            r"writes self\.block\.num_batches_tracked, and by the compiler 'eager'",
        ),
        (nn.Dropout(0.4), "draws random numbers, and by the compiler 'eager'"),
    ):
        assert_refused(
            lambda call, block=block: Around(call, copy.deepcopy(block)), "eager", message
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_compiled_blocks_that_write_what_they_read() -> None:
    """The blocks stay compiled in a segment and in a model with a plan."""

    def program(call: Call) -> Any:
        block: Any = Writing(moving_average)
        block.forward = compiled(block.forward, backend="aot_eager")
        model = Around(call, block)
        return train_by(plain, model, rows, module, 2)

    assert_exact(program)


def test_an_exported_model() -> None:
    """pytorch PR#179021: torch.export in eval mode, with and without gradients around it."""
    baseline, model = (each.eval() for each in twins(convolution=True))
    (x,) = pictures()
    found = [torch.export.export(each, (x.detach(),)).module()(x) for each in (model, baseline)]
    assert torch.equal(*found)
    with torch.no_grad():
        exported = torch.export.export(model, (x.detach(),))
    assert torch.equal(exported.module()(x), baseline(x))


def test_a_traced_model() -> None:
    """pytorch#40912: torch.jit.trace in eval mode."""
    baseline, model = (each.eval() for each in twins(convolution=True))
    (x,) = pictures()
    with torch.no_grad():
        traced = torch.jit.trace(model, x.detach())
    assert torch.equal(traced(x), baseline(x))
    assert torch.equal(torch.jit.trace(model, x.detach())(x), baseline(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_scripted_module_in_a_segment(way: Way) -> None:
    """TorchScript in a segment | buffers updated twice | once

    Its buffers are not Python's; its code is called once, and its kernels are torch's.
    """

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
        found.append(train(graph, rows, 1))
    assert_same(found[1], found[0])


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
