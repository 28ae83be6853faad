"""Runs the Python in a document, and compares what it prints with what the document says it does.

    ```python
    print(6 * 7)
    ```

    ```text
    42
    ```

The block `text` right behind a block `python` is what that prints; the code may be folded away by
`<details>`. In a page of docs/ the first snippet is what all others stand on, and each of them runs
after it alone, as a reader may run it.

`python -m tests.documents docs/guide.md` runs a page's snippets and writes what they print.
"""

import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FENCES = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_SNIPPET = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?P<fold>\n</details>\n(?=\n```text))?"
    r"(?:\n?^```text\n(?P<printed>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


class Snippet(NamedTuple):
    """Python in a document, the line that it begins at, and what it is said to print."""

    line: int
    code: str
    printed: str | None


def prose(text: str) -> str:
    """Returns a document without its blocks of code."""
    return FENCES.sub("", text)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)


def anchor(heading: str) -> str:
    """Returns what a link names a heading by on a code host."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def leads_somewhere(page: Path, link: str) -> bool:
    """Says whether a file is there and has the heading."""
    path, _, name = link.partition("#")
    target = page.parent / path if path else page
    if not name or not target.exists():
        return target.exists()
    return name in map(anchor, headings(target.read_text("utf-8")))


def snippets(text: str) -> list[Snippet]:
    """Finds the Python in a document."""
    return [
        Snippet(text.count("\n", 0, found.start("code")) + 1, found["code"], found["printed"])
        for found in _SNIPPET.finditer(text)
    ]


def run(snippet: Snippet, name: str, names: dict[str, Any]) -> str:
    """Runs a snippet with these names, adds its own to them and returns what it printed."""
    # tracebacks then name the line of the document
    code = "\n" * (snippet.line - 1) + snippet.code
    names.setdefault("__name__", "__main__")  # what classes believe that they are from
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), names)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def run_page(text: str, name: str) -> dict[int, str]:
    """Runs each snippet of a page after its first one; returns by line what they printed."""
    first, *others = snippets(text)
    names: dict[str, Any] = {}
    found = {first.line: run(first, name, names)}
    return found | {snippet.line: run(snippet, name, dict(names)) for snippet in others}


def rewritten(text: str, name: str) -> str:
    """Returns a page whose blocks `text` are what its snippets print."""
    printed = run_page(text, name)

    def again(found: re.Match[str]) -> str:
        line = text.count("\n", 0, found.start("code")) + 1
        told = f"\n```text\n{printed[line]}```\n" if printed[line] else ""
        return f"```python\n{found['code']}```\n{found['fold'] or ''}{told}"

    return _SNIPPET.sub(again, text)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument).absolute()
        # some snippets write files
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            page.write_text(rewritten(page.read_text("utf-8"), argument), "utf-8")
