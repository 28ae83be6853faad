"""The random streams of a first run, given again to the second.

`torch.utils.checkpoint` stashes the state of torch's default generators. A forward may draw from
others: Python's, NumPy's, a `torch.Generator` that it holds. Each is a source here, whose state is
read before the first run. Segments that draw nothing share what they read, so only those that draw
pay for another 5 KB. (Keeping a state only when it moved would miss what `fork_rng` hides.)
"""

import contextlib
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Stream = tuple["Source", Any]


class Source:
    """One random stream: a default generator, or one of the user's."""

    def __init__(self, kind: str, target: Any = None) -> None:
        self.kind = kind
        self.target = target

    def read(self) -> Any:
        """Returns a copy of the state."""
        if self.kind == "torch":
            return torch.get_rng_state()
        if self.kind == "cuda":
            return torch.cuda.get_rng_state(self.target)
        if self.kind == "generator":
            return self.target.get_state()
        if self.kind == "python":
            return self.target.getstate() if self.target else random.getstate()
        if self.kind == "bits":
            return self.target.bit_generator.state
        return sys.modules["numpy"].random.get_state(legacy=True)

    def write(self, state: Any) -> None:
        """Sets the state."""
        if self.kind == "torch":
            torch.set_rng_state(state)
        elif self.kind == "cuda":
            torch.cuda.set_rng_state(state, self.target)
        elif self.kind == "generator":
            self.target.set_state(state)
        elif self.kind == "python":
            (self.target or random).setstate(state)
        elif self.kind == "bits":
            self.target.bit_generator.state = state
        else:
            sys.modules["numpy"].random.set_state(state)


class _Latest(threading.local):
    """The states that were read last on this thread, to be shared while nothing draws."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}


_latest = _Latest()
_ALWAYS = [Source("torch"), Source("python")]
_NUMPY = Source("numpy")


def sources(tensors: Sequence[object], generators: Iterable[Any]) -> list[Source]:
    """Lists the streams that a function of these tensors and generators may draw from."""
    found = [*_ALWAYS, *(Source(_kind(generator), generator) for generator in generators)]
    if "numpy" in sys.modules:
        found.append(_NUMPY)
    return found + [Source("cuda", device) for device in drawing_devices(tensors)]


def read_streams(found: Sequence[Source]) -> list[Stream]:
    """Reads the state of each source."""
    return [(source, _shared(source)) for source in found]


@contextlib.contextmanager
def replayed_streams(streams: Sequence[Stream]) -> Iterator[None]:
    """Sets the sources back to these states inside the block, and puts them back after."""
    now = [(source, _shared(source)) for source, _ in streams]
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
    for source, state in streams:
        if not _same(source.read(), state):
            source.write(state)


def _shared(source: Source) -> Any:
    state = source.read()
    if source.target is not None:
        return state
    latest = _latest.states.get(source.kind)
    if latest is None or not _same(latest, state):
        _latest.states[source.kind] = state
        return state
    return latest


def _kind(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return "python"
    return "bits" if hasattr(generator, "bit_generator") else "generator"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return repr(one) == repr(other)
    if isinstance(one[1], tuple):
        return bool(one == other)
    return bool(one[2:] == other[2:] and (one[1] == other[1]).all())
