"""The field's classic plans, by name, for use and for comparison.

They look at which step belongs to which block, or at where the arithmetic is, never at bytes.
"""

import itertools
import math
from collections.abc import Callable, Container, Sequence

from zoo.errors import ArgumentError, nearest, shortened
from zoo.planner.costs import StepCosts
from zoo.planner.plan import Item, Plan


def segments(blocks: Sequence[int], count: int) -> Plan:
    """Cuts a chain into `count` segments of as equal numbers of blocks as possible.

    `blocks` gives each step's block number. As in `torch.utils.checkpoint`'s
    `checkpoint_sequential`, the last segment is kept: its backward comes at once.

    Raises:
        ArgumentError: fewer than 1 or more segments than blocks.
    """
    total = len(set(blocks))
    if not 1 <= count <= total:
        raise ArgumentError(
            f"checkpoint={count} asks for {count} segments; this chain has {total} blocks, "
            f"so choose 1 to {total}"
        )
    order = {block: place for place, block in enumerate(dict.fromkeys(blocks))}
    groups = _grouped([order[block] * count // total for block in blocks])
    return Plan([*groups[:-1], *groups[-1]])


def sqrt(blocks: Sequence[int]) -> Plan:
    """Cuts n blocks into sqrt(n) segments (Chen et al. 2016, arXiv:1604.06174)."""
    return segments(blocks, max(1, round(math.sqrt(len(set(blocks))))))


def each_block(blocks: Sequence[int], whole: Container[int] = ()) -> Plan:
    """Makes each block of several steps a segment: what timm and torchvision users get.

    A block of a single step is one where that step is among those that call a `whole` module.
    """
    return Plan([group if group[0] in whole else _segment(group) for group in _grouped(blocks)])


def cheap(costs: StepCosts) -> Plan:
    """Keeps convolutions and matrix products and recomputes the rest.

    Each segment ends with a step that does arithmetic: its recomputation stops before it.
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
    """Makes more and more of the first `steps` steps segments of their own.

    Those come first that free the most bytes for the seconds that their recomputation takes.
    """
    freed = costs.newly_saved()
    worth = [step for step in range(steps) if freed[step] > 0]
    recomputed: set[int] = set()
    plans = []
    for chosen in sorted(worth, key=lambda step: costs.seconds[step] / freed[step]):
        recomputed.add(chosen)
        plans.append(Plan([(step,) if step in recomputed else step for step in range(steps)]))
    return plans


# `each_block`, which takes more than the blocks
BLOCKS = "blocks"
FROM_BLOCKS: dict[str, Callable[[Sequence[int]], Plan]] = {"sqrt": sqrt}
FROM_COSTS: dict[str, Callable[[StepCosts], Plan]] = {"cheap": cheap}
NAMES = (*FROM_BLOCKS, BLOCKS, *FROM_COSTS)


def check_name(name: str) -> None:
    """Raises ArgumentError when there is no scheme of this name."""
    if name not in NAMES:
        raise ArgumentError(
            f"checkpoint={shortened(name)} is no scheme; choose True, False, a number of segments, "
            f"a Plan, auto, {', '.join(NAMES)}.{nearest(name, NAMES)}"
        )


def _grouped(keys: Sequence[int]) -> list[tuple[int, ...]]:
    pairs = itertools.groupby(range(len(keys)), key=keys.__getitem__)
    return [tuple(group) for _, group in pairs]


def _segment(steps: tuple[int, ...]) -> Item:
    return steps if len(steps) > 1 else steps[0]
