"""Other libraries' models by name: "timm/resnet50", "transformers/GPT2LMHeadModel".

    timm            timm.create_model; tags of weights are part of a name: "timm/resnet50.a1_in1k"
    torchvision     torchvision.models.get_model, without weights, those of a backbone too
    transformers    a class of models, of its own configuration: the arguments are that one's
    monai           a class or function of monai.networks.nets

A library is imported where a name or a pattern names it, and only then. What it raises becomes one
sentence. Names and configurations of a hub are not looked up, so that a name means the same without
a network; what `from_pretrained` returns goes into `zoo.checkpoint`.
"""

import contextlib
import fnmatch
import importlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from zoo.errors import (
    ArgumentError,
    ModelNameError,
    WeightsError,
    ZooError,
    in_a_line,
    nearest,
    shortened,
    shortened_text,
)

Arguments = Mapping[str, Any]
Parameters = Mapping[str, inspect.Parameter]


class Sample(NamedTuple):
    """What a model is trained on, by its configuration.

    Attributes:
        data: the kind, as in a config of a comparison; "" if a comparison has none of this kind.
        shape: of one sample: (C, H, W), (C, D, H, W) or (T,).
        classes: classes, or words of a vocabulary.
        argument: of the forward that takes it; "" for the first positional one.
        labels: that which takes the tokens again; "" if the model computes no loss.
        size_argument: of the factory, where it has to know the size; else "".
    """

    data: str
    shape: tuple[int, ...]
    classes: int
    argument: str = ""
    labels: str = ""
    size_argument: str = ""


class Library(ABC):
    """A library whose models have names; `module` is what is imported."""

    module: ClassVar[str]
    # what an error of a name adds
    elsewhere: ClassVar[str] = ""

    @property
    def imported(self) -> Any:
        """The module, which the first look for a name imports."""
        return importlib.import_module(self.module)

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Lists the names that `zoo.list_models` shows."""

    def has(self, name: str) -> bool:
        """Returns whether a model has this name, listed or not."""
        return name in self.names()

    @abstractmethod
    def parameters(self, name: str) -> Parameters:
        """Returns the arguments of a model; a `**` one among them stands for any others."""

    @abstractmethod
    def build(self, name: str, pretrained: bool, arguments: Arguments) -> Any:
        """Calls the library's own factory."""

    @abstractmethod
    def sample(self, name: str, arguments: Arguments) -> Sample | None:
        """Returns what a model is trained on; None if its configuration does not tell."""


class Timm(Library):
    """timm: its factory passes arguments on to classes that only it knows."""

    module = "timm"

    def names(self) -> Iterable[str]:
        """Lists architectures; each also has names with the tags of its weights."""
        return self.imported.list_models()  # type: ignore[no-any-return]

    def has(self, name: str) -> bool:
        """Knows the names with a tag, too."""
        return bool(self.imported.is_model(name))

    def parameters(self, name: str) -> Parameters:
        """Knows none: those of the class behind the name, whichever it is."""
        named = inspect.signature(self.imported.create_model).parameters
        return {key: value for key, value in named.items() if value.kind is _ANY}

    def build(self, name: str, pretrained: bool, arguments: Arguments) -> Any:
        """Calls `timm.create_model`."""
        return self.imported.create_model(name, pretrained=pretrained, **arguments)

    def sample(self, name: str, arguments: Arguments) -> Sample | None:
        """Reads the `default_cfg` of the model."""
        config = self.imported.models.get_pretrained_cfg(name)
        shape = tuple((config and config.input_size) or (3, 224, 224))
        shape = (arguments.get("in_chans") or shape[0], *_sides(arguments, "img_size", shape[1:]))
        classes = arguments.get("num_classes", config.num_classes if config else 1000)
        is_fixed = config is not None and config.fixed_input_size
        return Sample("photographs", shape, classes, size_argument="img_size" * is_fixed)


