"""What the pictures of plans and frontiers show, from numbers alone."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.path import Path as Line
from matplotlib.transforms import Bbox

from tests.policy.test_plan_report import curve, report
from zoo.errors import ArgumentError
from zoo.policy.plan_report import Frontier
from zoo.report.matplotlib_charts import text_boxes
from zoo.report.step_axis import MOST_STEPS, block_name, fitting, round_numbers, step_axis


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_pictures_are_written_in_the_kind_of_their_suffix(tmp_path: Path, suffix: str) -> None:
    starts = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    for number, drawn in enumerate((report(), curve())):
        path = tmp_path / f"{number}{suffix}"
        drawn.plot(path)
        assert path.read_bytes().startswith(starts[suffix])


def test_a_picture_of_a_frontier_names_the_schemes(tmp_path: Path) -> None:
    for slowest in (1.5, 7.0):
        curve(slowest).plot(tmp_path / "curve.svg")
        text = (tmp_path / "curve.svg").read_text()
        legend = ("below any plan", "least time for each budget", "classic schemes")
        for words in ("sqrt", "blocks", "least memory", "baseline", *legend):
            assert f"<!-- {words} -->" in text
        assert f"×0.40 memory, ×{slowest:.2f} time" in text


def test_a_frontier_of_one_plan_can_be_drawn(tmp_path: Path) -> None:
    only = curve().baseline
    for bound in (0, only.peak):
        Frontier((replace(only, name="optimal"),), only, bound, "Net").plot(tmp_path / "one.svg")
        assert "<!-- baseline -->" in (tmp_path / "one.svg").read_text()


@pytest.mark.parametrize("blocks", [3, 120])
def test_a_picture_of_an_offloaded_plan_shows_what_is_on_the_host(blocks: int) -> None:
    plain = report(blocks)
    on_host = tuple(2**20 * (step in (1, 3)) for step in range(len(plain.names)))
    axes = [Figure().subplots(), Figure().subplots()]
    plain.plot(axes[0])
    replace(plain, offloaded=2**21, on_host=on_host).plot(axes[1])
    legend = axes[1].get_legend()
    assert legend is not None
    assert "on the host: 2.00 MiB" in [text.get_text() for text in legend.get_texts()]
    # both are in the column of one block where there are many
    columns = 2 if blocks == 3 else 1
    assert len(axes[1].patches) == len(axes[0].patches) + columns


@pytest.mark.parametrize("blocks", [3, 120])
def test_a_picture_of_a_plan_names_stages_and_categories(tmp_path: Path, blocks: int) -> None:
    report(blocks).plot(str(tmp_path / "plan.svg"))
    text = (tmp_path / "plan.svg").read_text()
    for words in (
        "conv1",
        "layer1",
        "classify",
        "activations kept 3.00 MiB",
        "activations recomputed 1.00 MiB",
        f"kept: {4 * blocks - 2} steps",
        "recomputed: 4 steps",
        "segments: recomputed in one go, nested ones lower",
    ):
        assert f"<!-- {words} -->" in text
    assert f"saved by each {'step' if blocks == 3 else 'block'} (MiB)" in text


def test_the_same_numbers_make_the_same_file(tmp_path: Path) -> None:
    for drawn in (report(), curve()):
        drawn.plot(tmp_path / "one.svg")
        drawn.plot(tmp_path / "two.svg")
        assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_pictures_go_into_axes_and_leave_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    left, right = Figure(figsize=(12, 4)).subplots(ncols=2)
    report().plot(left)
    curve().plot(right)
    assert left.patches
    assert "predicted peak" in right.get_xlabel()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("drawn", [report(), curve()])
def test_what_is_no_picture_is_refused(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArgumentError, match=r"'plan\.doc' is no picture; end it with"):
        drawn.plot(tmp_path / "plan.doc")
    with pytest.raises(ArgumentError, match=r"'plan\.gif' is no picture; end it with"):
        drawn.plot(tmp_path / "plan.gif")
    assert not list(tmp_path.iterdir())
    monkeypatch.delitem(sys.modules, "zoo.report.matplotlib_charts", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match="a picture needs matplotlib: pip install"):
        drawn.plot(tmp_path / "plan.svg")


def test_a_long_chain_stands_block_by_block() -> None:
    for blocks in (5, MOST_STEPS // 4 + 1):
        found = report(blocks)
        axis = step_axis(found.names, found.blocks)
        assert len(axis.edges) == len(found.names) + 1
        assert list(axis.edges) == sorted(set(axis.edges))
        assert len(axis.columns) == (len(found.names) if blocks == 5 else blocks + 2)
        assert [step for column in axis.columns for step in column] == list(range(len(found.names)))
        assert [label.text for label in axis.stages] == ["conv1", "layer1", "classify"]
        assert [label.text for label in axis.numbers] == list(map(str, range(blocks)))


def test_a_block_is_named_by_the_path_that_its_steps_share() -> None:
    assert block_name(["down.0.convolve", "down.0.units.0.convolve"]) == "down.0"
    assert block_name(["conv1", "normalize(bn1)"]) == "conv1"
    assert block_name(["net.0"]) == "net.0"
    assert block_name(["normalize(features.norm5)", "classify"]) == "normalize"


def test_a_part_that_repeats_is_labeled_once() -> None:
    names = ["begin", *["embed", "decode"] * 3, "mean"]
    labels = step_axis(names, range(len(names))).stages
    assert [label.text for label in labels] == ["begin", "embed, decode", "mean"]
    assert (labels[1].start, labels[1].stop) == (1, 7)


def test_labels_without_room_are_left_out() -> None:
    axis = step_axis(report(40).names, report(40).blocks)
    assert [label.text for label in round_numbers(axis.numbers, 4)] == list(map(str, range(40)))
    tens = round_numbers(axis.numbers, 30)
    assert [label.text for label in tens] == ["0", "10", "20", "30"]
    assert len(fitting(axis.stages, 1e9)) == 1


def test_names_stand_beside_their_marks_and_over_no_other() -> None:
    frame, line = Bbox.from_extents(0, 0, 300, 200), Line([(0, 115), (200, 115)])
    spots = [(150.0, 100.0), (155.0, 102.0), (298.0, 198.0), (250.0, 100.0)]
    boxes = text_boxes(spots, [(60, 20)] * 4, frame, [line], point=1)
    assert all(frame.contains(*corner) for box in boxes for corner in (box.min, box.max))
    marked = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in spots]
    for number, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:number] + marked)
    # the last has no room on its right, where a name stands otherwise
    assert boxes[3].max[0] < spots[3][0]
    assert not line.intersects_bbox(boxes[0], filled=False)


def test_neither_a_name_nor_what_leads_to_it_crosses_or_touches_a_curve() -> None:
    frame, curve = Bbox.from_extents(0, 0, 300, 200), Line([(52, 60), (52, 130)])
    (box,) = text_boxes([(40.0, 100.0)], [(60, 20)], frame, [curve], point=1)
    lead = Line([(40, 100), tuple((box.min + box.max) / 2)])
    assert not curve.intersects_bbox(box.padded(1), filled=False)
    assert not curve.intersects_path(lead, filled=False)


def test_no_line_to_a_name_crosses_another_mark() -> None:
    frame = Bbox.from_extents(0, 0, 400, 400)
    # above and to the right of the first are others, beyond which there is room for a name
    spots = [(200.0, 200.0), (212.0, 207.0), (188.0, 207.0), (214.0, 200.0)]
    boxes = text_boxes(spots, [(60, 20)] * len(spots), frame, [], point=1)
    middle = (boxes[0].min + boxes[0].max) / 2
    lead = Line([spots[0], tuple(middle)])
    for x, y in spots[1:]:
        assert not lead.intersects_bbox(Bbox.from_bounds(x - 4, y - 4, 8, 8))
