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

    `peak` and `activation_peak` are bytes; `ratio` is the checkpointed activation peak over the
    baseline's, which may be `largest_ratio` at most; `time_ratios` are those of the timed pairs.
    `arguments` are the model's own and, unless it is True, `checkpoint`; `fits` is False where
    memory ran out; `faults` says in sentences what makes the comparison fail.
    """

    model: str
    arguments: str
    checkpoint: str
    batch: str
    largest_ratio: float
    parameters: int | None
    peak: Pair[int | None]
    activation_peak: Pair[int | None]
    step_seconds: Pair[list[float]]
    fits: Pair[bool]
    exact: bool | None
    faults: tuple[str, ...]

    @property
    def label(self) -> str:
        """The model and its arguments: 'vnet (classes=3)'."""
        return f"{self.model} ({self.arguments})" if self.arguments else self.model

    @property
    def ratio(self) -> float | None:
        """The checkpointed activation peak over the baseline's."""
        return quotient(self.activation_peak)

    @property
    def time_ratios(self) -> list[float]:
        """Checkpointed over baseline for each pair of steps."""
        pairs = zip(self.step_seconds.checkpointed, self.step_seconds.baseline, strict=True)
        return [checkpointed / baseline for checkpointed, baseline in pairs]

    @property
    def time(self) -> Spread | None:
        """Median and quartiles of the time ratios."""
        return spread(self.time_ratios) if self.time_ratios else None


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
        peak=Pair(_memory(baseline, "peak"), _memory(checkpointed, "peak")),
        activation_peak=_activation_peaks(comparison),
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
    ratio = quotient(_activation_peaks(comparison))
    if ratio is not None and ratio > model["largest_ratio"]:
        yield (
            f"{model['name']} keeps {ratio:.3f} of the baseline's activation peak; "
            f"largest_ratio is {model['largest_ratio']:g}"
        )


def _differences(baseline: Mapping[str, Any], checkpointed: Mapping[str, Any]) -> list[str] | None:
    if "digests" not in baseline or "digests" not in checkpointed:
        return None
    return differences(baseline["digests"], checkpointed["digests"])


def _activation_peaks(comparison: Mapping[str, Any]) -> Pair[int | None]:
    name = "activation_peak"
    return Pair(_memory(comparison["baseline"], name), _memory(comparison["checkpointed"], name))


def _memory(record: Mapping[str, Any], name: str) -> int | None:
    memory = record.get("memory")
    return None if memory is None else memory[name]


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
    own = model.get("arguments", {})
    implied = {"image_size": model["size"]}
    given |= {name: value for name, value in own.items() if implied.get(name) != value}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _text(checkpoint: bool | int | str) -> str:
    return str(checkpoint).lower() if isinstance(checkpoint, bool) else str(checkpoint)
