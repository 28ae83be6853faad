"""Tensors without their numbers: which tensor of a step, which storage, how it lies there."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NumberedSpec(NamedTuple):
    """A tensor of a state without its numbers: which tensor, which storage, how it looks at it."""

    tensor: int
    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def bytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.size) * self.dtype.itemsize

    def fills(self, size: int) -> bool:
        """Says whether the tensor is dense and covers a storage of this many bytes exactly."""
        return self.offset == 0 and self.reach * self.dtype.itemsize == self.bytes == size

    @property
    def reach(self) -> int:
        """How many numbers lie from its first one to its last one."""
        if not math.prod(self.size):
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


StateSpec = tuple[NumberedSpec | None, ...]


def make_tensors(kinds: Sequence[NumberedSpec], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Makes real tensors of these kinds: halves where they are floating, else zeros."""
    made = [tensor for tensor in Storages(sizes).tensors(kinds) if tensor is not None]
    for tensor in made:
        # an expanded tensor cannot be written, its storage can
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(tensor.untyped_storage())
        whole.fill_(0.5 if tensor.is_floating_point() or tensor.is_complex() else 0)
    return tuple(made)


class Storages:
    """Numbers storages: those of the inputs first, then others as they are met."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # a storage's address is its name only as long as it lives

    def tensors(self, kinds: Sequence[NumberedSpec | None]) -> tuple[Tensor | None, ...]:
        """Makes tensors of these kinds; equal numbers give the same storage, the same tensor."""
        looks = Counter(kind.storage for kind in {kind for kind in kinds if kind is not None})
        bases: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}
        for kind in kinds:
            if kind is None or kind.tensor in made:
                continue
            if looks[kind.storage] == 1 and kind.fills(self.sizes[kind.storage]):
                made[kind.tensor] = torch.empty_strided(
                    kind.size, kind.stride, dtype=kind.dtype, device=kind.device
                )
                self._register(made[kind.tensor].untyped_storage(), kind.storage)
            else:
                made[kind.tensor] = self._view(kind, bases)
            made[kind.tensor].requires_grad_(kind.requires_grad)
        return tuple(None if kind is None else made[kind.tensor] for kind in kinds)

    def _view(self, kind: NumberedSpec, bases: dict[int, Tensor]) -> Tensor:
        size = self.sizes[kind.storage]
        if kind.storage not in bases:
            base = torch.empty(size, dtype=torch.uint8, device=kind.device)
            bases[kind.storage] = base
            self._register(base.untyped_storage(), kind.storage)
        whole = size // kind.dtype.itemsize * kind.dtype.itemsize
        numbers = bases[kind.storage][:whole].view(kind.dtype)
        return numbers.as_strided(kind.size, kind.stride, kind.offset).detach()

    def kinds(self, outputs: Sequence[Tensor | None], leaves: Sequence[Tensor | None]) -> StateSpec:
        """Describes a returned state; a tensor that was only handed on keeps its number."""
        names: dict[int, int] = {}
        for leaf in leaves:
            if leaf is not None:
                names.setdefault(id(leaf), len(names))
        return tuple(
            None
            if output is None
            else numbered_spec(
                output, names.setdefault(id(output), len(names)), self.number(output)
            )
            for output in outputs
        )

    def number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self._register(storage, len(self.sizes))
            self.sizes.append(storage.nbytes())
        return self.numbers[storage._cdata]

    def _register(self, storage: Any, number: int) -> None:
        self.numbers[storage._cdata] = number
        self.alive.append(storage)


def numbered_spec(tensor: Tensor, number: int, storage: int) -> NumberedSpec:
    """Describes a tensor."""
    return NumberedSpec(
        number,
        storage,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def renumber(kind: NumberedSpec, tensors: dict[int, int], storages: dict[int, int]) -> NumberedSpec:
    """Translates a kind's two numbers; numbers not met yet are given the next free one."""
    return kind._replace(
        tensor=tensors.setdefault(kind.tensor, len(tensors)),
        storage=storages.setdefault(kind.storage, len(storages)),
    )
