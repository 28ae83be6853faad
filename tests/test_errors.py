"""What errors repeat of a value: all of a short one, never more than a line or two."""

import pickle
import string

import pytest

import zoo
from zoo.errors import LONGEST, shortened, shortened_text


def bomb(levels=30):
    """A list that names 10 ** `levels` others, in a few hundred bytes."""
    value = ["leaf"] * 10
    for _ in range(levels):
        value = [value] * 10
    return value


def nested(levels=100_000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def itself():
    value = {}
    value["again"] = [value]
    return value


class Broken:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "value", ["a 'name'", "", 5, -0.5, None, True, [1, [2]], {"a": (1,)}, {3}, b"\x00", "\x1b[31m"]
)
def test_a_short_value_is_repeated_as_it_is(value):
    assert shortened(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "a" * 100_000, 10**50_000, -(10**50_000), 10**1_000, bomb(), nested(), itself(), Broken(),
        {number: bomb() for number in range(1_000)}, tuple(bomb()), b"a" * 100_000,
    ],
    ids=["text", "digits", "negative", "many digits", "bomb", "nested", "itself", "broken", "dict",
         "tuple", "bytes"],
)  # fmt: skip
def test_no_value_makes_an_error_long_or_slow(value):
    assert 0 < len(shortened(value)) <= LONGEST


def test_a_long_text_keeps_both_ends():
    text = string.ascii_letters * 100
    for found in (shortened_text(text), shortened(text)[1:-1]):
        assert found.startswith("abcdef")
        assert found.endswith("XYZ")
        assert "..." in found
    assert len(shortened_text(text)) == LONGEST
    assert shortened_text(text[:LONGEST]) == text[:LONGEST]


def test_an_interrupt_keeps_what_was_found_on_its_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(zoo.Interrupted("interrupted", 3)))
    assert (str(error), error.found) == ("interrupted", 3)
