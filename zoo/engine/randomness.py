"""The random stream of a first run, given again to the second.

`torch.utils.checkpoint` stashes the state of the CPU and of the devices of the tensor arguments at
each call. Here the state is compared before and after the first run and kept only where it moved:
a segment that draws nothing keeps nothing and restores nothing.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Stream = tuple[torch.device | None, Tensor]


def read_streams(devices: Sequence[torch.device]) -> list[Stream]:
    """Reads the state of the default generator of the CPU and of each CUDA device."""
    return [
        (None, torch.get_rng_state()),
        *((device, torch.cuda.get_rng_state(device)) for device in devices),
    ]


def moved_streams(before: Sequence[Stream], devices: Sequence[torch.device]) -> list[Stream]:
    """Returns those of the earlier states whose generator has drawn since: often none."""
    return [
        stream
        for stream, (_, now) in zip(before, read_streams(devices), strict=True)
        if not torch.equal(stream[1], now)
    ]


@contextlib.contextmanager
def replayed_streams(streams: Sequence[Stream]) -> Iterator[None]:
    """Sets the generators back to these states inside the block, and puts them back after."""
    if not streams:
        yield
        return
    now = read_streams([device for device, _ in streams if device is not None])
    try:
        _write(streams)
        yield
    finally:
        _write(now)


def drawing_devices(tensors: Sequence[object]) -> list[torch.device]:
    """Lists the CUDA devices whose generator a function of these tensors may use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    found = {value.device for value in tensors if isinstance(value, Tensor) and value.is_cuda}
    found.add(torch.device("cuda", torch.cuda.current_device()))
    return sorted(found, key=str)


def _write(streams: Sequence[Stream]) -> None:
    for device, state in streams:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
