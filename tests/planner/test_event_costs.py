"""Costs of steps from events that are written by hand: no tensor, no model."""

from dataclasses import replace

import pytest

from zoo.planner.costs import StepCosts, simulate
from zoo.planner.event_costs import Rates, costs_of
from zoo.planner.plan import Plan
from zoo.planner.step_events import (
    AT_END,
    Allocated,
    Event,
    Freed,
    Gradient,
    KernelRun,
    NodeRun,
    Released,
    Saved,
    StepEvents,
)


def reads(*storages: int, **other: object) -> KernelRun:
    return KernelRun(reads=frozenset(storages), **other)  # type: ignore[arg-type]


def events_of(
    sizes: list[int],
    forward: list[tuple[int, list[Event]]],
    backward: list[tuple[int, list[Event]]] = [],  # noqa: B006
    **other: object,
) -> StepEvents:
    events = [(operator, event) for operator, events in forward for event in events]
    return StepEvents(sizes, {0}, events, [NodeRun(*run) for run in backward], **other)  # type: ignore[arg-type]


# input 0 -> linear makes 1 -> relu makes 2, saves it -> square saves 2, makes the loss 3
FORWARD: list[tuple[int, list[Event]]] = [
    (0, [Saved(0), Allocated(1), reads(0, flops=100, number=0)]),
    (1, [Allocated(2), reads(1, number=1), Saved(2), Freed(1)]),
    (2, [Saved(2), Allocated(3), reads(2, number=2)]),
]
BACKWARD: list[tuple[int, list[Event]]] = [
    (AT_END, [Allocated(4)]),
    (2, [Allocated(5), reads(4, 2, number=3), Released(2), Freed(4)]),
    (1, [Allocated(6), reads(5, 2, number=3), Released(2), Freed(5)]),
    (0, [Allocated(7), reads(6, 0, number=4), Gradient(7, "w"), Freed(6)]),
]
SIZES = [7, 10, 20, 4, 4, 20, 21, 30]


def chain() -> StepEvents:
    return events_of(SIZES, FORWARD, BACKWARD, ends=frozenset({3}), trained=[30])


def costs(events: StepEvents, *cuts: int, **other: object) -> StepCosts:
    return costs_of(events, cuts, range(len(cuts)), **other)  # type: ignore[arg-type]


def test_states_are_what_later_steps_read() -> None:
    found = costs(chain(), 0, 1, 2)
    assert found.live == (frozenset(), frozenset({1}), frozenset({2}), frozenset({3}))
    # the input is no state: no plan can change it
    assert found.saved == (frozenset(), frozenset({2}), frozenset({2}))


def test_a_step_takes_what_it_makes_and_saves() -> None:
    assert costs(chain(), 0, 1, 2).forward == (10, 20, 4)
    # 1 is freed between the two, after 2 was made
    assert costs(chain(), 0, 2).forward == (30, 4)
    assert costs(chain(), 0).forward == (30,)


def test_a_saved_tensor_stays_until_its_step_is_over() -> None:
    forward: list[tuple[int, list[Event]]] = [
        (0, [Allocated(1), Saved(1), reads(0), Freed(1)]),
        (1, [Allocated(2), reads(0)]),
    ]
    assert costs(events_of([1, 10, 5], forward), 0).forward == (15,)
    unsaved = [(at, [e for e in events if type(e) is not Saved]) for at, events in forward]
    assert costs(events_of([1, 10, 5], unsaved), 0).forward == (10,)


def test_the_backward_counts_above_what_it_is_given() -> None:
    found = costs(chain(), 0, 1, 2)
    # of the loss, 2, 1 and the input
    assert found.gradients == (0, 21, 20, 4)
    assert found.parameter_gradients == (30, 0, 0, 0)
    assert found.backward == (30, 21, 20)


def test_a_gradient_in_what_was_saved_keeps_its_memory() -> None:
    backward: list[tuple[int, list[Event]]] = [
        (AT_END, [Allocated(4)]),
        (2, [reads(4, 2), Released(2, lives_on=True), Freed(4)]),
        (1, [Released(2), Allocated(6), reads(2), Freed(2)]),
        (0, [Freed(6)]),
    ]
    forward = [FORWARD[0], (1, [Allocated(2), reads(1)]), FORWARD[2]]
    found = costs(events_of(SIZES, forward, backward, ends=frozenset({3})), 0, 1, 2)
    # it is a gradient between the two steps
    assert found.gradients == (0, 21, 20, 4)


