"""`zoo list` and `zoo info`: which models there are, and what a model is made of."""

import argparse
import contextlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import zoo.catalog
from zoo._torch import FakeTensorMode
from zoo.catalog import list_models, model_arguments
from zoo.chain import Chain
from zoo.cli.model_spec import ModelSpec, model_spec, usual_inputs
from zoo.cli.parser import MODEL, Answer, command
from zoo.cli.values import shapes, shapes_text
from zoo.errors import ArgumentError, nearest, shortened
from zoo.invocation import Inputs, Invocation
from zoo.profiling.allocator import tensors_in
from zoo.report.chain_axis import block_name
from zoo.report.markdown import markdown_table
from zoo.tracing.ahead import TraceError
from zoo.tracing.api import Entry
from zoo.units import format_bytes


@dataclass(frozen=True)
class Part:
    """A step of a model, several steps together, or a child of a module that cannot be traced.

    `shapes` are those of its outputs; a parameter counts where it is first used.
    """

    name: str
    block: int
    shapes: tuple[tuple[int, ...], ...]
    parameters: int
    steps: int = 1


@command({"pattern PATTERN=*": "as a shell has them: 'resnet*'"})
def run_list(options: argparse.Namespace) -> Answer:
    """Lists the models of the catalog.

    examples:
      zoo list
      zoo list 'resnet*' --json
    """
    names = list_models(options.pattern)
    if not names:
        near = nearest(options.pattern, list_models())
        raise ArgumentError(f"no model matches {shortened(options.pattern)}.{near}")
    found = [
        {
            "name": name,
            "kind": inspect.signature(getattr(zoo.catalog, name)).return_annotation.__name__,
            "inputs": shapes(usual_inputs(name, {})),
            "arguments": list(model_arguments(name)),
        }
        for name in names
    ]
    rows = [(entry["name"], entry["kind"], shapes_text(entry["inputs"])) for entry in found]
    return Answer(markdown_table(("model", "kind", "inputs unless said"), rows), found)


@command({**MODEL, "--steps": "list each step, not each block"})
def run_info(options: argparse.Namespace) -> Answer:
    """Lists what a model is made of: steps, parameters, shapes. Nothing is run or allocated.

    examples:
      zoo info resnet50
      zoo info gpt2_small --batch-size 8 --size 512 --steps
      zoo info torchvision.models.vgg11 --input 8,3,224,224 --json
    """
    spec = model_spec(options)
    model = spec.build_on_meta()
    parts, reason = parts_of(model, spec.inputs_on("meta"))
    described = {**_described(spec, model), "reason": reason}
    named = ", ".join(f"{name}={value!r}" for name, value in described["arguments"].items())
    texts = (
        _heading(described, parts),
        _table(parts if options.steps else _by_block(parts)),
        reason,
        named and f"--args {named}",
    )
    data = {**described, "parts": [asdict(part) for part in parts]}
    return Answer("\n\n".join(filter(None, texts)), data)


def parts_of(model: nn.Module, inputs: Inputs) -> tuple[list[Part], str | None]:
    """Runs a forward without gradients; returns the steps of a model in their order.

    Of a module that cannot be traced these are its children, and the second value says why.
    """
    given = Invocation.of(inputs)
    try:
        return _steps(Entry.of(model, given)), None
    except TraceError as error:
        return _children(model, given, error), str(error)


class _UsedParameters(TorchFunctionMode):
    """Counts the elements of the parameters that functions of torch are called with, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[nn.Parameter] = set()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_in((args, kwargs or {}))
        new = {tensor for tensor in tensors if isinstance(tensor, nn.Parameter)} - self.seen
        self.seen |= new
        self.count += _count(new)
        return func(*args, **(kwargs or {}))


def _steps(entry: Entry) -> list[Part]:
    used, counted, value, outline = _UsedParameters(), 0, entry.state, entry.outline
    parts = []
    # a chain is on the meta device, where its steps run much faster
    is_chain = isinstance(entry.model, Chain)
    fake = contextlib.nullcontext() if is_chain else FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), fake, used:
        for step, name, block in zip(outline.steps, entry.names, outline.blocks, strict=True):
            value = step(*(value if isinstance(value, tuple) else (value,)))
            parts.append(Part(name, block, _shapes(value), used.count - counted))
            counted = used.count
    return parts


def _children(model: nn.Module, given: Invocation, refused: TraceError) -> list[Part]:
    """Returns the children in the order of their first calls, then those that were not called."""
    outputs: dict[str, Any] = {}
    children = dict(model.named_children())
    names = {child: name for name, child in children.items()}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if module in names:
            outputs.setdefault(names[module], _shapes(output))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        with torch.no_grad():
            given.on(model)
    except Exception:
        # else it reads a number, which is not there on the meta device
        if refused.raised:
            raise
    finally:
        handle.remove()
    parts, known = [], set[nn.Parameter]()
    for block, name in enumerate(dict.fromkeys([*outputs, *children])):
        new = set(children[name].parameters()) - known
        known |= new
        parts.append(Part(name, block, outputs.get(name, ()), _count(new)))
    return parts


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def _described(spec: ModelSpec, model: nn.Module) -> dict[str, Any]:
    known = model_arguments(spec.name) if spec.name in list_models() else {}
    parameters = list(model.parameters())
    return {
        "name": spec.name,
        "kind": type(model).__name__,
        "is_chain": isinstance(model, Chain),
        "inputs": shapes(spec.inputs),
        "parameters": _count(parameters),
        "trained_parameters": _count(p for p in parameters if p.requires_grad),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
        "arguments": {name: _default(argument) for name, argument in known.items()},
    }


def _default(argument: inspect.Parameter) -> Any:
    value = None if argument.default is inspect.Parameter.empty else argument.default
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _heading(described: dict[str, Any], parts: Sequence[Part]) -> str:
    kind = "chain" if described["is_chain"] else "module"
    what = "steps" if described["reason"] is None else "parts"
    return (
        f"{described['name']}: {kind} {described['kind']} on {shapes_text(described['inputs'])}\n"
        f"{described['parameters']:,} parameters ({format_bytes(described['parameter_bytes'])}), "
        f"buffers {format_bytes(described['buffer_bytes'])}, "
        f"{len(parts)} {what} in {len({part.block for part in parts})} blocks"
    )


def _table(parts: Sequence[Part]) -> str:
    rows = [
        (
            f"{part.name}{f' ({part.steps} steps)' if part.steps > 1 else ''}",
            shapes_text(part.shapes) or "-",
            f"{part.parameters:,}",
        )
        for part in parts
    ]
    return markdown_table(("step", "hands on", "parameters"), rows)


def _by_block(parts: Sequence[Part]) -> list[Part]:
    """Merges the steps of each block; its outputs are those of its last step."""
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
