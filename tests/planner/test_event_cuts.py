"""Cuts that no plan gains by are left out of events that are written by hand."""

from collections.abc import Sequence

from zoo.planner.event_costs import useful_cuts
from zoo.planner.step_events import Allocated, Event, KernelRun, NodeRun, Saved, StepEvents


def events_of(
    *steps: tuple[dict[int, int], Sequence[int], Sequence[int]],
    passive: Sequence[int] = (),
    allocating: Sequence[int] = (),
) -> StepEvents:
    """A step makes storages of so many bytes, reads some, and saves some; one operator each."""
    events = StepEvents(sizes=[0] * 20)
    for operator, (made, read, saved) in enumerate(steps):
        of_step: list[Event] = []
        for storage, size in made.items():
            events.sizes[storage] = size
            of_step.append(Allocated(storage))
        of_step.append(KernelRun(reads=frozenset(read)))
        of_step += map(Saved, saved)
        events.forward += [(operator, event) for event in of_step]
        if operator not in passive:
            backward: list[Event] = [Allocated(19)] if operator in allocating else []
            events.backward.insert(0, NodeRun(operator, backward))
    return events


def kept(events: StepEvents, within: Sequence[tuple[str, ...]] | None = None) -> list[int]:
    count = len(events.forward) and events.forward[-1][0] + 1
    return useful_cuts(events, range(count), within or [("",)] * count)


LINEAR = ({1: 8}, [0], [0])
NEXT = ({3: 8}, [2], [2])


def test_a_sum_joins_what_made_its_argument() -> None:
    assert kept(events_of(LINEAR, ({2: 8}, [0, 1], []), NEXT)) == [0, 2]


def test_a_sum_in_a_module_around_joins_and_one_in_a_new_module_does_not() -> None:
    events = events_of(LINEAR, ({2: 8}, [0, 1], []), NEXT)
    assert kept(events, [("", "a"), ("",), ("",)]) == [0, 2]
    assert kept(events, [("", "a"), ("", "b"), ("",)]) == [0, 1, 2]


def test_a_step_stays_that_grows_or_saves_or_whose_backward_allocates() -> None:
    assert kept(events_of(LINEAR, ({2: 9}, [0, 1], []), NEXT)) == [0, 1, 2]
    assert kept(events_of(LINEAR, ({2: 8}, [0, 1], [1]), NEXT)) == [0, 1, 2]
    assert kept(events_of(LINEAR, ({2: 8}, [0, 1], []), NEXT, allocating=[1])) == [0, 1, 2]


def test_a_sum_of_what_is_saved_stays() -> None:
    """To hold its argument costs nothing."""
    assert kept(events_of(({1: 8}, [0], [1]), ({2: 8}, [0, 1], []), NEXT)) == [0, 1, 2]


def test_a_mask_joins_what_reads_it() -> None:
    mask, drop = ({2: 8}, [1], []), ({3: 8}, [1, 2], [2])
    events = events_of(LINEAR, mask, drop, ({4: 8}, [3], [3]), passive=[1])
    assert kept(events) == [0, 1, 3]
    assert kept(events, [("",), ("", "a"), ("", "b"), ("",)]) == [0, 1, 2, 3]


def test_steps_without_gradients_are_cut_where_least_is_alive() -> None:
    row = [({2: 9}, [1], []), ({3: 2}, [2], []), ({4: 9}, [3], []), ({5: 5}, [4], [])]
    assert kept(events_of(LINEAR, *row, ({6: 8}, [5], [5]), passive=[1, 2, 3, 4])) == [0, 3]
    # what is read again is alive in all of the row
    assert kept(events_of(LINEAR, *row, ({6: 8}, [1, 5], [5]), passive=[1, 2, 3, 4])) == [0, 1]


def test_a_cast_of_a_weight_that_autocast_holds_joins_what_reads_it() -> None:
    product = ({3: 8}, [1, 2], [1, 2])
    events = events_of(LINEAR, ({2: 4}, [], []), product, ({4: 8}, [3], [3]))
    assert kept(events) == [0, 1, 2, 3]
    events.casts = {2}
    assert kept(events) == [0, 1, 3]
