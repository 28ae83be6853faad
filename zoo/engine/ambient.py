"""What surrounds a forward without being its argument: autocast, for each kind of device.

Captured once at the start of a chain's forward, since no step boundary changes it, and entered
again for a second run, which happens in the backward: outside the user's `with` block and, on CUDA,
on another thread.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Autocast:
    """The state of autocast for one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def read(cls, device_type: str) -> "Autocast":
        """Reads it on this thread."""
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )


@dataclass(frozen=True)
class Ambient:
    """What surrounded a forward."""

    autocasts: tuple[Autocast, ...]
    cache_enabled: bool

    @classmethod
    def capture(cls, tensors: Iterable[object]) -> "Ambient":
        """Reads what surrounds this thread now, for the CPU and the devices of these tensors."""
        types = {value.device.type for value in tensors if isinstance(value, Tensor)}
        known = sorted(kind for kind in types | {"cpu"} if torch.amp.is_autocast_available(kind))
        return cls(tuple(Autocast.read(kind) for kind in known), torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Surrounds the block with what was captured."""
        with contextlib.ExitStack() as stack:
            for autocast in self.autocasts:
                if autocast.enabled or torch.is_autocast_enabled(autocast.device_type):
                    stack.enter_context(
                        torch.autocast(
                            autocast.device_type,
                            autocast.dtype,
                            autocast.enabled,
                            self.cache_enabled,
                        )
                    )
            yield
