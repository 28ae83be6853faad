"""Results of fake kernels, corrected where real ones have another layout, type or more bytes.

torch's rules for fake tensors describe shapes well, and most layouts. Where they are wrong, the
operators that follow are others than in a real forward (a `view`, not a `clone`), so that
a plan that was made ahead is for a forward that never comes; or bytes are missing:

- Norms, `roll` and the like of a tensor in channels last return channels last on the CPU, and a
  batch norm of one that is in no memory format a contiguous one.
- The gradient of a layer norm's input, and the CPU's `logsigmoid`, are contiguous, whatever the
  input is.
- The CPU's group norm in half precision with float32 weights has float32 statistics.
- A loss that is reduced lies in the memory of the losses of all elements, `fold` in that of its
  columns: torch's kernels make the whole and resize it.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo._torch import DisableTorchDispatch, FakeTensor, FakeTensorMode

_aten = torch.ops.aten
# the reduction comes third, where it is given; 0 is none
_REDUCED = (_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default)


def corrected(mode: FakeTensorMode, func: Any, args: Any, result: Any) -> Any:
    """Returns what a kernel returns for real, given what torch's rule returned for these fakes."""
    correct = _CORRECTIONS.get(func)
    return result if correct is None else correct(mode, result, *args)


def _empty(
    mode: FakeTensorMode, like: Tensor, memory_format: torch.memory_format, dtype: Any = None
) -> Tensor:
    """Makes a tensor of the shape of another one."""
    with DisableTorchDispatch():
        made = torch.empty(
            like.shape, dtype=dtype or like.dtype, device="meta", memory_format=memory_format
        )
    fake: Tensor = FakeTensor(mode, made, like.device)
    return fake


def _format_of(tensor: Tensor) -> torch.memory_format:
    """Returns the memory format that kernels which keep one keep of a tensor."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.ndim)
    is_last = last is not None and tensor.is_contiguous(memory_format=last)
    return last if last is not None and is_last else torch.contiguous_format


def _in(mode: FakeTensorMode, result: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns a result in a memory format: itself, where it has that."""
    is_right = result.is_contiguous(memory_format=memory_format)
    return result if is_right else _empty(mode, result, memory_format)


def _kept(mode: FakeTensorMode, result: Tensor, x: Tensor, *_: Any) -> Tensor:
    is_here = x.device.type == "cpu" and result.shape == x.shape
    return _in(mode, result, _format_of(x)) if is_here else result


def _gradient_kept(mode: FakeTensorMode, result: Tensor, _: Tensor, x: Tensor, *__: Any) -> Tensor:
    return _kept(mode, result, x)


def _group_norm(
    mode: FakeTensorMode, result: Any, x: Tensor, weight: Tensor | None, *_: Any
) -> Any:
    output, *statistics = result
    if x.device.type == "cpu" and weight is not None and weight.dtype != x.dtype:
        statistics = [
            _empty(mode, saved, torch.contiguous_format, weight.dtype) for saved in statistics
        ]
    return (_kept(mode, output, x), *statistics)


def _norm_backward(mode: FakeTensorMode, result: Any, _: Tensor, x: Tensor, *__: Any) -> Any:
    of_input, *others = result
    if of_input is None or x.device.type != "cpu":
        return result
    if of_input.dtype != x.dtype:
        of_input = _empty(mode, of_input, torch.contiguous_format, x.dtype)
    return (_kept(mode, of_input, x), *others)


def _batch_norm(mode: FakeTensorMode, result: Any, x: Tensor, *_: Any) -> Any:
    output, *statistics = result
    return (_kept(mode, output, x), *statistics)


def _log_sigmoid(mode: FakeTensorMode, result: Any, x: Tensor) -> Any:
    is_here = x.device.type == "cpu"
    return tuple(_in(mode, one, torch.contiguous_format) for one in result) if is_here else result


def _layer_norm_backward(mode: FakeTensorMode, result: Any, *_: Any) -> Any:
    of_input, *others = result
    return result if of_input is None else (_in(mode, of_input, torch.contiguous_format), *others)


def _within(mode: FakeTensorMode, result: Tensor, numbers: int) -> Tensor:
    """Returns a result that lies in the memory of so many numbers."""
    if numbers <= result.numel():
        return result
    with DisableTorchDispatch():
        whole = torch.empty(numbers, dtype=result.dtype, device="meta")
        made = whole.as_strided(result.shape, result.stride())
    fake: Tensor = FakeTensor(mode, made, result.device)
    return fake


def _reduced(mode: FakeTensorMode, result: Tensor, x: Tensor, y: Tensor, *others: Any) -> Tensor:
    is_reduced = not others or others[0] != 0
    sizes = itertools.zip_longest(x.shape[::-1], y.shape[::-1], fillvalue=1)
    whole = math.prod(itertools.starmap(max, sizes)) if is_reduced else 0
    return _within(mode, result, whole)


def _reduced_with_weight(
    mode: FakeTensorMode, result: Tensor, x: Tensor, y: Tensor, _: Any = None, reduction: int = 1
) -> Tensor:
    return _reduced(mode, result, x, y, reduction)


def _columns(mode: FakeTensorMode, result: Tensor, columns: Tensor, *_: Any) -> Tensor:
    return _within(mode, result, columns.numel())


_CORRECTIONS: dict[Any, Callable[..., Any]] = {
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _norm_backward,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _norm_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten.roll.default: _kept,
    _aten.channel_shuffle.default: _kept,
    _aten.reflection_pad2d_backward.default: _gradient_kept,
    _aten.replication_pad2d_backward.default: _gradient_kept,
    **dict.fromkeys(_REDUCED, _reduced),
    _aten.binary_cross_entropy.default: _reduced_with_weight,
    _aten.col2im.default: _columns,
}
