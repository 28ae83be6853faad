"""Compares the peaks of a run with those of an earlier one: a memory test for a CI.

    python test_memory_optimized.py --compare peaks.jsonl          exit 1: a peak has grown

Bytes come from the allocator and are the same from run to run, so a small tolerance is enough. Any
other change (seconds, bits, versions) is printed and fails nothing: another torch may round
differently.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from zoo.errors import ConfigError, shortened, shortened_text
from zoo.harness.cells import expand
from zoo.harness.config import Config
from zoo.harness.results import Comparison, Record, Results, comparisons
from zoo.report.two_runs import TwoRuns, subject, two_runs


class Earlier(NamedTuple):
    """The results of an earlier run in a file, by their subjects; without those that failed."""

    path: str
    records: Mapping[str, Record]


def read_earlier(config: Config) -> Earlier | None:
    """Reads the results that a config's `compare` names, if it names any.

    Raises:
        ConfigError: there is no such file, no result in it, or none of the config's cells.
    """
    if config.compare is None:
        return None
    earlier = read_old(config.compare)
    cells = [asdict(cell) for entry in expand(config) for cell in entry.values()]
    if not any(subject({"kind": cell["kind"], "cell": cell}) in earlier.records for cell in cells):
        raise _nothing_shared(earlier)
    return earlier


def read_old(path: str, passed_over: Callable[[str], object] = str) -> Earlier:
    """Reads the results of an earlier run; raises ConfigError where there are none."""
    what = f"--compare {shortened(path)}"
    if not os.path.isfile(path):
        raise ConfigError(f"{what}: there is no such file")
    records = Results(Path(path)).read(passed_over).values()
    old = {subject(record): record for record in records if record["status"] != "failed"}
    if not old:
        raise ConfigError(f"{what} holds no result; give the .jsonl of a run")
    return Earlier(path, old)


def beside(now: Sequence[Comparison], earlier: Earlier) -> TwoRuns:
    """Returns a run beside an earlier one; raises ConfigError where they share no cell."""
    runs = two_runs(now, comparisons(earlier.records.values(), partial=True), earlier.path)
    if not runs.cells:
        raise _nothing_shared(earlier)
    return runs


def has_grown(runs: TwoRuns, tolerance: float, console: Console) -> bool:
    """Prints what changed; returns whether a peak has grown by more than the tolerance, or is gone.

    Times are said to differ where the quartiles do not meet: else it may be the machine alone.
    """
    lines = [(f"measured elsewhere: {words}", False) for words in runs.differs]
    lines += [(f"{name} was not measured before", False) for name in runs.only_now]
    lines += [(words, True) for words in runs.untimed]
    peaks = 0
    for cell in runs.cells:
        *sizes, (_, time) = cell.changes.items()
        for name, change in sizes:
            before, now = change.before.value, change.now.value
            line, is_worse = f"{cell.name}: {name} {change.cell}", False
            if before is not None and now is not None:
                peaks += 1
                line += f", {now - before:+,} bytes"
                is_worse = now > before * (1 + tolerance)
                line += f", more than the tolerance of {tolerance:.2%}" * is_worse
            elif name == "step peak":
                is_worse = now is None
                line += f": {cell.reason}" * is_worse
            if before != now:
                lines.append((line, is_worse))
        if time.is_clear and time.before != time.now:
            lines.append((f"{cell.name}: step time {time.cell}", False))
        if cell.other_bits:
            lines.append((f"{cell.name}: other bits in {', '.join(cell.other_bits)}", False))
    worse = sum(is_worse for _, is_worse in lines)
    verdict = f"{worse} worse" if worse else "nothing worse"
    end = f"compared with {runs.name}: {peaks} peaks, tolerance {tolerance:.2%}: {verdict}"
    for text, is_worse in [*lines, (end, worse > 0)]:
        style = "red" if is_worse else None
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    return worse > 0


def _nothing_shared(earlier: Earlier) -> ConfigError:
    first = shortened_text(next(iter(earlier.records.values()))["cell"]["model"]["name"])
    return ConfigError(
        f"--compare {shortened(earlier.path)} holds none of these cells (it begins with {first}): "
        "models, sizes, arguments, device and dtype must be those of the earlier run"
    )
