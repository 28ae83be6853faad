"""Chooses the command and turns whatever becomes of it into an exit code.

    0      done; where the command asks something, yes
    1      no: not exact, no plan keeps to the budget, a cell failed
    2      a wrong command, option, model or input, told in one sentence
    130    interrupted by Ctrl-C, also while torch is imported (`starting`)

A command is imported when it is asked for, so that one that needs a library of an extra does not
keep the others from running without.
"""

import errno
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import torch

from zoo.cli.importing import in_a_line
from zoo.cli.meanwhile import print_to_stderr, prints_to_stderr
from zoo.cli.parser import Answer, Answered
from zoo.cli.plain_text import signs_replaced
from zoo.errors import ArgumentError, BudgetError, RecomputeError, ZooError, nearest, shortened
from zoo.version import __version__

COMMANDS = {
    "list": "models of the catalog",
    "info": "a model's chain: steps, parameters, shapes",
    "compare": "train with and without checkpointing: memory, time, exactness",
    "plan": "the plan of least time within a memory budget",
    "frontier": "what each memory budget costs in time",
    "anatomy": "where the memory of a training step goes",
    "max-batch": "the largest batch within a memory budget",
    "verify": "train with and without checkpointing and compare every bit",
    "report": "write the report of results again",
}
HELP = ("-h", "--help", "help")


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the program's own, and returns the exit code."""
    if arguments is None:
        # what the program has imported stays: no collection need go through it again
        gc.freeze()
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    # a help that is asked for comes first, on stdout as ever
    is_json = "--json" in rest and not {"-h", "--help"} & set(rest)
    command = functools.partial(_answer, name, rest)
    code = exit_code(
        f"zoo {name}" if name in COMMANDS else "zoo",
        functools.partial(_undisturbed, command) if is_json else command,
    )
    if arguments is None and is_json:
        # what a model prints as the process ends is no JSON either
        print_to_stderr()
    return code


@signs_replaced()
def exit_code(program: str, command: Callable[[], Answer]) -> int:
    """Runs a command, prints its answer or what went wrong, and returns the exit code."""
    try:
        answer = _answer_of(command)
        _print(answer.text)
    except BaseException as error:
        if os.environ.get("ZOO_TRACEBACK"):
            raise
        sentence, code = _verdict(error)
        print(f"{program}: {sentence}", file=sys.stderr)
        return code
    return answer.code


def usage() -> str:
    """Writes what commands there are."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: zoo COMMAND ...\n\nPyTorch models that train in less memory, exactly.\n\n"
        f"commands:\n{listed}\n\n"
        "example:\n  zoo plan resnet50 --input 32,3,224,224 --memory-budget 2GiB\n\n"
        "zoo COMMAND --help shows options and examples; zoo --version the version.\n"
        "exit code: 0 done; 1 no (not exact, beyond the budget); 2 wrong option, model or input; "
        "130 interrupted"
    )


def _answer_of(command: Callable[[], Answer]) -> Answer:
    """Runs a command whose model must not end it: `sys.exit(0)` in a forward would say yes."""
    try:
        return command()
    except Answered as end:
        return Answer("", int(end.code or 0))
    except SystemExit as end:
        argument = "" if end.code is None else shortened(end.code)
        raise ArgumentError(
            f"the model, or something that it imports, called sys.exit({argument}), so there is no "
            "answer; ZOO_TRACEBACK=1 shows where"
        ) from end


def _undisturbed(command: Callable[[], Answer]) -> Answer:
    """Runs a command whose answer is to be all that stdout gets."""
    with prints_to_stderr():
        return command()


def _answer(name: str, arguments: Sequence[str]) -> Answer:
    if name in HELP:
        return Answer(usage())
    if name == "--version":
        return Answer(f"zoo {__version__}")
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise ArgumentError(
            f"there is no {kind} {shortened(name)}.{nearest(name, COMMANDS)} "
            "zoo --help lists what there is"
        )
    command = importlib.import_module(f"zoo.cli.commands.{name.replace('-', '_')}")
    found: Answer = command.main(arguments)
    return found


def _verdict(error: BaseException) -> tuple[str, int]:
    """Returns what to say of an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted", 130
    if isinstance(error, ZooError):
        return str(error), 1 if isinstance(error, BudgetError | RecomputeError) else 2
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"it does not fit here: {in_a_line(error)}", 1
    if isinstance(error, ModuleNotFoundError):
        return f"this needs {error.name}: pip install 'zoo-checkpoint[compare]'", 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        # what is written to a file names it; a line of progress has none
        where = shortened(error.filename) if error.filename else "stdout"
        return f"{where} cannot be written: {error.strerror}; make room, then go on", 2
    # nearly always the model's own forward, of inputs that it cannot take
    return f"{in_a_line(error)}; ZOO_TRACEBACK=1 shows where it comes from", 2


def _print(text: str) -> None:
    """Prints an answer; whoever reads it may have read enough, as `head` does."""
    try:
        print(text, end="\n" if text else "", flush=True)
    except OSError as error:
        # or Python complains when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ArgumentError(
                f"stdout cannot be written: {error.strerror}; make room, then go on"
            ) from error
