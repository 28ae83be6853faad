import re
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT, leads_somewhere, run, snippets

README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_every_snippet_runs_after_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    found = snippets(README)
    assert len(found) >= 3
    names: dict[str, Any] = {}
    for snippet in found:
        assert run(snippet, "README.md", names) == (snippet.printed or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_names_a_file_that_is_there(page: Path) -> None:
    files = r"(?<![\w/.-])(?:configs|tests|benchmarks|notebooks|docs)/[\w/.-]+\w"
    named = re.findall(files, page.read_text("utf-8"))
    assert named or page.stem not in ("README", "guide", "budgets")
    for name in named:
        assert (ROOT / name).exists(), name


def test_what_the_first_page_links_to_is_there() -> None:
    linked = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", README)
    local = [path or image for path, image in linked if "://" not in path]
    assert local
    assert [link for link in local if not leads_somewhere(ROOT / "README.md", link)] == []


def test_the_first_page_is_short() -> None:
    assert len(README.splitlines()) <= 200


def rows(page: str, model: str) -> list[str]:
    """Returns the rows of a model in the tables of a page."""
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^\| {model}\b.*$", text, re.MULTILINE)


def test_the_picture_has_the_peaks_of_the_table() -> None:
    (told,) = re.findall(r'alt="([^"]+)"', README)
    (row,) = rows("README.md", "resnet50")
    assert re.findall(r"(\d+) MiB", told) == re.findall(r"(?<=\| )\d+(?= [|(])", row)


def test_the_guide_has_the_times_of_the_first_page() -> None:
    models = re.findall(r"^\| (\w+).*×\d\.\d\d \|$", README, re.MULTILINE)
    assert len(models) == 7
    for model in models:
        ((first,), (second,)) = rows("README.md", model), rows("docs/guide.md", model)
        assert re.findall(r"×(\d\.\d\d)", first) == re.findall(r"×(\d\.\d\d)", second)
