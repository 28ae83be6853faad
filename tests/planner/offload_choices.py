"""Each item of a plan offloaded or not, by brute force on small chains, against the search.

    python -m tests.planner.offload_choices         60 random chains: some minutes

All plans without nesting are tried with all sets of their items (kept steps and segments) on the
host, within a budget of bytes on the device, one on the host, and a rate of copies; `simulate`
judges. Where no plan keeps to the budget, nothing is compared. Printed is for each way how often it
is slower than the best of all, and by how much of the baseline's time on average and at most:

    none      nothing is offloaded
    segments  all that segments start from, or nothing
    search    the sets that `zoo.planner.offload_choices` proposes for each plan, or nothing
    best      any set of items
"""

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence

from tests.planner.chains import flat_plans
from zoo.planner.costs import LEAST_OFFLOADED, CopyRate, StepCosts, simulate
from zoo.planner.offload_choices import Items, choices, segments_of
from zoo.planner.plan import Plan, first_step

STEPS = 4
WAYS = "none", "segments", "search", "best"
NOTHING: Items = frozenset()


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


def sets_of(
    plan: Plan, costs: StepCosts, copies: CopyRate, host_budget: int
) -> dict[str, Iterable[Items]]:
    """Returns the sets of items that each way tries with a plan."""
    firsts = [*map(first_step, plan)]
    return {
        "none": [NOTHING],
        "segments": [NOTHING, segments_of(plan)],
        "search": [NOTHING, *choices(plan, costs, len(costs), copies, host_budget)],
        "best": subsets(firsts),
    }


def subsets(items: Sequence[int]) -> Iterator[Items]:
    """Yields all subsets."""
    for count in range(len(items) + 1):
        yield from map(frozenset, itertools.combinations(items, count))


def times(costs: StepCosts, share: float, host: float, rate: float) -> dict[str, float]:
    """Returns the least time of each way as a ratio to the baseline's; infinite if none fits.

    `share` is the budget between the least peak and the baseline's, `host` that of the host as a
    share of all storages, `rate` the units of bytes that are copied in a second.
    """
    copies = CopyRate(rate * LEAST_OFFLOADED)
    plans = [*flat_plans(len(costs))]
    whole = simulate(Plan.keep_all(len(costs)), costs).peak
    least = min(simulate(plan, costs).peak for plan in plans)
    budget, on_host = least + share * (whole - least), int(host * sum(costs.sizes))
    spent = sum(costs.seconds) + sum(costs.seconds_backward)
    best = dict.fromkeys(WAYS, float("inf"))
    for plan in plans:
        for way, sets in sets_of(plan, costs, copies, on_host).items():
            for chosen in sets:
                found = simulate(plan, costs, offloads=chosen, copies=copies)
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
