"""A config becomes three cells a model; equal work has equal keys, other work another."""

from dataclasses import replace

import pytest

from zoo.harness.cells import expand
from zoo.harness.config import Config, ModelConfig
from zoo.planner.plan import Plan

MODEL = ModelConfig("resnet18", "photographs", 2, 32, {})
CONFIG = Config("mine", (MODEL,))


def keys(**changes):
    model = {name: value for name, value in changes.items() if hasattr(MODEL, name)}
    run = {name: value for name, value in changes.items() if name not in model}
    (cells,) = expand(replace(CONFIG, models=(replace(MODEL, **model),), **run))
    return {kind: cell.key() for kind, cell in cells.items()}


def test_a_model_becomes_three_cells():
    cells = expand(replace(CONFIG, models=(MODEL, replace(MODEL, name="resnet34"))))
    assert [list(entry) for entry in cells] == [["baseline", "checkpointed", "timing"]] * 2
    assert [entry["timing"].model.name for entry in cells] == ["resnet18", "resnet34"]


def test_the_baseline_keeps_everything():
    (cells,) = expand(CONFIG)
    assert [cells[kind].model.checkpoint for kind in cells] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "measured_again"),
    [
        ({"checkpoint": "sqrt"}, {"checkpointed", "timing"}),
        ({"steps": 5}, {"baseline", "checkpointed"}),
        ({"repeats": 9}, {"timing"}),
        ({"seed": 1}, {"baseline", "checkpointed", "timing"}),
        ({"arguments": {"classes": 5}}, {"baseline", "checkpointed", "timing"}),
        ({"threads": 7}, {"baseline", "checkpointed", "timing"}),
        ({"memory_limit": "1GiB"}, {"baseline", "checkpointed", "timing"}),
        ({"largest_ratio": 0.5}, set()),
        ({"output": "elsewhere"}, set()),
        ({"timeout": 5}, set()),
        ({"compare": "old.jsonl", "tolerance": 0.5}, set()),
    ],
)
def test_a_key_changes_with_what_its_cell_depends_on(change, measured_again):
    before, after = keys(), keys(**change)
    assert {kind for kind in before if before[kind] != after[kind]} == measured_again


def test_what_is_timed_is_the_plan_that_was_measured():
    (cells,) = expand(CONFIG)
    timed = replace(cells["timing"], plan="(0-1) 2")
    assert timed.checkpoint == Plan.parse("(0-1) 2")
    assert timed.key() != cells["timing"].key()
    assert cells["timing"].checkpoint is True
