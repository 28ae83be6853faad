"""Weights are loaded all or nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from zoo.errors import WeightsError
from zoo.models.model import Model


class Net(Model):
    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.tail = nn.Sequential(nn.Linear(4, 2))


def test_weights_that_do_not_fit_name_the_keys_and_load_nothing() -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    wrong = {key.replace("tail.0", "tail.7"): value + 1 for key, value in before.items()}
    wrong["stage.0.weight"] = torch.zeros(1, 4, 1, 1)
    with pytest.raises(WeightsError, match=r"2 missing: tail.0.bias.*2 unknown: tail.7.*\(1, 4"):
        net.load_state_dict(wrong)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_loose_loading_still_refuses_other_shapes_only() -> None:
    net = Net()
    net.load_state_dict({"tail.0.bias": torch.ones(2), "other": torch.ones(1)}, strict=False)
    assert torch.equal(net.tail[0].bias, torch.ones(2))
    with pytest.raises(WeightsError, match=r"tail.0.bias \(3,\) instead of \(2,\)"):
        net.load_state_dict({"tail.0.bias": torch.ones(3)}, strict=False)


def test_counters_that_old_weights_lack_are_no_error() -> None:
    net = Net()
    net.load_state_dict({k: v for k, v in net.state_dict().items() if "num_batches" not in k})


@pytest.mark.parametrize("wrong", [None, {"tail.0.bias": "two"}])
def test_what_is_no_weight_loads_nothing(wrong: Any) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    with pytest.raises(WeightsError, match=r"got NoneType|1 no tensor"):
        model.load_state_dict(zeros | wrong if wrong else wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
