"""Finds a place beside each mark of a picture for its name: greedy, in points, without a picture.

matplotlib writes a text where it is told to, over whatever is there.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

Spot = tuple[float, float]
DISTANCES = (9, 20, 36, 60)
RADIUS = 5  # of a mark
# to the upper right first, as one expects it
SIDES = ((1, 1), (-1, 1), (1, 0), (-1, 0), (1, -1), (-1, -1), (0, 1), (0, -1))


class Box(NamedTuple):
    """A rectangle."""

    left: float
    low: float
    right: float
    high: float

    def overlaps(self, other: "Box") -> bool:
        """Says whether two rectangles share more than an edge."""
        across = self.left < other.right and other.left < self.right
        return across and self.low < other.high and other.low < self.high

    def holds(self, spot: Spot) -> bool:
        """Says whether a spot is inside."""
        return self.left < spot[0] < self.right and self.low < spot[1] < self.high

    def within(self, other: "Box") -> bool:
        """Says whether this rectangle lies inside of another."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.low <= self.low and self.high <= other.high


def place(
    marks: Mapping[str, Spot], sizes: Mapping[str, Spot], frame: Box, line: Collection[Spot]
) -> dict[str, Box]:
    """Returns where each mark's name of a given width and height goes.

    Inside the frame, over no other name and no mark if possible, and over as little as possible of
    a line, given by spots on it.
    """
    found: dict[str, Box] = {}
    for name, spot in marks.items():
        taken = [*found.values(), *(_around(other) for other in marks.values() if other != spot)]
        ranked = (
            (_cost(box, taken, frame, line), number, box)
            for number, box in enumerate(_candidates(spot, sizes[name]))
        )
        found[name] = min(ranked)[2]
    return found


def along(corners: Sequence[Spot], gap: float = 4) -> Iterator[Spot]:
    """Yields spots on the line through some corners, no further than a gap apart."""
    for (x, y), (right, high) in itertools.pairwise(corners):
        count = int(max(abs(right - x), abs(high - y)) / gap) + 1
        for part in range(count):
            yield x + (right - x) * part / count, y + (high - y) * part / count


def _candidates(spot: Spot, size: Spot) -> Iterator[Box]:
    (x, y), (width, height) = spot, size
    for distance in DISTANCES:
        for across, up in SIDES:
            left = x + across * distance + (across - 1) / 2 * width
            low = y + up * distance * 0.6 + (up - 1) / 2 * height
            yield Box(left, low, left + width, low + height)


def _around(mark: Spot) -> Box:
    x, y = mark
    return Box(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS)


def _cost(box: Box, taken: Collection[Box], frame: Box, line: Collection[Spot]) -> int:
    covered = sum(map(box.overlaps, taken)) + (not box.within(frame))
    return 1000 * covered + sum(map(box.holds, line))
