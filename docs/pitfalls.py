"""Writes docs/pitfalls.md from the docstrings of the tests: `python docs/pitfalls.py`.

A line `what | torch | zoo` of a test's docstring is a row of the page, whose last cell is the test.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pitfalls.md"
HEAD = """\
# Pitfalls

[Index](README.md) · [Exactness](exactness.md) · [Errors](errors.md)

Where a second run of the forward goes wrong, and the test that holds zoo to training without
checkpointing. *torch* is `torch.utils.checkpoint`, *reentrant* its `use_reentrant=True`; an empty
cell was not tried. *exact* means the same bits as training without checkpointing. `python
docs/pitfalls.py` writes this page from the docstrings of the tests;
[test_torch.py](../tests/engine/pitfalls/test_torch.py) runs two dozen of the programs with both.
"""
SECTIONS = {
    "State that a forward updates": "statistics carried attributes runs state",
    "What changes between forward and backward": "changes aliases",
    "Randomness": "randomness",
    "Settings and hooks": "ambient dispatch_keys hooks",
    "Inputs, outputs and in-place writes": "structure layouts",
    "Autograd": "autograd transforms inner_gradients",
    "Processes, threads and compilers": (
        "distributed groups replay lifecycle interrupts faults compile recording"
    ),
    "Models of other libraries": "exact libraries sizes checkpoint",
}
ISSUES = {"pytorch": "pytorch/pytorch"}


def page() -> str:
    """Returns the page.

    Raises:
        LookupError: a file has rows and no section.
    """
    sections: dict[str, list[list[str]]] = {title: [] for title in SECTIONS}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        rows = list(rows_of(path))
        if rows:
            sections[section_of(path)] += rows
    return "\n".join((HEAD, *(f"## {title}\n\n{table(rows)}" for title, rows in sections.items())))


def table(rows: Iterable[Iterable[str]]) -> str:
    """Writes a table of words: every column begins at the left."""
    head = ("what", "torch", "zoo", "test"), ("---",) * 4
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (*head, *rows))


def section_of(path: Path) -> str:
    """Returns the title of the section that names a file.

    Raises:
        LookupError: none does.
    """
    for title, names in SECTIONS.items():
        if path.stem.removeprefix("test_") in names.split():
            return title
    raise LookupError(f"{path} has rows; name it in SECTIONS of docs/pitfalls.py")


def rows_of(path: Path) -> Iterator[list[str]]:
    """Yields a row for each line `what | torch | zoo` of a test's docstring."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for line in (ast.get_docstring(node) or "").splitlines():
                cells = [cell.strip() for cell in line.split("|")]
                if len(cells) == 3:
                    name = node.name.removeprefix("test_")
                    file = path.relative_to(ROOT).as_posix()
                    yield [*map(linked, cells), f"[{name}](../{file})"]


def linked(cell: str) -> str:
    """Returns a cell whose issues, `pytorch#96136`, are links."""
    return re.sub(
        r"(\w+)#(\d+)",
        lambda found: f"[{found[0]}](https://github.com/{ISSUES[found[1]]}/issues/{found[2]})",
        cell,
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
