import numpy as np
import pytest
from hypothesis import given, strategies as st

from zoo.errors import ArgumentError
from zoo.units import at_least, format_bytes, format_seconds, parse_bytes, plural, shape_text


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


def test_a_number_has_a_shape_to_read() -> None:
    assert [shape_text((8, 3, 224)), shape_text(())] == ["8×3×224", "scalar"]


def test_one_of_a_kind_is_no_plural() -> None:
    written = [plural(1, "step"), plural(0, "step"), plural(2, "loss")]
    assert written == ["1 step", "0 steps", "2 losses"]


@pytest.mark.parametrize(
    "value",
    ["9" * 400, 10**5000, 2**63, "9" * 400 + "GiB"],
    ids=["text", "digits", "just", "unit"],
)
def test_a_size_of_many_digits_is_refused_in_a_sentence(value: object) -> None:
    message = "more than any memory; write at most 9223372036854775807"
    with pytest.raises(ArgumentError, match=message) as caught:
        parse_bytes(value, "memory_budget")
    assert len(str(caught.value)) < 400


def test_what_is_no_size_is_told_the_units() -> None:
    units = "units are B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, K, M, G, T"
    for text in ("1PiB", "0.5", "1.5 b"):
        with pytest.raises(ArgumentError, match=units):
            parse_bytes(text)
    for unit in units.removeprefix("units are ").split(", "):
        assert parse_bytes(f"3{unit}") % 3 == 0


@pytest.mark.parametrize(
    "size", ["8G", "8g", "8GiB", "8gib", " 8 GIB ", 8 << 30, np.int64(8 << 30)]
)
def test_a_size_is_written_in_any_way(size: object) -> None:
    assert parse_bytes(size) == 8 << 30


def test_a_decimal_unit_in_small_letters_stays_decimal() -> None:
    assert parse_bytes("8gb") == parse_bytes("8GB") == 8 * 10**9


def test_seconds_below_one_are_milliseconds() -> None:
    assert (format_seconds(0.0123), format_seconds(1.234)) == ("12.3 ms", "1.23 s")


@given(st.integers(1, 1 << 52))
def test_a_short_size_is_read_as_that_many_bytes_or_a_few_more(count: int) -> None:
    assert count <= parse_bytes(at_least(count)) <= 1.01 * count + 1
    assert len(at_least(count)) <= len("1024MiB")
