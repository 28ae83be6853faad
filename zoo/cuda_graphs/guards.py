"""What is looked at before each replay: exact, cheap, and all that holds for sure.

    the whole program   autocast, modes, hooks of all modules and optimizers, torch's settings
    models              parameters, buffers, gradients, `training`, attributes, hooks, plans
    optimizers          groups and state
    the step's code     closure cells, globals and attributes that it names

A change captures anew. What the step reads in other ways is noticed by an audit (`audit`).
"""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from zoo._torch import HOOKS_AFTER_ALL_STEPS, HOOKS_OF_ALL_STEPS, dispatch_modes
from zoo.cuda_graphs.named_values import NamedValues
from zoo.cuda_graphs.watched_values import StateChange
from zoo.engine.kernel_settings import TABLE, read_settings
from zoo.layers.module_hooks import GLOBAL_HOOKS

HOOKS_OF_ALL = (*GLOBAL_HOOKS, HOOKS_OF_ALL_STEPS, HOOKS_AFTER_ALL_STEPS)


class Guards:
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
        named = NamedValues(roots)
        self.values, self.scalers = named.values, named.scalers
        self.tensors = [location for values in self.values for location in values.locations()]
        self.generators, self.host_generators = named.generators, named.host_generators
        seen: Counter[str] = Counter()
        for location in self.tensors:
            seen[location.name] += 1
            # names are unique
            location.name += f" ({seen[location.name]})" * (seen[location.name] > 1)
        self.unread: set[str] = set()

    def change(self) -> StateChange | None:
        """Returns the first thing that is not as it was; None if all is."""
        now = _ambient(self.device)
        if now != self.ambient:
            names = zip(_ambient_names(), self.ambient, now, strict=False)
            return next(StateChange(*each) for each in names if each[1] != each[2])
        changes = (values.change() for values in self.values)
        return next((change for change in changes if change is not None), None)

    def changed_by_step(self) -> StateChange | None:
        """Returns a value that the step has changed, which replays would leave as it is."""
        changes = (values.change(by_step=True) for values in self.values if not values.kind)
        return next((change for change in changes if change is not None), None)

    def forget(self, names: set[str]) -> None:
        """Compares tensors of these names no longer: the step does not read them."""
        self.unread |= names
        for location in self.tensors:
            if location.name in names:
                location.forget()
        self.tensors = [location for location in self.tensors if location.name not in names]


def _ambient(device: torch.device) -> tuple[Any, ...]:
    kind = device.type
    return (
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        [*map(id, dispatch_modes())],
        [(*hooks,) for hooks in HOOKS_OF_ALL],
        *read_settings(),
    )


@functools.cache
def _ambient_names() -> tuple[str, ...]:
    names = "autocast", "the cache of autocast", "inference mode", "gradients enabled"
    others = "the default device", "the dispatch modes", "the hooks of all modules or optimizers"
    return *names, *others, *(setting.name for setting in TABLE)
