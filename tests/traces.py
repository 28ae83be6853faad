"""One trace of a step for several tests."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zoo.invocation import InputSpec, Invocation
from zoo.tracing.isolated_trace import StepTrace, step_trace_of

Traces = dict[Any, tuple[nn.Module, StepTrace]]


def tracing_once(known: Traces, name_of: Callable[[nn.Module], Any]) -> Callable[..., StepTrace]:
    """Returns what traces a step unless `known` has one of a model with that name."""

    def trace_of(
        model: nn.Module,
        given: Invocation,
        loss: Any = None,
        blocks: Sequence[str] = (),
        **options: bool,
    ) -> StepTrace:
        # the last of the structure is an optimizer in the backward, of which a trace knows nothing
        structure, sizes = InputSpec.of(given, model)
        key = name_of(model), structure[:-1], sizes, loss, tuple(blocks), (*options.items(),)
        if key not in known:
            known[key] = model, step_trace_of(model, given, loss, blocks, **options)
        return known[key][1]

    return trace_of
