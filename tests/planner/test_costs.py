"""What a plan costs, told apart: the bytes of its peak, and what no plan can go below."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.planner.test_planner import uniform
from zoo.planner.costs import (
    LEAST_OFFLOADED,
    RECOMPUTE,
    StepCosts,
    computed_once,
    simulate,
)
from zoo.planner.plan import Plan


class Waiting:
    """Computes a property once the other object of the class has begun to."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    @computed_once
    def value(self) -> object:
        self.barrier.wait(5)
        return object()


def test_objects_of_a_class_compute_at_once_and_each_once() -> None:
    """A lock of the class would be another thread's where a process is forked meanwhile."""
    barrier = threading.Barrier(2)
    objects = Waiting(barrier), Waiting(barrier)
    with ThreadPoolExecutor(2) as threads:
        values = [*threads.map(lambda one: one.value, objects)]
    assert values == [one.value for one in objects]


def returning(costs: StepCosts) -> StepCosts:
    """Returns costs of a chain whose caller holds what it returned."""
    return replace(costs, held_until_end=costs.live[-1])


def large(costs: StepCosts) -> StepCosts:
    """Returns costs whose storages are large enough to be offloaded."""
    return replace(costs, sizes=tuple(size + LEAST_OFFLOADED for size in costs.sizes))


def test_a_recomputation_is_named_where_it_takes_the_most() -> None:
    costs = replace(uniform(4), forward=(10, 99, 10, 10))
    found = simulate(Plan(((0, 1, 2), 3)), costs).moment
    assert (found.phase, found.step, found.work, found.gradient_of) == (RECOMPUTE, 1, 99, 3)


def test_what_was_returned_is_recomputed_too() -> None:
    # step 0 makes storage 1, which step 3 returns beside its own
    twice = tuple(live | {0} if state else live for state, live in enumerate(uniform(4).live))
    costs = replace(uniform(4), live=twice, saved=(frozenset(),) * 4)
    held, dropped = (
        simulate(Plan(((0, 1), 2, 3)), same).backward_peaks[0] for same in (returning(costs), costs)
    )
    # 0 and 3 for the caller, recomputed 0 and 1: 1 is still being made, and a gradient
    assert held == dropped + 20
