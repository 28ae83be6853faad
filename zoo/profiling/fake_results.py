"""The results of kernels on fake tensors: by rules, or torch's own, corrected.

The rules are for the kernels that are called most. They give torch's own results, several times
faster. Where torch's results are wrong, other operators follow than in a real forward (a `view`,
not a `clone`), so that a plan that was made ahead is for a forward that never comes; or bytes are
missing:

- Fused optimizers write in place and allocate nothing. torch has no fake kernels for them and runs
  them on real tensors of the same sizes. For those of lists torch takes long.
- A kernel may take what torch's rule refuses: the CPU's grouped product of matrices takes float32.
  Each different call runs once, for real.
- The CPU's LSTM returns a workspace for its backward, and cuDNN's networks a reserve, most of what
  they save. A fake one is empty. Only the kernel knows the real size: each different call runs
  once, for real. Without the device cuDNN's is estimated (`cudnn_recurrent`). torch has no results
  of its backward, or of the kernels before it: the state of its dropout and the flat weights. The
  backward of the CPU's LSTM returns the gradients of both biases in memory of their own.
- Norms, `roll` and the like of a tensor in channels last return channels last on the CPU, and a
  batch norm of one that is in no memory format a contiguous one.
- The gradient of a layer norm's input, and the CPU's `logsigmoid`, are contiguous, whatever the
  input is.
- The CPU's batch norm and group norm in half precision with float32 weights, as under autocast,
  have float32 statistics.
- A loss that is reduced lies in the memory of the losses of all elements, `fold` in that of its
  columns: torch's kernels make the whole and resize it.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage

from zoo._torch import (
    Args,
    DataDependentOutputException,
    DisableTorchDispatch,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    Kwargs,
    Operator,
    PyTree,
    in_kernel_invocation,
    unset_fake_temporarily,
)
from zoo.engine.operator_effects import DROPOUT_STATE, effects_of, is_view
from zoo.engine.tensor_state import is_dense
from zoo.errors import LONGEST, in_a_line
from zoo.profiling.cudnn_recurrent import Network, dropout_state_bytes
from zoo.profiling.tensor_spec import CPU, KernelSpec, TensorSpec, key_of, tensors_in

Shape = Sequence[int]
_aten = torch.ops.aten
DATA_NEEDED = DataDependentOutputException, DynamicOutputShapeException
LSTM = _aten.mkldnn_rnn_layer.default
RECURRENT = _aten._cudnn_rnn.default
# wraps the real tensor of `torch.tensor([...])`
LIFT = _aten.lift_fresh.default
BATCH_NORM = _aten.native_batch_norm.default
# a view that is not tagged as one
UNSAFE_VIEW = _aten._unsafe_view.default


def _operators(overload: str, names: str) -> frozenset[Operator]:
    return frozenset(getattr(getattr(_aten, name), overload) for name in names.split())


# element by element; arguments of one dtype give a result of that dtype
POINTWISE = frozenset().union(
    *(_operators(overload, "add sub mul div") for overload in ("Tensor", "Scalar")),
    _operators(
        "default",
        "relu gelu gelu_backward silu silu_backward sigmoid sigmoid_backward tanh tanh_backward "
        "threshold_backward exp neg sqrt rsqrt",
    ),
)
# the same, written to the first argument
IN_PLACE = _operators("Tensor", "add_ sub_ mul_ div_") | _operators("default", "relu_ silu_ tanh_")
ELEMENTWISE = POINTWISE | IN_PLACE
# the first argument is a size, or a tensor that gives the dtype and device
MAKERS = _operators("default", "ones zeros new_empty new_zeros") | _operators(
    "memory_format", "empty"
)
ALIKE = _operators("default", "empty_like ones_like zeros_like clone")


class FakeResults:
    """The results of kernels on the fake tensors of a mode.

    What torch returns is remembered, of kernels that write nothing and whose results have memory of
    their own: a training step calls each of them many times, and so do the next dry steps.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        # the container, if any, and what it holds
        self._specs: dict[Hashable, tuple[type, list[TensorSpec | None]]] = {}

    def of(self, func: Operator, args: Args, kwargs: Kwargs) -> PyTree:
        """Returns the result of a kernel, by a rule or torch's own, corrected.

        Raises:
            DataDependentOutputException, DynamicOutputShapeException: it needs values.
        """
        result = result_by_rule(self.mode, func, args, kwargs)
        if result is not NotImplemented:
            return result
        effects, tensors = effects_of(func), tensors_in((args, kwargs))
        key = key_of(func, args, kwargs) if effects.makes and not effects.writes else None
        if key is None or not all(map(_is_plain, tensors)):
            return _by_torch(self.mode, func, args, kwargs)
        of_call = key, torch.is_grad_enabled(), torch.get_default_dtype()
        if of_call not in self._specs:
            result = _by_torch(self.mode, func, args, kwargs)
            if (specs := _specs_of(result, tensors)) is not None:
                self._specs[of_call] = type(result), specs
            return result
        kind, specs = self._specs[of_call]
        parts = [spec and _empty(self.mode, *spec[:2], *spec[3:5]) for spec in specs]
        return kind(parts) if kind in (tuple, list) else parts[0]


