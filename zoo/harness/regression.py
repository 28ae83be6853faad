"""Compares the peaks of a run with those of an earlier one: a memory test for a CI.

    python test_memory_optimized.py --compare peaks.jsonl          exit 1: a peak has grown

Bytes come from the allocator and are the same from run to run, so a small tolerance does. What else
changed (seconds, bits, versions) is said and fails nothing: another torch may round otherwise.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from zoo.errors import ConfigError, shortened
from zoo.harness.cells import KINDS, expand
from zoo.harness.config import Config
from zoo.harness.results import Record, Results
from zoo.report.rows import differences
from zoo.units import format_bytes

PEAKS = {"peak": "step peak", "activation_peak": "activation peak"}
WHAT = ("name", "data", "batch_size", "size", "arguments", "optimizer", "checkpoint")
WHERE = ("device", "dtype")
SAME_BITS = ("steps", "seed", "threads")

Subject = str
Old = Mapping[Subject, Record]


@dataclass(frozen=True)
class Change:
    """A difference between two runs in a sentence; `fault` where it fails the comparison."""

    text: str
    fault: bool = False


@dataclass(frozen=True)
class Verdict:
    """What changed, and how many peaks were compared."""

    changes: tuple[Change, ...]
    compared: int

    @property
    def failed(self) -> bool:
        """Says whether a peak has grown or a cell has no peak any more."""
        return any(change.fault for change in self.changes)


class Earlier:
    """The results that a config's `compare` names."""

    def __init__(self, config: Config, path: str) -> None:
        self.path, self.tolerance = path, config.tolerance
        self.old = read_earlier(Path(path))
        cells = [cell for entry in expand(config) for cell in entry.values()]
        check_overlap(self.old, [{"kind": cell.kind, "cell": asdict(cell)} for cell in cells], path)

    @classmethod
    def of(cls, config: Config) -> "Earlier | None":
        """Reads them before anything runs; None where a config names none.

        Raises:
            ConfigError: there is no such file, no result in it, or none of the config's cells.
        """
        return None if config.compare is None else cls(config, config.compare)

    def compare(self, comparisons: Sequence[Mapping[str, Any]], console: Console) -> bool:
        """Prints what changed and says whether something is worse."""
        records = [entry[kind] for entry in comparisons for kind in KINDS]
        verdict = judge(self.old, records, self.tolerance)
        for text, fault in lines(verdict, self.path, self.tolerance):
            style = "red" if fault else None
            console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        return verdict.failed


