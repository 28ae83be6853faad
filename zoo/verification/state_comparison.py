"""Records the state after a training step, by name, and compares two records bit for bit.

`torch.testing.assert_close` compares numbers: it takes 0.0 for -0.0 and stops at a NaN. Here bits
are compared, also those of modules' counters and flags, and of random streams.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo._torch import PyTree, pytree
from zoo.profiling.tensor_spec import flattened
from zoo.verification.verdict import Difference

# attributes of every torch module, but for its mode
BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
# by kind and name: tensors themselves, everything else as its repr
Record = dict[tuple[str, str], Any]


def record(
    model: nn.Module,
    inputs: Sequence[Any],
    outputs: PyTree,
    loss: Tensor,
    streams: Mapping[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> Record:
    """Returns the state that a step of training left: the tensors themselves, not copies.

    `streams` are the states that `read_streams` returns; without `optimizer` its state is left out.
    """
    named_inputs = (pair for part in inputs for pair in _named("input", part))
    kinds: dict[str, Iterable[tuple[str, Any]]] = {
        "output": _named("output", _as_dicts(outputs)),
        "loss": [("loss", loss)],
        "input gradient": _gradients(named_inputs),
        "parameter gradient": _gradients(model.named_parameters()),
        "buffer": model.named_buffers(),
        "parameter": model.named_parameters(),
        "optimizer state": _named("state", optimizer.state_dict()["state"] if optimizer else {}),
        "attribute": _attributes(model),
        "random state": ((name, _comparable(stream)) for name, stream in streams.items()),
    }
    return {(kind, name): value for kind, named in kinds.items() for name, value in named}


def _gradients(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor | None]]:
    return ((name, v.grad) for name, v in named if isinstance(v, Tensor) and v.requires_grad)


def _comparable(stream: Any) -> PyTree:
    if isinstance(stream, Tensor):
        return stream
    # the repr of NumPy's array leaves most of it out
    return repr([part.tobytes() if hasattr(part, "tobytes") else part for part in stream])


def first_difference(expected: Record, actual: Record, step: int) -> Difference | None:
    """Compares the records of two trainings after a step of training, in order of `expected`."""
    for key in dict.fromkeys((*expected, *actual)):
        if key not in actual or key not in expected:
            side = "the baseline" if key in expected else "the other training"
            return Difference(*key, step, note=f"only in {side}")
        if difference := _difference(*key, step, expected[key], actual[key]):
            return difference
    return None


def _difference(kind: str, name: str, step: int, expected: Any, actual: Any) -> Difference | None:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        before, after = _text(expected), _text(actual)
        is_short = max(len(before), len(after)) < 40
        note = f"{after} instead of {before}" if is_short else "another value"
        return None if before == after else Difference(kind, name, step, note=note)
    if same_bits(expected, actual):
        return None
    before, after = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (expected, actual))
    if before != after:
        return Difference(kind, name, step, note=f"{after} instead of {before}")
    differing = (bits(expected) != bits(actual)).any(1)
    dtype = torch.complex128 if expected.is_complex() else torch.float64
    numbers = [_dense(t).reshape(-1)[differing.to(t.device)].cpu() for t in (expected, actual)]
    gap = (numbers[0].to(dtype) - numbers[1].to(dtype)).abs().nan_to_num(nan=torch.inf).max()
    return Difference(kind, name, step, int(differing.sum()), len(differing), float(gap))


def same_bits(expected: Tensor, actual: Tensor) -> bool:
    """Compares type, shape and every bit of two tensors: -0.0 is not 0.0."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return False
    return torch.equal(bits(expected), bits(actual).to(expected.device))


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous()


def bits(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes (elements, bytes of one)."""
    tensor = _dense(tensor)
    return tensor.reshape(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _text(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else "none" if value is None else str(value)


def _named(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors and plain values in nested containers by their path: 'output[1][0]'."""
    for path, leaf in flattened(value, pytree.tree_flatten_with_path)[0]:
        name = f"{prefix}{pytree.keystr(path)}"
        if isinstance(leaf, Tensor):
            yield name, leaf
        elif isinstance(leaf, torch.Generator):
            yield name, leaf.get_state()
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            yield name, repr(leaf)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields modules' attributes beside parameters and buffers: counters, flags, caches, state."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in BOOKKEEPING:
                yield from _named(f"{path}.{key}".lstrip("."), value)


def _as_dicts(outputs: PyTree) -> PyTree:
    """Returns outputs with dicts for dataclasses, which torch takes for leaves."""

    def as_dict(leaf: PyTree) -> PyTree:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        return _as_dicts({part.name: getattr(leaf, part.name) for part in dataclasses.fields(leaf)})

    leaves, tree = flattened(outputs)
    return pytree.tree_unflatten(map(as_dict, leaves), tree)
