"""`zoo report`: writes the report of results that are there, without measuring anything."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.cli.comparison import console_for, reported
from zoo.cli.parser import Answer, Parser, json_answer
from zoo.errors import ArgumentError, shortened
from zoo.harness.results import Results
from zoo.harness.stored import stored


def main(arguments: Sequence[str]) -> Answer:
    """Writes a report for each file of results."""
    options = _parser().parse(arguments)
    console = console_for(options.json)
    found, code = [], 0
    for path in _files(Path(options.path)):
        folder = Path(options.output or path.parent) / path.stem
        answer = _reported(path, folder, f"zoo report {options.path}", console)
        found.append(answer.data)
        code = max(code, answer.code)
    if options.json:
        return json_answer(found, code)
    pages = [f"report:  {entry['report']}" for entry in found]
    return Answer("\n".join(pages), code)


def _parser() -> Parser:
    parser = Parser(
        "report",
        "Writes the report of a comparison again, from its results. Nothing is measured; what the "
        "config promised is not judged.",
        ["", "results/default.jsonl --output docs"],
        "a cell failed or is not exact",
    )
    parser.add_argument(
        "path",
        nargs="?",
        default="results",
        help="a file of results (.jsonl), or a folder with such files; default results",
    )
    parser.add_argument("--output", metavar="FOLDER", help="for the reports; default: the same")
    return parser


def _reported(path: Path, folder: Path, command: str, console: Any) -> Answer:
    passed_over: list[str] = []
    comparisons = stored(Results(path).read(passed_over.append).values())
    if not comparisons:
        raise ArgumentError(f"{shortened(str(path))} holds no results of a comparison")
    for line in passed_over:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return reported(comparisons, path.stem, command, folder, console)


def _files(path: Path) -> list[Path]:
    if os.path.isfile(path):  # a Path's own fails where the name is too long for any file
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ArgumentError(
            f"there are no results in {shortened(str(path))}; give the folder or file that "
            "`zoo compare` names at its end"
        )
    return files
