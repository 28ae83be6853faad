"""A tensor's storage, geometry, version and history; and errors if a saved tensor's changed."""

import ctypes
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from zoo._torch import (
    OFFSET_OF_STORAGE_POINTER,
    DisableTorchDispatch,
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    ForceDispatchKeyGuard,
    Kwargs,
    PyTree,
    conj,
    count_dispatch_modes,
    disabled_torch_dispatch,
    is_key_excluded,
    is_traceable_wrapper_subclass,
    neg_view,
)
from zoo.errors import RecomputeError

T = TypeVar("T")
# classes with a storage of their own; wrapper subclasses are flattened by their own dispatch
PLAIN: set[type] = {Tensor, Parameter, FakeTensor}
# stands for a dead weak reference to a tensor or storage: returns None
gone: Callable[[], None] = type(None)
# the dispatch keys of a thread outside of all modes
_KEYS = DispatchKey
_INCLUDED = DispatchKeySet(_KEYS.BackendSelect) | DispatchKeySet(_KEYS.ADInplaceOrView)
_EXCLUDED = functools.reduce(
    operator.or_,
    (DispatchKeySet(key) for name, key in _KEYS.__members__.items() if name.startswith("Autocast")),
)


def alive(references: Iterable[Callable[[], T | None]]) -> list[T]:
    """Returns the live targets of weak references."""
    return [target for reference in references if (target := reference()) is not None]


def has_own_storage(kind: type) -> bool:
    """Returns whether a class is no wrapper subclass, so that its tensors have a storage."""
    if kind in PLAIN:
        return True
    if kind.__torch_dispatch__ is not disabled_torch_dispatch:  # type: ignore[attr-defined]
        return False
    PLAIN.add(kind)
    return True


def is_plain(tensor: Tensor) -> bool:
    """Returns whether sizes, strides and an offset in its storage are all that a tensor is."""
    return (
        has_own_storage(type(tensor))
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())
    )


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the numbers of a tensor lie one after the other, in any order of its axes."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.layout is torch.strided
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    steps, sizes = zip(*sorted(axis for axis in axes if axis[1] != 1), strict=True)
    return [*steps] == [*itertools.accumulate((1, *sizes[:-1]), operator.mul)]


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Returns the storage of a tensor; None for one that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the indices and values that a sparse tensor consists of, the values last."""
    layout = tensor.layout
    if layout is torch.strided:
        return []
    with DisableTorchDispatch():
        if layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def with_storages(leaves: Iterable[object]) -> list[Tensor]:
    """Returns the tensors among leaves; of a sparse one its parts."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return [part for tensor in tensors for part in parts_of(tensor) or [tensor]]


def take_apart(tensor: object) -> tuple[Kwargs, Callable[[Kwargs], PyTree]]:
    """Returns the parts of a wrapper, none of any other tensor, and a function that rebuilds it."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}, lambda _: tensor
    names, context = tensor.__tensor_flatten__()
    kind, sizes, strides = type(tensor), tensor.size(), tensor.stride()
    parts = {name: getattr(tensor, name) for name in names}
    return parts, lambda parts: kind.__tensor_unflatten__(parts, context, sizes, strides)


def parts_of_wrapper(tensor: object) -> list[Tensor]:
    """Returns the tensors that a wrapper subclass consists of."""
    parts, _ = take_apart(tensor)
    return [part for part in parts.values() if isinstance(part, Tensor)]


class Geometry:
    """Where in its storage a tensor lies."""

    __slots__ = ("conjugate", "dtype", "negative", "offset", "sizes", "strides")

    def __init__(self, tensor: Tensor) -> None:
        self.sizes, self.strides = tensor.size(), tensor.stride()
        self.offset, self.dtype = tensor.storage_offset(), tensor.dtype
        self.negative = tensor.is_neg()
        self.conjugate = self.dtype.is_complex and tensor.is_conj()

    def on(self, base: Tensor) -> Tensor:
        """Returns a tensor of this geometry on the storage of another tensor."""
        is_lazy = self.negative or base.is_neg() or self.dtype.is_complex
        if base.dtype is self.dtype and not (is_lazy or base.is_nested):
            return base.as_strided(self.sizes, self.strides, self.offset)
        return self.of_storage(base.untyped_storage(), base.device)

    def of_storage(self, storage: UntypedStorage, device: torch.device) -> Tensor:
        """Returns a tensor of this geometry on a storage."""
        view = torch.empty(0, dtype=self.dtype, device=device)
        view.set_(storage, self.offset, self.sizes, self.strides)
        if self.conjugate:
            view = conj(view)
        return neg_view(view) if self.negative else view


class Original(weakref.ref[Tensor]):
    """A weak reference to a tensor of the program, which may be given other memory before it dies.

    `Tensor.data = other` calls no operator and counts no version, and autograd, which holds an
    operation's argument itself, reads the other memory. When the tensor dies, the address of its
    storage is copied out of it: in C, since an interrupt during a weak reference's Python callback
    is lost.
    """

    __slots__ = ("home", "storage")
    # the number of bytes to copy: the callback passes the reference to `memmove` as its size
    _as_parameter_ = ctypes.sizeof(ctypes.c_size_t)
    home: int  # the address of its storage when the reference was made
    storage: ctypes.c_size_t  # the address of its last storage

    @property
    def is_replaced(self) -> bool:
        """Whether the tensor is dead and had other memory at the end."""
        return self.storage.value != self.home


# `ctypes.memmove` releases the GIL, which takes longer
_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value  # type: ignore[arg-type]
)


def original_of(tensor: Tensor, storage: UntypedStorage) -> Original:
    """Returns a reference to a tensor with this storage."""
    home = storage._cdata
    last = ctypes.c_size_t(home)
    pointer = tensor._cdata + OFFSET_OF_STORAGE_POINTER
    reference = Original(tensor, functools.partial(_move, ctypes.addressof(last), pointer))
    reference.home, reference.storage = home, last
    return reference


def detach_here() -> Callable[[Tensor], Tensor]:
    """Returns the cheapest function that does what `detached` does at this point."""
    is_below = is_key_excluded(_KEYS.ADInplaceOrView)
    return detached if is_below or count_dispatch_modes() else Tensor.detach


def detached(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph that shares its version counter, wherever this is called.

    Below autograd, as in dispatch modes, `Tensor.detach` gives the result a counter of its own.
    """
    if detach_here() is not detached:
        return tensor.detach()
    with ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED), DisableTorchDispatch():
        result = tensor.detach()
        if isinstance(tensor, FakeTensor):
            return FakeTensor(tensor.fake_mode, result, tensor.fake_device)
    return result


