"""What notebooks draw of a plan is what it does; figures speak the reader's language."""

from collections import Counter
from typing import Any

import pytest

from zoo.planner.plan import Plan
from zoo.report import notebook

NESTED = Plan((((0, 1, 2), 3, 4), 5, (6, 7)))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(notebook, "display", lambda output: found.append(output.data))
    return found


@pytest.mark.parametrize("plan", [Plan.keep_all(4), Plan(((0, 1), 2, 3)), NESTED])
def test_each_node_runs_as_often_as_the_plan_says_and_goes_back_once(plan: Plan) -> None:
    found = notebook.moments(plan)
    forward = Counter(node for node, phase, _ in found if phase != "backward")
    assert [forward[node] for node in plan.flatten()] == [*plan.runs()]
    back = [node for node, phase, _ in found if phase == "backward"]
    assert back == [*reversed(plan.flatten())]


@pytest.mark.parametrize("plan", [Plan.keep_all(4), Plan(((0, 1), 2, 3)), NESTED])
def test_a_backward_holds_the_input_of_its_node(plan: Plan) -> None:
    assert all(node in held for node, phase, held in notebook.moments(plan) if phase == "backward")


def test_a_segment_holds_its_input_alone_until_it_is_recomputed() -> None:
    held = [held for *_, held in notebook.moments(Plan(((0, 1, 2), 3)))]
    assert held[3] == {0: "kept", 3: "kept"}
    assert held[9] == {0: "kept", 1: "recomputed"}


def test_a_figure_is_written_in_the_language_of_its_notebook(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for language in ("en", "zh_CN"):
        monkeypatch.setattr(notebook, "_language", language)
        notebook.bars("peak", {"": {"baseline": 1.0, "layer": 2.0}})
    english, chinese = shown
    assert ">baseline<" in english
    assert ">peak<" in english
    assert ">基线<" in chinese
    assert ">峰值<" in chinese
    assert ">layer<" in chinese


def test_curves_name_their_levels(shown: list[str]) -> None:
    notebook.curves("growth", "side", (1, 2, 4), {"a": (1, 2, 4)}, levels={"budget": 3}, log="xy")
    assert all(f">{text}<" in shown[0] for text in ("growth", "side", "a", "budget"))


def test_a_table_has_a_row_for_each(shown: list[Any]) -> None:
    notebook.table(["name", "bytes"], ["conv1", 12])
    assert shown == ["| name  | bytes |\n| ----- | ----: |\n| conv1 |    12 |"]
