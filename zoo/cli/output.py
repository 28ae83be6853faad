"""Output of a command: its answer, files, log messages; keeps stdout free for JSON."""

import codecs
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from zoo.errors import ArgumentError, file_errors_as

# replacements for terminals whose encoding lacks a character (PYTHONIOENCODING=ascii)
PLAIN = {
    "×": "x", "→": "->", "√": "sqrt ", "±": "+-", "≤": "<=", "≥": ">=", "…": "...", "–": "-",
    "─": "-", "━": "-", "╺": "-", "╸": "-", "│": "|", "┃": "|", "┌": "+", "└": "+", "├": "+",
    "—": "-", "┐": "+", "┘": "+", "╵": "|", "╷": "|",
}  # fmt: skip


def print_answer(text: str) -> None:
    """Prints an answer; a reader such as `head` may close the pipe early.

    Raises:
        ArgumentError: stdout cannot be written.
    """
    try:
        print(text, end="\n" if text else "", flush=True)
    except OSError as error:
        # otherwise Python raises when it flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ArgumentError(
                f"stdout cannot be written: {error.strerror}; make room, then go on"
            ) from error


def write(path: str | None, save: Callable[[str], object]) -> None:
    """Calls `save` with a path, if one is given; raises ArgumentError if writing fails."""
    if path is not None:
        with file_errors_as(ArgumentError, path):
            save(path)


@contextlib.contextmanager
def plain_signs() -> Iterator[None]:
    """Replaces characters that stdout's encoding lacks, by those in PLAIN or else by ?."""
    stream = sys.stdout
    before = getattr(stream, "errors", None)
    # a user's error handler is kept; surrogateescape is the default of the C locale
    raises = before == "strict" or (
        before == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8"
    )
    with contextlib.ExitStack() as undo:
        if raises and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="zoo.plain")
            undo.callback(stream.reconfigure, errors=before)
        yield


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in signs), error.end


codecs.register_error("zoo.plain", _plain)


def redirect_prints() -> Callable[[], None]:
    """Redirects stdout to stderr, also for C libraries; returns a function that ends that."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        printed, told = out.fileno(), sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # they are no files
        return lambda: setattr(sys, "stdout", out)
    out.flush()
    original = os.dup(printed)
    os.dup2(told, printed)

    def restore() -> None:
        sys.stdout = out
        # buffered text goes to stderr, too
        out.flush()
        os.dup2(original, printed)
        os.close(original)

    return restore
