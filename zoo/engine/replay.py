"""Replays recorded kernels: one pass from the last to the first selects them, then they run.

Only kernels that a living handle needs are called, on scratch memory, and each result is dropped
after its last reader, so that a replay holds what the backward is about to take and little more.
"""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from zoo._torch import (
    FAKE_MODE,
    VMAP_OF_GRADIENTS,
    BelowAutograd,
    DisableAutocast,
    DisableTorchFunction,
    DispatchKeySet,
    ExcludeKeys,
    FakeTensor,
    are_functorch_transforms_active,
    function_state,
    get_dispatch_mode,
    is_key_included,
    no_transforms,
    set_function_state,
    set_grad_enabled,
)
from zoo.engine.devices import DRAWING, SetAsideState, draw_as
from zoo.engine.kernel_settings import read_settings, write_settings
from zoo.engine.operands import REFERENCES, External, Reference, Value, View
from zoo.engine.operator_effects import flat
from zoo.engine.recording import RecordedKernel
from zoo.engine.segments import Scheduled, thread
from zoo.engine.tensor_state import Geometry

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def schedule(
    kernels: Iterable[RecordedKernel], wanted: set[Value], available: Container[Value]
) -> list[Scheduled]:
    """Returns the kernels that must be replayed for the wanted values, in order.

    `kernels` come the last one first; `available` values exist already and are not dropped.
    """
    needed = {value for value in wanted if value not in available}
    if not needed:
        return []
    read = {*wanted}
    scheduled: list[Scheduled] = []
    # kernels that must run to bring random streams into the states that others need
    drawing: set[RecordedKernel] = set()
    for kernel in kernels:
        if (result := kernel.result) in needed:
            needed.remove(result)
        elif needed.isdisjoint(kernel.several) and kernel not in drawing:
            continue
        if result is None:
            needed.difference_update(kernel.several)
            scheduled += [value for value in kernel.several if value not in read]
        elif result not in read:
            scheduled.append(result)
        if drawing or kernel.follows:
            drawing.discard(kernel)
            drawing.update(kernel.follows)
        for value in kernel.reads():
            if value not in read:
                read.add(value)
                if value not in available:
                    scheduled.append(value)
                    needed.add(value)
        scheduled.append(kernel)
        if not needed and not drawing:
            break
    scheduled.reverse()
    return scheduled


def kernels_in(scheduled: Iterable[Scheduled]) -> Iterator[RecordedKernel]:
    """Yields the kernels of a schedule."""
    for item in scheduled:
        if isinstance(item, RecordedKernel):
            yield item


def external_tensors(scheduled: Iterable[Scheduled]) -> Iterator[Tensor]:
    """Yields the external tensors that scheduled kernels read as they are now."""
    for kernel in kernels_in(scheduled):
        for external in kernel.externals():
            if external.geometry is None:
                yield external.tensor


def replay(scheduled: Sequence[Scheduled]) -> None:
    """Calls scheduled kernels again; each result becomes the `replayed` tensor of its value."""
    changed = Changes()
    draws = any(kernel.draws for kernel in kernels_in(scheduled))
    with DRAWING if draws else contextlib.nullcontext():
        try:
            with DisableAutocast(), BelowAutograd():
                _run(scheduled, changed)
        finally:
            # once more, where an interrupt has cut it short
            changed.restore()


class Changes:
    """Global state that a replay changes for its kernels, and its values before."""

    def __init__(self) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        self.settings: list[Callable[[], object]] = []
        self.streams: dict[int, SetAsideState] = {}
        self.are_restored = False

    def restore(self) -> None:
        """Restores the values from before, once."""
        if self.are_restored:
            return
        thread.origin = None
        restores: list[Callable[[], object]] = [*self.streams.values(), *reversed(self.settings)]
        for restore in restores:
            restore()
        set_grad_enabled(self.grad_enabled)
        self.are_restored = True


def _run(scheduled: Sequence[Scheduled], changed: Changes) -> None:
    try:
        set_grad_enabled(True)
        present = read_settings()
        for position, kernel in enumerate(scheduled):
            if isinstance(kernel, Value):
                kernel.replayed = None
                continue
            if kernel.settings is not present:
                if kernel.settings != present:
                    write_settings(kernel.settings, changed.settings)
                present = kernel.settings
            if kernel.draws:
                draw_as(kernel.draws, changed.streams)
            if kernel.origin is not None:
                thread.origin = kernel.origin
            _call(kernel, _dropped_after(scheduled, position) if kernel.writes else ())
    finally:
        changed.restore()


