"""Dispatch modes that count replayed kernels, and the memory of tensors that kernels made."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.engine import devices
from zoo.engine.segments import thread
from zoo.profiling.peak_memory import trace


class Replayed(TorchDispatchMode):
    """Counts the kernels that are replayed, by the names of their operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if thread.replaying:
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def replayed(backward: Callable[[], Any]) -> Counter[str]:
    """Returns how often the kernels of each operator are replayed in a backward."""
    with Replayed() as mode:
        backward()
    return mode.names


class Made(TorchDispatchMode):
    """Notes the memory of each tensor that a kernel makes, without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[StorageWeakRef, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for address, storage in _storages(out).items():
            if address not in given:
                name = f"{func.overloadpacket.__name__} {storage.nbytes()}"
                self.found.append((StorageWeakRef(storage), name))
        return out

    def alive(self, *apart: Tensor | None) -> list[str]:
        """Describes the tensors that are in memory, apart from those given."""
        known = {tensor.untyped_storage()._cdata for tensor in apart if tensor is not None}
        return [
            what
            for reference, what in self.found
            if not reference.expired() and reference.cdata not in known
        ]


def _storages(values: Any) -> dict[int, Any]:
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return {(s := tensor.untyped_storage())._cdata: s for tensor in dense}


def bytes_left(function: Callable[[], object]) -> int:
    """Returns the bytes that a function allocates and does not free, where tests run."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return sum(size for _, size in trace(function).events)
    before = devices.allocated(device)
    function()
    return devices.allocated(device) - before
