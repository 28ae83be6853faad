"""What a command's options look like: strict, with suggestions, an example and its exit codes.

argparse guesses what `--batch` abbreviates and answers a mistake with its whole usage. Here a wrong
option is an `ArgumentError` of one sentence, like any other wrong input.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from zoo.errors import LONGEST, ArgumentError, nearest, shortened_text


@dataclass(frozen=True)
class Answer:
    """What a command prints, the exit code, and the data behind a text that is JSON.

    The code is 0 for yes or done, 1 for no.
    """

    text: str
    code: int = 0
    data: Any = None


class Answered(SystemExit):
    """Ends a command whose parser has printed what was asked for, its help."""


class Parser(argparse.ArgumentParser):
    """Reads the options of a command, `--json` among them.

    `examples` are arguments, one line for each; `no` says what exit code 1 means, if it has one.
    """

    def __init__(self, name: str, description: str, examples: Sequence[str], no: str = "") -> None:
        super().__init__(
            prog=f"zoo {name}",
            description=description,
            epilog=epilog(f"zoo {name}", examples, no),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # as Python 3.14 has it; before, -8GiB passes for an option, and its value for missing
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.add_argument("--json", action="store_true", help="print JSON, for machines")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Reads a command line.

        Raises:
            ArgumentError: an option that does not exist, with the nearest that do, or its value.
        """
        known = [option for action in self._actions for option in action.option_strings]
        for argument in arguments:
            option = argument.partition("=")[0]
            if option.startswith("--") and option not in ("--", *known):
                near = nearest(option, known)
                self.error(f"there is no option {shortened_text(option)}.{near}")
        return self.parse_args(arguments)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raises Answered, which no model raises: its `sys.exit` is no answer."""
        self._print_message(message or "", sys.stderr)
        raise Answered(status)

    def error(self, message: str) -> NoReturn:
        """Raises ArgumentError with what is wrong and where help is."""
        # as argparse words it, with whatever was given
        sentence = shortened_text(message.removeprefix("argument ").rstrip(), 4 * LONGEST)
        end = "" if sentence.endswith(("?", ".")) else ";"
        raise ArgumentError(f"{sentence}{end} {self.prog} --help lists what there is")


def epilog(program: str, examples: Sequence[str], no: str) -> str:
    """Writes what stands below the options in a help text."""
    shown = "\n".join(f"  {program} {example}".rstrip() for example in examples)
    refusal = f"1 {no}; " if no else ""
    return (
        f"example{'s' * (len(examples) > 1)}:\n{shown}\n\n"
        f"exit code: 0 done; {refusal}2 wrong option, model or input; 130 interrupted"
    )


def answer(options: argparse.Namespace, text: str, found: Any, code: int = 0) -> Answer:
    """Returns the text, or with `--json` what was found: data, or text that is JSON already."""
    if not options.json:
        return Answer(text, code)
    return Answer(found, code) if isinstance(found, str) else json_answer(found, code)


def json_answer(data: Any, code: int = 0) -> Answer:
    """Returns data as JSON."""
    return Answer(json.dumps(data, indent=1), code, data)
