import functools
import gc
import weakref
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import zoo
from tests.planner.chains import chains, nested_plans
from tests.planner.test_planner import uniform
from zoo.api.checkpoint import outline_of
from zoo.api.plan import planner_for
from zoo.invocation import Invocation
from zoo.models.densenet import DenseNet
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.least_memory import least_memory
from zoo.planner.optimal import BESIDE, DPTable, PlanSearch, SimulatedPlan, frontier, least
from zoo.planner.plan import DEEPEST, Plan
from zoo.planner.schemes import segments
from zoo.planner.search_space import (
    ENTRIES,
    NEAR,
    Entries,
    SearchSpace,
    default_cuts,
    search_spaces,
)
from zoo.policy.training_step import Profile

dense = functools.partial(DenseNet, 32, (6, 6, 4), 10)


@functools.cache
def costs_of(build: Callable[[], nn.Module]) -> StepCosts:
    """Returns the costs of a model on a small batch, with seconds from operations and bytes."""
    model, batch = build(), torch.randn(2, 3, 64, 64)
    costs = Profile(model, outline_of(model, Invocation((batch,)))).costs()

    def seconds(flops: tuple[int, ...], new: tuple[int, ...]) -> tuple[float, ...]:
        pairs = zip(flops, new, strict=True)
        return tuple(count / 1e11 + allocated / 1e10 for count, allocated in pairs)

    timed = {
        "seconds": seconds(costs.flops, costs.forward),
        "seconds_until_saved": seconds(costs.flops_until_saved, costs.forward_until_saved),
    }
    return StepCosts(**{**vars(costs), **timed})


@functools.cache
def frontier_of(build: Callable[[], nn.Module], blockwise: bool = False) -> list[SimulatedPlan]:
    costs = costs_of(build)
    edges = [k for k in range(1, len(costs)) if costs.blocks[k] != costs.blocks[k - 1]]
    return frontier(costs, levels=100, cuts=edges if blockwise else None)


def baseline_of(costs: StepCosts) -> int:
    return simulate(Plan.keep_all(len(costs)), costs).peak


def within(points: list[SimulatedPlan], budget: int) -> Plan:
    return [point.plan for point in points if point.peak <= budget][-1]


