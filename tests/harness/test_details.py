"""What a report draws is what was there, and reading it costs a cell's numbers nothing."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.harness.test_worker import CELLS
from zoo.engine.devices import SIZE as STREAM
from zoo.harness import worker
from zoo.harness.worker import work
from zoo.planner.plan import Plan, thinned
from zoo.profiling.timeline import CATEGORIES, Allocation, Mark, Timeline

WITH_FRONTIER = replace(CELLS["baseline"], frontier=True)


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    """Both cells, as they come back from a file."""
    cells = {"baseline": WITH_FRONTIER, "checkpointed": CELLS["checkpointed"]}
    found: dict[str, Any] = json.loads(json.dumps({kind: work(cells[kind]) for kind in cells}))
    return found


def jagged(length: int) -> Timeline:
    """Allocations that come and go, one that is much larger for a single event."""
    lives = [
        Allocation(1 + start % 7, start, start + 3, "temporaries") for start in range(1, length - 3)
    ]
    spike = Allocation(1000, length // 3, length // 3 + 1, "saved activations")
    weight = Allocation(50, 0, None, "parameters")
    heavy = Allocation(5000, length - 2, length - 1, "optimizer state")
    marks = [Mark(0, "forward"), Mark(5, "forward"), Mark(9, "backward")]
    return Timeline("Net", "cpu", length, phases=marks, allocations=[weight, spike, heavy, *lives])


def test_a_summary_is_a_part_of_the_timeline_with_its_peaks() -> None:
    timeline = jagged(3000)
    found = timeline.summary(points=100)
    curves = timeline.curves()
    assert len(found["points"]) <= 105
    for name, sizes in found["bytes"].items():
        assert sizes == [curves[name][point] for point in found["points"]]
    assert [name for name in CATEGORIES if name in found["bytes"]] == list(found["bytes"])
    assert found["peak"]["bytes"] == timeline.peak > 5000
    assert sum(found["peak"]["categories"].values()) == timeline.peak
    assert max(found["bytes"]["saved activations"]) == 1000
    assert found["phases"] == [[0, "forward"], [9, "backward"]]
    assert found["points"][-1] == timeline.length


def test_a_point_has_the_place_of_the_latest_allocation() -> None:
    lives = [
        Allocation(9, 0, 5, "parameters", line="before.py:1"),
        Allocation(1, 2, 6, "temporaries", module="b.norm", line="net.py:2"),
        Allocation(1, 1, 4, "saved activations", module="a.conv", line="net.py:1"),
        Allocation(1, 3, None, "temporaries", module="a.conv", line="net.py:1"),
    ]
    places = Timeline("Net", "cpu", 6, allocations=lives).summary()["places"]
    told = [places["names"][number] for number in places["at"]]
    first, second = ["a.conv", "net.py:1"], ["b.norm", "net.py:2"]
    assert told == [["", ""], first, second, *[first] * 4]
    assert len(places["names"]) == 3


def test_a_short_timeline_is_all_there() -> None:
    assert jagged(30).summary()["points"] == list(range(31))


def test_a_thinned_curve_keeps_its_ends_and_only_plans() -> None:
    curve = [[1000 + number**2, 2 - number / 500] for number in range(500)]
    found = thinned(curve, 40)
    assert 30 < len(found) <= 40
    assert [found[0], found[-1]] == [curve[0], curve[-1]]
    assert found == [point for point in curve if point in found]
    assert thinned(found, 40) == found


def test_cells_record_the_step_that_was_measured(records: dict[str, Any]) -> None:
    for record in records.values():
        drawn, peak = record["timeline"], record["memory"]["peak"]
        assert record["missing"] == {}
        # the allocator counts the copies of random streams that segments keep, too
        assert abs(peak - drawn["peak"]["bytes"]) <= 0.01 * peak + 2 * STREAM
        assert drawn["holders"][0]["bytes"] >= drawn["holders"][-1]["bytes"]
        assert not any(holder["line"].startswith("/") for holder in drawn["holders"])
    phases = {phase for _, phase in records["checkpointed"]["timeline"]["phases"]}
    assert {"forward", "recompute", "backward"} <= phases


def test_the_chain_is_that_of_the_plan_and_the_frontier_that_of_the_model(
    records: dict[str, Any],
) -> None:
    baseline, plan = records["baseline"], Plan.parse(records["checkpointed"]["plan"])
    chain, frontier = baseline["steps"], baseline["frontier"]
    assert "frontier" not in records["checkpointed"]
    assert len(plan.flatten()) == len(chain["names"]) == len(chain["saved"]) == len(chain["blocks"])
    numbers = [number for steps in chain["lines"].values() for number in steps]
    assert len(numbers) == len(set(numbers)) > 20
    # a step that allocates nothing has no line
    assert not any(size for step, size in enumerate(chain["saved"]) if step not in numbers)
    assert all(line.startswith(("zoo/models/", "zoo/layers/")) for line in chain["lines"])
    places = baseline["timeline"]["places"]["names"]
    assert {line[:4] for _, line in places} == {"", "zoo/"}
    assert {module for module, _ in places} >= {"layers.0", "layers.1"}
    peaks, times = zip(*frontier["optimal"], strict=True)
    assert list(peaks) == sorted(peaks)
    assert list(times) == sorted(times, reverse=True)
    assert set(frontier["schemes"]) == {"sqrt", "blocks", "cheap"}
    assert frontier["lower_bound"] <= peaks[0]


def test_without_a_frontier_no_kernel_is_timed(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zoo.policy.training_step.measure_kernels", lambda *_: pytest.fail("it was run")
    )
    found, timed = work(CELLS["baseline"]), records["baseline"]["steps"]
    assert [*found["steps"]["names"]] == timed["names"]
    # what kernels hide is seen by running them only
    assert all(map(int.__le__, found["steps"]["saved"], timed["saved"]))
    assert "frontier" not in found
    assert not found["missing"]


def test_what_cannot_be_drawn_is_said_and_costs_no_number(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such\nthing")

    monkeypatch.setattr(Timeline, "summary", broken)
    monkeypatch.setattr(worker, "planner_for", broken)
    record = work(CELLS["baseline"])
    assert record["missing"] == dict.fromkeys(("timeline", "steps"), "RuntimeError: no such thing")
    for name in ("digests", "memory", "plan"):
        assert record[name] == records["baseline"][name]
