"""torch's CUDA caching allocator as a model: what a sequence of requests takes of a GPU's memory.

`torch.cuda.max_memory_allocated` counts blocks, `max_memory_reserved` the segments that blocks are
cut from; what lies between is cached or lost to fragmentation. A block is larger than its request,
a segment larger than its block:

    request           block                   segment
    up to 1 MiB       512 bytes, rounded up   2 MiB, shared by small blocks
    below 10 MiB      likewise                20 MiB, shared by large blocks
    10 MiB and more   likewise                the block, rounded up to 2 MiB

    segment  | block | block | free        |      the smallest free block that is large enough
             | block | free  | free        |      is cut; a freed block merges with its neighbors

The rules are those of c10/cuda/CUDACachingAllocator.cpp, the constants those of
c10/core/AllocatorConfig.h (torch 2.14), by default settings and on one stream. Left out: what
`PYTORCH_ALLOC_CONF` changes (expandable segments, a largest split, rounding to powers of two,
garbage collection), blocks that other streams use, pools of CUDA graphs. docs/cuda.md says how this
was compared with torch's own allocator.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from zoo.errors import ArgumentError
from zoo.units import exact_bytes

MIB = 1 << 20
BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
# a block of so many bytes gets a segment of its own
ALONE = 10 * MIB
# of cuBLAS, for each thread that multiplies, the forward's and the backward's: ":4096:2:16:8", in
# KiB, in parseChosenWorkspaceSize of aten/src/ATen/cuda/CublasHandlePool.cpp; 32 MiB on Hopper
CUBLAS_WORKSPACE = (4096 * 2 + 16 * 8) << 10


def block_of(kind: str) -> int:
    """Returns the unit in which `max_memory_allocated` counts on a kind of device: bytes, if 1."""
    return BLOCK if kind == "cuda" else 1


def rounded_up(size: int, unit: int) -> int:
    """Returns the least multiple of a unit that is no less than a size."""
    return -(-size // unit) * unit


def block_bytes(size: int) -> int:
    """Returns the bytes of the block that a request gets."""
    return rounded_up(size, BLOCK)


def segment_bytes(block: int) -> int:
    """Returns the bytes of a new segment for a block."""
    if block <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if block < ALONE else rounded_up(block, SMALL_SEGMENT)


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A part of a segment, next to those `before` and `after` it there; free without a request."""

    pool: "Pool"
    address: int
    size: int
    requested: int = 0
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def is_segment(self) -> bool:
        """Says whether it is a whole segment."""
        return self.before is None and self.after is None

    def cut(self, size: int) -> "Block":
        """Keeps so many bytes; returns the rest, a free block behind it."""
        rest = Block(self.pool, self.address + size, self.size - size, 0, self, self.after)
        if self.after is not None:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest

    def merge(self, other: "Block") -> None:
        """Takes in the block behind it."""
        self.size, self.after = self.size + other.size, other.after
        if other.after is not None:
            other.after.before = self


class Pool:
    """Free blocks of segments of a kind, the smallest first, of equal ones that of least address.

    `leaves`: a block is cut where so many bytes are left of it.
    """

    def __init__(self, leaves: int) -> None:
        self.leaves, self.free = leaves, list[Block]()

    def add(self, block: Block) -> None:
        """Adds a free block."""
        bisect.insort(self.free, block, key=_order)

    def remove(self, block: Block) -> None:
        """Removes a free block."""
        del self.free[bisect.bisect_left(self.free, _order(block), key=_order)]

    def take(self, size: int) -> Block | None:
        """Removes and returns the first block that is large enough; None if there is none."""
        place = bisect.bisect_left(self.free, (size, 0), key=_order)
        return self.free.pop(place) if place < len(self.free) else None

    def release(self) -> int:
        """Forgets the free blocks that are whole segments; returns their bytes."""
        released = sum(block.size for block in self.free if block.is_segment)
        self.free = [block for block in self.free if not block.is_segment]
        return released


