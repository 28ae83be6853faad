"""Results on disk: one line of JSON for each cell that ran, appended as soon as it is there.

A crash, an interruption or a full disk costs at most the line being written. The last line of a key
counts; a line that is not whole is passed over, and so is one that is no record (`record`).
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from zoo.errors import ConfigError, shortened
from zoo.harness.record import fault_of

Record = dict[str, Any]


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
                f"{error.strerror}; "
                "--output names another folder"
            ) from None

    def read(self, passed_over: Callable[[str], object] = str) -> dict[str, Record]:
        """Returns the last whole record of each key; `passed_over` is told of lines that are none.

        Raises:
            ConfigError: the file cannot be read.
        """
        if not self.path.is_file():
            return {}
        records = {}
        for number, record, fault in self._lines():
            if fault is None:
                records[record["key"]] = record
            else:
                passed_over(f"{self.path}, line {number}, is passed over: {fault}")
        return records

    def append(self, record: Record) -> None:
        """Adds a record, on a line of its own even where the last one broke off.

        Raises:
            ConfigError: it cannot be written, as on a full disk.
        """
        try:
            with self.path.open("a+b") as file:
                if _breaks_off(file):
                    file.write(b"\n")
                file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{shortened(str(self.path))} cannot be written to: {error.strerror}; the cells "
                "before are kept: make room, and the same command goes on from there"
            ) from error

    def clear(self) -> None:
        """Forgets every record."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{shortened(str(self.path))} cannot be removed: {error.strerror}; without --fresh "
                "its results are kept"
            ) from error

    def _lines(self) -> Iterator[tuple[int, Record, str | None]]:
        """Yields the number of each line that is not empty, its record, and what is wrong with it.

        They are bytes: a line that broke off inside of a letter is no text.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(
                f"{shortened(str(self.path))} cannot be read: {error.strerror}"
            ) from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, *_parsed(line)


def _parsed(line: bytes) -> tuple[Record, str | None]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not whole; digits or brackets by the thousand
        return {}, "it is no JSON"
    return record, fault_of(record)


def _breaks_off(file: BinaryIO) -> bool:
    """Says whether a file's last line is not whole, as a kill leaves it."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
