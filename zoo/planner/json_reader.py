"""Reads untrusted JSON into typed dataclasses; every fault is a ValueError that names the field.

`json` knows no types, recurses until Python's stack ends, at a depth that depends on the caller,
and reads numbers of any length. Here the depth of a text is measured before it is parsed, and its
values are checked against the annotations of a dataclass:

    {"peak": 5, "shape": [2, 3]}    class Size: peak: int; shape: tuple[int, ...]
    Size(peak=5, shape=(2, 3))      "peak": null is "peak takes a whole number; got None"

It reads what zoo's `to_json` methods write: numbers, strings, lists, None and dataclasses of these.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from zoo.errors import FileError, ZooError, nearest, shortened, shortened_text

Value = TypeVar("Value")
Reader = Callable[[Any], Any]

# the most nested brackets: those of the deepest plan (`planner.plan.DEEPEST`) and of its file
DEEPEST = 512
# the most digits of a whole number: bytes and operations have fewer
LONGEST = 30
# all but the brackets outside of strings; an unclosed string ends with the file
_BESIDE_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[^][{}"]+', re.DOTALL)


def read_json(text: str, what: str, error: type[ZooError], make: Callable[[Any], Value]) -> Value:
    """Parses a text and returns `make` of its value; `what` names the result in `error`.

    Raises:
        error: the text is no JSON, nests deeper than `DEEPEST` or than the stack allows, holds NaN,
            an infinity or more than `LONGEST` digits, or `make` raised a ValueError.
    """
    try:
        if not isinstance(text, str):
            raise ValueError(f"it is not text but a value of type {type(text).__name__}")
        brackets = _BESIDE_BRACKETS.sub("", text)
        levels = itertools.accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
        depth = max(levels, default=0)
        if depth > DEEPEST:
            raise ValueError(f"its brackets nest {depth} deep; at most {DEEPEST} are read")
        return make(json.loads(text, parse_int=_integer, parse_constant=_no_number))
    except RecursionError as wrong:
        raise error(f"this {what} in JSON nests too deep for what is left of the stack") from wrong
    except ValueError as wrong:
        raise error(f"this is no {what} in JSON: {shortened_text(str(wrong))}") from wrong


def read(cls: type[Value], values: Any) -> Value:
    """Makes a dataclass from a mapping, each field by its annotation.

    A class with a method `from_value` in an annotation is made by that method.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    return cast(Value, _reader(cls)(values))  # type: ignore[arg-type]


def read_row(cls: type[Value], columns: Sequence[str], row: Any) -> Value:
    """Makes a dataclass from a list of values for the fields in `columns`; raises as `read`."""
    if not isinstance(row, list) or len(row) != len(columns):
        raise ValueError(f"a row takes {len(columns)} values; got {shortened(row)}")
    return read(cls, dict(zip(columns, row, strict=True)))


def read_file(path: str | Path) -> str:
    """Returns the text of a file.

    Raises:
        FileError: the file cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = "it is not text" if is_binary else getattr(error, "strerror", None) or error
        raise FileError(f"{shortened(str(path))} cannot be read: {reason}") from error


def _integer(digits: str) -> int:
    # Python itself refuses some 4,000 digits, and floats overflow at 300
    if len(digits) > LONGEST:
        raise ValueError(
            f"it holds a whole number of {len(digits)} digits; at most {LONGEST} are read"
        )
    return int(digits)


def _no_number(text: str) -> Any:
    raise ValueError(f"it holds {text}, which JSON does not have")


# the JSON types for each type, and their name in errors
_SCALARS = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    str: (str, "text"),
}


@functools.cache
def _reader(hint: Any) -> Reader:
    """Returns a function that makes a value of an annotated type."""
    if hint is Any:
        return lambda value: value
    if hint in _SCALARS:
        return functools.partial(_scalar, hint)
    if hasattr(hint, "from_value"):
        return cast(Reader, hint.from_value)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        readers = {field.name: _reader(hints[field.name]) for field in fields(hint)}
        return functools.partial(_dataclass, hint, readers)
    inner = _reader(get_args(hint)[0])
    if NoneType in get_args(hint):
        return lambda value: None if value is None else inner(value)
    return functools.partial(_sequence, get_origin(hint), inner)


def _scalar(cls: Any, value: Any) -> Any:
    types, words = _SCALARS[cls]
    is_typed = isinstance(value, types) and (cls is bool or not isinstance(value, bool))
    if not is_typed or value in (math.inf, -math.inf):
        raise ValueError(f"takes {words}; got {shortened(value)}")
    return cls(value)


def _sequence(cls: Callable[[Any], Any], entry: Reader, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"takes a list; got {shortened(value)}")
    return cls(map(entry, value))


def _dataclass(cls: Any, readers: Mapping[str, Reader], values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"it takes named fields; got {shortened(values)}")
    unknown = next((name for name in values if name not in readers), None)
    if unknown is not None:
        raise ValueError(f"it has no field {shortened(unknown)}.{nearest(str(unknown), readers)}")
    required = (f.name for f in fields(cls) if f.default is f.default_factory is MISSING)
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    arguments = {}
    for name, value in values.items():
        try:
            arguments[name] = readers[name](value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
    return cls(**arguments)
