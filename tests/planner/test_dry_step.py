"""The bytes of a training step, from the log of a dry step."""

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from zoo.planner.costs import BACKWARD, FORWARD, RECOMPUTE
from zoo.planner.dry_step import (
    ForwardEnd,
    Gradients,
    KernelRates,
    Made,
    Ran,
    Row,
    StepBytes,
    There,
    bytes_of_step,
)
from zoo.planner.step_events import Freed, Gradient

FORM = ((4,), "float32")
# a segment of two kernels: 1 is replayed for the backward, which makes the gradient 4
LOG: list[Row] = [
    Made(0, 100, False),
    Ran(0, 0, False),
    Made(1, 40, False),
    Ran(1, 1, False),
    Freed(1),
    ForwardEnd(),
    Made(2, 7, False),
    Ran(2, 9, False),
    Made(3, 40, True),
    Ran(1, 1, True),
    Made(4, 16, False),
    Ran(3, 1, False),
    Freed(3),
    Freed(2),
    Gradient(4, FORM),
    Freed(0),
]
RATES = KernelRates([0, 5, 0, 60], [1.0, 2.0, 4.0, 8.0], [10, 20, 40, 80])


OF_ONE = Gradients(16)


def counted(log: list[Row], gradients: Gradients = OF_ONE, unit: int = 1) -> StepBytes:
    return bytes_of_step(log, lambda size: -(-size // unit) * unit, RATES, gradients)


def test_each_part_of_the_peak_is_counted_once() -> None:
    step = counted(LOG)
    assert step.peak == 100 + 7 + 40 + 16 + 60
    assert (step.phase, step.operator) == (BACKWARD, 1)
    assert (step.kept, step.recomputed, step.between, step.work) == (100, 40, 7 + 16, 60)
    assert step.gradients == 0, "that of the parameter is complete later"
    # what is replayed costs time once more
    assert (step.seconds, step.flops) == (2.0, 20)
    assert step.held == 0


def test_workspaces_decide_where_the_peak_is() -> None:
    forward = replace(RATES, workspaces=[0, 300, 0, 0])
    step = bytes_of_step(LOG, int, forward, Gradients(16))
    assert (step.phase, step.work, step.peak) == (RECOMPUTE, 300, 100 + 7 + 40 + 300)
    step = bytes_of_step(LOG[:5], int, forward, Gradients(0))
    assert (step.phase, step.peak) == (FORWARD, 440)


def test_storages_are_counted_in_blocks() -> None:
    assert counted(LOG, unit=64).peak == 128 + 64 + 64 + 64 + 60


def test_gradients_live_to_the_end_or_not() -> None:
    late: list[Row] = [*LOG, Made(5, 200, False), Ran(0, 0, False)]
    kept = counted(late)
    assert (kept.peak, kept.gradients, kept.activations) == (223, 0, 223)
    kept = counted([*late, Made(6, 50, False)])
    assert (kept.peak, kept.gradients, kept.activations) == (266, 16, 250)
    for freed in (Gradients(16, {FORM: 0}), Gradients(16, accumulates=True)):
        step = counted([*late, Made(6, 50, False)], freed)
        assert (step.peak, step.gradients) == (250, 0)
    # an optimizer in the backward takes memory when a gradient is complete
    assert counted(LOG, Gradients(16, {FORM: 150})).peak == 100 + 16 + 150
    # gradients of parameters that the step does not use are there
    assert counted(LOG, Gradients(36)).peak == counted(LOG).peak + 20


def test_what_takes_the_place_of_a_buffer_counts_as_that() -> None:
    log: list[Row] = [There(0, 90), Made(1, 90, False), Freed(0), Made(2, 10, False), ForwardEnd()]
    step = counted(log, Gradients(0))
    assert (step.peak, step.held) == (90, 10)


sizes = st.integers(1, 50)


@settings(max_examples=60)
@given(st.lists(st.tuples(sizes, st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_the_peak_is_the_most_that_is_alive_at_a_time(
    made: list[tuple[int, int, bool]],
) -> None:
    """Each storage lives for some rows; a recount of all moments gives the same."""
    log: list[Row] = []
    ends: dict[int, list[int]] = {}
    alive, most = dict[int, int](), 0
    for number, (size, life, is_replayed) in enumerate(made):
        for storage in ends.pop(number, ()):
            log.append(Freed(storage))
            del alive[storage]
        log.append(Made(number, size, is_replayed))
        alive[number] = size
        ends.setdefault(number + 1 + life, []).append(number)
        most = max(most, sum(alive.values()))
        if number == len(made) // 2:
            log.append(ForwardEnd())
    step = counted(log, Gradients(0))
    assert step.peak == most == step.kept + step.recomputed + step.between
    assert step.held == sum(alive.values())
