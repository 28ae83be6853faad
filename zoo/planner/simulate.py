"""What a plan costs: the definition by which every planner is judged.

The clock moves step by step as the engine does: the forward of all steps, then the backward from
the last item to the first, where a segment is recomputed before its steps' backwards. At each tick
the bytes are: what is held for later, the state in hand, what the step itself allocates, and in the
backward the gradient of the state.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zoo.planner.costs import StepCosts
from zoo.planner.plan import Item, Plan, indices

FORWARD, SECOND_RUN, BACKWARD = "forward", "second run", "backward"


class Moment(NamedTuple):
    """What the bytes of one tick are, each counted in one place.

    phase: "forward", "second run" (a recomputation) or "backward".
    step: the step at work.
    kept: held since the forward, also by a caller who has what the chain returned.
    again: held by recomputations, and not since the forward.
    state: the state in hand, where nobody holds it.
    work: the most that the step at work allocates: what it returns, saves and needs meanwhile.
    gradient: the gradient of state `gradient_of`, with those of parameters if the costs have them.
    gradient_of: None in the forward.
    """

    phase: str
    step: int
    kept: int
    again: int
    state: int
    work: int
    gradient: int
    gradient_of: int | None


@dataclass(frozen=True)
class Simulation:
    """What a plan costs: peak bytes of activations, and the work that it recomputes.

    `turns` is the peak in the backward of each item of the plan, `moment` the first tick whose
    bytes are the peak.
    """

    peak: int
    recomputed_flops: int
    recomputed_seconds: float
    turns: tuple[int, ...]
    moment: Moment


def simulate(plan: Plan, costs: StepCosts) -> Simulation:
    """Returns what a plan costs, without running it.

    Raises:
        PlanError: the plan is for another number of steps.
    """
    plan.check(len(costs))
    clock = _Clock(costs)
    clock.run(plan)
    peaks = [(clock.peak, clock.moment)]
    clock.hold(costs.returned)
    for item in reversed(plan):
        # nothing is held here that was recomputed
        clock.kept, clock.peak = clock.held, 0
        clock.give_away(item)
        clock.backward(item)
        peaks.append((clock.peak, clock.moment))
    peak, moment = max(peaks, key=operator.itemgetter(0))
    turns = tuple(turn for turn, _ in reversed(peaks[1:]))
    # an exact sum: plans that repeat equal steps in another order take equal time
    return Simulation(peak, clock.flops, math.fsum(clock.seconds), turns, moment)


def least_possible(costs: StepCosts) -> int:
    """Returns bytes that every plan reaches: each step runs once and goes backward once.

    While it runs, its inputs and what it allocates are there. In its backward there are what it
    saved and what the chain returned, the gradient that it begins with, and what it allocates.
    Whatever else a plan holds comes on top, and so does what any other order of the same steps
    holds that keeps states on the device.
    """
    peaks = [0]
    for step, (live, saved) in enumerate(zip(costs.live, costs.saved, strict=False)):
        behind = costs.bytes_of(saved | costs.returned) + costs.gradients[step + 1]
        peaks += costs.bytes_of(live) + costs.forward[step], behind + costs.backward[step]
    return max(peaks)


class _Clock:
    """What is held at a time, by how many, and the highest tick since `peak` was last set to 0."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.holders: Counter[int] = Counter()
        self.held = self.kept = self.peak = self.flops = 0
        self.moment = Moment(FORWARD, 0, 0, 0, 0, 0, 0, None)
        self.seconds: list[float] = []

    def run(self, items: Sequence[Item], end: int | None = None) -> None:
        """Runs the forward of items; in a recomputation the gradient of state `end` is in hand."""
        costs = self.costs
        phase = FORWARD if end is None else SECOND_RUN
        for item in items:
            steps = (item,) if isinstance(item, int) else tuple(indices(item))
            if isinstance(item, tuple):
                self.hold(costs.live[steps[0]])
            for step in steps:
                self.tick(phase, step, self.extra(costs.live[step]), costs.forward[step], end)
                if end is not None:
                    self.flops += costs.flops[step]
                    self.seconds.append(costs.seconds[step])
            if isinstance(item, int):
                self.hold(costs.saved[item])

    def backward(self, item: Item) -> None:
        costs = self.costs
        if isinstance(item, int):
            self.tick(BACKWARD, item, 0, costs.backward[item], item + 1)
            self.release(costs.saved[item])
            return
        steps = tuple(indices(item))
        last, end = item[-1], steps[-1] + 1
        self.run(item[:-1], end)
        if isinstance(last, tuple):
            # it is handed over without running it
            self.hold(costs.live[next(indices(last))])
        else:
            work = costs.forward_until_saved[last]
            self.tick(SECOND_RUN, last, self.extra(costs.live[last]), work, end)
            self.flops += costs.flops_until_saved[last]
            self.seconds.append(costs.seconds_until_saved[last])
            self.hold(costs.saved[last])
        for inner in reversed(item):
            self.backward(inner)
        self.release(costs.live[steps[0]])

    def tick(self, phase: str, step: int, state: int, work: int, end: int | None) -> None:
        """Notes the bytes of a moment; `end` is the state whose gradient is in hand."""
        gradient = 0 if end is None else self.costs.gradients[end]
        total = self.held + state + work + gradient
        if total > self.peak:
            self.peak, kept = total, self.held if end is None else self.kept
            again = self.held - kept
            self.moment = Moment(phase, step, kept, again, state, work, gradient, end)

    def extra(self, storages: Iterable[int]) -> int:
        return sum(self.costs.sizes[s] for s in storages if not self.holders[s])

    def hold(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if not self.holders[storage]:
                self.held += self.costs.sizes[storage]
            self.holders[storage] += 1

    def give_away(self, item: Item) -> None:
        """Leaves to the caller what a segment made and returned: recomputing makes it once more.

        Its bytes stay. Nobody else holds it: all that came after the segment is done.
        """
        if isinstance(item, tuple):
            found, returned = self.costs.live[next(indices(item))], self.costs.returned
            made = {s for step in indices(item) for s in self.costs.live[step + 1]}
            for storage in (made - found) & returned:
                self.holders[storage] = 0

    def release(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.holders[storage] -= 1
            if not self.holders[storage]:
                self.held -= self.costs.sizes[storage]
