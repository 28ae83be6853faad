"""`zoo anatomy`: where the memory of a training step goes."""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from zoo.anatomy import Anatomy
from zoo.anatomy import anatomy as take_apart
from zoo.cli.files import add_plot, write, write_text
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.place import HERE, OPTIMIZERS, add_optimizer, is_here
from zoo.cli.subject import add_subject, subject
from zoo.cli.values import checkpoint, destination, whole
from zoo.errors import ArgumentError, nearest, shortened
from zoo.measure.timeline import Timeline


def main(arguments: Sequence[str]) -> Answer:
    """Takes a step apart as `zoo.anatomy` does: on fake tensors, or with `--device` for real."""
    options = _parser().parse(arguments)
    found = subject(options)
    device = options.device
    if device is not None and not is_here(device):
        raise ArgumentError(
            f"--device takes {' or '.join(HERE)}, where a step is run; got {shortened(device)}."
            f"{nearest(device, HERE)}"
        )
    with contextlib.nullcontext() if device else _no_garbage_collection():
        anatomy = take_apart(
            found.on(device) if device else found.on_meta(),
            found.random_inputs(device) if device else found.meta_inputs(),
            optimizer=OPTIMIZERS[options.optimizer],
            checkpoint=options.checkpoint,
        )
    write_text(options.save, anatomy.to_json)
    write(options.plot, (anatomy.planned or anatomy.baseline).plot)
    return answer(options, anatomy.table(options.holders), summary(anatomy, options.holders))


def summary(anatomy: Anatomy, holders: int) -> dict[str, Any]:
    """Returns the numbers of the tables; every allocation is in `Anatomy.to_json`."""
    plan, planned = anatomy.plan, anatomy.planned
    return {
        "plan": None if plan is None else plan.text(),
        "baseline": _at_peak(anatomy.baseline, holders),
        "planned": None if planned is None else _at_peak(planned, holders),
    }


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Lets cycles of objects be while nothing in them has a tensor's memory behind it.

    Looking for them, above all while torch imports what fake tensors need, is a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _at_peak(timeline: Timeline, holders: int) -> dict[str, Any]:
    return {
        "title": timeline.title,
        "device": timeline.device,
        "peak": timeline.peak,
        "phase": timeline.phase_at(timeline.peak_point),
        "tensor_peak": timeline.tensor_peak,
        "activation_peak": timeline.activation_peak,
        "unseen": timeline.unseen,
        "categories": timeline.by("category"),
        "blocks": Counter(timeline.blocks(resident=True)) + Counter(timeline.blocks()),
        "holders": [asdict(holder) for holder in timeline.holders(holders)],
    }


def _parser() -> Parser:
    parser = Parser(
        "anatomy",
        "Takes the memory of one training step apart, by category, block and tensor, without and "
        "with a plan. Nothing is run or allocated, unless a device is named.",
        [
            "resnet50 --input 32,3,224,224",
            "gpt2_small --checkpoint true --json",
            "timm.create_model --args resnet50 --input 32,3,224,224 --plot step.svg",
        ],
    )
    add_subject(parser)
    parser.add_argument(
        "--checkpoint",
        type=checkpoint,
        metavar="PLAN",
        help="also by this plan: true, a number of segments, sqrt, blocks, cheap, '(0-1) 2', or "
        "a .json file, of `zoo plan --save` or of a plan alone: [[0, 1], 2]",
    )
    add_optimizer(parser)
    parser.add_argument(
        "--device", help="cpu or cuda: run a real step there; default: fake tensors of a CPU"
    )
    parser.add_argument(
        "--holders", type=whole, default=10, help="largest tensors to list; default 10"
    )
    parser.add_argument(
        "--save", type=destination, metavar="FILE", help="write every allocation, as JSON"
    )
    add_plot(parser, "bytes over time")
    return parser
