"""Runs the steps of a chain by a plan: kept steps as they are, segments through the engine."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as compiled_checkpoint

from zoo.chain import State, Step
from zoo.engine.ambient import Ambient
from zoo.engine.recompute import run_segment
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
        elif torch.compiler.is_compiling():
            inner = functools.partial(_run, item, steps, ambient)
            value = compiled_checkpoint(inner, *state, use_reentrant=False)
        else:
            roots = [steps[step] for step in indices(item)]
            inner = functools.partial(_run, item, steps, ambient)
            value = run_segment(inner, state, ambient, roots)
    return value
