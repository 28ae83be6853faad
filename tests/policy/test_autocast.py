"""A budget under autocast is kept on whichever side of it the backward runs.

Autocast holds its casts of weights until it is left: a backward inside of it has them beside all
else, and which side it will be is not known when the first forward is planned for.
"""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import zoo
from zoo.policy import decision
from zoo.policy.goal import Goal
from zoo.policy.training_step import CountedStep, TrainingStep
from zoo.profiling.cast_cache import CastCache
from zoo.profiling.peak_memory import measure_step
from zoo.tracing.planned_forward import PatchedForward, patched_forward

pytestmark = pytest.mark.usefixtures("without_fork")

sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def perceptrons() -> nn.Sequential:
    """Wide layers, whose casts take as much as the activations of a small batch."""
    torch.manual_seed(1)
    layers = (nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
    return nn.Sequential(*layers)


def scores(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


def step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, *, inside: bool) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = scores(model(x))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    optimizer.step()


def budgeted() -> tuple[nn.Module, Tensor, torch.optim.Optimizer, int]:
    """Returns a model with a budget: what a plain step takes whose backward is outside."""
    model, x = perceptrons(), torch.rand(1500, 256)
    optimizer = sgd(model.parameters())
    plain = functools.partial(step, model, x, optimizer, inside=False)
    plain()
    budget = measure_step(plain, model, optimizer, [x]).peak + 100
    zoo.checkpoint(model, memory_budget=budget, optimizer=optimizer, loss=scores)
    return model, x, optimizer, budget


def patch_of(model: nn.Module) -> PatchedForward:
    patched = patched_forward(model)
    assert patched is not None
    return patched


@pytest.mark.parametrize("inside", [False, True])
def test_a_budget_is_kept_on_both_sides(inside: bool) -> None:
    model, x, optimizer, budget = budgeted()
    train = functools.partial(step, model, x, optimizer, inside=inside)
    for _ in range(2):
        train()
    assert measure_step(train, model, optimizer, [x]).peak <= budget
    plan = zoo.plan_of(model)
    assert plan is not None
    assert (plan.depth() > 0) is inside, "where it is outside, nothing need be recomputed"


def test_a_backward_inside_that_follows_ones_outside_is_planned_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x, optimizer, budget = budgeted()
    for _ in range(2):
        step(model, x, optimizer, inside=False)
    train = functools.partial(step, model, x, optimizer, inside=True)
    train()
    assert "runs inside of autocast" in caplog.text
    train()
    assert measure_step(train, model, optimizer, [x]).peak <= budget


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_does_not_know_where_its_backward_will_run(copied: Any) -> None:
    model, x, optimizer, _ = budgeted()
    step(model, x, optimizer, inside=False)
    assert patch_of(model).leaves_autocast is True
    assert patch_of(copied(model)).leaves_autocast is None


def test_an_overhead_has_no_budget_to_break(caplog: pytest.LogCaptureFixture) -> None:
    model, x = perceptrons(), torch.rand(64, 256)
    optimizer = sgd(model.parameters())
    zoo.checkpoint(model, max_overhead=0.0, optimizer=optimizer)
    for _ in range(2):
        step(model, x, optimizer, inside=True)
    assert "inside of autocast" not in caplog.text


def test_processes_of_a_group_agree_on_a_plan_for_each_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that plans anew for a backward inside must not get the plan from before."""
    store = distributed.HashStore()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    model, x = perceptrons(), torch.rand(8, 256)
    zoo.checkpoint(model, 2)
    outline = patch_of(model).module and zoo.chain_of(model, x)
    assert len(outline.names) > 4
    goal = Goal("auto", memory_budget=1 << 30)
    counted = CountedStep(model, _Outline(outline), [x], TrainingStep())  # type: ignore[arg-type]
    plans = [zoo.Plan.parse("0-15"), zoo.Plan.parse("(0-7) 8-15")]
    for sides, plan in zip(((True, False), (False,)), plans, strict=True):
        decide = functools.partial(_decided, plan)
        (found,) = decision._first_decided(goal, counted, decide, sides)
        (again,) = decision._first_decided(goal, counted, pytest.fail, sides)
        assert found.plan == again.plan == plan


class _Outline:
    def __init__(self, steps: Any) -> None:
        self.names, self.blocks = steps.names, steps.blocks


def _decided(plan: zoo.Plan) -> list[Any]:
    return [decision.RoomyPlan(plan)]


def test_a_cast_serves_those_to_the_same_type_alone() -> None:
    weight = nn.Parameter(torch.rand(4, 4))
    with torch.autocast("cpu", torch.bfloat16), CastCache() as casts:
        first, second = weight.to(torch.bfloat16), weight.to(torch.bfloat16)
        assert len(casts.casts) == 1
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        assert weight.double().dtype is torch.float64
    assert torch.equal(first, second)
