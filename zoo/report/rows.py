"""What a comparison says: for each model a row of numbers and its verdict, and where they are from.

Every number is one of the records' or a quotient of two; nothing is estimated here.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from zoo.report.markdown import visible
from zoo.units import format_bytes

Value = TypeVar("Value")
Comparison = Mapping[str, Any]

KINDS = ("baseline", "checkpointed")
UNFIT = "does not fit"
"""The status of a record whose cell ran out of memory."""
FEWEST = 5
"""Pairs of steps from which on quartiles say something."""
USUAL = "sgd"
"""The optimizer, SGD with momentum 0.9, where a config names none."""
JUDGED = "tensor_activation_peak"
"""What a config's `largest_ratio` is about: what kernels take inside themselves is no plan's."""
MISSING = "—"
COLUMNS = (
    *("model", "batch", "parameters", "step peak", "activation peak", "of tensors alone"),
    *("step time [quartiles]", "exact"),
)
"""The columns of a report's table, whose cells `words` returns."""
DEFINITIONS = {
    "step peak": (
        "the most bytes that the allocator handed out at once in a training step: parameters, "
        "gradients, optimizer state, inputs, activations and kernel workspaces; the optimizer is "
        "SGD with momentum unless another stands behind the model's name"
    ),
    "activation peak": (
        "the same less parameters, buffers, optimizer state, inputs and the gradients that exist "
        "at that moment"
    ),
    "of tensors alone": (
        "the activation peak without kernel workspaces, which differ from processor to processor "
        "and with the threads: the same on every machine, and what a config's largest_ratio judges"
    ),
    "(ratio)": "checkpointed over baseline; in front of it, baseline → checkpointed",
    "step time": (
        "checkpointed over baseline, taken in turn on the same batches: the median of n pairs and, "
        "from 5 pairs on, [quartiles]"
    ),
    "exact": (
        "loss, every gradient, buffer and parameter and the random state are equal bit for bit "
        "after each optimizer step"
    ),
}
"""What the words of a report mean."""


@dataclass(frozen=True)
class Heading:
    """The comparison's name, where it was measured, and the command that repeats it."""

    name: str
    setting: str
    command: str

    @property
    def title(self) -> str:
        """The title of a report."""
        return f"Training with and without checkpointing: {self.name}"


@dataclass(frozen=True)
class Pair(Generic[Value]):
    """A number of the baseline and the same of the checkpointed model."""

    baseline: Value
    checkpointed: Value


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Row:
    """What was measured of one model; None where a cell failed.

    `peak` and `activation_peak` are bytes that the allocator handed out. In them are kernel
    workspaces, which differ from processor to processor; `tensor_peak` and `tensor_activation_peak`
    are those of tensors alone, None in results of before they were counted. Ratios are
    checkpointed over baseline; `tensor_ratio` may be `largest_ratio` at most. `arguments` are the
    model's own and, unless True and SGD, `checkpoint` and `optimizer`; `fits` is False where memory
    ran out; `faults` says in sentences what makes the comparison fail.
    """

    model: str
    arguments: str
    checkpoint: str
    batch: str
    largest_ratio: float
    parameters: int | None
    peak: Pair[int | None]
    activation_peak: Pair[int | None]
    tensor_peak: Pair[int | None]
    tensor_activation_peak: Pair[int | None]
    step_seconds: Pair[list[float]]
    fits: Pair[bool]
    exact: bool | None
    faults: tuple[str, ...]

    @property
    def label(self) -> str:
        """The model and its arguments: 'vnet (classes=3)'."""
        return f"{self.model} ({self.arguments})" if self.arguments else self.model

    @property
    def step_ratio(self) -> float | None:
        """That of the step peak."""
        return quotient(self.peak)

    @property
    def ratio(self) -> float | None:
        """That of the activation peak."""
        return quotient(self.activation_peak)

    @property
    def tensor_ratio(self) -> float | None:
        """That of the activation peak of tensors alone, the same wherever it is measured."""
        return quotient(self.tensor_activation_peak)

    @property
    def time_ratios(self) -> list[float]:
        """Checkpointed over baseline for each pair of steps."""
        pairs = zip(self.step_seconds.checkpointed, self.step_seconds.baseline, strict=True)
        return [checkpointed / baseline for checkpointed, baseline in pairs]

    @property
    def time(self) -> Spread | None:
        """Median and quartiles of the time ratios."""
        return spread(self.time_ratios) if self.time_ratios else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The quartiles, where there are pairs enough for them."""
        enough = len(self.time_ratios) >= FEWEST
        return (self.time.lower, self.time.upper) if self.time and enough else None


def heading(comparisons: Sequence[Comparison], name: str, command: str) -> Heading:
    """Describes a comparison by the first of its records that says where it was measured."""
    setting = "nothing could be measured"
    for record in (record for comparison in comparisons for record in comparison.values()):
        where = record.get("environment") or {}
        if where.keys() >= {"device", "threads", "torch", "python", "zoo"}:
            cell, count = record["cell"], where["threads"]
            threads = f", {count} thread{'s' * (count != 1)}" if cell["device"] == "cpu" else ""
            setting = (
                f"{where['device']}{threads}, {cell['dtype']}, torch {where['torch']}, "
                f"Python {where['python']}, zoo {where['zoo']}"
            )
            break
    return Heading(visible(name), visible(setting), visible(command))


def rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """Returns a row for each model: its config under "model", its records under their kinds."""
    return [_row(comparison) for comparison in comparisons]


def words(row: Row) -> list[str]:
    """Returns a row's cells in the order of `COLUMNS`."""
    time = MISSING
    if row.time is not None:
        between = "" if row.quartiles is None else " [{:.2f}, {:.2f}]".format(*row.quartiles)
        time = f"×{row.time.median:.2f}{between} n={len(row.time_ratios)}"
    peaks = row.peak, row.activation_peak, row.tensor_activation_peak
    return [
        row.label,
        row.batch,
        MISSING if row.parameters is None else f"{row.parameters / 1e6:.2f} M",
        *(_change(pair, row.fits) for pair in peaks),
        time,
        MISSING if row.exact is None else "yes" if row.exact else "NO",
    ]


