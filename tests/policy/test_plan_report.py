"""What a plan should cost, as text and as files: numbers only, no model."""

import json

import pytest

from zoo.errors import PlanError
from zoo.planner.plan import Plan
from zoo.policy.plan_report import FixedBytes, Frontier, PeakBytes, PlanReport, Point

MIB = 2**20
FIXED = FixedBytes(4 * MIB, 0, 4 * MIB, MIB, 8 * MIB, 0)


def report(blocks: int = 3, plan: Plan | None = None) -> PlanReport:
    """A report on a chain of a stem, blocks of four steps and a head."""
    parts = ("convolve1", "normalize1", "convolve2", "add")
    inner = [f"layer1.{block}.{part}" for block in range(blocks) for part in parts]
    names = ("conv1", *inner, "classify")
    numbers = (0, *(1 + step // 4 for step in range(4 * blocks)), blocks + 1)
    segments = Plan([0, (1, 2, (3, 4)), *range(5, len(names))])
    return PlanReport(
        plan=plan or segments,
        predicted_peak=20 * MIB,
        predicted_time_ratio=1.25,
        predicted_activations=6 * MIB,
        budget=21 * MIB,
        baseline_peak=40 * MIB,
        least_peak=16 * MIB,
        fixed=FIXED,
        at_peak=PeakBytes("backward of conv1", 4 * MIB, 0, MIB, 8 * MIB, MIB, 3 * MIB, MIB, MIB,
                          MIB - 100, 100),
        flops=1000,
        recomputed_flops=250,
        names=names,
        blocks=numbers,
        saved=tuple(MIB for _ in names),
        title="Net on 8×3×32×32",
    )  # fmt: skip


def curve(slowest: float = 1.5) -> Frontier:
    plans = [Plan(((0, 1, 2),)), Plan(((0, 1), 2)), Plan.keep_all(3)]
    numbers = [(16 * MIB, slowest), (20 * MIB, 1.2), (40 * MIB, 1.0)]
    best = [Point(peak, time, plan) for (peak, time), plan in zip(numbers, plans, strict=True)]
    schemes = [Point(30 * MIB, 1.3, plans[1], "sqrt"), Point(18 * MIB, 1.4, plans[0], "blocks")]
    baseline = Point(40 * MIB, 1.0, plans[2], "baseline")
    return Frontier((*best, *schemes), baseline, 15 * MIB, "Net on 8×3×32×32")


def test_the_table_is_markdown_and_adds_up() -> None:
    found = report()
    tables = [line for line in found.table().splitlines() if line.startswith("|")]
    assert len({len(line) for line in tables[-13:]}) == 1, "columns are aligned"
    assert "| total                  | 20.0 MiB | 100.0% |" in tables
    assert "| activations kept       | 3.00 MiB |  15.0% |" in tables
    assert any("budget" in line and "21.0 MiB" in line and "×0.53" in line for line in tables)
    assert "At the peak, backward of conv1:" in str(found)
    assert found.at_peak.total == found.predicted_peak


def test_a_report_and_a_frontier_survive_a_file() -> None:
    assert PlanReport.from_json(report().to_json()) == report()
    assert Frontier.from_json(curve().to_json()) == curve()
    with pytest.raises(PlanError, match="no frontier in JSON"):
        Frontier.from_json('{"points": [1]}')


def test_a_report_of_an_earlier_version_is_refused_with_the_way_to_a_new_one() -> None:
    values = json.loads(report().to_json())
    for earlier in (values | {"format": 1}, {k: v for k, v in values.items() if k != "format"}):
        with pytest.raises(PlanError, match=r"another version of zoo.*make the plan anew, by zoo"):
            PlanReport.from_json(json.dumps(earlier))


def test_a_frontier_is_a_sequence_of_points_and_a_line_of_text_for_each() -> None:
    found = curve()
    assert [point.name for point in found] == ["optimal"] * 3 + ["sqrt", "blocks"]
    assert found[:3] == found.optimal == found.points[:3]
    assert len(found) == 5
    header, *lines = found.to_csv().splitlines()
    assert header == "name,peak_bytes,peak_ratio,time_ratio,plan"
    assert lines[1] == f"optimal,{20 * MIB},0.5,1.2,(0-1) 2"
    assert lines[-1] == f"baseline,{40 * MIB},1.0,1.0,0-2"


def test_a_frontier_reads_as_a_table_that_says_what_it_leaves_out() -> None:
    text = str(curve())
    assert text.startswith("Net on 8×3×32×32, one training step: 3 best plans\n")
    assert [line.split(" | ")[0].strip("| ") for line in text.splitlines()[4:-2]] == [
        "optimal", "blocks", "optimal", "sqrt", "optimal", "baseline",
    ]  # fmt: skip
    assert "20.0 MiB |           ×0.50 | ×1.20 |" in text
    assert text.endswith("no plan goes below 15.0 MiB")
    few = curve().table(points=2)
    assert "3 best plans, 2 of them shown" in few
    assert few.count("optimal") == 2
    assert "20.0 MiB" not in few