def _dropped_after(scheduled: Sequence[Scheduled], position: int) -> list[Value]:
    """Returns the values that are dropped after the kernel at a position of a schedule."""
    drops: list[Value] = []
    while (position := position + 1) < len(scheduled):
        if not isinstance(value := scheduled[position], Value):
            break
        drops.append(value)
    return drops


def without_modes(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Calls a function outside of the program's modes and transforms.

    That is without function modes, `__torch_function__` of tensor classes, transforms of
    `torch.func` and the vmap of `is_grads_batched=True`. Fake tensors keep `__torch_function__`,
    by which they know their device.
    """
    before = function_state()
    is_fake = get_dispatch_mode(FAKE_MODE) is not None
    try:
        with contextlib.nullcontext() if is_fake else DisableTorchFunction():
            if are_functorch_transforms_active() or is_key_included(VMAP_OF_GRADIENTS):
                return _without_transforms(function, *args, **kwargs)
            return function(*args, **kwargs)
    finally:
        # once more, where an interrupt has cut it short
        set_function_state(before)


def _without_transforms(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    with contextlib.ExitStack() as without:
        if are_functorch_transforms_active():
            without.enter_context(no_transforms())
        if is_key_included(VMAP_OF_GRADIENTS):
            without.enter_context(ExcludeKeys(DispatchKeySet(VMAP_OF_GRADIENTS)))
        return function(*args, **kwargs)


def _call(kernel: RecordedKernel, drops: Sequence[Value]) -> None:
    """Calls a kernel again, on scratch memory where it writes an argument.

    `drops` are the values that nothing reads after a kernel that writes.
    """
    # values whose storage is a copy during the call, and their own tensors
    before: list[tuple[Value, Tensor]] = []
    for write in kernel.writes:
        write.scratch = _scratch(write.target, drops, before)
    # most are values, and calls are what a replay costs
    args = [
        (replayed if (replayed := value.replayed) is not None else value.resolve())
        if type(value) is Value
        else (value.resolve() if type(value) in REFERENCES else value)
        for value in kernel.args
    ]
    if kernel.kwargs is None:
        out = kernel.function(*args)
    else:
        named = kernel.kwargs.items()
        kwargs = {n: v.resolve() if type(v) in REFERENCES else v for n, v in named}
        out = kernel.function(*args, **kwargs)
    if (value := kernel.result) is not None:
        value.replayed = out
        if value.requires_grad:
            out.requires_grad_()
        return
    for written, tensor in before:
        written.replayed = tensor
    # a kernel that only writes returns its arguments
    for part, tensor in zip(kernel.outs, flat(out), strict=False):
        if part is not None:
            part.replayed = tensor
            if part.requires_grad:
                tensor.requires_grad_()
    for write in kernel.writes:
        if write.after is not None and write.scratch is not None:
            write.after.take(write.scratch)
        write.scratch = None


def _scratch(
    target: Reference | External, drops: Sequence[Value], before: list[tuple[Value, Tensor]]
) -> Tensor:
    """Returns a tensor that a kernel may write: in a copy if the value is read later.

    Arguments in one storage share its copy, since a kernel may write two views of it, or read what
    it wrote; the value and its own tensor are added to `before`.
    """
    if isinstance(target, External):
        return _copy(target.resolve())
    value = target.value
    if type(target) is View:
        target.make_room()
    if value not in drops and all(value is not other for other, _ in before):
        replayed = value.resolve()
        before.append((value, replayed))
        value.replayed = _copy(replayed)
    if type(target) is View:
        # a write to a view of a tensor that requires a gradient would get a history
        value.resolve().requires_grad_(False)
    return target.resolve()


def _copy(tensor: Tensor) -> Tensor:
    """Returns the same tensor on a copy of its storage."""
    if isinstance(tensor, FakeTensor):
        numbers = tensor.untyped_storage().nbytes() // tensor.itemsize
        whole = tensor.new_empty(numbers)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    storage = tensor.untyped_storage().clone()
    return Geometry(tensor).of_storage(storage, tensor.device)
