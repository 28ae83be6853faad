"""The search for a largest size against trying all of them."""

from hypothesis import given, strategies as st

from zoo.sizing.size_search import BEYOND, MOST, largest_within

curves = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@given(curves, st.integers(0, 1500), st.integers(1, 70), st.integers(0, 100))
def test_where_bytes_grow_it_is_the_largest_of_all(
    growth: list[int], budget: int, start: int, base: int
) -> None:
    def needed(size: int) -> int:
        return sum(growth[:size]) + 2000 * max(size - len(growth), 0)

    best = max((size for size in range(1, 100) if needed(size) <= budget), default=0)
    assert largest_within(needed, budget, start, base) == best


@given(curves, st.integers(0, 50), st.integers(1, 60))
def test_where_they_do_not_it_fits_and_the_next_ones_do_not(
    peaks: list[int], budget: int, start: int
) -> None:
    def needed(size: int) -> int:
        return peaks[size - 1] if size <= len(peaks) else 51

    found = largest_within(needed, budget, start)
    if found:
        assert needed(found) <= budget
        assert all(needed(found + ahead) > budget for ahead in range(1, 1 + BEYOND))
    else:
        assert needed(1) > budget


def test_a_dip_behind_the_limit_is_seen() -> None:
    peaks = dict(enumerate([1, 2, 9, 7], start=1))
    assert largest_within(lambda size: peaks.get(size, 9), 8) == 4


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 4096), st.integers(1, 100))
def test_a_line_takes_few_looks(base: int, slope: int, limit: int, start: int) -> None:
    looks: list[int] = []

    def needed(size: int) -> int:
        looks.append(size)
        return base + size * slope

    assert largest_within(needed, base + limit * slope + slope // 2, start) == limit
    assert len(looks) == len(set(looks)) <= 10


def test_sizes_that_do_not_exist_are_too_small_before_the_start_and_too_large_behind_it() -> None:
    def needed(size: int) -> int | None:
        return 10 * size if 3 <= size <= 20 else None

    assert largest_within(needed, 1000, start=5) == 20
    assert largest_within(needed, 55, start=15) == 5
    assert largest_within(needed, 25, start=15) == 0


def test_bytes_that_never_reach_the_budget_end_the_search() -> None:
    assert largest_within(lambda size: 5, 6) == MOST