def _specs_of(result: PyTree, arguments: Sequence[Tensor]) -> list[TensorSpec | None] | None:
    """Returns the specs of a kernel's results; None unless each has memory of its own."""
    parts = result if type(result) in (tuple, list) else [result]
    if not all(part is None or (isinstance(part, Tensor) and _is_plain(part)) for part in parts):
        return None
    tensors = [*arguments, *(part for part in parts if part is not None)]
    storages = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    specs = [None if part is None else TensorSpec.of(part) for part in parts]
    is_alone = all(
        spec is None or (spec.alone() is spec and storages[part.untyped_storage()._cdata] == 1)
        for part, spec in zip(parts, specs, strict=True)
    )
    return specs if is_alone else None


def _by_torch(mode: FakeTensorMode, func: Operator, args: Args, kwargs: Kwargs) -> PyTree:
    """Returns torch's result of a kernel, corrected."""
    if _only_writes_lists(func, args):
        return None
    try:
        result = func(*args, **kwargs)
    except DATA_NEEDED:
        raise
    except RuntimeError:
        specs = _specs_of_results(func, args, kwargs) if effects_of(func).simple else None
        if not isinstance(specs, list):
            raise
        fakes = [_empty(mode, s.shape, s.stride, s.dtype, args[0].device) for s in specs]
        return fakes[0] if len(func._schema.returns) == 1 else tuple(fakes)
    correct = _CORRECTIONS.get(func)
    return result if correct is None else correct(mode, result, *args)


# results, or errors, of kernels for which torch has no rule; by the repr of the call's spec
_results: dict[str, list[TensorSpec] | str] = {}


def _specs_of_results(func: Operator, args: Args, kwargs: Kwargs) -> list[TensorSpec] | str | None:
    """Returns specs of a kernel's results on real tensors, or the error; None if not tried."""
    spec = KernelSpec.of(func, args, kwargs)
    if spec is None or not isinstance(args[0], Tensor):
        return None
    if repr(spec) not in _results:
        # without grad mode an LSTM makes no workspace
        with unset_fake_temporarily(), torch.enable_grad():
            try:
                # fails, too, where the device is not here
                operator, args, kwargs = spec.prepared()
                results = tensors_in(operator(*args, **kwargs))
            except Exception as error:
                _results[repr(spec)] = in_a_line(error, LONGEST)
            else:
                _results[repr(spec)] = [TensorSpec.of(tensor) for tensor in results]
    return _results[repr(spec)]


def result_by_rule(mode: FakeTensorMode, func: Operator, args: Args, kwargs: Kwargs) -> PyTree:
    """Returns torch's result of a kernel on fake tensors, faster; NotImplemented without a rule."""
    if func in _RULES:
        return _RULES[func](mode, *args, **kwargs)
    tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
    if not tensors or tensors[0] is not args[0] or not _is_plain(tensors[0]):
        return NotImplemented
    if (is_view(func) or func is UNSAFE_VIEW) and len(tensors) == 1 and func is not LIFT:
        return _view(mode, func, args, kwargs)
    # a complex number makes others complex
    has_rule = func in ELEMENTWISE and not any(isinstance(value, complex) for value in args)
    return _elementwise(mode, func, tensors) if has_rule else NotImplemented


