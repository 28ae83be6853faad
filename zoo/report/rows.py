"""Turns the records of a comparison into one row of numbers per model, and judges it.

Every number is one of the records' or a quotient of two; nothing is estimated here.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from zoo.report.escape import visible

Value = TypeVar("Value")
UNFIT = "does not fit"
"""The status of a record whose cell ran out of memory."""
FEWEST = 5
"""Pairs of steps from which on quartiles say something."""
USUAL = "sgd"
"""The optimizer, SGD with momentum 0.9, where a config names none."""
JUDGED = "tensor_activation_peak"
"""What a config's `largest_ratio` is about: what kernels take inside themselves is no plan's."""


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
        enough = self.time is not None and len(self.time_ratios) >= FEWEST
        return (self.time.lower, self.time.upper) if self.time and enough else None


def rows(comparisons: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns a row for each model: its config under "model", its records under their kinds."""
    return [_row(comparison) for comparison in comparisons]


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


def _row(comparison: Mapping[str, Any]) -> Row:
    model = comparison["model"]
    baseline, checkpointed = comparison["baseline"], comparison["checkpointed"]
    exact = _differences(baseline, checkpointed)
    return Row(
        model=visible(model["name"]),
        arguments=visible(_arguments(model)),
        checkpoint=visible(_text(model["checkpoint"])),
        batch=_batch(model),
        largest_ratio=model["largest_ratio"],
        parameters=baseline.get("parameters", checkpointed.get("parameters")),
        peak=_bytes(comparison, "peak"),
        activation_peak=_bytes(comparison, "activation_peak"),
        tensor_peak=_bytes(comparison, "tensor_peak"),
        tensor_activation_peak=_bytes(comparison, JUDGED),
        step_seconds=Pair(*_seconds(comparison["timing"])),
        fits=Pair(baseline["status"] != UNFIT, checkpointed["status"] != UNFIT),
        exact=None if exact is None else not exact,
        faults=tuple(map(visible, _faults(comparison))),
    )


def _faults(comparison: Mapping[str, Any]) -> Iterator[str]:
    model = comparison["model"]
    for kind in ("baseline", "checkpointed", "timing"):
        record = comparison[kind]
        if record["status"] == "failed":
            yield f"{model['name']} {kind} failed: {record['reason']}"
    # a baseline that does not fit is what checkpointing is for
    if comparison["checkpointed"]["status"] == UNFIT:
        yield f"{model['name']} checkpointed does not fit: {comparison['checkpointed']['reason']}"
    found = _differences(comparison["baseline"], comparison["checkpointed"])
    if found:
        yield f"{model['name']} is not exact: it differs in {', '.join(found)}"
    ratio = quotient(_bytes(comparison, JUDGED))
    if ratio is not None and ratio > model["largest_ratio"]:
        yield (
            f"{model['name']} keeps {ratio:.3f} of the activation peak of the baseline's tensors; "
            f"largest_ratio is {model['largest_ratio']:g}"
        )


def _differences(baseline: Mapping[str, Any], checkpointed: Mapping[str, Any]) -> list[str] | None:
    if "digests" not in baseline or "digests" not in checkpointed:
        return None
    return differences(baseline["digests"], checkpointed["digests"])


def _bytes(comparison: Mapping[str, Any], name: str) -> Pair[int | None]:
    memory = [comparison[kind].get("memory", {}) for kind in ("baseline", "checkpointed")]
    return Pair(*(found.get(name) for found in memory))


def _seconds(record: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    seconds = record.get("step_seconds", {})
    return seconds.get("baseline", []), seconds.get("checkpointed", [])


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
