"""Buffers as a first run found them, with copies of those that may move.

Copies of small buffers are shared by all segments for as long as the buffer stays as it is. Those
of more than 64 KiB are copied until a first run has left them alone. One that is moved later for
the first time is refused in the backward, by name, and copied from then on.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from zoo.engine.norms import moves_unseen
from zoo.engine.notes import is_comparable, is_small, version_of


class BufferState:
    """A buffer before the first run, with a copy where it may move.

    A segment that does not move a small one may still find it moved by another when its turn comes
    again.
    """

    __slots__ = ("copy", "module", "moved", "name", "tensor", "version")

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.version = version_of(tensor)
        self.moved = False
        self.copy: Tensor | None = None
        if is_small(tensor):
            self.copy = _shared_copy(module, name, tensor)
        elif _moves.get(module, {}).get(name, True):
            self.copy = tensor.detach().clone()

    def close(self) -> None:
        """Looks at the end of the first run whether it moved; drops a copy that nobody needs."""
        self.moved = version_of(self.tensor) != self.version or self._moves_unseen()
        if self.copy is not None and not self.moved and is_comparable(self.tensor):
            # writes through .data bump no version
            self.moved = not torch.equal(self.copy, self.tensor)
        if not is_small(self.tensor):
            known = _moves.setdefault(self.module, {})
            known[self.name] = self.moved or known.get(self.name, False)
            if not self.moved:
                self.copy = None

    @property
    def differs(self) -> bool:
        """Says whether it is no longer what the first run found."""
        return self.moved or version_of(self.tensor) != self.version

    @property
    def is_lost(self) -> bool:
        """Says whether it is neither what the first run found nor known."""
        return self.copy is None and self.differs

    def _moves_unseen(self) -> bool:
        return moves_unseen(self.module, self.name) and not is_comparable(self.tensor)

    def again(self) -> Tensor:
        """Returns the buffer as the first run found it."""
        return self.copy.clone() if self.differs and self.copy is not None else self.tensor


_moves: "weakref.WeakKeyDictionary[nn.Module, dict[str, bool]]" = weakref.WeakKeyDictionary()
_Copy = tuple[Any, int, Tensor]
_copies: "weakref.WeakKeyDictionary[nn.Module, dict[str, _Copy]]" = weakref.WeakKeyDictionary()


def _shared_copy(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    copies = _copies.setdefault(module, {})
    known, version, copy = copies.get(name, (None, -1, tensor))
    same = known is not None and known() is tensor and version == version_of(tensor)
    if (
        not same
        or copy.shape != tensor.shape
        or (is_comparable(tensor) and not torch.equal(copy, tensor))
    ):
        copy = tensor.detach().clone()
        copies[name] = weakref.ref(tensor), version_of(tensor), copy
    return copy
