"""Results on disk: one line of JSON for each cell that ran, appended as soon as it is there.

A crash, an interruption or a full disk costs at most the line being written. The last line of a key
counts; a line that is not whole is passed over.
"""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from zoo.errors import ConfigError

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
                f"output {str(self.path.parent)!r} cannot be written to: {error.strerror}; "
                "--output names another folder"
            ) from None

    def read(self) -> dict[str, Record]:
        """Returns the last whole record of each key."""
        if not self.path.is_file():
            return {}
        records = {}
        # bytes: a line that broke off inside of a letter is no text
        for line in self.path.read_bytes().split(b"\n"):
            try:
                record = json.loads(line)
                records[record["key"]] = record
            except (ValueError, TypeError, KeyError):
                continue
        return records

    def append(self, record: Record) -> None:
        """Adds a record, on a line of its own even where the last one broke off."""
        with self.path.open("a+b") as file:
            if _breaks_off(file):
                file.write(b"\n")
            file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Forgets every record."""
        self.path.unlink(missing_ok=True)


def _breaks_off(file: BinaryIO) -> bool:
    """Says whether a file's last line is not whole, as a kill leaves it."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
