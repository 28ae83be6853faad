"""Two processes over gloo, started once: wrappers of torch and collectives in segments."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.processes import Failures, failures_in
from tests.training import (
    Call,
    Program,
    assert_exact,
    frozen,
    gradients,
    net,
    plain,
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
        return frozen(dict(model.named_buffers())), gradients(model), [x.grad for x in batches()]

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


calls = {"of blocks": 0}


class Block(nn.Module):
    """Has running statistics, dropout, counters; runs its body as a segment or in one."""

    def __init__(self, call: Call = plain) -> None:
        super().__init__()
        self.call, self.calls = call, 0
        self.scale = nn.Parameter(torch.ones(4))
        middle = [nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3)]
        self.body = nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        calls["of blocks"] += 1
        return self.call(self.body, x) * self.scale / (self.calls + calls["of blocks"])


class Blocks(nn.Module):
    """Two sharded blocks, run by whatever function it is called with."""

    def __init__(self, call: Call = plain) -> None:
        super().__init__()
        blocks = Block(call), Block(call)
        self.first, self.second = (fully_shard(b, reshard_after_forward=True) for b in blocks)

    def forward(self, function: Any, x: Tensor) -> Any:
        return function(self, x)


def inside(call: Call) -> Any:
    return train_sharded(Blocks(call), lambda model, x: model.second(model.first(x)))


def around(call: Call) -> Any:
    return train_sharded(Blocks(), lambda model, x: call(model.second, call(model.first, x)))


def around_more(call: Call) -> Any:
    """What follows a block in its segment has its backward first."""

    def function(model: Any, x: Tensor) -> Any:
        y = call(lambda x: model.first(x).sin().exp(), x)
        return call(lambda x: model.second(x).sin().exp(), y)

    return train_sharded(Blocks(), function)


def around_all(call: Call) -> Any:
    """The root, with the segments of its blocks inside."""
    model = fully_shard(Blocks())

    def blocks(model: Any, x: Tensor) -> Any:
        return call(model.second, call(model.first, x))

    return train_sharded(model, lambda model, x: call(model, blocks, x).sin())


def around_half(call: Call) -> Any:
    """Every second step has no backward through the second block, nor is there a root."""
    kept: list[Tensor] = []

    def function(model: Any, x: Tensor) -> Any:
        y, z = call(lambda x: (model.first(x).sin().exp(), model.second(x)), x)
        kept.append(z)
        return y + z if len(kept) % 2 else y

    return train_sharded(Blocks(), function)


def train_sharded(model: Any, function: Callable[[Any, Tensor], Any]) -> Any:
    """Trains and returns outputs, gradients and what is left of the model."""
    calls["of blocks"] = 0
    shards, found = list(model.parameters()), []
    optimizer = torch.optim.SGD(shards, 0.02, 0.9)
    for x in batches():
        y = function(model, x)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found.append(frozen([y, x.grad, dict(model.named_buffers())]))
        blocks = model.first, model.second
        found += [[b.calls, b._get_fsdp_state()._training_state.name] for b in blocks]
    return found, [frozen(shard.full_tensor()) for shard in shards]


def stepped_early() -> None:
    """The optimizer steps between two backwards; FSDP2 gathers the new parameters unasked."""
    model, (x, *_) = fully_shard(Block()), batches()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
    y = zoo.recompute(model, x).sum()
    y.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(zoo.RecomputeError, match=r"was changed in place|has other numbers"):
        y.backward()


def of_old(call: Call) -> Any:
    model = FullyShardedDataParallel(net(nn.Dropout(0.3)), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
    for x in batches():
        call(model, x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [frozen(parameter) for parameter in model.parameters()], [x.grad for x in batches()]


def pipeline(schedule: Any, count: int) -> Program:
    """Stages that torch's schedule runs on micro-batches, some with parts of their backward."""

    def program(call: Call) -> Any:
        calls["of blocks"] = 0
        rank, world = distributed.get_rank(), distributed.get_world_size()
        parts = [Block(call) for _ in range(count)]
        own = range(rank, count, world)
        stages = [PipelineStage(parts[n], n, count, torch.device("cpu")) for n in own]
        run = schedule(
            stages if len(stages) > 1 else stages[0], n_microbatches=4, loss_fn=F.mse_loss
        )
        losses: list[Tensor] = []
        for batch in torch.rand(3, 8, 4):
            last = {"target": batch.sin(), "losses": losses} if count - 1 in own else {}
            run.step(*[batch] * (0 in own), **last)
        return losses, [[gradients(parts[n]), frozen(dict(parts[n].named_buffers()))] for n in own]

    return program


EXACT: dict[str, Program] = {
    "default": data_parallel(False, False),
    "unused": data_parallel(False, False, find_unused_parameters=True),
    "static": data_parallel(False, False, static_graph=True),
    "shared": data_parallel(True, False),
    "shared static": data_parallel(True, False, static_graph=True),
    "norm": data_parallel(False, True),
    "synchronized": synchronized,
    "sharded inside": inside,
    "sharded around": around,
    "sharded and more": around_more,
    "sharded all": around_all,
    "sharded half": around_half,
    "sharded by FSDP1": of_old,
    "pipeline": pipeline(Schedule1F1B, 2),
    "pipeline of parts of a backward": pipeline(ScheduleInterleavedZeroBubble, 4),
}
CHECKS: dict[str, Callable[[], None]] = {"stepped early": stepped_early} | {
    name: functools.partial(assert_exact, program) for name, program in EXACT.items()
}


DIFFERS = pytest.mark.skipif(
    torch.__version__ < (2, 14),
    reason="before torch 2.14 two runs of the baseline differ: a pipeline infers shapes by a run "
    "on memory that nobody wrote, whose numbers stay in the statistics of norms",
)
NAMES = [
    pytest.param(name, marks=DIFFERS if name.startswith("pipeline") else ()) for name in CHECKS
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Failures:
    return failures_in(2, __name__, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_in_each_of_two_processes(name: str, failures: Failures) -> None:
    """DDP with BatchNorm | statistics updated twice | once
    SyncBatchNorm, other collectives | communicate again on every rank | results are kept
    FSDP2, a segment in or around a block | exact | exact
    FSDP1, whose weights are new tensors each time | exact | exact

    By name: DDP default, with unused parameters (longformer#63, pytorch#24005,
    transformers#4659), with a static graph; one block twice (FocalNet#4, pytorch#24005); with
    BatchNorm (pytorch#96136); SyncBatchNorm's protocol (fairscale PR#694); FSDP2 with the segment
    inside of the sharded block and around it (pytorch#148831, pytorch#159359).
    """
    assert failures(name) == ["", ""]
