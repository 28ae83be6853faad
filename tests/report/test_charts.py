"""Runs of unequal length share an axis on which each part of a step has its place."""

from hypothesis import given, strategies as st

from tests.report.recorded import AGAIN, FORWARD, MIB, timeline
from zoo.report.charts import (
    EDGES,
    Marks,
    axis_positions,
    memory_chart,
    phase_peaks,
    phase_starts,
    recomputations,
    totals,
)

SIZES = [1, 2, 2, 3, 4, 3, 4, 5, 4, 3, 2, 1]


def test_each_part_of_a_step_has_the_same_place_whatever_its_length() -> None:
    for phases in (FORWARD, AGAIN):
        drawn = timeline(SIZES, phases)
        assert phase_starts(drawn) == (0, 4, 10, 12)
        assert axis_positions(drawn, phase_starts(drawn)) == list(EDGES)
        assert axis_positions(drawn, [2, 7]) == [0.5, 2.0]


@given(st.lists(st.integers(0, 30), min_size=3, max_size=3))
def test_later_events_never_lie_before_earlier_ones(lengths: list[int]) -> None:
    forward, backward, _ = lengths
    marks = [[0, "forward"], [forward, "backward"], [forward + backward, "optimizer"]]
    length = sum(lengths)
    on_axis = axis_positions({"length": length, "phases": marks}, range(length + 1))
    assert on_axis == sorted(on_axis)
    assert all(EDGES[0] <= place <= EDGES[-1] for place in on_axis)


def test_a_step_without_marks_is_all_forward() -> None:
    assert axis_positions({"length": 10, "phases": []}, [0, 5, 10]) == [0, 0.5, EDGES[2]]


def test_recomputation_is_where_the_phases_say() -> None:
    assert recomputations(timeline(SIZES, FORWARD)) == []
    drawn = timeline(SIZES, AGAIN)
    assert recomputations(drawn) == [axis_positions(drawn, [6, 8])] == [[1.66667, 2.33333]]


def test_sums_and_peaks_are_those_of_the_categories() -> None:
    drawn = timeline(SIZES, AGAIN)
    assert totals(drawn) == [(size + 3) * MIB + 12 for size in SIZES]
    assert totals(drawn, ["saved activations"]) == [3 * MIB] * 12
    most = {"forward": 6, "backward": 7, "recompute": 8, "optimizer": 5}
    peaks = {phase: {"run": size * MIB + 12} for phase, size in most.items()}
    assert phase_peaks({"run": drawn}) == peaks


def test_the_texts_of_the_two_lower_peaks_stand_on_both_sides() -> None:
    runs = ("baseline", "checkpointed", "optimizer_in_backward")
    for count, expected in ((1, [False]), (2, [False, True]), (3, [False, False, True])):
        chart = memory_chart({name: timeline(SIZES, AGAIN) for name in runs[:count]})
        assert [layer.below for layer in chart.layers if isinstance(layer, Marks)] == expected
