"""Segments inside a graph that `torch.compile` makes: there torch's own checkpoint is exact."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from zoo.errors import RecomputeError

Function = Callable[..., Any]


class Never(Exception):
    """Is never raised.

    A frame with a `try` is compiled whole or not at all. Otherwise a segment that cannot be
    compiled would run by torch's checkpoint, which is not exact.
    """


def is_exporting() -> bool:
    """Says whether `torch.export` is at work.

    Asked by `torch.compiler.is_exporting()`, the compiler of torch 2.11 answers yes in each graph.
    """
    return torch.compiler._is_exporting_flag


def run_compiled_segment(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Calls a function as a segment of a graph, in a frame that is compiled whole.

    Raises:
        RecomputeError: there is no graph.
    """
    inner = functools.partial(_compiled_only, function)
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def uncompiled(function: Function) -> Function:
    """Returns a function that runs as it is where the compiler gave up the frame that calls it.

    Without it parts of first runs are compiled, but not of their second runs.
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def _compiled_only(function: Function, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        raise RecomputeError(
            "torch.compile did not compile a segment and runs it by torch's checkpoint, which is "
            "not exact. Compile the parts of the model, not the model."
        )
    return function(*args, **kwargs)
