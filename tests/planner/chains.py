"""Random chains as numbers: storages live on intervals of states, and steps save some of them."""

import functools
import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from zoo.planner.costs import StepCosts
from zoo.planner.plan import Item, Plan


@st.composite
def chains(draw: st.DrawFn, most: int = 6) -> StepCosts:
    """Draws the costs of a chain of up to `most` steps."""
    steps = draw(st.integers(1, most))
    small = st.integers(0, 9)
    sizes: list[int] = []
    live: list[set[int]] = [set() for _ in range(steps + 1)]
    for state in range(1, steps + 1):
        for _ in range(draw(st.integers(1, 2))):
            last = draw(st.integers(state, steps)) if draw(st.booleans()) else state
            for boundary in range(state, last + 1):
                live[boundary].add(len(sizes))
            sizes.append(draw(small))
    saved: list[frozenset[int]] = []
    for step in range(steps):
        near = sorted(live[step] | live[step + 1])
        chosen = set(draw(st.lists(st.sampled_from(near), max_size=3)) if near else [])
        for _ in range(draw(st.integers(0, 2))):
            chosen.add(len(sizes))
            sizes.append(draw(small))
        saved.append(frozenset(chosen))

    def numbers(count: int) -> tuple[int, ...]:
        return tuple(draw(small) for _ in range(count))

    made = [
        sum(sizes[s] for s in (live[i + 1] | saved[i]) - live[i]) for i in range(steps)
    ]  # a step allocates at least what it returns and saves
    forward = tuple(least + extra for least, extra in zip(made, numbers(steps), strict=True))
    flops, seconds = numbers(steps), numbers(steps)
    return StepCosts(
        sizes=tuple(sizes),
        live=tuple(map(frozenset, live)),
        saved=tuple(saved),
        forward=forward,
        forward_until_saved=tuple(draw(st.integers(0, peak)) for peak in forward),
        backward=numbers(steps),
        gradients=numbers(steps + 1),
        flops=flops,
        flops_until_saved=tuple(draw(st.integers(0, count)) for count in flops),
        seconds=tuple(map(float, seconds)),
        seconds_until_saved=tuple(float(draw(st.integers(0, count))) for count in seconds),
        seconds_backward=tuple(map(float, numbers(steps))),
        blocks=tuple(range(steps)),
    )


def flat_plans(steps: int) -> Iterator[Plan]:
    """Yields every plan without nesting: each run of steps kept or a segment."""
    for cuts in itertools.product((False, True), repeat=steps - 1):
        groups: list[list[int]] = [[0]]
        for step, cut in enumerate(cuts, start=1):
            if cut:
                groups.append([])
            groups[-1].append(step)
        for choice in itertools.product((False, True), repeat=len(groups)):
            items: list[Item] = []
            for group, is_segment in zip(groups, choice, strict=True):
                if is_segment:
                    items.append(tuple(group))
                elif len(group) == 1:
                    items += group
                else:
                    break
            else:
                yield Plan(items)


@functools.cache
def nested_plans(steps: int) -> tuple[Plan, ...]:
    """Returns every plan, segments inside segments included: 2, 8, 48, 352, 2880, 25216, ...

    Only a segment whose one item is a segment is left out: it does the same as that one.
    """
    return tuple(map(Plan, _runs(0, steps)))


@functools.cache
def _runs(start: int, stop: int) -> tuple[tuple[Item, ...], ...]:
    """Returns the ways to cover steps with items."""
    return (*_contents(start, stop), *((content,) for content in _contents(start, stop)))


@functools.cache
def _contents(start: int, stop: int) -> tuple[tuple[Item, ...], ...]:
    """Returns the ways that are not one segment: what a segment may hold."""
    if stop == start + 1:
        return ((start,),)
    kept_first = [(start, *rest) for rest in _runs(start + 1, stop)]
    cut_first = [
        (content, *rest)
        for middle in range(start + 1, stop)
        for content in _contents(start, middle)
        for rest in _runs(middle, stop)
    ]
    return (*kept_first, *cut_first)


@st.composite
def repeated_chains(draw: st.DrawFn, parts: int = 8) -> StepCosts:
    """Draws the costs of a chain whose middle is the same few steps again and again.

    The states of a part and the first of the next one share storages, one is in all states from the
    first to the last, and gradients are larger in an earlier part. The last part may be cut short.
    """
    period = draw(st.integers(1, 3))
    count = period * parts - draw(st.integers(0, period - 1))
    small = st.integers(0, 9)
    before, grown, total = draw(st.integers(1, 2)), draw(small), 0
    sizes = [draw(st.integers(1, 9))]
    live: list[set[int]] = [set()]
    patterns = [
        (draw(st.integers(1, 9)), draw(st.integers(0, period)), draw(st.booleans()))
        for _ in range(period)
    ]
    numbers = [[draw(small) for _ in range(6)] for _ in range(period)]
    chosen = [0 if k < before else (k - before) % period for k in range(before + count)]
    total = len(chosen)
    live += [{0} for _ in range(total)]
    saved: list[frozenset[int]] = []
    for step, place in enumerate(chosen):
        size, lasts, saves = patterns[place]
        for state in range(step + 1, min(step + 1 + lasts, total) + 1):
            live[state].add(len(sizes))
        sizes.append(size)
        saved.append(frozenset(live[step] - {0}) if saves else frozenset([len(sizes) - 1]))

    def column(which: int) -> tuple[int, ...]:
        return tuple(numbers[place][which] for place in chosen)

    made = [sum(sizes[s] for s in live[k + 1] - live[k]) for k in range(total)]
    forward = tuple(least + extra for least, extra in zip(made, column(0), strict=True))
    seconds = column(1)
    parts_behind = [(total - state) // period for state in range(total + 1)]
    return StepCosts(
        sizes=tuple(sizes),
        live=tuple(map(frozenset, live)),
        saved=tuple(saved),
        forward=forward,
        forward_until_saved=tuple(map(min, forward, column(2))),
        backward=column(3),
        gradients=(*(4 + grown * behind for behind in parts_behind),),
        flops=seconds,
        flops_until_saved=tuple(map(min, seconds, column(4))),
        seconds=tuple(map(float, seconds)),
        seconds_until_saved=tuple(map(float, map(min, seconds, column(4)))),
        seconds_backward=tuple(map(float, column(5))),
        blocks=tuple(range(total)),
    )
