"""`zoo compare`: memory, time and exactness of both variants, each in a fresh process."""

from collections.abc import Sequence

from zoo.cli.comparison import compare
from zoo.cli.parser import Answer


def main(arguments: Sequence[str]) -> Answer:
    """Compares as `python test_memory_optimized.py` does."""
    return compare(arguments, "zoo compare")
