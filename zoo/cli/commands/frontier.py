"""`zoo frontier`: what each memory budget costs in time."""

from collections.abc import Iterator, Sequence

from zoo import ahead
from zoo.cli.files import add_plot, write, write_text
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.place import OPTIMIZERS, add_device, add_optimizer, placed
from zoo.cli.subject import add_subject, subject
from zoo.cli.values import destination, positive
from zoo.plan_frontier import Frontier, Point
from zoo.report.markdown import markdown_table
from zoo.units import format_bytes


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
    return answer(options, _table(frontier, options.points), frontier.to_json())


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


def _table(frontier: Frontier, count: int) -> str:
    shown = [*_spread(frontier.optimal, count), *frontier.schemes, frontier.baseline]
    rows = list(_rows(frontier, sorted(shown, key=lambda point: point.peak)))
    table = markdown_table(("plan", "step peak", "of keeping all", "time"), rows)
    plans = "1 best plan" if len(frontier.optimal) == 1 else f"{len(frontier.optimal)} best plans"
    return (
        f"{frontier.title}, one training step: {plans}\n\n{table}\n\n"
        f"no plan goes below {format_bytes(frontier.lower_bound)}"
    )


def _spread(points: Sequence[Point], count: int) -> list[Point]:
    """Chooses as many points, evenly, the first and the last among them."""
    if len(points) <= count:
        return list(points)
    if count == 1:
        return [points[0]]
    return [points[place * (len(points) - 1) // (count - 1)] for place in range(count)]


def _rows(frontier: Frontier, points: Sequence[Point]) -> Iterator[tuple[str, str, str, str]]:
    for point in points:
        share = point.peak / max(frontier.baseline.peak, 1)
        yield point.name, format_bytes(point.peak), f"×{share:.2f}", f"×{point.time_ratio:.2f}"
