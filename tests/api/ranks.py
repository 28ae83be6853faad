"""Models that `test_ranks` trains in processes, and what a rank then takes."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.tracing.models import Net
from zoo.profiling import isolation
from zoo.profiling.timeline import CATEGORIES, Timeline


def shard(model: Any) -> None:
    """Shards as a user writes it."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def split(model: Any) -> None:
    """Spreads the products of each block."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    ways = {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, ways)


# name: (builds the model, its inputs)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "gpt2": (
        lambda: zoo.gpt2_small(width=64, depth=1, heads=2, vocabulary=99, positions=32),
        lambda: (torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4, 32, dtype=torch.int64)),
    ),
    "net": (functools.partial(Net, 16, blocks=2), lambda: (torch.zeros(4, 4, 16, 16),)),
}
IN_BACKWARD = "fsdp2, optimizer in the backward"
WAYS: dict[str, Callable[[Any], Any]] = {
    "fsdp2": shard,
    IN_BACKWARD: shard,
    "tensor parallel": split,
}
# by how many processes
CASES = {
    2: [("gpt2", "fsdp2"), ("gpt2", IN_BACKWARD), ("gpt2", "tensor parallel"), ("net", "ddp")],
    4: [("net", "fsdp2"), ("gpt2", "ddp")],
}
Asked = tuple[str, str, zoo.Plan | bool]


def peaks(asked: list[Asked]) -> list[int]:
    """Trains models by plans and returns the bytes of each one's step on this rank.

    In this process, which ends with them, a step is traced without a fork: that takes half the
    time.
    """
    isolation.can_fork = lambda: False
    return [peak_of(*case) for case in asked]


def peak_of(name: str, way: str, plan: zoo.Plan | bool) -> int:
    """Trains a model on this rank; its fourth step is like all that follow.

    The first step of a sharded model calls other kernels than the second, by which it is traced. Of
    the fourth to sixth step the least counts: on a busy machine a thread of gloo's may hold a
    tensor longer.
    """
    build, inputs = MODELS[name]
    model, given = build(), inputs()
    zoo.checkpoint(model, plan)
    run = DistributedDataParallel(model) if way == "ddp" else model
    if way in WAYS:
        WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters())
    if way == IN_BACKWARD:
        zoo.optimizer_in_backward(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        outputs = run(*given)
        (outputs if outputs.ndim == 0 else outputs.mean()).backward()
        optimizer.step()

    for _ in range(3):
        step()
    peaks = []
    for _ in range(3):
        with zoo.track(model, optimizer=optimizer, inputs=given) as timeline:
            step()
        # gloo sums the buckets of "ddp" where they lie
        peaks.append(
            timeline.peak if way == "ddp" else known(timeline) + sum(x.nbytes for x in given)
        )
    return min(peaks)


def known(timeline: Timeline) -> int:
    """Returns the peak without what gloo copies: unknown tensors, which count as inputs."""
    return max(
        timeline.total(name for name in CATEGORIES if name not in ("inputs", "kernel workspace"))
    )
