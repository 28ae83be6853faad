import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.units import at_least, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (-(1024**2), "-1.00 MiB"),
        (100 * 1024**2, "100 MiB"),
        (1024**3, "1.00 GiB"),
        (5 * 1024**5, "5120 TiB"),
    ],
)
def test_bytes_have_a_binary_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_seconds_below_one_are_milliseconds() -> None:
    assert (format_seconds(0.0123), format_seconds(1.234)) == ("12.3 ms", "1.23 s")


@given(st.integers(1, 1 << 52))
def test_a_short_size_is_read_as_that_many_bytes_or_a_few_more(count: int) -> None:
    assert count <= parse_bytes(at_least(count)) <= 1.01 * count + 1
    assert len(at_least(count)) <= len("1024MiB")
