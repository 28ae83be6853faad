"""A config becomes four cells a model; equal work has equal keys, other work another."""

from dataclasses import replace

import pytest

from zoo.harness.comparison_cells import again, expand
from zoo.harness.config import Config, ModelConfig
from zoo.planner.plan import Plan

MODEL = ModelConfig("resnet18", "photographs", 2, 32, {})
CONFIG = Config("mine", (MODEL,))
ALL = {"baseline", "checkpointed", "optimizer_in_backward", "timing"}


def keys(**changes):
    model = {name: value for name, value in changes.items() if hasattr(MODEL, name)}
    run = {name: value for name, value in changes.items() if name not in model}
    (cells,) = expand(replace(CONFIG, models=(replace(MODEL, **model),), **run))
    return {kind: cell.key() for kind, cell in cells.items()}


def test_a_model_becomes_four_cells():
    cells = expand(replace(CONFIG, models=(MODEL, replace(MODEL, name="resnet34"))))
    kinds = ["baseline", "checkpointed", "optimizer_in_backward", "timing"]
    assert [list(entry) for entry in cells] == [kinds] * 2
    assert [entry["timing"].model.name for entry in cells] == ["resnet18", "resnet34"]


def test_the_optimizer_in_the_backward_can_be_left_out():
    (cells,), (all_of_them,) = (
        expand(replace(CONFIG, optimizer_in_backward=wanted)) for wanted in (False, True)
    )
    assert list(cells) == ["baseline", "checkpointed", "timing"]
    assert [entry["timing"].optimizer_in_backward for entry in (cells, all_of_them)] == [
        False,
        True,
    ]
    same = {kind for kind in cells if cells[kind].key() == all_of_them[kind].key()}
    assert same == {"baseline", "checkpointed"}


def test_graphs_are_cells_with_steps_before_the_replays():
    (cells,), (eager,) = (
        expand(replace(CONFIG, cuda_graph=wanted, optimizer_in_backward=False))
        for wanted in (True, False)
    )
    assert list(cells) == [*eager, "baseline_graph", "checkpointed_graph"]
    assert {cell.steps - eager["baseline"].steps for cell in cells.values() if cell.steps} == {4}
    assert cells["timing"].key() == eager["timing"].key()
    assert [cells[f"{kind}_graph"].model.checkpoint for kind in ("baseline", "checkpointed")] == [
        False,
        True,
    ]


def test_the_baseline_keeps_everything():
    (cells,) = expand(CONFIG)
    assert [cells[kind].model.checkpoint for kind in cells] == [False, True, True, True]


@pytest.mark.parametrize(
    ("change", "measured_again"),
    [
        ({"checkpoint": "sqrt"}, ALL - {"baseline"}),
        ({"steps": 5}, ALL - {"timing"}),
        ({"repeats": 9}, {"timing"}),
        ({"seed": 1}, ALL),
        ({"arguments": {"classes": 5}}, ALL),
        ({"threads": 7}, ALL),
        ({"memory_limit": "1GiB"}, ALL),
        ({"deterministic": True}, ALL),
        ({"largest_ratio": 0.5}, set()),
        ({"output": "elsewhere"}, set()),
        ({"timeout": 5}, set()),
        ({"compare": "old.jsonl", "tolerance": 0.5}, set()),
    ],
)
def test_a_key_changes_with_what_its_cell_depends_on(change, measured_again):
    before, after = keys(), keys(**change)
    assert {kind for kind in before if before[kind] != after[kind]} == measured_again


def test_a_baseline_is_trained_again_as_it_was():
    (cells,) = expand(replace(CONFIG, frontier=True))
    second = again(cells["baseline"])
    assert second == replace(cells["baseline"], kind="baseline_again", frontier=False)
    assert second.key() != cells["baseline"].key()


def test_what_is_timed_is_the_plan_that_was_measured():
    (cells,) = expand(CONFIG)
    timed = replace(cells["timing"], plan="(0-1) 2")
    assert timed.checkpoint == Plan.parse("(0-1) 2")
    assert timed.key() != cells["timing"].key()
    assert cells["timing"].checkpoint is True
