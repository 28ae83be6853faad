"""Checks of a model's arguments and inputs: errors name the value, the limit and the way out."""

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import DisableTorchDispatch
from zoo.errors import ArgumentError, InputError, shortened

# no tensor has an axis as long, and the size of a longer one overflows
LARGEST = 2**40
# the target that has no loss, as in `F.cross_entropy`
IGNORED = -100


def check_images(model: str, inputs: Sequence[Any], first: Any, axes: str = "NCHW") -> Tensor:
    """Returns the only input; raises InputError unless the first convolution takes it.

    That may have been wrapped or replaced since the model was built.
    """
    if len(inputs) != 1:
        raise InputError(f"{model} takes one tensor; got {len(inputs)} inputs")
    images: Tensor = inputs[0]
    weight = next(first.parameters())
    _check_axes(model, images, axes)
    if not images.is_floating_point():
        raise InputError(
            f"{model} takes floating numbers; got {images.dtype}. Convert with .float() and scale"
        )
    if images.device != weight.device or (
        images.dtype != weight.dtype and not torch.is_autocast_enabled(images.device.type)
    ):
        raise InputError(
            f"{model}'s weights are {weight.dtype} on {weight.device}; got {images.dtype} on "
            f"{images.device}. Convert the input with .to({str(weight.device)!r}, {weight.dtype})"
        )
    channels = getattr(first, "in_channels", images.shape[1])
    if images.shape[1] != channels:
        raise InputError(
            f"{model} was built for {channels} channels; got {images.shape[1]} in "
            f"{tuple(images.shape)}. Build it with in_channels=..."
        )
    return images


def multiples_around(size: int, divisor: int) -> str:
    """Returns in words the multiples of a divisor between which a size lies: "32 or 48"."""
    below = size // divisor * divisor
    return f"{f'{below} or ' if below else ''}{below + divisor}"


def check_norm(
    model: str, images: Tensor, norm: Any, strides: int | Sequence[int], halvings: int = 0
) -> None:
    """Raises InputError where a norm would see one value per channel of the smallest maps.

    Their size is that of the images by the stride, rounded up, then halved and rounded down.
    """
    if not isinstance(
        norm, nn.BatchNorm2d | nn.BatchNorm3d | nn.InstanceNorm2d | nn.InstanceNorm3d
    ):
        return
    sizes = images.shape[2:]
    strides = [strides] * len(sizes) if isinstance(strides, int) else strides
    # a list, since torch.compile takes no generator here
    values = prod([ceil(size / by) >> halvings for size, by in zip(sizes, strides, strict=True)])
    values *= 1 if isinstance(norm, nn.InstanceNorm2d | nn.InstanceNorm3d) else len(images)
    if values == 1 and (norm.training or not norm.track_running_stats):
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
    """Raises InputError unless tokens have these axes ("NT"), and targets, if any, their shape.

    Values are compared with the vocabulary on the CPU only; other devices would be waited for.
    """
    _check_axes(model, tokens, axes)
    if tokens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{model} takes token numbers, int64 or int32; got {tokens.dtype}")
    length = tokens.shape[axes.index("T")]
    if longest is not None and length > longest:
        raise InputError(f"{model} has {longest} positions; got {length} tokens. Shorten the text")
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
        _check_range(model, targets, vocabulary, ignored=IGNORED)


def check_per_token(model: str, tokens: Tensor, **values: Tensor | None) -> None:
    """Raises InputError unless each tensor that is given has a whole number for each token."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.shape != tokens.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else shortened(value)
            raise InputError(
                f"{model} takes a {name} for each of the tokens {tuple(tokens.shape)}; got {got}"
            )
        if value.is_floating_point() or value.is_complex():
            raise InputError(f"{model} takes {name} of whole numbers; got {value.dtype}")


def check_arguments(model: str, minimum: int = 1, **values: Any) -> None:
    """Raises ArgumentError where a value is out of range.

    A drop rate is a probability below 1, any other value a whole number from `minimum` on; a chunk
    may be None, to be chosen by the inputs.
    """
    for name, value in values.items():
        if "drop" in name:
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise ArgumentError(f"{model} needs {name} from 0 up to below 1; got {value!r}")
            continue
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        is_chosen = value is None and name.startswith("chunk")
        if not is_chosen and not (is_whole and minimum <= value <= LARGEST):
            limit = f"most {LARGEST}" if is_whole and value > LARGEST else f"least {minimum}"
            why = "" if is_whole else ", which is no whole number"
            raise ArgumentError(f"{model} needs {name} of at {limit}; got {shortened(value)}{why}")


def check_choice(model: str, argument: str, value: str, choices: Sequence[str]) -> None:
    """Raises ArgumentError when a value is not one of the choices."""
    if value not in choices:
        raise ArgumentError(f"{model} takes {argument} {' or '.join(choices)}; got {value!r}")


def _check_axes(model: str, tensor: Any, axes: str) -> None:
    """Raises InputError unless a value is a tensor with these axes, a letter each, none empty."""
    expected = f"({', '.join(axes)})"
    if not isinstance(tensor, Tensor):
        got = "none" if tensor is None else f"a {type(tensor).__name__}"
        raise InputError(f"{model} takes a tensor {expected}; got {got}")
    shape = tuple(tensor.shape)
    if tensor.ndim != len(axes):
        raise InputError(f"{model} takes {expected}, {len(axes)} axes; got {shape}")
    if 0 in shape:
        raise InputError(f"{model} needs at least one element on each axis; got {shape}")


def _check_range(model: str, tokens: Tensor, vocabulary: int, ignored: int | None = None) -> None:
    if type(tokens) is not Tensor or not tokens.is_cpu or torch.compiler.is_compiling():
        return
    # a look at data, which is no kernel of the forward
    with DisableTorchDispatch():
        valid = tokens if ignored is None else tokens.where(tokens != ignored, 0)
        low, high = (int(value) for value in valid.aminmax())
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"{model} has a vocabulary of {vocabulary}; got token {low if low < 0 else high}. "
            "Build it with a larger vocabulary, or map unknown words to a token of their own"
        )
