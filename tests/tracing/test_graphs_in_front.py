"""A plan for a module leaves alone what made the module's inputs: nothing there runs once more."""

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zoo
from tests.training import assert_same, needs_numpy
from zoo._torch import FakeTensorMode

# torch 2.11 crashes where the first fake tensors of a process are made in a thread that ends
with FakeTensorMode():
    torch.empty(1)
T = TypeVar("T")
WIDTH = 8
# what the program in front was asked to do
calls: list[str] = []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        calls.append("backward")
        return gradient * 2


class Ignored(torch.autograd.Function):
    """Reads nothing of its input, so that no kernel shows where that comes from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ones(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def body(x: Tensor, weight: Tensor) -> Tensor:
    calls.append("forward")
    return torch.sin(x * weight)


def hooked(x: Tensor, weight: Tensor) -> Tensor:
    def unpack(tensor: Tensor) -> Tensor:
        calls.append("unpack")
        return tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        return body(x, weight)


def offloaded(x: Tensor, weight: Tensor) -> Tensor:
    with save_on_cpu():
        return body(x, weight)


def with_tensor_hook(x: Tensor, weight: Tensor) -> Tensor:
    y = body(x, weight)
    y.register_hook(lambda gradient: calls.append("hook"))
    return y


def in_a_thread(function: Callable[..., T], *args: Any) -> T:
    """Calls a function in a new thread, where autograd numbers its nodes from 0."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()


def of_another_thread(nodes: int, x: Tensor, weight: Tensor) -> Tensor:
    def run() -> Tensor:
        y = x
        for _ in range(nodes):
            y = y + weight
        return hooked(y, weight)

    return in_a_thread(run)


def written(x: Tensor, weight: Tensor) -> Tensor:
    y = hooked(x, weight)
    y[:2].mul_(2)
    return y


FRONTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "checkpoint": lambda *args: checkpoint(body, *args, use_reentrant=False),
    "reentrant checkpoint": lambda *args: checkpoint(body, *args, use_reentrant=True),
    "recompute": lambda *args: zoo.recompute(body, *args),
    "recompute of a recurrent cell": lambda x, w: zoo.recompute(
        torch.gru_cell, x, x * w, torch.ones(3 * WIDTH, WIDTH), torch.ones(3 * WIDTH, WIDTH)
    ),
    "save_on_cpu": offloaded,
    "hooks for saved tensors": hooked,
    "a tensor's hook": with_tensor_hook,
    "a function": lambda *args: Doubled.apply(body(*args)),
    "a compiled region": torch.compile(body, backend="aot_eager"),
    # of numbers that the planned forward has, too, and of later ones
    "another thread": functools.partial(of_another_thread, 5),
    "another, busier thread": functools.partial(of_another_thread, 500),
    "a write to a view": written,
}


