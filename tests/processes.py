"""Functions run by a group of processes over gloo, on the device that tests run on."""

import functools
import importlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import start_processes

from tests.accelerator import collectives, software

Failures = Callable[[str], list[str]]
# what the process that all others are forked from imports, once
IMPORTED = ["tests.groups", "tests.api.ranks"]


def failures_in(world: int, module: str, folder: Path, names: Sequence[str] = ()) -> Failures:
    """Makes the `CHECKS` of a module, or some, in each of `world` processes, started once.

    Returns a function from a check's name to its failures: a text per process, "" if it held.
    """
    results = results_in(world, functools.partial(_failures, module, names), folder)
    return lambda name: [failures[name] for failures in results]


def results_in(world: int, function: Callable[[], Any], folder: Path) -> list[Any]:
    """Returns what a function of a module returns in each of `world` processes."""
    device = torch.get_default_device().type
    arguments = world, function, str(folder), device
    multiprocessing.set_forkserver_preload(IMPORTED)
    start_processes(_process, arguments, nprocs=world, start_method="forkserver")
    return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]


def _process(rank: int, world: int, function: Callable[[], Any], folder: str, device: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder}/store"
    backend = _backend_of(device)
    distributed.init_process_group(backend, init_method=store, rank=rank, world_size=world)
    try:
        Path(folder, str(rank)).write_bytes(pickle.dumps(function()))
    finally:
        distributed.destroy_process_group()


def _backend_of(device: str) -> str:
    """Makes a device the default, as it is in the parent; returns the backend for it."""
    if device == "cpu":
        return "gloo"
    if device == software.NAME:
        software.register()
    torch.set_default_device(device)
    return collectives.register(device)


def _failures(module: str, names: Sequence[str]) -> dict[str, str]:
    failures, checks = {}, importlib.import_module(module).CHECKS
    for name in names or checks:
        failures[name] = _failure_of(checks[name])
        distributed.barrier()
    return failures


def _failure_of(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""
