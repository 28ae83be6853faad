"""What the rule of offloading leaves to a search of each storage's place, on small chains."""

import statistics

import pytest

from tests.planner.offload_choices import WAYS, chain, excess, simulated
from zoo.planner.costs import AT_ONCE, simulate
from zoo.planner.plan import Plan


def test_storages_that_are_chosen_as_the_rule_does_cost_the_same() -> None:
    costs, plan = chain(0), Plan(((0,), (1, 2), (3,)))
    assert simulated(plan, costs, AT_ONCE, frozenset({1, 3})) == simulate(plan, costs, offload=4)
    # what kept steps save may go, too, and then the forward's end holds next to nothing
    kept = Plan.keep_all(4)
    saved = frozenset().union(*costs.saved)
    found = simulated(kept, costs, AT_ONCE, saved)
    assert found.peak < simulate(kept, costs, offload=4).peak
    assert found.offloaded == costs.bytes_of(saved)


@pytest.mark.parametrize("rate", [0.25, 4.0])
def test_a_choice_of_kept_storages_is_what_the_rule_misses(rate: float) -> None:
    found = excess(range(4), share=0.5, host=1.0, rate=rate)
    means = {way: statistics.mean(found[way]) for way in WAYS}
    assert means["best"] == 0 <= means["inputs"] <= means["rule"] <= means["none"]
    assert means["greedy"] <= means["none"]
