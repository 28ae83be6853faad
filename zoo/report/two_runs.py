"""Two runs side by side: the measurements before and now of each cell in both.

    cell                      step peak                       step time
    resnet50 checkpointed     8.00 MiB → 7.00 MiB (−12.50 %)   ×1.30 → ×1.25 (−3.85 %, unclear)
    in one run only           now: vnet baseline              before: lstm baseline
    differs                   torch 2.13.0 → 2.14.1

Bytes come from the allocator and are the same in every run; a change of time is clear if the
quartiles of the ratios do not overlap.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zoo.report.escaping import in_markdown, markdown_table, visible
from zoo.report.rows import (
    FEWEST,
    GRAPHS,
    VARIANTS,
    Comparison,
    ModelRow,
    Number,
    TableCell,
    differences,
    median,
    quartiles,
    rows,
)

WHAT = ("name", "data", "batch_size", "size", "arguments", "optimizer", "checkpoint")
WHERE = ("device", "dtype")
ENVIRONMENT = ("torch", "zoo", "commit", "python", "device", "threads")
# with the same of these, trainings on the same device are the same bit for bit; their defaults,
# for older results
SAME_BITS = {"steps": None, "seed": None, "threads": None, "deterministic": False}
# names of the numbers in a table and in a file
COLUMNS = {
    "step peak": "peak_bytes",
    "activation peak": "activation_peak_bytes",
    "step time": "time_ratio",
}
NAMES = VARIANTS | GRAPHS
TITLE = "Compared with an earlier run"
ABOUT = (
    "Before → now, of each cell that both runs have: the same model, arguments, batch, "
    "checkpoint=, optimizer, device and type. Step time is over the baseline's of the same run; "
    "its change is unclear where the quartiles meet or there are fewer than "
    f"{FEWEST} pairs."
)


class Change(NamedTuple):
    """A number before and now."""

    before: Number
    now: Number
    is_clear: bool = True

    @property
    def cell(self) -> TableCell:
        """Both numbers and the growth; one number if nothing changed."""
        # no paths: one of the numbers is from other results
        before, now = (Number(number.text, number.value) for number in self[:2])
        if before == now:
            return TableCell([now], detail="" if now.value is None else "(unchanged)")
        if not before.value or now.value is None:
            return TableCell([before, now], "{} → {}")
        share = now.value / before.value - 1
        percent = f"{100 * share:+.2f} %".replace("-", "−")
        verdict = f"({percent}{'' if self.is_clear else ', unclear'})"
        tone = "faint" if not self.is_clear else "less" if share < 0 else "more"
        return TableCell([before, now], "{} → {}", verdict, tone)


class CellChanges(NamedTuple):
    """The changes of a cell; `replanned`: `checkpoint=` chose another plan than before.

    `other_bits` lists the differences of trainings with all of SAME_BITS the same; `reason`
    says why there are no numbers now.
    """

    name: str
    batch: str
    changes: Mapping[str, Change]
    replanned: bool
    other_bits: Sequence[str] = ()
    reason: str = ""

    @property
    def note(self) -> str:
        """The text beside the name."""
        return f"{self.batch}{', another plan' * self.replanned}"


class TwoRuns(NamedTuple):
    """A run and an earlier one, whose file is `name`.

    Attributes:
        measured: when the earlier one ended; "" if unknown.
        cells: those in both.
        only_now, only_before: names of cells that are in one run only.
        differs: differences of the environments, such as 'torch 2.13.0 → 2.14.1'.
        untimed: cells that could be timed before and not now, with the reason.
    """

    name: str
    measured: str
    cells: Sequence[CellChanges]
    only_now: Sequence[str]
    only_before: Sequence[str]
    differs: Sequence[str]
    untimed: Sequence[str] = ()

    @property
    def notes(self) -> list[str]:
        """Sentences on what the table does not show."""
        named = {
            "Measured under other conditions": self.differs,
            "In this run only": self.only_now,
            "In the earlier run only": self.only_before,
        }
        notes = [f"The earlier run: {self.name}{f', ended {self.measured}' * bool(self.measured)}."]
        notes += [f"{what}: {'; '.join(texts)}." for what, texts in named.items() if texts]
        return [*map(visible, notes)]


def subject(record: Mapping[str, Any]) -> str:
    """Identifies what a record measures: kind, model, data, device, dtype; not how or where."""
    cell = record["cell"]
    model = {name: cell["model"].get(name) for name in WHAT}
    # as in a file: lists for tuples, arguments in order
    return json.dumps([record["kind"], model, [cell.get(name) for name in WHERE]], sort_keys=True)


def environment_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Lists the differences of two records' environments: 'torch 2.13.0 → 2.14.1'."""
    old, new = ((record.get("environment") or {}) for record in (before, after))
    pairs = ((key, old.get(key), new.get(key)) for key in ENVIRONMENT)
    return ", ".join(f"{key} {then} → {now}" for key, then, now in pairs if then != now)


