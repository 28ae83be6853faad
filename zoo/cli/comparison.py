"""`zoo compare`, which `test_memory_optimized.py` runs, too, and `zoo report`.

Under torchrun each process runs a comparison of its own, all at the same time, without exchanging
gradients: it measures what a plan saves and costs on each device while all are busy.
"""

import argparse
import contextlib
import io
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import distributed

from zoo.cli.output import plain_signs
from zoo.cli.parser import Answer, command
from zoo.errors import ArgumentError, shortened
from zoo.harness.config import Config, load
from zoo.harness.regression import beside, has_grown, read_earlier, read_old
from zoo.harness.results import Results, comparisons
from zoo.harness.run import results_of, run
from zoo.report.html_page import page
from zoo.report.rows import Row, heading, rows, spread
from zoo.report.text_report import show, write_report
from zoo.report.two_runs import TwoRuns, as_entries


def run_compare(arguments: Sequence[str], program: str = "zoo compare") -> Answer:
    """Runs the comparison of a command line; `program` is what the report names to repeat it."""
    as_json = "--json" in arguments
    console = _console(as_json)
    config = load([argument for argument in arguments if argument != "--json"], program)
    earlier = read_earlier(config)
    try:
        results = run(config, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "interrupted; finished measurements are kept, and the same command goes on from there"
        ) from None
    line = shlex.join([*program.split(), *arguments])
    folder = Path(config.output) / config.name
    path = str(config.compare)
    runs = beside(results, earlier, path) if earlier else None
    answer = _report(results, config.name, line, folder, console=console, runs=runs)
    if earlier and has_grown(earlier, results, path, config.tolerance, console):
        answer = replace(answer, code=1)
    if as_json:
        return answer.as_json()
    console.print(f"results: {results_of(config).path}", soft_wrap=True)
    return answer


@command(
    {
        "path PATH=results": "a file of results (.jsonl), or a folder of such files",
        "--output FOLDER": "where to write the report; default: beside the results",
        "--compare PATH": "results of an earlier run (.jsonl), to show beside these",
    },
    no="a cell failed or is not exact",
)
def run_report(options: argparse.Namespace) -> Answer:
    """Rewrites the report of a comparison from its results.

    Nothing is measured, and limits of the config are not checked; what --compare finds is shown.

    examples:
      zoo report
      zoo report results/default.jsonl --output docs
      zoo report results/default.jsonl --compare earlier.jsonl
    """
    console = _console(options.json)
    told: dict[str, Any] = {"style": "yellow", "markup": False, "highlight": False}
    passed_over: list[str] = []
    earlier = read_old(options.compare, passed_over.append) if options.compare else {}
    answers = []
    for path in _result_files(Path(options.path)):
        results = comparisons(Results(path).read(passed_over.append).values())
        if not results:
            raise ArgumentError(f"{shortened(str(path))} holds no results of a comparison")
        runs = beside(results, earlier, options.compare) if earlier else None
        while passed_over:
            console.print(passed_over.pop(0), soft_wrap=True, **told)
        folder = Path(options.output or path.parent) / path.stem
        asked = ["--compare", options.compare] if earlier else []
        line = shlex.join(["zoo", "report", options.path, *asked])
        answers.append(_report(results, path.stem, line, folder, console=console, runs=runs))
        if earlier:
            has_grown(earlier, results, options.compare, Config.tolerance, console)
    return Answer(
        "\n".join(answer.text for answer in answers),
        [answer.data for answer in answers],
        max(answer.code for answer in answers),
    )


def _result_files(path: Path) -> list[Path]:
    if os.path.isfile(path):  # a Path's own fails where the name is too long for any file
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ArgumentError(
            f"there are no results in {shortened(str(path))}; give the folder or file that "
            "`zoo compare` names at its end"
        )
    return files


def _report(
    comparisons: Sequence[Mapping[str, Any]],
    name: str,
    line: str,
    folder: Path,
    *,
    console: Console,
    runs: TwoRuns | None,
) -> Answer:
    """Prints a comparison, writes its report, and returns its rows; code 1 if one has a fault."""
    table, title = rows(comparisons), heading(comparisons, name, line)
    show(table, title.title, console)
    try:
        write_report(table, title, folder, runs)
        path = folder / "report.html"
        path.write_text(page(comparisons, title, runs), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"{shortened(str(folder))} cannot be written: {error.strerror}; the results are kept, "
            "and zoo report writes the report, --output FOLDER elsewhere"
        ) from error
    data = {"name": name, "report": str(path), "rows": list(map(_row_data, table))}
    if runs is not None:
        data["compared"] = as_entries(runs)
    return Answer(f"report:  {path}", data, int(any(row.faults for row in table)))


def _row_data(row: Row) -> dict[str, Any]:
    """Returns the measurements of a model, and the properties that follow from them."""
    _, *others = row.variants
    times = {kind: row.time_ratios(kind) for kind in others}
    spreads = {kind: asdict(spread(ratios)) if ratios else None for kind, ratios in times.items()}
    values = asdict(row)
    del values["number"]
    return {
        **values.pop("peaks"),
        **values,
        "step_ratio": row.ratio(),
        "step_ratios": {kind: row.ratio(kind) for kind in others},
        "ratio": row.ratio(peak="activation_peak"),
        "tensor_ratio": row.ratio(peak="tensor_activation_peak"),
        "time": spreads["checkpointed"],
        "times": spreads,
    }


def _console(as_json: bool) -> Console:
    """Returns the console of tables and progress: stderr beside JSON."""
    return Console(width=None if sys.stdout.isatty() else 130, stderr=as_json)


def is_one_of_many() -> bool:
    """Returns whether torchrun, or a launcher like it, started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@plain_signs()
def in_ranks(arguments: Sequence[str], program: str, main: Callable[[Sequence[str]], int]) -> int:
    """Runs a command in each process, with results in a folder `rank0`, `rank1`, ... of its own.

    The first process shows its progress; the output of the others comes at the end. Returns the
    largest exit code.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("LOCAL_RANK", str(rank))
    distributed.init_process_group("gloo")
    try:
        printed = io.StringIO()
        if rank == 0:
            print(f"rank 0 of {world}; each trains by itself, all at the same time", flush=True)
        out, err = (printed, printed) if rank else (sys.stdout, sys.stderr)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(_in_folder(arguments, program, rank))
        gathered: list[tuple[int, str]] = [(0, "")] * world
        distributed.all_gather_object(gathered, (code, printed.getvalue()))
        if rank == 0:
            for number, (_, text) in list(enumerate(gathered))[1:]:
                print(f"\nrank {number} of {world}\n{text}", end="", flush=True)
        # a launcher ends all processes as soon as one has failed
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return max(code for code, _ in gathered)


def _in_folder(arguments: Sequence[str], program: str, rank: int) -> list[str]:
    """Adds the folder of a rank's results, inside the one that the arguments name."""
    try:
        output = load([word for word in arguments if word != "--json"], program).output
    except BaseException:  # the command itself will say what is wrong
        return list(arguments)
    return [*arguments, "--output", os.path.join(output, f"rank{rank}")]
