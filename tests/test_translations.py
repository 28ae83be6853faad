"""A page in Chinese has the sections of its English one; only the words between may differ."""

import re
from collections.abc import Callable

import pytest

from tests.documents import FENCES, ROOT, anchor, headings, prose

PAGES = ("README", "docs/exactness")


def text(page: str) -> str:
    return (ROOT / f"{page}.md").read_text("utf-8")


def sections(page: str) -> list[str]:
    """Splits a page at its headings, those within code aside."""
    codes = iter(FENCES.findall(text(page)))
    parts = re.split(r"^(?=#+ )", FENCES.sub("``````", text(page)), flags=re.MULTILINE)
    return [re.sub("``````", lambda _: next(codes), part) for part in parts if part]


def code(section: str) -> list[str]:
    """The blocks of code; a comment behind two spaces may be in Chinese."""
    return [re.sub(r" {2,}# .+", "", block) for block in FENCES.findall(section)]


def outline(section: str) -> list[str]:
    """How each paragraph begins: items and tables by their mark, anything else by nothing."""
    parts = re.split(r"\n\n+|\n(?=- )", prose(section).strip())
    return [part[0] if part[0] in "#-|" else "" for part in parts]


def terms(section: str) -> set[str]:
    """The `code` within the prose, which names options, commands and files."""
    return {" ".join(term.split()) for term in re.findall(r"`([^`]+)`", prose(section))}


def rows(section: str) -> list[list[str]]:
    """The numbers of each row of the tables."""
    lines = re.findall(r"^\|.*\|$", prose(section), re.MULTILINE)
    return [re.findall(r"\d+(?:[.,]\d+)*", line) for line in lines]


def numbers(section: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", prose(section)))


def links(section: str) -> set[str]:
    """Where the links lead; what they name in Chinese stands for the same in English."""
    found = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose(section))
    return {re.sub(r"\.zh-CN|/zh_CN", "", path) + "#" + ENGLISH.get(to, to) for path, to in found}


def pitfalls(section: str) -> list[str]:
    """The tests that stand in the tables by their names."""
    return re.findall(r"\[[\w ]+\]\(\.\./tests/[\w/]+\.py\) \|$", section, re.MULTILINE)


ENGLISH = {
    anchor(chinese): anchor(english)
    for page in PAGES
    for english, chinese in zip(headings(text(page)), headings(text(f"{page}.zh-CN")), strict=False)
}
EACH = [
    pytest.param(english, chinese, id=f"{page}:{headings(english)[0]}")
    for page in PAGES
    for english, chinese in zip(sections(page), sections(f"{page}.zh-CN"), strict=False)
]


@pytest.mark.parametrize("page", PAGES)
def test_every_heading_has_its_counterpart(page: str) -> None:
    levels = [[part.index(" ") for part in sections(name)] for name in (page, f"{page}.zh-CN")]
    assert levels[0] == levels[1]


@pytest.mark.parametrize("part", [outline, code, terms, rows, numbers, links, pitfalls])
@pytest.mark.parametrize(("english", "chinese"), EACH)
def test_a_section_has_the_code_numbers_and_links_of_its_source(
    english: str, chinese: str, part: Callable[[str], object]
) -> None:
    assert part(chinese) == part(english)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_in_chinese_links_to_pages_in_chinese(page: str) -> None:
    source = ROOT / f"{page}.md"
    found = re.findall(r"\]\(([^)#]+\.md)", prose(text(f"{page}.zh-CN")))
    linked = {(source.parent / path).resolve() for path in found} - {source}
    assert [path.name for path in linked if path.with_suffix(".zh-CN.md").exists()] == []
