"""`zoo plan`: the plan of least time within a memory budget."""

from collections.abc import Sequence

from zoo import ahead
from zoo.cli.files import add_plot, write
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.place import OPTIMIZERS, add_device, add_optimizer, placed
from zoo.cli.subject import add_subject, subject
from zoo.cli.values import budget, destination, ratio


def main(arguments: Sequence[str]) -> Answer:
    """Plans as `zoo.plan` does and says what it costs."""
    options = _parser().parse(arguments)
    found = subject(options)
    model, device = placed(found, options)
    report = ahead.plan(
        model,
        found.meta_inputs(),
        memory_budget=options.memory_budget,
        max_overhead=options.max_overhead,
        optimizer=OPTIMIZERS[options.optimizer],
        device=device,
    )
    write(options.save, report.save)
    write(options.plot, report.plot)
    text = f"{report}\n\n{report.draw()}" if options.draw else str(report)
    return answer(options, text, report.to_json())


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Finds the plan of least time whose whole training step keeps to a memory budget.",
        [
            "resnet50 --input 32,3,224,224 --memory-budget 2GiB --save plan.json",
            "gpt2_small --batch-size 8 --size 512 --memory-budget 50% --device a100",
            "mypackage.models:Net --args width=64 --input 8,3,64,64 --max-overhead 0.2",
        ],
        "no plan keeps to the budget",
    )
    add_subject(parser)
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument(
        "--memory-budget",
        type=budget,
        metavar="SIZE",
        help="of the whole step: 8GiB, 8GB, bytes, 0.5 or 50%% of plain training, or device for "
        "what is free here",
    )
    limit.add_argument(
        "--max-overhead",
        type=ratio,
        metavar="RATIO",
        help="instead, the least memory in at most so much more time: 0.2 for a fifth",
    )
    add_optimizer(parser)
    add_device(parser)
    parser.add_argument(
        "--save", type=destination, metavar="FILE", help="write the plan as JSON, for --checkpoint"
    )
    add_plot(parser, "the plan")
    parser.add_argument("--draw", action="store_true", help="also print the plan step by step")
    return parser
