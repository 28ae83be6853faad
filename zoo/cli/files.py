"""Files that a command writes beside its answer."""

from collections.abc import Callable
from pathlib import Path

from zoo.cli.parser import Parser
from zoo.cli.values import picture
from zoo.errors import ArgumentError, shortened


def add_plot(parser: Parser, drawn: str) -> None:
    """Adds `--plot`, which writes a picture of what is `drawn`."""
    parser.add_argument(
        "--plot", type=picture, metavar="FILE", help=f"draw {drawn}: .svg, .png or .pdf"
    )


def write(path: str | None, save: Callable[[str], None]) -> None:
    """Has `save` write a file, if one is asked for.

    Raises:
        ArgumentError: the file cannot be written.
    """
    if path is None:
        return
    try:
        save(path)
    except OSError as error:
        raise ArgumentError(f"{shortened(path)} cannot be written: {error.strerror}") from error


def write_text(path: str | None, text: Callable[[], str]) -> None:
    """Writes a text, if a file is asked for."""
    write(path, lambda where: _write(where, text()))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
