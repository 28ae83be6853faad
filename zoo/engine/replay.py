"""Replays recorded kernels: from the last node to the first for what is needed, then forwards.

Only the nodes are called that a living handle needs, on scratch memory, and each result is dropped
after its last reader, so that a replay holds what the backward is about to take and little more.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zoo.engine.generators import Streams
from zoo.engine.operators import read_settings, write_settings
from zoo.engine.recording import (
    AnyReference,
    Node,
    OutsideReference,
    Value,
    View,
    Write,
    flat,
    thread,
)


class Scheduled(NamedTuple):
    """A node to replay, and the values that nobody reads after it."""

    node: Node
    drops: list[Value]


def schedule(nodes: Iterable[Node], wanted: set[Value], given: Iterable[Value]) -> list[Scheduled]:
    """Returns what must be replayed to make the wanted values, in order.

    `nodes` come the last one first; `given` are values that are there.
    """
    needed = wanted.difference(given)
    there = set(given)
    read = set(wanted) | there
    found: list[Scheduled] = []
    for node in nodes:
        results = results_of(node)
        if needed.isdisjoint(results):
            continue
        drops = [value for value in results if value not in read]
        for value in node.reads:
            if value not in read:
                read.add(value)
                drops.append(value)
            if value not in there:
                needed.add(value)
        found.append(Scheduled(node, drops))
    found.reverse()
    return found


def results_of(node: Node) -> list[Value]:
    """Returns the values that a node makes."""
    found = [value for value in node.outs if value is not None]
    if node.writes:
        found += [write.after for write in node.writes if write.after is not None]
    return found


def outer_reads(found: Iterable[Scheduled], first: int) -> Iterator[Value]:
    """Yields what scheduled nodes read that was made before the node of this number."""
    for node, _ in found:
        for value in node.reads:
            if value.node < first:
                yield value


def outside_of(found: Iterable[Scheduled]) -> Iterator[Tensor]:
    """Yields the tensors from outside that scheduled nodes read as they are now."""
    for node, _ in found:
        for value in flat(node.args):
            if isinstance(value, OutsideReference) and value.value.copy is None:
                yield value.tensor


def replay(found: Iterable[Scheduled]) -> None:
    """Calls the operators of scheduled nodes again; what they make lies in `made` of its value."""
    before = present = read_settings()
    streams = Streams()
    # a backward may run inside of a forward, and its replay is not to be recorded
    around = thread.segment.recording if thread.segment is not None else None
    earlier, thread.replaying = thread.replaying, True
    if around is not None:
        around.replaying = True
    try:
        with (
            torch.enable_grad(),
            _without_function_modes(),
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            for node, drops in found:
                if node.settings is not present and node.settings != present:
                    write_settings(node.settings, present)
                    present = node.settings
                if node.draws is not None:
                    streams.draw_as(node.draws)
                thread.origin = node.origin
                _call(node, drops)
    finally:
        thread.replaying = earlier
        thread.origin = None
        if around is not None:
            around.replaying = earlier
        streams.restore()
        if present is not before:
            write_settings(before, read_settings())


def _without_function_modes() -> Any:
    """Keeps a program's function modes away; fake tensors need them to know their device."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return torch._C.DisableTorchFunction() if fake is None else contextlib.nullcontext()


def _call(node: Node, drops: list[Value]) -> None:
    if node.writes:
        _call_writer(node, drops)
    else:
        args = [_decoded(value) for value in node.args]
        if node.kwargs:
            kwargs = {name: _decoded(value) for name, value in node.kwargs.items()}
            out = node.operator(*args, **kwargs)
        else:
            out = node.operator(*args)
        _note(node, out)
    for value in drops:
        value.made = None


def _note(node: Node, out: Any) -> None:
    if isinstance(out, Tensor):
        made = node.outs[0]
        if made is not None:
            made.made = out
        return
    for value, tensor in zip(node.outs, flat(out), strict=True):
        if value is not None:
            value.made = tensor


def _call_writer(node: Node, drops: list[Value]) -> None:
    """Calls a kernel that writes some of its arguments, on scratch memory."""
    assert node.writes is not None
    for write in node.writes:
        write.scratch = _scratch(write.target, drops)
    args = [_decoded(value) for value in node.args]
    kwargs = {name: _decoded(value) for name, value in (node.kwargs or {}).items()}
    _note(node, node.operator(*args, **kwargs))
    for write in node.writes:
        if write.after is not None:
            write.after.made = write.scratch
        write.scratch = None


def _scratch(target: AnyReference, drops: list[Value]) -> Tensor:
    """Returns a tensor that a kernel may write: a copy where others need it as it was."""
    tensor = target.now()
    if type(target) is not OutsideReference and target.value in drops:
        return tensor
    if isinstance(tensor, FakeTensor):
        return tensor.clone()
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _decoded(value: Any) -> Any:
    kind = type(value)
    if kind is Value or kind is OutsideReference or kind is View:
        return value.now()
    if kind is Write:
        return value.scratch
    if kind is list:
        return [_decoded(part) for part in value]
    return value
