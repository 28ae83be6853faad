"""Activation checkpointing (gradient checkpointing, rematerialization) without running code twice.

A segment is a range of a forward whose saved tensors are not kept. Its kernels are recorded below
autograd (`recording`) and replayed in the backward (`replay`) when the first of its saved tensors
is asked for (`saved`). The function itself runs once, as it is written: whatever it reads, writes,
counts, prints or draws happens once, as in plain training.

    forward   segment( a b c )          nodes of a, b, c; handles in the place of saved tensors
    backward  opens a handle of c   ->  a b c are replayed as far as the handles need, which all
                                        hold their tensors now; autograd frees each as it passes

A segment inside of a segment gives up its saved tensors a second time: the replay of the outer one
makes what the inner one starts from, and the inner one is replayed when the backward comes to it.

Under `torch.compile` torch's own checkpoint takes over; under `torch.func` the function just runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from zoo.engine.compiled import Never, run_compiled_segment, uncompiled
from zoo.engine.recording import Recorder, Segment, thread
from zoo.engine.saved import pack, prune, unpack
from zoo.errors import ArgumentError

Function = Callable[..., Any]
HOOKS = saved_tensors_hooks(pack, unpack)


def recompute(function: Function, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Calls `function(*args, **kwargs)` without keeping what it saves for the backward.

    A drop-in for `torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)` that is
    exact: outputs, gradients, running statistics and random streams are bit for bit those of the
    plain call. The function runs once; the backward replays the kernels that it called.

    Raises:
        ArgumentError: `use_reentrant=True`, whose forward goes without a graph.
        RecomputeError: in the backward, when an input or a parameter was changed in place since.
    """
    if use_reentrant:
        raise ArgumentError("use_reentrant=True cannot be exact; leave it out or pass False")
    if torch.compiler.is_compiling():
        return _recompute_compiled(function, args, kwargs)
    with segment():
        return function(*args, **kwargs)


def _recompute_compiled(function: Function, args: Any, kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return uncompiled(recompute)(function, *args, **kwargs)
    try:
        return run_compiled_segment(function, *args, **kwargs)
    except Never:
        raise


class segment:
    """Has what the block saves for the backward replayed there, in place of keeping it.

    A user's own hooks for saved tensors around the block get each tensor as in plain training, and
    keep what they return.
    """

    __slots__ = ("around", "part", "recorder")

    def __enter__(self) -> None:
        self.part: Segment | None = None
        # where another plan is in force, that is the one
        if not records() or thread.conductor is not None:
            return
        self.around = around = thread.segment
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is not None and hooks[0] is not pack:
            return
        self.part = part = Segment(around)
        if around is None:
            self.recorder = Recorder(part.recording)
            self.recorder.__enter__()  # type: ignore[no-untyped-call]
            HOOKS.__enter__()
        thread.segment = part

    def __exit__(self, *raised: object) -> None:
        part = self.part
        if part is None:
            return
        thread.segment = self.around
        part.close()
        if self.around is None:
            HOOKS.__exit__(*raised)
            self.recorder.__exit__(*raised)  # type: ignore[no-untyped-call]
            prune(part)


def records() -> bool:
    """Says whether a block that runs now saves something that can be replayed."""
    return torch.is_grad_enabled() and not is_transformed() and _hooks_are_allowed()


def _hooks_are_allowed() -> bool:
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def is_transformed() -> bool:
    """Says whether torch.func, forward-mode derivatives or a tracer are at work.

    The function then just runs, and nothing is saved.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def is_recomputing() -> bool:
    """Says whether kernels are being replayed on this thread."""
    return thread.replaying


@contextlib.contextmanager
def observed(observer: Callable[[], Any]) -> Iterator[None]:
    """Asks inside the block where each recorded kernel was called, for `origin` in its replay."""
    earlier, thread.observer = thread.observer, observer
    try:
        yield
    finally:
        thread.observer = earlier


def origin() -> Any:
    """Returns where the kernel was called that is replayed now; None where that is not known."""
    return thread.origin
