"""The table of a comparison as data: for each model a row of measurements, ratios and a verdict.

Every number is from a record or a quotient of two; nothing is estimated here. A cell renders
itself: `str(cell)` for terminals and Markdown, `cell.__html__()` with exact values for the page.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from zoo.report.escaping import visible
from zoo.units import format_bytes, format_seconds

Comparison = Mapping[str, Any]
KINDS = ("baseline", "checkpointed")
# names of the variants in a row, by the kind of the cell; many rows lack one
VARIANTS = {
    "baseline": "baseline",
    "library_checkpointing": "library's own",
    "checkpointed": "checkpointed",
    "optimizer_in_backward": "+ optimizer in backward",
}
# zoo's: what these change is a fault
EXACT = ("checkpointed", "optimizer_in_backward")
# cells that train a variant as a CUDA graph; older results, and most others, lack them
GRAPHS = {f"{kind}_graph": f"{VARIANTS[kind]} as a CUDA graph" for kind in ("baseline", *EXACT)}
PEAKS = ("peak", "activation_peak", "tensor_peak", "tensor_activation_peak", "reserved_peak")
# the way out for a baseline that does not repeat its own numbers, or that it was taken already
WAY_OUT = "--deterministic makes torch choose deterministic kernels"
TAKEN = "torch's deterministic algorithms were on"
# the status of a record whose cell ran out of memory
UNFIT = "does not fit"
# and of one whose step cannot be a CUDA graph
REFUSED = "refused"
# more models than so many are counted in a title, not named
NAMED = 3
# quartiles are shown for at least so many timed pairs of steps
FEWEST = 5
# SGD with momentum 0.9, unless a config names another
DEFAULT_OPTIMIZER = "sgd"
MISSING = "—"
# the terms of a report
DEFINITIONS = {
    "step peak": (
        "the most bytes that the allocator handed out at once in a whole training step: "
        "parameters, gradients, optimizer state, inputs, activations and kernel workspaces; the "
        "optimizer is SGD with momentum unless the model's name is followed by another; a config's "
        "largest_ratio judges the ratio of checkpointed to the baseline"
    ),
    "+ optimizer in backward": (
        "checkpointed, and with zoo.optimizer_in_backward: each parameter is updated in the "
        "backward and its gradient freed at once, which the plan counts with"
    ),
    "library's own": (
        "the baseline with the checkpointing of its library switched on, such as timm's "
        "set_grad_checkpointing(); what this changes or fails at is noted, and is no fault of the "
        "comparison"
    ),
    "activation peak": (
        "the same less parameters, buffers, optimizer state, inputs and the gradients that exist "
        "at that moment"
    ),
    "without workspaces": (
        "the activation peak without kernel workspaces, which differ from processor to processor "
        "and with the threads"
    ),
    "reserved": (
        "the most bytes that the device's allocator reserved, of which the step peak is a part: "
        "what runs out; PYTORCH_ALLOC_CONF=expandable_segments:True leaves few gaps; absent on "
        "the CPU, whose allocator reserves nothing"
    ),
    "(ratio)": "preceding value / baseline",
    "step time": (
        "over that of the baseline, taken in turn on the same batches: the median of n pairs and, "
        "from 5 pairs on, [quartiles]"
    ),
    "as CUDA graphs": (
        "each variant trained by zoo.make_graphed_step, in a process of its own: the peaks of the "
        "step that is captured, whose memory the graph keeps, and the time of a replay over that "
        "of an eager step of the baseline; exact covers these trainings, too"
    ),
    "exact": (
        "loss, every gradient, buffer and parameter and the random state are equal bit for bit "
        "after each optimizer step; the optimizer in the backward has freed the gradients, so "
        'there all others are compared; "baseline varies": two trainings of the baseline differ, '
        "so nothing can be compared bit for bit"
    ),
}


class Number(NamedTuple):
    """A number as text; its exact value, None if there is none; its path in the results."""

    text: str
    value: float | None = None
    path: tuple[str | int, ...] = ()

    @classmethod
    def of_bytes(cls, count: int | None, *path: str | int, missing: str = MISSING) -> "Number":
        """Formats bytes; `missing` if there are none."""
        return cls(missing if count is None else format_bytes(count), count, path)

    def __str__(self) -> str:
        return self.text

    def __html__(self) -> str:
        if self.value is None:
            return escape(self.text)
        # a path into JSON (RFC 6901): a / in a name is ~1
        steps = [str(step).replace("~", "~0").replace("/", "~1") for step in self.path]
        origin = Markup(' data-from="{}"').format("/".join(steps)) if steps else ""
        return Markup('<data value="{}"{}>{}</data>').format(self.value, origin, self.text)


class TableCell(NamedTuple):
    """Numbers in a text with a {} for each; `detail` goes on with it, in a class of its own."""

    numbers: Sequence[Number]
    text: str = "{}"
    detail: str = ""
    tone: str = "faint"

    def __str__(self) -> str:
        return f"{self.text} {self.detail}".rstrip().format(*self.numbers)

    def __html__(self) -> str:
        # an arrow ends a line and begins none
        text = Markup(self.text.replace(" →", "\u00a0→"))
        if self.detail:
            text += Markup(' <span class="{}">{}</span>').format(self.tone, self.detail)
        return text.format(*self.numbers)


class Heading(NamedTuple):
    """The comparison's name, its environment, the command that repeats it, and its models.

    `cells` are how many cells of its run have a result, and how many it has; None where unknown.
    """

    name: str
    setting: str
    command: str
    models: Sequence[str] = ()
    cells: tuple[int, int] | None = None

    @property
    def title(self) -> str:
        """The title of a report, with the name of the config unless it is the default one.

        That of a run that was interrupted begins with how much of it is there.
        """
        measured, cells = self.cells or (0, 0)
        part = f"{measured} of {cells} cells: " if measured < cells else ""
        # a run of chosen models has them in its name, too
        config = self.name.removesuffix("-" + "-".join(self.models))
        name = "" if config == "default" else f": {config}"
        *others, last = self.models or ("",)
        few = f"{', '.join(others)} and {last}" if others else last
        trained = f"{len(self.models)} models" if len(self.models) > NAMED else few
        return f"{part}Training {trained} with and without checkpointing{name}".replace("  ", " ")


@dataclass(frozen=True)
class ModelRow:
    """The measurements of one model; None where a cell failed.

    Attributes:
        number: its index in the comparisons.
        arguments: the model's own and, unless True and SGD, `checkpoint` and `optimizer`.
        largest_ratio: the largest accepted ratio of "checkpointed"'s step peak to the baseline's.
        peaks: bytes by name and variant. "peak" and "activation_peak" are the allocator's, with
            kernel workspaces, which differ from processor to processor; "tensor_peak" and
            "tensor_activation_peak" leave these out, None in older results without them;
            "reserved_peak" is None on the CPU.
        shows_reserved: whether any row of the table has a "reserved_peak".
        step_seconds, statuses: by variant, as far as measured; seconds of CUDA graphs by replays.
        exact: whether all trainings are equal; None where one is missing, or nothing can be
            compared.
        baseline_repeats: whether a second training of the baseline is equal to the first; None
            where there is no other training that differs, so that none was needed.
        faults: sentences, each a reason why the comparison fails.
        notes: sentences, on a step that is no CUDA graph, or on the library's own checkpointing.
    """

    number: int
    model: str
    arguments: str
    checkpoint: str
    batch: str
    largest_ratio: float
    parameters: int | None
    peaks: Mapping[str, Mapping[str, int | None]]
    step_seconds: Mapping[str, list[float]]
    statuses: Mapping[str, str]
    exact: bool | None
    baseline_repeats: bool | None
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    shows_reserved: bool = False
    shows_graphs: bool = False

    @property
    def label(self) -> str:
        """The model and its arguments: 'vnet (classes=3)'."""
        return f"{self.model} ({self.arguments})" if self.arguments else self.model

    @property
    def variants(self) -> list[str]:
        """The variants of the comparison, the baseline first, without CUDA graphs."""
        return [kind for kind in self.statuses if kind in VARIANTS]

    def time_ratios(self, kind: str) -> list[float]:
        """Returns the ratio of a variant's seconds to the baseline's, for each pair of steps."""
        # older timings lack a variant
        seconds = [] if kind == "baseline" else self.step_seconds.get(kind, [])
        pairs = zip(seconds, self.step_seconds["baseline"], strict=False)
        return [second / whole for second, whole in pairs]

    def ratio(self, kind: str = "checkpointed", peak: str = "peak") -> float | None:
        """Returns the ratio of a variant's peak to the baseline's; None if either is missing."""
        whole, part = (self.peaks[peak][name] for name in ("baseline", kind))
        return None if whole is None or part is None else part / max(whole, 1)

    def size(self, kind: str, peak: str = "peak", missing: str = MISSING) -> Number:
        """Returns a peak of a variant as text, or the reason that there is none."""
        status = self.statuses.get(kind)
        why = status if status in (UNFIT, REFUSED) else missing
        count = self.peaks[peak][kind]
        return Number.of_bytes(count, self.number, kind, "memory", peak, missing=why)

    def peak_cell(self, *kinds: str, peak: str = "peak") -> TableCell:
        """Returns a peak of one variant or of two, and the ratio of the last to the baseline's."""
        sizes, text = [self.size(kind, peak) for kind in kinds], " → ".join("{}" for _ in kinds)
        ratio = None if kinds[-1] == "baseline" else self.ratio(kinds[-1], peak)
        if ratio is None:
            return TableCell(sizes, text)
        return TableCell([*sizes, Number(f"{ratio:.3f}", ratio)], text, "({})")

    def time_cell(self, kind: str) -> TableCell:
        """Returns the median of the time ratios, the quartiles and the number of pairs.

        Of the baseline, the median of its seconds.
        """
        if kind == "baseline" and (seconds := self.step_seconds.get(kind)):
            middle = statistics.median(seconds)
            return TableCell([Number(format_seconds(middle), middle)])
        ratios = self.time_ratios(kind)
        ends = [Number(f"{ratio:.2f}", ratio) for ratio in quartiles(ratios)]
        between = "[{}, {}] " if ends else ""
        return TableCell(
            [median(ratios), *ends], detail=f"{between}n={len(ratios)}" if ratios else ""
        )

    def replay(self, kind: str) -> Number:
        """Returns the time of a variant as a CUDA graph over the baseline's, or why it has none."""
        status = self.statuses.get(f"{kind}_graph")
        return Number(REFUSED) if status == REFUSED else median(self.time_ratios(f"{kind}_graph"))

    def cells(self, shown: Mapping[str, str]) -> dict[str, Any]:
        """Returns the texts and TableCells of a report's table of some variants, by column."""
        parameters = MISSING if self.parameters is None else f"{self.parameters / 1e6:.2f} M"
        times = {f"step time: {name}": self.time_cell(kind) for kind, name in shown.items()}
        exact = {None: MISSING, True: "yes", False: "NO"}[self.exact]
        return {
            "model": self.label,
            "batch": self.batch,
            "parameters": TableCell([Number(parameters, self.parameters)]),
            **{f"step peak: {name}": self.peak_cell(kind) for kind, name in shown.items()},
            "activation peak": self.peak_cell(*KINDS, peak="activation_peak"),
            "without workspaces": self.peak_cell(*KINDS, peak="tensor_activation_peak"),
            **(
                {"reserved": self.peak_cell(*KINDS, peak="reserved_peak")}
                if self.shows_reserved
                else {}
            ),
            **dict([*times.items()][1:]),
            **(self.graph_cells() if self.shows_graphs else {}),
            "exact": "baseline varies" if self.baseline_repeats is False else exact,
        }

    def graph_cells(self) -> dict[str, TableCell]:
        """Returns the TableCells of CUDA graphs, by column; in each a number for each variant."""
        kinds = [kind for kind in GRAPHS if kind in self.statuses] or [*GRAPHS]
        times = [self.replay(kind.removesuffix("_graph")) for kind in kinds]
        columns = {"as CUDA graphs: step peak": self.peak_cell(*kinds)}
        if self.shows_reserved:
            columns["as CUDA graphs: reserved"] = self.peak_cell(*kinds, peak="reserved_peak")
        times_cell = TableCell(times, " → ".join("{}" for _ in kinds))
        return {**columns, "as CUDA graphs: step time": times_cell}


