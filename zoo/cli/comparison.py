"""`zoo compare` and `test_memory_optimized.py`, and what `zoo report` shares with them.

It needs the extra `compare`.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from zoo.cli.parser import Answer, Answered, json_answer
from zoo.errors import ArgumentError, shortened
from zoo.harness.config import Config, load
from zoo.harness.regression import Earlier
from zoo.harness.run import results_of, run
from zoo.report.heading import heading
from zoo.report.page import write_page
from zoo.report.report import write_report
from zoo.report.rows import Row, rows
from zoo.report.terminal import show

INTERRUPTED = "interrupted; what was measured is kept, and the same command goes on from there"


def compare(arguments: Sequence[str], program: str) -> Answer:
    """Runs the comparison that a command line asks for; `program` is what repeats it.

    Raises:
        ConfigError: a config, key, value or device that does not exist.
        KeyboardInterrupt: with the words that nothing is lost.
    """
    as_json = "--json" in arguments
    console = console_for(as_json)
    config = _config([argument for argument in arguments if argument != "--json"], program)
    earlier = Earlier.of(config)
    try:
        comparisons = run(config, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(INTERRUPTED) from None
    command = shlex.join([*program.split(), *arguments])
    results, folder = results_of(config).path, Path(config.output) / config.name
    answer = reported(comparisons, config.name, command, folder, console)
    if earlier is not None and earlier.compare(comparisons, console):
        answer = replace(answer, code=1)
    if as_json:
        return answer
    console.print(f"results: {results}", soft_wrap=True)
    return replace(answer, text=f"report:  {answer.data['report']}")


def _config(arguments: Sequence[str], program: str) -> Config:
    try:
        return load(arguments, program)
    except SystemExit as end:  # jsonargparse has printed the help
        raise Answered(end.code) from None


def reported(
    comparisons: Sequence[Mapping[str, Any]],
    name: str,
    command: str,
    folder: Path,
    console: Console,
) -> Answer:
    """Shows a comparison, writes its report, and returns its rows as JSON: 1 where one failed."""
    found = rows(comparisons)
    above = heading(comparisons, name, command)
    show(found, above.title, console)
    try:
        write_report(found, above, folder)
        page = write_page(comparisons, above, folder / "report.html")
    except OSError as error:
        raise ArgumentError(
            f"{shortened(str(folder))} cannot be written: {error.strerror}; the results are kept, "
            "and zoo report writes it again, --output FOLDER elsewhere"
        ) from error
    data = {"name": name, "report": str(page), "rows": [row_data(row) for row in found]}
    return json_answer(data, code=int(any(row.faults for row in found)))


def row_data(row: Row) -> dict[str, Any]:
    """Returns what was measured of a model, and what follows from it."""
    ratios = {name: getattr(row, name) for name in ("step_ratio", "ratio", "tensor_ratio")}
    return {**asdict(row), **ratios, "time": None if row.time is None else asdict(row.time)}


def console_for(as_json: bool) -> Console:
    """Returns where people look: beside the JSON, if that is what is printed."""
    width = None if sys.stdout.isatty() else 130
    return Console(width=width, stderr=as_json)
