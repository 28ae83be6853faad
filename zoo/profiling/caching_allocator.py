"""How torch's CUDA caching allocator counts a storage: in blocks of the segments that it reserves.

`torch.cuda.max_memory_allocated` counts blocks, `max_memory_reserved` the segments that blocks are
split from; the difference is cached or lost to fragmentation. A block is at least as large as its
request, a segment at least as large as its block:

    request           block                   segment
    up to 1 MiB       512 bytes, rounded up   2 MiB, shared by small blocks
    below 10 MiB      likewise                20 MiB, shared by large blocks
    10 MiB and more   likewise                the block, rounded up to 2 MiB

A large block takes all of a free one if splitting it would leave 1 MiB or less. Plans count that
by `with_rests`: exact for a block with a segment of its own, an estimate for blocks
that share one.

The rules are those of c10/cuda/CUDACachingAllocator.cpp, the constants those of
c10/core/AllocatorConfig.h (torch 2.14), with default settings. Not counted: a largest split,
rounding to powers of two and other settings of `PYTORCH_ALLOC_CONF`.
"""

from collections.abc import Callable

MIB = 1 << 20
BLOCK = 512
SMALL = MIB
SEGMENT = 2 * MIB
# a block of this size or more gets a segment sized for it
OWN_SEGMENT = 10 * MIB
# cuBLAS has one for each thread that multiplies, the forward's and the backward's: ":4096:2:16:8",
# in KiB, in parseChosenWorkspaceSize of aten/src/ATen/cuda/CublasHandlePool.cpp; 32 MiB on Hopper
CUBLAS_WORKSPACE = (4096 * 2 + 16 * 8) << 10
# blocks that share large segments lose one of so many bytes to rests, 0.3 MiB of each segment of
# 20 MiB: an estimate, chosen by the recorded steps of tests/policy/recorded_steps.py, of which none
# takes more than predicted with it
RESTS = 64

# from the bytes of a storage to those that an allocator counts for it
Rounding = Callable[[int], int]


def as_requested(size: int) -> int:
    """Counts a storage as it is: the CPU's allocator neither rounds nor shares."""
    return size


def in_blocks(size: int) -> int:
    """Counts whole blocks, as the caching allocator does if it splits every free block."""
    return rounded_up(size, BLOCK)


def with_rests(size: int) -> int:
    """Counts whole blocks, and the rests of free blocks that are too small to be split off.

    A block with a segment of its own takes all of it where 1 MiB or less is left.
    """
    block = in_blocks(size)
    if block < OWN_SEGMENT:
        return block + (in_blocks(block // RESTS) if block > SMALL else 0)
    rest = rounded_up(block, SEGMENT) - block
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
