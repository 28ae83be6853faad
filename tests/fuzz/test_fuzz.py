"""Random models by random plans and budgets train bit for bit as without, and keep to budgets."""

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import zoo
from tests.fuzz.budgets import Budgeted, Exceeded, budgeted, check_budget
from tests.fuzz.programs import Operation, Program, check_program, programs
from zoo.planner.plan import Plan


# models that cannot be planned for, and hooks where no gradient comes
@pytest.mark.filterwarnings("ignore")
@settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(programs())
def test_a_random_program_by_a_random_plan_trains_as_without(description: Program) -> None:
    check_program(description)


@pytest.mark.usefixtures("few_plans")
@pytest.mark.filterwarnings("ignore")
@settings(
    deadline=None,
    max_examples=6,
    derandomize=True,
    # a smaller example takes minutes to find: `make fuzz` does
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(budgeted())
def test_a_random_program_keeps_to_a_random_budget(description: Budgeted) -> None:
    check_budget(description)


def test_a_budget_that_is_exceeded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tuple(Operation(kind, 5, 5) for kind in ("linear", "gelu", "exp", "tanh", "multiply"))
    program = Program(
        (lines, lines), False, False, "checkpoint", Plan((0, 1)), (0.5,), True, "once"
    )
    described = Budgeted(program, 0.3, True, True, False, "nothing", (512,))
    assert check_budget(described) == ("kept", 3)
    put_in_force = zoo.checkpoint

    def generous(model: Any, *, memory_budget: int, **options: Any) -> Any:
        return put_in_force(model, memory_budget=2 * memory_budget, **options)

    monkeypatch.setattr(zoo, "checkpoint", functools.wraps(put_in_force)(generous))
    with pytest.raises(Exceeded, match="step 0 takes"):
        check_budget(described)
