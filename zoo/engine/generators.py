"""The random state that a kernel draws from, so that a replay draws the same numbers.

A kernel draws from the generator that it is given, or from the default stream of each device among
its arguments. Any device whose stream can be read and set will do; for another the result is kept.

A state of the CPU's takes 5 KB, packed 2.5 KB. So a segment keeps one: a kernel that found the
stream as the one before it in the segment left it is replayed after that one, and one that drew
nothing needs none. Draws that take fewer bytes than a state, as far as they come first in a
segment, are kept themselves.
"""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from zoo._torch import DisableTorchDispatch
from zoo.engine.devices import RandomStream, default_stream

# bytes of a state of the CPU's generator, and of what stands before and behind its words
SIZE, HEAD, TAIL = 5056, 24, 40
# what a packed one takes
PACKED_SIZE = (SIZE - HEAD - TAIL) // 2 + HEAD + TAIL
# random streams, and the states that they had
Draws = list[tuple[RandomStream, Tensor]]


class PackedState:
    """A state in half its bytes: torch writes each word of the CPU's generator as one of 64 bits.

        24 bytes    624 words of 64 bits, of which the high halves are zero    40 bytes

    The state of another device's stream stays as it is.
    """

    __slots__ = ("ends", "words")

    def __init__(self, state: Tensor, device: torch.device) -> None:
        self.words: Tensor = state
        self.ends: tuple[bytes, bytes] | None = None
        if device.type == "cpu" and state.numel() == SIZE and _is_packable():
            with DisableTorchDispatch():
                self.words = state.view(torch.int32)[::2].clone()
            place = state.data_ptr()
            self.ends = (
                ctypes.string_at(place, HEAD),
                ctypes.string_at(place + SIZE - TAIL, TAIL),
            )

    def state(self) -> Tensor:
        """Returns the state as it was."""
        if self.ends is None:
            return self.words
        with DisableTorchDispatch():
            state = self.words.to(torch.int64).bitwise_and_(0xFFFFFFFF).view(torch.uint8)
        place = state.data_ptr()
        head, tail = self.ends
        ctypes.memmove(place, head, HEAD)
        ctypes.memmove(place + SIZE - TAIL, tail, TAIL)
        return state


@functools.cache
def _is_packable() -> bool:
    """Says whether this torch writes states as is described above."""
    state = torch.Generator().manual_seed(2**63 + 1).get_state()
    with DisableTorchDispatch():
        return not state[HEAD : SIZE - TAIL].view(torch.int32)[1::2].any().item()


# random streams, and the states that a segment keeps of them
Kept = list[tuple[RandomStream, PackedState]]


def draws_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Draws | None:
    """Returns the state of each stream that a kernel may draw from; None if one is unknown."""
    values = (*args, *kwargs.values())
    given: list[RandomStream] = [value for value in values if isinstance(value, Generator)]
    if not given and args and isinstance(args[0], Tensor) and args[0].is_cpu:
        given = [torch.default_generator]
    devices = () if given else _devices(args, kwargs)
    found = [*given, *map(default_stream, devices)]
    states = [(stream, stream.get_state()) for stream in found if stream is not None]
    return states if len(states) == len(found) else None


def _devices(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[torch.device]:
    values = [*args, *kwargs.values()]
    parts = [part for value in values if isinstance(value, (list, tuple)) for part in value]
    found = {value.device for value in (*values, *parts) if isinstance(value, Tensor)}
    found |= {value for value in values if isinstance(value, torch.device)}
    return found or {torch.get_default_device()}


class LastDraw(NamedTuple):
    """The last recorded kernel that drew from a stream, and the state that it left."""

    stream: RandomStream
    node: Any
    state: Tensor


def is_same_state(one: Tensor, other: Tensor) -> bool:
    """Compares states of random streams, which no dispatch mode sees."""
    with DisableTorchDispatch():
        return torch.equal(one, other)


class Streams:
    """Sets random streams to recorded states, and at the end to those that they had before."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[RandomStream, Tensor]] = {}

    def draw_as(self, draws: Kept) -> None:
        """Sets the streams of one kernel."""
        for stream, packed in draws:
            if id(stream) not in self.before:
                self.before[id(stream)] = stream, stream.get_state()
            stream.set_state(packed.state())

    def restore(self) -> None:
        """Sets each stream as it was before the first kernel."""
        for stream, state in self.before.values():
            stream.set_state(state)
