"""Comparisons from results alone, without the config that asked for them.

A file of results holds a line for each cell of any run that wrote to it. The checkpointed cells are
the comparisons; to each belong the baseline of the same experiment and the timing of its plan, of
several the last.
"""

from collections.abc import Iterable
from typing import Any

from zoo.harness.record import fault_of
from zoo.harness.results import Record

# what may differ between the cells of one experiment
BY_KIND = {"kind", "steps", "repeats", "plan", "frontier"}
MODEL_BY_KIND = {"checkpoint", "repeats", "largest_ratio", "cuda_batch_size"}
NOTHING: Record = {"status": "failed", "reason": "there is no result"}

Comparison = dict[str, Any]


def stored(records: Iterable[Record]) -> list[Comparison]:
    """Puts the records of cells together by model; floors of a config are not in them."""
    known = [record for record in records if fault_of(record) is None]
    found: dict[str, Comparison] = {}
    for record in known:
        if record["kind"] == "checkpointed":
            model = record["cell"]["model"]
            found[f"{_experiment(record)} {model['checkpoint']}"] = {
                "model": model,
                "baseline": _last(known, "baseline", record),
                "checkpointed": record,
                "timing": _last(known, "timing", record),
            }
    return list(found.values())


def _last(records: Iterable[Record], kind: str, checkpointed: Record) -> Record:
    """Returns the last record of a kind that belongs to a checkpointed one."""
    wanted = _experiment(checkpointed)
    plans = (checkpointed.get("plan"), checkpointed["cell"]["model"]["checkpoint"])
    fitting = [
        record
        for record in records
        if record["kind"] == kind and _experiment(record) == wanted
        if kind == "baseline" or _plan(record) in plans
    ]
    return fitting[-1] if fitting else NOTHING


def _experiment(record: Record) -> str:
    """Names what the cells of a comparison have in common."""
    cell = {key: value for key, value in record["cell"].items() if key not in BY_KIND}
    model = {key: value for key, value in cell["model"].items() if key not in MODEL_BY_KIND}
    return repr(sorted({**cell, "model": sorted(model.items())}.items()))


def _plan(record: Record) -> Any:
    cell = record["cell"]
    return cell.get("plan") or cell["model"]["checkpoint"]
