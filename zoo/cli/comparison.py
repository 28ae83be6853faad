"""`zoo compare`, which `test_memory_optimized.py` runs, too, and `zoo report`.

Under torchrun each process runs its own comparison, all at the same time, without exchanging
gradients, with results in its own folder `rank0`, `rank1`, ...: this measures the memory and time
of plans on each device while all are busy.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from torch import distributed

from zoo.cli.output import plain_signs
from zoo.cli.parser import Answer, command
from zoo.errors import ArgumentError, ConfigError, file_errors_as, shortened, shortened_text
from zoo.files import write_file
from zoo.harness.comparison_cells import expand
from zoo.harness.config import KEYS, Config, config_folder, find_config, option, read
from zoo.harness.results import Comparison, Record, Results, cells_of_run, comparisons
from zoo.harness.run import results_of, run
from zoo.report.html_page import page
from zoo.report.rows import heading, rows
from zoo.report.text_report import has_grown, say, show, tables, write_report
from zoo.report.two_runs import TwoRuns, subject, two_runs


def _options() -> dict[str, str]:
    """Returns an option for each key of a config."""
    options = {}
    for key, schema in KEYS.items():
        name, is_flag = option(key)
        text, default = schema["description"], schema.get("default")
        if is_flag:
            options[name] = f"do not {text}" if default else text
        else:
            options[f"{name} VALUE"] = text if default is None else f"{text}; default {default}"
    return options


COMPARED = {
    "config CONFIG=default": "a YAML file, or the name of a shipped config",
    "--model NAME...": "only these models",
    **_options(),
}


def load(options: argparse.Namespace) -> Config:
    """Returns the config that the options name; raises ConfigError as `read` does."""
    override = {}
    for key in KEYS:
        name, is_flag = option(key)
        value = getattr(options, name.removeprefix("--").replace("-", "_"))
        if value not in (None, False):
            override[key] = not name.startswith("--no-") if is_flag else value
    return read(find_config(options.config), options.model or (), override)


@command(
    COMPARED,
    no="not exact, saved less than the config says, a cell failed, or a peak has grown since "
    "--compare",
)
def run_compare(options: argparse.Namespace) -> Answer:
    """Compares training with and without checkpointing: memory, time, exactness.

    Finished measurements are kept; after an interruption the same command resumes.

    examples:
      %(prog)s
      %(prog)s --model resnet50 densenet121 --batch-size 16 --checkpoint sqrt
      %(prog)s configs/lstm_wikitext_shape.yaml
      %(prog)s --compare results-of-last-week.jsonl --tolerance 0.02
    """
    console, config = _console(options.json), load(options)
    if is_one_of_many():
        output = os.path.join(config.output, f"rank{os.environ['RANK']}")
        config = replace(config, output=output)
    earlier = read_earlier(config)
    try:
        results = run(config, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "interrupted; finished measurements are kept, and the same command resumes"
        ) from None
    runs = beside(results, earlier)
    folder = Path(config.output) / config.name
    answer = _report(results, runs, folder, options.line, console)
    if runs and has_grown(runs, config.tolerance, console):
        answer = replace(answer, code=1)
    if not options.json:
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

    Nothing is measured, and limits of the config are not checked; --compare only shows changes.

    examples:
      zoo report
      zoo report results/default.jsonl --output docs
      zoo report results/default.jsonl --compare earlier.jsonl
    """
    console = _console(options.json)
    passed_over: list[str] = []
    earlier = read_old(options.compare, passed_over.append) if options.compare else None
    path, answers = Path(options.path), []
    # Path.is_file raises for a name that is too long
    files = [path] if os.path.isfile(path) else sorted(path.glob("*.jsonl"))
    if not files:
        raise ArgumentError(
            f"there are no results in {shortened(str(path))}; give the folder or file that "
            "`zoo compare` prints at its end"
        )
    for file in files:
        records = Results(file).read(passed_over.append).values()
        results, cells = comparisons(records), cells_of_run(records)
        if not results:
            raise ArgumentError(f"{shortened(str(file))} holds no results of a comparison")
        while passed_over:
            say(console, passed_over.pop(0), "yellow")
        runs = beside(results, earlier)
        folder = Path(options.output or file.parent) / file.stem
        line = _repeats(file, results) or options.line
        answers.append(_report(results, runs, folder, line, console, cells=cells))
        if runs:
            has_grown(runs, Config.tolerance, console)
    return Answer(
        "\n".join(answer.text for answer in answers),
        [answer.data for answer in answers],
        max(answer.code for answer in answers),
    )


