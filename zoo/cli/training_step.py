"""`zoo anatomy` and `zoo verify`: a training step taken apart, and compared with the baseline's."""

import argparse
import contextlib
import gc
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from zoo.api.track import anatomy
from zoo.api.verify import verify
from zoo.cli.model_spec import TORCH_DEVICES, is_torch_device, model_spec
from zoo.cli.output import write
from zoo.cli.parser import MODEL, OPTIMIZER, OPTIMIZERS, PLANS, PLOT, Answer, command
from zoo.errors import ArgumentError, nearest, shortened
from zoo.profiling.timeline import Timeline


@command(
    {
        **MODEL,
        "--checkpoint PLAN": f"also by this plan: {PLANS}",
        **OPTIMIZER,
        "--device DEVICE": "cpu or cuda: run a real step there; default: fake tensors of a CPU",
        "--holders NUMBER=10": "largest tensors to list",
        "--save FILE": "write every allocation, as JSON",
        **PLOT,
    }
)
def run_anatomy(options: argparse.Namespace) -> Answer:
    """Takes the memory of one training step apart, without and with a plan.

    By category, block and tensor. Nothing is run or allocated, unless a device is named.

    examples:
      zoo anatomy resnet50 --input 32,3,224,224
      zoo anatomy gpt2_small --checkpoint true --json
      zoo anatomy timm.create_model --args resnet50 --input 32,3,224,224 --plot step.svg
    """
    spec, device = model_spec(options), options.device
    if device is not None and not is_torch_device(device):
        raise ArgumentError(
            f"--device takes {' or '.join(TORCH_DEVICES)}, where a step is run; got "
            f"{shortened(device)}.{nearest(device, TORCH_DEVICES)}"
        )
    with contextlib.ExitStack() as stack:
        if device is None:
            # saves a fifth of the time; no cycle of fake tensors holds memory
            gc.disable()
            stack.callback(gc.enable)
        found = anatomy(
            spec.build_on(device) if device else spec.build_on_meta(),
            spec.inputs_on(device or "meta"),
            optimizer=OPTIMIZERS[options.optimizer],
            checkpoint=options.checkpoint,
        )
    plan, planned = found.plan, found.planned
    write(options.save, lambda path: Path(path).write_text(found.to_json(), encoding="utf-8"))
    write(options.plot, (planned or found.baseline).plot)
    data = {
        "plan": None if plan is None else plan.text(),
        "baseline": _at_peak(found.baseline, options.holders),
        "planned": None if planned is None else _at_peak(planned, options.holders),
    }
    return Answer(found.table(options.holders), data)


@command(
    {
        **MODEL,
        "--checkpoint PLAN=true": PLANS,
        "--steps COUNT=3": "steps of training",
        "--device DEVICE=cpu": "as torch names it",
        "--seed NUMBER=0": "of weights and inputs",
    },
    no="not exact, or refused by the engine",
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
    model = spec.build_on(device)
    report = verify(
        model, lambda step: spec.inputs_on(device), options.checkpoint, steps=options.steps
    )
    data = {**asdict(report), "plan": None if report.plan is None else report.plan.text()}
    return Answer(str(report), data, int(not report.exact))


def _at_peak(timeline: Timeline, holders: int) -> dict[str, Any]:
    """Returns the numbers of the tables; `Anatomy.to_json` has every allocation."""
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
