"""A router whose bias follows the load of its experts: a second forward finds another bias."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import zoo


class Experts(nn.Module):
    """Sends each token to one expert, and favors those with few tokens (arXiv:2408.15664)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        shares, out = self.router(x).softmax(-1), torch.zeros_like(x)
        chosen = (shares + self.bias).argmax(-1)
        self.bias += 0.1 * (0.25 - torch.bincount(chosen, minlength=4) / len(chosen)).sign()
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            out[mine] = shares[mine, number, None] * expert(x[mine])
        return x + out


class Layers(nn.Module):
    """Three of them, each called by `run`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.run = nn.ModuleList(Experts() for _ in range(3)), run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


def trained(run: Callable[..., Tensor] = lambda layer, x: layer(x), **options: Any) -> list[Tensor]:
    """Returns gradients and biases after a backward."""
    model = zoo.checkpoint(Layers(run), **options)
    torch.manual_seed(1)
    model(torch.rand(64, 16, requires_grad=True)).square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers()]


def test_a_router_that_changes_as_it_goes_decides_once() -> None:
    """torch's checkpoint raises an error; its reentrant one is silently wrong."""
    expected = trained(checkpoint=False)
    assert all(map(torch.equal, trained(checkpoint="blocks"), expected))
    with pytest.raises(CheckpointError):
        trained(lambda layer, x: checkpoint(layer, x, use_reentrant=False), checkpoint=False)
    reentrant = trained(lambda layer, x: checkpoint(layer, x, use_reentrant=True), checkpoint=False)
    assert not all(map(torch.equal, reentrant, expected))
