"""Writes the report of a comparison into a folder: a page, its tables and its picture."""

from collections.abc import Sequence
from pathlib import Path

from zoo.report.files import write_markdown, write_models, write_timings
from zoo.report.heading import Heading
from zoo.report.plot import draw
from zoo.report.rows import Row


def write_report(rows: Sequence[Row], heading: Heading, folder: Path) -> Path:
    """Writes report.md, models.csv, timings.csv and comparison.svg/png; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "comparison.svg", folder / "report.md"
    draw(rows, heading, [picture, picture.with_suffix(".png")])
    write_models(rows, folder / "models.csv")
    write_timings(rows, folder / "timings.csv")
    write_markdown(rows, heading, picture.name, page)
    return page
