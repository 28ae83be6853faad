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
    REFERENCES,
    AnyReference,
    Listed,
    Node,
    Outside,
    Value,
    View,
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
        results = node.results
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


def outer_reads(found: Iterable[Scheduled], first: int) -> Iterator[Value]:
    """Yields what scheduled nodes read that was made before the node of this number."""
    for node, _ in found:
        for value in node.reads:
            if value.node < first:
                yield value


def outside_of(found: Iterable[Scheduled]) -> Iterator[Tensor]:
    """Yields the tensors from outside that scheduled nodes read as they are now."""
    for node, _ in found:
        references = node.args.copy()
        while references:
            value = references.pop()
            if type(value) is Listed:
                references += value.parts
            elif type(value) is Outside and value.geometry is None:
                yield value.tensor


def replay(found: Iterable[Scheduled]) -> None:
    """Calls the operators of scheduled nodes again; what they make lies in `made` of its value."""
    # a backward may run inside of a forward, and its replay is not to be recorded
    around = thread.segment.recording if thread.segment is not None else None
    earlier, thread.replaying = thread.replaying, True
    if around is not None:
        around.replaying = True
    try:
        with (
            _without_function_modes(),
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            _run(found)
    finally:
        thread.replaying = earlier
        if around is not None:
            around.replaying = earlier


def _run(found: Iterable[Scheduled]) -> None:
    before = present = read_settings()
    origin = None
    streams = Streams()
    trains = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        for node, drops in found:
            if node.settings is not present:
                if node.settings != present:
                    write_settings(node.settings, present)
                present = node.settings
            if node.draws is not None:
                streams.draw_as(node.draws)
            if node.origin is not origin:
                thread.origin = origin = node.origin
            _call(node, drops)
    finally:
        thread.origin = None
        torch._C._set_grad_enabled(trains)
        streams.restore()
        if present != before:
            write_settings(before, read_settings())


def _without_function_modes() -> Any:
    """Keeps a program's function modes away; fake tensors need them to know their device."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return torch._C.DisableTorchFunction() if fake is None else contextlib.nullcontext()


def _call(node: Node, drops: list[Value]) -> None:
    """Calls the operator of a node, on scratch memory where it writes an argument."""
    writes = node.writes
    if writes:
        for write in writes:
            write.scratch = _scratch(write.target, drops)
    args = [value.now() if type(value) in REFERENCES else value for value in node.args]
    out = node.operator(*args, **_decoded(node.kwargs)) if node.kwargs else node.operator(*args)
    outs = node.outs
    if len(outs) == 1 and isinstance(out, Tensor):
        if outs[0] is not None:
            outs[0].made = out
    elif outs:
        for value, tensor in zip(outs, flat(out), strict=True):
            if value is not None:
                value.made = tensor
    for write in writes or ():
        if write.after is not None:
            write.after.made = write.scratch
        write.scratch = None
    for value in drops:
        value.made = None


def _decoded(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.now() if type(value) in REFERENCES else value for name, value in kwargs.items()
    }


def _scratch(target: AnyReference, drops: list[Value]) -> Tensor:
    """Returns a tensor that a kernel may write: a copy where others need it as it was."""
    if type(target) is View:
        target.make_room()
    tensor = target.now()
    if not isinstance(target, Outside) and target.value in drops:
        return tensor
    if isinstance(tensor, FakeTensor):
        return tensor.clone()
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
