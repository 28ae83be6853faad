"""Results on disk (JSON Lines): one line for each cell that ran, appended when it ends.

A crash, an interruption or a full disk loses at most the line being written. The last line of a key
counts. An edit, a merge or another version may have changed a line, so invalid lines are skipped.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from zoo.errors import ConfigError, file_errors_as, shortened_text
from zoo.harness.comparison_cells import GRAPHS, Kind
from zoo.harness.config import Count, Share, Size, reason
from zoo.planner.plan import Plan

Record = dict[str, Any]
Comparison = dict[str, Any]
"""A model's config under "model" and the records of its cells under their kinds."""

# keys that may differ between the cells of one experiment
BY_KIND = {"kind", "steps", "repeats", "frontier", "plan"}
BY_KIND |= {"optimizer_in_backward", "plan_in_backward", "library_checkpointing"}
OF_BASELINE = {"baseline", "baseline_again", "baseline_graph", "library_checkpointing"}
MODEL_BY_KIND = {"checkpoint", "repeats", "largest_ratio", "accelerator_batch_size"}
NOTHING: Record = {"status": "failed", "reason": "there is no result"}


def _mapping(optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """Returns the type of mappings with these keys; other keys are ignored."""
    fields: dict[str, Any] = {key: (hint, ...) for key, hint in required.items()}
    fields |= {key: (hint, None) for key, hint in (optional or {}).items()}
    return create_model("Mapping", **fields)


# JSON's integers have any length; allocators count in 64 bits
Difference = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Repeats = Annotated[list[Seconds], Field(min_length=1)]
Plot = tuple[Bytes, Seconds]
CELL = _mapping(
    {"deterministic": bool},
    device=str,
    dtype=str,
    model=_mapping(
        {"optimizer": str},
        name=str,
        data=str,
        batch_size=Count,
        size=Size,
        arguments=dict[str, Any],
        checkpoint=bool | Bytes | str,
        largest_ratio=Share,
    ),
)
HOLDER = _mapping(
    bytes=Bytes, category=str, shape=list[Bytes], dtype=str, place=str, phase=str, line=str
)
TIMELINE = _mapping(
    # the latest allocation at each point: indices into a list of [step, module, line]
    {"places": _mapping(names=list[tuple[str, str]], at=list[Bytes])},
    length=Count,
    points=list[Bytes],
    # the allocator's bytes less the tensors' may be negative
    bytes=dict[str, list[Difference]],
    phases=list[tuple[Bytes, str]],
    peak=_mapping(point=Bytes, bytes=Bytes, phase=str, categories=dict[str, Difference]),
    holders=list[HOLDER],  # type: ignore[valid-type]
)
STEPS = _mapping(
    {"lines": dict[str, list[Bytes]]}, names=list[str], blocks=list[Bytes], saved=list[Difference]
)
OPTIONAL = {
    "reason": str,
    "finished": str,
    # how many cells its run has, and how many of these had a result then
    "run": _mapping(cells=Count, measured=Count),
    "environment": dict[str, Any] | None,
    "parameters": Bytes,
    # what turned the library's own checkpointing on
    "switch": str,
    "plan": Annotated[str, AfterValidator(Plan.parse)] | None,
    # older results lack the tensors' two peaks; a device whose allocator keeps no history has no
    # activation peak, and the CPU's reserves nothing
    "memory": _mapping(
        {"activation_peak": Bytes | None}
        | dict.fromkeys(("tensor_peak", "tensor_activation_peak", "reserved_peak"), Bytes),
        peak=Bytes,
    ),
    "digests": list[dict[str, str]],
    "step_seconds": _mapping(
        dict.fromkeys(("optimizer_in_backward", "library_checkpointing"), Repeats),
        baseline=Repeats,
        checkpointed=Repeats,
    ),
    "replay_seconds": Repeats,
    "missing": dict[str, str],
    "timeline": TIMELINE,
    "steps": STEPS,
    "frontier": _mapping(
        optimal=list[Plot], schemes=dict[str, Plot], baseline=Bytes, lower_bound=Bytes
    ),
}
RECORD = _mapping(
    OPTIONAL,
    key=str,
    kind=Kind,
    status=Literal["done", "failed", "does not fit", "refused"],
    cell=CELL,
    seconds=Number,
)


class Results:
    """The results in one file; raises `ConfigError` if it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self, *, fresh: bool = False) -> None:
        """Creates the file if there is none; `fresh` removes every record."""
        elsewhere = "; --output names another folder"
        with file_errors_as(ConfigError, self.path, "written to", elsewhere):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("wb" if fresh else "ab").close()

    def read(self, passed_over: Callable[[str], object] = str) -> dict[str, Record]:
        """Returns the last record of each key; `passed_over` gets a message per invalid line."""
        if not self.path.is_file():
            return {}
        with file_errors_as(ConfigError, self.path, "read"):
            # bytes: a line that broke off within a character is not UTF-8
            lines = self.path.read_bytes().split(b"\n")
        records = {}
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    record = parse(line)
                    records[record["key"]] = record
            except ValueError as fault:
                passed_over(f"{self.path}, line {number}, is passed over: {fault}")
        return records

    def append(self, record: Record) -> None:
        """Adds a record on a line of its own, even if the last line broke off."""
        way_out = "; earlier cells are kept: make room, and the same command resumes from there"
        named = file_errors_as(ConfigError, self.path, "written to", way_out)
        with named, self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                # a killed process may have left an incomplete line
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def parse(line: bytes | str) -> Record:
    """Returns the record in a line of results.

    Raises:
        ValueError: with the key that is missing or wrong. Otherwise a `status` of "nonsense" would
            count as done, and one missing key would end the report of all other lines.
    """
    try:
        _check(RECORD.model_validate_json(line, strict=True))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = shortened_text(".".join(map(str, fault["loc"]))) or "it"
        messages = {"json_invalid": "it is no JSON", "missing": f"{where} is missing"}
        other = f"{where} {reason([fault], fault['input'])}"
        raise ValueError(messages.get(fault["type"], other)) from None
    return cast(Record, json.loads(line))


def _check(record: Any) -> None:
    """Raises ValueError if something is missing, or lists do not match."""
    # a report without these would find no fault in a cell that is done
    measured = ["step_seconds"] if record.kind == "timing" else ["memory", "digests"]
    measured += ["replay_seconds"] * (record.kind in GRAPHS)
    needed = measured if record.status == "done" else ["reason"]
    missing = [key for key in needed if not getattr(record, key)]
    has_activations = record.kind in ("baseline", "checkpointed") and record.memory
    if has_activations and "activation_peak" not in record.memory.model_fields_set:
        missing.append("memory.activation_peak")
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    lists: dict[str, list[Any]] = {}
    # lists of indices into other lists
    numbers: dict[str, tuple[Any, Any]] = {}
    if record.step_seconds:
        lists["step_seconds"] = [times for times in vars(record.step_seconds).values() if times]
    if steps := record.steps:
        lists["steps"] = [steps.names, steps.blocks, steps.saved]
        numbers["steps.lines"] = (steps.lines or {}).values(), steps.names
    if timeline := record.timeline:
        lists["timeline"] = [timeline.points, *timeline.bytes.values()]
        if places := timeline.places:
            lists["timeline"].append(places.at)
            numbers["timeline.places"] = [places.at], places.names
    for name, columns in lists.items():
        if len(set(map(len, columns))) > 1:
            raise ValueError(f"{name} holds lists of unequal lengths")
    for name, (columns, numbered) in numbers.items():
        if any(number >= len(numbered) for column in columns for number in column):
            raise ValueError(f"{name} holds an index out of range")


def cells_of_run(records: Iterable[Record]) -> tuple[int, int] | None:
    """Returns how many cells of the last run have a result, of how many; None in older results."""
    runs = [(record.get("finished", ""), record["run"]) for record in records if "run" in record]
    if not runs:
        return None
    # several may have been finished in one second
    _, run = max(runs, key=lambda one: (one[0], one[1]["measured"]))
    return run["measured"], run["cells"]


def comparisons(records: Iterable[Record], *, partial: bool = False) -> list[Comparison]:
    """Groups the records of cells by model, without the config that they came from.

    Each checkpointed cell is a comparison, with the baseline of the same experiment, the last
    timing of its plan, and, if they are there, the cells with the optimizer in the backward and by
    the library's own checkpointing, CUDA graphs of as many steps, and the baseline trained again.
    If `partial`, an experiment without a checkpointed cell is a comparison, too.
    """
    latest: dict[tuple[str, str, str | None], Record] = {}
    for record in records:
        cell, kind = record["cell"], record["kind"]
        chosen = str(cell["model"]["checkpoint"])
        plan = str(cell.get("plan") or chosen) if kind == "timing" else chosen
        latest[kind, _experiment(cell), None if kind in OF_BASELINE else plan] = record
    together = []
    whole = {experiment for kind, experiment, _ in latest if kind == "checkpointed"}
    for (kind, experiment, option), record in latest.items():
        if partial and kind not in ("checkpointed", "baseline_again") and experiment not in whole:
            model = record["cell"]["model"]
            nothing = dict.fromkeys(("baseline", "checkpointed", "timing"), NOTHING)
            together.append({"model": model, **nothing, kind: record})
        if kind == "checkpointed":
            measured = latest.get(("timing", experiment, str(record.get("plan"))))
            third = latest.get(("optimizer_in_backward", experiment, option))
            library = latest.get(("library_checkpointing", experiment, None))
            graphs = {
                kind: latest.get((kind, experiment, None if kind in OF_BASELINE else option))
                for kind in GRAPHS
            }
            steps = record["cell"].get("steps")
            second = latest.get(("baseline_again", experiment, None))
            together.append(
                {
                    "model": record["cell"]["model"],
                    "baseline": latest.get(("baseline", experiment, None), NOTHING),
                    "checkpointed": record,
                    **({"optimizer_in_backward": third} if third else {}),
                    **({"library_checkpointing": library} if library else {}),
                    "timing": measured or latest.get(("timing", experiment, option), NOTHING),
                    **{
                        kind: graph
                        for kind, graph in graphs.items()
                        if graph and graph["cell"].get("steps") == steps
                    },
                    **({"baseline_again": second} if second else {}),
                }
            )
    return together


def _experiment(cell: Mapping[str, Any]) -> str:
    """Identifies the experiment of a cell, which the cells of a comparison share."""
    model = {key: value for key, value in cell["model"].items() if key not in MODEL_BY_KIND}
    shared = {key: value for key, value in cell.items() if key not in BY_KIND}
    return json.dumps(shared | {"model": model}, sort_keys=True)
