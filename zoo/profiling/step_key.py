"""Says which steps do the same, so that each kind of step is measured once."""

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

# what torch's modules have of their own, but for the mode
BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
PLAIN = int | float | str | bool | None | torch.dtype


class Names:
    """Names what steps do: equal names, equal work on equal inputs."""

    def __init__(self) -> None:
        self._shapes: dict[int, Hashable] = {}

    def of_step(self, step: Any) -> Hashable:
        """Names what a step does: steps of equal modules and equal methods do the same."""
        if isinstance(step, functools.partial):
            bound = (*step.args, *step.keywords.values())
            if all(isinstance(value, PLAIN | nn.Module) for value in bound):
                return (self.of_step(step.func), tuple(step.keywords), *map(self._bound, bound))
        owner = step if isinstance(step, nn.Module) else getattr(step, "__self__", None)
        if isinstance(owner, nn.Module):
            return (getattr(step, "__func__", None), self._shape(owner))
        return id(step)

    def _bound(self, value: Any) -> Hashable:
        return self._shape(value) if isinstance(value, nn.Module) else (type(value), value)

    def _shape(self, module: nn.Module) -> Hashable:
        """Describes a module: its type, settings, parameters and what is inside."""
        if id(module) not in self._shapes:
            self._shapes[id(module)] = (
                type(module),
                tuple((k, _setting(v)) for k, v in vars(module).items() if k not in BOOKKEEPING),
                tuple(
                    (k, v if v is None else (v.shape, v.dtype, v.device, v.requires_grad))
                    for k, v in (*module._parameters.items(), *module._buffers.items())
                ),
                tuple((k, v and self._shape(v)) for k, v in module._modules.items()),
            )
        return self._shapes[id(module)]


def identity(step: Any) -> Hashable:
    """Names what a step is bound to: two of one name use the same parameters."""
    if isinstance(step, functools.partial):
        bound = (*step.args, *step.keywords.values())
        return identity(step.func), tuple(v if isinstance(v, PLAIN) else id(v) for v in bound)
    owner = getattr(step, "__self__", None)
    # a function written in C has an owner, its library, and no function
    return (id(owner), getattr(step, "__func__", step)) if owner is not None else id(step)


def _setting(value: Any) -> Hashable:
    """Names an attribute of a module: what cannot be compared by value is only like itself."""
    if isinstance(value, tuple):
        return tuple(map(_setting, value))
    return value if isinstance(value, PLAIN) else id(value)
