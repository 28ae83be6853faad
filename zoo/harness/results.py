"""Results on disk: one line of JSON for each cell that ran, appended as soon as it is there.

A crash, an interruption or a full disk costs at most the line being written. The last line of a key
counts. A file of results is text: a hand, a merge or another version may have changed a line of it,
so a line that is no record is passed over and costs only itself.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from zoo.errors import ConfigError, shortened, shortened_text
from zoo.harness.cells import KINDS, Kind
from zoo.harness.config import Count, Share, Size, reason
from zoo.planner.plan import Plan

Record = dict[str, Any]
Comparison = dict[str, Any]
"""A model's config under "model" and the records of its cells under their kinds."""

# what may differ between the cells of one experiment
BY_KIND = {"kind", "steps", "repeats", "plan", "frontier"}
MODEL_BY_KIND = {"checkpoint", "repeats", "largest_ratio", "cuda_batch_size"}
MEASURED = {
    "baseline": ("memory", "digests"),
    "checkpointed": ("memory", "digests"),
    "timing": ("step_seconds", "spread"),
}
"""What a cell that is done has measured; without it no fault would be found."""
NOTHING: Record = {"status": "failed", "reason": "there is no result"}


def _mapping(optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """Returns the type of mappings that hold these keys, and others that nobody asks for."""
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
SPREAD = _mapping(median=Number, lower=Number, upper=Number)
CELL = _mapping(
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
    length=Count,
    points=list[Bytes],
    # what an allocator and the tensors do not agree on may be less than nothing
    bytes=dict[str, list[Difference]],
    phases=list[tuple[Bytes, str]],
    peak=_mapping(point=Bytes, bytes=Bytes, phase=str, categories=dict[str, Difference]),
    holders=list[HOLDER],  # type: ignore[valid-type]
)
OPTIONAL = {
    "reason": str,
    "finished": str,
    "environment": dict[str, Any] | None,
    "parameters": Bytes,
    "plan": Annotated[str, AfterValidator(Plan.parse)] | None,
    "memory": _mapping(
        # results of before tensors were counted lack these
        {"tensor_peak": Bytes, "tensor_activation_peak": Bytes},
        peak=Bytes,
        activation_peak=Bytes,
    ),
    "digests": list[dict[str, str]],
    "step_seconds": _mapping(baseline=Repeats, checkpointed=Repeats),
    "spread": _mapping(baseline=SPREAD, checkpointed=SPREAD, ratio=SPREAD),
    "missing": dict[str, str],
    "timeline": TIMELINE,
    "chain": _mapping(names=list[str], blocks=list[Bytes], saved=list[Difference]),
    "frontier": _mapping(
        optimal=list[Plot], schemes=dict[str, Plot], baseline=Bytes, lower_bound=Bytes
    ),
}
RECORD = _mapping(
    OPTIONAL,
    key=str,
    kind=Kind,
    status=Literal["done", "failed", "does not fit"],
    cell=CELL,
    seconds=Number,
)


class Results:
    """The results in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Raises ConfigError when nothing can be written there."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"output {shortened(str(self.path.parent))} cannot be written to: "
                f"{error.strerror}; --output names another folder"
            ) from None

    def read(self, passed_over: Callable[[str], object] = str) -> dict[str, Record]:
        """Returns the last whole record of each key; `passed_over` is told of lines that are none.

        Raises:
            ConfigError: the file cannot be read.
        """
        if not self.path.is_file():
            return {}
        try:
            # bytes: a line that broke off inside of a letter is no text
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise self._error("read", error) from error
        records = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse(line)
            except ValueError as fault:
                passed_over(f"{self.path}, line {number}, is passed over: {fault}")
            else:
                records[record["key"]] = record
        return records

    def append(self, record: Record) -> None:
        """Adds a record, on a line of its own even where the last one broke off.

        Raises:
            ConfigError: it cannot be written, as on a full disk.
        """
        try:
            with self.path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    # a kill leaves a line that is not whole
                    file.write(b"" if file.read(1) == b"\n" else b"\n")
                file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            kept = "the cells before are kept: make room, and the same command goes on from there"
            raise self._error("written to", error, kept) from error

    def clear(self) -> None:
        """Forgets every record; raises ConfigError where the file cannot be removed."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            kept = "without --fresh its results are kept"
            raise self._error("removed", error, kept) from error

    def _error(self, what: str, error: OSError, way_out: str = "") -> ConfigError:
        end = f"; {way_out}" if way_out else ""
        return ConfigError(f"{shortened(str(self.path))} cannot be {what}: {error.strerror}{end}")


def parse(line: bytes | str) -> Record:
    """Returns the record in a line of results.

    Raises:
        ValueError: with the key that is missing or wrong. A `status` of "nonsense" would pass for
            done, and one missing key would end the report of all other lines.
    """
    try:
        RECORD.model_validate_json(line, strict=True)
    except ValidationError as error:
        raise ValueError(_fault(error)) from None
    record: Record = json.loads(line)
    for key in MEASURED[record["kind"]] if record["status"] == "done" else ("reason",):
        if not record.get(key):
            raise ValueError(f"{key} is missing")
    together = {name: list(record.get(name, {}).values()) for name in ("step_seconds", "chain")}
    if "timeline" in record:
        together["timeline"] = [record["timeline"]["points"], *record["timeline"]["bytes"].values()]
    for name, lists in together.items():
        if len(set(map(len, lists))) > 1:
            raise ValueError(f"{name} holds lists of unequal lengths")
    return record


def _fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    where = shortened_text(".".join(map(str, fault["loc"]))) or "it"
    if fault["type"] == "json_invalid":
        return "it is no JSON"
    if fault["type"] == "missing":
        return f"{where} is missing"
    return f"{where} {reason([fault], fault['input'])}"


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """Puts the records of cells together by model, without the config that asked for them.

    The checkpointed cells are the comparisons; to each belong the baseline of the same experiment
    and the timing of its plan, of several the last.
    """
    by_kind: dict[Kind, list[tuple[str, Record]]] = {kind: [] for kind in KINDS}
    for record in records:
        by_kind[record["kind"]].append((_experiment(record), record))
    baselines = dict(by_kind["baseline"])
    timings = {}
    for experiment, record in by_kind["timing"]:
        cell = record["cell"]
        timings[experiment, cell.get("plan") or cell["model"]["checkpoint"]] = record
    found: dict[str, Comparison] = {}
    for experiment, record in by_kind["checkpointed"]:
        model = record["cell"]["model"]
        of_plan = timings.get((experiment, record.get("plan")))
        found[f"{experiment} {model['checkpoint']}"] = {
            "model": model,
            "baseline": baselines.get(experiment, NOTHING),
            "checkpointed": record,
            "timing": of_plan or timings.get((experiment, model["checkpoint"]), NOTHING),
        }
    return list(found.values())


def _experiment(record: Record) -> str:
    """Names what the cells of a comparison have in common."""
    cell = {key: value for key, value in record["cell"].items() if key not in BY_KIND}
    model = {key: value for key, value in cell["model"].items() if key not in MODEL_BY_KIND}
    return repr(sorted({**cell, "model": sorted(model.items())}.items()))
