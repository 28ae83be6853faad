"""The casts of weights that autocast holds until it is left.

torch caches them for a whole process. A dry step beside a program has a cache of its own, since
what the program has cast must neither serve it nor be forgotten.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zoo._torch import Args, Kwargs, Operator, PyTree, is_any_autocast_enabled
from zoo.engine.devices import accelerator
from zoo.engine.dispatch_keys import kernel_of
from zoo.engine.operator_effects import effects_of
from zoo.engine.recorder import KernelMode
from zoo.engine.tensor_state import detached

CONVERSION = torch.ops.aten._to_copy.default


def caches_casts() -> bool:
    """Returns whether autocast holds casts of weights until the forward is over."""
    return is_any_autocast_enabled() and torch.is_autocast_cache_enabled()


def is_cached(func: Operator, args: Args, result: PyTree) -> bool:
    """Returns whether autocast caches a result: a cast of what is trained, a weight or an input."""
    if func is not CONVERSION:
        return False
    source: Tensor = args[0]
    is_trained = source.requires_grad and source.is_leaf and not source._is_view()
    is_lower = result.dtype is torch.get_autocast_dtype(source.device.type)
    return is_trained and is_lower and source.dtype is torch.float32


def autocast_left(device: torch.device) -> AbstractContextManager[object]:
    """Runs the block outside of the autocasts of a device."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocasts_here() -> Callable[[], list[torch.autocast]]:
    """Returns a function that makes the autocasts which are around this call."""
    kinds = ("cpu", *filter(None, [accelerator()]))
    states = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]
    return lambda: [torch.autocast(k, dtype, cache_enabled=holds) for k, dtype, holds in states]


class CastCache(KernelMode):
    """Casts a weight once for all kernels inside of the `with` block that take it.

    To enter below all other modes of the forward. In the graph each kernel has a cast of its own.
    """

    keeps_compiled = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # by the weight, and what it is cast to; held, so that no other gets its identity
        self.casts: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        """Holds no cast any more."""
        self.casts = {}

    @contextlib.contextmanager
    def in_place_of_torchs(self) -> Iterator["CastCache"]:
        """Turns off torch's cache in the block, and forgets the casts at its end."""
        torch.set_autocast_cache_enabled(False)
        try:
            yield self
        finally:
            torch.set_autocast_cache_enabled(True)
            self.forget()

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        """Runs a kernel, unless it is a cast that was made before."""
        kwargs = kwargs or {}
        kernel = kernel_of(func, effects_of(func), args, kwargs)
        if func is not CONVERSION:
            return kernel(*args, **kwargs)
        key = id(args[0]), repr(kwargs)
        if key in self.casts:
            return detached(self.casts[key][1])
        result = kernel(*args, **kwargs)
        if is_cached(func, args, result):
            self.casts[key] = args[0], detached(result)
        return result
