from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import nn

from zoo.invocation import InputSpec, Invocation
from zoo.tracing.isolated_trace import StepTrace, step_trace_of


def tracing_once(
    known: dict[Any, tuple[nn.Module, StepTrace]], name_of: Callable[[nn.Module], Any]
) -> Callable[..., StepTrace]:
    """Returns what traces a step unless `known` has one of a model with that name."""

    def trace_of(
        model: nn.Module, given: Invocation, loss: Any = None, blocks: Sequence[str] = ()
    ) -> StepTrace:
        # the last of the structure is an optimizer in the backward, of which a trace knows nothing
        structure, sizes = InputSpec.of(given, model)
        key = name_of(model), structure[:-1], sizes, loss, tuple(blocks)
        if key not in known:
            known[key] = model, step_trace_of(model, given, loss, blocks)
        return known[key][1]

    return trace_of


@pytest.fixture
def traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces a model once for all plans that a test puts in force on it."""
    monkeypatch.setattr("zoo.tracing.planned_forward.step_trace_of", tracing_once({}, id))
