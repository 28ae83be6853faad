"""What each of torch's operators does to its arguments: which it writes, draws for, aliases.

A schema tells nearly all of it. What no schema tells is listed here by name and was found by
`tests/operators`, which runs torch's own database of operators with and without a recording.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# namespaces whose operators are kernels: the same arguments, the same results. All others may run
# a user's Python or another process's data, so their results are kept and they never run twice
KERNELS = frozenset({"aten", "prims", "quantized", "quantized_decomposed", "torchvision"})
# their results have no content until something writes it, which may be code that nobody sees
EMPTY = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    )
)  # fmt: skip
# likewise their results are made to be written
CONSTANT = frozenset(
    f"aten::{name}"
    for name in (
        "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like",
        "new_full",
    )
)  # fmt: skip
# kernels of which libraries have several, chosen by settings
CHOOSING = ("conv", "mm", "addm", "linear", "rnn", "lstm", "gru", "dot", "mv", "attention",
            "cumsum", "scatter", "index", "put")  # fmt: skip
# arguments that are written although the schema does not say so: operator -> (position, name), ...
RUNNING = ((3, "running_mean"), (4, "running_var"))
UNDECLARED: dict[str, tuple[tuple[int, str], ...]] = {
    "aten::rrelu_with_noise": ((1, "noise"),),
    "aten::rrelu_with_noise_": ((1, "noise"),),
    "aten::_cudnn_rnn": ((13, "dropout_state"),),
    "aten::batch_norm_gather_stats": RUNNING,
    "aten::batch_norm_gather_stats_with_counts": RUNNING,
}
# norms that update their statistics in training, and do not read them then
NORMS = frozenset(
    f"aten::{name}" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
STATISTICS = slice(3, 5)
TRAINING = 5


class Effects(NamedTuple):
    """What a recording must know about an operator.

    Attributes:
        ignored: it makes no storage and writes none: a view, a number, a question.
        opaque: nothing is known about it, so what it returns is kept.
        reshapes: it changes the size or strides of its first argument in place.
        writes: positions and names of the arguments that it writes.
        seeded: it draws from a random stream.
        lists: it writes lists of tensors.
        makes: it returns storages of its own.
        empty: its result has no content yet.
        chosen: settings decide which kernel it runs.
        blank: its result is made to be written, and may be by code that nobody sees.
        norm: it updates statistics in training, without reading them.
        simple: it makes its results and does nothing else.
    """

    ignored: bool = False
    opaque: bool = False
    reshapes: bool = False
    writes: tuple[tuple[int, str], ...] = ()
    seeded: bool = False
    lists: bool = False
    makes: bool = False
    empty: bool = False
    blank: bool = False
    chosen: bool = False
    norm: bool = False
    simple: bool = False


KNOWN: dict[Any, Effects] = {}


def effects_of(operator: Any) -> Effects:
    """Returns what an operator does, from a table after the first time."""
    found = KNOWN.get(operator)
    if found is None:
        found = KNOWN[operator] = _read(operator)
    return found


def _read(operator: Any) -> Effects:
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return Effects(opaque=True)
    name = schema.name
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if torch.Tag.inplace_view in operator.tags or name == "aten::resize_":
        return Effects(reshapes=True)
    if name.partition("::")[0] not in KERNELS:
        return Effects(opaque=True, writes=_possible_writes(schema, writes))
    undeclared = UNDECLARED.get(name, ())
    makes = [
        result
        for result in schema.returns
        if "Tensor" in str(result.type) and result.alias_info is None
    ]
    if not makes and not writes and not undeclared:
        return Effects(ignored=True)
    seeded = torch.Tag.nondeterministic_seeded in operator.tags
    written = (*writes, *undeclared)
    return Effects(
        writes=written,
        seeded=seeded,
        lists=bool(writes) and name.startswith("aten::_foreach"),
        makes=bool(makes),
        empty=name in EMPTY,
        blank=name in EMPTY or name in CONSTANT,
        norm=name in NORMS,
        chosen=any(part in name for part in CHOOSING),
        simple=not (written or seeded or name in NORMS or name in EMPTY),
    )


def _possible_writes(
    schema: Any, declared: tuple[tuple[int, str], ...]
) -> tuple[tuple[int, str], ...]:
    """Returns what an operator may write; collectives write without saying so."""
    if not schema.name.startswith("c10d"):
        return declared
    return tuple((place, argument.name) for place, argument in enumerate(schema.arguments))


Settings = tuple[Any, ...]


def _write_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def read_settings() -> Settings:
    """Reads the globals of torch that change what kernels compute; the first two concern all."""
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        (
            torch._C._get_deterministic_algorithms(),
            torch._C._get_deterministic_algorithms_warn_only(),
        ),
        torch._C._get_float32_matmul_precision(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
    )


# how to set each of them
WRITERS: tuple[Callable[[Any], object], ...] = (
    torch.set_default_dtype,
    torch.set_num_threads,
    _write_determinism,
    torch._C._set_float32_matmul_precision,
    torch._C._set_mkldnn_enabled,
    torch._C._set_cudnn_enabled,
    torch._C._set_cudnn_benchmark,
    torch._C._set_cudnn_deterministic,
)


def write_settings(wanted: Settings, present: Settings) -> None:
    """Puts settings in force, writing only those that differ from the present ones."""
    for write, value, now in zip(WRITERS, wanted, present, strict=True):
        if value != now:
            write(value)
