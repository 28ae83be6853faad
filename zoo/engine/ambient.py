"""What surrounds a forward without being its argument: autocast, default device and type, switches.

Captured once at the start of a chain's forward, since no step boundary changes it, and entered
again for a second run, which happens in the backward: outside the user's `with` block and, on CUDA,
on another thread. Only what differs then is set. Put back afterwards is also what the function set
and had no time to reset, as a second run stops in its middle.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda as attention


class Switch(NamedTuple):
    """A global setting that changes what kernels compute: how to read and how to set it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _write_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


SWITCHES = (
    Switch(torch.get_default_dtype, torch.set_default_dtype),
    Switch(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _write_determinism,
    ),
    Switch(attention.flash_sdp_enabled, attention.enable_flash_sdp),
    Switch(attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp),
    Switch(attention.math_sdp_enabled, attention.enable_math_sdp),
    Switch(attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp),
    Switch(torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
)


def _reset(switch: Switch, value: Any) -> None:
    if switch.read() != value:
        switch.write(value)


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
    device: torch.device
    switches: tuple[Any, ...]

    @classmethod
    def capture(cls, tensors: Iterable[object]) -> "Ambient":
        """Reads what surrounds this thread now, for the CPU and the devices of these tensors."""
        types = {value.device.type for value in tensors if isinstance(value, Tensor)}
        known = sorted(kind for kind in types | {"cpu"} if torch.amp.is_autocast_available(kind))
        return cls(
            tuple(Autocast.read(kind) for kind in known),
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
            tuple(switch.read() for switch in SWITCHES),
        )

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
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            for switch, value in zip(SWITCHES, self.switches, strict=True):
                now = switch.read()
                stack.callback(_reset, switch, now)
                if now != value:
                    switch.write(value)
            yield
