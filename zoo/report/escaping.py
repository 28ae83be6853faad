r"""Escapes untrusted text for Markdown, CSV and terminals; writes tables in Markdown and CSV.

Names of models and modules, arguments and reasons may hold anything: an escape sequence that clears
a terminal, a `|` that ends a cell, HTML, a formula that a spreadsheet runs.

    visible        ESC[2J -> \x1b[2J        all files: XML takes no control characters either
    in_markdown    a|<b>  -> a\|&lt;b>      cells, headings, items
    in_code        a`b    -> ``a`b``        text in backticks
    in_csv         =1+2   -> '=1+2          cells that are text
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Unicode's controls, lone surrogates and noncharacters; and marks of text direction
_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
# an underscore within a word is no markup
_MARKUP = re.compile(r"[\\`*|~$\[\]]|(?<!\w)_|_(?!\w)")


def visible(text: str) -> str:
    r"""Returns a text on one line, control characters as '\x1b'."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_markdown(text: str) -> str:
    """Escapes a text so that Markdown shows it as it is, also in a table cell."""
    without_html = visible(text).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKUP.sub(r"\\\g<0>", without_html)


def in_code(text: str) -> str:
    """Returns a text as code in Markdown, within more backticks than it has in a row."""
    shown = visible(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    gap = " " if "`" in (shown[:1], shown[-1:]) else ""
    return f"{fence}{gap}{shown}{gap}{fence}"


def in_csv(value: Any) -> Any:
    """Returns a value, or texts, for a CSV cell; a ' precedes text that a spreadsheet would run."""
    text = "; ".join(value) if isinstance(value, tuple) else value
    if not isinstance(text, str):
        return value
    shown = visible(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def to_csv(entries: Iterable[dict[str, Any]]) -> str:
    """Returns entries of the same keys as CSV, with the keys as header."""
    entries = list(entries)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(entries[0]) if entries else ["model"])
    writer.writeheader()
    writer.writerows({key: in_csv(value) for key, value in entry.items()} for entry in entries)
    return text.getvalue()


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table in padded columns, all but the first aligned to the right.

    Cells may be results of `in_markdown`; in others a `|` is escaped.
    """
    cells = [[re.sub(r"(?<!\\)\|", r"\|", visible(cell)) for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(columns, *cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    form = " | ".join(f"{{:{'>' * bool(n)}{width}}}" for n, width in enumerate(widths))
    return "\n".join(f"| {form.format(*line)} |" for line in (columns, rule, *cells))
