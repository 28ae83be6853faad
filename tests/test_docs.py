"""Each page of docs/ is true: its snippets run and print what stands below them, links lead on."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT, Snippet, run, snippets

PAGES = ("exactness", "how-it-works", "myths", "recipes")


def text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text("utf-8")


FOUND = [(page, *snippets(text(page))) for page in PAGES]
EACH = [
    pytest.param(page, first, snippet, id=f"{page}:{snippet.line}")
    for page, first, *others in FOUND
    for snippet in others
]


@pytest.mark.parametrize(("page", "first", "snippet"), EACH)
def test_a_snippet_prints_what_stands_below_it(
    page: str, first: Snippet, snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # where the name of the host leads nowhere
    names: dict[str, Any] = {}
    assert run(first, f"{page}.md", names) == (first.printed or "")
    assert run(snippet, f"{page}.md", names) == (snippet.printed or "")


@pytest.mark.parametrize("page", sorted(path.stem for path in (ROOT / "docs").glob("*.md")))
def test_what_a_page_links_to_is_there(page: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    linked = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if "://" not in link]
    gone = [link for link in linked if not (ROOT / "docs" / link.partition("#")[0]).exists()]
    assert gone == []


def test_the_api_is_that_of_the_docstrings() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "api.py"))["page"]
    assert text("api") == page(), "run `python docs/api.py`"


def test_every_pitfall_has_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| .* \|$", text("exactness").partition("## What is refused")[0], re.M)
    named = [re.search(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\) \|$", row) for row in rows]
    assert len(rows) > 50
    gone = [
        row
        for row, found in zip(rows, named, strict=True)
        if not row.startswith("| what |")
        and (found is None or f"def {found[1]}(" not in (ROOT / found[2]).read_text("utf-8"))
    ]
    assert gone == []
