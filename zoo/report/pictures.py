"""Which files pictures are written to, and the module that draws them, which needs matplotlib."""

from pathlib import Path
from typing import Any

from zoo.errors import ArgumentError, needed, shortened

# endings of the files that matplotlib writes
PICTURES = (".svg", ".png", ".pdf")


def check_picture(path: str | Path) -> None:
    """Raises ArgumentError where a path does not end as that of a picture."""
    if Path(path).suffix.lower() not in PICTURES:
        name = shortened(Path(path).name)
        raise ArgumentError(f"{name} is no picture; end it with .svg, .png or .pdf")


def plots() -> Any:
    """Imports what draws with matplotlib; raises ArgumentError where that is not installed."""
    return needed("zoo.report.matplotlib_charts", "a picture", ArgumentError)
