"""A budget is kept in sizes that were never seen, and each costs a judgement, not a search."""

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import assert_same, everything
from zoo.planner.plan import Plan, RoomyPlan
from zoo.policy import proposals
from zoo.policy.training_step import CountedStep
from zoo.profiling.peak_memory import measure_step
from zoo.tracing import planned_forward
from zoo.tracing.plan_cache import EAGER, MOST_REFUSED, PAYS

MIB = 2**20


class Attends(nn.Module):
    """Blocks whose scores grow with the square of the length."""

    def __init__(self, message: Callable[[Tensor, Tensor], Tensor] = lambda x, _: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.message = nn.Embedding(50, 48), message
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.message(self.embed(ids), (ids == 49).sum())
        for block in self.blocks:
            scores = (x @ x.transpose(1, 2)).softmax(-1)
            x = x + block(scores @ x)
        return x.square().mean()


def ids(length: int) -> Tensor:
    return torch.randint(0, 49, (4, length))


def recomputed(plan: Plan) -> int:
    """Returns how many steps a plan recomputes."""
    return len(plan.flatten()) - sum(isinstance(item, int) for item in plan)


def peak_of(model: nn.Module, given: Tensor) -> int:
    def step() -> None:
        model(given).backward()
        model.zero_grad()

    # nothing is planned where a profiler measures
    step()
    return measure_step(step, model, None, [given]).peak


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the searches for the best plans."""
    done: list[int] = []
    original = proposals.optimal_planner

    def counted() -> Any:
        done.append(len(done))
        return original()

    monkeypatch.setattr(proposals, "optimal_planner", counted)
    return done


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the traces that are made to plan."""
    done: list[int] = []
    original = planned_forward.step_trace_of

    def counted(*args: Any, **kwargs: Any) -> Any:
        done.append(len(done))
        return original(*args, **kwargs)

    monkeypatch.setattr(planned_forward, "step_trace_of", counted)
    return done


@pytest.fixture
def by_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chooses plans by estimated seconds, which are the same in each run."""
    original = CountedStep.measured

    def measured(step: CountedStep, *, timed: bool = True) -> CountedStep:
        return original(step, timed=False)

    monkeypatch.setattr(CountedStep, "measured", measured)


@pytest.mark.usefixtures("by_estimates")
def test_no_plan_is_in_force_in_sizes_for_which_it_breaks_the_budget(
    searches: list[int], traces: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """That of a short sequence keeps everything; the memory of a long one grows with its square."""
    caplog.set_level(logging.DEBUG, "zoo")
    lengths = (96, 136, 144, 152, 64, 176, 200)
    budget = int(0.7 * peak_of(Attends(), ids(200)))
    model = zoo.checkpoint(Attends(), memory_budget=budget, optimizer="none")
    plans = {}
    for length in lengths:
        assert peak_of(model, ids(length)) <= budget
        plans[length] = zoo.plan_of(model)
    assert plans[96] is not None
    assert recomputed(plans[96]) < recomputed(plans[200])
    judged = [text for text in caplog.messages if ": judged for " in text]
    again = [text for text in caplog.messages if ": planned again for " in text]
    assert judged[0] == "Attends: judged for Attends on 4×153", "of 4×136, which may grow further"
    assert len(judged) + len(again) < len(lengths) - 2, "shorter ones need no judgement"
    before = len(traces), len(searches)
    for length in lengths:
        model(ids(length)).backward()
        assert zoo.plan_of(model) is plans[length], "what was judged is remembered"
    assert (len(traces), len(searches)) == before


@pytest.mark.usefixtures("by_estimates")
def test_sizes_that_grow_are_judged_ahead(
    searches: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "zoo")
    lengths = range(60, 230, 10)
    budget = int(0.7 * peak_of(Attends(), ids(230)))
    model = zoo.checkpoint(Attends(), memory_budget=budget, optimizer="none")
    plain = Attends()
    for length in lengths:
        assert peak_of(model, ids(length)) <= budget
    done = [
        text for text in caplog.messages if ": judged for " in text or ": planned again" in text
    ]
    assert len(done) <= 2 * len(lengths) // 3
    assert len(searches) <= len(done) + 1
    for length in (lengths[3], lengths[-1]):
        given = ids(length)
        for of in (plain, model):
            of.zero_grad()
            of(given).backward()
        assert_same(everything(model), everything(plain))


@pytest.mark.usefixtures("by_estimates")
def test_a_model_that_takes_no_larger_sizes_is_judged_for_its_own(
    traces: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """As one that has positions up to some length."""
    caplog.set_level(logging.DEBUG, "zoo")

    class Limited(Attends):
        def forward(self, ids: Tensor) -> Tensor:
            if ids.shape[1] > 110:
                raise ValueError("too long")
            return super().forward(ids)

    budget = int(0.7 * peak_of(Limited(), ids(110)))
    model = zoo.checkpoint(Limited(), memory_budget=budget, optimizer="none")
    for length in (80, 100, 104, 108, 110):
        assert peak_of(model, ids(length)) <= budget
    judged = [text for text in caplog.messages if "for Limited on 4×" in text]
    assert [text.rpartition("×")[2] for text in judged] == ["100", "104", "108", "110"]
    assert len(traces) == 1 + 4 + MOST_REFUSED
    with pytest.raises(ValueError, match="too long"):
        model(ids(111))


def test_sizes_in_any_order_cost_few_searches(searches: list[int], traces: list[int]) -> None:
    lengths = list(range(60, 230, 10))
    budget = int(0.7 * peak_of(Attends(), ids(230)))
    random.Random(1).shuffle(lengths)
    model = zoo.checkpoint(Attends(), memory_budget=budget, optimizer="none")
    for length in 3 * lengths:
        assert peak_of(model, ids(length)) <= budget
    assert len(traces) < len(lengths)
    assert len(searches) <= 8


def test_short_sequences_get_a_faster_plan_than_a_long_one_where_they_come_often() -> None:
    budget = int(0.6 * peak_of(Attends(), ids(200)))
    model = zoo.checkpoint(Attends(), memory_budget=budget, optimizer="none")
    plans = []
    for length in (200, *[64] * (PAYS + 1), 200):
        assert peak_of(model, ids(length)) <= budget
        plans.append(zoo.plan_of(model))
    assert plans[1] is plans[0], "it is safe"
    assert plans[PAYS + 1].depth() == 0 < plans[0].depth()
    assert plans[-1] is plans[0]


MESSAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "formatted": lambda x, count: x if f"{count} tokens" else x * 2,
    "str": lambda x, count: x if str(count) else x * 2,
    "repr": lambda x, _: x if repr(x[0, :2, :2]) else x * 2,
    "logged": lambda x, count: x if logging.getLogger("a").debug("%s", count) is None else x * 2,
    "item": lambda x, count: x if str(count.item()) else x * 2,
    "class": lambda x, _: x * 1.0 if type(x) is Tensor else x,
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_number_in_a_message_and_a_question_for_a_class_decide_nothing(
    message: str, traces: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    plain = Attends(MESSAGES[message])
    budget = int(0.7 * peak_of(plain, ids(128)))
    model = zoo.checkpoint(Attends(MESSAGES[message]), memory_budget=budget, optimizer="none")
    for step in range(6):
        torch.manual_seed(step)
        given = ids(128)
        plain(given).backward()
        model(given).backward()
        if step == 2:
            # a class that fake tensors do not have is asked of real ones in the second step
            assert len(traces) == (3 if message == "class" else 1)
            traces.clear()
    assert not traces, "later steps plan no more"
    assert_same(everything(model), everything(plain))
    assert peak_of(model, ids(128)) <= budget
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


class Loops(nn.Module):
    """Runs a layer as often as an attribute says, as a roll-out that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.depth = nn.Linear(8, 8), 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = self.layer(x).sin()
        return x.square().mean()


def test_paths_that_never_come_again_cost_few_plans(traces: list[int]) -> None:
    model, x = zoo.checkpoint(Loops(), memory_budget="8MiB", optimizer="none"), torch.rand(4, 8)
    for model.depth in range(1, 20):
        model(x).backward()
    assert len(traces) == EAGER
    for model.depth in (12, 12):
        model(x).backward()
    assert len(traces) == EAGER + 1, "one that comes again"
    model(x).backward()
    assert zoo.plan_of(model) is not None


def test_a_path_that_comes_late_is_planned_for_in_long_trainings(
    monkeypatch: pytest.MonkeyPatch, traces: list[int]
) -> None:
    """Many paths that came once do not use up for good what may be planned for."""
    monkeypatch.setattr("zoo.tracing.plan_cache.FIRST", 4)
    monkeypatch.setattr("zoo.tracing.plan_cache.PlanCache.most_plannings", 2)
    model, x = zoo.checkpoint(Loops(), memory_budget="8MiB", optimizer="none"), torch.rand(4, 8)
    counts = []
    for model.depth in (1, 2, 2, 3, 3, *[1] * 20, 3, 3, 3):
        traces.clear()
        model(x).backward()
        counts.append(len(traces))
    assert any(counts[-3:])
    assert counts[-1] == 0


def test_a_plan_is_the_same_after_it_was_text() -> None:
    plan = RoomyPlan(Plan(((0, (1, 2)), 3)), 1.5, frozenset({3, 0}), leaves_autocast=True)
    assert RoomyPlan.parse(plan.text) == plan
    endless = functools.partial(RoomyPlan, Plan((0,)))
    assert RoomyPlan.parse(endless().text) == endless()