class Torchvision(Library):
    """torchvision: a model's weights know the size of its images."""

    module = "torchvision.models"
    # the argument of a preset in which the side of an image stands
    SIDES: ClassVar = {"ImageClassification": "crop_size", "SemanticSegmentation": "resize_size"}

    def names(self) -> Iterable[str]:
        """Lists all but the quantized ones, which cannot be trained."""
        names = self.imported.list_models()
        return [name for name in names if not name.startswith("quantized_")]

    def parameters(self, name: str) -> Parameters:
        """Reads the model's own function."""
        return _parameters(self.imported.get_model_builder(name), "progress")

    def build(self, name: str, pretrained: bool, arguments: Arguments) -> Any:
        """Calls the model's own function; without `pretrained` nothing is fetched."""
        weights = {"weights": "DEFAULT" if pretrained else None}
        if not pretrained and "weights_backbone" in self.parameters(name):
            weights["weights_backbone"] = None
        return self.imported.get_model(name, **{**weights, **arguments})

    def sample(self, name: str, arguments: Arguments) -> Sample | None:
        """Reads the transforms of the weights: of classifiers and segmenters of images."""
        transforms = self.imported.get_model_weights(name).DEFAULT.transforms
        kind = getattr(getattr(transforms, "func", None), "__name__", "")
        if kind not in self.SIDES:
            return None
        side = transforms.keywords[self.SIDES[kind]]
        sides = _sides(arguments, "image_size", (side, side))
        is_fixed = name.startswith("vit_")
        classes = arguments.get("num_classes", 1000 if kind == "ImageClassification" else 21)
        size_argument = "image_size" * is_fixed
        return Sample("photographs", (3, *sides), classes, size_argument=size_argument)


class Transformers(Library):
    """transformers: a class of models and its configuration, by its defaults."""

    module = "transformers"
    elsewhere = "; what from_pretrained(...) makes of a hub's name goes into zoo.checkpoint"
    # ends of the classes whose labels are tokens
    LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
    LENGTH = 512
    START = "decoder_start_token_id"

    def names(self) -> Iterable[str]:
        """Lists the classes that its Auto classes know."""
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
        pattern = "MODEL_*MAPPING_NAMES"
        tables = [table for name, table in vars(auto).items() if fnmatch.fnmatch(name, pattern)]
        found: set[str] = set()
        for classes in (classes for table in tables for classes in table.values()):
            found.update([classes] if isinstance(classes, str) else classes)
        return found & set(dir(self.imported))

    def has(self, name: str) -> bool:
        """Returns whether it is a class of models with a configuration of its own."""
        found = getattr(self.imported, name, None)
        base = self.imported.PreTrainedModel
        is_model = isinstance(found, type) and issubclass(found, base)
        return is_model and getattr(found, "config_class", None) is not None

    def parameters(self, name: str) -> Parameters:
        """Reads the configuration's arguments, also by the names that all configurations share."""
        kind = getattr(self.imported, name).config_class
        # a configuration takes what it does not know, and keeps it for nobody
        own = {key: value for key, value in _parameters(kind).items() if value.kind is not _ANY}
        others = [*vars(kind()), *kind.attribute_map, self.START]
        none = inspect.Parameter("none", inspect.Parameter.KEYWORD_ONLY, default=None)
        for key in (*others, "attn_implementation", "num_labels"):
            if key[0] != "_":
                own.setdefault(key, none.replace(name=key))
        if "use_cache" in own:
            own["use_cache"] = own["use_cache"].replace(default=False)
        return own

    def build(self, name: str, pretrained: bool, arguments: Arguments) -> Any:
        """Builds the model with random weights."""
        if pretrained:
            raise WeightsError(
                f"pretrained= is not for transformers/{name}, which is a class, not weights; what "
                f"transformers.{name}.from_pretrained(...) returns goes into zoo.checkpoint"
            )
        return getattr(self.imported, name)(self._config(name, arguments))

    def sample(self, name: str, arguments: Arguments) -> Sample | None:
        """Reads the configuration, of models of text or of images."""
        argument = getattr(self.imported, name).main_input_name
        config = self._config(name, arguments)
        if argument == "pixel_values":
            side = getattr(config, "image_size", None) or 224
            sides = _sides({"side": side}, "side", ())
            shape = (getattr(config, "num_channels", None) or 3, *sides)
            size_argument = "image_size" * hasattr(config, "image_size")
            return Sample("photographs", shape, config.num_labels, argument, "", size_argument)
        text = config.get_text_config()
        if argument != "input_ids" or getattr(text, "vocab_size", None) is None:
            return None
        limit = getattr(text, "max_position_embeddings", None) or 2 * self.LENGTH
        # some positions may be taken, as RoBERTa's first two
        length = self.LENGTH if limit > self.LENGTH else limit // 2
        labels = "labels" * name.endswith(self.LANGUAGE)
        return Sample("text", (length,), text.vocab_size, argument, labels)

    def _config(self, name: str, arguments: Arguments) -> Any:
        kind = getattr(self.imported, name).config_class
        default = kind()
        # a cache is for generation; in training it keeps the keys and values of each layer
        added: dict[str, Any] = {"use_cache": False} if hasattr(default, "use_cache") else {}
        # without it labels are of no use, and T5's own has none
        if default.is_encoder_decoder and getattr(default, self.START, None) is None:
            added[self.START] = getattr(default, "pad_token_id", None) or 0
        return kind(**{**added, **arguments})


