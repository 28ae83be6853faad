"""The default data and sizes for each model: real data of the model's kind, in small sizes.

A config that names only `resnet18`, or `--model vit_tiny_patch16`, gets its keys from here; the
first pattern that matches the name counts. A model of another library, `timm/resnet50`, has the
size of its own configuration.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from zoo.catalog.factories import model_arguments
from zoo.catalog.libraries import Sample, is_of_library, sample_of
from zoo.errors import ArgumentError

_CIFAR = {"data": "digits", "size": 32, "batch_size": 8, "accelerator_batch_size": 128}
_IMAGENET = {"data": "photographs", "size": 224, "batch_size": 4, "accelerator_batch_size": 64}
_TEXT = {"data": "text", "size": 512, "batch_size": 1, "accelerator_batch_size": 8}
_VOLUME = {"data": "volume", "size": 64, "batch_size": 1, "accelerator_batch_size": 4}
_WORDS = {"data": "stream", "size": 200, "batch_size": 10, "accelerator_batch_size": 80}

RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, _CIFAR) for name in ("resnet110", "resnet164", "resnet1001", "resnet1202")),
    *((name, _CIFAR) for name in ("densenet100", "densenet190")),
    ("vit_*", _IMAGENET | {"optimizer": "adamw"}),
    *((pattern, _TEXT) for pattern in ("gpt2*", "llama*", "qwen*")),
    ("lstm*", _WORDS),
    ("gru*", _WORDS),
    *((pattern, _VOLUME) for pattern in ("vnet*", "unet*")),
    ("*", _IMAGENET),
)
# of other libraries' models, by the data that their configurations ask for
OTHERS = {"photographs": _IMAGENET, "volume": _VOLUME, "text": _TEXT | {"optimizer": "adamw"}}
# how many sides a sample has, by its data
AXES = {"photographs": 2, "digits": 2, "volume": 3, "text": 1, "stream": 1}


def recipe(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default keys for a model that is built with these arguments.

    Raises:
        ArgumentError: the configuration of another library's model does not say what it takes.
    """
    if is_of_library(name):
        sample = sample_for(name, arguments)
        axes = AXES[sample.data]
        sides = sample.shape[-axes:]
        size = sides[0] if len({*sides}) == 1 else [*sides]
        return OTHERS[sample.data] | {"size": size}
    return dict(next(keys for pattern, keys in RECIPES if fnmatchcase(name, pattern)))


def sample_for(name: str, arguments: Mapping[str, Any]) -> Sample:
    """Returns what a model that is built with these arguments is trained on by default.

    Raises:
        ArgumentError: the configuration of another library's model does not say it.
    """
    if is_of_library(name):
        sample = sample_of(name, arguments)
        if sample is None:
            raise ArgumentError(
                f"the configuration of {name} tells no default inputs; give each by --input, as in "
                "--input 8,3,224,224 (zoo compare has no data for it)"
            )
        return sample
    settings = recipe(name, {})
    known = {key: entry.default for key, entry in model_arguments(name).items()} | dict(arguments)
    data, size = settings["data"], settings["size"]
    axes = AXES[data]
    shape = (known["in_channels"], *[size] * axes) if axes > 1 else (size,)
    classes = known["classes"] if axes > 1 else known["vocabulary"]
    size_argument = "image_size" * ("image_size" in known)
    return Sample(data, shape, classes, size_argument=size_argument)