def first_measured(comparisons: Sequence[Comparison], keys: Iterable[str] = ()) -> Any:
    """Returns the first record with an environment that has the `known` keys; or {}."""
    records = (record for comparison in comparisons for record in comparison.values())
    measured = (record for record in records if record.get("environment"))
    return next((record for record in measured if record["environment"].keys() >= {*keys}), {})


def heading(
    comparisons: Sequence[Comparison],
    name: str,
    command: str,
    cells: tuple[int, int] | None = None,
) -> Heading:
    """Describes a comparison by the first of its records that has an environment."""
    setting = "nothing could be measured"
    if record := first_measured(comparisons, ("device", "threads", "torch", "python", "zoo")):
        cell, where = record["cell"], record["environment"]
        count = f", {where['threads']} thread{'s' * (where['threads'] != 1)}"
        setting = (
            f"{where['device']}{count if cell['device'] == 'cpu' else ''}, {cell['dtype']}, "
            f"{'deterministic algorithms, ' * cell.get('deterministic', False)}"
            f"torch {where['torch']}, Python {where['python']}, zoo {where['zoo']}"
        )
    names = (visible(comparison["model"]["name"]) for comparison in comparisons)
    models = tuple(dict.fromkeys(names))
    return Heading(visible(name), visible(setting), visible(command), models, cells)


