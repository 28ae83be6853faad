"""Equal parts of a chain are solved once, which changes no plan."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from tests.planner.chains import repeated_chains
from tests.planner.test_planner import uniform
from zoo.planner.costs import StepCosts
from zoo.planner.optimal import SimulatedPlan, frontier
from zoo.planner.search_space import Entries, Run, runs_of, search_spaces


def without_runs(costs: StepCosts, cuts: list[int] | None) -> list[SimulatedPlan]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.planner.search_space.runs_of", lambda *_: [])
        return frontier(costs, levels=None, cuts=cuts)


@settings(deadline=None, max_examples=30)
@given(repeated_chains())
def test_what_is_solved_once_is_as_good_as_what_is_solved_each_time(costs: StepCosts) -> None:
    states = range(len(costs) + 1)
    assume(runs_of(costs, states))
    found, expected = frontier(costs, levels=None), without_runs(costs, None)
    assert [point[:2] for point in found] == [point[:2] for point in expected]


def layers(count: int, steps: int = 4) -> StepCosts:
    """Costs of equal layers, each with gradients of its parameters."""
    costs = uniform(count * steps)
    behind = [(len(costs) - state) // steps for state in range(len(costs) + 1)]
    return replace(
        costs,
        gradients=tuple(10 + 7 * number for number in behind),
        flops=tuple(1 + step % steps for step in range(len(costs))),
        blocks=tuple(step // steps for step in range(len(costs))),
    )


def test_a_run_is_found_with_the_gradients_that_its_parts_add() -> None:
    costs = layers(20)
    (run,) = runs_of(costs, range(len(costs) + 1))
    assert run == Run(start=run.start, period=4, stop=80, grown=7)
    assert run.start <= 4


def test_parts_of_unlike_gradients_or_storages_are_not_equal() -> None:
    costs = layers(20)
    squares = tuple(number * number for number in range(len(costs), -1, -1))
    assert runs_of(replace(costs, gradients=squares), ()) == []
    sizes = tuple(range(10, 10 + len(costs)))
    assert runs_of(replace(costs, sizes=sizes), ()) == []
    marked = [step for step in range(len(costs) + 1) if step % 4 == 0 and step != 40]
    assert {run.stop for run in runs_of(costs, marked)} == {39, 80}


def test_the_table_grows_with_the_layers_not_with_their_square() -> None:
    some, twice = (Entries(next(search_spaces(layers(count)))).count for count in (60, 120))
    assert twice <= 2.2 * some
