"""Which model a command is about, and on what inputs.

    resnet50                              of the catalog; inputs are those of its recipe unless said
    timm.create_model --args resnet50     whatever can be imported and makes a torch.nn.Module
    mypackage.models:Net                  the same, the module's part set apart by a colon

A command that only counts gets the model without memory behind its weights; see `Subject`.
"""

import argparse
import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.catalog import create, list_models, model_arguments
from zoo.cli.importing import imported, in_a_line, working_folder_first
from zoo.cli.parser import Parser
from zoo.cli.values import Spec, positive, spec
from zoo.entry import Inputs
from zoo.errors import ArgumentError, ModelNameError, ZooError, nearest, shortened, shortened_text
from zoo.harness.recipes import recipe

Specs = tuple[Spec | None, ...]


@dataclass(frozen=True)
class Subject:
    """A model that can be built, and the inputs it is to be called with.

    Attributes:
        name: as the command line has it.
        make: builds the model, on the device that is the default then.
        inputs: one entry for each argument of its forward, all with names or none.
        batch_axis: the axis of the inputs along which samples lie.
    """

    name: str
    make: Callable[[], Any]
    inputs: Specs
    batch_axis: int = 0

    def built(self) -> nn.Module:
        """Builds the model, in training mode.

        Raises:
            ArgumentError: it cannot be built, or is no module.
        """
        try:
            with working_folder_first():
                model = self.make()
        except ZooError:
            raise
        except Exception as error:
            raise ArgumentError(f"{self.name} cannot be built: {in_a_line(error)}") from error
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise ArgumentError(f"{self.name} makes no torch.nn.Module but a value of type {kind}")
        return model.train()

    def on_meta(self) -> nn.Module:
        """Builds the model on the meta device, or, where its code cannot, for real."""
        try:
            with torch.device("meta"):
                return self.built()
        except ZooError:
            # such as one that reads a number from a tensor as it is built
            return self.built()

    def on_paper(self) -> nn.Module:
        """Builds the model on the CPU with weights that nothing was ever written to.

        The system gives them memory when they are written. On the meta device attention and LSTMs
        choose other kernels, and so other bytes.
        """
        model = self.on_meta()
        known: dict[int, Any] = {
            id(parameter): nn.Parameter(
                torch.empty_like(parameter, device="cpu"), parameter.requires_grad
            )
            for parameter in model.parameters()
            if parameter.is_meta
        }
        buffers = (buffer for buffer in model.buffers() if buffer.is_meta)
        known |= {id(buffer): torch.zeros_like(buffer, device="cpu") for buffer in buffers}
        return copy.deepcopy(model, known)

    def on(self, device: str) -> nn.Module:
        """Builds the model on a device of this machine."""
        try:
            return self.built().to(device)
        except (RuntimeError, AssertionError) as error:
            reason = shortened_text(str(error).splitlines()[0])
            raise ArgumentError(
                f"--device {shortened_text(device)} cannot be used here: {reason}"
            ) from error

    def meta_inputs(self) -> Inputs:
        """Returns inputs that take no memory."""
        return self._inputs(Spec.meta)

    def random_inputs(self, device: str) -> Inputs:
        """Returns inputs of random numbers."""
        return self._inputs(lambda entry: entry.random(device))

    def _inputs(self, make: Callable[[Spec], Tensor]) -> Inputs:
        names = [entry.name for entry in self.inputs if entry is not None and entry.name]
        made = tuple(None if entry is None else make(entry) for entry in self.inputs)
        if not names:
            return made
        if len(set(names)) < len(made):
            raise ArgumentError("--input takes a name for each input, no two the same, or for none")
        return dict(zip(names, made, strict=True))


def add_subject(parser: Parser) -> None:
    """Adds the options that say which model and on what."""
    parser.add_argument(
        "model",
        help="a name of `zoo list`, or an import path, whose code is run: timm.create_model, "
        "package:Class",
    )
    parser.add_argument(
        "--args",
        nargs="+",
        default=[],
        metavar="VALUE",
        help="arguments to build it with: classes=10, or for an import path also without a name",
    )
    parser.add_argument(
        "--input",
        action="append",
        type=spec,
        metavar="SHAPE",
        help="shape of an input: 32,3,224,224, with a type 8,128:int64, by its name "
        "input_ids=8,128:int64; once for each; 'none' is None. For a language model of the "
        "catalog the tokens are enough",
    )
    parser.add_argument(
        "--batch-size", type=positive, help="in place of --input, for models of the catalog"
    )
    parser.add_argument(
        "--size",
        type=positive,
        nargs="+",
        help="likewise: side of the images, sides of a volume, or length of the text; default: "
        "what the model is compared on",
    )


