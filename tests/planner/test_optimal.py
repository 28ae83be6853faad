import functools
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings

import zoo
from tests.planner.chains import chains, nested_plans
from tests.planner.test_planner import uniform
from zoo.chain import Chain, outline
from zoo.errors import BudgetError
from zoo.measure.profile import profile
from zoo.plan import DEEPEST, Plan
from zoo.planner.costs import StepCosts
from zoo.planner.optimal import NEAR, Table, default_cuts, frontier, least, optimal
from zoo.planner.simulate import simulate


@functools.cache
def costs_of(build: Callable[[], Chain]) -> StepCosts:
    """Returns the costs of a model on a small batch, with seconds from operations and bytes."""
    model, batch = build(), torch.randn(2, 3, 64, 64)
    costs = profile(model, outline(model.steps_for(batch)), (batch,))

    def seconds(flops: tuple[int, ...], new: tuple[int, ...]) -> tuple[float, ...]:
        pairs = zip(flops, new, strict=True)
        return tuple(count / 1e11 + allocated / 1e10 for count, allocated in pairs)

    timed = {
        "seconds": seconds(costs.flops, costs.forward),
        "seconds_until_saved": seconds(costs.flops_until_saved, costs.forward_until_saved),
    }
    return StepCosts(**{**vars(costs), **timed})


@functools.cache
def table_of(build: Callable[[], Chain], blockwise: bool = False) -> Table:
    costs = costs_of(build)
    edges = [k for k in range(1, len(costs)) if costs.blocks[k] != costs.blocks[k - 1]]
    return Table(costs, levels=200, cuts=edges if blockwise else None)


def budgets_of(table: Table, count: int = 20) -> list[int]:
    width = table.baseline - table.least
    return [table.least + width * number // (count - 1) for number in range(count)]


def measures(plan: Plan, costs: StepCosts) -> tuple[int, float, int]:
    result = simulate(plan, costs)
    return result.peak, result.recomputed_seconds, result.recomputed_flops


@settings(deadline=None, max_examples=300)
@given(chains(5))
def test_no_nested_plan_does_better_at_any_budget(costs: StepCosts) -> None:
    table = Table(costs, levels=None)
    found = [measures(plan, costs) for plan in nested_plans(len(costs))]
    assert table.least == min(peak for peak, _, _ in found)
    for budget in range(table.least, table.baseline + 2):
        peak, seconds, flops = measures(table.plan(budget), costs)
        best = min((s, f, p) for p, s, f in found if p <= budget)
        assert (seconds, flops, peak) == best


@settings(deadline=None, max_examples=100)
@given(chains(8))
def test_what_is_interpolated_keeps_to_the_budget(costs: StepCosts) -> None:
    exact, coarse = Table(costs, levels=None), Table(costs, levels=10)
    assert coarse.least == exact.least
    for budget in range(exact.least, exact.baseline + 1):
        peak, seconds, _ = measures(coarse.plan(budget), costs)
        assert peak <= budget
        assert seconds >= simulate(exact.plan(budget), costs).recomputed_seconds


@pytest.mark.parametrize("build", [zoo.resnet50, zoo.densenet121])
def test_budgets_are_honored_and_more_memory_is_never_slower(build: Callable[[], Chain]) -> None:
    table, costs = table_of(build), costs_of(build)
    seconds = []
    for budget in budgets_of(table):
        result = simulate(table.plan(budget), costs)
        assert result.peak <= budget
        assert result.peak >= 0.9 * budget, "the budget is used"
        seconds.append(result.recomputed_seconds)
    assert all(more >= less for more, less in pairwise(seconds))
    assert seconds[-1] == 0


@pytest.mark.parametrize("build", [zoo.resnet50, zoo.densenet121])
def test_long_segments_between_blocks_are_nearly_as_good(build: Callable[[], Chain]) -> None:
    flat, blockwise, costs = table_of(build), table_of(build, True), costs_of(build)
    assert flat.least <= blockwise.least <= 1.1 * flat.least

    def seconds(table: Table) -> float:
        plans = map(table.plan, budgets_of(blockwise))
        return sum(simulate(plan, costs).recomputed_seconds for plan in plans)

    assert seconds(blockwise) <= 1.05 * seconds(flat)


def test_an_impossible_budget_is_refused_with_the_least_that_would_do() -> None:
    costs = uniform(9)
    table = Table(costs, levels=None)
    message = (
        f"at least {table.least} bytes; the budget is {table.least - 1} bytes; "
        f"keeping everything takes {table.baseline} bytes"
    )
    with pytest.raises(BudgetError, match=message):
        table.plan(table.least - 1)
    assert simulate(table.plan(table.least), costs).peak == table.least


def test_a_frontier_falls_from_the_least_peak_to_plain_training() -> None:
    costs = costs_of(zoo.resnet50)
    table = table_of(zoo.resnet50)
    points = table.frontier()
    assert all(p.peak < q.peak for p, q in pairwise(points))
    assert all(p.recomputed_seconds > q.recomputed_seconds for p, q in pairwise(points))
    assert points[0].peak == table.least
    assert points[-1] == (table.baseline, 0.0, Plan.keep_all(len(costs)))
    for point in points:
        assert measures(point.plan, costs)[:2] == point[:2]


def test_time_asks_for_the_least_memory() -> None:
    table, costs = table_of(zoo.resnet50), costs_of(zoo.resnet50)
    for overhead in (0.0, 0.05, 0.2, 5.0):
        limit = overhead * sum(costs.seconds)
        result = simulate(table.plan_within(limit), costs)
        assert result.recomputed_seconds <= limit
        assert all(p.recomputed_seconds > limit for p in table.frontier() if p.peak < result.peak)


def test_one_question_gets_the_answer_of_the_table() -> None:
    costs = uniform(12)
    table = Table(costs)
    assert optimal(costs, table.least) == table.plan(table.least)
    assert frontier(costs) == table.frontier()


def test_a_long_chain_is_cut_at_its_blocks_and_inside_long_ones() -> None:
    costs = uniform(1000)
    cuts = default_cuts(costs)
    assert {cuts[0], cuts[-1]} == {0, 1000}
    one_block = StepCosts(**{**vars(costs), "blocks": (0,) * 1000})
    found = default_cuts(one_block)
    assert max(stop - start for start, stop in pairwise(found)) <= 2 * NEAR
    assert default_cuts(uniform(100)) == list(range(101))


@pytest.mark.parametrize(("blocks", "steps"), [(1, 9000), (200, 45), (300, 30), (9000, 1)])
def test_no_chain_is_cut_so_often_that_plans_nest_too_deep(blocks: int, steps: int) -> None:
    costs = uniform(blocks * steps)
    numbers = tuple(step // steps for step in range(blocks * steps))
    found = default_cuts(StepCosts(**{**vars(costs), "blocks": numbers}))
    longest = max(stop - start for start, stop in pairwise(found))
    assert len(found) + longest <= DEEPEST


def test_a_plan_nests_no_deeper_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = uniform(40)
    assert least(costs).depth() > 3
    monkeypatch.setattr("zoo.planner.trace.DEEPEST", 3)
    points = Table(costs).frontier()
    assert max(point.plan.depth() for point in points) == least(costs).depth() == 3
    assert all(simulate(point.plan, costs).peak == point.peak for point in points)
