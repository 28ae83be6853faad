"""The table of a comparison as data: for each model a row of measurements, ratios and a verdict.

Every number is one of the records' or a quotient of two; nothing is estimated here.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from zoo.report.markdown import visible
from zoo.units import format_bytes

Comparison = Mapping[str, Any]
KINDS = ("baseline", "checkpointed")
# the status of a record whose cell ran out of memory
UNFIT = "does not fit"
# of this many timed pairs of steps, and of more, quartiles are shown
FEWEST = 5
# SGD with momentum 0.9, where a config names no other
DEFAULT_OPTIMIZER = "sgd"
MISSING = "—"
# the columns of a report's table, whose cells `words` returns
COLUMNS = (
    *("model", "batch", "parameters", "step peak", "activation peak", "of tensors alone"),
    *("step time [quartiles]", "exact"),
)
# what the words of a report mean
DEFINITIONS = {
    "step peak": (
        "the most bytes that the allocator handed out at once in a training step: parameters, "
        "gradients, optimizer state, inputs, activations and kernel workspaces; the optimizer is "
        "SGD with momentum unless the model's name is followed by another"
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
class Peaks:
    """Peak bytes of the baseline and of the checkpointed model; None where not measured."""

    baseline: int | None
    checkpointed: int | None

    @property
    def ratio(self) -> float | None:
        """Checkpointed over baseline, None where either is missing."""
        if self.baseline is None or self.checkpointed is None:
            return None
        return self.checkpointed / max(self.baseline, 1)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Row:
    """The measurements of one model; None where a cell failed.

    `peak` and `activation_peak` are bytes from the allocator, kernel workspaces included, which
    differ from processor to processor; `tensor_peak` and `tensor_activation_peak` are of tensors
    alone, None in results from before they were counted. The ratio of the last is judged: it may be
    `largest_ratio` at most. `arguments` are the model's own and, unless True and SGD, `checkpoint`
    and `optimizer`. `faults` are sentences, each a reason why the comparison fails.
    """

    model: str
    arguments: str
    checkpoint: str
    batch: str
    largest_ratio: float
    parameters: int | None
    peak: Peaks
    activation_peak: Peaks
    tensor_peak: Peaks
    tensor_activation_peak: Peaks
    step_seconds: Mapping[str, list[float]]
    fits: Mapping[str, bool]
    exact: bool | None
    faults: tuple[str, ...]

    @property
    def label(self) -> str:
        """The model and its arguments: 'vnet (classes=3)'."""
        return f"{self.model} ({self.arguments})" if self.arguments else self.model

    @property
    def time_ratios(self) -> list[float]:
        """Checkpointed over baseline for each pair of steps."""
        pairs = zip(*(self.step_seconds[kind] for kind in KINDS), strict=True)
        return [checkpointed / baseline for baseline, checkpointed in pairs]

    @property
    def time(self) -> Spread | None:
        """Median and quartiles of the time ratios."""
        return spread(self.time_ratios) if self.time_ratios else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The quartiles of the time ratios, where there are enough pairs for them."""
        enough = len(self.time_ratios) >= FEWEST
        return (self.time.lower, self.time.upper) if self.time and enough else None