class Monai(Library):
    """MONAI: classes and functions of its networks, most of which need arguments."""

    module = "monai.networks.nets"
    SIDES: ClassVar = {2: 224, 3: 64}

    def names(self) -> Iterable[str]:
        """Lists what makes a network, each by the name of its definition."""
        found = vars(self.imported).items()
        return [
            key for key, value in found if getattr(value, "__name__", "") == key and self.has(key)
        ]

    def has(self, name: str) -> bool:
        """Knows the other spellings, too; functions that start with a verb make no network."""
        found = getattr(self.imported, name, None)
        if inspect.isfunction(found):
            return not name.startswith(("get_", "drop_"))
        return isinstance(found, type) and issubclass(found, nn.Module)

    def parameters(self, name: str) -> Parameters:
        """Reads the signature."""
        return _parameters(getattr(self.imported, name), "progress")

    def build(self, name: str, pretrained: bool, arguments: Arguments) -> Any:
        """Calls the class or function; some of them fetch weights unless they are told not to."""
        takes = "pretrained" in inspect.signature(getattr(self.imported, name)).parameters
        if pretrained and not takes:
            raise WeightsError(f"monai/{name} has no pretrained weights; leave pretrained= out")
        weights = {"pretrained": pretrained} if takes else {}
        return getattr(self.imported, name)(**weights, **arguments)

    def sample(self, name: str, arguments: Arguments) -> Sample | None:
        """Reads the arguments that most networks share."""
        values = {key: value.default for key, value in self.parameters(name).items()}
        values |= arguments
        axes, channels = values.get("spatial_dims"), values.get("in_channels")
        if axes not in self.SIDES or not isinstance(channels, int):
            return None
        sides = _sides(values, "img_size", (self.SIDES[axes],) * axes)
        classes = next((n for n in map(values.get, ("out_channels", "num_classes")) if n), 1)
        data = "volume" if axes == 3 else "photographs"
        size_argument = "img_size" * ("img_size" in values)
        return Sample(data, (channels, *sides), classes, size_argument=size_argument)


LIBRARIES: dict[str, Library] = {
    "timm": Timm(),
    "torchvision": Torchvision(),
    "transformers": Transformers(),
    "monai": Monai(),
}
_ANY, _EMPTY = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.empty


def import_library(module: str, what: str, kind: type[ZooError]) -> Any:
    """Imports a module of another library for `what`; any failure becomes this error."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        # torchvision beside a torch that it was not built for raises a RuntimeError
        name = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        version = "" if is_missing else f" of the version that fits torch {torch.__version__}"
        raise kind(
            f"{name} cannot be imported here for {what} ({in_a_line(error, 200)}): "
            f"pip install {name}{version}"
        ) from error


def is_of_library(name: object) -> bool:
    """Returns whether a name is that of another library's model, there or not."""
    # an import path of a file has a colon: folder/file.py:Net
    return isinstance(name, str) and "/" in name and ":" not in name


