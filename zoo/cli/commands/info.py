"""`zoo info`: what a model is made of: its steps, their parameters, the shapes between them."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from torch import nn

from zoo.catalog import list_models, model_arguments
from zoo.chain import Chain
from zoo.cli.parser import Answer, Parser, answer
from zoo.cli.parts import Part, Parts
from zoo.cli.subject import Subject, add_subject, subject
from zoo.cli.values import shapes, words
from zoo.report.chain_axis import block_name
from zoo.report.markdown import markdown_table
from zoo.units import format_bytes


def main(arguments: Sequence[str]) -> Answer:
    """Builds a model without memory, sends inputs of a shape through it and lists its parts."""
    options = _parser().parse(arguments)
    found = subject(options)
    model = found.on_meta()
    parts = Parts.of(model, found.meta_inputs())
    shown = parts.listed if options.steps else _by_block(parts.listed)
    described = {**_described(found, model), "reason": parts.reason}
    texts = _heading(described, parts), _table(shown), parts.reason, _signature(described)
    return answer(
        options,
        "\n\n".join(filter(None, texts)),
        {**described, "parts": [asdict(part) for part in parts.listed]},
    )


def _parser() -> Parser:
    parser = Parser(
        "info",
        "Lists what a model is made of: steps, parameters, shapes. Nothing is run or allocated.",
        ["resnet50", "gpt2_small --batch-size 8 --size 512 --steps", "torchvision.models.vgg11 "
         "--input 8,3,224,224 --json"],
    )  # fmt: skip
    add_subject(parser)
    parser.add_argument("--steps", action="store_true", help="list each step, not each block")
    return parser


def _described(found: Subject, model: nn.Module) -> dict[str, Any]:
    is_known = found.name in list_models()
    known = model_arguments(found.name) if is_known else {}
    parameters = list(model.parameters())
    return {
        "name": found.name,
        "kind": type(model).__name__,
        "is_chain": isinstance(model, Chain),
        "inputs": shapes(found.inputs),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
        "arguments": {name: _default(entry) for name, entry in known.items()},
    }


def _default(parameter: inspect.Parameter) -> Any:
    value = None if parameter.default is inspect.Parameter.empty else parameter.default
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _heading(described: dict[str, Any], parts: Parts) -> str:
    kind = "chain" if described["is_chain"] else "module"
    what = "steps" if parts.reason is None else "parts"
    inputs = words(described["inputs"])
    blocks = len({part.block for part in parts.listed})
    return (
        f"{described['name']}: {kind} {described['kind']} on {inputs}\n"
        f"{described['parameters']:,} parameters ({format_bytes(described['parameter_bytes'])}), "
        f"buffers {format_bytes(described['buffer_bytes'])}, "
        f"{len(parts.listed)} {what} in {blocks} blocks"
    )


def _signature(described: dict[str, Any]) -> str:
    arguments = described["arguments"].items()
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments)
    return f"--args {listed}" if listed else ""


def _table(parts: Sequence[Part]) -> str:
    rows = [
        (
            f"{part.name}{f' ({part.steps} steps)' if part.steps > 1 else ''}",
            words(part.shapes) or "-",
            f"{part.parameters:,}",
        )
        for part in parts
    ]
    return markdown_table(("step", "hands on", "parameters"), rows)


def _by_block(parts: Sequence[Part]) -> list[Part]:
    """Puts the steps of a block together; what it hands on is what its last step does."""
    blocks = [list(group) for _, group in groupby(parts, key=lambda part: part.block)]
    return [
        Part(
            name=block_name([part.name.split()[0] for part in block]),
            block=block[0].block,
            shapes=block[-1].shapes,
            parameters=sum(part.parameters for part in block),
            steps=len(block),
        )
        for block in blocks
    ]
