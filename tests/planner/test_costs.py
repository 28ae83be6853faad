"""What a plan costs, told apart: the bytes of its peak, and what no plan can go below."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hypothesis import given, settings, strategies as st

from tests.planner.chains import chains, nested_plans
from tests.planner.test_planner import uniform
from zoo.planner.costs import (
    BACKWARD,
    FORWARD,
    LEAST_OFFLOADED,
    RECOMPUTE,
    CopyRate,
    StepCosts,
    computed_once,
    least_possible,
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


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_bytes_of_the_peak_are_each_counted_once(data: st.DataObject) -> None:
    costs = returning(data.draw(chains(5)))
    plan = data.draw(st.sampled_from(nested_plans(len(costs))))
    result = simulate(plan, costs)
    moment = result.moment
    parts = (moment.kept, moment.recomputed, moment.state, moment.work, moment.gradient)
    assert sum(parts) == result.peak
    assert min(parts) >= 0
    assert (moment.gradient_of is None) == (moment.phase == FORWARD)
    if not plan.depth():
        assert moment.recomputed == 0, "nothing is recomputed"


@settings(deadline=None, max_examples=60)
@given(chains(4))
def test_no_plan_goes_below_what_a_step_alone_takes(costs: StepCosts) -> None:
    for same in (costs, returning(costs)):
        least = min(simulate(plan, same).peak for plan in nested_plans(len(same)))
        assert least_possible(same) <= least


def test_in_its_forward_a_segment_holds_what_its_recomputation_does_not_read() -> None:
    # storages 0, 1 and 2 are the states; nothing is saved, so that no step is recomputed
    states, none = tuple(map(frozenset, ((), (0,), (1,), (2,)))), (frozenset[int](),) * 3
    costs = replace(
        uniform(3), sizes=(80, 10, 50), live=states, saved=none, forward=(80, 10, 50),
        reads=states[:3], reads_until_saved=none,
    )  # fmt: skip
    peaks = {
        plan: simulate(Plan.parse(plan), costs).moment
        for plan in ("0-2", "0 (1) 2", "0 (1-2)", "0 ((1) 2)", "(0-2)")
    }
    assert {plan: (moment.step, moment.kept) for plan, moment in peaks.items()} == {
        "0-2": (1, 0), "0 (1) 2": (1, 80), "0 (1-2)": (2, 80), "0 ((1) 2)": (2, 80), "(0-2)": (1, 0)
    }  # fmt: skip


def large(costs: StepCosts) -> StepCosts:
    """Returns costs whose storages are large enough to be offloaded."""
    return replace(costs, sizes=tuple(size + LEAST_OFFLOADED for size in costs.sizes))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_offloading_adds_no_bytes_on_the_device(data: st.DataObject) -> None:
    costs = large(returning(data.draw(chains(5))))
    plan = data.draw(st.sampled_from(nested_plans(len(costs))))
    kept, found = simulate(plan, costs), simulate(plan, costs, offloads=range(len(costs)))
    moment = found.moment
    parts = (moment.kept, moment.recomputed, moment.state, moment.work, moment.gradient)
    assert sum(parts) == found.peak <= kept.peak
    assert min(parts) >= 0
    assert found.recomputed_seconds == kept.recomputed_seconds
    assert found.waited_seconds == 0 <= found.offloaded <= sum(costs.sizes)

    def waited(rate: float, is_beside: bool) -> float:
        copies = CopyRate(rate, is_beside)
        return simulate(plan, costs, offloads=range(len(costs)), copies=copies).waited_seconds

    # each is copied out and back
    assert waited(1e6, True) <= waited(1e6, False) <= 2 * found.offloaded / 1e6 + 1e-9
    assert waited(1e6, True) <= waited(1e5, True)


def test_what_segments_start_from_lies_on_the_host() -> None:
    # segments start from states 1, 2 and 3; at the peak the copy of 3 is under way, 2 is back
    size, plan = LEAST_OFFLOADED, Plan(((0,), (1,), (2,), (3,)))
    costs = replace(uniform(4), sizes=(size,) * len(uniform(4).sizes))
    kept, found = simulate(plan, costs), simulate(plan, costs, offloads=range(4))
    assert found.offloaded == 3 * size
    assert kept.moment.kept - found.moment.kept == size
    # the loss is no step of the model
    assert simulate(plan, costs, offloads=range(4), steps=2).offloaded == size
    # a step takes a second, a copy two: those out wait for the one before, those back for the last
    slow = simulate(plan, costs, offloads=range(4), copies=CopyRate(size / 2))
    assert 0 < slow.waited_seconds < 2 * 3 * 2


def test_a_steps_of_one_step_takes_what_its_step_takes() -> None:
    costs = uniform(1)
    assert least_possible(costs) == simulate(Plan((0,)), costs).peak == 10 + 10


def test_a_moment_says_where_its_bytes_are() -> None:
    # the gradients of states 4 and 3 are 10 each, a backward takes 10 for the second of them
    kept = simulate(Plan.keep_all(4), uniform(4)).moment
    assert (kept.phase, kept.step, kept.kept, kept.gradient) == (BACKWARD, 3, 30, 10)
    # storage 1 is held since the forward as the segment's input, storage 2 recomputed
    nested = simulate(Plan(((0, 1), (2, 3))), uniform(4)).moment
    assert (nested.phase, nested.step) == (BACKWARD, 3)
    assert (nested.kept, nested.recomputed, nested.work, nested.gradient) == (10, 10, 10, 10)


def test_what_the_caller_holds_is_kept_and_part_of_the_bound() -> None:
    # storage 3 is returned: 10 bytes more wherever the peak is behind the forward
    found = simulate(Plan.keep_all(4), returning(uniform(4)))
    assert (found.moment.kept, found.peak) == (40, 60)
    assert least_possible(returning(uniform(4))) == least_possible(uniform(4)) + 10


def test_a_cast_that_is_cached_is_made_once_and_goes_when_the_forward_ends() -> None:
    plain, cast = uniform(4), frozenset([4])
    casting = replace(
        plain,
        sizes=(*plain.sizes, 1000),
        forward=(1010, 10, 1010, 10),
        casts=(cast, frozenset(), cast, frozenset()),
    )
    found = simulate(Plan.keep_all(4), casting)
    # beside the cast storages 0 and 1 are saved, 2 is the state and 3 is made
    assert (found.moment.phase, found.moment.step, found.peak) == (FORWARD, 3, 1000 + 40)
    assert found.backward_peaks == simulate(Plan.keep_all(4), plain).backward_peaks
    # a recomputation makes it anew
    nested = simulate(Plan(((0, 1, 2, 3),)), casting).moment
    assert (nested.phase, nested.kept, nested.work) == (RECOMPUTE, 0, 1010)


def test_a_segment_holds_a_cast_that_an_earlier_one_made() -> None:
    plain, cast = uniform(4), frozenset([4])
    casting = replace(
        plain,
        sizes=(*plain.sizes, 1000),
        forward=(1010, 10, 1010, 10),
        forward_until_saved=(1010, 10, 1010, 10),
        casts=(cast, frozenset(), cast, frozenset()),
    )
    plan = Plan(((0,), 1, (2,), 3))
    more = zip(
        simulate(plan, casting).backward_peaks, simulate(plan, plain).backward_peaks, strict=True
    )
    # segment (2,) does not make it again; segment (0,) does
    assert [turn - other for turn, other in more] == [1000, 0, 1000, 1000]


def test_an_inner_segment_holds_a_cast_until_it_is_recomputed_and_no_longer() -> None:
    plain, cast = uniform(4), frozenset([4])
    casting = replace(
        plain, sizes=(*plain.sizes, 1000), casts=(frozenset(), cast, cast, frozenset())
    )
    plan = Plan((0, ((1,), (2,)), 3))
    more = zip(
        simulate(plan, casting).backward_peaks, simulate(plan, plain).backward_peaks, strict=True
    )
    assert [turn - other for turn, other in more] == [0, 1000, 0]


def test_a_segment_copies_what_it_reads_and_does_not_make() -> None:
    plain = uniform(4)
    copied = tuple(plain.live[step] for step in range(4))
    plan = Plan((0, (1, 2), 3))
    found, other = simulate(plan, replace(plain, copied=copied)), simulate(plan, plain)
    size = plain.bytes_of(plain.live[1])
    assert [a - b for a, b in zip(found.backward_peaks, other.backward_peaks, strict=True)] == [
        0,
        size,
        size,
    ]


def test_a_segment_keeps_what_no_recomputation_makes() -> None:
    plain = uniform(4)
    kept = tuple(plain.live[step + 1] for step in range(4))
    plan = Plan((0, (1, 2), 3))
    found, other = simulate(plan, replace(plain, never_recomputed=kept)), simulate(plan, plain)
    size = plain.bytes_of(plain.live[2])
    # step 3 has state 3 anyway, and not state 2; the segment makes that again, and not state 3
    assert [a - b for a, b in zip(found.backward_peaks, other.backward_peaks, strict=True)] == [
        0,
        size,
        size,
    ]


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


def reading(costs: StepCosts) -> StepCosts:
    """Returns costs of the same steps, each of which reads the storage of the step before it."""
    before = (frozenset[int](), *(frozenset([step]) for step in range(len(costs) - 1)))
    return replace(costs, reads=before, reads_until_saved=(frozenset(),) * len(costs))


def test_a_segment_holds_what_it_reads_of_a_state() -> None:
    # storage 0 is there until step 4 reads it
    long = tuple(
        live | {0} if 0 < state < 5 else live for state, live in enumerate(uniform(6).live)
    )
    whole = replace(uniform(6), live=long)
    plain = reading(whole)
    known = replace(plain, reads=(*plain.reads[:4], frozenset({0, 3}), plain.reads[5]))
    plan = Plan((0, 1, (2, 3), 4, 5))
    # saved in turn 2: storage 0 by step 1, storage 1 by the segment, and again by step 2
    found, other = simulate(plan, known), simulate(plan, whole)
    assert (found.backward_peaks[2], other.backward_peaks[2]) == (
        10 + 10 + 10 + 20,
        10 + 10 + 10 + 20,
    )
    plan = Plan(((0, 1), (2, 3), 4, 5))
    found, other = simulate(plan, known), simulate(plan, whole)
    # here nothing but the second segment would hold storage 0
    assert other.backward_peaks[1] - found.backward_peaks[1] == 10
    # the forward has it all the same, and the first segment makes it for step 1
    assert other.backward_peaks[0] == found.backward_peaks[0]


def test_a_recomputation_runs_what_somebody_needs() -> None:
    # step 1 saves a mask of its own, not its input, and steps 2 and 3 nothing
    costs = replace(
        reading(uniform(4, flops=7)),
        sizes=(10, 10, 10, 10, 5),
        saved=(frozenset(), frozenset([4]), frozenset(), frozenset()),
        reads_until_saved=(frozenset(), frozenset([0]), frozenset(), frozenset()),
        flops_until_saved=(0, 5, 0, 0),
        forward_until_saved=(0, 15, 0, 0),
    )
    found = simulate(Plan(((0, 1, 2, 3),)), costs)
    assert found.recomputed_flops == 7 + 5, "step 0 as a whole, step 1 until its mask is there"
    nobody = replace(reading(uniform(4, flops=7)), saved=(frozenset(),) * 4)
    assert simulate(Plan(((0, 1, 2, 3),)), nobody).recomputed_flops == 0
    # a segment of such steps holds nothing, since it needs none of its inputs
    assert simulate(Plan((0, (1, 2), 3)), nobody).backward_peaks[1] == 20


def test_a_step_that_writes_what_a_later_one_needs_is_run() -> None:
    # step 1 writes storage 0, which step 2 saves
    costs = replace(
        reading(uniform(3, flops=7)),
        live=(frozenset(), frozenset([0]), frozenset([0]), frozenset([2])),
        saved=(frozenset(), frozenset(), frozenset([0])),
        reads=(frozenset(), frozenset([0]), frozenset([0])),
    )
    plan = Plan(((0, 1, 2),))
    assert simulate(plan, costs).recomputed_flops == 7
    writing = replace(costs, writes=(frozenset(), frozenset([0]), frozenset()))
    assert simulate(plan, writing).recomputed_flops == 14


def test_an_inner_segment_lets_go_of_what_it_starts_from_when_it_is_recomputed() -> None:
    # nothing saves its input, but each step a storage of its own
    steps = 6
    whole = replace(
        uniform(steps),
        sizes=(10,) * 2 * steps,
        saved=tuple(frozenset([steps + step]) for step in range(steps)),
        forward=(20,) * steps,
        forward_until_saved=(20,) * steps,
        backward=(40,) * steps,
    )
    known = replace(reading(whole), reads_until_saved=reading(whole).reads)
    plan = Plan(((0, 1, (2, 3, 4, 5)),))
    # saved by steps 0 to 5, a gradient, and what the backward of step 5 makes
    assert simulate(plan, known).peak == 60 + 10 + 40
    assert simulate(plan, whole).peak == 60 + 10 + 40 + 10


def test_a_backward_lets_go_of_inputs_that_nobody_else_holds() -> None:
    costs = replace(uniform(4), backward=(30,) * 4, backward_alone=(20,) * 4)
    found, other = simulate(Plan.keep_all(4), costs), simulate(Plan.keep_all(4), uniform(4))
    assert [a - b for a, b in zip(found.backward_peaks, other.backward_peaks, strict=True)] == [
        20,
        10,
        10,
        10,
    ]
    # step 0 saves nothing; the segment around step 2 holds what it saves
    found = simulate(Plan((0, 1, (2,), 3)), costs)
    assert [a - b for a, b in zip(found.backward_peaks, other.backward_peaks, strict=True)] == [
        20,
        10,
        20,
        10,
    ]


def test_a_segment_is_recomputed_when_the_first_of_what_it_saved_is_opened() -> None:
    # step 2 saves a little noise and step 3 nothing; the gradient of step 1's result is the largest
    costs = replace(
        reading(uniform(4)),
        sizes=(9000, 9000, 10, 10),
        saved=(frozenset(), frozenset([0]), frozenset([2]), frozenset()),
        gradients=(0, 10, 500, 20, 10),
        backward=(10, 10, 1, 1),
        draws=(0, 0, 1, 0),
    )
    moment = simulate(Plan(((0, 1, 2, 3),)), costs).moment
    assert (moment.phase, moment.gradient, moment.gradient_of) == (RECOMPUTE, 500, 2)
    large = replace(costs, sizes=(9000, 9000, 9000, 10))
    assert simulate(Plan(((0, 1, 2, 3),)), large).moment.gradient_of == 3
    # what is not drawn is recomputed, however small
    assert simulate(Plan(((0, 1, 2, 3),)), replace(costs, draws=())).moment.phase == BACKWARD
