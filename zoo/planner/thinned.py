"""Fewer of many, evenly: of the plans of a curve, of the labels of a search."""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def thinned(items: Sequence[Item], count: int) -> list[Item]:
    """Chooses as many items, evenly, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]
