"""Predicted = taken: what a dry step by a plan takes is what training steps by it take.

The property stands for all that the engine, autograd, the allocator and a training loop do to
memory; `tests.policy.programs` lists what must keep it.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.fuzz.plans import Shape, shapes, stretched_plan
from tests.policy.programs import (
    OVERESTIMATED,
    OWN,
    PROGRAMS,
    plans_of,
    program,
    traced_once,
)
from tests.policy.trained import Program
from zoo.planner.plan import Plan

pytestmark = pytest.mark.usefixtures("few_plans")

# examples that Hypothesis draws of programs and plans
DRAWN = 20


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with traced_once():
        yield
    program.cache_clear()


def assert_as_predicted(made: Program, plan: Plan) -> None:
    predicted, taken = made.predicted(plan), made.taken(plan)
    assert 0.995 * predicted <= taken <= 1.001 * predicted, plan


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_by_a_plan_takes_what_is_predicted(name: str) -> None:
    """The baseline, `checkpoint=True`, the least peak, and a plan between."""
    made = program(name)
    for plan in plans_of(made.planner).values():
        assert_as_predicted(made, plan)


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(raises=AssertionError, strict=True, reason=why))
        for name, (_, why) in OVERESTIMATED.items()
    ],
)
def test_a_step_that_takes_less_than_is_predicted(name: str) -> None:
    made = program(name)
    plan = plans_of(made.planner)["baseline"]
    assert made.taken(plan) <= 1.001 * made.predicted(plan) or pytest.fail("it takes more")
    assert_as_predicted(made, plan)


@pytest.mark.usefixtures("without_fork")
@given(name=st.sampled_from(sorted(OWN)), shape=shapes(most=8))
@settings(
    max_examples=DRAWN,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_step_by_any_nested_plan_takes_what_is_predicted(name: str, shape: Shape) -> None:
    made = program(name)
    assert_as_predicted(made, stretched_plan(shape, made.planner.step.steps))


@pytest.mark.parametrize("name", ["in place", "keeping with its graph", "custom function"])
def test_a_forked_process_predicts_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing is collected as garbage."""
    torch.manual_seed(1)
    forked = PROGRAMS[name]()
    assert forked.planner.step.profile.is_trained
    monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    monkeypatch.setattr("zoo.profiling.isolation.MOST_HERE", 1000)
    here = program(name)
    for plan in plans_of(here.planner).values():
        assert forked.predicted(plan) == here.predicted(plan)
