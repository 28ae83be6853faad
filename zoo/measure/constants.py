"""The numbers of constants while tensors are fake: `torch.arange(2, 5).tolist()` in a loss.

A fake tensor has no numbers, and code that reads one raises DataDependentOutputException. But what
code makes of its own numbers and of shapes alone is the same whatever the data. torch's mode for
fake tensors keeps `torch.tensor(3)` and nothing larger, and before 2.14 does not read a real number
(a counter such as `num_batches_tracked`). Here the numbers of small constants are computed beside
their fake tensors. The fake tensors stay, so that bytes and kernels are counted as ever.

Numbers of data stay unknown: of inputs, targets, weights and random streams.
"""

import contextlib
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.weak import WeakIdKeyDictionary

from zoo.measure.memory import tensors_in

# elements of a constant; who reads out more reads data
MOST = 4096

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default
# `torch.tensor` hands the numbers that the code wrote to it
_WRITTEN = _aten.lift_fresh.default
_OF_SHAPES = frozenset(
    (
        _aten.zeros_like, _aten.ones_like, _aten.full_like,
        _aten.new_zeros, _aten.new_ones, _aten.new_full,
    )
)  # fmt: skip
# numbers that happen to lie there
_ARBITRARY = frozenset(
    (
        _aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided,
        _aten.new_empty, _aten.new_empty_strided, _aten.resize_,
    )
)  # fmt: skip


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the numbers of constants among fake tensors; enter it inside of a `FakeTensorMode`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        known: Any = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self.known: MutableMapping[Tensor, Tensor] = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on fake tensors, and on the numbers of constants beside them."""
        kwargs = kwargs or {}
        if func is _READ and (value := self._value(args[0])) is not None:
            with _disable_current_modes():
                return value.item()
        given = tensors_in((args, kwargs))
        result = func(*args, **kwargs)
        found = tensors_in(result)
        values = None
        if self._decides(func, given, found):
            values = _values(func, *pytree.tree_map(self._real, (args, kwargs)))
        if values is not None and list(map(_layout, found)) == list(map(_layout, values)):
            for tensor, value in zip(found, values, strict=True):
                self.known[tensor] = value
        elif _shares(func):
            # it may write what it is given, now or through what it returns
            for tensor in given:
                self.forget(tensor)
        return result

    def forget(self, tensor: Tensor) -> None:
        """Takes the numbers of a tensor, and of all that share its storage, for data."""
        if (value := self.known.get(tensor)) is None:
            return
        storage = value.untyped_storage()._cdata
        for other, value in list(self.known.items()):
            if value.untyped_storage()._cdata == storage:
                del self.known[other]

    def _value(self, tensor: Tensor) -> Tensor | None:
        is_real = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        return tensor if is_real else self.known.get(tensor)

    def _decides(self, func: Any, given: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
        """Says whether constants alone decide what an operation writes and returns."""
        if not (
            isinstance(func, OpOverload)
            and func.namespace == "aten"
            and torch.Tag.nondeterministic_seeded not in func.tags
            and func.overloadpacket not in _ARBITRARY
        ):
            return False
        tensors = (*given, *found)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return False
        if not func.is_view and any(tensor.numel() > MOST for tensor in tensors):
            return False
        if func is _WRITTEN and not isinstance(given[0], FakeTensor):
            return True
        return func.overloadpacket in _OF_SHAPES or all(tensor in self.known for tensor in given)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value in self.known:
            return self.known[value]
        with _disable_current_modes():
            if not isinstance(value, FakeTensor):
                return value.detach().clone()
            # of these only the shape and the type count
            return torch.empty((), dtype=value.dtype).expand(value.shape)


def as_data(tensor: Tensor) -> Tensor:
    """Returns a tensor whose numbers only stand in for others: nobody takes them for constants."""
    for mode in _get_current_dispatch_mode_stack():  # type: ignore[no-untyped-call]
        if isinstance(mode, Constants):
            mode.forget(tensor)
    return tensor


def _values(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """Runs an operation on numbers; None where the CPU cannot, as with types of other devices."""
    with contextlib.suppress(Exception), _disable_current_modes():
        return tensors_in(func(*args, **kwargs))
    return None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _shares(func: Any) -> bool:
    """Says whether an operation writes a tensor that it is given, or returns one of its storage."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(argument.alias_info for argument in schema.arguments)
