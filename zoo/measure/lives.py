"""From storages seen coming and going to a timeline: categories, order, and what no tensor showed.

With the allocator's own events each storage is looked up among them by its address and time; its
life is then the allocation's, exactly, and allocations that belong to no storage are left over:

    allocator   address 7   +64 .............. -64       address 9   +512 -512
    storage     address 7      seen ..... gone           none: inside of a kernel, "unseen"
"""

import bisect
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zoo.measure.places import NOWHERE, Place
from zoo.measure.timeline import Allocation, Mark, Timeline

BEFORE = "before"


@dataclass(slots=True)
class Life:
    """A storage as it was noticed; times in nanoseconds.

    `resident` is one that was there before. `saved` is one that was there, made before it, when a
    backward began. `category` is "" until something settles it.
    """

    bytes: int
    born: int
    died: int | None = None
    category: str = ""
    saved: bool = False
    resident: bool = False
    phase: str = ""
    place: Place = NOWHERE
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    address: int = 0

    def settled(self) -> str:
        """Returns the category."""
        if self.category:
            return self.category
        if self.resident:
            return "inputs"
        if self.phase == "recompute":
            return "recomputed"
        return "saved activations" if self.saved else "temporaries"


@dataclass
class Record:
    """What was noticed: lives, and when phase and place changed."""

    lives: list[Life] = field(default_factory=list)
    trail: list[tuple[int, str, Place]] = field(default_factory=list)
    _latest: int = 0

    def now(self) -> int:
        """Returns the nanoseconds of the clock, more each time."""
        self._latest = max(self._latest + 1, time.time_ns())
        return self._latest

    def around(self, moment: int) -> tuple[str, Place]:
        """Returns the phase and place at a moment."""
        index = bisect.bisect(self.trail, moment, key=lambda entry: entry[0])
        return self.trail[index - 1][1:] if index else ("other", NOWHERE)


@dataclass(slots=True)
class Block:
    """A block that the allocator gave out: address, bytes, when, and when it was taken back."""

    address: int
    bytes: int
    start: int
    end: int | None = None


def settle(
    timeline: Timeline, record: Record, events: Iterable[tuple[int, int, int]] | None
) -> None:
    """Fills a timeline; `events` are the allocator's (nanoseconds, address, bytes) or None."""
    lives = record.lives
    if events is not None:
        timeline.allocator = True
        lives = lives + _unseen(record, _matched(lives, _blocks(events)))
    births = [(life.born, number) for number, life in enumerate(lives) if not life.resident]
    deaths = [(life.died, ~number) for number, life in enumerate(lives) if life.died is not None]
    changes = sorted([*births, *deaths])
    points = {number: point for point, (_, number) in enumerate(changes, 1)}
    timeline.length = len(changes)
    timeline.allocations = [
        _allocation(life, points.get(number, 0), points.get(~number))
        for number, life in enumerate(lives)
    ]
    timeline.phases = _marks(record, [moment for moment, _ in changes])


def _allocation(life: Life, start: int, end: int | None) -> Allocation:
    return Allocation(
        bytes=life.bytes,
        start=start,
        end=end,
        category=life.settled(),
        phase=life.phase,
        **life.place._asdict(),
        shape=life.shape,
        dtype=life.dtype,
        name=life.name,
    )


def _marks(record: Record, moments: Sequence[int]) -> list[Mark]:
    marks: list[Mark] = []
    for moment, phase, _ in record.trail:
        if not marks or marks[-1].phase != phase:
            point = bisect.bisect(moments, moment)
            if marks and marks[-1].point == point:
                marks.pop()  # nothing happened in it
            if not marks or marks[-1].phase != phase:
                marks.append(Mark(point, phase))
    return marks


def _blocks(events: Iterable[tuple[int, int, int]]) -> list[Block]:
    found: list[Block] = []
    open_at: dict[int, Block] = {}
    for moment, address, size in events:
        if size > 0:
            open_at[address] = Block(address, size, moment)
            found.append(open_at[address])
        elif address in open_at:
            open_at.pop(address).end = moment
    return found


def _matched(lives: Sequence[Life], blocks: Sequence[Block]) -> list[Block]:
    """Gives each life the times of its block, and returns the blocks that are left over."""
    at: dict[int, list[Block]] = {}
    for block in blocks:
        at.setdefault(block.address, []).append(block)
    taken: set[int] = set()
    for life in lives:
        there = at.get(life.address, [])
        index = bisect.bisect(there, life.born, key=lambda block: block.start) - 1
        if index < 0 or not _holds(there[index], life) or id(there[index]) in taken:
            continue
        life.born, life.died, life.resident = there[index].start, there[index].end, False
        taken.add(id(there[index]))
    return [block for block in blocks if id(block) not in taken]


def _holds(block: Block, life: Life) -> bool:
    return block.bytes >= life.bytes and (block.end is None or block.end >= life.born)


def _unseen(record: Record, blocks: Iterable[Block]) -> list[Life]:
    lives = []
    for block in blocks:
        phase, place = record.around(block.start)
        lives.append(Life(block.bytes, block.start, block.end, "unseen", phase=phase, place=place))
    return lives
