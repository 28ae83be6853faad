"""Checks of what goes into a model: the value, the limit and the way out in one sentence."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.errors import ArgumentError, InputError, shortened

# a tensor with an axis as long fits nowhere, and a longer one overflows
LARGEST = 2**40


def check_input(model: str, tensor: Tensor, axes: str, channels: int, weight: Tensor) -> None:
    """Checks a floating input's number of axes, type and channels.

    `axes` names them, as in "N C H W"; `channels` is the size that axis C must have. The type is
    that of the model's first `weight`, or any floating one under autocast.

    Raises:
        InputError: the tensor does not have these axes, this many channels, this type, or is
            elsewhere than the weight.
    """
    names = axes.split()
    if not isinstance(tensor, Tensor):
        raise InputError(f"{model} takes a tensor ({', '.join(names)}); got {_kind(tensor)}")
    shape = tuple(tensor.shape)
    if len(shape) != len(names):
        raise InputError(f"{model} takes ({', '.join(names)}), {len(names)} axes; got {shape}")
    if not tensor.is_floating_point():
        raise InputError(
            f"{model} takes floating numbers; got {tensor.dtype}. Convert with .float() and scale"
        )
    if tensor.device != weight.device:
        raise InputError(
            f"{model}'s weights are on {weight.device}; got a tensor on {tensor.device}. Move it "
            f"with .to({str(weight.device)!r})"
        )
    if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise InputError(
            f"{model}'s weights are {weight.dtype}; got {tensor.dtype}. Convert the input with "
            f".to({weight.dtype}), or the model"
        )
    if shape[names.index("C")] != channels:
        raise InputError(
            f"{model} was built for {channels} channels; got {shape[names.index('C')]} in {shape}. "
            "Build it with in_channels=..."
        )
    if 0 in shape:
        raise InputError(f"{model} needs at least one element on each axis; got {shape}")


def check_classes(model: str, classes: Any) -> None:
    """Raises ArgumentError unless there are two classes or more, as a segmentation needs."""
    check_positive(model, classes=classes)
    if classes < 2:
        raise ArgumentError(f"{model} takes classes of at least 2; got {classes}")


def only_input(model: str, inputs: Sequence[Any]) -> Any:
    """Returns the one input of a model that takes one.

    Raises:
        InputError: none or several.
    """
    if len(inputs) != 1:
        raise InputError(f"{model} takes one tensor; got {len(inputs)} inputs")
    return inputs[0]


def check_tokens(
    model: str, tokens: Tensor, axes: str, vocabulary: int, longest: int | None = None
) -> None:
    """Checks a tensor of token numbers: integers, two axes, neither empty nor too long.

    Their values are looked at on the CPU only; elsewhere that would wait for the device.

    Raises:
        InputError: not integers, not these axes, an empty axis, T beyond `longest`, or a token
            outside [0, vocabulary).
    """
    names = axes.split()
    if not isinstance(tokens, Tensor):
        raise InputError(f"{model} takes a tensor ({', '.join(names)}); got {_kind(tokens)}")
    shape = tuple(tokens.shape)
    if len(shape) != len(names):
        raise InputError(f"{model} takes tokens ({', '.join(names)}); got {shape}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{model} takes token numbers, int64 or int32; got {tokens.dtype}")
    if 0 in shape:
        raise InputError(f"{model} needs at least one token; got {shape}")
    length = shape[names.index("T")]
    if longest is not None and length > longest:
        raise InputError(f"{model} has {longest} positions; got {length} tokens. Shorten the text")
    check_range(model, tokens, vocabulary)


def check_range(model: str, tokens: Tensor, vocabulary: int) -> None:
    """Checks that token numbers lie in [0, vocabulary), where that costs no waiting.

    Raises:
        InputError: one does not.
    """
    if type(tokens) is not Tensor or not tokens.is_cpu or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InputError(
            f"{model} has a vocabulary of {vocabulary}; got token {wrong}. Build it with a larger "
            "vocabulary, or map unknown words to a token of their own"
        )


def check_values(model: str, tensor: Tensor, values: int) -> None:
    """Checks that norms see more than one value per channel where the maps are smallest.

    Raises:
        InputError: `values` is 1.
    """
    if values == 1:
        raise InputError(
            f"{model}'s norms need at least 2 values per channel where its maps are smallest; "
            f"{tuple(tensor.shape)} leaves 1. Pass larger inputs, or for batch norm more of them"
        )


def check_positive(name: str, **values: int) -> None:
    """Raises ArgumentError when one of the whole numbers is below 1, or beyond `LARGEST`."""
    for argument, value in values.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < 1:
            kind = "" if is_whole else ", which is no whole number"
            raise ArgumentError(
                f"{name} needs {argument} of at least 1; got {shortened(value)}{kind}"
            )
        if value > LARGEST:
            raise ArgumentError(
                f"{name} needs {argument} of at most {LARGEST}; got {shortened(value)}"
            )


def check_rate(name: str, **values: float) -> None:
    """Raises ArgumentError when one of the probabilities is outside [0, 1)."""
    for argument, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ArgumentError(f"{name} needs {argument} from 0 up to below 1; got {value!r}")


def check_choice(name: str, argument: str, value: str, choices: Sequence[str]) -> None:
    """Raises ArgumentError when a value is not one of the choices."""
    if value not in choices:
        raise ArgumentError(f"{name} takes {argument} {' or '.join(choices)}; got {value!r}")


def _kind(value: object) -> str:
    return "none" if value is None else f"a {type(value).__name__}"
