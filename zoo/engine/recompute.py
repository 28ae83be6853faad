"""Activation checkpointing (gradient checkpointing, rematerialization) without running code twice.

A segment is a range of a forward whose saved tensors are not kept. Its kernels are recorded below
autograd (`recording`) and replayed in the backward (`replay`) when the first of its saved tensors
is unpacked (`saved_tensors`). The function itself runs once, as it is written: whatever it reads,
writes, counts, prints or draws happens once, as in the baseline. Here a block is one segment;
`kernel_segments` opens and closes those of a plan.

    forward   segment( a b c )          kernels of a, b, c recorded; handles for saved tensors
    backward  opens a handle of c   ->  a b c are replayed as far as the handles need, which all
                                        hold their tensors now; autograd frees each as it passes

A segment inside of a segment gives up its saved tensors a second time: the replay of the outer one
makes what the inner one starts from, and the inner one is replayed when the backward comes to it.

Under `torch.compile` torch's own checkpoint takes over; under `torch.func` the function just runs.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from zoo._torch import (
    Args,
    Kwargs,
    are_functorch_transforms_active,
    are_saved_tensors_hooks_enabled,
    compile_time,
    compiler_callback,
    dispatch_modes,
    is_tracing,
    top_saved_tensors_hooks,
    watch_hooks_of_saved_tensors,
    wrap_jit_traces,
)
from zoo.engine.compiled_segments import check_graph_of
from zoo.engine.devices import release_draws
from zoo.engine.recorder import Recorder, out_of_segments
from zoo.engine.saved_tensors import pack, prune, refuse_hooks, unpack
from zoo.engine.segments import Segment, thread
from zoo.errors import ArgumentError, RecomputeError

_log = logging.getLogger("zoo")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
HOOKS = saved_tensors_hooks(pack, unpack)


def _pause_hooks() -> None:
    """Removes zoo's hooks when a program is about to disable all: what follows is kept.

    `torch.func.grad` and its like do so, and raise where hooks are active.
    """
    while (hooks := top_saved_tensors_hooks(False)) is not None and _is_of_zoo(hooks[0]):
        thread.paused = (*thread.paused, hooks)
        HOOKS.__exit__()


def _resume_hooks() -> None:
    """Restores zoo's hooks when the program enables hooks again."""
    paused, thread.paused = thread.paused, ()
    for hooks in reversed(paused):
        saved_tensors_hooks(*hooks).__enter__()


def _is_of_zoo(function: object) -> bool:
    # or the hook of a step logger around it
    return function is pack or str(getattr(function, "__module__", "")).startswith("zoo.")


watch_hooks_of_saved_tensors(_pause_hooks, _resume_hooks, refuse_hooks)
wrap_jit_traces(out_of_segments())


def recompute(
    function: Callable[..., T], *args: Any, use_reentrant: bool = False, **kwargs: Any
) -> T:
    """Calls `function(*args, **kwargs)` without keeping what it saves for the backward.

    A drop-in for `torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)` that is
    exact: outputs, gradients, running statistics and random streams are bit for bit those of the
    plain call. The function runs once; the backward replays the kernels that it called. A few
    functions are equal up to rounding only: docs/exactness.md lists them.

    Raises:
        ArgumentError: `use_reentrant=True`, whose forward goes without a graph.
        RecomputeError: in the backward, when an input or a parameter was changed in place since; in
            the forward, for `torch.linalg.pinv` under autocast.
    """
    if use_reentrant:
        raise ArgumentError("use_reentrant=True cannot be exact; leave it out or pass False")
    if torch.compiler.is_compiling():
        return _recompute_compiled(function, args, kwargs)
    if compiler_callback() is not None:
        # the compiler gave up the frame that calls this, and is to leave the engine alone
        return uncompiled(recompute)(function, *args, **kwargs)
    return segment().run(function, *args, **kwargs)


