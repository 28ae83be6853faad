"""The x axis of a picture of a model's steps: a column for each step, labels below.

    steps     conv1 | layer1.0.convolve layer1.0.add | layer1.1.convolve layer1.1.add | classify
    blocks    conv1   layer1.0                         layer1.1                         classify
    numbers           0                                1
    stages    conv1                  layer1                                             classify

More than `MOST_STEPS` steps get a column for each block: ResNet-1001 has 2,000 steps,
more than a page has points.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

from zoo.planner.plan import Item, indices

MOST_STEPS = 400


class AxisLabel(NamedTuple):
    """A text below a range of the axis, `start` to `stop` in columns."""

    text: str
    start: float
    stop: float

    @property
    def middle(self) -> float:
        """The position at which the text is centered."""
        return (self.start + self.stop) / 2


class StepAxis(NamedTuple):
    """The axis of n steps.

    edges: the start of each step, and the end of the last one: n + 1 rising numbers.
    columns: the steps in each column of the picture, a range.
    numbers, stages: two rows of labels.
    """

    edges: Sequence[float]
    columns: Sequence[range]
    numbers: Sequence[AxisLabel]
    stages: Sequence[AxisLabel]


def step_axis(names: Sequence[str], blocks: Sequence[int]) -> StepAxis:
    """Lays steps out along an axis: one column per step, or per block if there are many steps."""
    grouped = [[*group] for _, group in groupby(range(len(names)), blocks.__getitem__)]
    runs = [range(group[0], group[-1] + 1) for group in grouped]
    long = len(names) > MOST_STEPS
    columns = runs if long else [range(step, step + 1) for step in range(len(names))]
    edges = [
        column + index / len(steps)
        for column, steps in enumerate(columns)
        for index in range(len(steps))
    ]
    edges.append(len(columns))
    labels = [
        AxisLabel(block_name(names[run.start : run.stop]), edges[run.start], edges[run.stop])
        for run in runs
    ]
    # groups of adjacent blocks whose names differ only after the last dot
    named = groupby(enumerate(labels), lambda entry: entry[1].text.rpartition(".")[0] or entry[0])
    groups = [[label for _, label in group] for _, group in named]
    numbers = [
        label._replace(text=match[0])
        for group in groups
        for label in group
        if len(group) > 1 and (match := re.search(r"\d+$", label.text))
    ]
    stages: list[AxisLabel] = []
    for group in groups:
        label = AxisLabel(_stage(group), group[0].start, group[-1].stop)
        # a repeated sequence gets one label: embed, decode, embed, decode -> "embed, decode"
        for index in range(max(len(stages) - 2, 0), len(stages)):
            if label.text in stages[index].text.split(", "):
                texts = ", ".join(old.text for old in stages[index:]).split(", ")
                label = AxisLabel(", ".join(dict.fromkeys(texts)), stages[index].start, label.stop)
                del stages[index:]
                break
        stages.append(label)
    return StepAxis(edges, columns, numbers, stages)


def segments(items: Sequence[Item], level: int = 0) -> Iterator[tuple[range, int]]:
    """Yields the steps of each segment, and how many segments are around it."""
    for item in items:
        if not isinstance(item, int):
            steps = [*indices(item)]
            yield range(steps[0], steps[-1] + 1), level
            yield from segments(item, level + 1)


def block_name(names: Sequence[str]) -> str:
    """Names a block after the path that its steps share, else after its first step."""
    plain = [re.sub(r"\(.*", "", name) for name in names]
    # a layer in a row of layers is known by its number
    if len(set(plain)) == 1 and plain[0].rpartition(".")[2].isdecimal():
        return plain[0]
    paths = zip(*(name.split(".")[:-1] for name in plain), strict=False)
    shared = takewhile(lambda parts: len(set(parts)) == 1, paths)
    return ".".join(parts[0] for parts in shared) or plain[0]


def fitting(labels: Sequence[AxisLabel], room: float) -> list[AxisLabel]:
    """Leaves out labels that are closer than `room` columns to the previous one."""
    chosen: list[AxisLabel] = []
    for label in labels:
        if not chosen or label.middle - chosen[-1].middle >= room:
            chosen.append(label)
    return chosen


def round_numbers(labels: Sequence[AxisLabel], room: float) -> list[AxisLabel]:
    """Returns every label, or every second, fifth, tenth ..., so that each has `room` columns."""
    for every in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        chosen = [label for label in labels if int(label.text) % every == 0]
        if fitting(chosen, room) == chosen:
            return chosen
    return []


def _stage(group: Sequence[AxisLabel]) -> str:
    """Names adjacent blocks after the path that they share, a single one by its own name."""
    parent, _, leaf = group[0].text.rpartition(".")
    if len(group) > 1:
        return parent.rpartition(".")[2]
    return f"{parent}.{leaf}" if leaf.isdigit() else leaf
