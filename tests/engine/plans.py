"""Plans whose segments are calls of `zoo.recompute`, one inside of another."""

from collections.abc import Callable, Sequence
from typing import Any

import zoo
from zoo.planner.plan import Item, Plan

Step = Callable[..., Any]


def run_plan(plan: Plan, steps: Sequence[Step], inputs: tuple[Any, ...]) -> Any:
    """Runs steps over a state, each tuple of the plan as a segment; returns what the last did."""
    plan.check(len(steps))
    return _run(plan, steps, *inputs)


def _run(items: Sequence[Item], steps: Sequence[Step], *state: Any) -> Any:
    value: Any = state
    for item in items:
        state = value if isinstance(value, tuple) else (value,)
        if isinstance(item, int):
            value = steps[item](*state)
        else:
            value = zoo.recompute(_run, item, steps, *state)
    return value
