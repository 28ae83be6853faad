"""The walk over a graph gives what autograd's engine gives, and lets go of what it has used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from zoo.profiling.autograd_interpreter import gradients_of


def tower() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    return model, (torch.rand(5, 4, requires_grad=True),)


class Unusual(nn.Module):
    """Sums, unused outputs, broadcasts, types that change, writes in place and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(3))
        self.bias = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, _ = torch.split(F.linear(x, self.weight), [1, 2, 1], 1)
        y = (a + b).double() * self.bias[:1]
        z = y.clone()
        z[:, 0] = 1
        return (z @ self.weight[:2].double()).float() + F.linear(x, self.weight) + self.bias


class Twice(torch.autograd.Function):
    """Two outputs of which one is not used, and a number among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.variable = "what a leaf's node has, too"
        return x * factor, y * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * y, None, gradients[1] + x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x, 3, self.weight.expand(5, 4))[0]


CASES: dict[str, Callable[[], Any]] = {
    "tower": tower,
    "unusual": lambda: (Unusual(), (torch.rand(5, 4, requires_grad=True),)),
    "custom function": lambda: (Custom(), (torch.rand(5, 4, requires_grad=True),)),
    "resnet18": lambda: (zoo.resnet18(), (torch.rand(2, 3, 32, 32),)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_engine(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    model.eval()
    leaves = [value for value in (*inputs, *model.parameters()) if value.requires_grad]
    expected = torch.autograd.grad(model(*inputs).square().sum(), leaves, allow_unused=True)
    walk = gradients_of([model(*inputs).square().sum()])
    found = {id(leaf): gradient for leaf, gradient in walk}
    for leaf, other in zip(leaves, expected, strict=True):
        one = found.get(id(leaf))
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
