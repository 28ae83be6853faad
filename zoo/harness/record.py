"""What a line of results must hold to count, so that a bad one costs only itself.

A file of results is text: a hand, a merge or another version may have changed a line of it. Read
without a check, a `status` of "nonsense" would pass for done, and one missing key would end the
report of all the others.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from zoo.errors import PlanError, shortened
from zoo.harness.cells import KINDS
from zoo.plan import Plan
from zoo.report.rows import UNFIT

DEEPEST = 50
"""The most levels of lists and mappings in a line; ours have seven."""


class Leaf(NamedTuple):
    """A value without parts: what it is to be, in words, and whether it is."""

    words: str
    fits: Callable[[Any], bool]


class Each(NamedTuple):
    """A mapping under names that are not known beforehand, its values alike."""

    value: Any


def fault_of(record: Any) -> str | None:
    """Says what is wrong with a line, by key: 'status is missing'; None if nothing is."""
    return next(_all_faults(record), None)


def _all_faults(record: Any) -> Iterator[str]:
    # first, or a walk along the shape might not end
    yield from _deep(record)
    yield from _faults("it", record, RECORD)
    done = MEASURED[record["kind"]] if record["status"] == "done" else {"reason": TEXT}
    yield from _faults("it", record, done)
    yield from _uneven(record)


def _faults(where: str, value: Any, shape: Any) -> Iterator[str]:
    if isinstance(shape, Leaf):
        if not shape.fits(value):
            yield f"{where} takes {shape.words}; got {shortened(value)}"
    elif isinstance(shape, Mapping | Each):
        if not isinstance(value, Mapping):
            yield f"{where} takes a mapping; got {shortened(value)}"
        elif isinstance(shape, Each):
            for name in value:
                yield from _faults(f"{where}.{shortened(name)}", value[name], shape.value)
        else:
            yield from _faults_by_name(where, value, shape)
    elif not isinstance(value, list):
        yield f"{where} takes a list; got {shortened(value)}"
    elif isinstance(shape, tuple) and len(value) != len(shape):
        yield f"{where} takes {len(shape)} values; got {shortened(value)}"
    else:
        for number, entry in enumerate(value):
            inner = shape[number] if isinstance(shape, tuple) else shape[0]
            yield from _faults(f"{where}[{number}]", entry, inner)


def _faults_by_name(where: str, value: Any, shape: Mapping[str, Any]) -> Iterator[str]:
    for name, inner in shape.items():
        key = name.removesuffix("?")
        place = key if where == "it" else f"{where}.{key}"
        if key in value:
            yield from _faults(place, value[key], inner)
        elif key == name:
            yield f"{place} is missing"


def _deep(record: Any) -> Iterator[str]:
    left = [(record, 0)]
    while left:
        value, depth = left.pop()
        if depth > DEEPEST:
            yield f"it is nested more than {DEEPEST} levels deep"
            return
        if isinstance(value, Mapping):
            left += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            left += [(part, depth + 1) for part in value]
        elif isinstance(value, str) and not _is_text(value):
            yield f"it holds text that is no Unicode: {shortened(value)}"


def _uneven(record: Mapping[str, Any]) -> Iterator[str]:
    """Finds lists of unequal lengths among those that belong together."""
    together = {name: list(record.get(name, {}).values()) for name in ("step_seconds", "chain")}
    timeline = record.get("timeline")
    if timeline:
        together["timeline"] = [timeline["points"], *timeline["bytes"].values()]
    for name, lists in together.items():
        if len(set(map(len, lists))) > 1:
            yield f"{name} holds lists of unequal lengths"


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:  # half of a pair, which JSON can spell
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float) -> bool:
    # integers of JSON have any length, and math.isfinite those of a float
    return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= least


def _is_plan(value: Any) -> bool:
    try:
        return value is None or (isinstance(value, str) and bool(Plan.parse(value)))
    except PlanError:
        return False


TEXT = Leaf("text", _is_text)
BYTES = Leaf("a whole number", _is_whole)
# what an allocator and the tensors do not agree on may be less than nothing
DIFFERENCE = Leaf("a whole number", lambda value: _is_whole(value, -(2**63)))
COUNT = Leaf("a whole number from 1", lambda value: _is_whole(value, 1))
NUMBER = Leaf("a finite number", _is_number)
SECONDS = Leaf("a number above 0", lambda value: _is_number(value) and value > 0)
PLAN = Leaf("a plan or null", _is_plan)
ANYTHING = Leaf("anything", lambda value: True)
SIZE = Leaf(
    "a whole number from 1 or one to three of them",
    lambda value: (
        _is_whole(value, 1)
        or (
            isinstance(value, list)
            and 1 <= len(value) <= 3
            and all(_is_whole(side, 1) for side in value)
        )
    ),
)
CHECKPOINT = Leaf(
    "true, false, a number or text",
    lambda value: isinstance(value, bool) or _is_whole(value) or _is_text(value),
)
SPREAD = {"median": NUMBER, "lower": NUMBER, "upper": NUMBER}
TIMELINE = {
    "length": COUNT,
    "points": [BYTES],
    "bytes": Each([DIFFERENCE]),
    "phases": [(BYTES, TEXT)],
    "peak": {"point": BYTES, "bytes": BYTES, "phase": TEXT, "categories": Each(DIFFERENCE)},
    "holders": [
        {
            "bytes": BYTES,
            "category": TEXT,
            "shape": [BYTES],
            "dtype": TEXT,
            "place": TEXT,
            "phase": TEXT,
            "line": TEXT,
        }
    ],
}
RECORD = {
    "key": TEXT,
    "kind": Leaf(" or ".join(KINDS), KINDS.__contains__),
    "status": Leaf(f"done, failed or {UNFIT}", ("done", "failed", UNFIT).__contains__),
    "cell": {
        "device": TEXT,
        "dtype": TEXT,
        "model": {
            "name": TEXT,
            "data": TEXT,
            "batch_size": COUNT,
            "size": SIZE,
            "arguments": Each(ANYTHING),
            "optimizer?": TEXT,
            "checkpoint": CHECKPOINT,
            "largest_ratio": NUMBER,
        },
    },
    "reason?": TEXT,
    "seconds": NUMBER,
    "finished?": TEXT,
    "environment?": Leaf("a mapping or null", lambda value: isinstance(value, Mapping | None)),
    "parameters?": BYTES,
    "plan?": PLAN,
    "memory?": {
        "peak": BYTES,
        "activation_peak": BYTES,
        # results of before tensors were counted lack these
        "tensor_peak?": BYTES,
        "tensor_activation_peak?": BYTES,
    },
    "digests?": [Each(TEXT)],
    "step_seconds?": {"baseline": [SECONDS], "checkpointed": [SECONDS]},
    "spread?": {"baseline": SPREAD, "checkpointed": SPREAD, "ratio": SPREAD},
    "missing?": Each(TEXT),
    "timeline?": TIMELINE,
    "chain?": {"names": [TEXT], "blocks": [BYTES], "saved": [DIFFERENCE]},
    "frontier?": {
        "optimal": [(BYTES, SECONDS)],
        "schemes": Each((BYTES, SECONDS)),
        "baseline": BYTES,
        "lower_bound": BYTES,
    },
}
SOME = Leaf("at least one entry", bool)
MEASURED = {
    "baseline": {"memory": SOME, "digests": SOME},
    "checkpointed": {"memory": SOME, "digests": SOME},
    "timing": {"step_seconds": Each(SOME), "spread": SOME},
}
"""What a cell that is done has measured; without it no fault would be found."""
