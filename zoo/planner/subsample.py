"""Fewer of many, evenly: of the plans of a curve, of the labels of a search."""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def thinned(items: Sequence[Item], count: int) -> list[Item]:
    """Chooses at most `count` items, evenly, the first and the last among them."""
    count = min(count, len(items))
    return [items[place * (len(items) - 1) // max(count - 1, 1)] for place in range(count)]