def rows(comparisons: Sequence[Comparison]) -> list[ModelRow]:
    """Returns a row for each comparison."""
    table = [_row(number, comparison) for number, comparison in enumerate(comparisons)]
    reserved = any(
        size is not None for row in table for size in row.peaks["reserved_peak"].values()
    )
    shows_graphs = bool(graphs(table))
    return [replace(row, shows_reserved=reserved, shows_graphs=shows_graphs) for row in table]


def variants(rows: Sequence[ModelRow]) -> dict[str, str]:
    """Returns the variants in any row, and their names."""
    kinds = {*KINDS, *(kind for row in rows for kind in row.variants)}
    return {kind: name for kind, name in VARIANTS.items() if kind in kinds}


def graphs(rows: Sequence[ModelRow]) -> list[str]:
    """Returns the CUDA graphs in any row."""
    return [kind for kind in GRAPHS if any(kind in row.statuses for row in rows)]


def median(ratios: Sequence[float]) -> Number:
    """Returns the median of time ratios, if there are any."""
    value = statistics.median(ratios) if ratios else None
    return Number(MISSING if value is None else f"×{value:.2f}", value)


def quartiles(ratios: Sequence[float]) -> list[float]:
    """Returns the quartiles of time ratios; none if there are too few ratios."""
    if len(ratios) < FEWEST:
        return []
    return statistics.quantiles(ratios, n=4, method="inclusive")[::2]


