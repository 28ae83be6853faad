"""The search for items to offload against brute force on small chains."""

import statistics

import pytest

from tests.planner.offload_choices import WAYS, chain, excess
from zoo.planner.costs import AT_ONCE, simulate
from zoo.planner.offload_choices import COUNT, choices
from zoo.planner.plan import Plan


def test_what_kept_steps_save_lies_on_the_host() -> None:
    costs, kept = chain(0), Plan.keep_all(4)
    found = simulate(kept, costs, offloads=range(4))
    # the last ones leave at the end of the forward and are under way when the backward begins
    assert found.offloaded == costs.bytes_of(frozenset().union(*costs.saved))
    assert found.peak < simulate(kept, costs).peak
    assert found.on_host == tuple(map(sum, zip(*(on_host(n) for n in range(4)), strict=True)))


def on_host(step: int) -> tuple[int, ...]:
    """Returns what lies there if one kept step is offloaded."""
    return simulate(Plan.keep_all(4), chain(0), offloads=[step]).on_host


@pytest.mark.parametrize("rate", [0.25, 4.0])
def test_the_search_is_between_the_segments_and_the_best(rate: float) -> None:
    found = excess(range(6), share=0.5, host=1.0, rate=rate)
    means = {way: statistics.mean(found[way]) for way in WAYS}
    assert means["best"] == 0 <= means["search"] <= means["segments"] <= means["none"]
    assert means["search"] <= means["none"] / 2


def test_a_small_budget_of_the_host_is_used() -> None:
    costs, kept = chain(1), Plan.keep_all(4)
    # the sizes of all items that could go; the least of them is all that the host has room for
    least = min(size for n in range(4) if (size := simulate(kept, costs, offloads=[n]).offloaded))

    def within(host_budget: int | None) -> bool:
        sets = choices(kept, costs, 4, AT_ONCE, host_budget)
        return any(simulate(kept, costs, offloads=s).offloaded <= least for s in sets)

    assert within(least)
    assert not within(None)


def test_so_many_sets_are_tried_at_most() -> None:
    for plan in (Plan.keep_all(4), Plan(((0,), 1, (2, 3)))):
        sets = choices(plan, chain(1), 4, AT_ONCE, 1)
        assert len(sets) <= COUNT
        assert frozenset() not in sets
