"""What comes to the first step of a chain when it is called: the start of planning ahead of time.

A model's forward may do more than run its steps (GPT-2 takes targets or none, an LSTM makes its
first state), so it is called, and stopped where the first step would run.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.chain import Chain, Outline, Runner, State
from zoo.errors import ArgumentError

Loss = Callable[..., Tensor]


class _Called(BaseException):
    """Carries the steps of a forward and their inputs out of it."""

    def __init__(self, found: Outline, state: State) -> None:
        super().__init__()
        self.found, self.state = found, state


def called(model: Chain, inputs: Sequence[Any]) -> tuple[Outline, State]:
    """Calls a model up to where its first step would run: its steps, and what comes to them.

    Raises:
        ArgumentError: its forward does not run its steps.
    """
    place = place_of(model)
    runner, model.runner = model.runner, cast(Runner, _stop)
    try:
        with torch.enable_grad():
            model(*(_in_place(value, place) for value in inputs))
    except _Called as found:
        return found.found, found.state
    finally:
        model.runner = runner
    raise ArgumentError(f"{type(model).__name__}'s forward does not run its steps")


def place_of(model: Chain) -> torch.device:
    """Returns the device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def with_loss(found: Outline, loss: Loss | None) -> Outline:
    """Adds the loss as a last step, a block of its own."""
    if loss is None:
        return found
    last = found.blocks[-1] + 1 if found.blocks else 0
    return replace(
        found, steps=(*found.steps, functools.partial(loss)), blocks=(*found.blocks, last)
    )


def title_of(model: Chain, inputs: State) -> str:
    """Names a model and the shapes of its inputs: 'ResNet on 8×3×224×224'."""
    shapes = ["×".join(map(str, value.shape)) for value in inputs if value is not None]
    return f"{type(model).__name__} on {', '.join(shapes)}"


def _stop(chain: Chain, found: Outline, state: State) -> Any:
    raise _Called(found, state)


def _in_place(value: Any, place: torch.device) -> Any:
    """Returns a fake tensor where the model is for a meta tensor, any other as it is."""
    if isinstance(value, list | tuple):
        return tuple(_in_place(part, place) for part in value)
    if not isinstance(value, Tensor) or value.device.type != "meta" or place.type == "meta":
        return value
    with FakeTensorMode():
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)
    return fake.requires_grad_(value.requires_grad)
