"""`zoo plan`, `zoo frontier` and `zoo max-batch`: what a memory budget allows and what it costs."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zoo.api import plan as ahead
from zoo.cli.model_spec import TORCH_DEVICES, ModelSpec, is_torch_device, model_spec
from zoo.cli.output import log_to_stderr, write
from zoo.cli.parser import MODEL, OPTIMIZER, OPTIMIZERS, PLANS, PLOT, Answer, command
from zoo.errors import ArgumentError, nearest, shortened_text
from zoo.policy.report import PlanReport
from zoo.profiling.kernel_costs import DEVICES
from zoo.sizing.max_size import largest

# those of the table of rates that torch does not know
RATED = ", ".join(name for name in DEVICES if not is_torch_device(name))
# what these commands share
STEP = {
    **MODEL,
    **OPTIMIZER,
    "--device DEVICE": "cpu or cuda: each kind of kernel is run here, which gives its seconds "
    f"and the kernel workspaces; {RATED}: an analytical estimate from that device's peak rates; "
    "default: from those of a small CPU",
}


@command(
    {
        **STEP,
        "--memory-budget SIZE": "of the whole step: 8GiB, 8GB, bytes, 0.5 or 50%% of the baseline, "
        "or device for what is free here",
        "--max-overhead RATIO": "instead, the least memory in at most so much more time: 0.2 for a "
        "fifth",
        "--world-size COUNT": "plan for each of so many simulated ranks; inputs are those of one",
        "--strategy STRATEGY": "how ranks share the model: fsdp2 (default: each block sharded, "
        "then the rest) or ddp",
        "--save FILE": "write the plan as JSON, for --checkpoint",
        **PLOT,
        "--draw": "also print the plan step by step",
    },
    either=("--memory-budget", "--max-overhead"),
    no="no plan keeps to the budget",
)
def run_plan(options: argparse.Namespace) -> Answer:
    """Finds the plan of least time whose whole training step keeps to a memory budget.

    examples:
      zoo plan resnet50 --input 32,3,224,224 --memory-budget 2GiB --save plan.json
      zoo plan gpt2_small --batch-size 8 --size 512 --memory-budget 50% --device a100
      zoo plan gpt2_xl --batch-size 1 --memory-budget 24GiB --world-size 64 --device nvidia-h200
      zoo plan mypackage.models:Net --args width=64 --input 8,3,64,64 --max-overhead 0.2
    """
    spec = model_spec(options)
    _check_ranks(options)
    given = _given(spec, options)
    given |= {"memory_budget": options.memory_budget, "max_overhead": options.max_overhead}
    report: PlanReport | ahead.RankReport
    if options.world_size is None:
        report = alone = ahead.plan(**given)
    else:
        strategy = options.strategy or "fsdp2"
        report = ahead.plan_rank(**given, world_size=options.world_size, strategy=strategy)
        alone = report.alone
    write(options.save, alone.save)
    write(options.plot, alone.plot)
    text = f"{report}\n\n{alone.draw()}" if options.draw else str(report)
    return Answer(text, report.to_json())


@command(
    {
        **STEP,
        "--points COUNT=12": "best plans to print, evenly",
        "--csv FILE": "write all of them with their plans",
        **PLOT,
    }
)
def run_frontier(options: argparse.Namespace) -> Answer:
    """Lists what each memory budget costs in time: the best plans and the classic schemes.

    examples:
      zoo frontier resnet50 --input 32,3,224,224
      zoo frontier densenet121 --plot frontier.svg --csv frontier.csv
    """
    frontier = ahead.frontier(**_given(model_spec(options), options))
    write(options.csv, lambda path: Path(path).write_text(frontier.to_csv(), encoding="utf-8"))
    write(options.plot, frontier.plot)
    return Answer(frontier.table(options.points), frontier.to_json())


@command(
    {
        **STEP,
        "--memory-budget SIZE": "of the whole step: 8GiB, 8GB, bytes, or device for what is free "
        "here",
        "--checkpoint PLAN=false": f"auto for the best plan of each size, {PLANS}",
        "--max-overhead RATIO": "with --checkpoint auto: at most so much more time",
        "--vary AXIS...": "axes of the inputs that grow together; default: the batch",
        "--multiple-of COUNT=1": "sizes to look at",
    },
    either=("--memory-budget",),
    no="no size keeps to the budget",
)
def run_max_batch(options: argparse.Namespace) -> Answer:
    """Finds the largest batch whose whole training step keeps to a memory budget.

    examples:
      zoo max-batch resnet50 --input 1,3,224,224 --memory-budget 8GiB --checkpoint auto
      zoo max-batch vnet --vary 2 3 4 --multiple-of 16 --memory-budget 4GiB
      zoo max-batch resnet18 --memory-budget device --device cuda
    """
    spec = model_spec(options, batch_size=1)
    given = _given(spec, options)
    given["sample"] = given.pop("inputs")
    with log_to_stderr("zoo.largest"):
        found = largest(
            **given,
            memory_budget=options.memory_budget,
            checkpoint=options.checkpoint,
            max_overhead=options.max_overhead,
            vary=tuple(options.vary or [spec.batch_axis]),
            multiple_of=options.multiple_of,
            # on a device of this machine one step is measured
            verify=None if given["device"] is None else False,
        )
    return Answer(str(found), {**asdict(found), "plan": found.plan.text()})


def _check_ranks(options: argparse.Namespace) -> None:
    """Raises ArgumentError for options that have no meaning together."""
    if options.world_size is None:
        if options.strategy:
            raise ArgumentError("--strategy says how ranks share a model; give --world-size, too")
    elif options.plot:
        raise ArgumentError("--plot draws a plan for one process; leave out --world-size")
    elif options.device is not None and is_torch_device(options.device):
        raise ArgumentError(
            f"--device {options.device} runs kernels here, and a rank's are never run; leave it "
            f"out, or take one of the table: {RATED}"
        )


def _given(spec: ModelSpec, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that these commands share, with the model built for its device."""
    device = "cpu" if options.device is None else options.device
    is_here = options.device is not None and is_torch_device(device)
    if not is_here and device not in DEVICES:
        raise ArgumentError(
            f"--device {shortened_text(device)} is neither one of torch's "
            f"({', '.join(TORCH_DEVICES)}) nor in the table: {', '.join(DEVICES)}."
            f"{nearest(device, [*TORCH_DEVICES, *DEVICES])}"
        )
    return {
        "model": spec.build_on(device) if is_here else spec.build_unwritten(),
        "inputs": spec.inputs_on("meta"),
        "optimizer": OPTIMIZERS[options.optimizer],
        "device": None if is_here else device,
    }
