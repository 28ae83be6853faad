"""The classic checkpointing schemes, by name.

They depend on the blocks or the operations of steps, never on bytes.
"""

import itertools
import math
from collections.abc import Callable, Container, Sequence

from zoo.errors import ArgumentError, nearest, shortened
from zoo.planner.costs import StepCosts
from zoo.planner.plan import Item, Plan


class SegmentsError(ArgumentError):
    """A model has fewer blocks than segments were asked for."""


def segments(blocks: Sequence[int], count: int) -> Plan:
    """Cuts steps into `count` segments, with numbers of blocks as equal as possible.

    `blocks` holds the block number of each step. The last segment is kept, as in torch's
    `checkpoint_sequential`: its backward comes first.

    Raises:
        SegmentsError: fewer than 1 segment, or more segments than blocks.
    """
    total = len(set(blocks))
    if not 1 <= count <= total:
        raise SegmentsError(
            f"checkpoint={count} asks for {count} segments; this model has {total} blocks, "
            f"so choose 1 to {total}"
        )
    order = {block: index for index, block in enumerate(dict.fromkeys(blocks))}
    groups = _grouped([order[block] * count // total for block in blocks])
    return Plan([*groups[:-1], *groups[-1]])


def sqrt(blocks: Sequence[int]) -> Plan:
    """Cuts n blocks into sqrt(n) segments (Chen et al. 2016, arXiv:1604.06174)."""
    return segments(blocks, max(1, round(math.sqrt(len(set(blocks))))))


def each_block(blocks: Sequence[int], whole: Container[int] = ()) -> Plan:
    """Makes each block of several steps a segment, as timm and torchvision do.

    A block of one step is a segment if the step is in `whole`: it has several parts or kernels.
    """
    return Plan([group if group[0] in whole else _segment(group) for group in _grouped(blocks)])


def cheap(costs: StepCosts) -> Plan:
    """Keeps convolutions and matrix products and recomputes the rest.

    Each segment ends with a step that has operations: the recomputation stops before these.
    """
    items: list[Item] = []
    run: list[int] = []
    for step, flops in enumerate(costs.flops):
        run.append(step)
        if flops:
            items.append(_segment(tuple(run)))
            run = []
    return Plan([*items, *run])


def one_by_one(costs: StepCosts, steps: int) -> list[Plan]:
    """Returns plans that recompute more and more of the first `steps` steps, each on its own.

    Steps that free the most bytes per second of recomputation come first.
    """
    freed = costs.newly_saved()
    worth = [step for step in range(steps) if freed[step] > 0]
    every, recomputed = range(len(costs)), set[int]()
    plans = []
    for chosen in sorted(worth, key=lambda step: costs.seconds[step] / freed[step]):
        recomputed.add(chosen)
        plans.append(Plan([(step,) if step in recomputed else step for step in every]))
    return plans


NAMES = ("sqrt", "blocks", "cheap")


def named(
    name: str, blocks: Sequence[int], whole: Container[int], costs: Callable[[], StepCosts]
) -> Plan:
    """Returns the plan of a scheme; `whole` is that of `each_block`, `costs` are for `cheap`."""
    if name == "sqrt":
        return sqrt(blocks)
    return each_block(blocks, whole) if name == "blocks" else cheap(costs())


def check_name(name: object) -> None:
    """Raises ArgumentError if there is no scheme of this name."""
    if name not in NAMES:
        raise ArgumentError(
            f"checkpoint={shortened(name)} is no scheme; choose True, False, 'auto', a number of "
            f"segments, a Plan, {', '.join(NAMES)}.{nearest(str(name), NAMES)}"
        )


def _grouped(keys: Sequence[int]) -> list[tuple[int, ...]]:
    pairs = itertools.groupby(range(len(keys)), key=keys.__getitem__)
    return [tuple(group) for _, group in pairs]


def _segment(steps: tuple[int, ...]) -> Item:
    return steps if len(steps) > 1 else steps[0]
