"""Answers on terminals whose encoding lacks a sign: `PYTHONIOENCODING=ascii`, a log of latin-1.

Python raises there, after all work is done. Here a sign that the encoding lacks is written as the
nearest that it has: × as x, → as ->, a frame's line as - or |; all others as a question mark.
"""

import codecs
import contextlib
import sys
from collections.abc import Iterator

PLAIN = {
    "×": "x", "→": "->", "√": "sqrt ", "±": "+-", "≤": "<=", "≥": ">=", "…": "...", "–": "-",
    "─": "-", "━": "-", "╺": "-", "╸": "-", "│": "|", "┃": "|", "┌": "+", "└": "+", "├": "+",
    "—": "-", "┐": "+", "┘": "+", "╵": "|", "╷": "|",
}  # fmt: skip
NAME = "zoo.plain"


@contextlib.contextmanager
def signs_replaced() -> Iterator[None]:
    """Replaces signs that stdout's encoding lacks by plain ones, until the block ends."""
    stream = sys.stdout
    before = getattr(stream, "errors", None)
    # only where Python would raise: who chose otherwise gets what was chosen
    raises = before == "strict" or (before == "surrogateescape" and not _is_utf8(stream.encoding))
    if not raises or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors=NAME)
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in signs), error.end


codecs.register_error(NAME, _plain)