def differences(
    baseline: Sequence[Mapping[str, str]], checkpointed: Sequence[Mapping[str, str]]
) -> list[str]:
    """Lists the differences of two trainings: ['buffers from step 1 on'].

    A step that only one of them has counts as different.
    """
    first: dict[str, int] = {}
    pairs = zip_longest(baseline, checkpointed, fillvalue=dict[str, str]())
    for step, (digests, other) in enumerate(pairs, start=1):
        for name in {**digests, **other}:
            if digests.get(name) != other.get(name):
                first.setdefault(name, step)
    return [f"{name} from step {step} on" for name, step in first.items()]


def is_unlike_baseline(comparison: Comparison) -> bool:
    """Returns whether a training in a comparison differs from the baseline's."""
    return any(_zoo_differing(comparison).values())


def _row(number: int, comparison: Comparison) -> ModelRow:
    model = comparison["model"]
    kinds = [*VARIANTS, *GRAPHS]
    cells = {kind: comparison[kind] for kind in kinds if kind in comparison}
    differing = _zoo_differing(comparison)
    varying = _differing("baseline_again", comparison) if any(differing.values()) else None
    seconds = comparison["timing"].get("step_seconds", {})
    memory = {kind: cells.get(kind, {}).get("memory", {}) for kind in kinds}
    parameters = (cell["parameters"] for cell in cells.values() if "parameters" in cell)
    row = ModelRow(
        number=number,
        model=visible(model["name"]),
        arguments=visible(_arguments(model)),
        checkpoint=visible(_text(model["checkpoint"])),
        batch=_batch(model),
        largest_ratio=model["largest_ratio"],
        parameters=next(parameters, None),
        peaks={name: {kind: memory[kind].get(name) for kind in kinds} for name in PEAKS},
        step_seconds={
            kind: cell.get("replay_seconds", seconds.get(kind, [])) for kind, cell in cells.items()
        },
        statuses={kind: cell["status"] for kind, cell in cells.items()},
        exact=None if varying or None in differing.values() else not any(differing.values()),
        baseline_repeats=None if varying is None else not varying,
        faults=(),
        notes=(),
    )
    faults = _faults(comparison, differing, varying, row.ratio())
    notes = _notes(comparison, varying)
    return replace(row, faults=tuple(map(visible, faults)), notes=tuple(map(visible, notes)))


