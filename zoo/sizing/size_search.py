"""Root finding for the largest size within a budget, in few evaluations: each takes seconds.

Bytes grow roughly linearly with a batch and as a power with a volume, so the next size is where a
line through the two nearest points meets the budget (the secant method, with some bisections):

    size    32    51    47    48    49        the budget is 8
    bytes   5.5   8.5   7.9   8.1   8.2
            fits  not   fits  not   not       -> 47

Kernels and plans may differ for each size, so a larger size may need less: the sizes just beyond
the limit are evaluated, too.
"""

from collections.abc import Callable

# the bytes that a size needs; None for a size that the model refuses
Needed = Callable[[int], int | None]
# how many sizes beyond the largest that fits are evaluated
BEYOND = 2
# after so many evaluations every third is a bisection: the curve may be far from a line
SECANTS = 6
# the next size is at most so many times the largest known to fit
STRIDE = 16
MOST = 2**32


def largest_within(needed: Needed, budget: int, start: int = 1, base: int = 0) -> int:
    """Returns the largest size from 1 whose bytes are at most a budget; 0 if there is none.

    The search begins at `start`; `base` is a guess of the bytes of size 0. The returned size fits,
    the next `BEYOND` do not; if bytes grow with the size, no larger one fits. Sizes that the model
    refuses count as too small below `start` and as too large above. `MOST` means that the bytes
    never reach the budget.
    """
    seen: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        if size not in seen:
            seen[size] = needed(size)
        peak = seen[size]
        return peak is not None and peak <= budget

    low, high, size = 0, MOST + 1, start
    while high - low > 1:
        if fits(size) or (seen[size] is None and size < start):
            low = size
        else:
            high = size
        size = _secant(seen, budget, base)
        if len(seen) > SECANTS and len(seen) % 3 == 0:
            size = (low + min(high, 4 * low or high)) // 2
        size = max(low + 1, min(size, high - 1, low * STRIDE or high))
    if not low or not fits(low):
        return 0
    while high <= min(low + BEYOND, MOST):
        if fits(high):
            low = high
        high += 1
    return low


def _secant(seen: dict[int, int | None], budget: int, base: int) -> int:
    """Returns the size at which a line through the two points nearest to the budget meets it."""
    measured = [(size, peak) for size, peak in seen.items() if peak is not None]
    if not measured:
        return 0
    measured.sort(key=lambda point: abs(point[1] - budget))
    (size, peak), (other, less), *_ = (*measured, (0, base))
    slope = (peak - less) / (size - other)
    return size + int((budget - peak) // slope) if slope > 0 else MOST
