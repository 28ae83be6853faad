"""What the most frequent kernels return on fake tensors, by rules: shape, stride, dtype, storage.

torch runs a kernel on meta tensors to find that out, and many as decompositions in Python, which
takes up to a hundred times as long. Most calls of a model are views, arithmetic on tensors of one
shape, and the CPU's batch norm. For anything else there is no rule, and torch is asked.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo._torch import DisableTorchDispatch, FakeTensor, FakeTensorMode, in_kernel_invocation


def _operators(overload: str, names: str) -> frozenset[Any]:
    return frozenset(getattr(getattr(torch.ops.aten, name), overload) for name in names.split())


CPU, META = torch.device("cpu"), torch.device("meta")
BATCH_NORM = torch.ops.aten.native_batch_norm.default
# makes a fake tensor of a real one
LIFT = torch.ops.aten.lift_fresh.default
# what torch asks of a tensor itself, before it runs a kernel: no kernels
DEVICE = torch.ops.prim.device.default
QUESTIONS = frozenset({DEVICE, torch.ops.prim.layout.default})
# element by element; the result has the type of arguments that all have one type
POINTWISE = _operators("Tensor", "add sub mul div") | _operators(
    "default",
    "relu gelu gelu_backward silu silu_backward sigmoid sigmoid_backward tanh tanh_backward "
    "threshold_backward exp neg sqrt rsqrt",
)
IN_PLACE = (
    _operators("Tensor", "add_ sub_ mul_ div_")
    | _operators("default", "relu_ addcmul_ addcdiv_")
    | _operators("Scalar", "lerp_")
)


def answer(question: Any, tensor: Tensor) -> Any:
    """Answers a question, as a `FakeTensorMode` does."""
    if question is not DEVICE or type(tensor) is not FakeTensor:
        return question(tensor)
    is_inside = tensor.fake_mode.in_kernel_invocation  # type: ignore[attr-defined]
    return META if is_inside else tensor.fake_device  # type: ignore[attr-defined]


def result_by_rule(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what torch would for a kernel on fake tensors, NotImplemented without a rule."""
    if func is torch.ops.aten.empty_strided.default:
        return _empty_strided(mode, *args, **kwargs)
    tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
    if not tensors or tensors[0] is not args[0] or not _is_plain(tensors[0]):
        return NotImplemented
    if func.is_view and len(tensors) == 1 and func is not LIFT:
        return _view(mode, func, args, kwargs)
    if func in _BATCH_NORMS:
        return _BATCH_NORMS[func](mode, *args)
    if func in IN_PLACE and _are_alike(tensors):
        return tensors[0]
    return _like(mode, tensors[0]) if func in POINTWISE and _are_alike(tensors) else NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    """Says whether a tensor is a fake one of no known numbers."""
    is_fake = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return is_fake and tensor.constant is None  # type: ignore[attr-defined]


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Says whether tensors are dense, of one shape, stride, device and floating type."""
    first = tensors[0]
    return (
        first.is_floating_point()
        and (first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last))
        and all(
            _is_plain(other)
            and other.shape == first.shape
            and other.stride() == first.stride()
            and other.dtype is first.dtype
            and other.device == first.device
            for other in tensors[1:]
        )
    )


def _empty(mode: FakeTensorMode, shape: Any, stride: Any, dtype: Any, device: Any) -> Tensor:
    with DisableTorchDispatch():
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    fake: Tensor = FakeTensor(mode, made, device)
    return fake


def _like(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return _empty(mode, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _empty_strided(
    mode: FakeTensorMode,
    shape: Any,
    stride: Any,
    dtype: Any = None,
    device: Any = None,
    **others: Any,
) -> Any:
    if dtype is None or device is None or device.type == "meta" or any(others.values()):
        return NotImplemented
    return _empty(mode, shape, stride, dtype, device)


def _view(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    device = args[0].device
    with in_kernel_invocation(mode):
        found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        return FakeTensor(mode, found, device)
    return [FakeTensor(mode, view, device) for view in found]


def _batch_norm(mode: FakeTensorMode, x: Tensor, *others: Any) -> Any:
    *weights, training, _, _ = others
    if x.device != CPU or not training or not x.is_contiguous():
        return NotImplemented
    of_statistics = (x.shape[1],), (1,), statistics_type(x, *weights), CPU
    return (_like(mode, x), _empty(mode, *of_statistics), _empty(mode, *of_statistics))


def statistics_type(x: Tensor, *weights: Any) -> torch.dtype:
    """Returns the type of a batch norm's statistics on the CPU: float32 where one weight's is."""
    dtypes = [weight.dtype for weight in weights if isinstance(weight, Tensor)]
    return torch.float32 if torch.float32 in dtypes else x.dtype


def _batch_norm_backward(
    mode: FakeTensorMode, gradient: Tensor, x: Tensor, weight: Tensor | None, *others: Any
) -> Any:
    *_, training, _, wanted = others
    are_dense = gradient.is_contiguous() and x.is_contiguous()
    if x.device != CPU or not training or not are_dense or weight is None:
        return NotImplemented
    of_weight = (x.shape[1],), (1,), weight.dtype, CPU
    of_input, of_scale, of_bias = wanted
    return (
        _like(mode, x) if of_input else None,
        _empty(mode, *of_weight) if of_scale else None,
        _empty(mode, *of_weight) if of_bias else None,
    )


_BATCH_NORMS: dict[Any, Callable[..., Any]] = {
    BATCH_NORM: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
