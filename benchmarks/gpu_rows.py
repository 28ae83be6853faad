"""Rows of `benchmarks/gpu.py`: JSON, one on each line, written as soon as something is measured."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("part", "case", "variant", "deterministic", "conf")
    return tuple(row.get(name) or "" for name in names)


@dataclass
class Rows:
    """A file of rows, each on a line, with the facts that all rows of a run share."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, **row: Any) -> None:
        """Appends a row, which is on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | self.facts, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(brief(row), file=sys.stderr, flush=True)

    def known(self) -> list[dict[str, Any]]:
        """Returns the rows of this commit on this machine that are no errors."""
        return [row for row in self.latest() if "error" not in row]

    def latest(self) -> list[dict[str, Any]]:
        """Returns the last row of each key, of this commit on this machine."""
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        # a line without an end is of a process that was killed
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        own = (row for row in rows if self.facts.items() <= row.items())
        return list({key_of(row): row for row in own}.values())


def brief(row: dict[str, Any]) -> str:
    """Returns a row as one line for the terminal."""
    shown = ("differing", "of", "asked", "predicted", "allocated", "reserved", "ms", "batch")
    names = (*shown, "passed", "failed")
    named = [f"{key} {row[key]}" for key in names if row.get(key) is not None]
    told = row.get("error") or row.get("skipped") or ", ".join(named)
    return f"# {row.get('part')}: {row.get('case')}: {row.get('variant', '')}: {told}"


@dataclass(frozen=True)
class Job:
    """What a process measures: the variants of a case that have no row yet."""

    part: str
    case: str
    variants: tuple[str, ...]
    device: str
    small: bool = False
    deterministic: bool = False
    conf: str = ""
    needs: tuple[str, ...] = ()
    only_on: tuple[str, ...] = ()

    def key(self, variant: str) -> tuple[Any, ...]:
        """Returns what the row of a variant is known by."""
        return key_of({**vars(self), "variant": variant})
