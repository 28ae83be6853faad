"""The random streams of a first run, given again to the second.

`torch.utils.checkpoint` stashes the state of torch's default generators. A forward may draw from
others: Python's, NumPy's, a `torch.Generator` that it holds. Each is a source here, whose state is
read before the first run. Segments that draw nothing share what they read, so only those that draw
pay for another 5 KB. (Keeping a state only when it moved would miss what `fork_rng` hides.)
"""

import contextlib
import ctypes
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Source(NamedTuple):
    """One random stream: a default generator, or one of the user's.

    `same` compares two states of a default generator, so that what does not move is kept once.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    same: Callable[[Any, Any], bool] | None = None


Stream = tuple[Source, Any]


class _NumpyStream:
    """NumPy's default stream.

    Reading its state takes 25 microseconds, comparing the 625 words behind it less than one. Where
    no normal variate is held back, the state is what it was if the words are.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.generator: Any = None
        self.words: Any = None
        self.legacy = True
        self.known: tuple[bytes, Any] | None = None

    def read(self) -> Any:
        """Returns the state, the same object as before where it did not move."""
        find = getattr(self.module, "get_bit_generator", None)
        if find is not None and (generator := find()) is not self.generator:
            self.generator, self.words, self.known = generator, _words_of(generator), None
            self.legacy = generator.state["bit_generator"] == "MT19937"
        words = bytes(self.words) if self.words is not None else None
        if self.known is not None and words == self.known[0]:
            return self.known[1]
        state = self.module.get_state(legacy=self.legacy)
        self.known = (words, state) if words is not None and not state[3] else None
        return state

    def write(self, state: Any) -> None:
        """Sets the state."""
        if self.read() is not state:
            self.known = None
            self.module.set_state(state)

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        """Compares two states."""
        if one is other:
            return True
        if isinstance(one, dict) or isinstance(other, dict):
            return repr(one) == repr(other)
        return bool(one[2:] == other[2:] and (one[1] == other[1]).all())


def _words_of(generator: Any) -> Any:
    """Returns the 624 words of a Mersenne Twister and its position in them, as they are in memory.

    None where the generator is another, or keeps them in another way than it documents its state.
    """
    state = generator.state
    if state.get("bit_generator") != "MT19937":
        return None
    words = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
    documented = [*state["state"]["key"], state["state"]["pos"]]
    return words if list(words) == documented else None


class _Latest(threading.local):
    """The states that were read last on this thread, to be shared while nothing draws."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}


def same_state(one: Tensor, other: Tensor) -> bool:
    """Compares two states: they are real tensors, also where a mode makes all others fake."""
    with torch._C._DisableTorchDispatch():
        return torch.equal(one, other)


_latest = _Latest()
_ALWAYS = (
    Source("torch", torch.get_rng_state, torch.set_rng_state, same_state),
    Source("python", random.getstate, random.setstate, eq),
)


def sources(tensors: Sequence[object], generators: Iterable[Any]) -> list[Source]:
    """Lists the streams that a function of these tensors and generators may draw from."""
    found = [*_ALWAYS, *map(_of, generators)]
    if numpy := sys.modules.get("numpy.random"):
        found.append(_of_numpy(numpy))
    return found + [_of_device(device) for device in drawing_devices(tensors)]


def read_streams(found: Sequence[Source]) -> list[Stream]:
    """Reads the state of each source."""
    return [(source, _shared(source)) for source in found]


@contextlib.contextmanager
def replayed_streams(streams: Sequence[Stream]) -> Iterator[None]:
    """Sets the sources to these states inside the block, and puts them back after."""
    now = [(source, _shared(source)) for source, _ in streams]
    try:
        for (source, state), (_, present) in zip(streams, now, strict=True):
            if state is not present:
                source.write(state)
        yield
    finally:
        for source, state in now:
            source.write(state)


def drawing_devices(tensors: Sequence[object]) -> list[torch.device]:
    """Lists the accelerators whose generator a function of these tensors may use."""
    found = {value.device for value in tensors if isinstance(value, Tensor)}
    found = {device for device in found if device.type in ("cuda", "mps")}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.add(torch.device("cuda", torch.cuda.current_device()))
    return sorted(found, key=str)


def _shared(source: Source) -> Any:
    state = source.read()
    if source.same is None:
        return state
    latest = _latest.states.get(source.name)
    if latest is None or not source.same(latest, state):
        _latest.states[source.name] = state
        return state
    return latest


@functools.cache
def _of_numpy(module: Any) -> Source:
    stream = _NumpyStream(module)
    return Source("numpy", stream.read, stream.write, stream.same)


def _of_device(device: torch.device) -> Source:
    if device.type == "mps":
        return Source("mps", torch.mps.get_rng_state, torch.mps.set_rng_state, same_state)
    return Source(
        str(device),
        functools.partial(torch.cuda.get_rng_state, device),
        lambda state: torch.cuda.set_rng_state(state, device),
        same_state,
    )


def _of(generator: Any) -> Source:
    if isinstance(generator, random.Random):
        return Source("own", generator.getstate, generator.setstate)
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return Source("own", lambda: bits.state, lambda state: setattr(bits, "state", state))
    return Source("own", generator.get_state, generator.set_state)
