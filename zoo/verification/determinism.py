"""Trains by torch's deterministic algorithms, for models that do not repeat their own numbers.

A kernel that adds by atomic operations rounds differently each time, so that two trainings without
any plan differ, and nothing can be compared bit for bit. No single setting of torch prevents that:

    use_deterministic_algorithms   other kernels; an operator that has none raises
    cudnn.benchmark                off: it chooses among kernels by measured time
    CUBLAS_WORKSPACE_CONFIG        for cuDNN's LSTM and GRU, as torch's page on nn.LSTM says; other
                                   products repeat themselves without it (pytorch#161749). A
                                   process reads it only once

torch's mode that warns does not suffice: there attention on CUDA keeps its kernels whose gradients
do not repeat themselves.
"""

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from zoo._torch import CUDA_SETTINGS, compiler_settings
from zoo.errors import DeterminismError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# values with which cuBLAS is deterministic
WORKSPACES = (":4096:8", ":16:8")
# how to read and to write what cuDNN chooses by
CUDNN = CUDA_SETTINGS["cudnn_benchmark"], CUDA_SETTINGS["cudnn_deterministic"]
REFUSAL = re.compile(r"([^:]+) does not have a deterministic implementation")


@contextlib.contextmanager
def deterministic_algorithms(wanted: bool = True) -> Iterator[None]:
    """Makes torch use deterministic algorithms inside the block, if wanted; restores all settings.

    Whether torch then fills uninitialized memory, its default, is not changed.

    Raises:
        DeterminismError: torch has none for an operator in the block.
    """
    if not wanted:
        yield
        return
    compiler, workspace = compiler_settings(), os.environ.get(CUBLAS)
    mode, compiled = torch.get_deterministic_debug_mode(), compiler.deterministic
    # torch.backends.cudnn refuses to be set where torch.testing has frozen it
    (has_benchmark, set_benchmark), (is_deterministic, set_deterministic) = CUDNN
    flags = has_benchmark(), is_deterministic()
    try:
        torch.use_deterministic_algorithms(True)
        set_benchmark(False)
        set_deterministic(True)
        if workspace not in WORKSPACES:
            os.environ[CUBLAS] = WORKSPACES[0]
        yield
    except Exception as error:
        if (reason := _refusal(error)) is not None:
            raise DeterminismError(reason) from error
        raise
    finally:
        torch.set_deterministic_debug_mode(mode)
        compiler.deterministic = compiled
        set_benchmark(flags[0])
        set_deterministic(flags[1])
        if workspace is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = workspace


def _refusal(error: BaseException | None) -> str | None:
    """Words torch's refusal in deterministic mode; None for any other error."""
    while error is not None:
        if match := REFUSAL.search(str(error)):
            return (
                f"torch has no deterministic algorithm for {match[1].strip()}, which "
                "deterministic=True (--deterministic) needs: leave that out, or have the model "
                "compute this by another operator"
            )
        error = error.__cause__
    return None
