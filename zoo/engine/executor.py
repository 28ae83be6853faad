"""Runs the steps of a chain by a plan: kept steps as they are, segments through the engine."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from zoo.chain import State, Step, fold
from zoo.engine.recompute import Never, run_compiled_segment, segment, uncompiled
from zoo.planner.plan import Item, Plan

# frames of Python's stack that a segment in a segment takes, at most
FRAMES = 6
# frames that everything else may take: what Python allows to begin with
ROOM = 1000


def run_plan(plan: Plan, steps: Sequence[Step], inputs: State) -> Any:
    """Runs the steps over the inputs and returns what the last one returned.

    Raises:
        PlanError: the plan is for another number of steps; nothing has run.
    """
    plan.check(len(steps))
    frames = plan.depth() * FRAMES
    if frames > ROOM // 4:
        # for good: the backward needs them, too, later and on threads of its own
        sys.setrecursionlimit(max(sys.getrecursionlimit(), ROOM + frames))
    return _run(plan, steps, inputs)


def _run(items: Sequence[Item], steps: Sequence[Step], state: State) -> Any:
    value: Any = state
    for item in items:
        state = value if isinstance(value, tuple) else (value,)
        if isinstance(item, int):
            value = fold((steps[item],), state)
        else:
            with segment():
                value = _run(item, steps, state)
    return value


def run_compiled(
    plan: Plan, items: Sequence[tuple[int, ...]], steps: Sequence[Step], inputs: State
) -> Any:
    """Runs the steps inside a graph that `torch.compile` makes, segments by torch's checkpoint.

    `items` is the plan without nesting, each with a first entry that says whether it is a segment.
    What cannot be compiled runs by the plan, in a graph break.
    """
    if not torch.compiler.is_compiling():
        return uncompiled(run_plan)(plan, steps, inputs)
    value: Any = inputs
    try:
        for recomputes, *numbers in items:
            state = value if isinstance(value, tuple) else (value,)
            part = [steps[number] for number in numbers]
            value = run_compiled_segment(_fold, part, *state) if recomputes else fold(part, state)
    except Never:
        raise
    return value


def _fold(steps: Sequence[Step], *state: Any) -> Any:
    return fold(steps, state)