def writer_of(view: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that writes a view of the program in front."""
    return lambda x: x + view.mul_(1.5)


WAYS: dict[str, Callable[[Tensor, Tensor], tuple[Any, Callable[[Any], Tensor]]]] = {
    "an argument": lambda x, y: (y, lambda y: y),
    "an object": lambda x, y: ({"deep": [y]}, lambda given: given["deep"][0]),
    "a closure": lambda x, y: (x, lambda x: x + y),
    "a view of a closure's": lambda x, y: (x, lambda x: x + y.t().t()),
    "a function that ignores it": lambda x, y: (x, lambda x: x + Ignored.apply(y)),
    "a write to an outer view": lambda x, y: (x, writer_of(y.view_as(y))),
    "a write inside": lambda x, y: (y, lambda y: y.view_as(y).mul_(1.5)),
}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        )

    def forward(self, given: Any, read: Callable[[Any], Tensor]) -> Tensor:
        return self.blocks(read(given))


class Inside(Head):
    """Has in its own forward what the program has in front of others."""

    def __init__(self, inner: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(WIDTH)), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.inner(x, self.scale))


def two_steps(make: Callable[[], nn.Module], option: Any) -> list[Any]:
    """Returns what a model called, and its gradients, in two steps; None is no plan."""
    torch.manual_seed(0)
    model, left = make(), list[Any]()
    if option is not None:
        zoo.checkpoint(model, option)
    for _ in range(2):
        calls.clear()
        model(torch.rand(5, WIDTH)).square().mean().backward()
        left += [[*calls], *(parameter.grad for parameter in model.parameters())]
        model.zero_grad()
    return left


def trained(*args: Any) -> list[Any]:
    """Returns gradients, and what the program in front was called for, of two steps."""
    return in_a_thread(_trained, *args)


def _trained(front: str, way: str, option: dict[str, Any] | None) -> list[Any]:
    torch.manual_seed(0)
    weight, head, left = nn.Parameter(torch.rand(WIDTH)), Head(), list[Any]()
    if option is not None:
        zoo.checkpoint(head, **option)
    for step in range(2):
        calls.clear()
        x = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(step))
        head(*WAYS[way](x, FRONTS[front](x, weight))).square().mean().backward()
        left += [[*calls], *(p.grad for p in (weight, *head.parameters()))]
        head.zero_grad(), setattr(weight, "grad", None)
    return left


CASES = [*itertools.product(FRONTS, WAYS)]
# nothing tells a node of another thread, with a number of the forward's own, that no kernel reads
CASES.remove(unknowable := ("another thread", "a function that ignores it"))
UNKNOWABLE = pytest.param(*unknowable, marks=pytest.mark.xfail(strict=True, reason="no kernel"))


@pytest.mark.parametrize("option", [{"checkpoint": True}, {"checkpoint": "blocks"}])
@pytest.mark.parametrize(("front", "way"), [*CASES, UNKNOWABLE])
def test_nothing_in_front_is_called_for_a_plan(
    front: str, way: str, option: dict[str, Any], without_fork: None
) -> None:
    assert_same(trained(front, way, option), trained(front, way, None))


@pytest.mark.parametrize("inner", ["checkpoint", "hooks for saved tensors"])
def test_hooks_inside_are_not_called_for_a_plan(inner: str, without_fork: None) -> None:
    def make() -> nn.Module:
        return Inside(FRONTS[inner])

    assert_same(two_steps(make, True), two_steps(make, None))


@needs_numpy
@pytest.mark.parametrize("front", ["checkpoint", "hooks for saved tensors", "another thread"])
def test_nothing_in_front_is_called_for_a_plan_ahead(front: str, without_fork: None) -> None:
    option = {"memory_budget": "1GiB", "optimizer": "sgd"}
    assert_same(trained(front, "a closure", option), trained(front, "a closure", None))


def segment() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    return layer, zoo.recompute(lambda x: torch.tanh(layer(x)).sin().sum(), torch.rand(2, WIDTH))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_segment_is_not_replayed_in_a_mode_that_makes_fakes() -> None:
    layer, loss = segment()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(zoo.RecomputeError, match=r"runs in a FakeTensorMode.* ran outside of it"),
    ):
        loss.backward(retain_graph=True)
    assert layer.weight.grad is None
    loss.backward()
    other, expected = segment()
    expected.backward()
    assert_same(layer.weight.grad, other.weight.grad)


def test_a_segment_is_replayed_in_a_mode_that_only_looks() -> None:
    (layer, loss), (other, expected) = segment(), segment()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    expected.backward()
    assert counter.get_total_flops() > 0
    assert_same(layer.weight.grad, other.weight.grad)


def test_a_backward_that_fails_on_fakes_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("not on fakes")

    monkeypatch.setattr("zoo.profiling.step_recorder.StepRecorder._on_node", fails)
    expected = trained("checkpoint", "an argument", None)
    assert_same(trained("checkpoint", "an argument", {"checkpoint": True}), expected)
    assert "runs block by block" in caplog.text
    assert "ValueError: not on fakes" in caplog.text


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("option", [True, "blocks"])
def test_a_sparse_matrix_made_of_a_parameter(option: Any) -> None:
    assert_same(two_steps(Graph, option), two_steps(Graph, None))


class Graph(nn.Module):
    """A graph convolution with learned weights of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([[0, 1, 2, 4], [1, 2, 3, 0]])
        for layer in self.layers:
            matrix = torch.sparse_coo_tensor(places, self.edges, (5, 5), check_invariants=False)
            x = torch.tanh(layer(torch.sparse.mm(matrix, x)))
        return x


def blocks(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH)) for _ in range(3)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("option", [True, "blocks"])
def test_two_planned_modules_in_one_that_the_compiler_gives_up(option: Any) -> None:
    def make(option: Any) -> Any:
        torch.compiler.reset()
        # by this backend no segment may write statistics, so that its frames run as they are
        both = nn.Sequential(blocks(nn.LayerNorm), blocks(nn.BatchNorm1d))
        if option is not None:
            for module in both:
                zoo.checkpoint(module, option)
        return torch.compile(both, backend="eager")

    expected = two_steps(lambda: make(None), None)
    assert_same(two_steps(lambda: make(option), None), expected)
