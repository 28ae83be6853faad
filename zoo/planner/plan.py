"""A plan, or checkpointing schedule: which steps of a model are kept and which are recomputed.

torch has no such object: its checkpointing is a call for each segment. As data, a plan can be
computed, compared, stored, drawn and simulated without a model. It expresses uniform and sqrt(n)
segments (Chen et al. 2016, arXiv:1604.06174) and nested optimal schedules (Beaumont et al. 2019,
arXiv:1911.13214).
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, Union

from zoo.errors import PlanError, shortened
from zoo.planner.json_reader import read_json
from zoo.units import plural

Item = Union[int, tuple["Item", ...]]
Entry = TypeVar("Entry")

# a mistyped range must not fill memory
LARGEST = 10**6
# the most levels of segments: making, printing or storing a plan takes a call for each level,
# and Python's stack holds 1,000 calls by default, including those of the caller
DEEPEST = 500
# a token of the text form: an index, a range, or a parenthesis
_TOKEN = r"\d+(?:-\d+)?|[()]"


class Plan(tuple[Item, ...]):
    """A nested tuple of step indices in order, each index once: `Plan(((0, 1), (2, (3, 4)), 5))`.

    An index at the top level is a kept step. A tuple is a segment: only its inputs stay, and its
    steps are recomputed when the backward reaches it. A tuple inside a tuple is a segment of that
    recomputation.

        plan            ((0, 1),        (2, (3, 4)),              5)
        forward         0 1             2 3 4                     5
        backward of 5                                             saved tensors
        backward of 2-4                 2, then 3 4 recomputed
        backward of 0-1 0 1 recomputed

    Raises:
        PlanError: an entry that is neither an index nor a tuple, an empty segment, segments that
            nest more than `DEEPEST` deep, or indices that are not 0, 1, 2, ... in order.
    """

    __slots__ = ()

    def __new__(cls, items: Sequence[Any] = ()) -> "Plan":
        """Checks nested sequences and converts them to tuples."""
        if not isinstance(items, Iterable) or isinstance(items, str | bytes | dict):
            raise PlanError(
                f"a plan is a sequence of step indices and tuples, not {shortened(items)}"
            )
        return super().__new__(cls, _checked(items, itertools.count()))

    @classmethod
    def keep_all(cls, steps: int) -> "Plan":
        """Returns the plan that keeps each of `steps` steps: the baseline."""
        return cls(range(steps))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Reads the text form: `Plan.parse("(0-1) (2 (3-4)) 5")`.

        Raises:
            PlanError: text that holds anything but indices, ranges and balanced parentheses.
        """
        if not isinstance(text, str):
            raise PlanError(f"Plan.parse takes text; got {type(text).__name__}")
        if wrong := re.sub(rf"{_TOKEN}|\s", "", text):
            raise PlanError(
                f"the plan {shortened(text)} holds {wrong[0]!r}; write indices, ranges and "
                "parentheses, as in '(0-1) (2 (3-4)) 5'"
            )
        stack: list[list[Any]] = [[]]
        position = 0
        for token in re.findall(_TOKEN, text):
            if token == "(":
                stack.append([])
            elif token != ")":
                steps = _range(token, text)
                # checked here, since a text of many ranges could fill memory
                position = _check_index(steps.start, position) + len(steps)
                stack[-1].extend(steps)
            elif len(stack) > 1:
                closed = stack.pop()
                stack[-1].append(closed)
            else:
                raise PlanError(f"the plan {shortened(text)} closes a segment that it did not open")
        if len(stack) > 1:
            raise PlanError(f"the plan {shortened(text)} leaves {len(stack) - 1} segment(s) open")
        return cls(stack[0])

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what `to_json` wrote: nested lists, and nothing else.

        Raises:
            PlanError: the text holds no plan; `zoo.PlanReport.from_json` reads a report.
        """
        return read_json(text, "plan", PlanError, cls.from_value)

    @classmethod
    def from_value(cls, values: Any) -> "Plan":
        """Makes a plan from nested lists, as a JSON file holds them.

        Raises:
            PlanError: the lists are malformed.
        """
        if isinstance(values, dict) and "plan" in values:
            raise PlanError("it holds a plan and its costs, which zoo.PlanReport.from_json reads")
        return cls(values)

    def to_json(self) -> str:
        """Writes the plan as nested JSON lists."""
        return json.dumps(self)

    def flatten(self) -> tuple[int, ...]:
        """Returns the step indices without the nesting."""
        return tuple(indices(self))

    def check(self, steps: int) -> None:
        """Raises PlanError unless the plan is for a model of `steps` steps."""
        planned = len(self.flatten())
        if planned != steps:
            raise PlanError(
                f"the plan covers {planned} steps but the model has {steps}; "
                f"make it end with step {steps - 1}, or pass checkpoint=True to have one made"
            )

    def runs(self) -> tuple[int, ...]:
        """Returns how often each step's forward runs in one training step: 1 for a kept step.

        A recomputation that ends with an inner segment does not run that segment, which is
        recomputed for its own backward anyway.
        """
        return tuple(itertools.chain.from_iterable(map(_runs, self)))

    def depth(self) -> int:
        """Returns how deep segments nest: 0 when every step is kept."""
        brackets = re.findall(r"[][]", self.to_json())
        return max(itertools.accumulate(1 if bracket == "[" else -1 for bracket in brackets)) - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plan":
        # a plan is immutable, and copying a deep one would overflow the stack
        return self

    def __repr__(self) -> str:
        return f"Plan({tuple(self)!r})"

    def __str__(self) -> str:
        runs, depth = self.runs(), self.depth()
        kept_steps = runs.count(1)
        segments = sum(isinstance(item, tuple) for item in self)
        return (
            f"{plural(len(runs), 'step')}: {kept_steps} kept, {len(runs) - kept_steps} "
            f"recomputed in {plural(segments, 'segment')}, "
            f"{f'nested {depth} deep' if depth > 1 else 'not nested'}\n{self.text()}"
        )

    def text(self) -> str:
        """Returns the text form that `parse` reads: segments in parentheses, runs as ranges."""
        spaced = self.to_json()[1:-1].translate(str.maketrans("[]", "()", ","))
        return re.sub(r"(\d+)(?: \d+)* (\d+)", r"\1-\2", spaced)

    def draw(self, names: Sequence[str] = ()) -> str:
        """Draws one line per step: a bar for each segment around it, its name, kept or runs.

          keep         0  conv1
        ┌ recompute    1  bn1
        └ recompute    2  conv2
        """
        lines = []
        labels = {1: "keep", 2: "recompute"}
        bars_of_steps = _bars(self, self.depth())
        for index, bars, runs in zip(self.flatten(), bars_of_steps, self.runs(), strict=True):
            name = names[index] if index < len(names) else ""
            label = labels.get(runs, f"x{runs}")
            lines.append(f"{bars} {label:9} {index:>4}  {name}".rstrip())
        return "\n".join(lines)


class RoomyPlan(NamedTuple):
    """A plan, and how many times as large tensors may get until it breaks a budget in bytes.

    `offloads`: the first steps of the items that the host holds. A plan that `leaves_autocast` is
    for steps whose backward runs outside of the autocast that is around the forward. A step takes
    `peak` bytes, if that is known. Beside what no plan changes it `holds` some between forward and
    backward, and `casts` of weights until it leaves an autocast around the forward.
    """

    plan: Plan
    room: float = math.inf
    offloads: frozenset[int] = frozenset()
    leaves_autocast: bool = False
    peak: int = 0
    holds: int = 0
    casts: int = 0

    @property
    def text(self) -> str:
        """A line of text."""
        offloads = json.dumps(sorted(self.offloads), separators=(",", ":"))
        numbers = f"{self.room!r} {self.leaves_autocast:d} {self.peak} {self.holds} {self.casts}"
        return f"{numbers} {offloads} {self.plan.text()}"

    @classmethod
    def parse(cls, text: str) -> "RoomyPlan":
        """Reads a line of text."""
        room, leaves, *bytes_of, offloads, plan = text.split(maxsplit=6)
        steps = frozenset(json.loads(offloads))
        return cls(Plan.parse(plan), float(room), steps, leaves == "1", *map(int, bytes_of))


def indices(item: Item) -> Iterator[int]:
    """Yields the step indices of one entry of a plan, in order."""
    waiting: list[Iterator[Item]] = [iter((item,))]
    while waiting:
        for entry in waiting[-1]:
            if not isinstance(entry, int):
                waiting.append(iter(entry))
                break
            yield entry
        else:
            waiting.pop()


def first_step(item: Item) -> int:
    """Returns the first step index of one entry of a plan."""
    return item if isinstance(item, int) else next(indices(item))


def _checked(items: Iterable[Any], steps: Iterator[int], depth: int = 0) -> tuple[Item, ...]:
    """Converts nested sequences to tuples; `steps` counts the indices so far."""
    # a list may contain itself
    if depth > DEEPEST:
        raise PlanError(
            f"the segments of a plan nest more than {DEEPEST} deep; use fewer, longer segments"
        )
    nested: list[Item] = []
    for entry in items:
        if not isinstance(entry, tuple | list):
            nested.append(_check_index(entry, next(steps)))
        elif entry:
            nested.append(_checked(entry, steps, depth + 1))
        else:
            raise PlanError("a plan holds an empty segment; leave it out")
    return tuple(nested)


def _check_index(entry: Any, position: int) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise PlanError(f"a plan holds step indices and tuples of them, not {shortened(entry)}")
    if entry != position:
        raise PlanError(
            f"a plan lists the steps 0, 1, 2, ... in order, each once; position {position} "
            f"holds step {shortened(entry)}. Segments may nest but not reorder or skip."
        )
    return entry


def _range(token: str, text: str) -> range:
    """Returns the steps of '7' or '2-5'."""
    numbers = [digits.lstrip("0") or "0" for digits in token.split("-")]
    # int() refuses thousands of digits
    if max(map(len, numbers)) > len(str(LARGEST)) or int(numbers[-1]) > LARGEST:
        raise PlanError(f"the plan {shortened(text)} names a step beyond {LARGEST}")
    first, last = int(numbers[0]), int(numbers[-1])
    if last < first:
        raise PlanError(
            f"the plan {shortened(text)} holds {first}-{last}, a range that runs backwards"
        )
    return range(first, last + 1)


def _runs(item: Item) -> list[int]:
    if isinstance(item, int):
        return [1]
    counts: list[int] = []
    for position, inner in enumerate(item):
        handed_over = position == len(item) - 1 and isinstance(inner, tuple)
        counts += [count + (not handed_over) for count in _runs(inner)]
    return counts


def _bars(items: Sequence[Item], depth: int) -> Iterator[str]:
    for item in items:
        if isinstance(item, int):
            yield " " * depth
            continue
        inner = list(_bars(item, depth - 1))
        for position, rest in enumerate(inner):
            first, last = position == 0, position == len(inner) - 1
            yield ("─" if first and last else "┌" if first else "└" if last else "│") + rest


def falling(
    entries: Iterable[Entry], order: Callable[[Entry], Any], value: Callable[[Entry], Any]
) -> list[Entry]:
    """Returns a Pareto front: entries in an order, each of a value below all before it."""
    front: list[Entry] = []
    for entry in sorted(entries, key=order):
        if not front or value(entry) < value(front[-1]):
            front.append(entry)
    return front


def thinned(entries: Sequence[Entry], count: int) -> list[Entry]:
    """Chooses at most `count` entries, evenly, including the first and the last."""
    count = min(count, len(entries))
    return [entries[n * (len(entries) - 1) // max(count - 1, 1)] for n in range(count)]
