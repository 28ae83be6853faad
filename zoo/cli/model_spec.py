"""The model and the inputs that a command line names.

resnet50                              in the catalog; its recipe gives inputs if options do not
timm/resnet50                         a model of another library by name, the same
timm.create_model --args resnet50     import path of anything that makes a torch.nn.Module
mypackage.models:Net                  the same, with a colon after the module
folder/mine.py:Net                    the same, of a file
"""

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zoo.catalog.factories import check_name, create
from zoo.catalog.libraries import Sample, is_of_library, sample_of
from zoo.cli.values import RandomInput
from zoo.errors import (
    ArgumentError,
    ModelNameError,
    ZooError,
    in_a_line,
    nearest,
    shortened,
    shortened_text,
)
from zoo.harness.default_configs import AXES, recipe, sample_for
from zoo.invocation import Inputs
from zoo.profiling.progress import shown
from zoo.tracing.isolated_trace import LARGEST

Specs = tuple[RandomInput | None, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be built, and its inputs: either all of them have names, or none.

    `make` builds the model on torch's default device; `batch_axis` is the inputs' axis of samples.
    """

    name: str
    make: Callable[[], Any]
    inputs: Specs
    batch_axis: int = 0

    def build(self) -> nn.Module:
        """Builds the model in training mode; raises ArgumentError if that fails or is no module."""
        try:
            with shown(f"building {self.name}"), own_folder_first(self.name):
                model = self.make()
        except ZooError:
            raise
        except Exception as error:
            raise ArgumentError(f"{self.name} cannot be built: {in_a_line(error, 300)}") from error
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise ArgumentError(f"{self.name} makes a value of type {kind}, not a torch.nn.Module")
        return model.train()

    def build_on_meta(self) -> nn.Module:
        """Builds the model on the meta device, or on the default one if its code fails there."""
        # such as code that reads a number from a tensor
        with contextlib.suppress(ZooError), torch.device("meta"):
            return self.build()
        return self.build()

    def build_unwritten(self) -> nn.Module:
        """Builds the model on the CPU with parameters that are never written and take no memory.

        On the meta device attention and LSTMs would choose other kernels, with other bytes.
        """
        model = self.build_on_meta()
        on_cpu: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                empty = torch.empty_like(tensor, device="cpu")
                on_cpu[id(tensor)] = nn.Parameter(empty, tensor.requires_grad)
            else:
                on_cpu[id(tensor)] = torch.zeros_like(tensor, device="cpu")
        # unlike Module.to_empty this keeps tied weights tied
        return copy.deepcopy(model, on_cpu)

    def build_for_planning(self, device: str) -> nn.Module:
        """Builds the model on a device of this machine, on the CPU without memory if it is large.

        Of parameters larger than this no value is read while planning.
        """
        if torch.device(device).type == "cpu":
            model = self.build_unwritten()
            if sum(tensor.nbytes for tensor in model.parameters()) > LARGEST:
                return model
        return self.build_on(device)

    def build_on(self, device: str) -> nn.Module:
        """Builds the model on a device of this machine."""
        try:
            return self.build().to(device)
        except (RuntimeError, AssertionError) as error:
            reason = shortened_text(str(error).splitlines()[0])
            raise ArgumentError(
                f"--device {shortened_text(device)} cannot be used here: {reason}"
            ) from error

    def inputs_on(self, device: str) -> Inputs:
        """Returns random inputs on a device; on "meta" they take no memory."""
        names = [spec.name for spec in self.inputs if spec is not None and spec.name]
        values = tuple(None if spec is None else spec.random(device) for spec in self.inputs)
        if not names:
            return values
        dicts = {name.partition(".")[0] for name in names if "." in name}
        if len(set(names)) < len(values) or dicts & set(names):
            raise ArgumentError("--input takes a different name for each input, or no names at all")
        inputs: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            argument, _, key = name.partition(".")
            (inputs.setdefault(argument, {}) if key else inputs)[key or argument] = value
        return inputs


def model_spec(options: argparse.Namespace, batch_size: int | None = None) -> ModelSpec:
    """Returns the model and the inputs that the options name, without building them.

    `batch_size` is the default for a model of the catalog.
    """
    name, (positional, named) = options.model, _arguments(options.args or [])
    if _is_file(name):
        raise ArgumentError(
            f"{shortened_text(name)} is a file; name what makes the model in it, as "
            f"{shortened_text(name)}:Net"
        )
    if _is_name(name):
        return _of_catalog(options, positional, named, batch_size)
    if options.size or options.batch_size or not options.input:
        raise ArgumentError(
            f"{shortened_text(name)} is not in the catalog; give its inputs: --input 32,3,224,224"
        )
    maker, inputs = _imported(name), tuple(options.input)
    if isinstance(maker, nn.Module) and options.args is None:
        return ModelSpec(name, lambda: maker, inputs)
    if not callable(maker) or isinstance(maker, nn.Module):
        raise ArgumentError(
            f"{name} is a value of type {type(maker).__name__}, which cannot be called to build"
        )
    return ModelSpec(name, lambda: maker(*positional, **named), inputs)


def _of_catalog(
    options: argparse.Namespace, positional: list[Any], named: dict[str, Any], count: int | None
) -> ModelSpec:
    name = options.model
    try:
        check_name(name)
    except ModelNameError as error:
        raise ModelNameError(
            f"{error}. For any other model give the import path: package.module:Name"
        ) from error
    if positional:
        raise ArgumentError(
            f"--args of {name} have names: classes=10; got {shortened(positional[0])}"
        )
    if options.input and (options.size or options.batch_size):
        raise ArgumentError("--input includes --size and --batch-size; give it alone")
    if options.input:
        is_foreign = is_of_library(name)
        sample = sample_of(name, named) if is_foreign else sample_for(name, named)
        inputs = _completed(options.input, sample)
    else:
        sample = sample_for(name, named)
        inputs = usual_inputs(name, named, options.batch_size or count, options.size)
    first = inputs[0]
    if sample is not None and first is not None and sample.size_argument:
        sides = first.shape[2:] or first.shape[-1:]
        named = {sample.size_argument: sides if len({*sides}) > 1 else sides[-1], **named}
    is_stream = sample is not None and sample.data == "stream"
    return ModelSpec(name, lambda: create(name, **named), inputs, int(is_stream))


def usual_inputs(
    name: str,
    named: Mapping[str, Any],
    batch_size: int | None = None,
    size: Sequence[int] | None = None,
) -> Specs:
    """Returns the default inputs of a model of the catalog that is built with these arguments."""
    sample, count = sample_for(name, named), batch_size or recipe(name, named)["batch_size"]
    axes = AXES[sample.data]
    sides = list(size or sample.shape[-axes:])
    if len(sides) not in (1, axes):
        raise ArgumentError(f"--size takes 1 or {axes} numbers for this model; got {len(sides)}")
    sides = sides if len(sides) == axes else sides * axes
    # an LSTM takes (T, N)
    is_stream = sample.data == "stream"
    shape = (*sides, count) if is_stream else (count, *sample.shape[:-axes], *sides)
    return _completed([RandomInput(shape)], sample)


def _completed(inputs: Sequence[RandomInput | None], sample: Sample | None) -> Specs:
    """Makes a language model's tokens integers, and adds targets if there are only tokens."""
    if sample is None or (sample.data not in ("text", "stream") and not sample.argument):
        return tuple(inputs)
    first = inputs[0]
    if is_alone := len(inputs) == 1 and first is not None and not first.name:
        inputs = [replace(first, name=sample.argument)]
    if sample.data not in ("text", "stream"):
        return tuple(inputs)
    # other arguments, such as a mask, are no tokens
    names = (sample.argument, sample.labels) if sample.argument else None
    tokens = tuple(
        replace(spec, dtype=spec.dtype or torch.int64, below=sample.classes)
        if spec is not None and (names is None or spec.name in names)
        else spec
        for spec in inputs
    )
    if names is None:
        between = (None,) if sample.data == "stream" else ()
        return tokens if len(tokens) > 1 else (*tokens, *between, *tokens)
    labels = tokens if is_alone and sample.labels else ()
    return (*tokens, *(spec and replace(spec, name=sample.labels) for spec in labels))


def _is_name(name: str) -> bool:
    """Returns whether a model is named as one of the catalog or of a library, there or not."""
    return ":" not in name and ("." not in name or is_of_library(name))


def _is_file(name: str) -> bool:
    """Returns whether a name is that of a file of Python code, there or not."""
    return name.endswith(".py")


@contextlib.contextmanager
def own_folder_first(name: str) -> Iterator[None]:
    """Puts the folder of a model's file, or else the working folder, on Python's module path."""
    before, file = list(sys.path), name.rpartition(":")[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)) if _is_file(file) else os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Parses 'resnet50' and 'classes=10': values are Python literals, or else text."""
    positional, named = [], {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals and name.isidentifier():
            named[name] = _literal(value)
        else:
            positional.append(_literal(text))
    return positional, named


def _literal(text: str) -> Any:
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text.title() if text.lower() in ("true", "false") else text)
    return text


def _imported(path: str) -> Any:
    """Imports 'package.module.name', 'package.module:name' or 'folder/file.py:name'.

    `pkgutil.resolve_name` would hide an import that fails inside a submodule.
    """
    # the path of a file may hold colons
    module, colon, rest = path.rpartition(":")
    of_file = _is_file(module)
    named = rest if of_file else path.replace(":", ".", 1)
    if not all(part.isidentifier() for part in named.split(".")):
        raise ArgumentError(
            f"{shortened(path)} is not an import path; write package.module:Name or file.py:Name"
        )
    name, *parts = [module, *rest.split(".")] if colon else path.split(".")
    with own_folder_first(path):
        value = _module(name, path, _of_file if of_file else importlib.import_module)
        for part in parts:
            owner, name = name, f"{name}.{part}"
            if hasattr(value, part):
                value = getattr(value, part)
            elif hasattr(value, "__path__") and importlib.util.find_spec(name) is not None:
                value = _module(name, path)
            else:
                raise ArgumentError(
                    f"{shortened_text(path)}: {shortened_text(owner)} has no {shortened(part)}."
                    f"{nearest(part, dir(value))}"
                )
    return value


def _of_file(file: str) -> Any:
    """Imports a file whose folder is on the path: by its name, if that is no other module's."""
    if not os.path.isfile(file):
        raise ArgumentError(f"there is no file {shortened(file)}")
    name = os.path.splitext(os.path.basename(file))[0]
    importlib.invalidate_caches()
    importable = importlib.util.find_spec(name) if name.isidentifier() else None
    # "built-in" is no file
    origin = (importable and importable.origin) or ""
    if os.path.exists(origin) and os.path.samefile(origin, file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"zoo_file_{name}", file)
    assert spec is not None, "the file ends with .py"
    assert spec.loader is not None, "so Python knows how to load it"
    # classes are pickled and copied by the name of their module
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module(name: str, path: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    try:
        return load(name)
    except ZooError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        reason = f"importing {shortened_text(name)} fails: {in_a_line(error, 300)}"
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            near = nearest(missing, (entry.name for entry in pkgutil.iter_modules()))
            reason = f"there is no module {shortened(missing)} here.{near}"
        elif missing is not None:
            reason = f"importing {shortened_text(name)} needs {missing}"
        raise ArgumentError(f"{shortened_text(path)}: {reason}") from error
