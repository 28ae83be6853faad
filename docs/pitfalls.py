"""Writes docs/pitfalls.md from the docstrings of the tests: `python docs/pitfalls.py`.

A line `what | torch | zoo` of a test's docstring is an item of the page, which ends with the test.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pitfalls.md"
HEAD = """\
# Pitfalls

[Index](README.md)

Where a second run of the forward goes wrong with `torch.utils.checkpoint` (*reentrant*: its
`use_reentrant=True`), and the test that holds zoo to training without checkpointing: with zoo
everything happens once, and all bits are equal. An item names zoo where there is more to say; where
it says nothing else, torch was not tried. `python docs/pitfalls.py` writes this page from the
docstrings of the tests; [test_torch.py](../tests/engine/pitfalls/test_torch.py) runs two dozen of
the programs with both.
"""
# the files of a section, in its order
PITFALLS = "engine/pitfalls"
SECTIONS = {
    "State that a forward updates": [
        f"{PITFALLS}/{name}" for name in ("statistics", "carried", "attributes", "runs", "state")
    ],
    "What changes between forward and backward": [f"{PITFALLS}/changes", f"{PITFALLS}/aliases"],
    "Randomness": [f"{PITFALLS}/randomness"],
    "Settings and hooks": [f"{PITFALLS}/ambient", "engine/dispatch_keys", f"{PITFALLS}/hooks"],
    "Inputs, outputs and in-place writes": [f"{PITFALLS}/structure", f"{PITFALLS}/layouts"],
    "Autograd": [f"{PITFALLS}/autograd", f"{PITFALLS}/transforms", "engine/inner_gradients"],
    "Processes, threads and compilers": [
        *(f"{PITFALLS}/distributed", "groups", "engine/replay", f"{PITFALLS}/lifecycle"),
        *("engine/interrupts", "engine/faults", f"{PITFALLS}/compile", "engine/recording"),
    ],
    "Models of other libraries": [
        *("tracing/exact", "tracing/lifecycle", "tracing/libraries", "policy/sizes"),
        "api/checkpoint",
    ],
}
ISSUES = {"pytorch": "pytorch/pytorch"}
# what zoo does in most rows, and goes without saying
USUAL = {"exact", "once", "drawn once", "fire once"}


def page() -> str:
    """Returns the page.

    Raises:
        LookupError: a file has rows and no section.
    """
    files = [file_of(name) for names in SECTIONS.values() for name in names]
    with_rows = {path for path in (ROOT / "tests").rglob("test_*.py") if any(rows_of(path))}
    if missing := with_rows.symmetric_difference(files):
        raise LookupError(
            f"SECTIONS of docs/pitfalls.py do not hold the files with rows: {missing}"
        )
    parts, held = [HEAD], []
    for title, names in SECTIONS.items():
        items = []
        found = itertools.chain.from_iterable(map(rows_of, map(file_of, names)))
        for what, torch, zoo, test in found:
            if torch == "exact":
                held.append(f"- **{what}**{'' if zoo == torch else f' ({zoo})'} ({test})\n")
            else:
                own = "" if zoo in USUAL else f"zoo: {zoo}"
                items.append(f"- **{what}**: {'; '.join(filter(None, (torch, own)))} ({test})\n")
        parts.append(f"## {title}\n\n{''.join(items)}")
    return "\n".join((*parts, f"## Exact with torch, too\n\n{''.join(held)}"))


def file_of(name: str) -> Path:
    """Returns the file that `engine/recording` names: tests/engine/test_recording.py."""
    folder, _, stem = name.rpartition("/")
    return ROOT / "tests" / folder / f"test_{stem}.py"


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
