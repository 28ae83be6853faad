"""Published weights for models of the catalog, fetched by the libraries that publish them.

    resnet*, wide_*, resnext*, densenet121 to 201    torchvision
    vit_*                                            timm
    gpt2_*                                           transformers

The libraries are imported where they are asked, keep what they fetched in caches of their own, and
are no part of what `import zoo` needs.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.errors import WeightsError

Weights = Mapping[str, Tensor]
TORCHVISION = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2",
    "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x8d", "densenet121", "densenet161",
    "densenet169", "densenet201",
)  # fmt: skip
TIMM = {
    "vit_tiny_patch16": "vit_tiny_patch16_224",
    "vit_small_patch16": "vit_small_patch16_224",
    "vit_base_patch16": "vit_base_patch16_224",
    "vit_large_patch16": "vit_large_patch16_224",
}
TRANSFORMERS = {
    "gpt2_small": "gpt2",
    "gpt2_medium": "gpt2-medium",
    "gpt2_large": "gpt2-large",
    "gpt2_xl": "gpt2-xl",
}


def published(name: str) -> Weights:
    """Returns the weights that a library publishes for a model of the catalog.

    Random states are left as they are. What is on disk from an earlier time is not fetched again.

    Raises:
        WeightsError: nobody publishes weights for it, the library is not installed, or there is
            neither a network nor a file of an earlier time.
    """
    library, fetch, theirs = _source(name)
    try:
        module = importlib.import_module(library)
    except (ImportError, RuntimeError) as error:
        raise WeightsError(
            f"the weights of {name} come from {library}, which cannot be imported here: "
            f"pip install {library}"
        ) from error
    try:
        with torch.random.fork_rng(devices=[]):
            return fetch(module, theirs)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise WeightsError(
            f"the weights of {name} could not be fetched through {library}, which takes a network "
            f"or a file fetched before ({reason[:200]})"
        ) from error


def _source(name: str) -> tuple[str, Callable[[Any, str], Weights], str]:
    """Returns the library, how it is asked, and its name for a model."""
    if name in TORCHVISION:
        return "torchvision", _from_torchvision, name
    if name in TIMM:
        return "timm", _from_timm, TIMM[name]
    if name in TRANSFORMERS:
        return "transformers", _from_transformers, TRANSFORMERS[name]
    known = ", ".join((*TORCHVISION, *TIMM, *TRANSFORMERS))
    raise WeightsError(f"no library publishes weights for {name}; pretrained=True takes {known}")


def _from_torchvision(library: Any, name: str) -> Weights:
    weights: Weights = library.models.get_model_weights(name).DEFAULT.get_state_dict(progress=False)
    return weights


def _from_timm(library: Any, name: str) -> Weights:
    weights: Weights = library.create_model(name, pretrained=True).state_dict()
    return weights


def _from_transformers(library: Any, name: str) -> Weights:
    weights: Weights = library.GPT2LMHeadModel.from_pretrained(name).state_dict()
    return weights
