"""Says in words what `checkpoint=True` saves of a training step, and what holds its peak.

Each sentence is about a part of the predicted peak that no plan lowers, with its bytes and the way
out. The largest comes first.
"""

from collections.abc import Iterator

from zoo.planner.plan import indices
from zoo.planner.step_events import KernelRun
from zoo.policy.budget import StepPlanner
from zoo.policy.plan_report import Point
from zoo.units import format_bytes

# the least share of a peak that is worth a sentence, and the least saving that is one
WORTH, LEAST = 0.15, 0.03
Part = tuple[int, str]


def savings_of(planner: StepPlanner) -> tuple[str, ...]:
    """Returns the sentences on a step, by the bytes of tensors: the first says what is saved."""
    point, baseline = planner.least_once, planner.baseline
    first = (
        f"checkpoint=True takes a training step from {format_bytes(baseline.peak)} to "
        f"{format_bytes(point.peak)} ({point.peak / baseline.peak:.0%}), and recomputes "
        f"{point.recomputed_share:.0%} of the forward's operations. What is left:"
    )
    if point.peak >= (1 - LEAST) * baseline.peak:
        point = baseline
        first = (
            "checkpoint=True saves next to nothing of a training step, which takes "
            f"{format_bytes(baseline.peak)}. What it is made of:"
        )
    parts = sorted(_parts(planner, point), reverse=True)
    return first, *(text for size, text in parts if size >= WORTH * point.peak)


def _parts(planner: StepPlanner, point: Point) -> Iterator[Part]:
    """Yields the bytes of each part at a plan's peak, with the sentence on it."""
    at, step = planner.judge.at_peak(point), planner.judge.bytes_at_peak(point)
    weights = at.parameters + at.buffers + at.optimizer + at.gradients
    in_backward = planner.step.training.optimizer_in_backward
    frees = "" if in_backward else "zoo.optimizer_in_backward frees gradients, "
    yield (
        weights,
        f"{format_bytes(weights)} are weights, their gradients and the optimizer's state, which no "
        f"plan changes: {frees}another optimizer has less state, FSDP2 shards all three.",
    )
    if "optimizer" in at.moment:
        return
    outline = planner.step.outline
    number = outline.step_of(step.operator)
    is_loss = number == planner.step.steps
    line = "" if is_loss else outline.lines[number]
    where = f"{at.moment}{f' ({line})' if line else ''}"
    way_out = (
        "a loss in parts, as of zoo's language models, takes less"
        if is_loss
        else "it is one step, with no place between to recompute from; parts that run one after "
        "the other, as of the batch, take less"
    )
    work = at.work + at.between - step.unread
    yield work, f"{format_bytes(work)} are made by one kernel or module, {where}: {way_out}."
    yield (
        step.remaining,
        f"{format_bytes(step.remaining)} are results that the model keeps after its forward, as in "
        "attributes: keep a number or a small copy in their place.",
    )
    yield (
        step.returned,
        f"{format_bytes(step.returned)} are what the model returns, held by the program's "
        "variables until the backward is over: write loss(model(x)).backward(), and pass "
        "holds_outputs=False.",
    )
    yield (
        step.unread,
        f"{format_bytes(step.unread)} are held by variables of the forward that no kernel reads "
        "any more: `del` them where they end.",
    )
    unrepeatable = _unrepeatable(planner, point, number)
    yield (
        unrepeatable,
        f"{format_bytes(unrepeatable)} are results of kernels that may not repeat their own bits, "
        "or whose operators are not torch's own: they are kept.",
    )
    kept = at.kept - step.remaining - step.returned - unrepeatable
    yield (
        kept,
        f"{format_bytes(kept)} are kept from the forward, for kernels to be recomputed from: "
        "zoo.plan and zoo.frontier know plans that keep less and recompute more than once.",
    )


def _unrepeatable(planner: StepPlanner, point: Point, last: int) -> int:
    """Returns the bytes that segments up to a step keep, since no replay makes them again."""
    segments = (item for item in point.plan if isinstance(item, tuple))
    inside = {step for segment in segments for step in indices(segment) if step <= last}
    outline, events, kept = planner.step.outline, planner.step.profile.events, set[int]()
    for operator, event in events.forward:
        if isinstance(event, KernelRun) and outline.step_of(operator) in inside:
            kept |= event.keeps
    return sum(events.sizes[storage] for storage in kept)
