"""`zoo plan`, `frontier`, `max-batch`, `anatomy`, `verify`: memory and time of a training step."""

import argparse
import contextlib
import gc
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from zoo.api import plan as planning
from zoo.api.plan_rank import RankReport, plan_rank
from zoo.api.track import anatomy
from zoo.api.verify import verify
from zoo.cli.interrupts import INTERRUPTED
from zoo.cli.model_spec import ModelSpec, model_spec
from zoo.cli.output import write
from zoo.cli.parser import MODEL, OPTIMIZER, PLANS, PLOT, Answer, command
from zoo.cli.values import RATED, TORCH_DEVICES
from zoo.engine.devices import accelerator_here
from zoo.errors import ArgumentError, Interrupted
from zoo.files import write_file
from zoo.policy.plan_report import PlanReport
from zoo.profiling.kept_interrupts import take_interrupt
from zoo.profiling.timeline import Timeline
from zoo.sizing.max_size import largest
from zoo.verification.determinism import deterministic_algorithms

IN_BACKWARD = {
    "--optimizer-in-backward": "the optimizer steps in the backward and frees each gradient "
    "(zoo.optimizer_in_backward)"
}
OFFLOAD = {"--offload": "what the backward needs may lie on the host until then"}
# options of the commands that plan
PLANNED = {
    **MODEL,
    **OPTIMIZER,
    **IN_BACKWARD,
    "--device DEVICE_OR_RATED": "a device of torch, such as cpu or cuda: measure each kind of "
    f"kernel there, its time and workspace; default: {TORCH_DEVICES[-1]} if it is here, else cpu. "
    f"{', '.join(RATED)}: an analytical estimate from that device's peak rates, without kernel "
    "workspaces",
    **OFFLOAD,
    "--host-budget BYTES": "with --offload: the most that lies there, 64GiB",
}
FREE = "or device: what is free on --device"


@command(
    {
        **PLANNED,
        "--memory-budget SIZE": "peak of the whole training step: 8GiB or 8G, 8GB, bytes, 0.5 or "
        f"50%% of the baseline's peak, {FREE}",
        "--max-overhead RATIO": "instead of a budget: the plan of least memory that takes at most "
        "so much more time, 0.2 or 20%%",
        "--world-size COUNT": "plan for each of so many simulated ranks; --input is that of one",
        "--strategy STRATEGY": "how the ranks share the model: fsdp2 (default) shards each block, "
        "then the rest; ddp copies it",
        "--save FILE": "write the plan to a JSON file that --checkpoint reads",
        **PLOT,
        "--draw": "also print the plan step by step",
    },
    either=("--memory-budget", "--max-overhead"),
    no="no plan fits the budget",
)
def run_plan(options: argparse.Namespace) -> Answer:
    """Finds the fastest plan whose whole training step fits a memory budget.

    examples:
      zoo plan resnet50 --input 32,3,224,224 --memory-budget 2GiB --save plan.json
      zoo plan gpt2_small --batch-size 8 --size 512 --memory-budget 50% --device a100
      zoo plan gpt2_xl --batch-size 1 --memory-budget 24GiB --world-size 64 --device h200
      zoo plan mypackage.models:Net --args width=64 --input 8,3,64,64 --max-overhead 0.2
    """
    spec, ranks = model_spec(options), options.world_size
    if ranks is None and options.strategy:
        raise ArgumentError("--strategy says how ranks share a model; give --world-size, too")
    if ranks is not None and options.plot:
        raise ArgumentError("--plot draws a plan for one process; leave out --world-size")
    if ranks is not None and _is_here(options.device):
        raise ArgumentError(
            f"--device {options.device} runs kernels, but a rank's are only estimated; leave "
            f"it out, or take one of {', '.join(RATED)}"
        )
    arguments = _planning_arguments(spec, options)
    arguments |= {"memory_budget": options.memory_budget, "max_overhead": options.max_overhead}
    report: PlanReport | RankReport
    if ranks is None:
        report = alone = planning.plan(**arguments)
    else:
        strategy = options.strategy or "fsdp2"
        report = plan_rank(**arguments, world_size=ranks, strategy=strategy)
        alone = report.alone
    write(options.save, alone.save)
    write(options.plot, alone.plot)
    text = f"{report}\n\n{alone.draw()}" if options.draw else str(report)
    return Answer(text, report.to_json())


