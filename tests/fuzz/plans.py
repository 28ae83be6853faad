"""Plans of any nesting, drawn before anything is known of the model that they are for.

drawn    ((0, 1), 2), cuts 0.2 0.7      over 10 steps
fitted   ((0-1, 2-6), 7-9)
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.planner.test_plan import plans
from zoo.planner.plan import Item, Plan, RoomyPlan, first_step
from zoo.policy.judge import Sides
from zoo.policy.training_step import CountedStep
from zoo.tracing.planned_forward import PatchedForward


class Shape(NamedTuple):
    """A plan for ranges of steps, and where they end but for the last, as shares of all steps."""

    plan: Plan
    cuts: tuple[float, ...]


@st.composite
def shapes(draw: st.DrawFn, most: int) -> Shape:
    """Draws shapes of up to `most` ranges."""
    plan = draw(plans(most=most))
    count = len(plan.flatten()) - 1
    return Shape(plan, tuple(draw(st.lists(st.floats(0.01, 0.99), min_size=count, max_size=count))))


def stretched_plan(shape: Shape, steps: int) -> Plan:
    """Returns the plan for a number of steps; ranges and segments without any are left out."""
    bounds = [0, *sorted(int(cut * steps) for cut in shape.cuts), steps]
    ranges = [range(*ends) for ends in itertools.pairwise(bounds)]

    def fitted(items: Sequence[Item]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if isinstance(item, int):
                found += ranges[item]
            elif inner := fitted(item):
                found.append(tuple(inner))
        return found

    return Plan(fitted(shape.plan))


def offloaded_of(plan: Plan) -> frozenset[int]:
    """Returns two of three items of a plan, kept steps and segments."""
    items = [*map(first_step, plan)]
    return frozenset(items) - frozenset(items[2::3])


class Stretched(PatchedForward):
    """A forward by a drawn plan, fitted to the steps that the first training step shows.

    `zoo.checkpoint` does not take one: it asks for a plan of the user's ahead.
    """

    def _plans(self, step: CountedStep, sides: Sides) -> list[RoomyPlan]:
        plan = stretched_plan(self.goal.choice, step.steps)
        offloads = offloaded_of(plan) if self.goal.offload.is_on else frozenset()
        return [RoomyPlan(plan, offloads=offloads)]
