"""A module given by a list of its steps: a short way to write a model for a test."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

from torch import nn

Step = Callable[..., Any]
Steps = Sequence[Union[Step, "Steps"]]


class Chain(nn.Module):
    """Runs its steps in order, functions, modules or lists of these, over tuples of tensors."""

    def steps(self) -> Steps:
        """Lists the steps; a subclass says which."""
        raise NotImplementedError

    def steps_for(self, *inputs: Any) -> Steps:
        """Lists the steps for these inputs; `steps()` unless a subclass says otherwise."""
        return self.steps()

    def forward(self, *inputs: Any) -> Any:
        """Runs the steps and returns what the last one returned."""
        value: Any = inputs
        for step in _flat(self.steps_for(*inputs)):
            value = step(*(value if isinstance(value, tuple) else (value,)))
        return value


def _flat(steps: Steps) -> Iterator[Step]:
    for entry in steps:
        if isinstance(entry, list | tuple):
            yield from _flat(entry)
        else:
            yield entry
