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
from typing import NamedTuple

from zoo.plan import Item, Plan, indices
from zoo.planner.costs import StepCosts

FORWARD, SECOND_RUN, BACKWARD = "forward", "second run", "backward"


class Moment(NamedTuple):
    """What the bytes of one tick are, each counted in one place.

    phase: "forward", "second run" or "backward".
    step: the step at work.
    kept: held since the first run, also by a caller who has what the chain returned.
    again: held by second runs, and not since the first.
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
    """What a plan costs: peak bytes of activations, and the work that it does again.

    `turns` is the peak in the backward of each item of the plan, `moment` the first tick whose
    bytes are the peak.
    """

    peak: int
    recomputed_flops: int
    recomputed_seconds: float
    turns: tuple[int, ...]
    moment: Moment


class _Tick(NamedTuple):
    phase: str
    step: int
    held: int
    state: int
    work: int
    gradient_of: int | None


def simulate(plan: Plan, costs: StepCosts) -> Simulation:
    """Runs a plan on paper.

    Raises:
        PlanError: the plan is for another number of steps.
    """
    plan.check(len(costs))
    clock = _Clock(costs)
    for item in plan:
        clock.first_run(item)
    peak, tick, kept = clock.peak, clock.tick, clock.tick.held
    clock.hold(costs.returned)
    turns: list[int] = []
    for item in reversed(plan):
        # nothing is held here that a second run made
        held = clock.held
        clock.give_away(item)
        clock.peak = 0
        clock.backward(item)
        turns.append(clock.peak)
        if clock.peak > peak:
            peak, tick, kept = clock.peak, clock.tick, held
    # an exact sum: plans that repeat equal steps in another order take equal time
    seconds = math.fsum(clock.seconds)
    moment = _moment(tick, kept, costs)
    return Simulation(peak, clock.flops, seconds, tuple(reversed(turns)), moment)


def least_possible(costs: StepCosts) -> int:
    """Returns bytes that every plan reaches: each step runs once and goes backward once.

    While it runs, its inputs and what it allocates are there. In its backward there are what it
    saved and what the chain returned, the gradient that it begins with, and what it allocates.
    Whatever else a plan holds comes on top, and so does what any other order of the same steps
    holds that keeps states on the device.
    """
    ahead = zip(costs.live[:-1], costs.forward, strict=True)
    forward = [costs.bytes_of(live) + new for live, new in ahead]
    behind = zip(costs.saved, costs.gradients[1:], costs.backward, strict=True)
    backward = [
        costs.bytes_of(saved | costs.returned) + gradient + new for saved, gradient, new in behind
    ]
    return max([*forward, *backward, 0])


def _moment(tick: _Tick, kept: int, costs: StepCosts) -> Moment:
    gradient = 0 if tick.gradient_of is None else costs.gradients[tick.gradient_of]
    again = tick.held - kept
    return Moment(
        tick.phase, tick.step, kept, again, tick.state, tick.work, gradient, tick.gradient_of
    )


class _Clock:
    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.holders: Counter[int] = Counter()
        self.held = 0
        self.peak = 0
        self.tick = _Tick(FORWARD, 0, 0, 0, 0, None)
        self.flops = 0
        self.seconds: list[float] = []

    def first_run(self, item: Item) -> None:
        if isinstance(item, int):
            self.run(item, FORWARD, None)
            self.hold(self.costs.saved[item])
            return
        steps = list(indices(item))
        self.hold(self.costs.live[steps[0]])
        for step in steps:
            self.run(step, FORWARD, None)

    def backward(self, item: Item) -> None:
        costs = self.costs
        if isinstance(item, int):
            self.note(BACKWARD, item, 0, costs.backward[item], item + 1)
            self.release(costs.saved[item])
            return
        steps = list(indices(item))
        self.second_run(item, steps[-1] + 1)
        for inner in reversed(item):
            self.backward(inner)
        self.release(costs.live[steps[0]])

    def second_run(self, segment: tuple[Item, ...], end: int) -> None:
        costs = self.costs
        for inner in segment[:-1]:
            if isinstance(inner, int):
                self.run_again(inner, end)
                self.hold(costs.saved[inner])
            else:
                steps = list(indices(inner))
                self.hold(costs.live[steps[0]])
                for step in steps:
                    self.run_again(step, end)
        last = segment[-1]
        if isinstance(last, int):
            state, work = self.extra(costs.live[last]), costs.forward_until_saved[last]
            self.note(SECOND_RUN, last, state, work, end)
            self.flops += costs.flops_until_saved[last]
            self.seconds.append(costs.seconds_until_saved[last])
            self.hold(costs.saved[last])
        else:
            self.hold(costs.live[next(indices(last))])

    def run(self, step: int, phase: str, end: int | None) -> None:
        self.note(phase, step, self.extra(self.costs.live[step]), self.costs.forward[step], end)

    def run_again(self, step: int, end: int) -> None:
        self.run(step, SECOND_RUN, end)
        self.flops += self.costs.flops[step]
        self.seconds.append(self.costs.seconds[step])

    def note(self, phase: str, step: int, state: int, work: int, end: int | None) -> None:
        """Notes the bytes of a tick; `end` is the state whose gradient is in hand."""
        total = self.held + state + work + (0 if end is None else self.costs.gradients[end])
        if total > self.peak:
            self.peak, self.tick = total, _Tick(phase, step, self.held, state, work, end)

    def extra(self, storages: Iterable[int]) -> int:
        return sum(self.costs.sizes[s] for s in storages if not self.holders[s])

    def hold(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if not self.holders[storage]:
                self.held += self.costs.sizes[storage]
            self.holders[storage] += 1

    def give_away(self, item: Item) -> None:
        """Leaves to the caller what a segment made and returned: a second run makes it once more.

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