def subject(options: argparse.Namespace, batch_size: int | None = None) -> Subject:
    """Finds the model and the inputs that the options name, and builds nothing yet.

    `batch_size` is that of a model of the catalog where the options say none.

    Raises:
        ModelNameError: no such model. ArgumentError: no such import path, argument or shape.
    """
    positional, named = _arguments(options.args)
    name = options.model
    if "." not in name and ":" not in name:
        if name not in list_models():
            raise ModelNameError(
                f"there is no model {shortened(name)}.{nearest(name, list_models())} "
                "`zoo list` shows all; of another package, give the import path: "
                "timm.create_model --args resnet50"
            )
        return _of_catalog(options, positional, named, batch_size)
    if options.size or options.batch_size or not options.input:
        raise ArgumentError(
            f"{shortened_text(name)} is not of the catalog; say its inputs by --input 32,3,224,224"
        )
    found = imported(name)
    if isinstance(found, nn.Module) and not options.args:
        return Subject(name, lambda: found, tuple(options.input))
    if not callable(found) or isinstance(found, nn.Module):
        raise ArgumentError(f"{name} is a {type(found).__name__}, which cannot be called to build")
    return Subject(name, lambda: found(*positional, **named), tuple(options.input))


def _of_catalog(
    options: argparse.Namespace,
    positional: Sequence[Any],
    named: Mapping[str, Any],
    batch_size: int | None,
) -> Subject:
    name = options.model
    if positional:
        raise ArgumentError(
            f"--args of {name} have names: classes=10; got {shortened(positional[0])}"
        )
    known = _defaults(name) | dict(named)
    settings = recipe(name)
    if options.input and (options.size or options.batch_size):
        raise ArgumentError("--input says all of --size and --batch-size; give it alone")
    if options.input:
        inputs = _given(options.input, settings["data"], known)
    else:
        inputs = usual_inputs(name, known, options.batch_size or batch_size, options.size)
    if "image_size" in known and "image_size" not in named and inputs[0] is not None:
        named = {**named, "image_size": inputs[0].shape[-1]}
    batch_axis = 1 if settings["data"] == "stream" else 0
    return Subject(name, lambda: create(name, **named), inputs, batch_axis)


def usual_inputs(
    name: str,
    named: Mapping[str, Any],
    batch_size: int | None = None,
    size: Sequence[int] | None = None,
) -> Specs:
    """Returns inputs for a model of the catalog that is built with these arguments."""
    settings = recipe(name)
    sides = size or [settings["size"]]
    known = _defaults(name) | dict(named)
    return INPUTS[settings["data"]](known, batch_size or settings["batch_size"], sides)


def _defaults(name: str) -> dict[str, Any]:
    return {key: entry.default for key, entry in model_arguments(name).items()}


def _given(inputs: Sequence[Spec | None], data: str, known: Mapping[str, Any]) -> Specs:
    """Completes inputs: words have the type of words, and are followed by words."""
    if data not in ("text", "stream"):
        return tuple(inputs)
    words = [
        entry and replace(entry, dtype=entry.dtype or torch.int64, below=known["vocabulary"])
        for entry in inputs
    ]
    if len(words) > 1:
        return tuple(words)
    return (words[0], words[0]) if data == "text" else (words[0], None, words[0])


def _images(known: Mapping[str, Any], count: int, size: Sequence[int]) -> Specs:
    return (Spec((count, known["in_channels"], *_sides(size, 2))),)


def _volumes(known: Mapping[str, Any], count: int, size: Sequence[int]) -> Specs:
    return (Spec((count, known["in_channels"], *_sides(size, 3))),)


def _text(known: Mapping[str, Any], count: int, size: Sequence[int]) -> Specs:
    """Returns words (N, T) and the words that follow them (N, T)."""
    return _given([Spec((count, *_sides(size, 1)))], "text", known)


def _stream(known: Mapping[str, Any], count: int, size: Sequence[int]) -> Specs:
    """Returns words (T, N), no state, and the words that follow (T, N)."""
    return _given([Spec((*_sides(size, 1), count))], "stream", known)


INPUTS: dict[str, Callable[[Mapping[str, Any], int, Sequence[int]], Specs]] = {
    "photographs": _images,
    "digits": _images,
    "volume": _volumes,
    "text": _text,
    "stream": _stream,
}


def _sides(size: Sequence[int], axes: int) -> list[int]:
    if len(size) not in (1, axes):
        raise ArgumentError(f"--size takes 1 or {axes} numbers for this model; got {len(size)}")
    return list(size) * (axes if len(size) == 1 else 1)


def _arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Reads 'resnet50' and 'classes=10': Python's literals, and all else as text."""
    positional, named = [], {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            named[name] = _literal(value)
        else:
            positional.append(_literal(text))
    return positional, named


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
