"""A budget is kept where a model runs several times before one backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import assert_same, everything
from zoo.engine import saved_tensors
from zoo.errors import ArgumentError, BudgetError
from zoo.profiling.peak_memory import measure_step
from zoo.tracing import planned_forward
from zoo.tracing.pending_forwards import STEPS, PendingForwards
from zoo.tracing.planned_forward import patched_forward


def perceptrons() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)) for _ in range(5))
    return nn.Sequential(*layers)


def roll_out(model: nn.Module, x: Tensor, count: int) -> Tensor:
    """Feeds a model its own output."""
    total = torch.zeros(())
    for _ in range(count):
        x = model(x)
        total = total + x.square().mean()
    return total


def siamese(model: nn.Module, x: Tensor, count: int) -> Tensor:
    """Compares what a model makes of several inputs."""
    found = [model(x.roll(shift, 0) if shift else x).square().mean() for shift in range(count)]
    return torch.stack(found).cumsum(0).square().sum()


def preferences(model: nn.Module, x: Tensor, count: int) -> Tensor:
    """Pairs of inputs of two sizes."""
    found = [model(x if n % 2 else x[: len(x) * 3 // 4]).mean() for n in range(count)]
    return torch.stack(found).square().sum()


def scores(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


PROGRAMS: dict[str, Callable[[nn.Module, Tensor, int], Tensor]] = {
    "roll-out": roll_out,
    "siamese": siamese,
    "preferences": preferences,
}
X = torch.rand(512, 64, generator=torch.Generator().manual_seed(0))


def step(program: str, model: nn.Module, count: int) -> None:
    model.zero_grad()
    PROGRAMS[program](model, X, count).backward()


def peak_of(program: str, model: nn.Module, count: int) -> int:
    return measure_step(lambda: step(program, model, count), model, None, [X]).peak


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_sum_of_the_forwards_keeps_to_the_budget_from_the_second_step_on(
    program: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain = perceptrons()
    step(program, plain, count)
    budget = int(0.5 * peak_of(program, plain, count))
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none")
    step(program, model, count)
    (said,) = caplog.messages
    assert "runs 2 forwards or more before a backward" in said
    for _ in range(2):
        step(program, model, count)
        assert peak_of(program, model, count) <= budget
    assert_same(everything(model), everything(plain))
    assert caplog.messages == [said]


def test_a_second_forward_in_one_autocast_finds_casts_and_is_another_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(model: nn.Module) -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = siamese(model, X, 2)
        loss.backward()

    def peak(model: nn.Module) -> int:
        return measure_step(lambda: train(model), model, None, [X]).peak

    plain = perceptrons()
    budget = int(0.8 * peak(plain))
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none")
    for _ in range(3):
        train(model)
    assert peak(model) <= budget
    assert_same(everything(model), everything(plain))
    (said,) = caplog.messages
    assert "runs 2 forwards or more before a backward" in said, "neither larger, nor not judged"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_that_is_planned_for_ahead_takes_what_was_predicted(
    program: str, caplog: pytest.LogCaptureFixture
) -> None:
    step_options: dict[str, Any] = {"optimizer": "none", "loss": scores, "holds_outputs": True}
    for share in (1.0, 0.6, 0.4):
        report = zoo.plan(perceptrons(), X, memory_budget=share, forwards=3, **step_options)
        assert report.forwards == 3
        assert report.at_peak.total == report.predicted_peak
        model = zoo.checkpoint(perceptrons(), report)
        step(program, model, 3)
        taken = peak_of(program, model, 3)
        assert taken <= 1.001 * report.predicted_peak
        if program == "siamese":
            assert taken >= 0.9 * report.predicted_peak
    model = zoo.checkpoint(perceptrons(), memory_budget=report.budget, optimizer="none", forwards=3)
    step(program, model, 3)
    assert peak_of(program, model, 3) <= report.budget
    assert not caplog.records


def test_many_forwards_fit_where_each_holds_its_input_alone() -> None:
    plain = perceptrons()
    budget = int(1.1 * peak_of("roll-out", plain, 1))
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none", forwards=8)
    step("roll-out", model, 8)
    assert peak_of("roll-out", model, 8) <= budget < peak_of("roll-out", plain, 3)


def test_a_budget_that_no_plan_of_so_many_forwards_keeps_to_says_the_least(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = perceptrons()
    budget = int(0.5 * peak_of("roll-out", plain, 1))
    with pytest.raises(BudgetError, match="needs at least") as raised:
        zoo.plan(perceptrons(), X, memory_budget=budget, optimizer="none", forwards=12)
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none")
    for _ in range(2):
        step("roll-out", model, 12)
    # the first of them gets what needs no gradient
    broken = [text for text in caplog.messages if "breaks its budget" in text]
    assert len(broken) == 2
    assert all("needs at least" in text for text in broken)
    assert peak_of("roll-out", model, 12) <= raised.value.least


def test_fewer_forwards_are_planned_for_when_no_step_has_run_more_for_long() -> None:
    plain = perceptrons()
    step("siamese", plain, 2)
    budget = int(0.6 * peak_of("siamese", plain, 2))
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none")
    plans = []
    for count in (1, 2, 1, *[1] * (STEPS + 1)):
        step("siamese", model, count)
        plans.append(zoo.plan_of(model))
    assert plans[0] == plans[1] == plans[-1] != plans[2] == plans[STEPS + 1]


def test_a_forward_whose_graph_is_gone_or_was_run_does_not_wait() -> None:
    pending, x = PendingForwards(nn.Linear(1, 1), 0), torch.rand(3, requires_grad=True)

    def forward() -> Tensor:
        counts.append(pending.begin())
        y = x.exp()
        pending.add([y], 0)
        return y

    counts: list[int] = []
    first = forward()
    second = forward()
    del first
    third = forward()
    (second + third).sum().backward()
    forward()
    with torch.no_grad():
        pending.add([x.exp()], 0)
    forward()
    assert counts == [1, 2, 2, 1, 1]


def test_a_copy_counts_its_own_forwards() -> None:
    model = zoo.checkpoint(perceptrons(), memory_budget="64MiB", optimizer="none")
    outputs = model(X)
    other = copy.deepcopy(model)
    other(X).sum().backward()
    assert patched_forward(other).training.forwards == 1
    assert patched_forward(model).training.forwards == 1
    outputs.sum().backward()


@pytest.mark.parametrize("forwards", [0, -1, 1.5, True, None])
def test_forwards_is_a_whole_number(forwards: object) -> None:
    with pytest.raises(ArgumentError, match="whole number from 1 on"):
        zoo.checkpoint(perceptrons(), memory_budget=0.5, forwards=forwards)
    with pytest.raises(ArgumentError, match="forwards"):
        zoo.checkpoint(perceptrons(), True, forwards=2)


def test_a_forward_more_from_time_to_time_is_planned_for_and_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces, original = [], planned_forward.step_trace_of

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(len(traces))
        return original(*args, **kwargs)

    monkeypatch.setattr(planned_forward, "step_trace_of", counted)
    plain = perceptrons()
    step("siamese", plain, 2)
    budget = int(0.6 * peak_of("siamese", plain, 2))
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none")
    for number in range(5 * (STEPS + 4)):
        step("siamese", model, 1 if number % (STEPS + 4) else 2)
    assert len(traces) <= 4
    assert peak_of("siamese", model, 2) <= budget


def test_each_number_of_forwards_that_is_new_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.checkpoint(perceptrons(), memory_budget="64MiB", optimizer="none")
    for count in (2, 2, 4, 4):
        step("roll-out", model, count)
    said = [text for text in caplog.messages if "forwards or more before a backward" in text]
    assert ["planned for 1" in said[0], "planned for 2" in said[1]] == [True, True]
    assert len(said) == 2


def test_a_loop_that_keeps_a_graph_from_step_to_step_keeps_to_the_budget() -> None:
    """As a pipelined one, whose backward comes after the next forward."""

    def steps(model: nn.Module, count: int) -> None:
        for _ in range(count):
            model.zero_grad()
            loss = model(X).square().mean()
            if waiting:
                waiting.pop().backward()
            waiting.append(loss)

    def peak(model: nn.Module) -> int:
        return measure_step(lambda: steps(model, 1), model, None, [X]).peak

    waiting: list[Tensor] = []
    plain = perceptrons()
    steps(plain, 2)
    budget = int(0.7 * peak(plain))
    waiting.clear()
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none")
    steps(model, STEPS + 4)
    assert peak(model) <= budget


def test_a_graph_that_is_kept_waits_on() -> None:
    def steps(model: nn.Module) -> None:
        model.zero_grad()
        first = model(X)
        first.mean().backward(retain_graph=True)
        (first.mean() * model(X).mean()).backward()

    def peak(model: nn.Module) -> int:
        return measure_step(lambda: steps(model), model, None, [X]).peak

    plain = perceptrons()
    steps(plain)
    budget = int(0.8 * peak(plain))
    model = zoo.checkpoint(perceptrons(), memory_budget=budget, optimizer="none", accumulates=True)
    for _ in range(2):
        steps(model)
    assert peak(model) <= budget
    steps(plain)
    steps(plain)
    assert_same(everything(model), everything(plain))


def test_a_backward_that_makes_a_graph_is_said_where_everything_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved_tensors.warn_of_graph.cache_clear()
    model = zoo.checkpoint(perceptrons(), memory_budget="64MiB", optimizer="none")
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().mean().backward()
    assert zoo.plan_of(model).depth() == 0
    (said,) = caplog.messages
    assert "a memory budget, which counts no such graph, may be exceeded" in said
