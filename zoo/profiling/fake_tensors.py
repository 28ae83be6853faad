"""What fake tensors lack and planning needs: the values of constants, the bytes of some kernels.

A fake tensor has no values, and code that reads one (`torch.arange(2, 5).tolist()` in a loss)
raises DataDependentOutputException. But values that code computes from its own constants and from
shapes are the same whatever the data: a counter, whether a given mask masks anything. So each fake
tensor whose values are known has a real one beside it, and every kernel that gets only such tensors
runs on the real ones, too (constant propagation). No value of any other tensor is made up.

For four kinds of kernels torch is wrong when tensors are fake:

- Fused optimizers write in place and allocate nothing. torch has no fake kernels for them and runs
  them on real tensors of the same sizes.
- The CPU's batch norm in half precision with float32 weights, as under autocast, saves its
  statistics in float32; a fake one saves them in half precision.
- A kernel may take what torch's rule for fakes refuses: the CPU's grouped product of matrices takes
  float32. Each different call runs once, for real.
- The CPU's LSTM returns a workspace for its backward, most of what an LSTM saves. A fake one is
  empty. Only the kernel knows the real size: each different call runs once, for real.

Layouts, types and bytes of further results are corrected by rules (`kernel_results`).
"""

import contextlib
import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zoo._torch import (
    DataDependentOutputException,
    DisableTorchDispatch,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    dispatch_modes,
    fake_of,
    in_kernel_invocation,
    pytree,
    unset_fake_temporarily,
)
from zoo.engine.operator_effects import effects_of, is_view
from zoo.engine.recording import KernelMode, has_own_storage, is_plain, written_by
from zoo.profiling.kernel_results import corrected
from zoo.profiling.tensor_spec import VALUES, KernelSpec, TensorSpec, tensors_in


def _operators(overload: str, names: str) -> frozenset[Any]:
    return frozenset(getattr(getattr(torch.ops.aten, name), overload) for name in names.split())


CPU, META = torch.device("cpu"), torch.device("meta")
BATCH_NORM = torch.ops.aten.native_batch_norm.default
# wraps the real tensor of `torch.tensor([...])`
LIFT = torch.ops.aten.lift_fresh.default
# a view that is not tagged as one
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
# torch asks a tensor these before it runs a kernel; they are no kernels
DEVICE = torch.ops.prim.device.default
QUESTIONS = frozenset({DEVICE, torch.ops.prim.layout.default})
# element by element; arguments of one dtype give a result of that dtype
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
# a size comes first, or a tensor of the type and device to make it of
MAKERS = _operators("default", "ones zeros new_empty new_zeros") | _operators(
    "memory_format", "empty"
)
ALIKE = _operators("default", "empty_like ones_like zeros_like clone")
# of so many dimensions
PRODUCTS = dict.fromkeys(_operators("default", "mm addmm"), 2) | {torch.ops.aten.bmm.default: 3}
# along a dimension; the result is contiguous
SOFTMAX = _operators(
    "default", "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"
)
# the most elements of a constant; a larger tensor is data
MOST = 1 << 12
# the same in a forked process, which need not save memory
SMALL = 1 << 16
# modules that it takes up to 0.2 s to import each
NEEDED = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._functorch.config",
    *(("torch.distributed.tensor",) if torch.distributed.is_available() else ()),
    "torch.utils.flop_counter",
)
LSTM = torch.ops.aten.mkldnn_rnn_layer.default
DATA_NEEDED = DataDependentOutputException, DynamicOutputShapeException


@functools.cache
def import_for_fakes() -> None:
    """Imports what fake tensors need, once and not in each forked process."""
    for name in NEEDED:
        importlib.import_module(name)


class NumbersNeeded(BaseException):
    """A forward reads unknown values; no `except Exception` of its own catches this."""


