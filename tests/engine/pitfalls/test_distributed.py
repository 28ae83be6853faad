"""Two processes over gloo, started once: wrappers of torch and collectives in segments."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from tests.engine.pitfalls.program import (
    Call,
    Program,
    assert_exact,
    frozen,
    gradients,
    net,
    state_of,
)


class Model(nn.Module):
    """Two segments, of two blocks or of one block twice."""

    def __init__(self, call: Call, shared: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.call = call
        layer = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.first = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh())
        self.second = self.first if shared else net(nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Any:
        return self.call(self.second, self.call(self.first, x))


def batches() -> list[Tensor]:
    """Batches that differ between processes, drawn beside the default stream."""
    generator = torch.Generator().manual_seed(distributed.get_rank())
    return [torch.randn(5, 4, generator=generator).requires_grad_() for _ in range(3)]


def data_parallel(shared: bool, norm: bool, **options: Any) -> Program:
    def program(call: Call) -> Any:
        model = DistributedDataParallel(Model(call, shared, norm), **options)
        for x in batches():
            model(x).square().sum().backward()
        return state_of(model)["buffers"], gradients(model), [x.grad for x in batches()]

    return program


class SyncNorm(nn.Module):
    """What SyncBatchNorm does on GPUs: the mean of all processes, statistics, its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("running", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        mean = all_reduce(y.mean(0)) / distributed.get_world_size()
        self.running.mul_(0.9).add_(mean.detach(), alpha=0.1)
        return torch.tanh(y - mean)


def synchronized(call: Call) -> Any:
    model, inputs = SyncNorm(), batches()
    for x in inputs:
        call(model, x).square().sum().backward()
    return state_of(model), [x.grad for x in inputs]


def sharded(inside: bool) -> Program:
    def program(call: Call) -> Any:
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
        model = nn.Sequential(*(Inside(call, b) if inside else b for b in blocks))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        found = []
        for x in batches():
            y = model(x) if inside else call(model[1], call(model[0], x))
            y.square().sum().backward()
            found.append(frozen([y, x.grad]))
        return found, [frozen(p.grad.full_tensor()) for p in model.parameters()]

    return program


class Inside(nn.Module):
    """A block that runs its body as a segment."""

    def __init__(self, call: Call, body: nn.Module) -> None:
        super().__init__()
        self.call, self.body = call, body

    def forward(self, x: Tensor) -> Any:
        return self.call(self.body, x)


CHECKS: dict[str, Program] = {
    "default": data_parallel(False, False),
    "unused": data_parallel(False, False, find_unused_parameters=True),
    "static": data_parallel(False, False, static_graph=True),
    "shared": data_parallel(True, False),
    "shared static": data_parallel(True, False, static_graph=True),
    "norm": data_parallel(False, True),
    "synchronized": synchronized,
    "sharded inside": sharded(True),
    "sharded around": sharded(False),
}


def process(rank: int, folder: str) -> None:
    """Makes all checks and writes each one's failure, or nothing, to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        for name, program in CHECKS.items():
            Path(folder, f"{name} {rank}").write_text(failure_of(program))
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


def failure_of(program: Program) -> str:
    try:
        assert_exact(program)
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    folder = tmp_path_factory.mktemp("processes")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(process, (str(folder),), nprocs=2)
    return lambda name: [Path(folder, f"{name} {rank}").read_text() for rank in range(2)]


AROUND = pytest.param(
    "sharded around",
    marks=pytest.mark.xfail(
        strict=True, reason="FSDP2 gathers parameters into other storage, which is refused"
    ),
)


@pytest.mark.parametrize("name", [*(name for name in CHECKS if name != "sharded around"), AROUND])
def test_it_holds_in_each_of_two_processes(name: str, failures: Callable[[str], list[str]]) -> None:
    """By name: DDP default, with unused parameters (longformer#63, pytorch#24005,
    transformers#4659), with a static graph; one block twice (FocalNet#4, pytorch#24005); with
    BatchNorm (pytorch#96136); SyncBatchNorm's protocol (fairscale PR#694); FSDP2 with the segment
    inside of the sharded block and around it (pytorch#148831, pytorch#159359).
    """
    assert failures(name) == ["", ""]
