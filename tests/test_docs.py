"""Each page of docs/ is true: its snippets run and print what stands below them, links lead on."""

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT, Snippet, anchor, leads_somewhere, prose, run, snippets
from zoo._torch import OLDEST

pytestmark = pytest.mark.usefixtures("without_fork")

PAGES = ("budgets", "cuda-graphs", "exactness", "guide", "how-it-works", "recipes")
LINKING = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text("utf-8")


FOUND = {page: snippets(text(page)) for page in PAGES}
EACH = [
    pytest.param(page, found[0], snippet, id=f"{page}:{snippet.line}")
    for page, found in FOUND.items()
    for snippet in found[1:] or found
]


@pytest.mark.parametrize(("page", "first", "snippet"), EACH)
def test_a_snippet_prints_what_stands_below_it(
    page: str, first: Snippet, snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # where the name of the host leads nowhere
    names: dict[str, Any] = {}
    for part in dict.fromkeys((first, snippet)):  # a page may have one alone
        assert run(part, f"{page}.md", names) == (part.printed or "")


@pytest.mark.parametrize("page", PAGES)
def test_no_snippet_says_that_bits_differ(page: str) -> None:
    printed = "".join(snippet.printed or "" for snippet in FOUND[page])
    assert "same bits: False" not in printed


def test_every_page_with_snippets_is_run() -> None:
    found = {page.stem for page in (ROOT / "docs").glob("*.md") if snippets(text(page.stem))}
    translated = {name for name in found if name.endswith(".zh-CN")}
    assert found - translated - {"api"} == set(PAGES)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.stem)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    linked = re.findall(r"\]\(([^)]+)\)", prose(page.read_text("utf-8")))
    gone = [link for link in linked if "://" not in link and not leads_somewhere(page, link)]
    assert gone == []


@pytest.mark.parametrize("page", ["errors", "guide", "recipes"])
def test_the_list_of_a_page_has_each_of_its_sections(page: str) -> None:
    listed = re.findall(r"^- \[[^]]+\]\(#([\w-]+)\)", text(page), re.MULTILINE)
    sections = re.findall(r"^## (.+)$", prose(text(page)), re.MULTILINE)
    assert listed == [anchor(section) for section in sections]


def api() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "api.py"))


def test_the_api_is_that_of_the_docstrings() -> None:
    assert text("api") == api()["page"](), "run `python docs/api.py`"


def test_arguments_that_share_a_line_of_a_docstring_are_an_item_of_their_own() -> None:
    section = "Args:\n    one: first.\n    two, three: those\n        of `zoo.plan`.\n"
    items = "Args:\n\n- `one`: first.\n- `two, three`: those of `zoo.plan`."
    assert api()["markdown"](section) == items


def test_pitfalls_are_those_of_the_tests_docstrings() -> None:
    """Each row comes from a test and links to it."""
    written = runpy.run_path(str(ROOT / "docs" / "pitfalls.py"))["page"]()
    assert written.count("(../tests/") > 70
    assert text("pitfalls") == written, "run `python docs/pitfalls.py`"


def without_a_test(rows: list[str]) -> list[str]:
    """Returns rows of a table that do not end with a link to a test."""
    named = [re.search(r"\[([\w ]+)\]\(\.\./(tests/[\w/]+\.py)\) \|$", row) for row in rows]
    return [
        row
        for row, found in zip(rows, named, strict=True)
        if found is None
        or f"def test_{found[1].replace(' ', '_')}(" not in (ROOT / found[2]).read_text("utf-8")
    ]


def test_every_claim_about_graphed_steps_has_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| .* \|$", text("cuda-graphs").partition("## What a call does")[2], re.M)
    claims = [row for row in rows if not row.endswith("| tested by |")]
    assert len(claims) > 20
    assert without_a_test(claims) == []


def test_the_oldest_torch_that_is_named_is_the_one_that_is_run() -> None:
    (bound,) = re.findall(r"^ *torch>=(.+)$", (ROOT / "setup.cfg").read_text("utf-8"), re.M)
    recipe = subprocess.run(
        ["make", "--dry-run", "--always-make", "oldest"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert f"'torch=={bound}'" in recipe
    assert bound == OLDEST
    for page in ("README.md", "README.zh-CN.md"):
        assert f"torch >= {bound} " in (ROOT / page).read_text("utf-8")