class Count:
    """Bytes now, and the most that there were."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, size: int) -> None:
        """Counts bytes that come, or go where they are below 0."""
        self.now += size
        self.peak = max(self.peak, self.now)


class CachingAllocator:
    """Hands out blocks as torch does on a GPU where it may reserve `limit` bytes; None: any.

    Attributes:
        requested: bytes that were asked for and not freed.
        allocated: bytes of their blocks, `torch.cuda.memory_allocated`.
        reserved: bytes of all segments, `torch.cuda.memory_reserved`.
        free: the blocks that are cached.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.requested, self.allocated, self.reserved = Count(), Count(), Count()
        self._small, self._large = Pool(BLOCK), Pool(SMALL + 1)
        # of the last segment; no address is used again
        self._end = 0

    @property
    def free_blocks(self) -> tuple[Block, ...]:
        """The blocks that are cached."""
        return (*self._small.free, *self._large.free)

    def allocate(self, size: int) -> Block:
        """Returns a block for a request of at least a byte.

        Raises:
            ArgumentError: the limit leaves no room, also when all is released that is cached.
        """
        need = block_bytes(size)
        pool = self._small if need <= SMALL else self._large
        block = pool.take(need) or self._segment(pool, need)
        if block.size - need >= pool.leaves:
            pool.add(block.cut(need))
        block.requested = size
        self.requested.add(size)
        self.allocated.add(block.size)
        return block

    def free(self, block: Block) -> None:
        """Takes a block back and merges it with free neighbors."""
        assert block.requested, "a block was freed twice"
        self.requested.add(-block.requested)
        self.allocated.add(-block.size)
        block.requested = 0
        before, after, pool = block.before, block.after, block.pool
        if after is not None and not after.requested:
            pool.remove(after)
            block.merge(after)
        if before is not None and not before.requested:
            pool.remove(before)
            before.merge(block)
            block = before
        pool.add(block)

    def release_cached(self) -> None:
        """Gives back the segments of which no byte is in use, as `torch.cuda.empty_cache` does."""
        self.reserved.add(-self._large.release() - self._small.release())

    def _segment(self, pool: Pool, need: int) -> Block:
        size = segment_bytes(need)
        if not self._has_room(size):
            self.release_cached()
        if not self._has_room(size):
            raise ArgumentError(
                f"a block of {exact_bytes(need)} needs a segment of {exact_bytes(size)}; "
                f"{exact_bytes(self.reserved.now)} of {exact_bytes(self.limit or 0)} are reserved, "
                f"{exact_bytes(self.allocated.now)} of them in use. Raise the limit or plan for "
                "a smaller budget"
            )
        self.reserved.add(size)
        block = Block(pool, self._end, size)
        self._end += size
        return block

    def _has_room(self, size: int) -> bool:
        return self.limit is None or self.reserved.now + size <= self.limit


class CudaPeaks(NamedTuple):
    """The most bytes at once in a step, as `torch.cuda` counts them.

    requested: bytes of tensors and workspaces.
    allocated: bytes of their blocks, as `torch.cuda.max_memory_allocated` says.
    reserved: bytes of all segments, as `torch.cuda.max_memory_reserved` says.
    workspaces: bytes that cuBLAS holds at the end, part of all three.
    """

    requested: int
    allocated: int
    reserved: int
    workspaces: int


class Event(NamedTuple):
    """A storage that comes, of so many bytes, or goes (0); `storage` is any number for it."""

    storage: int
    size: int


def replayed(events: Iterable[Event], workspaces: int, limit: int | None = None) -> CudaPeaks:
    """Returns what events take in their order; `workspaces` of their bytes belong to cuBLAS.

    Raises:
        ArgumentError: the limit leaves no room.
    """
    allocator, blocks = CachingAllocator(limit), dict[int, Block]()
    for storage, size in events:
        if size:
            blocks[storage] = allocator.allocate(size)
        elif storage in blocks:
            allocator.free(blocks.pop(storage))
    return CudaPeaks(
        allocator.requested.peak, allocator.allocated.peak, allocator.reserved.peak, workspaces
    )


def _order(block: Block) -> tuple[int, int]:
    return block.size, block.address
