"""Each storage kept, recomputed or offloaded, by brute force on small chains, against the rule.

    python -m tests.planner.offload_choices         60 random chains: some minutes

A plan without nesting says what is recomputed, and a set of storages what lies on the host: of what
segments start from, of what kept steps save, or of both. All plans are tried with all sets, within
a budget of bytes on the device, one on the host, and a rate of copies; `simulate` judges. Where no
plan keeps to the budget, nothing is compared. Printed is for each way how often it is slower than
the best of all, and by how much of the baseline's time on average and at most:

    none      nothing is offloaded
    rule      all that segments start from (what the engine does today), or nothing
    inputs    any of what segments start from
    greedy    for each plan storages one after the other, those of most bytes times idle steps first
    best      any storages of segments and of kept steps
"""

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from unittest import mock

from tests.planner.chains import flat_plans
from zoo.planner import costs as model
from zoo.planner.costs import LEAST_OFFLOADED, CopyRate, Simulation, StepCosts, simulate
from zoo.planner.plan import Item, Plan

STEPS = 4
WAYS = "none", "rule", "inputs", "greedy", "best"
NOTHING = frozenset[int]()


class Chosen(model._Offloading):
    """Offloads the chosen storages, also of kept steps."""

    chosen: frozenset[int]

    def held_by(self, item: Item) -> frozenset[int]:
        """Returns the chosen ones of an item."""
        if isinstance(item, int):
            return self.clock.costs.saved[item] & self.chosen
        return super().held_by(item) & self.chosen


def simulated(
    plan: Plan, costs: StepCosts, copies: CopyRate, chosen: frozenset[int] | None
) -> Simulation:
    """Simulates a plan with chosen storages on the host; None is the rule."""
    if chosen is None:
        return simulate(plan, costs, offload=len(costs), copies=copies)
    with (
        mock.patch.object(Chosen, "chosen", chosen, create=True),
        mock.patch.object(model, "_Offloading", Chosen),
    ):
        return simulate(plan, costs, offload=len(costs), copies=copies)


def chain(seed: int) -> StepCosts:
    """Makes a chain as of blocks: a step saves its input and up to two storages of its own."""
    numbers = random.Random(seed)
    sizes = [numbers.randint(1, 3) for _ in range(STEPS + 1)]
    saved = []
    for step in range(STEPS):
        own = range(len(sizes), len(sizes) + numbers.randint(0, 2))
        sizes += [numbers.randint(1, 6) for _ in own]
        saved.append(frozenset({step, *own}))
    made = [sizes[n + 1] + sum(sizes[s] for s in saved[n] if s > STEPS) for n in range(STEPS)]
    seconds = tuple(float(numbers.randint(1, 6)) for _ in range(STEPS))
    unit = tuple(LEAST_OFFLOADED * size for size in sizes)
    return StepCosts(
        sizes=unit,
        # the first state is the batch, which the program holds
        live=(NOTHING, *(frozenset({state}) for state in range(1, STEPS + 1))),
        saved=tuple(storages - {0} for storages in saved),
        forward=tuple(LEAST_OFFLOADED * size for size in made),
        forward_until_saved=tuple(LEAST_OFFLOADED * size for size in made),
        backward=unit[:STEPS],
        gradients=unit[: STEPS + 1],
        flops=(1,) * STEPS,
        flops_until_saved=(1,) * STEPS,
        seconds=seconds,
        seconds_until_saved=seconds,
        seconds_backward=tuple(2 * second for second in seconds),
        blocks=tuple(range(STEPS)),
    )


def sets_of(plan: Plan, costs: StepCosts, copies: CopyRate) -> dict[str, Iterable[frozenset[int]]]:
    """Returns the sets of storages that each way tries with a plan; None in one is the rule."""
    inputs = frozenset(next(iter(model.indices(item))) for item in plan if isinstance(item, tuple))
    inputs -= {0}
    kept = frozenset().union(*(costs.saved[item] for item in plan if isinstance(item, int)))

    def idle(storage: int) -> float:
        born = (
            storage
            if storage <= STEPS
            else next(n for n, s in enumerate(costs.saved) if storage in s)
        )
        return costs.sizes[storage] * (STEPS - born)

    order = sorted(inputs | kept, key=idle, reverse=True)
    return {
        "none": [NOTHING],
        "inputs": subsets(inputs),
        "greedy": [frozenset(order[:count]) for count in range(len(order) + 1)],
        "best": subsets(inputs | kept),
    }


def subsets(storages: Iterable[int]) -> Iterator[frozenset[int]]:
    """Yields all subsets."""
    found = sorted(storages)
    for count in range(len(found) + 1):
        yield from map(frozenset, itertools.combinations(found, count))


def times(costs: StepCosts, share: float, host: float, rate: float) -> dict[str, float]:
    """Returns the least time of each way as a ratio to the baseline's; empty if none fits.

    `share` is the budget between the least peak and the baseline's, `host` that of the host as a
    share of all storages, `rate` the units of bytes that are copied in a second.
    """
    copies = CopyRate(rate * LEAST_OFFLOADED)
    plans = [*flat_plans(len(costs))]
    whole = simulate(Plan.keep_all(len(costs)), costs).peak
    least = min(simulate(plan, costs).peak for plan in plans)
    budget, on_host = least + share * (whole - least), host * sum(costs.sizes)
    spent = sum(costs.seconds) + sum(costs.seconds_backward)
    best = dict.fromkeys(WAYS, float("inf"))
    for plan in plans:
        for way, sets in {**sets_of(plan, costs, copies), "rule": [NOTHING, None]}.items():
            for chosen in sets:
                found = simulated(plan, costs, copies, chosen)
                if found.peak <= budget and found.offloaded <= on_host:
                    time = 1 + (found.recomputed_seconds + found.waited_seconds) / spent
                    best[way] = min(best[way], time)
    return best


def excess(seeds: Sequence[int], **bounds: float) -> dict[str, list[float]]:
    """Returns by how much each way is slower than the best, for each chain."""
    found = [times(chain(seed), **bounds) for seed in seeds]
    return {way: [time[way] - time["best"] for time in found] for way in WAYS}


def main() -> None:
    """Prints the comparison."""
    for host, rate in itertools.product((1.0, 0.25), (1.0, 4.0)):
        found = excess(range(60), share=0.5, host=host, rate=rate)
        parts = [
            f"{way} {sum(value > 1e-9 for value in values)} x{statistics.mean(values):.3f} "
            f"x{max(values):.3f}"
            for way, values in found.items()
        ]
        print(f"host {host}, rate {rate}: {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
