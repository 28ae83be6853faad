"""Compares the peaks of a run with those of an earlier one: a memory test for a CI.

    python test_memory_optimized.py --compare peaks.jsonl          exit 1: a peak has grown

Bytes come from the allocator and are the same from run to run, so a small tolerance is enough. Any
other change (seconds, bits, versions) is printed and fails nothing: another torch may round
differently.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from zoo.errors import ConfigError, shortened, shortened_text
from zoo.harness.cells import KINDS, expand
from zoo.harness.config import Config
from zoo.harness.results import Comparison, Record, Results, comparisons
from zoo.report.rows import differences
from zoo.report.two_runs import TwoRuns, environment_change, subject, two_runs
from zoo.units import format_bytes

PEAKS = {"peak": "step peak", "activation_peak": "activation peak"}
RATIOS = {
    "ratio": "step time",
    "optimizer_in_backward_ratio": "step time with the optimizer in the backward",
}
SAME_BITS = ("steps", "seed", "threads")

Old = Mapping[str, Record]
"""Earlier records by subject."""


class Change(NamedTuple):
    """A difference between two runs in words; `fault` where it fails the comparison."""

    text: str
    fault: bool = False


def read_earlier(config: Config) -> Old:
    """Reads the results that a config's `compare` names, the last of each subject; {} for None.

    Those that failed are left out.

    Raises:
        ConfigError: there is no such file, no result in it, or none of the config's cells.
    """
    if config.compare is None:
        return {}
    old = read_old(config.compare)
    cells = [asdict(cell) for entry in expand(config) for cell in entry.values()]
    if not any(subject({"kind": cell["kind"], "cell": cell}) in old for cell in cells):
        raise _nothing_shared(config.compare, old)
    return old


def read_old(path: str, passed_over: Callable[[str], object] = str) -> Old:
    """Reads the results of an earlier run; raises ConfigError where there are none."""
    what = f"--compare {shortened(path)}"
    if not os.path.isfile(path):
        raise ConfigError(f"{what}: there is no such file")
    records = Results(Path(path)).read(passed_over).values()
    old = {subject(record): record for record in records if record["status"] != "failed"}
    if not old:
        raise ConfigError(f"{what} holds no result; give the .jsonl of a run")
    return old


def beside(now: Sequence[Comparison], old: Old, path: str) -> TwoRuns:
    """Returns a run beside an earlier one; raises ConfigError where they share no cell."""
    runs = two_runs(now, comparisons(old.values()), path)
    if not runs.cells:
        raise _nothing_shared(path, old)
    return runs


def has_grown(
    old: Old, comparisons: Sequence[Comparison], path: str, tolerance: float, console: Console
) -> bool:
    """Prints what changed; returns whether a peak has grown or is missing."""
    records = [entry[kind] for entry in comparisons for kind in KINDS if kind in entry]
    changes, peaks = judge(old, records, tolerance)
    worse = sum(change.fault for change in changes)
    verdict = f"{worse} worse" if worse else "nothing worse"
    end = f"{peaks} peaks, tolerance {tolerance:.2%}: {verdict}"
    changes.append(Change(f"compared with {path}: {end}", worse > 0))
    for text, fault in changes:
        style = "red" if fault else None
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    return worse > 0


def judge(old: Old, new: Sequence[Record], tolerance: float) -> tuple[list[Change], int]:
    """Compares each record with the earlier one of its subject; also counts the peaks compared.

    A peak may be `tolerance` of the earlier one larger.
    """
    elsewhere, missing, changes = dict[str, None](), list[Change](), list[Change]()
    peaks = 0
    for after in new:
        before = old.get(subject(after))
        if before is None:
            missing.append(Change(f"{_name(after)} was not measured before"))
            continue
        if environment := environment_change(before, after):
            elsewhere[f"measured elsewhere: {environment}"] = None
        changes += _changes(before, after, tolerance)
        peaks += len(_shared_peaks(before, after))
    return [*map(Change, elsewhere), *missing, *changes], peaks


def _changes(before: Record, after: Record, tolerance: float) -> Iterator[Change]:
    name = _name(after)
    if after["status"] != "done" and before["status"] == "done":
        words = "no longer fits" if after["status"] == "does not fit" else "now fails"
        yield Change(f"{name} {words}: {after['reason']}", fault=True)
    elif after["status"] == "done" and before["status"] != "done":
        yield Change(f"{name} fits now")
    for key in _shared_peaks(before, after):
        old, new = before["memory"][key], after["memory"][key]
        if old != new:
            yield _peak_change(f"{name}: {PEAKS[key]}", old, new, tolerance)
    same = all(before["cell"].get(key) == after["cell"].get(key) for key in SAME_BITS)
    digests = [record["digests"] for record in (before, after) if "digests" in record]
    if same and len(digests) == 2 and (differing := differences(*digests)):
        yield Change(f"{name}: other bits in {', '.join(differing)}")
    # ratios whose quartiles meet may differ by the machine alone
    for key, words in RATIOS.items():
        ratio, now = (record.get("spread", {}).get(key) for record in (before, after))
        if ratio and now and (ratio["upper"] < now["lower"] or now["upper"] < ratio["lower"]):
            yield Change(f"{name}: {words} ×{ratio['median']:.2f} → ×{now['median']:.2f}")


def _shared_peaks(before: Record, after: Record) -> list[str]:
    """Returns the peaks that both records have."""
    memories = [record.get("memory", {}) for record in (before, after)]
    return [key for key in PEAKS if all(memory.get(key) is not None for memory in memories)]


def _peak_change(what: str, old: int, new: int, tolerance: float) -> Change:
    share = f" ({new / old - 1:+.2%})" if old else ""
    worse = new > old * (1 + tolerance)
    end = f", more than the tolerance of {tolerance:.2%}" if worse else ""
    sizes = f"{format_bytes(old)} → {format_bytes(new)}, {new - old:+,} bytes"
    return Change(f"{what} {sizes}{share}{end}", worse)


def _name(record: Record) -> str:
    return f"{record['cell']['model']['name']} {record['kind'].replace('_', ' ')}"


def _nothing_shared(path: str, old: Old) -> ConfigError:
    first = shortened_text(next(iter(old.values()))["cell"]["model"]["name"])
    return ConfigError(
        f"--compare {shortened(path)} holds none of these cells (it begins with {first}): models, "
        "sizes, arguments, device and dtype must be those of the earlier run"
    )