def read_earlier(path: Path) -> Old:
    """Reads an earlier run's results, the last of each subject, those that failed left out.

    Raises:
        ConfigError: there is no such file, or no result in it.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"--compare {shortened(str(path))}: there is no such file")
    records = (record for record in Results(path).read().values() if _measured(record))
    found = {subject(record): record for record in records}
    if not found:
        raise ConfigError(
            f"--compare {shortened(str(path))} holds no result; give the .jsonl of a run"
        )
    return found


def check_overlap(old: Old, new: Sequence[Record], path: str) -> None:
    """Raises ConfigError when no cell of a run was measured before: that would compare nothing."""
    if not any(subject(record) in old for record in new):
        first = next(iter(old.values()))["cell"]["model"]["name"]
        raise ConfigError(
            f"--compare {shortened(path)} holds none of these cells (it begins with {first}): "
            "models, sizes, arguments, device and dtype must be those of the earlier run"
        )


def subject(record: Record) -> Subject:
    """Says what a record is about, whatever measured it: kind, model, data, device and type."""
    cell = record["cell"]
    model = {name: cell["model"].get(name) for name in WHAT}
    # as a file would hold it: lists for tuples, arguments in order
    return json.dumps([record["kind"], model, [cell.get(name) for name in WHERE]], sort_keys=True)


def judge(old: Old, new: Sequence[Record], tolerance: float) -> Verdict:
    """Compares each record with the earlier one of its subject.

    A peak may be `tolerance` of the earlier one larger.
    """
    pairs = [(old[subject(record)], record) for record in new if subject(record) in old]
    found = [change for before, after in pairs for change in _changes(before, after, tolerance)]
    places = dict.fromkeys(_elsewhere(before, after) for before, after in pairs)
    elsewhere = [Change(text) for text in places if text]
    missing = [
        Change(f"{_name(record)} was not measured before")
        for record in new
        if subject(record) not in old
    ]
    peaks = sum(len(PEAKS) for pair in pairs if all("memory" in record for record in pair))
    return Verdict((*elsewhere, *missing, *found), peaks)


def lines(verdict: Verdict, path: str, tolerance: float) -> list[tuple[str, bool]]:
    """Says a verdict in lines, and of each whether it is a fault; the last sums them up."""
    worse = sum(change.fault for change in verdict.changes)
    found = f"{worse} worse" if worse else "nothing worse"
    end = f"compared with {path}: {verdict.compared} peaks, tolerance {tolerance:.2%}: {found}"
    return [*((change.text, change.fault) for change in verdict.changes), (end, verdict.failed)]


def _changes(before: Record, after: Record, tolerance: float) -> Iterator[Change]:
    name = _name(after)
    if after["status"] != "done" and before["status"] == "done":
        yield Change(f"{name} {_ended(after)}", fault=True)
    elif after["status"] == "done" and before["status"] != "done":
        yield Change(f"{name} fits now")
    if "memory" in before and "memory" in after:
        yield from _grown(name, before["memory"], after["memory"], tolerance)
    yield from _other_bits(name, before, after)
    yield from _other_time(name, before, after)


def _grown(
    name: str, before: Mapping[str, int], after: Mapping[str, int], tolerance: float
) -> Iterator[Change]:
    for key, words in PEAKS.items():
        old, new = before[key], after[key]
        if old == new:
            continue
        share = f" ({new / old - 1:+.2%})" if old else ""
        worse = new > old * (1 + tolerance)
        end = f", more than the tolerance of {tolerance:.2%}" if worse else ""
        sizes = f"{format_bytes(old)} → {format_bytes(new)}"
        yield Change(f"{name}: {words} {sizes}, {new - old:+,} bytes{share}{end}", worse)


def _other_bits(name: str, before: Record, after: Record) -> Iterator[Change]:
    same = all(before["cell"].get(key) == after["cell"].get(key) for key in SAME_BITS)
    if same and "digests" in before and "digests" in after:
        found = differences(before["digests"], after["digests"])
        if found:
            yield Change(f"{name}: other bits in {', '.join(found)}")


def _other_time(name: str, before: Record, after: Record) -> Iterator[Change]:
    """Tells of ratios whose quartiles do not meet: within them it may be the machine."""
    old, new = (record.get("spread", {}).get("ratio") for record in (before, after))
    if old and new and (old["upper"] < new["lower"] or new["upper"] < old["lower"]):
        yield Change(f"{name}: step time ×{old['median']:.2f} → ×{new['median']:.2f}")


def _elsewhere(before: Record, after: Record) -> str:
    """Names what differs in the surroundings of two records: 'torch 2.13.0 → 2.14.1'."""
    old, new = ((record.get("environment") or {}) for record in (before, after))
    keys = ("torch", "zoo", "commit", "python", "device", "threads")
    pairs = ((key, old.get(key), new.get(key)) for key in keys)
    parts = [f"{key} {one} → {other}" for key, one, other in pairs if one != other]
    return f"measured elsewhere: {', '.join(parts)}" if parts else ""


def _ended(record: Record) -> str:
    words = "no longer fits" if record["status"] == "does not fit" else "now fails"
    return f"{words}: {record['reason']}"


def _measured(record: Record) -> bool:
    return record["status"] in ("done", "does not fit")


def _name(record: Record) -> str:
    return f"{record['cell']['model']['name']} {record['kind']}"