def detached_by_class(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph, as the `__torch_dispatch__` of its class makes it."""
    with ForceDispatchKeyGuard(_INCLUDED | DispatchKeySet(_KEYS.Python), _EXCLUDED):
        return tensor.detach()


def memory_of(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same memory with a version counter of its own; no mode sees this."""
    if not count_dispatch_modes():
        return tensor.data
    with DisableTorchDispatch():
        return tensor.data


def version_check_of(wrapper: Tensor) -> tuple[Tensor, int] | None:
    """Returns the arguments of `check_version` for a wrapper, whose parts count no writes.

    None on the meta device, where a wrapper cannot always be detached.
    """
    is_meta = wrapper.device.type == "meta"
    return None if is_meta else (detached(wrapper), version_of(wrapper))


def version_of(tensor: Tensor) -> int:
    """Returns the version of a tensor; 0 for one made in inference mode, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def check_version(tensor: Tensor, version: int) -> None:
    """Raises RecomputeError for a tensor that was changed in place since it had this version."""
    now = version_of(tensor)
    # a fake tensor has no numbers, and FSDP2 gives its parameters other versions
    if now != version and type(tensor) is not FakeTensor:
        what = "nested tensor" if tensor.is_nested else f"tensor {tuple(tensor.shape)}"
        raise RecomputeError(
            f"a {what} that this gradient needs was changed in place after it was used (version "
            f"{version}, now {now}). Change it after the backward, or change a copy."
        )


def roles_of(tensor: Tensor, sequence: int) -> tuple[bool, bool]:
    """Returns whether a tensor that autograd saves now is an argument with a history, or a result.

    Without a history it is neither. `sequence` is the number of the next operation. A view, whose
    history is not asked for since autograd may regenerate it then, is a result if the operation
    has written it: its base got its history just before.
    """
    if not tensor.requires_grad:
        return False, False
    if (base := tensor._base) is not None:
        written_by = base.grad_fn
        if written_by is None or written_by._sequence_nr() != sequence - 2:
            return False, False
        return False, written_by.name().endswith("CopySlices")
    made_by = tensor.grad_fn
    is_result = made_by is not None and made_by._sequence_nr() == sequence - 1
    return made_by is not None and not is_result, is_result


def check_history(tensor: Tensor | None) -> None:
    """Raises RecomputeError if a saved tensor with a history was detached in place since.

    Autograd refuses that in the baseline, too.
    """
    if tensor is not None and not tensor.requires_grad:
        raise RecomputeError(
            f"a tensor {tuple(tensor.shape)} that this gradient needs was detached in place after "
            "it was used, by `detach_()`. Use `detach()`, which leaves it as it is."
        )
