"""Dry steps: what the engine on fake tensors takes is what it takes."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from zoo.api.plan import planner_for
from zoo.planner.dry_step import DryStep, Made, Ran
from zoo.planner.plan import Plan, thinned
from zoo.policy.budget import StepPlanner
from zoo.profiling.isolation import FailedCall
from zoo.profiling.peak_memory import measure_step


def mean(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class Mixed(nn.Module):
    """Convolutions, norms, dropout, a write in place, an average and a result that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(16), nn.Linear(16, 10)
        self.register_buffer("average", torch.zeros(16, 8, 8))
        self.seen: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.gelu(self.first(x))
        x = F.dropout(F.gelu(self.norm(self.second(x))), 0.1) + x
        x[:, :4] *= 0.5
        with torch.no_grad():
            self.average = self.average * 0.9 + F.adaptive_avg_pool2d(x, 8).mean(0)
        self.seen = x.detach()
        return self.last(torch.tanh(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, bidirectional: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 32, 2, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lstm(torch.sin(x))[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mixed": (Mixed, (8, 3, 48, 48)),
    "lstm": (functools.partial(Recurrent, False), (32, 40, 24)),
    "two directions": (functools.partial(Recurrent, True), (32, 40, 24)),
    "instance norms": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1),
            nn.InstanceNorm3d(8, affine=True, track_running_stats=True),
            nn.LeakyReLU(0.1),
            nn.Conv3d(8, 8, 3, padding=1),
        ),
        (1, 1, 24, 24, 24),
    ),
    "resnet": (zoo.resnet18, (4, 3, 64, 64)),
    "attention": (
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64) for _ in range(3))),
        (40, 16, 32),
    ),
}


def planned(name: str, **options: Any) -> tuple[StepPlanner, Tensor]:
    torch.manual_seed(1)
    make, shape = MODELS[name]
    x = torch.rand(shape)
    return planner_for(make(), x, optimizer=torch.optim.SGD, loss=mean, **options), x


def plans_of(planner: StepPlanner) -> list[Plan]:
    """Some of the best plans, one segment of all, and one for each step."""
    count = planner.step.steps
    best = [planner.step.of_model(point).plan for point in thinned(planner.points, 3)]
    return [*best, Plan([tuple(range(count))]), Plan([(n,) for n in range(count)])]


@pytest.mark.parametrize("name", MODELS)
def test_a_real_step_takes_what_a_dry_step_does(name: str) -> None:
    planner, x = planned(name)
    model, optimizer = planner.step.model, torch.optim.SGD(planner.step.model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(x)
        mean(outputs).backward()
        optimizer.step()

    for plan in plans_of(planner):
        peak = planner.point(plan).peak
        assert planner.judge.judgement(plan) is not None
        zoo.checkpoint(model, plan)
        step()
        taken = measure_step(step, model, optimizer, [x]).peak
        assert 0.995 * peak <= taken <= 1.001 * peak


@pytest.mark.parametrize("can_fork", [True, False])
def test_the_model_stays_as_it_was(can_fork: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_fork:
        monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
        monkeypatch.setattr("zoo.profiling.isolation.MOST_HERE", 2)
    planner, x = planned("mixed")
    model: Any = planner.step.model
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    judged = [planner.judge.judgement(plan) is not None for plan in plans_of(planner)]
    # user code runs in this process no more often than is allowed
    assert all(judged) if can_fork else 1 <= sum(judged) <= 2
    assert len(judged) > 2
    assert (model.calls, model.seen, x.grad) == (0, None, None)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert torch.get_rng_state().equal(stream)


def test_each_dry_step_begins_as_the_first() -> None:
    """In a fork of its own: a model that counts its calls takes the same path each time."""
    planner, _ = planned("mixed")
    step = planner.step
    plan, cuts = Plan([(0, 1), *range(2, step.steps)]), step.outline.cuts[: step.steps]
    logs = [planner.step.outline.dry_step(DryStep(plan, cuts)) for _ in range(3)]  # type: ignore[misc]
    assert logs[0] == logs[1] == logs[2]
    assert sum(type(row) is Ran and row.is_replayed for row in logs[0]) > 0
    assert any(type(row) is Made and row.is_replayed for row in logs[0])


class Alternating(nn.Linear):
    """Takes another path in each second forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(super().forward(x)) if self.calls % 2 else super().forward(x).sin().exp()


def test_a_forward_that_does_not_follow_its_plan_is_planned_for_without() -> None:
    planner = planner_for(Alternating(8, 8), torch.rand(4, 8), optimizer=None, loss=mean)
    log = planner.step.outline.dry_step(DryStep(Plan([0, 1]), planner.step.outline.cuts[:2]))  # type: ignore[misc]
    assert isinstance(log, FailedCall)
    assert "other operators" in log.text
    assert planner.judge.judged(planner.baseline).peak == planner.baseline.peak
    assert zoo.plan(Alternating(8, 8), torch.rand(4, 8), memory_budget=1.0, loss=mean).plan


def test_the_casts_of_autocast_live_as_long_as_it_does() -> None:
    make, shape = MODELS["attention"]
    with torch.autocast("cpu", torch.bfloat16):
        planner = planner_for(make(), torch.rand(shape), optimizer=None, loss=mean, measured=False)
        cuts, ask = planner.step.outline.cuts[: planner.step.steps], planner.step.outline.dry_step
        assert ask is not None
        plan = Plan.keep_all(planner.step.steps)
        logs = [ask(DryStep(plan, cuts, leaves_autocast=leaves)) for leaves in (True, False)]
    outside, inside = map(planner.judge.bytes_of_log, logs)
    weights = sum(p.numel() for p in planner.step.model.parameters() if p.ndim > 1)
    assert inside.held - outside.held >= 2 * weights
