"""What a long command is at, on stderr, while somebody watches: what the library logs."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def told_meanwhile(name: str) -> Iterator[None]:
    """Writes what a logger says to stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
