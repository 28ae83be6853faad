"""What the Python of a training step may read: a replay runs none of it, and reads nothing anew.

From the step, the model and the optimizer all that can be reached is walked once (`python_walk`).
`change` then compares it with what is there now, in less time than a replay takes. Also compared is
what holds for the whole program: autocast, and the settings by which torch chooses kernels.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zoo.cuda_graphs.python_walk import Walk
from zoo.cuda_graphs.watched_values import ContainerValues, StateChange, TensorLocation
from zoo.engine.kernel_settings import TABLE, read_settings


class PythonState:
    """Values and tensors that a training step may read, as they were when this was made.

    Attributes:
        tensors: where tensors and gradients are kept.
        generators, host_generators: what draws random numbers, of torch and others.
        scalers: names of the GradScalers in use.
        unread: names of tensors that are not compared.
    """

    def __init__(self, roots: Mapping[str, Any], device: torch.device) -> None:
        self.device = device
        self.ambient = _ambient(device)
        walk = Walk(roots)
        self.values, self.empty, self.tensors = walk.values, walk.empty, walk.tensors
        seen: Counter[str] = Counter()
        for location in self.tensors:
            seen[location.name] += 1
            # names are unique
            location.name += f" ({seen[location.name]})" * (seen[location.name] > 1)
        self.generators, self.host_generators = walk.generators, walk.host_generators
        self.scalers = walk.scalers
        self.unread: set[str] = set()

    def change(self) -> StateChange | None:
        """Returns the first thing that is not as it was; None if all is."""
        now = _ambient(self.device)
        if now != self.ambient:
            names = zip(_ambient_names(), self.ambient, now, strict=False)
            return next(StateChange(*each) for each in names if each[1] != each[2])
        return next(self.changes(), None)

    def changes(self) -> Iterator[StateChange]:
        """Yields what is not as it was, but for what holds for the whole program."""
        for name, container in self.empty:
            if container:
                yield StateChange(name, "no entries", f"{len(container)} entries")
        watched: list[ContainerValues | TensorLocation] = [*self.values, *self.tensors]
        yield from (change for each in watched if (change := each.change()) is not None)

    def forget(self, names: set[str]) -> None:
        """Compares tensors of these names no longer: the step does not read them."""
        self.unread |= names
        self.tensors = [location for location in self.tensors if location.name not in names]


def _ambient(device: torch.device) -> tuple[Any, ...]:
    kind = device.type
    return (
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        torch.is_inference_mode_enabled(),
        *read_settings(),
    )


@functools.cache
def _ambient_names() -> tuple[str, ...]:
    names = "autocast", "the cache of autocast", "inference mode"
    return *names, *(setting.name for setting in TABLE)
