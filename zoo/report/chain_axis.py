"""Where the steps of a chain stand in a picture, and what stands below them.

    steps     conv1 | layer1.0.convolve layer1.0.add | layer1.1.convolve layer1.1.add | classify
    blocks    conv1   layer1.0                         layer1.1                         classify
    numbers           0                                1
    stages    conv1                  layer1                                             classify

A chain of up to `MOST_STEPS` steps is drawn step by step, a longer one block by block: ResNet-1001
has 2,000 steps, more than a page has points.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zoo.planner.plan import Item, indices

MOST_STEPS = 400


@dataclass(frozen=True)
class Label:
    """A text below a range of the axis, `start` to `stop` in columns."""

    text: str
    start: float
    stop: float

    @property
    def middle(self) -> float:
        """Where the text is centered."""
        return (self.start + self.stop) / 2


@dataclass(frozen=True)
class ChainAxis:
    """The axis of a chain of n steps.

    edges: for each step where it starts, and where the last one ends: n + 1 numbers, rising.
    columns: for each column of the picture the steps in it, a range.
    numbers, stages: two rows of labels.
    """

    edges: Sequence[float]
    columns: Sequence[range]
    numbers: Sequence[Label]
    stages: Sequence[Label]


def chain_axis(names: Sequence[str], blocks: Sequence[int]) -> ChainAxis:
    """Lays a chain out along an axis: one column per step, or per block where there are many."""
    stops = itertools.accumulate(len(list(group)) for _, group in itertools.groupby(blocks))
    runs = [range(*pair) for pair in itertools.pairwise([0, *stops])]
    if len(names) <= MOST_STEPS:
        columns = [range(step, step + 1) for step in range(len(names))]
        edges = [float(step) for step in range(len(names) + 1)]
    else:
        columns = runs
        starts = (
            number + place / len(run)
            for number, run in enumerate(runs)
            for place in range(len(run))
        )
        edges = [*starts, float(len(runs))]
    found = [
        Label(block_name([names[step] for step in run]), edges[run.start], edges[run.stop])
        for run in runs
    ]
    # blocks in a row whose names differ after the last dot only; a name without a dot stays alone
    grouped = itertools.groupby(
        enumerate(found), key=lambda entry: entry[1].text.rpartition(".")[0] or entry[0]
    )
    groups = [[label for _, label in group] for _, group in grouped]
    numbers = [
        replace(label, text=match[0])
        for group in groups
        for label in group
        if len(group) > 1 and (match := re.search(r"\d+$", label.text))
    ]
    return ChainAxis(edges, columns, numbers, _joined([_stage(group) for group in groups]))


def segments(items: Sequence[Item], level: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yields each segment's first step, the step after its last, and how many are around it."""
    for item in items:
        if not isinstance(item, int):
            steps = list(indices(item))
            yield steps[0], steps[-1] + 1, level
            yield from segments(item, level + 1)


def block_name(names: Sequence[str]) -> str:
    """Names a block by the path that its steps share, else by its first step."""
    plain = [re.sub(r"\(.*", "", name) for name in names]
    paths = zip(*(name.split(".")[:-1] for name in plain), strict=False)
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, paths)
    return ".".join(parts[0] for parts in shared) or plain[0]


def fitting(labels: Sequence[Label], room: float) -> list[Label]:
    """Leaves out labels that would stand closer than `room` columns to the one before."""
    found: list[Label] = []
    for label in labels:
        if not found or label.middle - found[-1].middle >= room:
            found.append(label)
    return found


def round_numbers(labels: Sequence[Label], room: float) -> list[Label]:
    """Leaves every label, or every second, fifth, tenth ..., so that all have `room` columns."""
    for every in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        found = [label for label in labels if int(label.text) % every == 0]
        if fitting(found, room) == found:
            return found
    return []


def _stage(group: Sequence[Label]) -> Label:
    """Labels blocks in a row by the path that they share, a single one by its own name."""
    parent, _, leaf = group[0].text.rpartition(".")
    if len(group) > 1:
        leaf = parent.rpartition(".")[2]
    elif leaf.isdigit():
        leaf = f"{parent}.{leaf}"
    return Label(leaf, group[0].start, group[-1].stop)


def _joined(labels: Sequence[Label]) -> list[Label]:
    """Makes one label of a part that repeats: embed, decode, embed, decode, ..."""
    found: list[Label] = []
    for label in labels:
        near = [old for old in found[-2:] if label.text in old.text.split(", ")]
        if near:
            repeated = found[found.index(near[0]) :]
            texts = dict.fromkeys(text for old in repeated for text in old.text.split(", "))
            del found[-len(repeated) :]
            found.append(Label(", ".join(texts), repeated[0].start, label.stop))
        else:
            found.append(label)
    return found
