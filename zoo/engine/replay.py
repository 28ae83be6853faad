"""Replays recorded kernels: from the last to the first for what is needed, then forwards.

Only those are called that a living handle needs, on scratch memory, and each result is dropped
after its last reader, so that a replay holds what the backward is about to take and little more. A
node is one of the recording, never one of autograd's graph.
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
from zoo.engine.devices import SetAsideState, draw_as
from zoo.engine.kernel_settings import read_settings, write_settings
from zoo.engine.operands import (
    REFERENCES,
    Geometry,
    Listed,
    Outside,
    Reference,
    Sparse,
    Value,
    View,
    Write,
)
from zoo.engine.recording import Node, flat, thread

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# a node to replay, and the values that nobody reads after it
Scheduled = tuple[Node, Sequence[Value]]


def schedule(nodes: Iterable[Node], wanted: set[Value], given: Container[Value]) -> list[Scheduled]:
    """Returns what must be replayed to make the wanted values, in order.

    `nodes` come the last one first; `given` are values that are there, and stay.
    """
    needed = {value for value in wanted if value not in given}
    if not needed:
        return []
    read = {*wanted}
    found: list[Scheduled] = []
    # those that must run for the random streams that they leave
    drawing: set[Node] = set()
    for node in nodes:
        if needed.isdisjoint(node.results) and node not in drawing:
            continue
        needed.difference_update(node.results)
        drawing.discard(node)
        drawing.update(node.follows)
        drops = [value for value in node.results if value not in read]
        for value in node.reads:
            if value not in read:
                read.add(value)
                if value not in given:
                    drops.append(value)
                    needed.add(value)
        found.append((node, drops or ()))
        if not needed and not drawing:
            break
    found.reverse()
    return found


def outside_of(found: Iterable[Scheduled]) -> Iterator[Tensor]:
    """Yields the tensors from outside that scheduled nodes read as they are now."""
    for node, _ in found:
        for outside in arguments_from_outside(node):
            if outside.geometry is None:
                yield outside.tensor


def arguments_from_outside(node: Node) -> Iterator[Outside]:
    """Yields what stands for tensors from outside among the arguments of a node, as often."""
    references = [*node.args, *(node.kwargs or {}).values()]
    while references:
        value = references.pop()
        kind = type(value)
        if kind is Listed:
            references += value.parts
        elif kind is Write:
            references.append(value.target)
        elif kind is Sparse:
            yield value
            references += value.parts
        elif kind is Outside:
            yield value


def replay(found: Iterable[Scheduled]) -> None:
    """Calls the operators of scheduled nodes again; what they make lies in `made` of its value."""
    changed = Changes()
    try:
        with DisableAutocast(), BelowAutograd():
            _run(found, changed)
    finally:
        # once more, where an interrupt has cut it short
        changed.restore()


class Changes:
    """What a replay changes for its kernels, and how it was before."""

    def __init__(self) -> None:
        self.trains = torch.is_grad_enabled()
        self.settings: list[Callable[[], object]] = []
        self.streams: dict[int, SetAsideState] = {}
        self.are_restored = False

    def restore(self) -> None:
        """Restores all of it, unless it was."""
        if self.are_restored:
            return
        thread.origin = None
        restores: list[Callable[[], object]] = [*self.streams.values(), *reversed(self.settings)]
        for restore in restores:
            restore()
        set_grad_enabled(self.trains)
        self.are_restored = True


def _run(found: Iterable[Scheduled], changed: Changes) -> None:
    try:
        set_grad_enabled(True)
        present = read_settings()
        for node, drops in found:
            if node.settings is not present:
                if node.settings != present:
                    write_settings(node.settings, changed.settings)
                present = node.settings
            if node.draws:
                draw_as(node.draws, changed.streams)
            if node.origin is not None:
                thread.origin = node.origin
            _call(node, drops)
    finally:
        changed.restore()


def without_modes(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Calls a function without what a program has around its calls.

    These are function modes, `__torch_function__` of tensor classes, the transforms of
    `torch.func`, which end before the call, and the vmap of `is_grads_batched=True`. Fake tensors
    keep `__torch_function__`, by which they know their device.
    """
    before = function_state()
    try:
        with contextlib.ExitStack() as without:
            if get_dispatch_mode(FAKE_MODE) is None:
                without.enter_context(DisableTorchFunction())
            if are_functorch_transforms_active():
                without.enter_context(no_transforms())
            if is_key_included(VMAP_OF_GRADIENTS):
                without.enter_context(ExcludeKeys(DispatchKeySet(VMAP_OF_GRADIENTS)))
            return function(*args, **kwargs)
    finally:
        # once more, where an interrupt has cut it short
        set_function_state(before)


def _call(node: Node, drops: Sequence[Value]) -> None:
    """Calls the operator of a node, on scratch memory where it writes an argument."""
    # values whose storage is a copy during the call, and what they were
    before: list[tuple[Value, Tensor]] = []
    for write in node.writes:
        write.scratch = _scratch(write.target, drops, before)
    # most are values, and calls are what a replay costs
    args = [
        (made if (made := value.made) is not None else value.now())
        if type(value) is Value
        else (value.now() if type(value) in REFERENCES else value)
        for value in node.args
    ]
    if node.kwargs is None:
        out = node.kernel(*args)
    else:
        given = node.kwargs.items()
        out = node.kernel(*args, **{n: v.now() if type(v) in REFERENCES else v for n, v in given})
    for written, tensor in before:
        written.made = tensor
    parts = (out,) if isinstance(out, Tensor) else flat(out)
    # of a kernel that only writes the results are its arguments
    for value, tensor in zip(node.outs, parts, strict=False):
        if value is not None:
            value.made = tensor
            if value.trains:
                tensor.requires_grad_()
    for write in node.writes:
        if write.after is not None and write.scratch is not None:
            write.after.take(write.scratch)
        write.scratch = None
    for value in drops:
        value.made = None


def _scratch(
    target: Reference | Outside, drops: Sequence[Value], before: list[tuple[Value, Tensor]]
) -> Tensor:
    """Returns a tensor that a kernel may write: in a copy where the value is read later.

    All arguments of a call that lie in one storage share its copy, as a kernel may write two views
    of it, or read what it wrote; `before` takes the value with what it was.
    """
    if isinstance(target, Outside):
        return _copy(target.now())
    value = target.value
    if type(target) is View:
        target.make_room()
    if value not in drops and all(value is not other for other, _ in before):
        made = value.now()
        before.append((value, made))
        value.made = _copy(made)
    if type(target) is View:
        # a view of what requires a gradient gets a history when it is written
        value.now().requires_grad_(False)
    return target.now()


def _copy(tensor: Tensor) -> Tensor:
    """Returns the same tensor on a copy of its storage."""
    if isinstance(tensor, FakeTensor):
        numbers = tensor.untyped_storage().nbytes() // tensor.itemsize
        whole = tensor.new_empty(numbers)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return Geometry(tensor).of_storage(storage, tensor.device)
