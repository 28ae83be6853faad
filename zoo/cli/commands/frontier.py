"""`zoo frontier`: what each memory budget costs in time."""

from collections.abc import Sequence

from zoo import ahead
from zoo.cli.files import add_plot, write, write_text
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.place import OPTIMIZERS, add_device, add_optimizer, placed
from zoo.cli.subject import add_subject, subject
from zoo.cli.values import destination, positive


def main(arguments: Sequence[str]) -> Answer:
    """Lists the best plans as `zoo.frontier` does, and the classic schemes."""
    options = _parser().parse(arguments)
    found = subject(options)
    model, device = placed(found, options)
    frontier = ahead.frontier(
        model,
        found.meta_inputs(),
        optimizer=OPTIMIZERS[options.optimizer],
        device=device,
    )
    write_text(options.csv, frontier.to_csv)
    write(options.plot, frontier.plot)
    return answer(options, frontier.table(options.points), frontier.to_json())


def _parser() -> Parser:
    parser = Parser(
        "frontier",
        "Lists what each memory budget costs in time: the best plans and the classic schemes.",
        ["resnet50 --input 32,3,224,224", "densenet121 --plot frontier.svg --csv frontier.csv"],
    )
    add_subject(parser)
    add_optimizer(parser)
    add_device(parser)
    parser.add_argument(
        "--points", type=positive, default=12, help="best plans to print, evenly; default 12"
    )
    parser.add_argument(
        "--csv", type=destination, metavar="FILE", help="write all of them with their plans"
    )
    add_plot(parser, "the curve")
    return parser
