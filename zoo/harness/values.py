"""Checks keys and values from a file or the command line, one at a time.

jsonargparse knows whether a value fits a type, but reports in paragraphs about its parser. Asked
for one key at a time, its verdict can be said in a sentence that names the key, what it takes, the
value, and the nearest right one.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import jsonargparse

from zoo.errors import ArgumentError, ConfigError, PlanError, nearest, shortened
from zoo.plan import Plan
from zoo.planner.schemes import NAMES
from zoo.units import parse_bytes

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list of whole numbers",
    dict: "a mapping",
    NoneType: "null",
}
MOST_VALUES = 10_000
"""The most that one key may hold, each value counted as often as it is named."""


@dataclass(frozen=True)
class Key:
    """Says of a config's field, inside `Annotated`, what it means, the least it takes, its unit."""

    text: str
    least: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Declared:
    """A field of a config: its name, type and what its `Key` says."""

    name: str
    hint: Any
    key: Key


def declared(config: type) -> list[Declared]:
    """Lists the fields of a dataclass that a config file may set: those annotated with a `Key`."""
    hints = get_type_hints(config, include_extras=True)
    return [
        Declared(name, get_args(hint)[0], get_args(hint)[1])
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    ]


def check_keys(raw: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises ConfigError for the first key that is not known."""
    for name in raw:
        if name not in known:
            near = nearest(str(name), known) or f" It takes {', '.join(known)}"
            raise ConfigError(f"{where} has no key {shortened(name)}.{near}")


def typed(values: Mapping[str, Any], keys: Iterable[Declared], where: str) -> dict[str, Any]:
    """Returns the values of those keys that are there, each of its type and in its range.

    Raises:
        ConfigError: a value of another type or out of range.
    """
    found = {}
    for entry in keys:
        if entry.name in values:
            value = _convert(entry.name, values[entry.name], entry.hint, where)
            _check_range(entry, value, where)
            found[entry.name] = value
    return found


def check_checkpoint(value: bool | int | str, where: str) -> None:
    """Raises ConfigError for a value that no model takes as `checkpoint`."""
    if isinstance(value, str) and value not in NAMES:
        try:
            Plan.parse(value)
        except PlanError:
            raise ConfigError(
                f"{where}: checkpoint takes true, false, a number of segments, "
                f"{', '.join(NAMES)} or a plan such as '(0-1) 2'; got "
                f"{shortened(value)}.{nearest(value, NAMES)}"
            ) from None
    elif isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ConfigError(f"{where}: checkpoint takes at least 1 segment; got {shortened(value)}")


def check_size(size: int | list[int], where: str) -> None:
    """Raises ConfigError unless a size is one to three positive numbers."""
    sizes = [size] if isinstance(size, int) else size
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ConfigError(
            f"{where}: size takes one to three numbers of at least 1; got {shortened(size)}"
        )


def check_path(value: str | None, where: str) -> None:
    """Raises ConfigError for a path that no system takes, be there a file or not."""
    try:
        os.stat(value or "")
    except OSError:
        return
    except ValueError as error:
        raise ConfigError(f"{where}: {shortened(value)} is no path: {error}") from None


def check_memory_limit(value: int | str | None, where: str) -> None:
    """Raises ConfigError for a memory limit that is no size."""
    if value is None:
        return
    try:
        parse_bytes(value, "memory_limit")
    except ArgumentError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_range(entry: Declared, value: Any, where: str) -> None:
    """Raises ConfigError for a number below the least, or that nothing is above: nan, inf.

    Compared with these no peak has grown and no ratio is too large.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: {entry.name} takes a finite number; got {value}")
    least = entry.key.least
    if least is not None and value is not None and value < least:
        raise ConfigError(f"{where}: {entry.name} is at least {least}; got {shortened(value)}")


def _convert(name: str, value: Any, hint: Any, where: str) -> Any:
    if _holds_more_than(MOST_VALUES, value):
        # a YAML alias may name a list of aliases, and so on: what reads all of it has no end
        raise ConfigError(
            f"{where}: {name} takes {_kinds(hint)}; got more than {MOST_VALUES:,} values in one, "
            f"{shortened(value)}"
        )
    if get_origin(hint) is Literal:
        return _choose(name, value, get_args(hint), where)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=hint)
    try:
        return parser.parse_object({name: value})[name]
    except (jsonargparse.ArgumentError, OverflowError):
        raise ConfigError(f"{where}: {name} takes {_kinds(hint)}; got {shortened(value)}") from None


def _holds_more_than(most: int, value: Any) -> bool:
    """Counts what lies in a value at any depth, up to a limit."""
    left, count = [value], 0
    while left and count + len(left) <= most:
        item, count = left.pop(), count + 1
        if isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, list | tuple | set):
            left.extend(item)
    return bool(left)


def _choose(name: str, value: Any, choices: Sequence[str], where: str) -> Any:
    if value in choices:
        return value
    near = nearest(value, choices) if isinstance(value, str) else ""
    raise ConfigError(
        f"{where}: {name} takes {' or '.join(choices)}; got {shortened(value)}.{near}"
    )


def _kinds(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin in WORDS:
        return WORDS[origin]
    return " or ".join(_kinds(kind) for kind in get_args(hint))
