"""What is kept of forwards that no plan serves yet."""

import torch

from zoo.invocation import InputSpec, Invocation
from zoo.planner.step_events import StepEvents
from zoo.tracing.isolated_trace import StepTrace
from zoo.tracing.plan_cache import LastForward, PlanCache


def test_few_processes_wait_to_run_dry_steps() -> None:
    """Each is a copy of the training process; the kind that it is for may never come again."""
    cache = PlanCache()
    for size in range(1, 6):
        given, model = Invocation((torch.rand(size, 4),)), torch.nn.Linear(4, 4)
        trace = StepTrace(StepEvents(), [], has_loss=False, dry_step=lambda step: step)
        kind = cache.kind_of(InputSpec.of(given, model))
        cache.note_last_forward(kind, LastForward.of(given, trace, model))
    kept = [kind.last_forward for kind in cache.kinds.values()]
    waiting = [last is not None and last.trace.dry_step is not None for last in kept]
    assert waiting == [False, False, False, True, True], "the newest are planned for the first"
