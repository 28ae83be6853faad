"""Results on disk (JSON Lines): one line for each cell that ran, appended when it ends.

A crash, an interruption or a full disk costs at most the line being written. The last line of a key
counts. A hand, a merge or another version may have changed a line of the file, so a line that is
no record is passed over and costs only itself.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from zoo.errors import ConfigError, shortened, shortened_text
from zoo.harness.cells import Kind
from zoo.harness.config import Count, Share, Size, reason
from zoo.planner.plan import Plan
from zoo.profiling.timeline import RENAMED

Record = dict[str, Any]
Comparison = dict[str, Any]
"""A model's config under "model" and the records of its cells under their kinds."""

# what may differ between the cells of one experiment
BY_KIND = {
    *("kind", "steps", "repeats", "frontier"),
    *("plan", "optimizer_in_backward", "plan_in_backward"),
}
MODEL_BY_KIND = {"checkpoint", "repeats", "largest_ratio", "accelerator_batch_size"}
MEASURED = {
    "baseline": ("memory", "digests"),
    "checkpointed": ("memory", "digests"),
    "optimizer_in_backward": ("memory", "digests"),
    "timing": ("step_seconds", "spread"),
}
"""What a cell that is done has measured; without it a report would find no fault."""
NOTHING: Record = {"status": "failed", "reason": "there is no result"}


def _mapping(optional: Mapping[str, Any] | None = None, **required: Any) -> type[BaseModel]:
    """Returns the type of mappings with these keys; any others are ignored."""
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
    # what allocated last at each point: numbers of [step, module, line]
    {"places": _mapping(names=list[tuple[str, str, str]], at=list[Bytes])},
    length=Count,
    points=list[Bytes],
    # the difference between an allocator and the tensors may be negative
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
        # results of versions that did not count tensors lack the latter two; a device whose
        # allocator keeps no history has no activation peak
        {"activation_peak": Bytes | None, "tensor_peak": Bytes, "tensor_activation_peak": Bytes},
        peak=Bytes,
    ),
    "digests": list[dict[str, str]],
    "step_seconds": _mapping(
        {"optimizer_in_backward": Repeats}, baseline=Repeats, checkpointed=Repeats
    ),
    "spread": _mapping(
        {"optimizer_in_backward": SPREAD, "optimizer_in_backward_ratio": SPREAD},
        baseline=SPREAD,
        checkpointed=SPREAD,
        ratio=SPREAD,
    ),
    "missing": dict[str, str],
    "timeline": TIMELINE,
    "chain": _mapping(
        {"lines": dict[str, list[Bytes]]},
        names=list[str],
        blocks=list[Bytes],
        saved=list[Difference],
    ),
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
        with self._explained("written to", "--output names another folder"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()

    def read(self, passed_over: Callable[[str], object] = str) -> dict[str, Record]:
        """Returns the last whole record of each key; `passed_over` is told of lines that are none.

        Raises:
            ConfigError: the file cannot be read.
        """
        if not self.path.is_file():
            return {}
        with self._explained("read"):
            # bytes: a line that broke off inside of a letter is no text
            lines = self.path.read_bytes().split(b"\n")
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
        kept = "the cells before are kept: make room, and the same command goes on from there"
        with self._explained("written to", kept), self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                # a kill leaves a line that is not whole
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Removes every record; raises ConfigError where the file cannot be removed."""
        with self._explained("removed", "without --fresh its results are kept"):
            self.path.unlink(missing_ok=True)

    @contextmanager
    def _explained(self, what: str, way_out: str = "") -> Iterator[None]:
        """Turns an OSError into a ConfigError that says what the file cannot be."""
        try:
            yield
        except OSError as error:
            end = f"; {way_out}" if way_out else ""
            raise ConfigError(
                f"{shortened(str(self.path))} cannot be {what}: {error.strerror}{end}"
            ) from error


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
    has_activations = record["kind"] in ("baseline", "checkpointed") and "memory" in record
    if has_activations and "activation_peak" not in record["memory"]:
        raise ValueError("memory.activation_peak is missing")
    chain = record.get("chain", {})
    together = {
        "step_seconds": list(record.get("step_seconds", {}).values()),
        "chain": [chain[name] for name in ("names", "blocks", "saved") if name in chain],
    }
    # lists of numbers of what another list holds
    numbers = {"chain.lines": (chain.get("lines", {}).values(), chain.get("names", ()))}
    if "timeline" in record:
        timeline = record["timeline"]
        together["timeline"] = [timeline["points"], *timeline["bytes"].values()]
        if "places" in timeline:
            together["timeline"].append(timeline["places"]["at"])
            numbers["timeline.places"] = [timeline["places"]["at"]], timeline["places"]["names"]
    for name, lists in together.items():
        if len(set(map(len, lists))) > 1:
            raise ValueError(f"{name} holds lists of unequal lengths")
    for name, (lists, numbered) in numbers.items():
        if any(number >= len(numbered) for found in lists for number in found):
            raise ValueError(f"{name} holds the number of nothing")
    if "timeline" in record:
        _rename(record["timeline"])
    return record


def _rename(timeline: Record) -> None:
    """Gives categories of a timeline of before the names that they have now."""
    for sizes in (timeline["bytes"], timeline["peak"]["categories"]):
        sizes |= {new: sizes.pop(old) for old, new in RENAMED.items() if old in sizes}
    for holder in timeline["holders"]:
        holder["category"] = RENAMED.get(holder["category"], holder["category"])


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

    The checkpointed cells are the comparisons; to each belong the baseline of the same experiment,
    the timing of its plan, of several the last, and where there is one, that with the optimizer in
    the backward.
    """
    baselines, checkpointed, in_backward, timings = {}, {}, {}, {}
    for record in records:
        experiment, cell = _experiment(record), record["cell"]
        checkpoint = str(cell["model"]["checkpoint"])
        plan = str(cell.get("plan") or checkpoint)
        if record["kind"] == "baseline":
            baselines[experiment] = record
        elif record["kind"] == "checkpointed":
            checkpointed[experiment, checkpoint] = record
        elif record["kind"] == "optimizer_in_backward":
            in_backward[experiment, checkpoint] = record
        else:
            timings[experiment, plan] = record
    found = []
    for (experiment, checkpoint), record in checkpointed.items():
        of_plan, as_given = (experiment, str(record.get("plan"))), (experiment, checkpoint)
        third = in_backward.get(as_given)
        found.append(
            {
                "model": record["cell"]["model"],
                "baseline": baselines.get(experiment, NOTHING),
                "checkpointed": record,
                **({"optimizer_in_backward": third} if third else {}),
                "timing": timings.get(of_plan) or timings.get(as_given, NOTHING),
            }
        )
    return found


def _experiment(record: Record) -> str:
    """Names what the cells of a comparison have in common."""
    cell = {key: value for key, value in record["cell"].items() if key not in BY_KIND}
    cell["model"] = {key: value for key, value in cell["model"].items() if key not in MODEL_BY_KIND}
    return json.dumps(cell, sort_keys=True)
