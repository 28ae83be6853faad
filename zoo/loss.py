"""Loss functions that a user passes: errors that name the loss, and targets on meta."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo._torch import (
    Args,
    DataDependentOutputException,
    DynamicOutputShapeException,
    Kwargs,
    Operator,
    PyTree,
    pytree,
)
from zoo.errors import ArgumentError, ZooError
from zoo.profiling.fake_tensors import NumbersNeeded, as_data

# called with the whole output of a model: loss(model(inputs))
Loss = Callable[[Any], Tensor]
NUMBERS_READ = (
    "It reads a number out of its targets or of what the model returns, which are not known while "
    "planning: compute that number before, as one_hot(targets, classes) wants it, or leave loss= "
    "out"
)
OUTPUTS_ALONE = (
    "It is called with that alone and knows its targets, as lambda logits: cross_entropy(logits, "
    "targets) does; where several sizes are looked at, it makes targets of the size of the outputs"
)


def nothing_trained(model: nn.Module) -> str:
    """Words the error that a model has no training step."""
    return (
        f"the loss of this {type(model).__name__} depends on nothing that requires a gradient, so "
        "that it has no training step; unfreeze a parameter, pass inputs.requires_grad_(), or "
        "loss= where the model returns no loss"
    )


class UnknownTargets(ArgumentError):
    """A loss reads numbers out of targets that have none."""


def with_loss_errors(loss: Loss, device: torch.device) -> Loss:
    """Wraps a loss so that targets on meta become zeros, and failures ArgumentErrors.

    It fails if it does not take the model's outputs, or returns no scalar.
    """
    name = _name(loss)

    def explained_loss(outputs: PyTree) -> Tensor:
        targets = _ZerosForMeta(device)
        try:
            with targets:
                value = loss(outputs)
        except NumbersNeeded:
            if not targets.zeros:
                raise
            raise UnknownTargets(f"loss={name} has targets on meta. {NUMBERS_READ}") from None
        except (ZooError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reads = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
            raise ArgumentError(
                f"loss={name} fails on what the model returns, {_shape(outputs)} "
                f"({type(error).__name__}: {str(error).strip(' .')}). "
                f"{NUMBERS_READ if reads else OUTPUTS_ALONE}"
            ) from error
        return checked_loss(loss, value)

    return explained_loss


def _name(loss: Loss) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def checked_loss(loss: Loss, value: object) -> Tensor:
    """Returns what a loss returned; raises ArgumentError unless it is a tensor of one element."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ArgumentError(
            f"loss={_name(loss)} returned {_shape(value)}; return a tensor of one element"
        )
    return value


class _ZerosForMeta(TorchFunctionMode):
    """Hands functions zeros on a device for meta tensors, the same each time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        # a tensor stays alive beside its zeros, so that no other gets its id
        self.zeros: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if self.device.type != "meta":
            args, kwargs = pytree.tree_map_only(Tensor, self._zeros, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _zeros(self, value: Tensor) -> Tensor:
        if value.device.type != "meta" or isinstance(value, nn.Parameter):
            return value
        if id(value) not in self.zeros:
            zeros = as_data(torch.zeros_like(value, device=self.device))
            self.zeros[id(value)] = value, zeros
        return self.zeros[id(value)][1]


def _shape(value: object) -> str:
    """Describes a value: 'a tensor of shape (8, 5)', 'tuple (a tensor of shape (), dict)'."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    parts = f" ({', '.join(map(_shape, value))})" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{parts}"


def own_loss(outputs: PyTree) -> PyTree:
    """Returns the loss that a transformers model computes from labels; None if there is none."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else None
