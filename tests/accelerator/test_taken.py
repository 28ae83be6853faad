"""What a step takes beyond its budget is said, and the next ones keep to it: a device counts it."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.accelerator.test_device import COUNT, KIND, device
from tests.training import assert_same, everything, needs_numpy
from zoo.engine import devices

pytestmark = [
    pytest.mark.skipif(KIND == "cpu", reason="needs an accelerator: pytest --device soft"),
    needs_numpy,
]
HERE = device(max(COUNT - 1, 0))


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
    return nn.Sequential(*layers).to(HERE)


def batch(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.rand(512, 64, device=HERE)


def peak_of(step: Callable[[], object]) -> int:
    """Returns the most bytes on the device in a step, beside those of programs before this one."""
    devices.reset_peak(HERE)
    step()
    return devices.peak(HERE)


@pytest.fixture
def start() -> int:
    """Bytes in use before the test."""
    return devices.allocated(HERE)


def test_the_steps_after_one_that_took_more_keep_to_the_budget(
    start: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop holds tensors that no argument shows."""
    held = torch.rand(2 << 20, device=HERE)
    plain, model = deep(), deep()

    def train(of: nn.Module, step: int) -> None:
        of(batch(step)).square().mean().backward()
        of.zero_grad()

    whole = peak_of(lambda: train(plain, 0)) - start
    budget = int(0.75 * whole)
    zoo.checkpoint(model, memory_budget=budget + start, optimizer="none")
    peaks = [peak_of(lambda n=n: train(model, n)) - start for n in range(5)]
    assert peaks[0] > budget
    assert max(peaks[1:]) <= budget
    warned = [text for text in caplog.messages if "a training step of Sequential took" in text]
    assert len(warned) == 1
    assert f"({peaks[0] + start} bytes), and its budget" in warned[0]
    for step in range(2):
        for of in (plain, model):
            of.zero_grad()
            of(batch(step)).square().mean().backward()
        assert_same(everything(model), everything(plain))
    del held


def test_a_step_that_keeps_to_its_budget_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zoo")
    model = zoo.checkpoint(deep(), memory_budget="64MiB", optimizer="none")
    for step in range(4):
        model(batch(step)).square().mean().backward()
    assert not [text for text in caplog.messages if "took" in text or "again" in text]


def test_the_budget_of_a_report_is_looked_at_too(caplog: pytest.LogCaptureFixture) -> None:
    model = deep()
    report = zoo.plan(model, batch(0), memory_budget=0.75, optimizer="none")
    held = torch.rand(2 << 20, device=HERE)
    zoo.checkpoint(model, report)
    peak_of(lambda: model(batch(0)).square().mean().backward())
    warned = [text for text in caplog.messages if "a training step of Sequential took" in text]
    assert len(warned) == 1
    assert "memory_budget=...) plans the next steps" in warned[0]
    del held


def test_a_plan_for_another_device_is_not_compared_with_what_it_predicts_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = deep()
    report = zoo.plan(model, batch(0), memory_budget=1.0, optimizer="none", device="a100")
    held = torch.rand(32 << 20, device=HERE)
    zoo.checkpoint(model, report)
    peak_of(lambda: model(batch(0)).square().mean().backward())
    assert not [text for text in caplog.messages if "were predicted" in text]
    del held
