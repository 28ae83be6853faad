"""Iterators as they were: those that can be copied are, others refuse to go on in a second run.

count(3)                    copied by what it prints
iter of a list, a range     copied
generator, map, cycle       takes no copy: a second run gets one that refuses
"""

import ast
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from zoo.errors import RecomputeError

EMPTY: tuple[Any, ...] = ([], (), "", b"", range(0))
COPIED = frozenset(type(iter(empty)) for empty in EMPTY)


class Position:
    """Where an iterator stood."""

    def __init__(self, mark: Callable[[Any], Any], again: Callable[[], Any], value: Any) -> None:
        self.mark, self.again = mark, again
        self.before = mark(value)

    def holds(self, value: Any) -> bool:
        """Says whether it still stands there; what cannot be copied is never taken to."""
        return self.before is not None and bool(self.mark(value) == self.before)


def position_of(value: Any) -> Position | None:
    """Returns where an iterator stands, None for what is none or has attributes to go by."""
    if not isinstance(value, Iterator) or hasattr(value, "__dict__"):
        return None
    if type(value) in COPIED:
        kept = copy.copy(value)
        return Position(lambda now: now.__length_hint__(), lambda: copy.copy(kept), value)
    if type(value) is itertools.count and (numbers := _numbers_of(value)) is not None:
        return Position(repr, lambda: itertools.count(*numbers), value)
    return Position(lambda now: None, lambda: _Spent(value), value)


def _numbers_of(value: Any) -> tuple[Any, ...] | None:
    """Returns the next number and the step; None where these are not Python's own."""
    try:
        return tuple(ast.literal_eval(repr(value).removeprefix("count")[:-1] + ",)"))
    except (ValueError, SyntaxError):
        return None


class _Spent:
    """Stands in a second run for an iterator that only the first could use."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __iter__(self) -> "_Spent":
        return self

    def __next__(self) -> NoReturn:
        raise RecomputeError(
            f"a segment takes what comes next from a {type(self._value).__name__}, which a second "
            "run cannot take again. Call it as zoo.remember(lambda: next(iterator)), or pass the "
            "value as an argument."
        )

    def __getattr__(self, name: str) -> Any:
        return self.__next__ if name in ("send", "throw") else getattr(self._value, name)