def _recompute_compiled(function: Callable[..., T], args: Args, kwargs: Kwargs) -> T:
    if not torch.compiler.is_compiling():
        return uncompiled(recompute)(function, *args, **kwargs)
    try:
        return run_compiled_segment(function, *args, **kwargs)
    except NeverRaised:
        raise


class NeverRaised(Exception):
    """Never raised: `torch.compile` compiles a frame with a `try` whole or not at all.

    Otherwise a segment that cannot be compiled would run by torch's checkpoint, not exactly.
    """


def run_compiled_segment(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function as a segment of a graph, in a frame that is compiled whole.

    Raises:
        RecomputeError: torch did not compile it; while compiling, if the graph writes memory that
            the segment reads.
    """
    compile_time()(check_graph_of)
    inner = functools.partial(_compiled_only, function)
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def _compiled_only(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    if not torch.compiler.is_compiling():
        raise RecomputeError(
            "torch.compile did not compile a segment and runs it by torch's checkpoint, which is "
            "not exact. Compile the parts of the model, not the model."
        )
    return function(*args, **kwargs)


def uncompiled(function: F) -> F:
    """Returns a function that the compiler leaves alone, for a frame that it has given up."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class _Recorders(threading.local):
    """This thread's recorder, which records one segment after the other."""

    def __init__(self) -> None:
        self.mode = Recorder()


recorders = _Recorders()


class segment:
    """A block whose saved tensors are not kept but replayed in the backward.

    Inside of a user's own saved-tensor hooks there is no segment, which is said once: they get each
    tensor as in the baseline, and decide what is kept.
    """

    __slots__ = ("part",)

    def __init__(self) -> None:
        self.part: Segment | None = None

    def run(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Calls a function; restores the thread's state even after an interrupt."""
        try:
            with self:
                return function(*args, **kwargs)
        finally:
            self._leave()

    def __enter__(self) -> None:
        # a plan in force has segments of its own
        if not records() or thread.conductor is not None:
            return
        hooks = top_saved_tensors_hooks(False)
        if hooks is not None and not _is_of_zoo(hooks[0]):
            _warn_of_hooks()
            return
        self.part = part = Segment(thread.segment)
        if part.parent is None:
            recorders.mode.recording = part.recording
            recorders.mode.__enter__()
            HOOKS.__enter__()
        thread.segment = part

    def __exit__(self, *raised: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Ends the segment unless it has ended; `run` repeats an end that was interrupted."""
        part = self.part
        if part is None:
            return
        thread.segment, part.end = part.parent, part.recording.count
        if part.parent is None:
            leave_hooks()
            if recorders.mode in dispatch_modes():
                recorders.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            recorders.mode.recording = None
        self.part = None
        if part.parent is None:
            release_draws()
            prune(part)


@functools.cache
def _warn_of_hooks() -> None:
    """Warns once that the program's own hooks decide what is kept."""
    _log.warning(
        "zoo.recompute recomputes nothing here, so that nothing is saved: hooks for saved tensors, "
        "such as those of save_on_cpu, a library's offloading or torch's checkpoint, are around it "
        "and get each tensor as without it. Take them off, or have the host hold what segments "
        "start from by zoo.checkpoint(model, offload=True)"
    )


def is_packing() -> bool:
    """Returns whether zoo's hooks are the ones that pack what autograd saves on this thread."""
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and _is_of_zoo(hooks[0])


def leave_hooks() -> None:
    """Removes zoo's saved-tensor hooks, active or paused."""
    thread.paused = ()
    if is_packing():
        HOOKS.__exit__()


def records() -> bool:
    """Returns whether segments are recorded now.

    Without gradients and under torch.func, forward-mode derivatives and tracers they are not.
    """
    return (
        torch.is_grad_enabled()
        and not are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not is_tracing()
        and bool(are_saved_tensors_hooks_enabled())
    )


@contextlib.contextmanager
def observed(observer: Callable[[], object]) -> Iterator[None]:
    """Calls `observer` for each kernel recorded in the block: the `thread.origin` of its replay."""
    earlier, thread.observer = thread.observer, observer
    try:
        yield
    finally:
        thread.observer = earlier
