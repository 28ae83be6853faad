"""Checks the suffix of picture files, and imports the module that draws them with matplotlib."""

from pathlib import Path
from typing import Any

from zoo.errors import ArgumentError, needed, shortened

# endings of the files that matplotlib writes
PICTURES = (".svg", ".png", ".pdf")


def check_picture(path: str | Path) -> None:
    """Raises ArgumentError unless a path has the suffix of a picture."""
    if Path(path).suffix.lower() not in PICTURES:
        name = shortened(Path(path).name)
        raise ArgumentError(f"{name} is no picture; end it with .svg, .png or .pdf")


def plots() -> Any:
    """Returns the module that draws; raises ArgumentError if matplotlib is not installed."""
    return needed("zoo.report.matplotlib_charts", "a picture", ArgumentError)