def _repeats(results: Path, comparisons: Sequence[Comparison]) -> str:
    """Returns the command that measures results again; "" if not of a shipped config's models."""
    models = list(dict.fromkeys(comparison["model"]["name"] for comparison in comparisons))
    chosen = f" --model {' '.join(models)}"
    lines = {
        "-".join([entry.stem, *names]): f"zoo compare {entry.stem}{option}"
        for entry in config_folder().glob("*.yaml")
        for names, option in ((models, chosen), ([], ""))
    }
    return lines.get(results.stem, "")


class Earlier(NamedTuple):
    """The results of an earlier run in a file, by their subjects, without failures."""

    path: str
    records: Mapping[str, Record]

    def nothing_shared(self) -> ConfigError:
        """Returns the error for a run that has none of these cells."""
        first = shortened_text(next(iter(self.records.values()))["cell"]["model"]["name"])
        return ConfigError(
            f"--compare {shortened(self.path)} holds none of these cells (it begins with {first}): "
            "models, sizes, arguments, device and dtype must be those of the earlier run"
        )


def read_earlier(config: Config) -> Earlier | None:
    """Reads the results that a config's `compare` names, if it names any.

    Raises:
        ConfigError: the file does not exist, or holds no result or none of the config's cells.
    """
    if config.compare is None:
        return None
    earlier = read_old(config.compare)
    cells = [asdict(cell) for entry in expand(config) for cell in entry.values()]
    if not any(subject({"kind": cell["kind"], "cell": cell}) in earlier.records for cell in cells):
        raise earlier.nothing_shared()
    return earlier


def read_old(path: str, passed_over: Callable[[str], object] = str) -> Earlier:
    """Reads the results of an earlier run; raises ConfigError if there are none."""
    what = f"--compare {shortened(path)}"
    if not os.path.isfile(path):
        raise ConfigError(f"{what}: there is no such file")
    records = Results(Path(path)).read(passed_over).values()
    old = {subject(record): record for record in records if record["status"] != "failed"}
    if not old:
        raise ConfigError(f"{what} holds no result; give the .jsonl of a run")
    return Earlier(path, old)


def beside(now: Sequence[Comparison], earlier: Earlier | None) -> TwoRuns | None:
    """Compares a run with an earlier one, if any; raises ConfigError if they share no cell."""
    if earlier is None:
        return None
    runs = two_runs(now, comparisons(earlier.records.values(), partial=True), earlier.path)
    if not runs.cells:
        raise earlier.nothing_shared()
    return runs


def _report(
    comparisons: Sequence[Comparison],
    runs: TwoRuns | None,
    folder: Path,
    line: str,
    console: Console,
    *,
    cells: tuple[int, int] | None = None,
) -> Answer:
    """Prints a comparison, writes its report, and returns its rows; code 1 if a row has faults."""
    table, title = rows(comparisons), heading(comparisons, folder.name, line, cells)
    show(table, title.title, console)
    way_out = "; the results are kept, and zoo report writes the report, --output FOLDER elsewhere"
    with file_errors_as(ArgumentError, folder, way_out=way_out):
        write_report(table, title, folder, runs)
        path = folder / "report.html"
        write_file(path, page(comparisons, title, runs))
    data = {"name": folder.name, "report": str(path), **tables(table, runs)}
    return Answer(f"report:  {path}", data, int(any(row.faults for row in table)))


def _console(as_json: bool) -> Console:
    """Returns the console for tables and progress: stderr if stdout has JSON."""
    return Console(width=None if sys.stdout.isatty() else 130, stderr=as_json)


def is_one_of_many() -> bool:
    """Returns whether torchrun, or a similar launcher, started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@plain_signs()
def in_ranks(command: Callable[[], int]) -> int:
    """Runs a command in each process and returns the largest exit code.

    The first process shows its progress; the output of the others comes at the end.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("LOCAL_RANK", str(rank))
    distributed.init_process_group("gloo")
    try:
        printed = io.StringIO()
        if rank == 0:
            print(f"rank 0 of {world}; each trains alone, all at the same time", flush=True)
        out, err = (printed, printed) if rank else (sys.stdout, sys.stderr)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command()
        gathered: list[tuple[int, str]] = [(0, "")] * world
        distributed.all_gather_object(gathered, (code, printed.getvalue()))
        if rank == 0:
            for number, (_, text) in list(enumerate(gathered))[1:]:
                print(f"\nrank {number} of {world}\n{text}", end="", flush=True)
        # a launcher ends all processes when one fails, so all wait for the output
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return max(code for code, _ in gathered)