class FakeTensorFixes(KernelMode):
    """Corrects the results of a `FakeTensorMode`; enter it inside one.

    `strict` raises NumbersNeeded instead of torch's own exceptions. `moves_meta` is for a model on
    the meta device: its tensors there, and those that its forward makes, are moved to the CPU,
    whose kernels stand for those of any device.
    """

    def __init__(
        self, mode: FakeTensorMode, *, strict: bool = False, moves_meta: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.strict, self.moves_meta = mode, strict, moves_meta
        self.most = SMALL if strict else MOST
        self.asked = False  # for unknown values, even if the forward went on
        self._constants: Any = WeakTensorKeyDictionary()  # fake tensors -> real ones
        # storages of real ones whose fakes were overwritten with unknown values
        self._stale: weakref.WeakSet[Any] = weakref.WeakSet()

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Records the values of a fake tensor."""
        self._constants[fake] = real

    def forget(self, tensor: Tensor) -> None:
        """Marks the values of a tensor, and of all that share its storage, as unknown."""
        if (real := self._constants.get(tensor)) is not None:
            self._stale.add(real.untyped_storage())

    @contextlib.contextmanager
    def constants_readable(self) -> Iterator[None]:
        """Lets `tolist` and `numpy`, which are no kernels, return constants, too.

        transformers makes other masks for fake tensors; here only for those of unknown values.
        """

        def read(fake: Tensor) -> Tensor:
            if (real := self._real_of(fake)) is None:
                self.asked = True
                raise NumbersNeeded
            return real

        def is_unknown(value: Any) -> bool:
            return isinstance(value, FakeTensor) and self._real_of(value) is None

        replace = mock.patch.object
        utils = sys.modules.get("transformers.utils.import_utils")
        with (
            replace(FakeTensor, "tolist", lambda fake: read(fake).tolist()),
            replace(FakeTensor, "numpy", lambda fake, **_: read(fake).numpy()),
            replace(utils, "is_fake_tensor", is_unknown) if utils else contextlib.nullcontext(),
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a kernel on fake tensors, and on the real ones beside them."""
        if types and not all(map(has_own_storage, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if self.moves_meta:
            args, kwargs = pytree.tree_map(self._moved, (args, kwargs))
        if func in QUESTIONS:
            return answer(func, args[0])
        given = tensors_in((args, kwargs))
        is_known = self._knows(func, given)
        if is_known and given and torch.Tag.data_dependent_output in func.tags:
            return self._on_reals(func, args, kwargs)
        try:
            result = self._on_fakes(func, args, kwargs)
        except DATA_NEEDED as error:
            if is_known:
                return self._faked(self._on_reals(func, args, kwargs))
            self.asked = True
            if not self.strict:
                raise
            raise NumbersNeeded from error
        numbers = sum(tensor.numel() for tensor in tensors_in(result))
        is_followed = is_known and (is_view(func) or numbers <= self.most)
        if not (is_followed and self._follow(func, args, kwargs, result)):
            for tensor in written_by(effects_of(func), args, kwargs):
                self.forget(tensor)
        return result

    def _moved(self, leaf: Any) -> Any:
        """Replaces a tensor on the meta device by a fake on the CPU, and that device by the CPU."""
        if isinstance(leaf, torch.device):
            return CPU if leaf.type == "meta" else leaf
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.is_meta:
            return fake_of(self.mode, leaf)
        return leaf

    def _on_fakes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a kernel on fake tensors, with the results that torch gets wrong corrected."""
        result = result_by_rule(self.mode, func, args, kwargs)
        if result is not NotImplemented:
            return result
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.name.startswith("aten::_fused_") and not schema.returns:
            return None
        try:
            result = func(*args, **kwargs)
        except DATA_NEEDED:
            raise
        except RuntimeError:
            made = _specs_of_results(func, args, kwargs)
            if made is None:
                raise
            fakes = [_empty(self.mode, s.shape, s.stride, s.dtype, args[0].device) for s in made]
            return fakes[0] if len(func._schema.returns) == 1 else tuple(fakes)
        result = corrected(self.mode, func, args, result)
        if func is BATCH_NORM and result[0].device == CPU:
            output, *statistics = result
            dtype = statistics_type(output, *args[1:])
            return (output, *(saved.to(dtype) for saved in statistics))
        if func is LSTM:
            *outputs, workspace = result
            # without grad mode the kernel makes none
            size = _workspace(func, args, kwargs) if torch.is_grad_enabled() else None
            return (*outputs, size and workspace.new_empty(size, dtype=torch.uint8))
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Runs a kernel on the real tensors, too; says whether that was possible."""
        try:
            reals = self._on_reals(func, args, kwargs)
        except Exception:
            # a kernel that only another device has
            return False
        for fake, real in zip(tensors_in(result), tensors_in(reals), strict=True):
            self.know(fake, real)
        return True

    def _knows(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """Says whether a kernel is deterministic and gets known values."""
        effects = effects_of(func)
        if effects.opaque or effects.seeded or effects.reshapes or effects.empty:
            return False
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return False
        # `zeros_like` and the like read only the shape and dtype of a tensor
        return effects.blank or all(self._real_of(tensor) is not None for tensor in tensors)

    def _real_of(self, tensor: Tensor) -> Tensor | None:
        real: Tensor | None = self._constants.get(tensor)
        if real is not None:
            return None if real.untyped_storage() in self._stale else real
        if isinstance(tensor, FakeTensor) or not is_plain(tensor) or tensor.numel() > self.most:
            return None
        # a real tensor of the code itself, such as `torch.tensor([1, 2])`
        if tensor.is_meta or tensor.requires_grad:
            return None
        self.know(tensor, copied(tensor))
        return self._real_of(tensor)

    def _on_reals(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return CPU if isinstance(leaf, torch.device) else leaf
            if (known := self._real_of(leaf)) is not None:
                return known
            # only its shape and dtype are read
            return torch.empty((), dtype=leaf.dtype).expand(leaf.shape)

        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map(real, (args, kwargs))
            return func(*args, **kwargs)

    def _faked(self, result: Any) -> Any:
        def fake(real: Tensor) -> Tensor:
            made: Tensor = self.mode.from_tensor(real, static_shapes=True)
            self.know(made, real)
            return made

        return pytree.tree_map_only(Tensor, fake, result)


def as_data(tensor: Tensor) -> Tensor:
    """Returns a tensor whose values are placeholders and must not count as constants."""
    for mode in dispatch_modes():
        if isinstance(mode, FakeTensorFixes):
            mode.forget(tensor)
    return tensor


def put_tensors(model: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Replaces a model's tensors, by id, including those in lists and dicts of its modules."""
    leaves = (nn.Module, *VALUES)

    def other(value: Any) -> Any:
        if isinstance(value, Tensor):
            return made.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(other, value))
        # a tree map is slow, and most values are no containers
        is_leaf = isinstance(value, leaves)
        return value if is_leaf else pytree.tree_map_only(Tensor, other, value)

    for module in list(model.modules()):
        for name, value in list(vars(module).items()):
            if type(value) is dict:
                value.update({key: other(part) for key, part in value.items()})
            elif type(value) in (list, tuple) or isinstance(value, Tensor):
                vars(module)[name] = other(value)


def copied(tensor: Tensor) -> Tensor:
    """Copies the values of a tensor to a real one on the CPU."""
    with unset_fake_temporarily(), torch.no_grad():
        return tensor.detach().to(CPU, copy=True)


# bytes of workspaces, by the repr of the call's spec
_workspaces: dict[str, int] = {}


def _workspace(func: Any, args: Any, kwargs: Any) -> int:
    """Returns the bytes of the workspace that the CPU's LSTM returns for its backward."""
    spec = KernelSpec.of(func, args, kwargs)
    if repr(spec) not in _workspaces:
        assert spec is not None
        # without grad mode the kernel makes none
        with unset_fake_temporarily(), torch.enable_grad():
            operator, args, kwargs = spec.prepared()
            workspace = operator(*args, **kwargs)[-1]
        _workspaces[repr(spec)] = 0 if workspace is None else int(workspace.nbytes)
    return _workspaces[repr(spec)]


# what kernels return that torch refuses for fakes, by the repr of the call's spec
_results: dict[str, list[TensorSpec] | None] = {}


def _specs_of_results(func: Any, args: Any, kwargs: Any) -> list[TensorSpec] | None:
    """Returns specs of what the CPU's kernel returns for real; None if that raises, too."""
    spec = KernelSpec.of(func, args, kwargs) if effects_of(func).simple else None
    if spec is None or not isinstance(args[0], Tensor):
        return None
    if repr(spec) not in _results:
        with unset_fake_temporarily(), torch.no_grad():
            operator, args, kwargs = spec.prepared()
            try:
                made = tensors_in(operator(*args, **kwargs))
            except Exception:
                _results[repr(spec)] = None
            else:
                _results[repr(spec)] = [TensorSpec.of(tensor) for tensor in made]
    return _results[repr(spec)]


def answer(question: Any, tensor: Tensor) -> Any:
    """Returns the device or layout of a tensor, as a `FakeTensorMode` does."""
    if question is not DEVICE or type(tensor) is not FakeTensor:
        return question(tensor)
    is_inside = tensor.fake_mode.in_kernel_invocation  # type: ignore[attr-defined]
    return META if is_inside else tensor.fake_device  # type: ignore[attr-defined]


def result_by_rule(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Returns torch's result of a kernel on fake tensors, faster; NotImplemented without a rule."""
    if func in _RULES:
        return _RULES[func](mode, *args, **kwargs)
    tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
    if not tensors or tensors[0] is not args[0] or not _is_plain(tensors[0]):
        return NotImplemented
    if (is_view(func) or func is UNSAFE_VIEW) and len(tensors) == 1 and func is not LIFT:
        return _view(mode, func, args, kwargs)
    if func in IN_PLACE and _are_alike(tensors):
        return tensors[0]
    return _like(mode, tensors[0]) if func in POINTWISE and _are_alike(tensors) else NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    """Says whether a tensor is a strided fake without a constant of torch's own."""
    is_fake = type(tensor) is FakeTensor and tensor.layout is torch.strided
    return is_fake and tensor.constant is None  # type: ignore[attr-defined]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Says whether tensors are dense, of one shape, stride, device and floating-point dtype."""
    first = tensors[0]
    return (
        first.is_floating_point()
        and _is_dense(first)
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


def _empty_strided(mode: FakeTensorMode, shape: Any, stride: Any, **others: Any) -> Any:
    dtype, device = others.pop("dtype", None), others.pop("device", None)
    if dtype is None or device is None or device.type == "meta" or any(others.values()):
        return NotImplemented
    return _empty(mode, shape, stride, dtype, device)


def _contiguous(mode: FakeTensorMode, shape: Any, dtype: Any, device: Any) -> Tensor:
    with DisableTorchDispatch():
        made = torch.empty(shape, dtype=dtype, device="meta")
    fake: Tensor = FakeTensor(mode, made, device)
    return fake


def _made(mode: FakeTensorMode, first: Any, size: Any = None, **others: Any) -> Any:
    kind = first if isinstance(first, Tensor) else None
    dtype, device = others.pop("dtype", None), others.pop("device", None)
    if (kind is not None and not _is_plain(kind)) or not _are_defaults(device, others):
        return NotImplemented
    if kind is None:
        return _contiguous(mode, first, dtype or torch.get_default_dtype(), device or CPU)
    return _contiguous(mode, size, dtype or kind.dtype, device or kind.device)


def _alike(mode: FakeTensorMode, tensor: Tensor, **others: Any) -> Any:
    dtype, device = others.pop("dtype", None), others.pop("device", None)
    of_memory = others.pop("memory_format", None)
    if not (_is_plain(tensor) and _are_defaults(device, others)):
        return NotImplemented
    kind = dtype or tensor.dtype, device or tensor.device
    if of_memory is torch.contiguous_format:
        return _contiguous(mode, tensor.shape, *kind)
    is_kept = of_memory in (None, torch.preserve_format) and _is_dense(tensor)
    return _empty(mode, tensor.shape, tensor.stride(), *kind) if is_kept else NotImplemented


def _are_defaults(device: torch.device | None, others: Mapping[str, Any]) -> bool:
    is_meta = device is not None and device.type == "meta"
    return not is_meta and all(value in (None, False, torch.strided) for value in others.values())


def _product(ndim: int, mode: FakeTensorMode, *tensors: Tensor, **_: Any) -> Any:
    *added, one, other = tensors
    if not (_is_plain(one) and one.is_floating_point() and one.ndim == other.ndim == ndim):
        return NotImplemented
    shape = (*one.shape[:-1], other.shape[-1])
    are_alike = all(
        (_is_plain(tensor) or type(tensor) in (Tensor, nn.Parameter))
        and (tensor.dtype, tensor.device, tensor.layout) == (one.dtype, one.device, torch.strided)
        for tensor in tensors
    )
    fits = one.shape[-1] == other.shape[-2] and one.shape[:-2] == other.shape[:-2]
    fits = fits and all(tensor.shape == shape[-1:] for tensor in added)
    return _contiguous(mode, shape, one.dtype, one.device) if are_alike and fits else NotImplemented


def _softmax(mode: FakeTensorMode, *args: Any) -> Any:
    # whether to convert to float32 comes last, or the type that was converted
    *tensors, dim, last = args
    x = tensors[0]
    is_same = (
        _is_plain(x) and x.is_contiguous() and _are_alike(tensors) and last in (False, x.dtype)
    )
    return _like(mode, x) if is_same and -x.ndim <= dim < x.ndim else NotImplemented


def _nll_loss_backward(mode: FakeTensorMode, gradient: Tensor, x: Tensor, *others: Any) -> Any:
    _, weight, *_ = others
    is_same = _is_plain(x) and x.is_contiguous() and _is_plain(gradient) and weight is None
    return _like(mode, x) if is_same and gradient.dtype is x.dtype else NotImplemented


def _view(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    device = args[0].device
    with in_kernel_invocation(mode):
        found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        return FakeTensor(mode, found, device)
    return [FakeTensor(mode, view, device) for view in found]


def _batch_norm(mode: FakeTensorMode, x: Tensor, *others: Any) -> Any:
    *weights, training, _, _ = others
    if not _is_plain(x) or x.device != CPU or not training or not x.is_contiguous():
        return NotImplemented
    of_statistics = (x.shape[1],), (1,), statistics_type(x, *weights), CPU
    return (_like(mode, x), _empty(mode, *of_statistics), _empty(mode, *of_statistics))


def statistics_type(x: Tensor, *weights: Any) -> torch.dtype:
    """Returns the dtype of a batch norm's statistics on the CPU: float32 if a weight's is."""
    dtypes = [weight.dtype for weight in weights if isinstance(weight, Tensor)]
    return torch.float32 if torch.float32 in dtypes else x.dtype


def _batch_norm_backward(
    mode: FakeTensorMode, gradient: Tensor, x: Tensor, weight: Tensor | None, *others: Any
) -> Any:
    *_, training, _, wanted = others
    are_dense = _is_plain(gradient) and gradient.is_contiguous() and x.is_contiguous()
    if x.device != CPU or not training or not are_dense or weight is None:
        return NotImplemented
    of_weight = (x.shape[1],), (1,), weight.dtype, CPU
    of_input, of_scale, of_bias = wanted
    return (
        _like(mode, x) if of_input else None,
        _empty(mode, *of_weight) if of_scale else None,
        _empty(mode, *of_weight) if of_bias else None,
    )


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(MAKERS, _made),
    **dict.fromkeys(ALIKE, _alike),
    **{func: functools.partial(_product, ndim) for func, ndim in PRODUCTS.items()},
    **dict.fromkeys(SOFTMAX, _softmax),
    torch.ops.aten.empty_strided.default: _empty_strided,
    torch.ops.aten.nll_loss_backward.default: _nll_loss_backward,
    BATCH_NORM: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
