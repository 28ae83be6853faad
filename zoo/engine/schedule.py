"""Runs the steps of a chain by a plan: kept steps as they are, segments through the engine."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as compiled_checkpoint

from zoo.chain import State, Step, fold
from zoo.engine.ambient import Ambient
from zoo.engine.recompute import Never, compiled_only, run_segment
from zoo.plan import Item, Plan, indices


def run_plan(plan: Plan, steps: Sequence[Step], inputs: State) -> Any:
    """Runs the steps over the inputs and returns what the last one returned.

    Raises:
        PlanError: the plan is for another number of steps; nothing has run.
    """
    plan.check(len(steps))
    return _run(plan, steps, Ambient.capture(inputs), *inputs)


def _run(items: Sequence[Item], steps: Sequence[Step], ambient: Ambient, *state: Any) -> Any:
    value: Any = state
    for item in items:
        state = value if isinstance(value, tuple) else (value,)
        if isinstance(item, int):
            value = steps[item](*state)
        else:
            roots = [steps[step] for step in indices(item)]
            inner = functools.partial(_run, item, steps, ambient)
            value = run_segment(inner, state, ambient, roots)
    return value


def run_compiled(
    plan: Plan, items: Sequence[tuple[int, ...]], steps: Sequence[Step], inputs: State
) -> Any:
    """Runs the steps inside a graph that `torch.compile` makes, segments by torch's checkpoint.

    `items` is the plan without nesting, each with a first entry that says whether it is a segment.
    What cannot be compiled runs by the plan, in a graph break.
    """
    if not torch.compiler.is_compiling():
        # without `disable` single steps were compiled, but not in their second runs
        return torch.compiler.disable(run_plan)(plan, steps, inputs)  # type: ignore[no-untyped-call]
    value: Any = inputs
    try:
        for again, *numbers in items:
            state = value if isinstance(value, tuple) else (value,)
            part = [steps[number] for number in numbers]
            if again:
                inner = functools.partial(compiled_only, _fold, part)
                value = compiled_checkpoint(inner, *state, use_reentrant=False)
            else:
                value = fold(part, state)
    except Never:
        raise
    return value


def _fold(steps: Sequence[Step], *state: Any) -> Any:
    return fold(steps, state)