def library_model(name: str) -> tuple[Library, str]:
    """Returns the library of a model and the name that it has there.

    Raises:
        ModelNameError: there is no such library or model, or the library cannot be imported.
    """
    library, own = _library(name)
    if not own or not library.has(own):
        prefix = f"{name.partition('/')[0]}/"
        raise ModelNameError(
            f"there is no model {shortened(name)}.{nearest(own, library.names(), prefix)} "
            f"zoo.list_models('{prefix}*') lists all names{library.elsewhere}"
        )
    return library, own


def names_matching(pattern: str) -> list[str]:
    """Lists the names of a library that match a pattern such as "timm/conv*"."""
    library, own = _library(pattern)
    prefix = pattern.partition("/")[0]
    return sorted(f"{prefix}/{name}" for name in fnmatch.filter(library.names(), own))


def build(name: str, pretrained: bool, arguments: Arguments) -> nn.Module:
    """Builds a model of another library, by its own factory.

    Raises:
        ModelNameError: there is no such library or model, or the library cannot be imported.
        ArgumentError: the factory does not take these arguments, or fails.
        WeightsError: there are no pretrained weights, or no way to fetch them.
    """
    library, own = library_model(name)
    try:
        _check_arguments(name, library.parameters(own), arguments)
        model = library.build(own, pretrained, arguments)
    except (ZooError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if pretrained and not isinstance(error, TypeError):
            raise WeightsError(
                f"{name} cannot be built with pretrained weights, which takes a network or a file "
                f"fetched before ({in_a_line(error, 200)})"
            ) from error
        raise ArgumentError(
            f"{name} cannot be built: {in_a_line(error, 300).rstrip('.')}."
            f"{_hint(library, own, error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{name} makes a value of type {type(model).__name__}, not a module")
    return model


def unknown_argument(name: str, argument: str, known: Iterable[str]) -> ArgumentError:
    """Returns the error for an argument that a model does not take, with the nearest."""
    return ArgumentError(
        f"{name} takes no argument {shortened(argument)}.{nearest(argument, known)} "
        f"It takes {shortened_text(', '.join(known))}."
    )


def sample_of(name: str, arguments: Arguments) -> Sample | None:
    """Returns what a model of another library is trained on; raises as `build` does."""
    library, own = library_model(name)
    try:
        _check_arguments(name, library.parameters(own), arguments)
        return library.sample(own, arguments)
    except ZooError:
        raise
    except Exception as error:
        raise ArgumentError(f"{name} cannot be built: {in_a_line(error, 300)}") from error


def _check_arguments(name: str, parameters: Parameters, arguments: Arguments) -> None:
    is_open = any(parameter.kind is _ANY for parameter in parameters.values())
    for argument in () if is_open else arguments:
        if argument not in parameters:
            raise unknown_argument(name, argument, parameters)
    needed = [key for key, value in parameters.items() if value.default is _EMPTY]
    missing = [key for key in needed if key not in arguments and parameters[key].kind is not _ANY]
    if missing and "args" not in missing:
        raise ArgumentError(f"{name} needs the arguments {', '.join(missing)}")


def _library(name: str) -> tuple[Library, str]:
    prefix, _, own = name.partition("/")
    if prefix not in LIBRARIES:
        raise ModelNameError(
            f"there is no library {shortened(prefix)} in {shortened(name)}."
            f"{nearest(prefix, LIBRARIES)} zoo knows the names of {', '.join(LIBRARIES)}"
        )
    import_library(LIBRARIES[prefix].module, shortened(name), ModelNameError)
    return LIBRARIES[prefix], own


def _hint(library: Library, name: str, error: Exception) -> str:
    """Returns the nearest argument, if the error is of one that nothing takes."""
    if not (unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error))):
        return ""
    known = [*library.parameters(name)]
    # the factory passes arguments on: to the class of what it makes
    with contextlib.suppress(Exception), torch.device("meta"):
        known += inspect.signature(type(library.build(name, False, {}))).parameters
    return nearest(unknown[1], known)


def _parameters(factory: Any, *without: str) -> Parameters:
    signature = inspect.signature(factory).parameters
    return {key: value for key, value in signature.items() if key not in without}


def _sides(arguments: Arguments, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sides of an image, of which one may stand for all."""
    value = arguments.get(key)
    if isinstance(value, int):
        return (value,) * (len(default) or 2)
    return tuple(value) if isinstance(value, tuple | list) else default