def _zoo_differing(comparison: Comparison) -> dict[str, list[str] | None]:
    """Lists the differences of each training of zoo's, but of those that are refused."""
    others = (kind for kind in (*EXACT, *GRAPHS) if kind in comparison)
    kinds = (kind for kind in others if comparison[kind]["status"] != REFUSED)
    return {kind: _differing(kind, comparison) for kind in kinds}


def _differing(kind: str, comparison: Comparison) -> list[str] | None:
    """Lists the differences of a training and the baseline; None if one has no digests."""
    digests, others = (comparison.get(name, {}).get("digests") for name in ("baseline", kind))
    if digests is None or others is None:
        return None
    if kind.startswith("optimizer_in_backward"):
        # the optimizer in the backward has freed the gradients
        digests = [{name: step[name] for name in step if name != "gradients"} for step in digests]
    return differences(digests, others)


def _faults(
    comparison: Comparison,
    differing: Mapping[str, Sequence[str] | None],
    varying: Sequence[str] | None,
    ratio: float | None,
) -> Iterator[str]:
    name, largest = (comparison["model"][key] for key in ("name", "largest_ratio"))
    second = ("baseline_again",) if "baseline_again" in comparison else ()
    for kind in ("baseline", *differing, "timing", *second):
        record, words = comparison[kind], _words(kind)
        if record["status"] == "failed":
            yield f"{name} {words} failed: {record['reason']}"
        # a baseline that does not fit is no fault: that is the purpose of checkpointing
        if record["status"] == UNFIT and kind in differing and kind != "baseline_graph":
            yield f"{name} {words} does not fit: {record['reason']}"
    if varying:
        way_out = TAKEN if comparison["baseline"]["cell"].get("deterministic") else WAY_OUT
        yield (
            f"{name}: the baseline does not repeat its own numbers: two trainings of it differ in "
            f"{', '.join(varying)}, so nothing can be compared bit for bit; {way_out}"
        )
    for kind, names in differing.items():
        if names and not varying:
            whose = " with the optimizer in the backward" * (kind == "optimizer_in_backward")
            whose += f" {_words(kind)}" * (kind in GRAPHS)
            yield f"{name}{whose} is not exact: it differs in {', '.join(names)}"
    if ratio is not None and ratio > largest:
        yield (
            f"{name} takes {ratio:.3f} of the baseline's step peak; largest_ratio is {largest:g}"
        )


def _words(kind: str) -> str:
    """Names a cell: "checkpointed as a CUDA graph"."""
    return kind.replace("_graph", " as a CUDA graph").replace("_", " ")


def _notes(comparison: Comparison, varying: list[str] | None) -> Iterator[str]:
    """Says which steps are no CUDA graphs, and what the library's own checkpointing changes."""
    name = comparison["model"]["name"]
    for kind in GRAPHS:
        if kind in comparison and comparison[kind]["status"] == REFUSED:
            yield f"{name} {_words(kind)} is refused: {comparison[kind]['reason']}"
    record = comparison.get("library_checkpointing")
    if record is None or varying:
        return
    differing = _differing("library_checkpointing", comparison)
    if record["status"] != "done":
        yield f"{name} by its library's own checkpointing {record['status']}: {record['reason']}"
    elif differing is not None:
        how = record.get("switch", "its own switch")
        found = f"differs in {', '.join(differing)}" if differing else "is exact"
        yield f"{name} by its library's own checkpointing, {how}, {found}"


def _batch(model: Mapping[str, Any]) -> str:
    sizes = model["size"] if isinstance(model["size"], list) else [model["size"]]
    if len(sizes) == 1:
        sizes = sizes * {"photographs": 2, "digits": 2, "volume": 3}.get(model["data"], 1)
    return "×".join(map(str, (model["batch_size"], *sizes)))


def _arguments(model: Mapping[str, Any]) -> str:
    """Lists arguments other than the defaults; an image size that the batch shows is left out."""
    shown = {} if model["checkpoint"] is True else {"checkpoint": _text(model["checkpoint"])}
    if model.get("optimizer", DEFAULT_OPTIMIZER) != DEFAULT_OPTIMIZER:
        shown["optimizer"] = model["optimizer"]
    for name, value in model.get("arguments", {}).items():
        if name not in ("image_size", "img_size") or value != model["size"]:
            shown[name] = value
    # a list in one piece, which no column breaks
    return ", ".join(f"{name}={value}".replace(", ", ",") for name, value in shown.items())


def _text(checkpoint: bool | int | str) -> str:
    return str(checkpoint).lower() if isinstance(checkpoint, bool) else str(checkpoint)
