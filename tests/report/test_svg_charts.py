"""Charts as SVG: each shape stands where the chart says, at any width, and tips tell the data."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from zoo.report.charts import SHAPES as NAMES, Axis, Bars, Chart, Layer, Marks, StepCurve
from zoo.report.step_axis import AxisLabel
from zoo.report.svg_charts import HEIGHT, PARTS, SHAPES, svg, ticks

TEN = Axis(0, 10)


def shapes(*layers: Layer, x: Axis = TEN, y: Axis = TEN) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{svg(Chart(x, y, layers))}</div>")


def test_a_step_curve_holds_until_the_next_place_and_so_does_its_lower_edge() -> None:
    ends: Any = {"x": [0, 2, 4, 10], "y": [2, 2, 5, 5], "low": [0, 1, 0, 0]}
    area, line = shapes(StepCurve(color="kept", alpha=0.5, dashed=True, **ends)).iter("path")
    assert area.get("d") == "M0 200H4000V125H10000L10000 250H4000V225H2000V250H0z"
    assert line.get("d") == "M0 200H4000V125H10000"
    assert (area.get("fill"), area.get("fill-opacity")) == ("var(--kept)", "0.5")
    assert line.get("stroke-dasharray")


def test_an_area_without_height_is_left_out() -> None:
    flat: Any = {"x": [0, 10], "y": [3, 3], "low": [3, 3], "width": 0}
    assert not [*shapes(StepCurve(color="kept", alpha=1.0, **flat)).iter("path")]


def test_bars_and_their_tips_stand_where_they_are() -> None:
    bars = Bars(color="kept", boxes=[(1, 2.5, 0, 4), (5, 10, -1, 0)], tips={"<step>": ["a", "b"]})
    first, second = (g for g in shapes(bars, y=Axis(-1, 9)).iter("rect"))
    assert first.attrib == {"x": "10%", "y": "125.0", "width": "15%", "height": "100.0"}
    assert second.attrib == {"x": "50%", "y": "225.0", "width": "50%", "height": "25.0"}
    assert [rect.findtext("title") for rect in (first, second)] == ["<step>: a", "<step>: b"]


def test_each_part_of_the_width_tells_the_highest_point_of_each_curve_in_it() -> None:
    x = [0.0, 1.0, 1.001, 1.002, 10.0]
    one = StepCurve(color="kept", x=x, y=[1, 2, 9, 3, 3], tips={"one": ["a", "b", "c", "d", "d"]})
    found = [rect for rect in shapes(one).iter("rect") if rect.get("class") == "part"]
    assert len(found) == PARTS
    told = [rect.findtext("title") for rect in found]
    assert told == ["one: a"] * 8 + ["one: c"] + ["one: d"] * (PARTS - 9)
    tips = {"B": ["x", "x"], "of": ["0 B", "0 B"]}
    other = StepCurve(color="scheme", x=[0, 10], y=[1, 1], tips=tips)
    both = [rect.findtext("title") for rect in shapes(one, other).iter("rect")]
    assert both[:2] == ["one: a\nB: x"] * 2


@pytest.mark.parametrize("shape", SHAPES)
def test_marks_stand_on_their_spots(shape: str) -> None:
    mark = Marks(color="ink", spots=[(1, 10), (8, 5)], shape=shape, tips={"plan": ["p", "q"]})
    found = [part for part in shapes(mark, x=Axis(1, 64, log=True)).iter("svg") if part.get("y")]
    assert [(part.get("x"), part.get("y")) for part in found] == [("0%", "0.0"), ("50%", "125.0")]
    assert [part.findtext("path/title") for part in found] == ["plan: p", "plan: q"]
    assert NAMES.keys() == SHAPES.keys()


def test_a_mark_without_tips_has_its_text_beside_it_inside_of_the_chart() -> None:
    for x, anchor in ((1, "start"), (5, "middle"), (9, "end")):
        mark = Marks(color="baseline", spots=[(x, 5)], text="peak <1>")
        (text,) = (t for t in shapes(mark).iter("text") if t.get("class") == "mark-text")
        assert text.text == "peak <1>"
        assert f"text-anchor: {anchor}; fill: var(--baseline-ink)" in text.get("style", "")


@pytest.mark.parametrize(
    ("axis", "numbers"),
    [
        (Axis(0, 10), [0, 2, 4, 6, 8, 10]),
        (Axis(-3, 55.1), [0, 20, 40]),
        (Axis(0.99, 1.41), [1.0, 1.1, 1.2, 1.3, 1.4]),
        (Axis(0.9, 70, log=True), [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_ticks_are_round_and_none_is_below_zero(axis: Axis, numbers: list[float]) -> None:
    assert ticks(axis) == pytest.approx(numbers)


def test_labels_are_as_wide_as_others_leave_room_for() -> None:
    labels = [AxisLabel("a&b", 0, 2), AxisLabel("c", 2, 8), AxisLabel("d", 8, 10)]
    text = str(svg(Chart(Axis(0, 10, labels=labels), TEN, [])))
    places = re.findall(r"--middle: (\S+)%; --room: (\S+)%", text)
    assert places == [("10", "40"), ("50", "40"), ("90", "40")]
    assert "<span>a&amp;b</span>" in text
    assert text.count('class="grid" x1') == 2
    assert f'height="{HEIGHT}"' in text
