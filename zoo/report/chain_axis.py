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
from dataclasses import dataclass

from zoo.plan import Item, indices

MOST_STEPS = 400

# blocks of one stage: their names and steps
Group = list[tuple[str, range]]


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

    edges: tuple[float, ...]
    columns: tuple[range, ...]
    numbers: tuple[Label, ...]
    stages: tuple[Label, ...]


def chain_axis(names: Sequence[str], blocks: Sequence[int]) -> ChainAxis:
    """Lays a chain out along an axis: one column per step, or per block where there are many."""
    runs = _runs(blocks)
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
    groups = _groups([(block_name([names[step] for step in run]), run) for run in runs])
    return ChainAxis(
        tuple(edges),
        tuple(columns),
        tuple(_numbers(groups, edges)),
        tuple(_stages(groups, edges)),
    )


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
        if all(right.middle - left.middle >= room for left, right in itertools.pairwise(found)):
            return found
    return []


def _runs(blocks: Sequence[int]) -> list[range]:
    groups = [len(list(group)) for _, group in itertools.groupby(blocks)]
    stops = list(itertools.accumulate(groups))
    return [range(stop - size, stop) for size, stop in zip(groups, stops, strict=True)]


def _numbers(groups: Sequence[Group], edges: Sequence[float]) -> list[Label]:
    """Labels the blocks of a stage with the number that their name ends with."""
    pairs = (
        (re.search(r"\d+$", name), run) for group in groups for name, run in group[1:] and group
    )
    return [Label(match[0], edges[run.start], edges[run.stop]) for match, run in pairs if match]


def _stages(groups: Sequence[Group], edges: Sequence[float]) -> list[Label]:
    """Labels blocks in a row that share a path with it, others with their own name."""
    found = [
        Label(_stage(group), edges[group[0][1].start], edges[group[-1][1].stop]) for group in groups
    ]
    return _joined(found)


def _joined(labels: Sequence[Label]) -> list[Label]:
    """Makes one label of a part that repeats: embed, decode, embed, decode, ..."""
    found: list[Label] = []
    for label in labels:
        near = [
            place
            for place, old in enumerate(found[-2:], max(len(found) - 2, 0))
            if label.text in old.text.split(", ")
        ]
        if near:
            old = found[near[0] :]
            texts = dict.fromkeys(text for part in old for text in part.text.split(", "))
            found[near[0] :] = [Label(", ".join(texts), old[0].start, label.stop)]
        else:
            found.append(label)
    return found


def _stage(group: Group) -> str:
    parent, _, leaf = group[0][0].rpartition(".")
    if len(group) > 1:
        return parent.rpartition(".")[2]
    return f"{parent}.{leaf}" if leaf.isdigit() else leaf


def _groups(found: Sequence[tuple[str, range]]) -> list[Group]:
    """Puts blocks in a row together whose names differ after the last dot only."""
    numbered = enumerate(found)
    # a name without a dot stays alone
    grouped = itertools.groupby(
        numbered, key=lambda entry: entry[1][0].rpartition(".")[0] or entry[0]
    )
    return [[entry for _, entry in group] for _, group in grouped]
