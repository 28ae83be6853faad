"""What a report shows does nothing: no name ends a cell, runs a formula or steers a terminal."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.policy.test_plan_report import curve, report
from tests.report.recorded import MODEL, NAMES, comparison
from zoo.policy.plan_report import Frontier
from zoo.profiling.timeline import Allocation, Timeline
from zoo.report.escaping import in_code, in_csv, in_markdown, markdown_table, to_csv, visible
from zoo.report.html_page import page
from zoo.report.rows import Heading, heading, rows
from zoo.report.text_report import write_report

HOSTILE = (
    "\x1b[2Ja|b`c`<img src=x onerror=alert(1)>\n# d $\\frac$ *e* [f](g) \u202e\ud800 &amp; _h_"
)
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def hostile():
    """A comparison of which every text from outside is hostile, one cell having failed."""
    model = MODEL | {"name": HOSTILE, "arguments": {"activation": HOSTILE, HOSTILE: 1}}
    where = dict.fromkeys(("device", "torch", "python", "zoo"), HOSTILE) | {"threads": 2}
    failed = {"status": "failed", "reason": HOSTILE}
    found = comparison(name=HOSTILE, timing=failed) | {"model": model | {"checkpoint": HOSTILE}}
    for kind in ("baseline", "checkpointed", "optimizer_in_backward"):
        found[kind] |= {"environment": where}
    found["baseline"]["steps"] |= {"names": [HOSTILE] * len(NAMES)}
    return [found]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_report(rows(hostile()), heading(hostile(), HOSTILE, HOSTILE), tmp_path).parent


def test_no_file_holds_a_character_that_steers(written: Path) -> None:
    for name in ("report.md", "models.csv", "timings.csv", "comparison.svg"):
        text = (written / name).read_text().replace("\r\n", "\n")
        assert not CONTROLS.findall(text), name
    assert r"\x1b[2J" in (written / "models.csv").read_text()
    assert r"\\x1b\[2J" in (written / "report.md").read_text()


def test_the_table_of_a_report_has_its_rows_and_columns(written: Path) -> None:
    lines = (written / "report.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 3
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    # one heading, and no element but what the notes have
    assert [line for line in lines if line.startswith("#")] == lines[:1]
    assert "<" not in re.sub(r"(`+) ?.*?\1", "", "\n".join(lines))


def test_a_csv_holds_every_name_in_one_cell_as_text(written: Path) -> None:
    (model,) = csv.DictReader(io.StringIO((written / "models.csv").read_text()))
    assert model["model"] == visible(HOSTILE)
    entries = [{"text": text, "number": -1.5} for text in ("=1+2", "+1", "-1", "@a", "\t=1", "a=1")]
    (_, *found) = csv.reader(io.StringIO(to_csv(entries)))
    assert [cell for cell, _ in found] == ["'=1+2", "'+1", "'-1", "'@a", r"\t=1", "a=1"]
    assert {number for _, number in found} == {"-1.5"}


def test_every_picture_is_xml(written: Path, tmp_path: Path) -> None:
    report_ = replace(report(), title=HOSTILE, names=(HOSTILE,) * len(report().names))
    report_.plot(tmp_path / "plan.svg")
    points = tuple(replace(point, name=f"{point.name}{HOSTILE}") for point in curve().schemes)
    drawn = curve()
    Frontier((*drawn.optimal, *points), drawn.baseline, drawn.lower_bound, HOSTILE).plot(
        tmp_path / "frontier.svg"
    )
    Timeline(HOSTILE, allocations=[Allocation(3, 0, None, "parameters")]).plot(
        tmp_path / "step.svg"
    )
    pictures = [*tmp_path.glob("*.svg"), written / "comparison.svg"]
    assert len({path.name for path in pictures}) == 4
    for path in pictures:
        ElementTree.parse(path)
        assert r"\x1b[2J" in path.read_text(), path


def test_the_page_holds_no_element_of_a_name(tmp_path: Path) -> None:
    frontier = hostile()
    frontier[0]["baseline"]["frontier"]["schemes"] = {
        "<img src=x onerror=alert(1)>": [2**20, 1.3],
        "</script>~1/~": [2**20, 1.4],
    }
    text = page(frontier, Heading("a", "b", "c"))
    assert "<img" not in text
    assert text.count("</script>") == text.count("<script")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("resnet50 (image_size=64)", "resnet50 (image_size=64)"),
        ("a|b", r"a\|b"),
        ("`a`", r"\`a\`"),
        ("a\\|b", r"a\\\|b"),
        ("_a_ b_c", r"\_a\_ b_c"),
        ("<b> & c > d", "&lt;b> &amp; c > d"),
        ("a\nb\x1b", r"a\\nb\\x1b"),
        ("größe 模型 ×2 → 3", "größe 模型 ×2 → 3"),
    ],
)
def test_markdown_shows_a_text_as_it_is(text: str, shown: str) -> None:
    assert in_markdown(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a b", "`a b`"), ("a`b", "``a`b``"), ("`a``b`", "``` `a``b` ```"), ("a\nb", r"`a\nb`")],
)
def test_code_ends_where_it_should(text: str, shown: str) -> None:
    assert in_code(text) == shown


def test_a_table_for_terminals_is_one_line_a_row() -> None:
    lines = markdown_table(("step", "x"), [(HOSTILE, "1"), ("plain", "2")]).splitlines()
    assert len(lines) == 4
    assert len(set(map(len, lines))) == 1
    assert not CONTROLS.findall("\n".join(lines))


def test_numbers_stay_numbers() -> None:
    assert [in_csv(value) for value in (-1, 0.5, None, True)] == [-1, 0.5, None, True]
