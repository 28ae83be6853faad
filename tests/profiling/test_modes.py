"""Dispatch modes and anomaly detection of the program stay out of planning, and stay in force."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import zoo
from zoo.errors import PlanError


def chain() -> nn.Module:
    return zoo.resnet18(checkpoint=True)


def other() -> nn.Module:
    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    return zoo.checkpoint(nn.Sequential(block(3), block(8), block(8), nn.Flatten()))


def step(model: nn.Module) -> None:
    loss: Tensor = model(torch.rand(2, 3, 16, 16)).square().mean()
    loss.backward()


def operations(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as flops:
        step(model)
    return flops.get_total_flops()


def test_a_step_that_decides_the_plan_of_a_chain_counts_its_own_operations() -> None:
    model = chain()
    assert operations(model) == operations(model) > 0


def test_a_step_that_decides_the_plan_of_any_module_counts_those_of_blocks() -> None:
    model = other()
    first = operations(model)
    assert first == operations(zoo.checkpoint(other(), checkpoint="blocks"))
    assert first > operations(model) == operations(model) > operations(zoo.uncheckpoint(model))


@pytest.mark.parametrize("build", [chain, other])
def test_a_plan_is_decided_while_anomalies_are_looked_for(build: Callable[[], nn.Module]) -> None:
    grads = []
    for look in (False, True):
        torch.manual_seed(0)
        model = build()
        with torch.autograd.set_detect_anomaly(look):
            step(model)
            assert torch.is_anomaly_enabled() is look
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_modes_and_anomaly_detection_are_restored_when_planning_fails() -> None:
    model = zoo.checkpoint(zoo.resnet18(), zoo.Plan((0,)))
    with FlopCounterMode(display=False), torch.autograd.set_detect_anomaly(True):
        modes = _get_current_dispatch_mode_stack()
        with pytest.raises(PlanError, match="covers 1 steps"):
            step(model)
        assert _get_current_dispatch_mode_stack() == modes
        assert torch.is_anomaly_enabled()
