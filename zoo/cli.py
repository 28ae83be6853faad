"""The `zoo` command, which needs torch and the standard library only.

    zoo verify resnet18 --checkpoint sqrt --size 64 --batch-size 2 --steps 3

trains a model of the catalog on random inputs with and without checkpointing and compares every
bit (see `zoo.verify`). Exit code 0: exact; 1: not so, or refused by the engine; 2: no such model,
option or value; 130: interrupted. The comparison of memory and time, on real data, is
`test_memory_optimized.py`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from zoo.catalog import create, model_arguments
from zoo.chain import Chain
from zoo.checkpointing import Checkpoint
from zoo.errors import ArgumentError, RecomputeError, ZooError
from zoo.harness.recipes import recipe
from zoo.plan import Plan
from zoo.planner.schemes import check_name
from zoo.verify import verify

Make = Callable[[dict[str, Any], int, list[int], str], tuple[Any, ...]]


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the program's own, and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        report = _verify(options)
    except RecomputeError as error:
        print(f"zoo verify: refused: {error}", file=sys.stderr)
        return 1
    except ZooError as error:
        print(f"zoo verify: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(report)
    return int(not report.exact)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exits with 2 and one line."""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zoo", description="PyTorch models that train in less memory, exactly.")
    commands = parser.add_subparsers(required=True, metavar="verify")
    command = commands.add_parser(
        "verify",
        help="train with and without checkpointing and compare every bit",
        description="Trains a model of the catalog on random inputs with and without "
        "checkpointing and compares every bit. Exit code 0: exact; 1: not; 2: bad arguments.",
    )
    command.add_argument("model", help="a name of zoo.list_models()")
    command.add_argument(
        "--checkpoint",
        default="true",
        help="true, false, a number of segments, sqrt, blocks, cheap or a plan such as '(0-1) 2'; "
        "default true",
    )
    command.add_argument(
        "--size",
        type=_positive,
        nargs="+",
        help="side of the images, three sides of a volume, or length of the text; default: what "
        "the model is compared on",
    )
    command.add_argument("--batch-size", type=_positive, default=2, help="default 2")
    command.add_argument("--steps", type=_positive, default=3, help="steps of training; default 3")
    command.add_argument("--device", default="cpu", help="as torch names it; default cpu")
    command.add_argument("--seed", type=int, default=0, help="of weights and inputs; default 0")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


_positive.__name__ = "whole number"  # argparse says 'invalid whole number value'


def _verify(options: argparse.Namespace) -> Any:
    """Builds the model and its inputs and verifies it."""
    checkpoint = _checkpoint(options.checkpoint)
    known = {name: value.default for name, value in model_arguments(options.model).items()}
    settings = recipe(options.model)
    size = options.size or [settings["size"]]
    given = {"image_size": size[0]} if "image_size" in known else {}
    torch.manual_seed(options.seed)
    model = _on(create(options.model, **given), options.device)
    make = INPUTS[settings["data"]]

    def inputs(step: int) -> tuple[Any, ...]:
        return make(known, options.batch_size, size, options.device)

    return verify(model, inputs, checkpoint, steps=options.steps)


def _checkpoint(text: str) -> Checkpoint:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal():
        return int(text)
    if any(character in text for character in "()-"):
        return Plan.parse(text)
    check_name(text)
    return text


def _on(model: Chain, device: str) -> Chain:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"--device {device} cannot be used here: {reason}") from error


def _cube(size: Sequence[int], axes: int) -> list[int]:
    if len(size) not in (1, axes):
        raise ArgumentError(f"--size takes 1 or {axes} numbers for this model; got {len(size)}")
    return list(size) * (axes if len(size) == 1 else 1)


def _images(known: dict[str, Any], count: int, size: list[int], device: str) -> tuple[Any, ...]:
    return (torch.randn(count, known["in_channels"], *_cube(size, 2), device=device),)


def _volumes(known: dict[str, Any], count: int, size: list[int], device: str) -> tuple[Any, ...]:
    return (torch.randn(count, known["in_channels"], *_cube(size, 3), device=device),)


def _text(known: dict[str, Any], count: int, size: list[int], device: str) -> tuple[Any, ...]:
    """Returns words (N, T) and the words that follow them (N, T)."""
    shape = (count, *_cube(size, 1))
    return tuple(torch.randint(known["vocabulary"], shape, device=device) for _ in range(2))


def _stream(known: dict[str, Any], count: int, size: list[int], device: str) -> tuple[Any, ...]:
    """Returns words (T, N), no state, and the words that follow (T, N)."""
    shape = (*_cube(size, 1), count)
    words = [torch.randint(known["vocabulary"], shape, device=device) for _ in range(2)]
    return words[0], None, words[1]


INPUTS: dict[str, Make] = {
    "photographs": _images,
    "digits": _images,
    "volume": _volumes,
    "text": _text,
    "stream": _stream,
}
