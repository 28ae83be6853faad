"""`benchmarks/bounds.py`: no plan, of all there are, recomputes less than the bound says."""

import pytest
from hypothesis import given, settings

from tests.planner.chains import chains, nested_plans
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.plan import Plan

pytest.importorskip("scipy")
bounds = pytest.importorskip("benchmarks.bounds")


@settings(max_examples=15, deadline=None)
@given(chains(most=4))
def test_no_plan_of_all_recomputes_less_than_the_bound(costs: StepCosts) -> None:
    results = [simulate(plan, costs) for plan in nested_plans(len(costs))]
    fewest: dict[int, float] = {}
    for result in results:
        seconds = fewest.get(result.peak, float("inf"))
        fewest[result.peak] = min(seconds, result.recomputed_seconds)
    for peak, seconds in fewest.items():
        assert bounds.least_recomputation(costs, peak) <= seconds + 1e-6


def chain(count: int) -> StepCosts:
    """Steps that save what they get and make 10 bytes, the first in 5 s, each other one in 1 s."""
    live = (frozenset[int](), *(frozenset({n}) for n in range(count)))
    seconds = (5.0, *[1.0] * (count - 1))
    return StepCosts(
        sizes=(10,) * count,
        live=live,
        saved=live[:-1],
        forward=(10,) * count,
        forward_until_saved=(0,) * count,
        backward=(0,) * count,
        gradients=(0,) * (count + 1),
        flops=(1,) * count,
        flops_until_saved=(0,) * count,
        seconds=seconds,
        seconds_until_saved=(0.0,) * count,
        seconds_backward=(1.0,) * count,
        blocks=tuple(range(count)),
    )


def test_the_bound_is_reached_where_single_steps_are_dropped() -> None:
    costs = chain(6)
    # the last step is about to go backward: five states are saved, and it reads the last of them
    assert bounds.least_recomputation(costs, 50) == 0
    for dropped in (1, 2, 3):
        found = bounds.least_recomputation(costs, 50 - 10 * dropped)
        assert found == pytest.approx(dropped), "the cheap ones, and not the first"
    assert bounds.least_recomputation(costs, 10) == pytest.approx(3 + 5)
    assert simulate(Plan((0, (1, 2, 3, 4), 5)), costs).recomputed_seconds == 3
