"""Two runs are compared cell by cell; what one of them lacks, and where it was, is said."""

import re
from copy import deepcopy
from typing import Any

import pytest

from tests.report.recorded import MIB, comparison
from tests.report.test_html_page import HEADING, files
from zoo.report.html_page import page
from zoo.report.two_runs import TwoRuns, as_entries, as_markdown, two_runs

UNFIT = {"status": "does not fit", "reason": "needs more"}


def earlier(**seconds: list[float]) -> dict[str, Any]:
    """The comparison before: 2 MiB more in the checkpointed step, on another torch."""
    found = deepcopy(comparison())
    memory = found["checkpointed"]["memory"]
    memory["peak"], memory["activation_peak"] = 10 * MIB, 4 * MIB
    found["checkpointed"]["environment"] = found["checkpointed"]["environment"] | {"torch": "1"}
    found["timing"]["step_seconds"] |= seconds
    return found


def changes(runs: TwoRuns) -> dict[str, list[str]]:
    return {cell.name: [str(c.cell) for c in cell.changes.values()] for cell in runs.cells}


def test_each_cell_of_both_has_its_numbers_before_and_now() -> None:
    runs = two_runs([comparison()], [earlier()], "old.jsonl")
    assert changes(runs) == {
        "resnet50 baseline": ["13.0 MiB (unchanged)", "10.0 MiB (unchanged)", "—"],
        "resnet50 checkpointed": [
            *("10.0 MiB → 8.00 MiB (−20.00 %)", "4.00 MiB → 5.00 MiB (+25.00 %)"),
            "×1.30 (unchanged)",
        ],
        "resnet50 + optimizer in backward": ["7.00 MiB (unchanged)", "—", "×1.25 (unchanged)"],
    }
    (entry,) = (entry for entry in as_entries(runs) if entry["cell"] == "resnet50 checkpointed")
    assert (entry["peak_bytes_before"], entry["peak_bytes_now"]) == (10 * MIB, 8 * MIB + 12)
    assert (entry["time_ratio_before"], entry["time_ratio_now"]) == (1.3, 1.3)


def test_cells_of_one_run_are_named_and_so_is_what_differs_of_the_machines() -> None:
    runs = two_runs([comparison(), comparison(name="vnet")], [earlier()], "old.jsonl")
    kinds = ("baseline", "checkpointed", "+ optimizer in backward")
    vnet = "; ".join(f"vnet {kind}, 4×224×224" for kind in kinds)
    earlier_run = "The earlier run: old.jsonl, ended 2026-01-01T00:00:00+00:00."
    elsewhere = "Measured under other conditions: torch 1 → 2."
    assert runs.notes == [earlier_run, elsewhere, f"In this run only: {vnet}."]
    back = two_runs([earlier()], [comparison(), comparison(name="vnet")], "old.jsonl")
    assert back.notes[-1] == f"In the earlier run only: {vnet}."
    for text in (as_markdown(runs), page([comparison()], HEADING, runs)):
        assert "Measured under other conditions: torch 1 → 2." in text
        assert "In this run only: vnet baseline, 4×224×224; vnet checkpointed" in text
        assert "ended 2026-01-01" in text


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [("model", "batch_size", 8), ("model", "size", 96), ("model", "checkpoint", "sqrt"),
     ("model", "optimizer", "adamw"), ("cell", "device", "cuda"), ("cell", "dtype", "bfloat16")],
)  # fmt: skip
def test_a_cell_of_another_size_plan_or_device_is_another_cell(
    where: str, key: str, value: Any
) -> None:
    other = deepcopy(comparison())
    cell = other["checkpointed"]["cell"]
    (cell if where == "cell" else cell["model"])[key] = value
    shared = changes(two_runs([comparison()], [other], "old.jsonl"))
    assert list(shared) == ["resnet50 baseline", "resnet50 + optimizer in backward"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [([2.0] * 5, "×2.00 → ×1.00 (−50.00 %)"),
     ([2.0] * 4, "×2.00 → ×1.00 (−50.00 %, unclear)"),
     ([1.0, 1.0, 2.0, 2.0, 2.0], "×2.00 → ×1.00 (−50.00 %, unclear)")],
)  # fmt: skip
def test_a_change_of_time_is_clear_where_the_quartiles_do_not_meet(
    seconds: list[float], shown: str
) -> None:
    now, before = earlier(baseline=[1.0] * 5, checkpointed=[1.0] * 5), earlier(checkpointed=seconds)
    before["timing"]["step_seconds"]["baseline"] = [1.0] * len(seconds)
    assert changes(two_runs([now], [before], "old"))["resnet50 checkpointed"][2] == shown


def test_another_plan_and_a_step_that_no_longer_fits_are_said() -> None:
    now = comparison()
    now["checkpointed"] = now["checkpointed"] | {"plan": "0-7"}
    del now["baseline"]["memory"]
    now["baseline"] |= UNFIT
    runs = two_runs([now], [earlier()], "old.jsonl")
    baseline, checkpointed, third = runs.cells
    assert str(baseline.changes["step peak"].cell) == "13.0 MiB → does not fit"
    assert [cell.replanned for cell in (baseline, checkpointed, third)] == [False, True, False]
    assert "4×224×224, another plan" in page([now], HEADING, runs)


def test_a_page_of_two_runs_has_a_table_of_their_exact_numbers() -> None:
    runs = two_runs([comparison()], [earlier()], "old.jsonl")
    text = page([comparison()], HEADING, runs)
    table = text.partition('id="runs"')[2].partition("</table>")[0]
    values = re.findall(r'<data value="([^"]+)"', table)
    assert {str(10 * MIB), str(8 * MIB + 12), str(4 * MIB), str(5 * MIB + 12)} <= set(values)
    assert re.findall(r'class="(less|more)">\(([^)]+)\)', table) == [
        ("less", "−20.00 %"), ("more", "+25.00 %"),
    ]  # fmt: skip
    assert "<caption" in table
    assert 'href="#runs"' in text
    assert files(text)["compared.csv"].count("resnet50") == 3
    assert 'id="runs"' not in page([comparison()], HEADING)


def test_names_of_the_earlier_run_are_text_and_no_markup() -> None:
    before = earlier()
    before["checkpointed"]["environment"] |= {"torch": "<b>|\x1b[2J"}
    runs = two_runs([comparison()], [before], "<i>\n.jsonl")
    for text in (as_markdown(runs), page([comparison()], HEADING, runs)):
        assert "<b>" not in text
        assert "<i>" not in text
        assert "\x1b" not in text


@pytest.mark.parametrize("setting", [{"seed": 1}, {"deterministic": True}])
def test_bits_of_other_settings_are_not_compared(setting: dict[str, Any]) -> None:
    """An older result does not say whether its algorithms were deterministic: they were not."""
    now = comparison(loss="b")
    unlike = [
        [*cell.other_bits]
        for given in ({"deterministic": False}, setting)
        for cell in two_runs([_with(now, **given)], [comparison()], "old.jsonl").cells
    ]
    assert unlike == [[], ["loss from step 2 on"], [], [], [], []]


def _with(found: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {
        kind: part | {"cell": part["cell"] | given} if "cell" in part else part
        for kind, part in found.items()
    }
