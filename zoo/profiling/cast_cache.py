"""The casts of weights that autocast holds until it is left.

torch caches them for a whole process. A dry step beside a program has a cache of its own, since
what the program has cast must neither serve it nor be forgotten.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zoo._torch import Args, Kwargs, Operator, PyTree
from zoo.engine.devices import accelerator
from zoo.engine.dispatch_keys import kernel_of
from zoo.engine.operator_effects import effects_of
from zoo.engine.recorder import KernelMode
from zoo.engine.tensor_state import detached
from zoo.profiling.event_recorder import CONVERSION, is_cached


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
        self.casts: dict[int, Tensor] = {}

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
        if func is CONVERSION and (cast := self.casts.get(id(args[0]))) is not None:
            return detached(cast)
        result = kernel_of(func, effects_of(func), args, kwargs)(*args, **kwargs)
        if is_cached(func, args, result):
            self.casts[id(args[0])] = detached(result)
        return result
