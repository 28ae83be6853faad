"""Where a training step is looked at, and with which optimizer: options that several commands take.

nothing           on paper: weights without memory, seconds by the rates of a small CPU
a100, l4, ...     on paper: seconds by that device's rates
cpu, cuda:0       here: the model is built there, kinds of steps are run
"""

import argparse
import functools

import torch
from torch import nn

from zoo.cli.parser import Parser
from zoo.cli.subject import Subject
from zoo.cli.values import one_of
from zoo.errors import ArgumentError, nearest, shortened_text
from zoo.measure.devices import DEVICES
from zoo.measure.optimizer import MakeOptimizer

HERE = ("cpu", "cuda")
OPTIMIZERS: dict[str, MakeOptimizer | None] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "none": None,
}


def add_optimizer(parser: Parser) -> None:
    """Adds `--optimizer`."""
    parser.add_argument(
        "--optimizer",
        type=one_of(OPTIMIZERS),
        default="adamw",
        help="whose state counts: adamw (default), adam, sgd (with momentum) or none",
    )


def add_device(parser: Parser) -> None:
    """Adds `--device` as those commands take it that plan."""
    known = ", ".join(name for name in DEVICES if name != "cpu")
    parser.add_argument(
        "--device",
        help="cpu or cuda: each kind of step is run once here, which gives its seconds and the "
        f"bytes that kernels hide; {known}: on paper, by that device's rates; default: on paper, "
        "by those of a small CPU",
    )


def placed(found: Subject, options: argparse.Namespace) -> tuple[nn.Module, str | None]:
    """Builds the model for planning, and returns the `device=` that goes with it.

    Raises:
        ArgumentError: the device is neither here nor in the table, or the model cannot be built.
    """
    device = options.device
    if device is None:
        return found.on_paper(), "cpu"
    if is_here(device):
        return found.on(device), None
    if device not in DEVICES:
        known = [*HERE, *DEVICES]
        raise ArgumentError(
            f"--device {shortened_text(device)} is neither one of torch's ({', '.join(HERE)}) "
            f"nor in the table: {', '.join(DEVICES)}.{nearest(device, known)}"
        )
    return found.on_paper(), device


def is_here(device: str) -> bool:
    """Says whether torch knows a device of this name, be it in this machine or not."""
    try:
        return torch.device(device).type != "meta"
    except RuntimeError:
        return False
