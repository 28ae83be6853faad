"""Checks in a group of processes over gloo, which are started once for all of them."""

import importlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, multiprocessing

Failures = Callable[[str], list[str]]


def failures_in(world: int, module: str, folder: Path) -> Failures:
    """Makes the `CHECKS` of a module in each of `world` processes.

    Returns what names a check's failures: one for each process, empty where it held.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(_process, (world, module, str(folder)), nprocs=world)
    return lambda name: [Path(folder, f"{name} {rank}").read_text() for rank in range(world)]


def _process(rank: int, world: int, module: str, folder: str) -> None:
    """Makes all checks and writes each one's failure, or nothing, to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        for name, check in importlib.import_module(module).CHECKS.items():
            Path(folder, f"{name} {rank}").write_text(_failure_of(check))
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _failure_of(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""
