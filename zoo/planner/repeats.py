"""Runs of equal parts in a chain, such as the layers of a transformer: solved once, used for each.

A run is a part of `period` steps and what repeats it, up to a state `stop`, the last repetition
perhaps in part. Two parts are equal where their steps cost the same and their states and saved
tensors are the same sets of storages but for the storages' numbers, and where all gradients of the
later one are smaller by the same bytes: the backward has not come to as many parameters yet.

    states     0   1   2   3   4   5   6   7   8   9
                   start   |       |       |   stop
    run            a   b   a   b   a   b   a   b
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Iterator, Sequence
from typing import NamedTuple

from zoo.planner.costs import StepCosts

# starts of a part that are tried as that of the next one
TRIED = 8
# parts of a run, at least: to find the values of few ends at a time takes longer
PARTS = 6


class Run(NamedTuple):
    """Equal parts in a row; each state after the first part is a copy of one in it.

    grown: bytes by which the gradients of a part are more than those of the next one.
    """

    start: int
    period: int
    stop: int
    grown: int

    def copies(self, state: int) -> range:
        """Returns the states that are copies of one of the first part, itself the first."""
        return range(state, self.stop, self.period)


def runs_of(costs: StepCosts, marked: Container[int]) -> list[Run]:
    """Returns runs that do not overlap, in order; copies of a marked state are marked."""
    keys = list(_keys(costs, marked))
    places = defaultdict[Hashable, list[int]](list)
    for step, key in enumerate(keys):
        places[key].append(step)
    runs: list[Run] = []
    start = 0
    while start < len(costs):
        same = places[keys[start]]
        after = bisect_right(same, start)
        tried = (
            _run(costs, keys, marked, start, other - start) for other in same[after : after + TRIED]
        )
        found = max(tried, key=lambda run: (run.stop, -run.period), default=None)
        if found is None or found.stop - start < PARTS * found.period:
            start += 1
        else:
            runs.append(found)
            start = found.stop
    return runs


def in_order(storages: Collection[int], costs: StepCosts) -> list[int]:
    """Returns storages so that those of equal parts have the same places.

    By size first: the input of the first layer may be older than what all layers share.
    """
    return sorted(storages, key=lambda storage: (costs.sizes[storage], storage))


def _keys(costs: StepCosts, marked: Container[int]) -> Iterator[Hashable]:
    numbers = zip(
        costs.forward,
        costs.forward_until_saved,
        costs.backward,
        costs.flops,
        costs.flops_until_saved,
        costs.seconds,
        costs.seconds_until_saved,
        strict=True,
    )
    for step, entry in enumerate(numbers):
        live, saved = (
            tuple(sorted(map(costs.sizes.__getitem__, storages)))
            for storages in (costs.live[step], costs.saved[step])
        )
        yield entry, live, saved, step in marked


def _run(
    costs: StepCosts, keys: Sequence[Hashable], marked: Container[int], start: int, period: int
) -> Run:
    """Returns the longest run of this start and period; where nothing repeats it is short."""
    live, saved, gradients = costs.live, costs.saved, costs.gradients
    grown = gradients[start + 1] - gradients[start + 1 + period]
    names: tuple[dict[int, int], dict[int, int]] = {}, {}

    def is_same(some: Collection[int], others: Collection[int]) -> bool:
        pairs = zip(in_order(some, costs), in_order(others, costs), strict=True)
        return all(
            names[0].setdefault(one, other) == other and names[1].setdefault(other, one) == one
            for one, other in pairs
        )

    state, other = start, start + period
    while (
        other < len(costs)
        and keys[state] == keys[other]
        and is_same(live[state], live[other])
        and is_same(saved[state], saved[other])
        and gradients[state + 1] - gradients[other + 1] == grown
    ):
        state, other = state + 1, other + 1
    # what ends at a state does not depend on what it holds, but on whether it is marked
    while state > start and (state in marked) != (other in marked):
        state, other = state - 1, other - 1
    return Run(start, period, other, grown)
