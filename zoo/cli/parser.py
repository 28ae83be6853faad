"""A strict argument parser, the options that several commands share, and a command's answer.

argparse guesses what `--batch` abbreviates and answers a mistake with its whole usage. Here a wrong
option raises an `ArgumentError` of one line that suggests the nearest valid one.
"""

import argparse
import functools
import inspect
import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from zoo.api.plan_rank import STRATEGIES
from zoo.cli import values
from zoo.errors import LONGEST, ArgumentError, ZooError, nearest, shortened, shortened_text
from zoo.policy.goal import parse_budget, parse_checkpoint, parse_overhead
from zoo.profiling.optimizer_memory import OPTIMIZERS
from zoo.units import parse_bytes

# argparse's settings for the value of an option, by its metavar; for any other it is text
METAVARS: dict[str, dict[str, Any]] = {
    "AXIS": {"type": values.number},
    "BYTES": {"type": parse_bytes},
    "COUNT": {"type": values.count},
    "DEVICE": {"type": values.device},
    "DEVICE_OR_RATED": {"type": values.rated_device, "metavar": "DEVICE"},
    "FILE": {"type": values.file},
    "NUMBER": {"type": values.number},
    "OPTIMIZER": {"type": values.optimizer, "metavar": f"{{{','.join(OPTIMIZERS)}}}"},
    "PICTURE": {"type": values.picture},
    "PLAN": {"type": parse_checkpoint},
    "RATIO": {"type": parse_overhead},
    # the option is repeated for each input
    "SHAPE": {"type": values.shape, "action": "append"},
    "SIZE": {"type": parse_budget},
    "STRATEGY": {"choices": list(STRATEGIES), "metavar": None},
}
MODEL = {
    "model": "a name of `zoo list`; another library's, such as timm/resnet50, torchvision/swin_t, "
    "transformers/GPT2LMHeadModel or monai/UNet; or the import path of a class or function that "
    "makes a model, whose code is run: timm.create_model, package:Class, file.py:Class",
    "--args VALUE...": "arguments to build the model with: classes=10; for an import path also "
    "positional ones: resnet50",
    "--input SHAPE": "shape of an input: 32,3,224,224; with a type: 8,128:int64; with the name of "
    "its argument: input_ids=8,128:int64, or of a key of a dict that is an argument: "
    "batch.input_ids=8,128:int64. Repeat the option for each input; none stands for None. "
    "A language model of the catalog needs the shape of the tokens only",
    "--batch-size COUNT": "samples in the batch, for a model of the catalog without --input",
    "--size COUNT...": "side of the images, sides of a volume, or length of the text, for a model "
    "of the catalog without --input; default: as `zoo compare` trains it",
}
OPTIMIZER = {"--optimizer OPTIMIZER=adamw": "optimizer whose state counts; sgd has momentum"}
PLOT = {"--plot PICTURE": "write a picture: .svg, .png or .pdf"}
PLANS = (
    "true, false, a number of segments, sqrt, blocks, cheap, a plan such as '(0-1) 2', or a .json "
    "file: of `zoo plan --save`, or a plan alone, [[0, 1], 2]"
)


@dataclass(frozen=True)
class Answer:
    """What a command prints: text, or with `--json` the data, which may be JSON text already.

    The exit code is 0 for yes or done, 1 for no, 3 where it is neither.
    """

    text: str
    data: Any = None
    code: int = 0


Run = Callable[[argparse.Namespace], Answer]
# takes the command's arguments and, if another program runs it, that program's name
Command = Callable[..., Answer]


def command(
    options: Mapping[str, str], *, either: Collection[str] = (), no: str = "", neither: str = ""
) -> Callable[[Run], Command]:
    """Makes a function `run_name(options)` the command `zoo name`, and its docstring the help.

    Args:
        options: help texts by 'name', '--flag', '--name METAVAR', '--name METAVAR=default' or
            '--name METAVAR...' for several values, where METAVAR is one of METAVARS.
        either: options of which exactly one must be given.
        no, neither: what the exit codes 1 and 3 mean, if the command has them.
    """

    def decorate(run: Run) -> Command:
        description, _, examples = (inspect.getdoc(run) or "").rpartition("\n\n")
        codes = f"0 done; {f'1 {no}; ' if no else ''}2 wrong option, model or input"
        codes += f"; 3 {neither}" if neither else ""
        name = f"zoo {run.__name__.removeprefix('run_').replace('_', '-')}"
        parser = Parser(
            description=description,
            epilog=f"{examples}\n\nexit code: {codes}; 130 interrupted",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # as in Python 3.14; earlier versions read -8GiB as an option, not as a value
        parser._negative_number_matcher = re.compile(r"-\.?\d")
        parser.add_argument("--json", action="store_true", help="print JSON")
        group = parser.add_mutually_exclusive_group(required=True) if either else parser
        for signature, text in options.items():
            flag, settings = _settings(signature, text)
            (group if flag in either else parser).add_argument(flag, **settings)

        @functools.wraps(run)
        def main(arguments: Sequence[str], program: str = name) -> Answer:
            parser.prog = program
            parsed = parser.parse(arguments)
            parsed.line = shlex.join([*program.split(), *arguments])
            try:
                answer = run(parsed)
            except SystemExit as end:  # else sys.exit(0) in a forward would mean yes
                argument = "" if end.code is None else shortened(end.code)
                raise ArgumentError(
                    f"the model, or something that it imports, called sys.exit({argument}), so "
                    "there is no result; ZOO_TRACEBACK=1 shows where"
                ) from end
            if parsed.json:
                is_text = isinstance(answer.data, str)
                text = answer.data if is_text else json.dumps(answer.data, indent=1)
                return replace(answer, text=text)
            return answer

        return main

    return decorate


class Parser(argparse.ArgumentParser):
    """Parses the options of a command strictly."""

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses a command line.

        Raises:
            ArgumentError: an unknown option, with the nearest known one, or a wrong value.
        """
        flags = [option for action in self._actions for option in action.option_strings]
        for argument in arguments:
            option = argument.partition("=")[0]
            if option.startswith("--") and option not in ("--", *flags):
                self.error(f"there is no option {shortened_text(option)}.{nearest(option, flags)}")
        return self.parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Raises ArgumentError with argparse's message and the command that shows help."""
        sentence = shortened_text(message.removeprefix("argument ").rstrip(), 4 * LONGEST)
        end = "" if sentence.endswith(("?", ".")) else ";"
        raise ArgumentError(f"{sentence}{end} {self.prog} --help lists all options")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Keeps the message of a ZooError, which argparse would replace with 'invalid value'."""
        try:
            return action.type(arg_string) if callable(action.type) else arg_string
        except ZooError as error:
            raise argparse.ArgumentError(action, str(error)) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near = nearest(value, action.choices)
            message = f"takes {' or '.join(action.choices)}; got {value!r}.{near}"
            raise argparse.ArgumentError(action, message)


def _settings(signature: str, text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of an option and the arguments of `add_argument`."""
    name, _, value = signature.partition(" ")
    if name.startswith("--") and not value:
        return name, {"help": text, "action": "store_true"}
    metavar, _, default = value.partition("=")
    settings: dict[str, Any] = {"help": text}
    if default:
        settings = {"help": f"{text}; default {default}", "default": default}
        if not name.startswith("--"):
            settings["nargs"] = "?"
    if metavar.endswith("..."):
        metavar = metavar.removesuffix("...")
        # repeated, the option adds values: --model a --model b
        settings |= {"nargs": "+", "action": "extend"}
    return name, settings | {"metavar": metavar or None} | METAVARS.get(metavar, {})
