"""Validation of a model's arguments and inputs: errors name the value, the limit, the way out."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.errors import ArgumentError, InputError, shortened

# no tensor has an axis as long, and the size of a longer one overflows
LARGEST = 2**40
# the target that has no loss, as in `F.cross_entropy`
IGNORED = -100


def check_input(
    model: str, inputs: Sequence[Any], axes: str, channels: int, weight: Tensor
) -> Tensor:
    """Returns the only input, a floating tensor with these axes ("N C H W") and channels.

    Raises:
        InputError: there is not one tensor; it has other axes, an empty one or other channels; its
            device, or outside of autocast its type, is not that of the weight.
    """
    if len(inputs) != 1:
        raise InputError(f"{model} takes one tensor; got {len(inputs)} inputs")
    tensor: Tensor = inputs[0]
    shape = _shape(model, tensor, axes)
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
    if shape["C"] != channels:
        raise InputError(
            f"{model} was built for {channels} channels; got {shape['C']} in "
            f"{tuple(tensor.shape)}. Build it with in_channels=..."
        )
    if 0 in tensor.shape:
        got = tuple(tensor.shape)
        raise InputError(f"{model} needs at least one element on each axis; got {got}")
    return tensor


def check_norm(model: str, images: Tensor, values: int) -> None:
    """Raises InputError where norms would see one value per channel of the smallest maps."""
    if values == 1:
        raise InputError(
            f"{model}'s norms need at least 2 values per channel where its maps are smallest; "
            f"{tuple(images.shape)} leaves 1. Pass larger inputs, or for batch norm more of them"
        )


def check_tokens(
    model: str,
    tokens: Tensor,
    targets: Tensor | None,
    axes: str,
    *,
    vocabulary: int,
    longest: int | None = None,
) -> None:
    """Checks tokens with these axes ("N T") and targets; their values on the CPU only, to not wait.

    Raises:
        InputError: tokens are not integers, have other axes, an empty one or T beyond `longest`;
            targets are not int64 or of another shape; a value other than a target of -100 is
            outside [0, vocabulary).
    """
    shape = _shape(model, tokens, axes)
    if tokens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{model} takes token numbers, int64 or int32; got {tokens.dtype}")
    if 0 in tokens.shape:
        raise InputError(f"{model} needs at least one token; got {tuple(tokens.shape)}")
    if longest is not None and shape["T"] > longest:
        raise InputError(
            f"{model} has {longest} positions; got {shape['T']} tokens. Shorten the text"
        )
    _check_range(model, tokens, vocabulary)
    if targets is None:
        return
    if targets.shape != tokens.shape:
        raise InputError(
            f"{model} needs one target for each token; got targets {tuple(targets.shape)} "
            f"for tokens {tuple(tokens.shape)}. Shift the text by one: text[:-1], text[1:]"
        )
    if targets.dtype != torch.int64:
        raise InputError(
            f"{model} takes targets of int64; got {targets.dtype}. Convert them with .long()"
        )
    if type(targets) is Tensor:
        _check_range(model, targets.where(targets != IGNORED, 0), vocabulary)


def check_integers(model: str, minimum: int = 1, **values: int) -> None:
    """Raises ArgumentError when a value is no whole number from the minimum to `LARGEST`."""
    for argument, value in values.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= LARGEST:
            limit = f"most {LARGEST}" if is_whole and value > LARGEST else f"least {minimum}"
            why = "" if is_whole else ", which is no whole number"
            raise ArgumentError(
                f"{model} needs {argument} of at {limit}; got {shortened(value)}{why}"
            )


def check_rates(model: str, **values: float) -> None:
    """Raises ArgumentError when one of the probabilities is outside [0, 1)."""
    for argument, value in values.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ArgumentError(f"{model} needs {argument} from 0 up to below 1; got {value!r}")


def check_choice(model: str, argument: str, value: str, choices: Sequence[str]) -> None:
    """Raises ArgumentError when a value is not one of the choices."""
    if value not in choices:
        raise ArgumentError(f"{model} takes {argument} {' or '.join(choices)}; got {value!r}")


def _shape(model: str, tensor: Any, axes: str) -> dict[str, int]:
    """Returns the sizes of a tensor by the names of its axes."""
    names = axes.split()
    expected = f"({', '.join(names)})"
    if not isinstance(tensor, Tensor):
        got = "none" if tensor is None else f"a {type(tensor).__name__}"
        raise InputError(f"{model} takes a tensor {expected}; got {got}")
    if tensor.ndim != len(names):
        raise InputError(f"{model} takes {expected}, {len(names)} axes; got {tuple(tensor.shape)}")
    return dict(zip(names, tensor.shape, strict=True))


def _check_range(model: str, tokens: Tensor, vocabulary: int) -> None:
    if type(tokens) is not Tensor or not tokens.is_cpu or torch.compiler.is_compiling():
        return
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"{model} has a vocabulary of {vocabulary}; got token {low if low < 0 else high}. "
            "Build it with a larger vocabulary, or map unknown words to a token of their own"
        )
