"""The random state that a kernel draws from, so that a replay draws the same numbers.

A kernel draws from the generator that it is given, or from the default generator of a device among
its arguments. Any device of torch's that has default generators will do; for one that has none the
kernel's result is kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

SEQUENCES = (list, tuple)
# generators, and the states that they had
Draws = list[tuple[Generator, Tensor]]


def draws_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Draws | None:
    """Returns the state of each generator that a kernel may draw from; None if one is unknown."""
    given = kwargs.get("generator")
    if given is None:
        for value in args:
            if isinstance(value, Generator):
                given = value
    if given is None and args and isinstance(args[0], Tensor) and args[0].is_cpu:
        given = torch.default_generator
    if given is not None:
        return [(given, given.get_state())]
    found = [_default_generator(device) for device in _devices(args, kwargs)]
    if None in found:
        return None
    return [(generator, generator.get_state()) for generator in found if generator is not None]


def _devices(args: Sequence[Any], kwargs: dict[str, Any]) -> set[torch.device]:
    values = [*args, *kwargs.values()]
    parts = [part for value in values if isinstance(value, SEQUENCES) for part in value]
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


class Streams:
    """Sets generators to recorded states, and at the end to those that they had before."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[Generator, Tensor]] = {}

    def draw_as(self, draws: Draws) -> None:
        """Sets the generators of one kernel."""
        for generator, state in draws:
            if id(generator) not in self.before:
                self.before[id(generator)] = generator, generator.get_state()
            generator.set_state(state)

    def restore(self) -> None:
        """Sets each generator as it was before the first kernel."""
        for generator, state in self.before.values():
            generator.set_state(state)
