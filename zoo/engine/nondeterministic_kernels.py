"""Nondeterministic kernels, whose results are kept, not replayed.

A replay calls a kernel again with the same arguments, and most return the same bits. These may not:

    sum       floats added by atomics: the order of threads decides how the sum is rounded
    choice    one of equal numbers: a router that picks another expert is no rounding error
    write     several numbers for one element: the last thread wins
    tuning    an algorithm chosen by measuring: cuDNN's benchmark chooses anew on each thread

On accelerators all of them are kept, on the CPU those that run on several threads. torch's
deterministic mode has another kernel for some, which is replayed. Kept results cost memory only.

Sources: the documentation of `torch.use_deterministic_algorithms` lists most of them. `_CHOICES`
are indices, small beside what they are taken from, whose ties no documentation settles. The scans
(`cumprod`, `logcumsumexp`, `cummax`, `cummin`) go through that of `cumsum`, whose deterministic
form is for sums alone. On an H200, torch 2.11, the database of operators found two that differ:
`cummin`, and `conv_transpose3d` in float32, whose forward is a convolution's backward
(pytorch#75363); an LSTM of cuDNN's, GPT-2 and ViT repeated themselves there and are left out. With
`torch.backends.cudnn.benchmark` there, each of five `conv2d` on another thread had other bits than
on its own, as a replay on autograd's thread has; `torch.sparse.mm` did not repeat itself in 20
calls, in deterministic mode neither (a product with a sparse tensor is kept where it is recorded).
On the CPU with four threads torch 2.14 repeated neither `index_put` into float32, `put` nor
`index_copy`, and with one thread not the median of an expanded tensor.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zoo._torch import Args, Kwargs, Operator, PyTree

Condition = Callable[[Args, Kwargs], bool]

_log = logging.getLogger("zoo")
# numbers from which the CPU shares a kernel among threads
GRAIN = 1 << 15
# the masks by which a tensor may be indexed, which name no element twice
MASKS = (torch.bool, torch.uint8)


class Nondeterminism(NamedTuple):
    """The conditions under which a kernel may return other bits for the same arguments.

    Attributes:
        varies: returns whether it may for given arguments, on an accelerator.
        is_avoidable: whether its results are recomputed in deterministic mode: torch then has
            another kernel, or none of the sources says that this one may differ there.
        varies_on_cpu: as `varies`, on the CPU; None if it never does there.
    """

    varies: Condition
    is_avoidable: bool = True
    varies_on_cpu: Condition | None = None

    def applies(self, args: Args, kwargs: Kwargs) -> bool:
        """Returns whether a call made now may return other bits in a replay."""
        condition = self.varies_on_cpu if _is_on_cpu(args, kwargs) else self.varies
        if condition is None or not condition(args, kwargs):
            return False
        return not (self.is_avoidable and _is_deterministic())


def _is_deterministic() -> bool:
    """Returns whether torch raises for nondeterministic kernels; if it warns, it calls them."""
    is_lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not is_lenient


def _is_on_cpu(args: Args, kwargs: Kwargs) -> bool:
    """Returns whether all tensors are on the CPU, or on the meta device, which counts as CPU."""
    parts = (value if type(value) in (list, tuple) else (value,) for value in args)
    tensors = itertools.chain(kwargs.values(), *parts)
    return all(t.device.type in ("cpu", "meta") for t in tensors if isinstance(t, Tensor))


def _argument(args: Args, position: int, default: PyTree = None) -> PyTree:
    return args[position] if position < len(args) else default


def _always(args: Args, kwargs: Kwargs) -> bool:
    return True


def _adds_floats(args: Args, kwargs: Kwargs) -> bool:
    """Integers have the same sum in any order."""
    dtype = kwargs.get("dtype") or args[0].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _is_weighted(args: Args, kwargs: Kwargs) -> bool:
    return _argument(args, 1) is not None


def _reduces_floats(args: Args, kwargs: Kwargs) -> bool:
    """The largest and the smallest number are the same in any order."""
    return _adds_floats(args, kwargs) and args[4] not in ("amax", "amin")


def _scatters_floats(args: Args, kwargs: Kwargs) -> bool:
    """In deterministic mode torch has other kernels than for products."""
    is_product = _multiplies_floats(args, kwargs)
    return is_product or (_reduces_floats(args, kwargs) and not _is_deterministic())


def _multiplies_floats(args: Args, kwargs: Kwargs) -> bool:
    return _adds_floats(args, kwargs) and args[4] == "prod"


def _is_tuned_or_transposed(args: Args, kwargs: Kwargs) -> bool:
    if torch.backends.cudnn.benchmark:
        _warn_of_benchmark()
        return True
    wide = args[0].dtype in (torch.float32, torch.float64)
    return wide and bool(args[6]) and not _are_convolutions_deterministic()


def _is_tuned_or_free(args: Args, kwargs: Kwargs) -> bool:
    return torch.backends.cudnn.benchmark or not _are_convolutions_deterministic()


def _are_convolutions_deterministic() -> bool:
    return torch.backends.cudnn.deterministic or _is_deterministic()


@functools.cache
def _warn_of_benchmark() -> None:
    """Warns once that convolutions are kept because of a setting."""
    _log.warning(
        "torch.backends.cudnn.benchmark is on: cuDNN chooses algorithms on each thread, so that a "
        "convolution that the backward recomputes may have other bits. The results of convolutions "
        "are kept, and a plan saves less. Set it to False to have them recomputed"
    )


def _puts(args: Args, kwargs: Kwargs) -> bool:
    """Writes several numbers, or sums floats, by indices that may name an element twice."""
    _, indices, values = args[:3]
    if _argument(args, 3, default=False):
        return _adds_floats(args, {})
    index_tensors = [index for index in indices if index is not None]
    return values.numel() > 1 and not all(index.dtype in MASKS for index in index_tensors)


def _puts_on_cpu(args: Args, kwargs: Kwargs) -> bool:
    # on the CPU only sums of float32 are parallel
    is_sum = _argument(args, 3, default=False)
    if not _puts(args, kwargs) or (is_sum and args[0].dtype is not torch.float32):
        return False
    index_tensors = [index for index in args[1] if index is not None]
    shapes = (index.shape for index in index_tensors)
    chosen = math.prod(torch.broadcast_shapes(*shapes))
    rest = args[0].numel() // max(math.prod(args[0].shape[: len(args[1])]), 1)
    return _is_shared(max(chosen * rest, args[2].numel()))


def _is_shared(count: int) -> bool:
    """Returns whether the CPU runs a kernel for so many numbers on several threads."""
    return count >= GRAIN and torch.get_num_threads() > 1


def _puts_flat(args: Args, kwargs: Kwargs) -> bool:
    """Writes or sums numbers by indices into the flattened tensor."""
    is_sum = bool(_argument(args, 3, default=False))
    return _adds_floats(args, {}) if is_sum else args[2].numel() > 1


def _puts_flat_on_cpu(args: Args, kwargs: Kwargs) -> bool:
    return _puts_flat(args, kwargs) and _is_shared(args[1].numel())


def _copies_on_cpu(args: Args, kwargs: Kwargs) -> bool:
    return _is_shared(args[3].numel())


def _is_expanded(args: Args, kwargs: Kwargs) -> bool:
    """Several elements share an address, where the kernel sorts them."""
    return any(
        step == 0 and size > 1 for step, size in zip(args[0].stride(), args[0].shape, strict=True)
    )


def _named(
    names: str,
    varies: Condition,
    *,
    is_avoidable: bool = True,
    varies_on_cpu: Condition | None = None,
) -> dict[str, Nondeterminism]:
    row = Nondeterminism(varies, is_avoidable, varies_on_cpu)
    return {f"aten::{name}": row for name in names.split()}


# Rows by the name of the operator, or of one overload. In-place and `out=` forms are those of the
# name without them.
_SUMS = {
    **_named("scatter_add index_add cumsum", _adds_floats),
    **_named("cumprod logcumsumexp histc", _adds_floats, is_avoidable=False),
    **_named("bincount", _is_weighted, is_avoidable=False),
    **_named("scatter_reduce", _scatters_floats, is_avoidable=False),
    **_named("index_reduce", _reduces_floats, is_avoidable=False),
    **_named("nll_loss2d_forward", _always, is_avoidable=False),
    **_named("convolution", _is_tuned_or_transposed, is_avoidable=False),
}
_WRITES = {
    **_named("index_put _index_put_impl _unsafe_index_put", _puts, varies_on_cpu=_puts_on_cpu),
    **_named("put", _puts_flat, is_avoidable=False, varies_on_cpu=_puts_flat_on_cpu),
    **_named("index_copy", _always, varies_on_cpu=_copies_on_cpu),
    **_named("scatter.src scatter.src_out scatter_.src", _always),
    **_named("scatter.reduce scatter.reduce_out scatter_.reduce", _always, is_avoidable=False),
    **_named("max_unpool2d max_unpool3d", _always, is_avoidable=False),
}  # fmt: skip
_CHOICES = {
    **_named("topk sort argsort argmax argmin mode nonzero nonzero_static multinomial", _always),
    **_named("max.dim max.dim_max min.dim min.dim_min", _always),
    **_named("_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive", _always),
    **_named("cummax cummin _cummax_helper _cummin_helper", _always, is_avoidable=False),
    **_named("kthvalue", _always, is_avoidable=False, varies_on_cpu=_is_expanded),
    **_named("median.dim median.dim_values nanmedian.dim nanmedian.dim_values", _always,
             is_avoidable=False, varies_on_cpu=_is_expanded),
    "torchvision::nms": Nondeterminism(_always),
}  # fmt: skip
# kernels of a backward, which are recorded where a forward takes gradients itself
_GRADIENTS = {
    **_named("embedding_dense_backward max_pool3d_with_indices_backward "
             "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
             "_flash_attention_backward _efficient_attention_backward _cudnn_attention_backward "
             "_scaled_dot_product_flash_attention_backward "
             "_scaled_dot_product_efficient_attention_backward "
             "_scaled_dot_product_cudnn_attention_backward", _always),
    **_named("convolution_backward", _is_tuned_or_free, is_avoidable=False),
    **_named("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward "
             "adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool3d_backward "
             "fractional_max_pool2d_backward fractional_max_pool3d_backward "
             "max_pool2d_with_indices_backward upsample_linear1d_backward "
             "upsample_bilinear2d_backward _upsample_bilinear2d_aa_backward "
             "upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward "
             "upsample_trilinear3d_backward reflection_pad1d_backward reflection_pad2d_backward "
             "reflection_pad3d_backward nll_loss2d_backward _ctc_loss_backward "
             "_embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward "
             "grid_sampler_2d_backward grid_sampler_3d_backward _cudnn_rnn_backward", _always,
             is_avoidable=False),
    **{f"torchvision::{name}": Nondeterminism(_always, is_avoidable=False) for name in (
        "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward",
        "_ps_roi_pool_backward", "_deform_conv2d_backward")},
}  # fmt: skip
TABLE: dict[str, Nondeterminism] = {**_SUMS, **_WRITES, **_CHOICES, **_GRADIENTS}
# the tag by which torch marks such operators itself
_TAG = getattr(torch.Tag, "nondeterministic_bitwise", None)


def nondeterminism_of(operator: Operator) -> Nondeterminism | None:
    """Returns when an operator's kernel may return other bits; None if it never does."""
    name = operator._schema.name
    nondeterminism = (
        TABLE.get(operator.name()) or TABLE.get(name) or TABLE.get(name.removesuffix("_"))
    )
    if nondeterminism is None and _TAG in operator.tags:
        return Nondeterminism(_always, is_avoidable=False)
    return nondeterminism
