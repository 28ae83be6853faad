"""README.zh-CN.md follows README.md section by section; only the words between may differ."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADINGS = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def sections(name: str) -> list[str]:
    """Splits a file at its headings, those within code aside."""
    text = (HERE / name).read_text(encoding="utf-8")
    codes = iter(FENCES.findall(text))
    parts = re.split(r"^(?=#+ )", FENCES.sub("``````", text), flags=re.MULTILINE)
    return [re.sub("``````", lambda _: next(codes), part) for part in parts if part]


def code(section: str) -> list[str]:
    return FENCES.findall(section)


def prose(section: str) -> str:
    return FENCES.sub("", section)


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
    """Where the links lead; each README to the other, and to the notebooks in its language."""
    found = re.findall(r"\]\(([^)]+)\)", prose(section))
    return {re.sub(r"\.zh-CN|zh_CN/", "", link) for link in found}


ENGLISH, CHINESE = sections("README.md"), sections("README.zh-CN.md")


def heading(section: str) -> str:
    return HEADINGS.findall(section)[0][1]


def test_every_heading_has_its_counterpart() -> None:
    levels = [[HEADINGS.findall(part)[0][0] for part in parts] for parts in (ENGLISH, CHINESE)]
    assert levels[0] == levels[1]


@pytest.mark.parametrize("part", [outline, code, terms, rows, numbers, links])
@pytest.mark.parametrize(
    ("english", "chinese"), zip(ENGLISH, CHINESE, strict=False), ids=map(heading, ENGLISH)
)
def test_a_section_has_the_code_numbers_and_links_of_its_source(
    english: str, chinese: str, part: Callable[[str], object]
) -> None:
    assert part(chinese) == part(english)


def test_what_the_translation_links_to_is_there() -> None:
    text = (HERE / "README.zh-CN.md").read_text(encoding="utf-8")
    linked = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert linked
    assert [link for link in linked if not (HERE / link).exists()] == []
