"""Runs the command that a command line names and turns its outcome into an exit code.

    0      done, or yes
    1      no: not exact, no plan fits the budget, a cell failed
    2      usage error, one line: wrong command, option, model or input
    3      neither yes nor no: what is to be compared does not repeat its own numbers
    130    interrupted by Ctrl-C, also while torch is imported (`interrupts`)

A command's module is imported when it runs: most need none of the optional packages.
"""

import errno
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import torch

from zoo.cli.interrupts import INTERRUPTED
from zoo.cli.output import plain_signs, print_answer, redirect_prints
from zoo.cli.parser import Answer
from zoo.errors import (
    ArgumentError,
    BudgetError,
    RecomputeError,
    ZooError,
    in_a_line,
    nearest,
    shortened,
)
from zoo.profiling.kept_interrupts import interrupts_kept
from zoo.version import __version__

# each with its module and a summary
COMMANDS = {
    "list": ("models", "list the models of the catalog"),
    "info": ("models", "list the steps of a model: parameters, output shapes"),
    "compare": ("comparison", "train with and without checkpointing: memory, time, exactness"),
    "plan": ("planning_commands", "find the fastest plan within a memory budget"),
    "frontier": ("planning_commands", "list what each memory budget costs in time"),
    "anatomy": ("planning_commands", "show where the memory of a training step goes"),
    "max-batch": ("planning_commands", "find the largest batch within a memory budget"),
    "verify": ("planning_commands", "train with and without checkpointing and compare every bit"),
    "report": ("comparison", "rewrite the report of a comparison from its results"),
}
USAGE = """\
usage: zoo COMMAND ...

PyTorch models with exact activation checkpointing: training in less memory, bit for bit the same.

commands:
{commands}

example:
  zoo plan resnet50 --input 32,3,224,224 --memory-budget 2GiB

zoo COMMAND --help shows its options and examples; zoo --version the version.
exit code: 0 done; 1 no (not exact, no plan within the budget); 2 wrong option, model or input; \
3 the baseline does not repeat its own numbers; 130 interrupted"""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the program's own, and returns the exit code."""
    if arguments is None:
        # garbage collections need not visit imported modules again
        gc.freeze()
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    # help goes to stdout even with --json
    is_json = "--json" in rest and not {"-h", "--help"} & set(rest)

    def command() -> Answer:
        restore = redirect_prints() if is_json else None
        try:
            return _answer(name, rest)
        finally:
            if restore is not None:
                restore()

    code = exit_code(f"zoo {name}" if name in COMMANDS else "zoo", command)
    if arguments is None and is_json:
        # a model may print as the process ends
        redirect_prints()
    return code


@plain_signs()
def exit_code(program: str, command: Callable[[], Answer]) -> int:
    """Runs a command, prints its answer or the error, and returns the exit code."""
    try:
        try:
            with interrupts_kept():
                answer = command()
        except SystemExit as end:  # argparse has printed the help
            answer = Answer("", code=int(end.code or 0))
        print_answer(answer.text)
        return answer.code
    except BaseException as error:
        if os.environ.get("ZOO_TRACEBACK"):
            raise
        message, code = _verdict(error)
        print(f"{program}: {message}", file=sys.stderr)
        return code


def _answer(name: str, arguments: Sequence[str]) -> Answer:
    if name in ("-h", "--help", "help"):
        listed = (f"  {command:<9}  {text}" for command, (_, text) in COMMANDS.items())
        return Answer(USAGE.format(commands="\n".join(listed)))
    if name == "--version":
        return Answer(f"zoo {__version__}")
    if name not in COMMANDS:
        noun = "option" if name.startswith("-") else "command"
        raise ArgumentError(
            f"there is no {noun} {shortened(name)}.{nearest(name, COMMANDS)} zoo --help lists all"
        )
    module = importlib.import_module(f"zoo.cli.{COMMANDS[name][0]}")
    answer: Answer = getattr(module, f"run_{name.replace('-', '_')}")(arguments)
    return answer


def _verdict(error: BaseException) -> tuple[str, int]:
    """Returns the message for an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted", INTERRUPTED
    if isinstance(error, ZooError):
        return str(error), 1 if isinstance(error, BudgetError | RecomputeError) else 2
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory: {in_a_line(error, 300)}", 1
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {error.name}: pip install 'zoo-checkpoint[compare]'", 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        # an error of stdout has no file name
        name = shortened(error.filename) if error.filename else "stdout"
        return f"{name} cannot be written: {error.strerror}; make room, then go on", 2
    # nearly always raised by the model's own forward, for inputs that it does not accept
    return f"{in_a_line(error, 300)}; ZOO_TRACEBACK=1 shows where it comes from", 2