def budgets_of(points: list[SimulatedPlan], count: int = 20) -> list[int]:
    width = points[-1].peak - points[0].peak
    return [points[0].peak + width * number // (count - 1) for number in range(count)]


def measures(plan: Plan, costs: StepCosts) -> tuple[int, float, int]:
    result = simulate(plan, costs)
    return result.peak, result.recomputed_seconds, result.recomputed_flops


@settings(deadline=None, max_examples=40)
@given(chains(5))
def test_no_nested_plan_does_better_at_any_budget(costs: StepCosts) -> None:
    points = frontier(costs, levels=None)
    found = [measures(plan, costs) for plan in nested_plans(len(costs))]
    assert points[0].peak == min(peak for peak, _, _ in found)
    # at a budget between two of these peaks both are as at the lower one
    peaks = {peak for peak, _, _ in found} | {point.peak for point in points}
    for budget in sorted(peaks | {baseline_of(costs) + 1}):
        peak, seconds, flops = measures(within(points, budget), costs)
        best = min((s, p, f) for p, s, f in found if p <= budget)
        assert (seconds, peak, flops) == best


@settings(deadline=None, max_examples=40)
@given(chains(8))
def test_what_is_interpolated_keeps_to_the_budget(costs: StepCosts) -> None:
    exact, coarse = frontier(costs, levels=None), frontier(costs, levels=10)
    assert coarse[0].peak == exact[0].peak == simulate(least(costs), costs).peak
    for budget in range(exact[0].peak, baseline_of(costs) + 1):
        peak, seconds, _ = measures(within(coarse, budget), costs)
        assert peak <= budget
        assert seconds >= simulate(within(exact, budget), costs).recomputed_seconds


@pytest.mark.parametrize("build", [zoo.resnet50, dense])
def test_budgets_are_honored_and_more_memory_is_never_slower(
    build: Callable[[], nn.Module],
) -> None:
    points, costs = frontier_of(build), costs_of(build)
    seconds = []
    for budget in budgets_of(points):
        result = simulate(within(points, budget), costs)
        assert result.peak <= budget
        assert result.peak >= 0.9 * budget, "the budget is used"
        seconds.append(result.recomputed_seconds)
    assert all(more >= less for more, less in pairwise(seconds))
    assert seconds[-1] == 0


@pytest.mark.parametrize("build", [zoo.resnet50, dense])
def test_long_segments_between_blocks_are_nearly_as_good(build: Callable[[], nn.Module]) -> None:
    flat, blockwise, costs = frontier_of(build), frontier_of(build, True), costs_of(build)
    assert flat[0].peak <= blockwise[0].peak <= 1.1 * flat[0].peak

    def seconds(points: list[SimulatedPlan]) -> float:
        plans = [within(points, budget) for budget in budgets_of(blockwise)]
        return sum(simulate(plan, costs).recomputed_seconds for plan in plans)

    assert seconds(blockwise) <= 1.05 * seconds(flat)


@settings(deadline=None, max_examples=40)
@given(chains(8))
def test_a_look_around_a_budget_finds_what_all_plans_have_there(costs: StepCosts) -> None:
    points, search = frontier(costs, levels=None), PlanSearch(costs, levels=None)
    for budget in range(points[0].peak, baseline_of(costs) + 1):
        near = search.around(lambda point, budget=budget: point.peak <= budget)
        assert measures(within(near, budget), costs) == measures(within(points, budget), costs)


@pytest.mark.parametrize("build", [zoo.resnet50, dense])
def test_few_plans_are_traced_back_for_a_budget(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    points, costs, traced = frontier_of(build), costs_of(build), list[int]()
    plan_of = DPTable.plan

    def counted(table: DPTable, budget: int) -> Plan:
        traced.append(budget)
        return plan_of(table, budget)

    monkeypatch.setattr(DPTable, "plan", counted)
    whole = sum(costs.seconds) + sum(costs.seconds_backward)
    for budget in budgets_of(points, 5):
        traced.clear()
        near = PlanSearch(costs, levels=100).around(lambda point, most=budget: point.peak <= most)
        assert len({*traced}) == len(traced) <= 2 * BESIDE + 9, "400 budgets are halved 9 times"
        found, best = (simulate(within(some, budget), costs) for some in (near, points))
        assert found.peak <= budget
        assert found.recomputed_seconds <= best.recomputed_seconds + 0.002 * whole


def test_a_frontier_falls_from_the_least_peak_to_plain_training() -> None:
    costs = costs_of(zoo.resnet50)
    points = frontier_of(zoo.resnet50)
    assert all(p.peak < q.peak for p, q in pairwise(points))
    assert all(p.recomputed_seconds > q.recomputed_seconds for p, q in pairwise(points))
    assert points[0].peak == simulate(least(costs), costs).peak
    assert points[-1].plan == Plan.keep_all(len(costs))
    assert all(simulate(point.plan, costs) == point.result for point in points)


def test_a_long_chain_is_cut_at_its_blocks_and_inside_long_ones() -> None:
    costs = uniform(1000)
    cuts = default_cuts(costs)
    assert {cuts[0], cuts[-1]} == {0, 1000}
    one_block = StepCosts(**{**vars(costs), "blocks": (0,) * 1000})
    found = default_cuts(one_block)
    assert max(stop - start for start, stop in pairwise(found)) <= 2 * NEAR
    assert default_cuts(uniform(100)) == list(range(101))


def recurrent(steps: int) -> StepCosts:
    """A chain of which every seventh output stays until its end, as in a recurrent network."""
    costs = uniform(steps)
    live = tuple(state | {*range(0, step, 7)} for step, state in enumerate(costs.live))
    return StepCosts(**{**vars(costs), "live": live})


def test_the_table_of_a_recurrent_network_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = ENTRIES // 16  # which a shorter chain exceeds
    monkeypatch.setattr("zoo.planner.search_space.ENTRIES", entries)
    costs = recurrent(120)
    assert Entries(SearchSpace(costs, default_cuts(costs, 50))).count > entries
    spaces = [*search_spaces(costs)]
    assert len(spaces) == 2
    assert all(Entries(space).count <= entries for space in spaces)
    assert simulate(least(costs), costs).peak < 0.5 * baseline_of(costs)


@pytest.mark.usefixtures("few_plans")
def test_a_recurrent_network_beyond_the_table_has_plans_as_good_as_simple_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zoo.planner.search_space.ENTRIES", ENTRIES // 16)
    costs = recurrent(120)
    assert len([*search_spaces(costs)]) == 2
    points = frontier(costs)
    for simple in (segments(range(120), 12), segments(range(120), 6)):
        peak, seconds, _ = measures(simple, costs)
        best = simulate(within(points, peak), costs)
        assert best.recomputed_seconds <= seconds
    assert points[0].peak < 0.9 * measures(segments(range(120), 12), costs)[0]


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
    monkeypatch.setattr("zoo.planner.optimal.DEEPEST", 3)
    points = frontier(costs)
    assert max(point.plan.depth() for point in points) == 3 >= least(costs).depth()
    assert all(simulate(point.plan, costs).peak == point.peak for point in points)


def test_the_plan_of_checkpoint_true_is_among_the_candidates() -> None:
    """Its long segments begin where those of the table do not, here in the last 100 steps."""
    model = nn.Transformer(32, 2, 3, 3, 64, batch_first=True)
    found = planner_for(model, (torch.rand(2, 20, 32), torch.rand(2, 16, 32)), device="a100")
    costs = found.step.costs_with_gradients
    peak = simulate(least_memory(costs), costs).peak
    assert frontier(costs)[0].peak <= peak
    assert simulate(least(costs), costs).peak <= peak


def test_a_table_goes_with_its_last_name() -> None:
    """It may take hundreds of MB, so no cycle keeps it until the garbage collector comes."""
    table = DPTable(next(search_spaces(uniform(6))), np.arange(100), exact=True)
    gone = weakref.ref(table)
    assert table.plan(table.least).flatten() == tuple(range(6))
    gc.disable()
    try:
        del table
        assert gone() is None
    finally:
        gc.enable()