def heading(comparisons: Sequence[Comparison], name: str, command: str) -> Heading:
    """Describes a comparison by the first of its records that says where it was measured."""
    setting = "nothing could be measured"
    records = (record for comparison in comparisons for record in comparison.values())
    known = {"device", "threads", "torch", "python", "zoo"}
    for record in records:
        cell, where = record.get("cell", {}), record.get("environment") or {}
        if known <= where.keys():
            count = f", {where['threads']} thread{'s' * (where['threads'] != 1)}"
            setting = (
                f"{where['device']}{count if cell['device'] == 'cpu' else ''}, {cell['dtype']}, "
                f"torch {where['torch']}, Python {where['python']}, zoo {where['zoo']}"
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
    parameters = MISSING if row.parameters is None else f"{row.parameters / 1e6:.2f} M"
    peaks = (row.peak, row.activation_peak, row.tensor_activation_peak)
    exact = MISSING if row.exact is None else "yes" if row.exact else "NO"
    changes = [_change(pair, row.fits) for pair in peaks]
    return [row.label, row.batch, parameters, *changes, time, exact]


def size_or_why(count: int | None, fits: bool, missing: str = MISSING) -> str:
    """Returns bytes in words, or why there are none."""
    if count is not None:
        return format_bytes(count)
    return missing if fits else UNFIT


def spread(values: Sequence[float]) -> Spread:
    """Returns median and quartiles of at least one value."""
    # before Python 3.13 it takes no single value
    several = values if len(values) > 1 else [*values, *values]
    lower, median, upper = statistics.quantiles(several, n=4, method="inclusive")
    return Spread(median, lower, upper)


def differences(
    baseline: Sequence[Mapping[str, str]], checkpointed: Sequence[Mapping[str, str]]
) -> list[str]:
    """Names what differs between two trainings, from which step on: ['buffers from step 1 on'].

    A step that only one of them has differs.
    """
    first: dict[str, int] = {}
    pairs = zip_longest(baseline, checkpointed, fillvalue=dict[str, str]())
    for step, (one, other) in enumerate(pairs, start=1):
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                first.setdefault(name, step)
    return [f"{name} from step {step} on" for name, step in first.items()]


def _row(comparison: Comparison) -> Row:
    model, cells = comparison["model"], [comparison[kind] for kind in KINDS]
    digests = [cell.get("digests") for cell in cells]
    differing = None if None in digests else differences(*digests)
    seconds = comparison["timing"].get("step_seconds", {})
    names = "peak", "activation_peak", "tensor_peak", "tensor_activation_peak"
    peaks = {name: Peaks(*(cell.get("memory", {}).get(name) for cell in cells)) for name in names}
    faults = _faults(comparison, differing, peaks["tensor_activation_peak"].ratio)
    return Row(
        model=visible(model["name"]),
        arguments=visible(_arguments(model)),
        checkpoint=visible(_text(model["checkpoint"])),
        batch=_batch(model),
        largest_ratio=model["largest_ratio"],
        parameters=cells[0].get("parameters", cells[1].get("parameters")),
        **peaks,
        step_seconds={kind: seconds.get(kind, []) for kind in KINDS},
        fits={kind: comparison[kind]["status"] != UNFIT for kind in KINDS},
        exact=None if differing is None else not differing,
        faults=tuple(map(visible, faults)),
    )


def _faults(
    comparison: Comparison, differing: Sequence[str] | None, ratio: float | None
) -> Iterator[str]:
    name, largest = (comparison["model"][key] for key in ("name", "largest_ratio"))
    for kind in (*KINDS, "timing"):
        if comparison[kind]["status"] == "failed":
            yield f"{name} {kind} failed: {comparison[kind]['reason']}"
    # a baseline that does not fit is what checkpointing is for
    if comparison["checkpointed"]["status"] == UNFIT:
        yield f"{name} checkpointed does not fit: {comparison['checkpointed']['reason']}"
    if differing:
        yield f"{name} is not exact: it differs in {', '.join(differing)}"
    # the ratio of tensors alone: no plan decides how large kernel workspaces are
    if ratio is not None and ratio > largest:
        yield (
            f"{name} keeps {ratio:.3f} of the activation peak of the baseline's tensors; "
            f"largest_ratio is {largest:g}"
        )


def _change(peaks: Peaks, fits: Mapping[str, bool]) -> str:
    sizes = (size_or_why(getattr(peaks, kind), fits[kind]) for kind in KINDS)
    share = "" if peaks.ratio is None else f" ({peaks.ratio:.3f})"
    return f"{' → '.join(sizes)}{share}"


def _batch(model: Mapping[str, Any]) -> str:
    sizes = model["size"] if isinstance(model["size"], list) else [model["size"]]
    if len(sizes) == 1:
        sizes = sizes * {"photographs": 2, "digits": 2, "volume": 3}.get(model["data"], 1)
    return "×".join(map(str, (model["batch_size"], *sizes)))


def _arguments(model: Mapping[str, Any]) -> str:
    """Lists what is not the default; an image size that the batch shows is left out."""
    given = {} if model["checkpoint"] is True else {"checkpoint": _text(model["checkpoint"])}
    if model.get("optimizer", DEFAULT_OPTIMIZER) != DEFAULT_OPTIMIZER:
        given["optimizer"] = model["optimizer"]
    for name, value in model.get("arguments", {}).items():
        if (name, value) != ("image_size", model["size"]):
            given[name] = value
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _text(checkpoint: bool | int | str) -> str:
    return str(checkpoint).lower() if isinstance(checkpoint, bool) else str(checkpoint)