@command(
    {
        **PLANNED,
        "--points COUNT=12": "how many of the best plans to print, evenly spread",
        "--csv FILE": "write all plans as CSV",
        **PLOT,
    }
)
def run_frontier(options: argparse.Namespace) -> Answer:
    """Lists what each memory budget costs in time: the best plans and the classic schemes.

    Ctrl-C lists the plans found so far.

    examples:
      zoo frontier resnet50 --input 32,3,224,224
      zoo frontier densenet121 --plot frontier.svg --csv frontier.csv
    """
    code = 0
    try:
        frontier = planning.frontier(**_planning_arguments(model_spec(options), options))
    except Interrupted as error:
        take_interrupt()
        frontier, code = error.found, INTERRUPTED
        print(f"zoo frontier: {error}", file=sys.stderr)
    write(options.csv, lambda path: write_file(path, frontier.to_csv()))
    write(options.plot, frontier.plot)
    return Answer(frontier.table(options.points), frontier.to_json(), code)


@command(
    {
        **PLANNED,
        "--memory-budget SIZE": f"peak of the whole training step: 8GiB or 8G, 8GB, bytes, {FREE}",
        "--checkpoint PLAN=false": f"auto for the best plan of each size, {PLANS}",
        "--max-overhead RATIO": "with --checkpoint auto: at most so much more time, 0.2 or 20%%",
        "--vary AXIS...": "axes of the inputs that grow together; default: the batch",
        "--multiple-of COUNT=1": "consider only multiples of this",
    },
    either=("--memory-budget",),
    no="no size fits the budget",
)
def run_max_batch(options: argparse.Namespace) -> Answer:
    """Finds the largest batch whose whole training step fits a memory budget.

    examples:
      zoo max-batch resnet50 --input 1,3,224,224 --memory-budget 8GiB --checkpoint auto
      zoo max-batch vnet --vary 2 3 4 --multiple-of 16 --memory-budget 4GiB
      zoo max-batch resnet18 --memory-budget device --device cuda
    """
    spec = model_spec(options, batch_size=1)
    arguments = _planning_arguments(spec, options)
    names = ("memory_budget", "checkpoint", "max_overhead", "multiple_of")
    result = largest(
        sample=arguments.pop("inputs"),
        **arguments,
        **{name: getattr(options, name) for name in names},
        vary=tuple(options.vary or [spec.batch_axis]),
        # on a device of this machine a real step is measured
        verify=None if arguments["device"] is None else False,
    )
    return Answer(str(result), {**asdict(result), "plan": result.plan.text()})


