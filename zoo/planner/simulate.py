"""What a plan costs: the definition by which every planner is judged.

The clock moves step by step as the engine does: the first run of all steps, then the backward from
the last item to the first, where a segment runs again before its steps' backwards. At each tick the
bytes are: what is held for later, the state in hand, what the step itself allocates, and in the
backward the gradient of the state.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from zoo.plan import Item, Plan, indices
from zoo.planner.costs import StepCosts


@dataclass(frozen=True)
class Simulation:
    """What a plan costs: peak bytes of activations, and the work that it does again.

    `turns` is the peak in the backward of each item of the plan.
    """

    peak: int
    recomputed_flops: int
    recomputed_seconds: float
    turns: tuple[int, ...]


def simulate(plan: Plan, costs: StepCosts) -> Simulation:
    """Runs a plan on paper.

    Raises:
        PlanError: the plan is for another number of steps.
    """
    plan.check(len(costs))
    clock = _Clock(costs)
    for item in plan:
        clock.first_run(item)
    forward = clock.peak
    clock.hold(costs.returned)
    turns: list[int] = []
    for item in reversed(plan):
        clock.peak = 0
        clock.backward(item)
        turns.append(clock.peak)
    peak = max(forward, *turns, 0)
    # an exact sum: plans that repeat equal steps in another order take equal time
    return Simulation(peak, clock.flops, math.fsum(clock.seconds), tuple(reversed(turns)))


class _Clock:
    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.holders: Counter[int] = Counter()
        self.held = 0
        self.peak = 0
        self.flops = 0
        self.seconds: list[float] = []

    def first_run(self, item: Item) -> None:
        if isinstance(item, int):
            self.run(item, 0)
            self.hold(self.costs.saved[item])
            return
        steps = list(indices(item))
        self.hold(self.costs.live[steps[0]])
        for step in steps:
            self.run(step, 0)

    def backward(self, item: Item) -> None:
        costs = self.costs
        if isinstance(item, int):
            self.note(costs.gradients[item + 1] + costs.backward[item])
            self.release(costs.saved[item])
            return
        steps = list(indices(item))
        self.second_run(item, costs.gradients[steps[-1] + 1])
        for inner in reversed(item):
            self.backward(inner)
        self.release(costs.live[steps[0]])

    def second_run(self, segment: tuple[Item, ...], gradient: int) -> None:
        costs = self.costs
        for inner in segment[:-1]:
            if isinstance(inner, int):
                self.run_again(inner, gradient)
                self.hold(costs.saved[inner])
            else:
                steps = list(indices(inner))
                self.hold(costs.live[steps[0]])
                for step in steps:
                    self.run_again(step, gradient)
        last = segment[-1]
        if isinstance(last, int):
            self.note(self.extra(costs.live[last]) + costs.forward_until_saved[last] + gradient)
            self.flops += costs.flops_until_saved[last]
            self.seconds.append(costs.seconds_until_saved[last])
            self.hold(costs.saved[last])
        else:
            self.hold(costs.live[next(indices(last))])

    def run(self, step: int, gradient: int) -> None:
        self.note(self.extra(self.costs.live[step]) + self.costs.forward[step] + gradient)

    def run_again(self, step: int, gradient: int) -> None:
        self.run(step, gradient)
        self.flops += self.costs.flops[step]
        self.seconds.append(self.costs.seconds[step])

    def note(self, above: int) -> None:
        self.peak = max(self.peak, self.held + above)

    def extra(self, storages: Iterable[int]) -> int:
        return sum(self.costs.sizes[s] for s in storages if not self.holders[s])

    def hold(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if not self.holders[storage]:
                self.held += self.costs.sizes[storage]
            self.holders[storage] += 1

    def release(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.holders[storage] -= 1
            if not self.holders[storage]:
                self.held -= self.costs.sizes[storage]
