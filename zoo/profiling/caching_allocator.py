"""A model of torch's CUDA caching allocator: the GPU memory that a sequence of requests takes.

`torch.cuda.max_memory_allocated` counts blocks, `max_memory_reserved` the segments that blocks are
split from; the difference is cached or lost to fragmentation. A block is at least as large as its
request, a segment at least as large as its block:

    request           block                   segment
    up to 1 MiB       512 bytes, rounded up   2 MiB, shared by small blocks
    below 10 MiB      likewise                20 MiB, shared by large blocks
    10 MiB and more   likewise                the block, rounded up to 2 MiB

    segment  | block | block | free        |      the smallest free block that is large enough
             | block | free  | free        |      is split; a freed block merges with its neighbors

A large block takes all of a free one where splitting it would leave 1 MiB or less. What a plan
counts for that is `with_rests`: exact for a block with a segment of its own, an estimate for blocks
that share one.

The rules are those of c10/cuda/CUDACachingAllocator.cpp, the constants those of
c10/core/AllocatorConfig.h (torch 2.14), with default settings and one stream. Not modeled: the
settings of `PYTORCH_ALLOC_CONF` (expandable segments, a largest split, rounding to powers of two,
garbage collection), blocks that other streams use, pools of CUDA graphs. docs/cuda.md says how the
model was compared with torch's own allocator.
"""

from collections.abc import Callable
from typing import NamedTuple

from zoo.errors import ArgumentError
from zoo.units import exact_bytes

MIB = 1 << 20
BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
# a block of this size or more gets a segment sized for it
ALONE = 10 * MIB
# cuBLAS has one for each thread that multiplies, the forward's and the backward's: ":4096:2:16:8",
# in KiB, in parseChosenWorkspaceSize of aten/src/ATen/cuda/CublasHandlePool.cpp; 32 MiB on Hopper
CUBLAS_WORKSPACE = (4096 * 2 + 16 * 8) << 10
# of the blocks that share large segments this part is lost to rests, 0.3 MiB of each segment of
# 20 MiB: the least power of two with which no recorded budget on a GPU is exceeded (docs/cuda.md)
RESTS = 64

# from the bytes of a storage to those that an allocator counts for it
Rounding = Callable[[int], int]


def as_requested(size: int) -> int:
    """Counts a storage as it is: the CPU's allocator neither rounds nor shares."""
    return size


def in_blocks(size: int) -> int:
    """Counts whole blocks: what the caching allocator takes where it splits every free block."""
    return rounded_up(size, BLOCK)


def with_rests(size: int) -> int:
    """Counts whole blocks, and the rests of free blocks that are too small to be split off.

    A block with a segment of its own takes all of it where 1 MiB or less is left.
    """
    block = in_blocks(size)
    if block < ALONE:
        return block + (in_blocks(block // RESTS) if block > SMALL else 0)
    rest = segment_bytes(block) - block
    return block + rest if rest <= SMALL else block


def rounding_of(kind: str, *, splits_all: bool = False) -> Rounding:
    """Returns how `max_memory_allocated` counts a storage on a kind of device.

    With expandable segments the allocator of CUDA splits every block: `splits_all`.
    """
    if kind != "cuda":
        return as_requested
    return in_blocks if splits_all else with_rests


def rounded_up(size: int, unit: int) -> int:
    """Rounds a size up to a multiple of a unit."""
    return -(-size // unit) * unit


def segment_bytes(block: int) -> int:
    """Returns the bytes of a new segment for a block."""
    if block <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if block < ALONE else rounded_up(block, SMALL_SEGMENT)


class AllocatedBlock(NamedTuple):
    """A block in use: its address, its bytes, and those that were requested."""

    address: int
    size: int
    requested: int


class Count:
    """Current and peak bytes."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, size: int) -> None:
        """Adds allocated bytes; freed ones are negative."""
        self.now += size
        self.peak = max(self.peak, self.now)


class CachingAllocator:
    """Allocates blocks as torch does on a GPU where it may reserve `limit` bytes; None: no limit.

    Attributes:
        requested: bytes that were requested and not freed.
        allocated: bytes of their blocks, `torch.cuda.memory_allocated`.
        reserved: bytes of all segments, `torch.cuda.memory_reserved`.
        segments: bytes of each segment, by its address.
        small, large: bytes of each free block in small or large segments, by its address.
        end: the address of the next segment; addresses are never reused.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.requested, self.allocated, self.reserved = Count(), Count(), Count()
        self.segments: dict[int, int] = {}
        self.small: dict[int, int] = {}
        self.large: dict[int, int] = {}
        self.end = 0

    def allocate(self, size: int) -> AllocatedBlock:
        """Returns a block for a request of at least a byte."""
        need = in_blocks(size)
        cached, least_rest = (self.small, BLOCK) if need <= SMALL else (self.large, SMALL + 1)
        if all(free < need for free in cached.values()):
            cached[self._new_segment(need)] = segment_bytes(need)
        # of blocks of the same size, the one at the lowest address
        taken, address = min((free, start) for start, free in cached.items() if free >= need)
        del cached[address]
        if taken - need >= least_rest:
            cached[address + need] = taken - need
            taken = need
        self.requested.add(size)
        self.allocated.add(taken)
        return AllocatedBlock(address, taken, size)

    def free(self, block: AllocatedBlock) -> None:
        """Caches a block, merged with its free neighbors in the segment."""
        self.requested.add(-block.requested)
        self.allocated.add(-block.size)
        cached = self.small if block.size <= SMALL else self.large
        start, end = block.address, block.address + block.size
        if end not in self.segments:
            end += cached.pop(end, 0)
        if start not in self.segments:
            start = next((free for free, size in cached.items() if free + size == start), start)
        cached[start] = end - start

    def release_cached(self) -> None:
        """Releases the segments without a block in use, as `torch.cuda.empty_cache` does."""
        for address, size in list(self.segments.items()):
            cached = self.small if size == SMALL_SEGMENT else self.large
            if cached.get(address) == size:
                del cached[address], self.segments[address]
                self.reserved.add(-size)

    def _new_segment(self, need: int) -> int:
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
        address = self.end
        self.segments[address] = size
        self.end += size
        return address

    def _has_room(self, size: int) -> bool:
        return self.limit is None or self.reserved.now + size <= self.limit


class CudaPeaks(NamedTuple):
    """Peak memory of a training step in bytes, as `torch.cuda` counts it.

    requested: bytes of tensors and workspaces.
    allocated: bytes of their blocks, as `torch.cuda.max_memory_allocated` returns.
    reserved: bytes of all segments, as `torch.cuda.max_memory_reserved` returns.
    workspaces: bytes that cuBLAS holds at the end; the other three include them.
    """

    requested: int
    allocated: int
    reserved: int
    workspaces: int