def two_runs(now: Sequence[Comparison], before: Sequence[Comparison], name: str) -> TwoRuns:
    """Compares the cells of a run with those of an earlier one from a file of that name."""
    new, old = _cells(now), _cells(before)
    shared = [key for key in new if key in old]
    changed = dict.fromkeys(environment_change(old[key][2], new[key][2]) for key in shared)
    return TwoRuns(
        name=name,
        measured=max((record.get("finished", "") for *_, record in old.values()), default=""),
        cells=[_changes(old[key], new[key]) for key in shared],
        only_now=_lacking(new, old),
        only_before=_lacking(old, new),
        differs=[*filter(None, changed)],
        untimed=_untimed(now, before),
    )


def as_markdown(runs: TwoRuns) -> str:
    """Returns a heading, an explanation of the table, the table, and notes."""
    cells = [
        [in_markdown(f"{cell.name}, {cell.note}"), *(str(c.cell) for c in cell.changes.values())]
        for cell in runs.cells
    ]
    parts = [f"## {TITLE}", ABOUT, markdown_table(["cell", *COLUMNS], cells)]
    return "\n\n".join([*parts, *map(in_markdown, runs.notes)])


def as_entries(runs: TwoRuns) -> list[dict[str, Any]]:
    """Returns the numbers, unrounded: an entry for each cell."""
    return [
        {"cell": cell.name, "batch": cell.batch, "another_plan": cell.replanned}
        | {
            f"{COLUMNS[column]}_{when}": number.value
            for column, change in cell.changes.items()
            for when, number in (("before", change.before), ("now", change.now))
        }
        for cell in runs.cells
    ]


_Cell = tuple[ModelRow, str, Mapping[str, Any]]


def _cells(comparisons: Sequence[Comparison]) -> dict[str, _Cell]:
    """Returns row, kind and record of each cell that has one, by its subject."""
    return {
        subject(comparison[kind]): (row, kind, comparison[kind])
        for comparison, row in zip(comparisons, rows(comparisons), strict=True)
        for kind in row.statuses
        # a cell that was not run has no record of its own
        if "cell" in comparison[kind]
    }


def _changes(before: _Cell, now: _Cell) -> CellChanges:
    (old, kind, _), (new, _, _) = before, now
    records = [record for *_, record in (before, now)]
    plans = [record.get("plan") for record in records]
    settings = [[record["cell"].get(*item) for item in SAME_BITS.items()] for record in records]
    digests = [record["digests"] for record in records if "digests" in record]
    is_same = len(digests) == 2 and settings[0] == settings[1]
    past, present = old.time_ratios(kind), new.time_ratios(kind)
    ranges = sorted(filter(None, (quartiles(past), quartiles(present))))
    is_clear = len(ranges) == 2 and ranges[0][1] < ranges[1][0]
    changes = {
        "step peak": Change(old.size(kind), new.size(kind)),
        "activation peak": Change(
            old.size(kind, "activation_peak"), new.size(kind, "activation_peak")
        ),
        "step time": Change(median(past), median(present), is_clear),
    }
    name, replanned = f"{new.label} {NAMES[kind]}", None not in plans and plans[0] != plans[1]
    other_bits = differences(*digests) if is_same else ()
    reason = records[1].get("reason", "")
    return CellChanges(name, new.batch, changes, replanned, other_bits, reason)


def _untimed(now: Sequence[Comparison], before: Sequence[Comparison]) -> list[str]:
    old, new = ([comparison.get("timing", {}) for comparison in run] for run in (before, now))
    done = [record for record in old if record.get("status") == "done" and "cell" in record]
    timed = set(map(subject, done))
    return [
        f"{row.label} timing {record['status']}: {record['reason']}"
        for row, record in zip(rows(now), new, strict=True)
        if "reason" in record and "cell" in record and subject(record) in timed
    ]


def _lacking(cells: Mapping[str, _Cell], others: Mapping[str, _Cell]) -> list[str]:
    """Names the cells of a run that are missing in the other."""
    return [
        f"{row.label} {NAMES[kind]}, {row.batch}"
        for key, (row, kind, _) in cells.items()
        if key not in others
    ]
