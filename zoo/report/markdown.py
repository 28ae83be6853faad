"""Tables that read well as plain text and are Markdown."""

from collections.abc import Sequence

from zoo.report.escape import visible


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table whose columns are padded to equal width, all but the first to the right."""
    cells = [[visible(cell).replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(columns, *cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(row, widths) for row in (columns, rule, *cells))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"| {' | '.join(padded)} |"
