"""A comparison in each process that torchrun started, all at the same time, a report for each.

    torchrun --nproc-per-node 2 test_memory_optimized.py

Each process trains by itself and exchanges no gradients: what is compared is what a plan saves and
costs on each device while all are at work. Its results lie in a folder `rank0`, `rank1`, ... of
their own. The first process shows its progress; the words of the others come when all are done.
"""

import contextlib
import io
import os
from collections.abc import Callable, Sequence

import torch
from torch import distributed

from zoo.cli.plain_text import signs_replaced
from zoo.harness.config import load

Words = tuple[int, str]


def is_one_of_many() -> bool:
    """Says whether torchrun, or another launcher that speaks its language, started several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@signs_replaced()
def in_ranks(arguments: Sequence[str], program: str, run: Callable[[Sequence[str]], int]) -> int:
    """Runs a command in each process with a folder of its own; returns the largest exit code."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _choose_device(int(os.environ.get("LOCAL_RANK", rank)))
    distributed.init_process_group("gloo")
    try:
        said = io.StringIO()
        with contextlib.ExitStack() as quiet:
            if rank:
                quiet.enter_context(contextlib.redirect_stdout(said))
                quiet.enter_context(contextlib.redirect_stderr(said))
            else:
                print(f"rank 0 of {world}; each trains by itself, all at the same time", flush=True)
            code = run(_in_folder(arguments, program, rank))
        words: list[Words] = [(0, "")] * world
        distributed.all_gather_object(words, (code, said.getvalue()))
        if rank == 0:
            for number, (_, text) in list(enumerate(words))[1:]:
                print(f"\nrank {number} of {world}\n{text}", end="", flush=True)
        # a launcher ends all others as soon as one has failed
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return max(code for code, _ in words)


def _in_folder(arguments: Sequence[str], program: str, rank: int) -> list[str]:
    """Adds the folder for a rank's results, in that which the arguments name."""
    try:
        output = load([word for word in arguments if word != "--json"], program).output
    except BaseException:  # the command itself will say what is wrong
        return list(arguments)
    return [*arguments, "--output", os.path.join(output, f"rank{rank}")]


def _choose_device(local: int) -> None:
    """Leaves this process, and those that it starts, one of the devices that are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local % len(devices)]
