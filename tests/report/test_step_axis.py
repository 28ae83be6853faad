"""Runs of unequal length share an axis on which each part of a step has its place."""

from hypothesis import given
from hypothesis import strategies as st

from tests.report.recorded import AGAIN, FORWARD, MIB, timeline
from zoo.report.step_axis import EDGES, highest, recomputes, step_axis, totals

SIZES = [1, 2, 2, 3, 4, 3, 4, 5, 4, 3, 2, 1]


def test_each_part_of_a_step_has_the_same_place_whatever_its_length() -> None:
    for phases in (FORWARD, AGAIN):
        axis = step_axis(timeline(SIZES, phases))
        assert [axis.place(event) for event in axis] == list(EDGES)
    assert axis == (0, 4, 10, 12)
    assert axis.place(2) == 0.5
    assert axis.place(7) == 2.0


@given(st.lists(st.integers(0, 30), min_size=3, max_size=3))
def test_later_events_never_lie_before_earlier_ones(lengths: list[int]) -> None:
    forward, backward, _ = lengths
    marks = [[0, "forward"], [forward, "backward"], [forward + backward, "optimizer"]]
    length = sum(lengths)
    axis = step_axis({"length": length, "phases": marks})
    places = [axis.place(event) for event in range(length + 1)]
    assert places == sorted(places)
    assert all(EDGES[0] <= place <= EDGES[-1] for place in places)


def test_a_step_without_marks_is_all_forward() -> None:
    axis = step_axis({"length": 10, "phases": []})
    assert axis.place(5) == 0.5
    assert axis.place(0) == 0


def test_recomputation_is_where_the_phases_say() -> None:
    assert recomputes(timeline(SIZES, FORWARD)) == []
    axis = step_axis(timeline(SIZES, AGAIN))
    assert (
        recomputes(timeline(SIZES, AGAIN))
        == [(axis.place(6), axis.place(8))]
        == [(1.66667, 2.33333)]
    )


def test_sums_and_peaks_are_those_of_the_categories() -> None:
    drawn = timeline(SIZES, AGAIN)
    assert totals(drawn) == [(size + 3) * MIB + 12 for size in SIZES]
    assert totals(drawn, ["saved activations"]) == [3 * MIB] * 12
    most = {"forward": 6, "backward": 7, "recompute": 8, "optimizer": 5}
    assert highest(drawn) == {phase: size * MIB + 12 for phase, size in most.items()}
