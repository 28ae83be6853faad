"""`zoo list` and `zoo info`: the models of the catalog, and the steps of a model (a summary)."""

import argparse
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from zoo.api.checkpoint import outline_of
from zoo.catalog import factories
from zoo.catalog.factories import list_models, model_arguments
from zoo.catalog.libraries import LIBRARIES, is_of_library
from zoo.cli.model_spec import model_spec, usual_inputs
from zoo.cli.parser import MODEL, Answer, command
from zoo.cli.values import shapes, shapes_text
from zoo.errors import ArgumentError, nearest, shortened
from zoo.invocation import Invocation
from zoo.planner.event_costs import Outline
from zoo.profiling.tensor_spec import tensors_in
from zoo.report.escaping import markdown_table
from zoo.report.step_axis import block_name
from zoo.tracing.isolated_trace import TraceError
from zoo.units import format_bytes, plural


@dataclass(frozen=True)
class ModelPart:
    """A step of a model, a block of steps, or a child of a module that cannot be traced.

    `shapes` are those of its outputs; a parameter counts for the first part that uses it.
    """

    name: str
    block: int
    shapes: tuple[tuple[int, ...], ...]
    parameters: int
    steps: int = 1


@command({"pattern PATTERN=*": "pattern of names, as in a shell: 'resnet*'"})
def run_list(options: argparse.Namespace) -> Answer:
    """Lists the models of the catalog, or of another library that the pattern names.

    examples:
      zoo list
      zoo list 'resnet*' --json
      zoo list 'timm/convnext*'
    """
    names = list_models(options.pattern)
    if not names:
        library = options.pattern.partition("/")[0]
        all_names = f"{library}/*" if library in LIBRARIES else "*"
        near = nearest(options.pattern, list_models(all_names))
        raise ArgumentError(
            f"no model matches {shortened(options.pattern)}.{near} zoo list '{all_names}' lists all"
        )
    if is_of_library(options.pattern):
        # their inputs are known one by one, of most with arguments alone
        return Answer("\n".join(names), [{"name": name} for name in names])
    models = [
        {
            "name": name,
            "kind": inspect.signature(getattr(factories, name)).return_annotation.__name__,
            "inputs": shapes(usual_inputs(name, {})),
            "arguments": list(model_arguments(name)),
        }
        for name in names
    ]
    rows = [(entry["name"], entry["kind"], shapes_text(entry["inputs"])) for entry in models]
    return Answer(markdown_table(("model", "class", "default inputs"), rows), models)


@command({**MODEL, "--steps": "list single steps instead of blocks"})
def run_info(options: argparse.Namespace) -> Answer:
    """Lists the steps of a model, their parameters and output shapes, without allocating it.

    examples:
      zoo info resnet50
      zoo info gpt2_small --batch-size 8 --size 512 --steps
      zoo info torchvision.models.vgg11 --input 8,3,224,224 --json
    """
    spec = model_spec(options)
    model = spec.build_on_meta()
    invocation, reason = Invocation.of(spec.inputs_on("meta")), None
    try:
        parts, noun = _steps(model, outline_of(model, invocation)), "step"
    except TraceError as error:
        parts, noun, reason = _children(model, invocation, error), "module", str(error)
    parameters = list(model.parameters())
    is_named = is_of_library(spec.name) or spec.name in list_models()
    signature = model_arguments(spec.name) if is_named else {}
    arguments = {name: _default(argument) for name, argument in signature.items()}
    data: dict[str, Any] = {
        "name": spec.name,
        "kind": type(model).__name__,
        "inputs": shapes(spec.inputs),
        "parameters": _count(parameters),
        "trained_parameters": _count(p for p in parameters if p.requires_grad),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
        "arguments": arguments,
        "reason": reason,
        "parts": [asdict(part) for part in parts],
    }
    heading = (
        f"{spec.name}: {data['kind']} on {shapes_text(shapes(spec.inputs))}\n"
        f"{_count(parameters):,} parameters ({format_bytes(data['parameter_bytes'])}), "
        f"buffers {format_bytes(data['buffer_bytes'])}, "
        f"{plural(len(parts), noun)} in {plural(len({part.block for part in parts}), 'block')}"
    )
    named = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    rows = [
        (
            f"{part.name}{f' ({part.steps} steps)' if part.steps > 1 else ''}",
            shapes_text(part.shapes) or "-",
            f"{part.parameters:,}",
        )
        for part in (parts if options.steps else _by_block(parts))
    ]
    table = markdown_table((noun, "outputs", "parameters"), rows)
    texts = (heading, table, reason, named and f"--args {named}")
    return Answer("\n\n".join(filter(None, texts)), data)


def _steps(model: nn.Module, outline: Outline) -> list[ModelPart]:
    parameters, seen, parts = list(model.parameters()), set[int](), []
    steps = zip(outline.names, outline.blocks, outline.shapes, outline.parameters, strict=True)
    for name, block, outputs, used in steps:
        count = _count(parameters[number] for number in used - seen)
        seen |= used
        parts.append(ModelPart(name, block, outputs, count))
    return parts


def _children(model: nn.Module, invocation: Invocation, untraceable: TraceError) -> list[ModelPart]:
    """Returns the children in the order of their first calls, then those that were not called."""
    outputs: dict[str, Any] = {}
    names = {child: name for name, child in model.named_children()}

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        if module in names:
            outputs.setdefault(names[module], _shapes(output))

    handle = nn.modules.module.register_module_forward_hook(record)
    try:
        with torch.no_grad():
            invocation.on(model)
    except Exception:
        # otherwise it reads a number, which does not exist on the meta device
        if untraceable.raised:
            raise
    finally:
        handle.remove()
    parts, seen = [], set[nn.Parameter]()
    for block, name in enumerate(dict.fromkeys([*outputs, *names.values()])):
        new = set(model.get_submodule(name).parameters()) - seen
        seen |= new
        parts.append(ModelPart(name, block, outputs.get(name, ()), _count(new)))
    return parts


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def _default(argument: inspect.Parameter) -> Any:
    value = None if argument.default is inspect.Parameter.empty else argument.default
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _by_block(parts: Sequence[ModelPart]) -> list[ModelPart]:
    """Merges the steps of each block; the outputs are those of the last step."""
    blocks = [list(group) for _, group in groupby(parts, key=lambda part: part.block)]
    return [
        replace(
            block[-1],
            name=block_name([part.name.split()[0] for part in block]),
            parameters=sum(part.parameters for part in block),
            steps=len(block),
        )
        for block in blocks
    ]
