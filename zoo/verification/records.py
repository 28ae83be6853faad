"""Everything that a step of training leaves, under its name, and the first bit of it that differs.

`torch.testing.assert_close` compares numbers: it takes 0.0 for -0.0 and stops at a NaN. Here it is
bits, and also what is no tensor: counters and flags that modules keep, random streams.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.measure.reach import BOOKKEEPING
from zoo.verification.report import Difference

Name = tuple[str, str]  # the kind and the name of something compared
Record = dict[Name, Any]  # tensors as they are, everything else as its repr

ASIDE = BOOKKEEPING | {"runner"}


def first_difference(expected: Record, actual: Record, step: int) -> Difference | None:
    """Compares what two trainings left after a step of training, in the order of `expected`."""
    for key in [*expected, *(key for key in actual if key not in expected)]:
        if key not in actual or key not in expected:
            side = "the baseline" if key in expected else "the other training"
            return Difference(*key, step, note=f"only in {side}")
        if found := _difference(*key, step, expected[key], actual[key]):
            return found
    return None


def _difference(kind: str, name: str, step: int, expected: Any, actual: Any) -> Difference | None:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        told = _told(expected), _told(actual)
        note = f"{told[1]} instead of {told[0]}" if max(map(len, told)) < 40 else "another value"
        return None if told[0] == told[1] else Difference(kind, name, step, note=note)
    if same_bits(expected, actual):
        return None
    form, other = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (expected, actual))
    if form != other:
        return Difference(kind, name, step, note=f"{other} instead of {form}")
    differing = (_bits(expected) != _bits(actual)).any(1)
    numbers = [_numbers(tensor)[differing.to(tensor.device)] for tensor in (expected, actual)]
    gap = (numbers[0] - numbers[1]).abs().nan_to_num(nan=torch.inf).max()
    return Difference(kind, name, step, int(differing.sum()), len(differing), float(gap))


def same_bits(expected: Tensor, actual: Tensor) -> bool:
    """Says whether two tensors are equal in type, shape and every bit: -0.0 is not 0.0."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return False
    return torch.equal(_bits(expected), _bits(actual).to(expected.device))


def same(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> bool:
    """Says whether two lists hold tensors with the same bits."""
    return len(expected) == len(actual) and all(map(same_bits, expected, actual))


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous()


def _bits(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes (elements, bytes of one)."""
    tensor = _dense(tensor)
    return tensor.reshape(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _numbers(tensor: Tensor) -> Tensor:
    tensor = _dense(tensor).reshape(-1).cpu()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return "none" if value is None else str(value)


def named(kind: str, value: Any) -> Iterator[tuple[Name, Any]]:
    """Yields the tensors and plain values in nested containers by their path: 'output[1][0]'."""
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        name = f"{kind}{pytree.keystr(path)}"
        if isinstance(leaf, Tensor):
            yield (kind, name), leaf
        elif isinstance(leaf, torch.Generator):
            yield (kind, name), leaf.get_state()
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            yield (kind, name), repr(leaf)


def attributes(model: nn.Module) -> Iterator[tuple[Name, Any]]:
    """Yields what modules keep beside parameters and buffers: counters, flags, caches, state."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ASIDE:
                for (_, name), leaf in named("", value):
                    yield ("attribute", f"{path}.{key}{name}".lstrip(".")), leaf


def read_streams() -> dict[str, Any]:
    """Reads the state of every global source of random numbers that is in use, by name."""
    streams: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = torch.cuda.get_rng_state_all()
        streams |= {f"cuda:{device}": state for device, state in enumerate(states)}
    if torch.backends.mps.is_available():
        streams["mps"] = torch.mps.get_rng_state()
    if "numpy" in sys.modules:
        streams["numpy"] = sys.modules["numpy"].random.get_state()
    return streams


def set_streams(streams: Mapping[str, Any]) -> None:
    """Sets the state of every source that `read_streams` read."""
    for name, state in streams.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == "python":
            random.setstate(state)
        elif name == "numpy":
            sys.modules["numpy"].random.set_state(state)
        elif name == "mps":
            torch.mps.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, name)


def encoded(streams: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields states of `read_streams` as what a `Record` holds."""
    for name, state in streams.items():
        if name == "numpy":
            yield name, repr((state[1].tobytes(), state[2:]))
        else:
            yield name, state if isinstance(state, Tensor) else repr(state)