def _planning_arguments(spec: ModelSpec, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that planning functions share, with the model built for its device."""
    device = options.device or accelerator_here() or "cpu"
    # kernels of a rank are only estimated
    is_measured = _is_here(device) and vars(options).get("world_size") is None
    return {
        "model": spec.build_for_planning(device) if is_measured else spec.build_unwritten(),
        "inputs": spec.inputs_on("meta"),
        "optimizer": options.optimizer,
        "device": None if _is_here(device) else device,
        "optimizer_in_backward": options.optimizer_in_backward,
        "offload": options.offload,
        "host_budget": options.host_budget,
    }


def _is_here(device: str | None) -> bool:
    """Returns whether kernels run on a device, which then is one of torch's."""
    return device is not None and device not in RATED


@command(
    {
        **MODEL,
        "--checkpoint PLAN": f"also show a step by this plan: {PLANS}",
        **OPTIMIZER,
        **IN_BACKWARD,
        **OFFLOAD,
        "--device DEVICE": "a device of torch, such as cpu or cuda: run a real step there; "
        "default: fake tensors of a CPU",
        "--holders NUMBER=10": "how many of the largest tensors to list",
        "--save FILE": "write every allocation as JSON",
        **PLOT,
    }
)
def run_anatomy(options: argparse.Namespace) -> Answer:
    """Shows where the memory of a training step goes: by category, block and tensor.

    By default tensors are fake and take no memory; with --device the step really runs.

    examples:
      zoo anatomy resnet50 --input 32,3,224,224
      zoo anatomy gpt2_small --checkpoint true --json
      zoo anatomy timm.create_model --args resnet50 --input 32,3,224,224 --plot step.svg
    """
    spec, device = model_spec(options), options.device
    with contextlib.ExitStack() as stack:
        if device is None:
            # saves a fifth of the time; reference cycles of fake tensors hold no memory
            gc.disable()
            stack.callback(gc.enable)
        steps = anatomy(
            spec.build_on(device) if device else spec.build_on_meta(),
            spec.inputs_on(device or "meta"),
            optimizer=options.optimizer,
            checkpoint=options.checkpoint,
            optimizer_in_backward=options.optimizer_in_backward,
            offload=options.offload,
        )
    write(options.save, lambda path: write_file(path, steps.to_json()))
    write(options.plot, (steps.planned or steps.baseline).plot)
    data = {
        "plan": steps.plan and steps.plan.text(),
        "baseline": _at_peak(steps.baseline, options.holders),
        "planned": steps.planned and _at_peak(steps.planned, options.holders),
        "savings": steps.savings,
    }
    return Answer(steps.table(options.holders), data)


def _at_peak(timeline: Timeline, holders: int) -> dict[str, Any]:
    """Returns the tables' numbers; `Anatomy.to_json` has every allocation."""
    names = ("title", "device", "peak", "tensor_peak", "activation_peak", "kernel_workspace")
    return {
        **{name: getattr(timeline, name) for name in names},
        "phase": timeline.phase_at(timeline.peak_point),
        "categories": timeline.by("category"),
        "blocks": Counter(timeline.blocks(resident=True)) + Counter(timeline.blocks()),
        "holders": [asdict(holder) for holder in timeline.holders(holders)],
    }


@command(
    {
        **MODEL,
        "--checkpoint PLAN=true": PLANS,
        **IN_BACKWARD,
        "--cuda-graph": "train with checkpointing by CUDA graphs (zoo.make_graphed_step)",
        "--steps COUNT=3": "training steps to compare",
        "--deterministic": "train by torch's deterministic algorithms, for a model that does not "
        "repeat its own numbers",
        "--device DEVICE=cpu": "device of torch to train on",
        "--seed NUMBER=0": "of weights and inputs",
    },
    no="not exact, or refused by the engine",
    neither="the baseline does not repeat its own numbers",
)
def run_verify(options: argparse.Namespace) -> Answer:
    """Trains a model on random inputs with and without checkpointing and compares every bit.

    examples:
      zoo verify resnet18 --checkpoint sqrt --size 64
      zoo verify timm.create_model --args resnet18 --input 2,3,64,64
      zoo verify mypackage.models:Net --input 2,3,32,32 --checkpoint '(0-3) 4'
    """
    spec, device = model_spec(options, batch_size=2), options.device
    torch.manual_seed(options.seed)
    # from before the model is made, which may be the first to use cuBLAS
    with deterministic_algorithms(options.deterministic):
        report = verify(
            spec.build_on(device),
            lambda step: spec.inputs_on(device),
            options.checkpoint,
            steps=options.steps,
            optimizer_in_backward=options.optimizer_in_backward,
            cuda_graph=options.cuda_graph,
            deterministic=options.deterministic,
        )
    data = {**asdict(report), "plan": report.plan and report.plan.text()}
    return Answer(str(report), data, {True: 0, False: 1, None: 3}[report.exact])
