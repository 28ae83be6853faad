"""Two processes over gloo: what is exact in one is exact in a group."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from zoo.engine.recompute import recompute

collectives: list[int] = []


class SharedNorm(nn.Module):
    """Normalizes by the mean of all processes, which takes a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.tanh(y - _mean_of_all(y.detach().mean(0)))


def _mean_of_all(mean: Tensor) -> Tensor:
    collectives.append(1)
    distributed.all_reduce(mean)
    return mean / distributed.get_world_size()


def _gradients(rank: int, checkpoint: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = zoo.resnet18(checkpoint=checkpoint, classes=3)
    model = DistributedDataParallel(net, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        model(torch.rand(2, 3, 32, 32, generator=generator)).square().sum().backward()
    return [*(parameter.grad for parameter in net.parameters()), *net.buffers()]


def _data_parallel(rank: int) -> None:
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        expected, found = _gradients(rank, False, **options), _gradients(rank, 3, **options)
        assert all(map(torch.equal, expected, found)), options


def _one_collective(rank: int) -> None:
    torch.manual_seed(0)
    model = SharedNorm()
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    found = torch.autograd.grad(recompute(model, x).square().sum(), [x, *model.parameters()])
    assert all(map(torch.equal, expected, found))
    assert len(collectives) == 2


def _process(rank: int, check: Callable[[int], None], store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        check(rank)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("check", [_data_parallel, _one_collective])
def test_it_holds_in_each_of_two_processes(check: Callable[[int], None], tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(_process, (check, str(tmp_path / "store")), nprocs=2)