def _elementwise(mode: FakeTensorMode, func: Operator, tensors: Sequence[Tensor]) -> PyTree:
    first, are_dense = tensors[0], _are_dense(tensors)
    # slices are in order, as those of the gradient of a concatenation
    if not (_are_of_one_kind(tensors) and (are_dense or _are_in_order(tensors))):
        return NotImplemented
    if func in IN_PLACE:
        return first
    if are_dense:
        return _like(mode, first)
    return _contiguous(mode, first.shape, first.dtype, first.device)


def _only_writes_lists(func: Operator, args: Args) -> bool:
    """Returns whether an optimizer's kernel shows nothing but that it writes lists of tensors.

    A counter of steps is torch's own constant in inference mode, which torch then counts up.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or schema.returns:
        return False
    is_fused = schema.name.startswith("aten::_fused_")
    is_of_lists = schema.name.startswith("aten::_foreach_")
    return is_fused or (is_of_lists and all(map(_is_plain, tensors_in(args))))


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is a strided fake without a constant of torch's own.

    Complex ones may be conjugate, and their views negative, which a view does not show.
    """
    is_fake = type(tensor) is FakeTensor and tensor.layout is torch.strided
    is_fake = is_fake and not (tensor.is_complex() or tensor.is_neg())
    return is_fake and tensor.constant is None  # type: ignore[attr-defined]


def _keeps_steps(tensor: Tensor) -> bool:
    """Returns whether a result like a tensor has its steps.

    Where an axis has size 1, torch says which step it gets.
    """
    return tensor.is_contiguous() or (1 not in tensor.shape and is_dense(tensor))


def _are_of_one_kind(tensors: Sequence[Tensor]) -> bool:
    """Returns whether tensors are of one shape, device and floating-point dtype."""
    first = tensors[0]
    return first.is_floating_point() and all(
        _is_plain(other)
        and other.shape == first.shape
        and other.dtype is first.dtype
        and other.device == first.device
        for other in tensors[1:]
    )


def _are_dense(tensors: Sequence[Tensor]) -> bool:
    """Returns whether tensors are dense and of one stride, which their result has, too."""
    stride = tensors[0].stride()
    return _keeps_steps(tensors[0]) and all(other.stride() == stride for other in tensors[1:])


def _are_in_order(tensors: Sequence[Tensor]) -> bool:
    """Returns whether later axes have smaller steps in all tensors: the result is contiguous."""
    return all(
        step > following > 0
        for tensor in tensors
        for step, following in itertools.pairwise(tensor.stride())
    )


def _empty(
    mode: FakeTensorMode, shape: Shape, stride: Shape, dtype: torch.dtype, device: torch.device
) -> Tensor:
    with DisableTorchDispatch():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    fake: Tensor = FakeTensor(mode, meta, device)
    return fake


