"""Published weights for models of the catalog, fetched by the libraries that publish them.

The libraries are imported where they are asked, keep what they fetched in caches of their own, and
are no part of what `import zoo` needs.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.errors import WeightsError

_TORCHVISION = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2",
    "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x8d", "densenet121", "densenet161",
    "densenet169", "densenet201",
)  # fmt: skip
# the library that publishes a model's weights, and its own name for the model
SOURCES = {
    **{name: ("torchvision", name) for name in _TORCHVISION},
    "vit_tiny_patch16": ("timm", "vit_tiny_patch16_224"),
    "vit_small_patch16": ("timm", "vit_small_patch16_224"),
    "vit_base_patch16": ("timm", "vit_base_patch16_224"),
    "vit_large_patch16": ("timm", "vit_large_patch16_224"),
    "gpt2_small": ("transformers", "gpt2"),
    "gpt2_medium": ("transformers", "gpt2-medium"),
    "gpt2_large": ("transformers", "gpt2-large"),
    "gpt2_xl": ("transformers", "gpt2-xl"),
}
_FETCH: dict[str, Callable[[Any, str], Mapping[str, Tensor]]] = {
    "torchvision": lambda library, name: library.models.get_model_weights(
        name
    ).DEFAULT.get_state_dict(progress=False),
    "timm": lambda library, name: library.create_model(name, pretrained=True).state_dict(),
    "transformers": lambda library, name: library.GPT2LMHeadModel.from_pretrained(
        name
    ).state_dict(),
}


def published(name: str) -> Mapping[str, Tensor]:
    """Returns the weights that a library publishes for a model of the catalog.

    Random states are left as they are. What is on disk from an earlier time is not fetched again.

    Raises:
        WeightsError: nobody publishes weights for it, the library is not installed, or there is
            neither a network nor a file of an earlier time.
    """
    if name not in SOURCES:
        known = ", ".join(SOURCES)
        raise WeightsError(
            f"no library publishes weights for {name}; pretrained=True takes {known}"
        )
    library, theirs = SOURCES[name]
    try:
        module = importlib.import_module(library)
    except (ImportError, RuntimeError) as error:
        raise WeightsError(
            f"the weights of {name} come from {library}, which cannot be imported here: "
            f"pip install {library}"
        ) from error
    try:
        with torch.random.fork_rng(devices=[]):
            return _FETCH[library](module, theirs)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise WeightsError(
            f"the weights of {name} could not be fetched through {library}, which takes a network "
            f"or a file fetched before ({reason[:200]})"
        ) from error