def size_or_why(count: int | None, fits: bool, missing: str = MISSING) -> str:
    """Returns bytes in words, or why there are none."""
    if count is not None:
        return format_bytes(count)
    return missing if fits else UNFIT


def quotient(pair: Pair[int | None]) -> float | None:
    """Returns checkpointed over baseline, None where either is missing."""
    if pair.baseline is None or pair.checkpointed is None:
        return None
    return pair.checkpointed / max(pair.baseline, 1)


def spread(values: Sequence[float]) -> Spread:
    """Returns median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def differences(
    baseline: Sequence[Mapping[str, str]], checkpointed: Sequence[Mapping[str, str]]
) -> list[str]:
    """Names what differs between two runs and from which step on: ['buffers from step 1 on']."""
    first: dict[str, int] = {}
    # a step that one of them lacks is no step that is equal
    nothing: Mapping[str, str] = {}
    pairs = zip_longest(baseline, checkpointed, fillvalue=nothing)
    for step, (one, other) in enumerate(pairs, start=1):
        for kind in {**one, **other}:
            if one.get(kind) != other.get(kind):
                first.setdefault(kind, step)
    return [f"{kind} from step {step} on" for kind, step in first.items()]


def _row(comparison: Comparison) -> Row:
    model, *cells = (comparison[name] for name in ("model", *KINDS))
    exact = _differences(comparison)
    seconds = comparison["timing"].get("step_seconds", {})
    names = "peak", "activation_peak", "tensor_peak", "tensor_activation_peak"
    return Row(
        model=visible(model["name"]),
        arguments=visible(_arguments(model)),
        checkpoint=visible(_text(model["checkpoint"])),
        batch=_batch(model),
        largest_ratio=model["largest_ratio"],
        parameters=cells[0].get("parameters", cells[1].get("parameters")),
        **{name: _bytes(comparison, name) for name in names},
        step_seconds=Pair(*(seconds.get(kind, []) for kind in KINDS)),
        fits=Pair(*(cell["status"] != UNFIT for cell in cells)),
        exact=None if exact is None else not exact,
        faults=tuple(map(visible, _faults(comparison))),
    )


def _faults(comparison: Comparison) -> Iterator[str]:
    name, largest = (comparison["model"][key] for key in ("name", "largest_ratio"))
    for kind in (*KINDS, "timing"):
        if comparison[kind]["status"] == "failed":
            yield f"{name} {kind} failed: {comparison[kind]['reason']}"
    # a baseline that does not fit is what checkpointing is for
    if comparison["checkpointed"]["status"] == UNFIT:
        yield f"{name} checkpointed does not fit: {comparison['checkpointed']['reason']}"
    if found := _differences(comparison):
        yield f"{name} is not exact: it differs in {', '.join(found)}"
    ratio = quotient(_bytes(comparison, JUDGED))
    if ratio is not None and ratio > largest:
        yield (
            f"{name} keeps {ratio:.3f} of the activation peak of the baseline's tensors; "
            f"largest_ratio is {largest:g}"
        )


def _differences(comparison: Comparison) -> list[str] | None:
    found = [comparison[kind].get("digests") for kind in KINDS]
    return None if None in found else differences(*found)


def _bytes(comparison: Comparison, name: str) -> Pair[int | None]:
    return Pair(*(comparison[kind].get("memory", {}).get(name) for kind in KINDS))


def _change(pair: Pair[int | None], fits: Pair[bool]) -> str:
    baseline = size_or_why(pair.baseline, fits.baseline)
    ratio = quotient(pair)
    share = "" if ratio is None else f" ({ratio:.3f})"
    return f"{baseline} → {size_or_why(pair.checkpointed, fits.checkpointed)}{share}"


def _batch(model: Mapping[str, Any]) -> str:
    sizes = model["size"] if isinstance(model["size"], list) else [model["size"]]
    axes = {"photographs": 2, "digits": 2, "volume": 3}.get(model["data"], 1)
    sizes = sizes * axes if len(sizes) == 1 else sizes
    return "×".join(str(size) for size in (model["batch_size"], *sizes))


def _arguments(model: Mapping[str, Any]) -> str:
    """Lists what was not the model's default; an image size that the batch tells is left out."""
    given = {"checkpoint": _text(model["checkpoint"])} if model["checkpoint"] is not True else {}
    given |= {"optimizer": model["optimizer"]} if model.get("optimizer", USUAL) != USUAL else {}
    own = model.get("arguments", {})
    implied = {"image_size": model["size"]}
    given |= {name: value for name, value in own.items() if implied.get(name) != value}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _text(checkpoint: bool | int | str) -> str:
    return str(checkpoint).lower() if isinstance(checkpoint, bool) else str(checkpoint)