def _like(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return _empty(mode, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _empty_strided(mode: FakeTensorMode, shape: Shape, stride: Shape, **others: PyTree) -> PyTree:
    dtype, device = others.pop("dtype", None), others.pop("device", None)
    if dtype is None or device is None or device.type == "meta" or any(others.values()):
        return NotImplemented
    return _empty(mode, shape, stride, dtype, device)


def _contiguous(
    mode: FakeTensorMode,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Makes a tensor that is contiguous in a memory format."""
    with DisableTorchDispatch():
        meta = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)
    fake: Tensor = FakeTensor(mode, meta, device)
    return fake


def _new(mode: FakeTensorMode, first: Tensor | Shape, size: Shape = (), **others: PyTree) -> PyTree:
    dtype, device = others.pop("dtype", None), others.pop("device", None)
    if not _are_defaults(device, others):
        return NotImplemented
    if not isinstance(first, Tensor):
        return _contiguous(mode, first, dtype or torch.get_default_dtype(), device or CPU)
    if not _is_plain(first):
        return NotImplemented
    return _contiguous(mode, size, dtype or first.dtype, device or first.device)


# storages of the reserves of cuDNN's networks
_reserves: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()


def note_reserve(storage: UntypedStorage) -> None:
    """Notes that a fake storage stands for the reserve of a cuDNN network."""
    _reserves.add(storage)


def _clone(mode: FakeTensorMode, tensor: Tensor, **others: PyTree) -> PyTree:
    """Clones a tensor, and returns a reserve as it is.

    The autograd node of a recurrent network clones its reserve if the graph is retained. A training
    step does not retain it, but to a node that is called by itself it looks retained.
    """
    if _is_plain(tensor) and tensor.untyped_storage() in _reserves:
        return _view(mode, _aten.alias.default, (tensor,), {})
    return _alike(mode, tensor, **others)


def _joined(mode: FakeTensorMode, tensors: Sequence[Tensor], dim: int = 0) -> PyTree:
    """Concatenates tensors; the result is contiguous if the first one is in no other format."""
    first, axes = tensors[0], len(tensors[0].shape)
    is_formatless = axes not in (4, 5) or first.stride()[1] > first.stride()[-1]
    if not (-axes <= dim < axes and all(map(_is_plain, tensors)) and is_formatless):
        return NotImplemented
    dim %= axes
    kinds = {(*t.shape[:dim], *t.shape[dim + 1 :], t.dtype, t.device) for t in tensors}
    # an empty one may have any shape
    if len(kinds) > 1 or not all(len(t.shape) == axes and t.numel() for t in tensors):
        return NotImplemented
    shape = [*first.shape]
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _contiguous(mode, shape, first.dtype, first.device)


def _product(mode: FakeTensorMode, *tensors: Tensor, axes: int = 2, **_: PyTree) -> PyTree:
    """Multiplies matrices, with a bias of a row before them or without."""
    *biases, x, y = tensors
    shape = (*x.shape[:-1], y.shape[-1])
    if not (
        all(map(_is_plain, tensors))
        and len(x.shape) == len(y.shape) == axes
        and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
        and (*x.shape[:-2], x.shape[-1]) == tuple(y.shape[:-1])
        and all(tuple(bias.shape) == shape[-1:] for bias in biases)
    ):
        return NotImplemented
    return _contiguous(mode, shape, x.dtype, x.device)


def _alike(mode: FakeTensorMode, tensor: Tensor, **others: PyTree) -> PyTree:
    dtype, device = others.pop("dtype", None), others.pop("device", None)
    of_memory = others.pop("memory_format", None)
    if not (_is_plain(tensor) and _are_defaults(device, others)):
        return NotImplemented
    kind = dtype or tensor.dtype, device or tensor.device
    if of_memory is torch.contiguous_format:
        return _contiguous(mode, tensor.shape, *kind)
    is_kept = of_memory in (None, torch.preserve_format) and _keeps_steps(tensor)
    return _empty(mode, tensor.shape, tensor.stride(), *kind) if is_kept else NotImplemented


def _are_defaults(device: torch.device | None, others: Mapping[str, object]) -> bool:
    is_meta = device is not None and device.type == "meta"
    return not is_meta and all(value in (None, False, torch.strided) for value in others.values())


def _view(mode: FakeTensorMode, func: Operator, args: Args, kwargs: Kwargs) -> PyTree:
    device = args[0].device
    with in_kernel_invocation(mode):
        result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return FakeTensor(mode, result, device)
    return [FakeTensor(mode, view, device) for view in result]


def _batch_norm(mode: FakeTensorMode, x: Tensor, *others: PyTree) -> PyTree:
    *weights, training, _, _ = others
    if not _is_plain(x) or x.device != CPU or not training or not x.is_contiguous():
        return NotImplemented
    of_statistics = (x.shape[1],), (1,), statistics_type(x, *weights), CPU
    return (_like(mode, x), _empty(mode, *of_statistics), _empty(mode, *of_statistics))


def statistics_type(x: Tensor, *weights: object) -> torch.dtype:
    """Returns the dtype of a batch norm's statistics on the CPU: float32 if a weight's is."""
    dtypes = [weight.dtype for weight in weights if isinstance(weight, Tensor)]
    return torch.float32 if torch.float32 in dtypes else x.dtype


def _batch_norm_backward(
    mode: FakeTensorMode, gradient: Tensor, x: Tensor, weight: Tensor | None, *others: PyTree
) -> PyTree:
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


def _of_scores(mode: FakeTensorMode, like: Tensor, *others: PyTree, kind: PyTree = False) -> PyTree:
    """Returns what a loss makes of scores (N, C), or of gradients of theirs."""
    tensors = [like, *(other for other in others if isinstance(other, Tensor))]
    is_same_kind = kind in (False, like.dtype) and all(
        _is_plain(other) and (other.dtype, other.device) == (like.dtype, like.device)
        for other in tensors
    )
    is_matrix = len(like.shape) == 2 and like.is_contiguous()
    return _like(mode, like) if is_same_kind and is_matrix else NotImplemented


def _log_softmax(mode: FakeTensorMode, x: Tensor, dim: int, widens: bool) -> PyTree:
    return _of_scores(mode, x, kind=widens) if dim in (-1, 1) else NotImplemented


def _log_softmax_backward(
    mode: FakeTensorMode, gradient: Tensor, result: Tensor, dim: int, kind: torch.dtype
) -> PyTree:
    if dim not in (-1, 1) or gradient.shape != result.shape or not gradient.is_contiguous():
        return NotImplemented
    return _of_scores(mode, result, gradient, kind=kind)


def _picked_backward(
    mode: FakeTensorMode, gradient: Tensor, x: Tensor, targets: Tensor, *others: PyTree
) -> PyTree:
    weight, reduction, *_ = others
    is_sum = weight is None and reduction != 0 and targets.shape == x.shape[:1]
    return _of_scores(mode, x, gradient) if is_sum and not gradient.shape else NotImplemented


def _set_storage(
    mode: FakeTensorMode, tensor: Tensor, storage: UntypedStorage, *geometry: PyTree
) -> PyTree:
    """Gives a fake tensor a storage: for a real one that of the fakes of its tensors."""
    if type(tensor) is not FakeTensor:
        return NotImplemented
    if storage.device.type != "meta":
        converter = mode.fake_tensor_converter.meta_converter
        key = converter.describer.get_storage_id(storage)
        if key not in converter.storage_memo:
            meta = torch.UntypedStorage(storage.nbytes(), device="meta")
            converter.storage_memo[key] = meta
        storage = converter.storage_memo[key]
    offset, *sizes = geometry or (0, (storage.nbytes() // tensor.itemsize,))
    with in_kernel_invocation(mode):
        _aten.set_.source_Storage_storage_offset(tensor, storage, offset, *sizes)
    return tensor


def _dropout_state(
    mode: FakeTensorMode, *args: PyTree, device: torch.device, **others: PyTree
) -> Tensor:
    """Returns a real state if the device is here: torch keeps it, and gives it to later calls.

    So that these make it anew, as without this call, the generator has to count as seeded again.
    """
    with contextlib.suppress(Exception), unset_fake_temporarily():
        state: Tensor = DROPOUT_STATE(*args, device=device, **others)
        return state
    return _contiguous(mode, (dropout_state_bytes(device),), torch.uint8, device)


def _recurrent(
    mode: FakeTensorMode, x: Tensor, weights: Sequence[Tensor], *others: PyTree
) -> PyTree:
    """Returns output, states after, reserve and flat weights: the argument, if there is one."""
    _, flat, hidden, cell, *settings, _ = others
    network, batch_first = Network.of(x, settings), settings[4]
    width = network.outputs * network.directions
    *sequence, _ = x.transpose(0, 1).shape if batch_first and x.ndim > 2 else x.shape
    output = _contiguous(mode, (*sequence, width), x.dtype, x.device)
    if flat is None:
        flat = _flat_weights(mode, weights, network)
    specs = _specs_of_results(RECURRENT, (x, weights, *others), {})
    # the flat weights come last, with or without memory of their own
    size = specs[3].bytes if isinstance(specs, list) else network.reserve_bytes()
    reserve = _contiguous(mode, (size,), torch.uint8, x.device)
    note_reserve(reserve.untyped_storage())
    return (
        output.transpose(0, 1) if batch_first and x.ndim > 2 else output,
        _contiguous(mode, hidden.shape, hidden.dtype, x.device),
        _contiguous(mode, (0,) if cell is None else cell.shape, hidden.dtype, x.device),
        reserve,
        _contiguous(mode, (network.weights,), x.dtype, x.device) if flat is None else flat,
    )


def _flat_weights(mode: FakeTensorMode, weights: Sequence[Tensor], network: Network) -> PyTree:
    """Returns the one buffer that weights lie in; None where each has memory of its own.

    torch 2.11 looks for it by addresses, which fake tensors lack, and makes a fake of the buffer
    for each weight that is one.
    """
    offsets = [*itertools.chain.from_iterable(network.offsets)]
    if [weight.storage_offset() for weight in weights] != offsets:
        return None
    whole = max(weights, key=lambda weight: weight.untyped_storage().nbytes())
    return _view(mode, _aten.as_strided.default, (whole, (network.weights,), (1,), 0), {})


def _recurrent_backward(
    mode: FakeTensorMode, x: Tensor, weights: Sequence[Tensor], *others: PyTree
) -> PyTree:
    """Returns gradients of input, states and weights; those of the weights lie in one storage."""
    _, flat, hidden, cell, _, *gradients = others[:8]
    *settings, _, _, wanted = others[8:]
    if all(gradient is None for gradient in gradients):
        return None, None, None, [None] * len(weights)
    is_turned = settings[4] and x.ndim > 2
    of_x = _contiguous(mode, (x.transpose(0, 1) if is_turned else x).shape, x.dtype, x.device)
    of_states = (
        None if state is None else _contiguous(mode, state.shape, state.dtype, x.device)
        for state in (hidden, cell)
    )
    parts = _weights_in(mode, flat, Network.of(x, settings), weights)
    return (of_x.transpose(0, 1) if is_turned else of_x, *of_states, parts if wanted[3] else [])


def _weights_in(
    mode: FakeTensorMode, flat: Tensor, network: Network, weights: Sequence[Tensor]
) -> list[Tensor]:
    """Returns tensors like weights in a new flat buffer; without biases in memory of their own."""
    offsets = list(itertools.chain.from_iterable(network.offsets))
    pairs = list(zip(weights, offsets, strict=False))
    if len(offsets) != len(weights):
        return [_contiguous(mode, weight.shape, weight.dtype, weight.device) for weight in weights]
    with DisableTorchDispatch():
        whole = torch.empty(flat.shape, dtype=flat.dtype, device="meta")
        parts = [whole.as_strided(w.shape, w.stride(), start).detach() for w, start in pairs]
    return [FakeTensor(mode, part, flat.device) for part in parts]


def _flatten(
    mode: FakeTensorMode, weights: Sequence[Tensor], stride: int, *settings: PyTree
) -> PyTree:
    """Moves weights into one new buffer, and returns it."""
    if not all(map(_is_plain, weights)):
        return NotImplemented
    network = Network.flattened(weights[0].dtype, *settings)
    flat = _contiguous(mode, (network.weights,), weights[0].dtype, weights[0].device)
    # without biases the parameters are every second ones, and a projection
    offsets = [own if stride > 3 else [*own[:2], *own[4:]] for own in network.offsets]
    for weight, offset in zip(weights, itertools.chain.from_iterable(offsets), strict=True):
        _set_storage(mode, weight, flat.untyped_storage(), offset, weight.shape)
    return flat


_RULES: dict[Operator, Callable[..., PyTree]] = {
    **dict.fromkeys(MAKERS, _new),
    **dict.fromkeys(ALIKE, _alike),
    _aten.clone.default: _clone,
    _aten.cat.default: _joined,
    **dict.fromkeys((_aten.mm.default, _aten.addmm.default), _product),
    _aten.bmm.default: functools.partial(_product, axes=3),
    _aten.empty_strided.default: _empty_strided,
    _aten.set_.source_Storage: _set_storage,
    _aten.set_.source_Storage_storage_offset: _set_storage,
    DROPOUT_STATE: _dropout_state,
    RECURRENT: _recurrent,
    _aten._cudnn_rnn_backward.default: _recurrent_backward,
    _aten._cudnn_rnn_flatten_weight.default: _flatten,
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.nll_loss_backward.default: _picked_backward,
    BATCH_NORM: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
}


# the third argument, if there is one, is the reduction; 0 is none
_REDUCED = (_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default)


def _format_of(tensor: Tensor) -> torch.memory_format:
    """Returns the memory format of a tensor, as kernels see it that preserve the format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.ndim)
    is_last = last is not None and tensor.is_contiguous(memory_format=last)
    return last if last is not None and is_last else torch.contiguous_format


def _in(mode: FakeTensorMode, result: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns a result in a memory format: itself, if it has that."""
    if result.is_contiguous(memory_format=memory_format):
        return result
    return _contiguous(mode, result.shape, result.dtype, result.device, memory_format)


def _like_input(mode: FakeTensorMode, result: Tensor, x: Tensor, *_: object) -> Tensor:
    is_here = x.device == CPU and result.shape == x.shape
    return _in(mode, result, _format_of(x)) if is_here else result


def _gradient_like_input(
    mode: FakeTensorMode, result: Tensor, _: Tensor, x: Tensor, *__: object
) -> Tensor:
    return _like_input(mode, result, x)


def _norm(mode: FakeTensorMode, result: PyTree, x: Tensor, *weights: object) -> PyTree:
    output, *statistics = result
    if x.device == CPU:
        dtype = statistics_type(x, *weights)
        statistics = [saved.to(dtype) for saved in statistics]
    return (_like_input(mode, output, x), *statistics)


def _norm_backward(
    mode: FakeTensorMode, result: PyTree, _: Tensor, x: Tensor, *__: object
) -> PyTree:
    of_input, *others = result
    if of_input is None or x.device != CPU:
        return result
    return (_like_input(mode, of_input.to(x.dtype), x), *others)


def _log_sigmoid(mode: FakeTensorMode, result: PyTree, x: Tensor) -> PyTree:
    if x.device != CPU:
        return result
    return tuple(_in(mode, part, torch.contiguous_format) for part in result)


def _layer_norm_backward(mode: FakeTensorMode, result: PyTree, *_: object) -> PyTree:
    of_input, *others = result
    return result if of_input is None else (_in(mode, of_input, torch.contiguous_format), *others)


def _within(mode: FakeTensorMode, result: Tensor, numbers: int) -> Tensor:
    """Returns a result that lies in the memory of so many numbers."""
    if numbers <= result.numel():
        return result
    with DisableTorchDispatch():
        whole = torch.empty(numbers, dtype=result.dtype, device="meta")
        meta = whole.as_strided(result.shape, result.stride())
    fake: Tensor = FakeTensor(mode, meta, result.device)
    return fake


def _reduced(mode: FakeTensorMode, result: Tensor, x: Tensor, y: Tensor, *others: PyTree) -> Tensor:
    is_reduced = not others or others[0] != 0
    sizes = itertools.zip_longest(x.shape[::-1], y.shape[::-1], fillvalue=1)
    whole = math.prod(itertools.starmap(max, sizes)) if is_reduced else 0
    return _within(mode, result, whole)


def _reduced_with_weight(
    mode: FakeTensorMode, result: Tensor, x: Tensor, y: Tensor, _: object = None, reduction: int = 1
) -> Tensor:
    return _reduced(mode, result, x, y, reduction)


def _columns(mode: FakeTensorMode, result: Tensor, columns: Tensor, *_: object) -> Tensor:
    return _within(mode, result, columns.numel())


def _lstm(mode: FakeTensorMode, result: PyTree, *args: PyTree) -> PyTree:
    *outputs, workspace = result
    if not torch.is_grad_enabled():
        # the kernel makes no workspace, and an undefined tensor is None
        return (*outputs, None)
    specs = _specs_of_results(LSTM, args, {})
    if not isinstance(specs, list):
        raise RuntimeError(f"this LSTM, whose workspace is unknown, fails on real tensors: {specs}")
    size = sum(spec.bytes for spec in specs[len(outputs) :])
    return (*outputs, workspace.new_empty(size, dtype=torch.uint8))


def _lstm_backward(_: FakeTensorMode, result: PyTree, *__: object) -> PyTree:
    of_input, *weights, bias, again, hidden, cell = result
    return of_input, *weights, bias, torch.empty_like(again), hidden, cell


_CORRECTIONS: dict[Operator, Callable[..., PyTree]] = {
    LSTM: _lstm,
    _aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
    BATCH_NORM: _norm,
    _aten.native_group_norm.default: _norm,
    _aten.native_group_norm_backward.default: _norm_backward,
    _aten.native_batch_norm_backward.default: _norm_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten.roll.default: _like_input,
    _aten.channel_shuffle.default: _like_input,
    _aten.reflection_pad2d_backward.default: _gradient_like_input,
    _aten.replication_pad2d_backward.default: _gradient_like_input,
    **dict.fromkeys(_REDUCED, _reduced),
    _aten.binary_cross_entropy.default: _reduced_with_weight,
    _aten.col2im.default: _columns,
}
