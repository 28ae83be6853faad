"""One of zoo's models inside of any other module: planned for as alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import real_peak
from zoo.api.plan import planner_for
from zoo.models.densenet import DenseNet
from zoo.policy.budget import StepPlanner

pytestmark = pytest.mark.usefixtures("without_fork")

pytest.importorskip("numpy", reason="planning for a budget needs NumPy")

TOKENS = torch.arange(64).view(4, 16)
GPT2: dict[str, Any] = {
    "depth": 2, "width": 64, "heads": 2, "vocabulary": 3000, "chunk_tokens": 16
}  # fmt: skip
LSTM: dict[str, Any] = {"vocabulary": 3000, "embedding": 32, "hidden": 32, "chunk_steps": 8}


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


class Listed(nn.Module):
    """A trainer's module, which has its model in a list and calls it by a method."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList([model])

    def forward(self, *inputs: Any) -> Any:
        return self.all_of(inputs)

    def all_of(self, inputs: Any) -> Any:
        (outputs,) = [model(*inputs) for model in self.models]
        return outputs


def mean_of(outputs: Any) -> Tensor:
    found = outputs[0] if isinstance(outputs, tuple) else outputs
    return found.float().mean()  # type: ignore[no-any-return]


def planned(model: nn.Module, inputs: Any, **options: Any) -> StepPlanner:
    make: Any = torch.optim.SGD
    return planner_for(model, inputs, loss=mean_of, optimizer=make, **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "resnet18": (lambda: zoo.resnet18(classes=5), (torch.rand(2, 3, 64, 64),)),
    "densenet": (lambda: DenseNet(8, (2, 3), 16), (torch.rand(4, 3, 32, 32),)),
    "vnet": (lambda: zoo.vnet(width=4), (torch.rand(2, 1, 16, 16, 16),)),
    "vit": (lambda: zoo.vit_tiny_patch16(depth=2), (torch.rand(2, 3, 224, 224),)),
    "gpt2": (lambda: zoo.gpt2_small(**GPT2), (TOKENS, TOKENS)),
    "gpt2 fused": (lambda: zoo.gpt2_small(head="fused", **GPT2), (TOKENS, TOKENS)),
    "gpt2 plain": (lambda: zoo.gpt2_small(head="plain", **GPT2), (TOKENS, TOKENS)),
    "lstm": (lambda: zoo.lstm(**LSTM), (TOKENS.t(), None, TOKENS.t())),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_step_costs_what_it_costs_in_the_model_alone(name: str) -> None:
    """So that every plan for the one is that of the other, and takes the same bytes."""
    build, inputs = MODELS[name]
    wrap = Listed if name == "gpt2" else Wrapped
    alone, inside = (planned(m, inputs, device="a100").step for m in (build(), wrap(build())))
    assert len(alone.costs_with_gradients) > 20
    assert inside.fixed == alone.fixed
    assert inside.costs_with_gradients == alone.costs_with_gradients
    in_backward = (step.in_backward().costs_with_gradients for step in (inside, alone))
    assert next(in_backward) == next(in_backward) != alone.costs_with_gradients


@pytest.mark.parametrize("name", ["gpt2", "lstm"])
def test_a_real_step_takes_what_is_predicted(name: str) -> None:
    build, inputs = MODELS[name]
    planner = planned(Wrapped(build()), inputs)
    for point in planner.points[0], planner.points[-1]:
        plan = planner.step.of_model(point).plan
        taken = [
            real_peak(model, inputs, torch.optim.SGD, mean_of, plan=plan)
            for model in (build(), Wrapped(build()))
        ]
        assert taken[0] == taken[1]
        assert 0.985 * point.peak <= taken[1] <= 1.0005 * point.peak


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Counted.calls += 1
        (x,) = ctx.saved_tensors
        ctx.was_called = not hasattr(ctx, "was_called")
        assert ctx.was_called
        return gradients[0] * x.cos()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Counted.apply(layer(x))  # type: ignore[no-untyped-call]
        return x


def test_a_real_step_calls_each_backward_once() -> None:
    torch.manual_seed(0)
    model, x = Counting(), torch.rand(4, 8)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    zoo.checkpoint(model)
    Counted.calls = 0
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    assert Counted.calls == 6
    assert zoo.plan_of(model) is not None
