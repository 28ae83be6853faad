"""What comes while a command runs, on stderr: what the library logs, what a model prints."""

import contextlib
import logging
import os
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


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Sends to stderr what is printed, by Python, by libraries in C and by other programs."""
    out, numbers = sys.stdout, _numbers()
    kept = os.dup(numbers[0]) if numbers else None
    print_to_stderr()
    try:
        yield
    finally:
        sys.stdout = out
        if numbers and kept is not None:
            # what was written past sys.stdout, to the stream that it was before
            out.flush()
            os.dup2(kept, numbers[0])
            os.close(kept)


def print_to_stderr() -> None:
    """Sends to stderr what is printed from here to the end of the process."""
    numbers = _numbers()
    if numbers:
        sys.stdout.flush()
        os.dup2(numbers[1], numbers[0])
    sys.stdout = sys.stderr


def _numbers() -> tuple[int, int] | None:
    """Returns the descriptors of stdout and stderr; None where they are no files."""
    try:
        return sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None
