"""`zoo verify`: trains with and without checkpointing and compares every bit."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.subject import add_subject, subject
from zoo.cli.values import checkpoint, positive, whole
from zoo.entry import Inputs
from zoo.verify import verify


def main(arguments: Sequence[str]) -> Answer:
    """Verifies as `zoo.verify` does, on random inputs."""
    options = _parser().parse(arguments)
    found = subject(options, batch_size=2)
    torch.manual_seed(options.seed)
    model = found.on(options.device)

    def inputs(step: int) -> Inputs:
        return found.random_inputs(options.device)

    report = verify(
        model,
        inputs,
        options.checkpoint,
        steps=options.steps,
    )
    plan = report.plan
    data = {**asdict(report), "plan": None if plan is None else plan.text()}
    return answer(options, str(report), data, code=int(not report.exact))


def _parser() -> Parser:
    parser = Parser(
        "verify",
        "Trains a model on random inputs with and without checkpointing and compares every bit.",
        [
            "resnet18 --checkpoint sqrt --size 64",
            "timm.create_model --args resnet18 --input 2,3,64,64",
            "mypackage.models:Net --input 2,3,32,32 --checkpoint '(0-3) 4'",
        ],
        "not exact, or refused by the engine",
    )
    add_subject(parser)
    parser.add_argument(
        "--checkpoint",
        type=checkpoint,
        default=True,
        metavar="PLAN",
        help="true (default), false, a number of segments, sqrt, blocks, cheap, '(0-1) 2', or a "
        ".json file, of `zoo plan --save` or of a plan alone: [[0, 1], 2]",
    )
    parser.add_argument("--steps", type=positive, default=3, help="steps of training; default 3")
    parser.add_argument("--device", default="cpu", help="as torch names it; default cpu")
    parser.add_argument("--seed", type=whole, default=0, help="of weights and inputs; default 0")
    return parser
