"""`zoo max-batch`: the largest batch, or other size, within a memory budget."""

from collections.abc import Sequence
from dataclasses import asdict

from zoo.cli.meanwhile import told_meanwhile
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.place import OPTIMIZERS, add_device, add_optimizer, placed
from zoo.cli.subject import add_subject, subject
from zoo.cli.values import checkpoint, positive, ratio, size, whole
from zoo.largest import largest as largest_size


def main(arguments: Sequence[str]) -> Answer:
    """Searches as `zoo.largest` does; with `--device` of this machine the result is measured.

    In a terminal the sizes that it looks at are told meanwhile.
    """
    options = _parser().parse(arguments)
    found = subject(options, batch_size=1)
    model, device = placed(found, options)
    with told_meanwhile("zoo.largest"):
        largest = largest_size(
            model,
            found.meta_inputs(),
            memory_budget=options.memory_budget,
            checkpoint=options.checkpoint,
            max_overhead=options.max_overhead,
            optimizer=OPTIMIZERS[options.optimizer],
            vary=tuple(options.vary or [found.batch_axis]),
            multiple_of=options.multiple_of,
            device=device,
            verify=None if device is None else False,
        )
    return answer(options, str(largest), {**asdict(largest), "plan": largest.plan.text()})


def _parser() -> Parser:
    parser = Parser(
        "max-batch",
        "Finds the largest batch whose whole training step keeps to a memory budget.",
        [
            "resnet50 --input 1,3,224,224 --memory-budget 8GiB --checkpoint auto",
            "vnet --vary 2 3 4 --multiple-of 16 --memory-budget 4GiB",
            "resnet18 --memory-budget device --device cuda",
        ],
        "no size keeps to the budget",
    )
    add_subject(parser)
    parser.add_argument(
        "--memory-budget",
        type=size,
        required=True,
        metavar="SIZE",
        help="of the whole step: 8GiB, 8GB, bytes, or device for what is free here",
    )
    parser.add_argument(
        "--checkpoint",
        type=checkpoint,
        default=False,
        metavar="PLAN",
        help="true, false (default), auto for the best plan of each size, a number of segments, "
        "sqrt, blocks or cheap",
    )
    parser.add_argument(
        "--max-overhead", type=ratio, metavar="RATIO", help="with auto: at most so much more time"
    )
    parser.add_argument(
        "--vary",
        type=whole,
        nargs="+",
        metavar="AXIS",
        help="axes of the inputs that grow together; default: the batch",
    )
    parser.add_argument(
        "--multiple-of", type=positive, default=1, help="sizes to look at; default 1, all"
    )
    add_optimizer(parser)
    add_device(parser)
    return parser
