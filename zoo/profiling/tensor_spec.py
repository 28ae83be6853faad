"""Tensors and calls of kernels without their numbers: shape, stride, dtype, device, storage.

From such metadata tensors are made again, fake or real: those that alias share a storage again.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo._torch import pytree
from zoo.engine.operators import CONSTANTS, KERNELS, resolved
from zoo.profiling.caching_allocator import rounded_up


class TensorSpec(NamedTuple):
    """A tensor without its numbers; `bytes` are those of its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Describes a strided tensor."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.untyped_storage().nbytes(),
        )

    def empty(self) -> Tensor:
        """Makes such a tensor, in a storage of this size and with any numbers."""
        if self.offset == 0:
            dense = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
            if dense.untyped_storage().nbytes() == self.bytes:
                return dense.requires_grad_(self.requires_grad)
        return self.view_of(torch.empty(self.bytes, dtype=torch.uint8, device=self.device))

    def view_of(self, base: Tensor) -> Tensor:
        """Makes such a tensor in the storage of a tensor of bytes."""
        size = self.dtype.itemsize
        numbers = base[: self.bytes // size * size].view(self.dtype)
        # detached: no view that autograd would have to know
        view = numbers.as_strided(self.shape, self.stride, self.offset).detach()
        return view.requires_grad_(self.requires_grad)

    def alone(self) -> "TensorSpec":
        """Returns the spec of the same numbers in a storage that holds nothing else."""
        steps = zip(self.shape, self.stride, strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in steps)
        numbers = reach if math.prod(self.shape) else 0
        return self._replace(offset=0, bytes=numbers * self.dtype.itemsize)


class NumberedSpec(NamedTuple):
    """A tensor of a state or of a call: which one, in which storage; equal numbers, the same."""

    tensor: int
    storage: int
    spec: TensorSpec

    def renumbered(self, tensors: dict[int, int], storages: dict[int, int]) -> "NumberedSpec":
        """Translates both numbers; those not met yet are given the next free one."""
        return self._replace(
            tensor=tensors.setdefault(self.tensor, len(tensors)),
            storage=storages.setdefault(self.storage, len(storages)),
        )

    def on_cpu(self) -> "NumberedSpec":
        """Puts a tensor of the meta device on the CPU, whose kernels stand for those of any."""
        if self.spec.device.type != "meta":
            return self
        return self._replace(spec=self.spec._replace(device=torch.device("cpu")))


StateSpec = tuple[NumberedSpec | None, ...]


class Storages:
    """Numbers storages: those of the tensors made here first, then others as they are met.

    `sizes` are their bytes, in whole `block`s.
    """

    def __init__(self, block: int = 1) -> None:
        self.block = block
        self.sizes: list[int] = []
        self._numbers: Any = weakref.WeakKeyDictionary()

    def number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = len(self.sizes)
            self.sizes.append(rounded_up(storage.nbytes(), self.block))
        return int(self._numbers[storage])

    def specs(self, tensors: Iterable[Tensor | None], before: Iterable[Any] = ()) -> StateSpec:
        """Describes tensors; those among `before` have the first numbers."""
        names: dict[int, int] = {}
        for tensor in before:
            if tensor is not None:
                names.setdefault(id(tensor), len(names))
        found: list[NumberedSpec | None] = []
        for tensor in tensors:
            if tensor is None:
                found.append(None)
                continue
            name = names.setdefault(id(tensor), len(names))
            found.append(NumberedSpec(name, self.number(tensor), TensorSpec.of(tensor)))
        return tuple(found)

    def empty(self, state: StateSpec) -> tuple[Tensor | None, ...]:
        """Makes a state whose numbers come in order; its storages are given the same numbers."""
        specs = {entry.tensor: entry for entry in state if entry is not None}
        views = Counter(entry.storage for entry in specs.values())
        bases: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}
        for number, entry in specs.items():
            if views[entry.storage] == 1:
                made[number] = entry.spec.empty()
            else:
                if entry.storage not in bases:
                    size, device = entry.spec.bytes, entry.spec.device
                    bases[entry.storage] = torch.empty(size, dtype=torch.uint8, device=device)
                made[number] = entry.spec.view_of(bases[entry.storage])
            self.number(made[number])
        return tuple(None if entry is None else made[entry.tensor] for entry in state)


class KernelSpec(NamedTuple):
    """A call of a kernel: a `NumberedSpec` in the place of each tensor."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, operator: Any, args: Any, kwargs: Any) -> "KernelSpec | None":
        """Describes a call; None for a kernel that cannot be called alone."""
        if getattr(operator, "namespace", "") not in KERNELS:
            return None
        leaves = pytree.tree_leaves((args, kwargs))
        if not all(isinstance(leaf, Tensor | torch.Generator | CONSTANTS) for leaf in leaves):
            return None
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        specs = _of_arguments(tensors)

        def without_numbers(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return specs[id(leaf)]
            return None if isinstance(leaf, torch.Generator) else leaf

        return cls(str(operator), *pytree.tree_map(without_numbers, (args, kwargs)))

    def prepared(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Makes what the call takes: floating tensors of halves, others of zeros."""
        made: dict[Any, Any] = dict(
            zip(self._tensors, Storages().empty(self._tensors), strict=True)
        )
        for tensor in made.values():
            _fill(tensor)

        def real(leaf: Any) -> Any:
            return made[leaf] if _is_spec(leaf) else leaf

        args, kwargs = pytree.tree_map(real, (self.args, self.kwargs), is_leaf=_is_spec)
        return resolved(self.operator), args, kwargs

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each storage of its arguments."""
        return tuple({entry.storage: entry.spec.bytes for entry in self._tensors}.values())

    @property
    def _tensors(self) -> tuple[NumberedSpec, ...]:
        leaves = pytree.tree_leaves((self.args, self.kwargs), is_leaf=_is_spec)
        return tuple(leaf for leaf in leaves if _is_spec(leaf))


def _of_arguments(tensors: Sequence[Tensor]) -> dict[int, NumberedSpec]:
    """Describes the arguments of a kernel, by their ids.

    Where one lies in a larger storage that no other looks at is nothing to a kernel.
    """
    state = [entry.on_cpu() for entry in Storages().specs(tensors) if entry is not None]
    views = Counter(entry.storage for entry in state)
    found = {}
    for tensor, entry in zip(tensors, state, strict=True):
        spec = entry.spec._replace(requires_grad=False)
        alone = spec.alone() if views[entry.storage] == 1 else spec
        found[id(tensor)] = entry._replace(spec=alone)
    return found


def _is_spec(value: Any) -> bool:
    return isinstance(value, NumberedSpec)


def _fill(tensor: Tensor) -> None:
    # an expanded tensor cannot be written, its storage can
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    whole.fill_(0.5 if tensor.is_floating_point() or tensor.is_complex() else 0)
