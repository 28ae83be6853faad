"""`zoo plan`: the plan of least time within a memory budget."""

import argparse
import functools
from collections.abc import Callable, Sequence

from zoo import ahead, ranks
from zoo.cli.files import add_plot, write
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.place import OPTIMIZERS, add_device, add_optimizer, is_here, placed
from zoo.cli.subject import add_subject, subject
from zoo.cli.values import budget, destination, one_of, positive, ratio
from zoo.errors import ArgumentError
from zoo.measure.devices import DEVICES
from zoo.plan_report import PlanReport


def main(arguments: Sequence[str]) -> Answer:
    """Plans as `zoo.plan` does and says what it costs."""
    options = _parser().parse(arguments)
    found = subject(options)
    _check(options)
    model, device = placed(found, options)
    make: Callable[..., PlanReport | ranks.RankReport] = ahead.plan
    if options.world_size is not None:
        make = functools.partial(
            ranks.plan_rank, world_size=options.world_size, strategy=options.strategy or "fsdp2"
        )
    report = make(
        model,
        found.meta_inputs(),
        memory_budget=options.memory_budget,
        max_overhead=options.max_overhead,
        optimizer=OPTIMIZERS[options.optimizer],
        device=device,
    )
    alone = report.alone if isinstance(report, ranks.RankReport) else report
    write(options.save, alone.save)
    write(options.plot, alone.plot)
    text = f"{report}\n\n{alone.draw()}" if options.draw else str(report)
    return answer(options, text, report.to_json())


def _check(options: argparse.Namespace) -> None:
    """Raises ArgumentError for options that have no meaning together."""
    if options.world_size is None:
        if options.strategy:
            raise ArgumentError("--strategy says how ranks share a model; give --world-size, too")
        return
    if options.plot:
        raise ArgumentError("--plot draws a plan for one process; leave out --world-size")
    if options.device is not None and is_here(options.device):
        known = ", ".join(name for name in DEVICES if not is_here(name))
        raise ArgumentError(
            f"--device {options.device} runs kernels here, and a rank's are never run; leave it "
            f"out, or take one of the table: {known}"
        )


def _parser() -> Parser:
    parser = Parser(
        "plan",
        "Finds the plan of least time whose whole training step keeps to a memory budget.",
        [
            "resnet50 --input 32,3,224,224 --memory-budget 2GiB --save plan.json",
            "gpt2_small --batch-size 8 --size 512 --memory-budget 50% --device a100",
            "gpt2_xl --batch-size 1 --memory-budget 24GiB --world-size 64 --device nvidia-h200",
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
        "--world-size",
        type=positive,
        metavar="RANKS",
        help="plan for each of so many ranks, none of which need be here; inputs are those of one",
    )
    parser.add_argument(
        "--strategy",
        type=one_of(ranks.STRATEGIES),
        help="how ranks share the model: fsdp2 (default: each block sharded, then the rest) or ddp",
    )
    parser.add_argument(
        "--save", type=destination, metavar="FILE", help="write the plan as JSON, for --checkpoint"
    )
    add_plot(parser, "the plan")
    parser.add_argument("--draw", action="store_true", help="also print the plan step by step")
    return parser
