import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.planner.chains import chains, flat_plans
from tests.planner.test_plan import plans
from zoo.errors import ArgumentError, PlanError
from zoo.planner import least_memory as search, schemes
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.least_memory import least_memory
from zoo.planner.plan import Plan


def uniform(steps: int, size: int = 10, flops: int = 1) -> StepCosts:
    """Costs of equal steps: each returns one new tensor of `size` bytes and saves its input."""
    return StepCosts(
        sizes=(size,) * steps,
        live=(frozenset(), *(frozenset([step]) for step in range(steps))),
        saved=(frozenset(), *(frozenset([step]) for step in range(steps - 1))),
        forward=(size,) * steps,
        forward_until_saved=(0,) * steps,
        backward=(size,) * steps,
        gradients=(0, *(size,) * steps),
        flops=(flops,) * steps,
        flops_until_saved=(0,) * steps,
        seconds=(float(flops),) * steps,
        seconds_until_saved=(0.0,) * steps,
        seconds_backward=(2.0 * flops,) * steps,
        blocks=tuple(step // 2 for step in range(steps)),
    )


def test_keeping_everything_holds_each_storage_once() -> None:
    # saved by steps 1..3: storages 0, 1, 2; then the gradients before and after step 3
    assert simulate(Plan.keep_all(4), uniform(4)).peak == 30 + 10 + 10
    assert simulate(Plan.keep_all(4), uniform(4)).recomputed_flops == 0


def test_a_segment_holds_its_inputs_and_is_recomputed() -> None:
    result = simulate(Plan(((0, 1), (2, 3))), uniform(4, flops=7))
    # at the recomputation's end: input 1 and what step 3 saves (2), two gradients
    assert result.peak == 10 + 10 + 20
    assert result.recomputed_flops == 14, "the last step of each segment stops before its kernel"


def test_inner_segments_run_three_times_but_the_last() -> None:
    flat = simulate(Plan(((0, 1, 2, 3),)), uniform(4)).recomputed_flops
    nested = simulate(Plan((((0, 1), 2, 3),)), uniform(4)).recomputed_flops
    handed_over = simulate(Plan(((0, 1, (2, 3)),)), uniform(4)).recomputed_flops
    assert (flat, nested, handed_over) == (3, 4, 3)


@settings(deadline=None, max_examples=150)
@given(chains())
def test_least_memory_is_the_least_of_all_plans_without_nesting(costs: StepCosts) -> None:
    plan = least_memory(costs)
    assert max(plan.runs()) <= 2
    assert simulate(plan, costs).peak == min(
        simulate(other, costs).peak for other in flat_plans(len(costs))
    )


@settings(deadline=None, max_examples=150)
@given(chains(), st.data())
def test_least_memory_knows_the_outputs_that_the_caller_holds(
    costs: StepCosts, data: st.DataObject
) -> None:
    """Some are made early and handed on to the end, such as a language model's cache of keys."""
    last = {storage: state for state, live in enumerate(costs.live) for storage in live}
    for step, saved in enumerate(costs.saved):
        last = dict.fromkeys(saved, step) | last
    early = data.draw(st.sets(st.sampled_from(sorted(last))) if last else st.just(set()))
    returned = costs.live[-1] | early
    costs = replace(costs, held_until_end=returned)
    least = min(simulate(other, costs).peak for other in flat_plans(len(costs)))
    assert simulate(least_memory(costs), costs).peak == least


@pytest.mark.parametrize("seed", range(40))
def test_of_equal_peaks_the_least_arithmetic_is_recomputed(seed: int) -> None:
    numbers = random.Random(seed)
    sizes, backward, flops = (tuple(numbers.choices(range(1, 10), k=7)) for _ in range(3))
    costs = replace(
        uniform(7),
        sizes=sizes,
        forward=sizes,
        backward=backward,
        gradients=(0, *sizes),
        flops=flops,
    )
    others = [simulate(other, costs) for other in flat_plans(7)]
    result = simulate(least_memory(costs), costs)
    least = min((other.peak, other.recomputed_flops) for other in others)
    assert (result.peak, result.recomputed_flops) == least


def test_the_work_of_least_memory_grows_with_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of segments fit at late steps: gradients of parameters come with the early ones."""
    work = {"PathLabel": 0, "simulate": 0}

    def count(name: str) -> None:
        call = getattr(search, name)

        def counted(*arguments: Any) -> Any:
            work[name] += 1
            return call(*arguments)

        monkeypatch.setattr(search, name, counted)

    count("PathLabel")
    count("simulate")
    gradients = tuple(10 + 3 * (400 - state) for state in range(401))
    flops = tuple(step % 2 for step in range(400))
    costs = replace(uniform(400), flops=flops, gradients=gradients)
    assert max(least_memory(costs).runs()) == 2
    # 28 labels a step; by all segments that fit it is 320, and 72 simulations
    assert work["PathLabel"] <= 40 * 400
    assert work["simulate"] <= 9


@settings(deadline=None, max_examples=50)
@given(costs=chains(6), plan=plans(6))
def test_simulation_releases_what_it_holds(costs: StepCosts, plan: Plan) -> None:
    steps = len(plan.flatten())
    if steps != len(costs):
        with pytest.raises(PlanError, match="covers"):
            simulate(plan, costs)
        return
    keep_all = simulate(Plan.keep_all(steps), costs)
    assert simulate(plan, costs).peak >= max(costs.backward) >= 0
    assert simulate(plan, costs).recomputed_flops >= keep_all.recomputed_flops == 0


@given(st.integers(1, 40), st.integers(1, 40))
def test_segments_are_of_equal_numbers_of_blocks(total: int, count: int) -> None:
    if count > total:
        with pytest.raises(ArgumentError, match=f"{count} segments; this model has {total} blocks"):
            schemes.segments(range(total), count)
        return
    plan = schemes.segments(range(total), count)
    sizes = [len(item) for item in plan if isinstance(item, tuple)]
    kept = total - sum(sizes)
    assert len(sizes) == count - 1
    assert max([*sizes, kept]) - min([*sizes, kept]) <= 1


def test_blocks_make_one_segment_each() -> None:
    assert schemes.each_block(uniform(5).blocks) == ((0, 1), (2, 3), 4)
    assert schemes.each_block([0, 1, 2, 2], whole={1, 2}) == (0, (1,), (2, 3))


def test_sqrt_makes_as_many_segments_as_the_root_of_the_blocks() -> None:
    plan = schemes.sqrt(uniform(18).blocks)  # nine blocks
    assert plan == (tuple(range(6)), tuple(range(6, 12)), *range(12, 18))


def test_cheap_never_repeats_arithmetic() -> None:
    costs = uniform(5)
    mixed = StepCosts(**{**vars(costs), "flops": (5, 0, 0, 5, 0)})
    assert schemes.cheap(mixed) == (0, (1, 2, 3), 4)
    assert simulate(schemes.cheap(mixed), mixed).recomputed_flops == 0


def test_an_unknown_scheme_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"'sqr' is no scheme.*Did you mean sqrt"):
        schemes.check_name("sqr")