def test_an_optimizer_in_the_backward_frees_each_gradient() -> None:
    found = costs(chain(), 0, 1, 2, updates={"w": 8})
    assert found.parameter_gradients == (0, 0, 0, 0)
    assert found.backward[0] == 38
    # with those of parameters that the step does not use
    other = events_of(SIZES, FORWARD, BACKWARD, trained=[30, 5])
    assert costs(other, 0, 1, 2).parameter_gradients == (35, 5, 5, 5)


def test_a_gradient_that_is_added_to_that_of_earlier_backwards_is_freed_then() -> None:
    events = replace(chain(), trained=[30, 500])
    found = costs(events, 0, 1, 2, accumulates=True)
    assert found.parameter_gradients == (0, 0, 0, 0), "nothing of a weight without a gradient"
    assert found.backward == costs(events, 0, 1, 2, updates={}).backward
    assert found.gradients == costs(events, 0, 1, 2).gradients


def test_shared_gradients_are_freed_with_the_last() -> None:
    backward = [*BACKWARD[:3], (0, [Allocated(7), Gradient(7, "w"), Gradient(7, "w"), Freed(6)])]
    events = events_of(SIZES, FORWARD, backward, trained=[30])
    assert costs(events, 0, 1, 2, updates={"w": 8}).backward[0] == 38
    assert costs(events, 0, 1, 2, updates={"w": 8}).parameter_gradients[0] == 0


def test_gradients_that_the_forward_makes() -> None:
    forward = [*FORWARD[:2], (2, [Allocated(3), Allocated(7), reads(2)])]
    backward = [*BACKWARD[:3], (0, [Gradient(7, "w"), Freed(6)])]
    found = costs(events_of(SIZES, forward, backward, trained=[30]), 0, 1, 2)
    assert found.forward == (10, 20, 4)
    assert found.gradients_made == (0, 0, 30)
    assert found.parameter_gradients == (30, 30, 30, 30)


def test_a_recomputation_ends_when_the_last_tensor_is_saved() -> None:
    forward: list[tuple[int, list[Event]]] = [
        (0, [Allocated(1), reads(0, flops=5)]),
        (1, [Saved(1), Allocated(2), reads(1, flops=7)]),
    ]
    found = costs(events_of([1, 10, 20], forward), 0)
    assert found.flops == (12,)
    assert found.flops_until_saved == (5,)
    assert found.forward_until_saved == (10,)


def test_workspaces_and_seconds_are_those_of_the_calls() -> None:
    rates = Rates(lambda kernel: 2.0 * (kernel.number + 1), [0, 100, 0, 40, 0])
    found = costs(chain(), 0, 1, 2, rates=rates)
    assert found.forward == (10, 120, 4)
    assert found.backward == (30, 61, 60)
    assert found.seconds == (2, 4, 6)
    assert found.seconds_backward == (10, 8, 8)


@pytest.mark.parametrize("rounding", [lambda size: size, lambda size: -(-size // 512) * 512])
def test_bytes_are_counted_as_an_allocator_does(rounding: object) -> None:
    events = events_of([1, 10], [(0, [Allocated(1), reads(0)])], trained=[3], constants=[600])
    counted = events.rounded(rounding)  # type: ignore[arg-type]
    assert counted.sizes == [rounding(1), rounding(10)]  # type: ignore[operator]
    assert costs(counted, 0).forward == (rounding(10),)  # type: ignore[operator]
    assert (counted.trained, counted.constants) == ([rounding(3)], [rounding(600)])  # type: ignore[operator]


def test_a_model_without_its_loss_is_given_the_gradient_of_its_output() -> None:
    found, whole = costs(chain().before(2), 0, 1), costs(chain(), 0, 1, 2)
    assert found.gradients == whole.gradients[:3]
    assert found.backward == whole.backward[:2]
    assert found.saved == whole.saved[:2]
    assert found.parameter_gradients == whole.parameter_gradients[:3]


def test_a_plan_of_a_log_is_simulated() -> None:
    found = costs(chain(), 0, 1, 2).with_parameter_gradients()
    plain = simulate(Plan([0, 1, 2]), found)
    # 2 is saved; its gradient is there when that of 1 is made
    assert plain.peak == 20 + 20 + 21
    assert simulate(Plan([(0, 1), 2]), found).recomputed_flops == 100
