"""What a cell cannot run with is said before any cell runs, in a sentence, and takes no memory."""

import re
from dataclasses import replace

import pytest

from tests.harness.command_line import load
from zoo.harness.comparison_cells import expand
from zoo.harness.config import Config, ModelConfig
from zoo.harness.worker import first_fault
from zoo.profiling.peak_memory import spending

RESNET = ModelConfig("resnet18", "photographs", 2, 64, {})
LSTM = ModelConfig("lstm", "stream", 4, 20, {"embedding": 8, "hidden": 8})
VNET = ModelConfig("vnet", "volume", 1, 16, {})


def cell(model, **changes):
    (entry,) = expand(Config("mine", (replace(model, **changes),)))
    return entry["checkpointed"]


def test_shipped_models_pass():
    for name in ("default", "quick"):
        cells = [entry["checkpointed"] for entry in expand(load([name]))]
        assert first_fault(cells) == {}


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (VNET, {"size": [16, 16]}, r"vnet: the data volume takes 3 size\(s\); got \[16, 16\]"),
        (VNET, {"size": 15}, "axis D of .* has size 15, which 16 does not divide"),
        (LSTM, {"size": 10**6}, "lstm: size 1000000 with batch size 4 needs 4000004 words"),
        (LSTM, {"arguments": {"hidden": 0}}, "needs hidden of at least 1; got 0"),
        (RESNET, {"arguments": {"classes": "ten"}}, "classes"),
        (RESNET, {"arguments": {"in_channels": 1}}, "ResNet"),
        (RESNET, {"checkpoint": 1000}, "1000 segments; this model has 10 blocks"),
        (RESNET, {"checkpoint": "(0-9) 10"}, "the plan covers 11 steps but the model has"),
    ],
)
def test_a_value_that_no_cell_can_run_with_is_found(model, changes, message):
    fault = first_fault([cell(RESNET), cell(model, **changes)])["fault"]
    assert re.search(message, fault)
    assert fault.startswith(model.name)
    assert "\n" not in fault


def test_checking_takes_no_memory():
    large = cell(RESNET, batch_size=100_000, size=224)
    with spending() as spent:
        assert first_fault([large]) == {}
    assert spent.peak < 50 * 2**20
