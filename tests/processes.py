"""Functions run by a group of processes over gloo."""

import functools
import importlib
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

Failures = Callable[[str], list[str]]


def failures_in(world: int, module: str, folder: Path) -> Failures:
    """Makes the `CHECKS` of a module in each of `world` processes, which are started once.

    Returns what names a check's failures: one for each process, empty where it held.
    """
    found = results_in(world, functools.partial(_failures, module), folder)
    return lambda name: [failures[name] for failures in found]


def results_in(world: int, function: Callable[[], Any], folder: Path) -> list[Any]:
    """Returns what a function of a module returns in each of `world` processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(_process, (world, function, str(folder)), nprocs=world)
    return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]


def _process(rank: int, world: int, function: Callable[[], Any], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        Path(folder, str(rank)).write_bytes(pickle.dumps(function()))
    finally:
        distributed.destroy_process_group()


def _failures(module: str) -> dict[str, str]:
    found = {}
    for name, check in importlib.import_module(module).CHECKS.items():
        found[name] = _failure_of(check)
        distributed.barrier()
    return found


def _failure_of(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""
