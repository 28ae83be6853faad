"""The random state that a kernel draws from, so that a replay draws the same numbers.

A kernel draws from the generator that it is given, or from the default generator of a device among
its arguments. Any device that has default generators will do; for another the result is kept.

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

# bytes of a state of the CPU's generator, and of what stands before and behind its words
SIZE, HEAD, TAIL = 5056, 24, 40
# what a packed one takes
PACKED_SIZE = (SIZE - HEAD - TAIL) // 2 + HEAD + TAIL
# generators, and the states that they had
Draws = list[tuple[Generator, Tensor]]


class PackedState:
    """A state in half its bytes: torch writes each word of the CPU's generator as one of 64 bits.

        24 bytes    624 words of 64 bits, of which the high halves are zero    40 bytes

    The state of another device's generator, of another size, stays as it is.
    """

    __slots__ = ("ends", "words")

    def __init__(self, state: Tensor) -> None:
        self.words: Tensor = state
        self.ends: tuple[bytes, bytes] | None = None
        if state.numel() == SIZE and _is_packable():
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


# generators, and the states that a segment keeps of them
Kept = list[tuple[Generator, PackedState]]


def draws_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Draws | None:
    """Returns the state of each generator that a kernel may draw from; None if one is unknown."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Generator)]
    if not given and args and isinstance(args[0], Tensor) and args[0].is_cpu:
        given = [torch.default_generator]
    devices = () if given else _devices(args, kwargs)
    found = [*given, *map(_default_generator, devices)]
    states = [(generator, generator.get_state()) for generator in found if generator is not None]
    return states if len(states) == len(found) else None


def _devices(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[torch.device]:
    values = [*args, *kwargs.values()]
    parts = [part for value in values if isinstance(value, (list, tuple)) for part in value]
    found = {value.device for value in (*values, *parts) if isinstance(value, Tensor)}
    found |= {value for value in values if isinstance(value, torch.device)}
    return found or {torch.get_default_device()}


def _default_generator(device: torch.device) -> Generator | None:
    if device.type in ("cpu", "meta"):
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generators = getattr(module, "default_generators", ())
    return generators[index] if index < len(generators) else None


class LastDraw(NamedTuple):
    """The last recorded kernel that drew from a generator, and the state that it left."""

    generator: Generator
    node: Any
    state: Tensor


def is_same_state(one: Tensor, other: Tensor) -> bool:
    """Compares states of generators, which no dispatch mode sees."""
    with DisableTorchDispatch():
        return torch.equal(one, other)


class Streams:
    """Sets generators to recorded states, and at the end to those that they had before."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[Generator, Tensor]] = {}

    def draw_as(self, draws: Kept) -> None:
        """Sets the generators of one kernel."""
        for generator, packed in draws:
            if id(generator) not in self.before:
                self.before[id(generator)] = generator, generator.get_state()
            generator.set_state(packed.state())

    def restore(self) -> None:
        """Sets each generator as it was before the first kernel."""
        for generator, state in self.before.values():
            generator.set_state(state)
