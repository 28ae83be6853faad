"""Collectives of an accelerator for `torch.distributed`: those of gloo, on copies in host memory.

torch has no backend for the software accelerator, and NCCL wants a GPU for each process. What is
asked for here is done when the call returns.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    Backend,
    ProcessGroupGloo,
    Store,
    Work,
    _create_work_from_future,
)
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "gloo_on_copies"


def missing() -> str | None:
    """Says what keeps processes from sharing an accelerator here; None where nothing does."""
    try:
        Backend(0, 1)
    except TypeError:
        return f"in torch {torch.__version__} Python makes no backend of collectives; 2.13 can"
    return None


def on_copies(name: str) -> Callable[..., Work]:
    """Makes the collective of a name, which writes into its first argument."""

    def collective(self: "GlooOnCopies", written: Any, *rest: Any) -> Work:
        copies = tree_map_only(Tensor, Tensor.cpu, [written, *rest])
        getattr(self.gloo, name)(*copies).wait()
        tensors = tree_leaves(written)
        for tensor, copy in zip(tensors, tree_leaves(copies[0]), strict=True):
            # like other backends it counts no version of what it writes
            tensor.data.copy_(copy)
        return done(written, tensors[0].device)

    return collective


def done(result: Any, *devices: torch.device) -> Work:
    future: Future[Any] = Future(devices=devices)
    future.set_result(result)
    return _create_work_from_future(future)


class GlooOnCopies(Backend):
    """What DistributedDataParallel, FSDP2, tensor parallelism and a pipeline ask of a backend."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = ProcessGroupGloo(store, rank, size, timeout)

    allreduce = on_copies("allreduce")
    broadcast = on_copies("broadcast")
    reduce = on_copies("reduce")
    allgather = on_copies("allgather")
    all_gather_single = on_copies("all_gather_single")
    all_gather_single_coalesced = on_copies("all_gather_single_coalesced")
    reduce_scatter_single = on_copies("reduce_scatter_single")
    reduce_scatter_single_coalesced = on_copies("reduce_scatter_single_coalesced")
    scatter = on_copies("scatter")
    send = on_copies("send")
    recv = on_copies("recv")

    def barrier(self, options: Any) -> Work:
        self.gloo.barrier().wait()
        return done(None)

    def getBackendName(self) -> str:
        return NAME


def register(device: str) -> str:
    """Registers the backend for a device; returns what names it, beside gloo for the CPU."""
    distributed.Backend.register_backend(NAME, GlooOnCopies, devices=[device])
    return f"cpu:gloo,{device}:{NAME}"
