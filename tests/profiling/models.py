"""A model whose saved tensors are easily counted, for tests of traced and of tracked steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.api.checkpoint import outline_of
from zoo.invocation import Invocation
from zoo.policy.training_step import Profile

KIB = 1024


class Exponentials(nn.Module):
    """`count` exponentials in a row of a weight of 16 KiB: each saves its result."""

    def __init__(self, count=3):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 * KIB))
        self.register_buffer("offset", torch.zeros(KIB // 2))
        self.count = count

    def forward(self):
        value = self.weight
        for _ in range(self.count):
            value = value.exp()
        return value


def profile(model: nn.Module, *inputs: Tensor) -> Profile:
    return Profile(model, outline_of(model, Invocation(inputs)))


class Repeated(nn.Module):
    """Applies functions in turn, those that are modules as modules of its own."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList(one for one in functions if isinstance(one, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x
