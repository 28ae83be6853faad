"""The largest size whose bytes keep to a budget, in few looks, since each look costs seconds.

Bytes grow about in a line with a batch and as a power with a volume, so the next size to look at
lies where a line through the two nearest looks meets the budget:

    size    32    51    47    48    49        the budget is 8
    bytes   5.5   8.5   7.9   8.1   8.2
            fits  not   fits  not   not       -> 47

Bytes need not grow with every size: kernels and planners choose anew for each. So the sizes just
beyond the limit are looked at, too. What lies further away is not found.
"""

from collections.abc import Callable, Mapping

# the bytes that a size needs, None where there is no such size
Needed = Callable[[int], int | None]
# sizes beyond the first that does not fit that are looked at
BEYOND = 1
# of three looks after so many, one halves the interval: a curve may be no line
STRAIGHT = 6
# a look is at most so many times further than the largest that fits
STRIDE = 16
MOST = 2**32


def largest_within(needed: Needed, budget: int, start: int = 1, base: int = 0) -> int:
    """Returns the largest size from 1 whose bytes are at most a budget, 0 when none is found.

    The search begins at `start`; `base` is a guess of what size 0 would need. The size returned
    fits, and each of the next 1 + `BEYOND` does not; if bytes grow with the size, no larger one
    fits. `MOST` is returned where bytes do not reach the budget.

    Where there is no size (`needed` gives None), it counts as too small below `start` and as too
    large above.
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
        size = _next(seen, budget, base, low, high)
    if not low or not fits(low):
        return 0
    while high <= MOST and high <= low + 1 + BEYOND:
        if fits(high):
            low = high
        high += 1
    return low


def _next(seen: Mapping[int, int | None], budget: int, base: int, low: int, high: int) -> int:
    """Chooses a size between two."""
    far = min(high - 1, low * STRIDE) if low else high - 1
    if len(seen) > STRAIGHT and len(seen) % 3 == 0:
        guess = (low + min(high, 4 * low) if low else high) // 2
    else:
        guess = _on_the_line(seen, budget, base)
    return max(low + 1, min(guess, far))


def _on_the_line(seen: Mapping[int, int | None], budget: int, base: int) -> int:
    known = [(size, peak) for size, peak in seen.items() if peak is not None]
    if not known:
        return 0
    near = sorted(known, key=lambda point: abs(point[1] - budget))[:2]
    (size, peak), (other, less) = near if len(near) == 2 else (near[0], (0, base))
    slope = (peak - less) / (size - other)
    return size + int((budget - peak) // slope) if slope > 0 else MOST
