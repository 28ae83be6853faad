"""Published weights, fetched and cached by the libraries that publish them, imported only then."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.catalog.libraries import import_library
from zoo.errors import WeightsError, in_a_line

_TORCHVISION = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2",
    "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x8d", "densenet121", "densenet161",
    "densenet169", "densenet201",
)  # fmt: skip
# the library that publishes a model's weights, and its own name for the model
SOURCES = {
    **{name: ("torchvision", name) for name in _TORCHVISION},
    **{
        f"vit_{size}_patch16": ("timm", f"vit_{size}_patch16_224")
        for size in ("tiny", "small", "base", "large")
    },
    **{f"gpt2_{size}": ("transformers", f"gpt2-{size}") for size in ("medium", "large", "xl")},
    "gpt2_small": ("transformers", "gpt2"),
}


def published(name: str) -> Mapping[str, Tensor]:
    """Returns the weights that a library publishes for a model; random states stay as they are.

    Raises:
        WeightsError: no library publishes weights for it, the library is not installed, or there is
            neither a network nor a file of an earlier time.
    """
    if name not in SOURCES:
        names = ", ".join(SOURCES)
        raise WeightsError(f"no library publishes weights for {name}; pretrained= takes {names}")
    library, theirs = SOURCES[name]
    module = import_library(library, f"the weights of {name}", WeightsError)
    try:
        with torch.random.fork_rng(devices=[]):
            return _fetched(module, library, theirs)  # type: ignore[no-any-return]
    except Exception as error:
        raise WeightsError(
            f"the weights of {name} could not be fetched through {library}, which takes a network "
            f"or a file fetched before ({in_a_line(error, 200)})"
        ) from error


def _fetched(module: Any, library: str, name: str) -> Any:
    if library == "torchvision":
        return module.models.get_model_weights(name).DEFAULT.get_state_dict(progress=False)
    if library == "timm":
        return module.create_model(name, pretrained=True).state_dict()
    return module.GPT2LMHeadModel.from_pretrained(name).state_dict()
