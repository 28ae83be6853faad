"""All models by name, each with `checkpoint=` added to its own arguments.

As torchvision's registry, but a name maps to one function for baseline and checkpointed variant.
A name with a library before it, "timm/resnet50", is that library's: see `libraries`.
"""

import contextlib
import fnmatch
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.catalog.libraries import (
    build,
    is_of_library,
    library_model,
    names_matching,
    unknown_argument,
)
from zoo.catalog.pretrained import published
from zoo.errors import ArgumentError, ModelNameError, ZooError, nearest, shortened
from zoo.models import densenet, gpt2, llama, preactivation_resnet, resnet, vit
from zoo.models.lstm import GRULanguageModel, LSTMLanguageModel
from zoo.models.model import Model
from zoo.models.unet import UNet
from zoo.models.vnet import VNet
from zoo.policy.goal import Budget, Checkpoint, Overhead


class Factory(Protocol):
    """A function of the catalog; the model's own arguments are in its `__signature__`."""

    def __call__(
        self,
        *,
        checkpoint: Checkpoint = False,
        memory_budget: Budget | None = None,
        max_overhead: Overhead | None = None,
        pretrained: bool = False,
        **arguments: Any,
    ) -> Model:
        """Builds the model."""
        ...


def create(
    name: str,
    *,
    checkpoint: Checkpoint = False,
    memory_budget: Budget | None = None,
    max_overhead: Overhead | None = None,
    pretrained: bool = False,
    **model_arguments: Any,
) -> nn.Module:
    """Builds a model by name: `create("vnet", checkpoint="blocks", in_channels=1, classes=3)`.

    `memory_budget` and `max_overhead` are those of `zoo.checkpoint`. `pretrained` loads the weights
    that torchvision, timm or transformers publish, through that library.

    Another library's model has its library before its name: `"timm/convnext_tiny"`,
    `"torchvision/resnet50"`, `"monai/UNet"`, `"transformers/GPT2LMHeadModel"` (without a cache).
    The arguments are those of the library's own factory or configuration. Nothing is looked up in a
    hub.

    Raises:
        ModelNameError: no such model or library; the message offers the nearest names.
        ArgumentError: an argument that this model does not take, or a value out of range.
        WeightsError: there are no such weights, or no way to fetch them.
    """
    if is_of_library(name):
        model = build(name, pretrained, model_arguments)
        return put_in_force(
            model, checkpoint, memory_budget=memory_budget, max_overhead=max_overhead
        )
    return _find(name)(
        checkpoint=checkpoint,
        memory_budget=memory_budget,
        max_overhead=max_overhead,
        pretrained=pretrained,
        **model_arguments,
    )


def create_on_meta(name: str, **model_arguments: Any) -> nn.Module:
    """Builds a model on the meta device, or on the default one if its code fails there.

    Raises:
        ZooError: as `create` does.
    """
    # some of other libraries' models read numbers from tensors
    with contextlib.suppress(ZooError), torch.device("meta"):
        return create(name, **model_arguments)
    return create(name, **model_arguments)


def list_models(pattern: str = "*") -> list[str]:
    """Lists the names that match a shell pattern: `list_models("resnet*")`.

    Another library's are listed where the pattern names it: `list_models("timm/conv*")`.

    Raises:
        ArgumentError: the pattern is no text.
        ModelNameError: no such library, or one that cannot be imported.
    """
    if not isinstance(pattern, str):
        raise ArgumentError(
            f"list_models takes a pattern such as 'resnet*'; got {shortened(pattern)}"
        )
    if is_of_library(pattern):
        return names_matching(pattern)
    return sorted(fnmatch.filter(_FACTORIES, pattern))


def check_name(name: str) -> None:
    """Raises ModelNameError if there is no model of this name, with the nearest names."""
    if is_of_library(name):
        library_model(name)
    else:
        _find(name)


def model_arguments(name: str) -> dict[str, inspect.Parameter]:
    """Returns the arguments of a model by name, as far as known, without those of `create`.

    Raises:
        ModelNameError: no such model.
    """
    if is_of_library(name):
        library, own = library_model(name)
        named = library.parameters(own).items()
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return {k: v for k, v in named if v.kind not in kinds and k not in OPTIONS}
    parameters = inspect.signature(_find(name)).parameters
    return {key: value for key, value in parameters.items() if key not in OPTIONS}


def __getattr__(name: str) -> Factory:
    """Returns the factory of one of zoo's models: `zoo.catalog.factories.resnet50`."""
    if name in _FACTORIES:
        return _FACTORIES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _find(name: str) -> Factory:
    if not isinstance(name, str) or name not in _FACTORIES:
        raise ModelNameError(
            f"there is no model {shortened(name)}.{nearest(str(name), _FACTORIES)} "
            "zoo.list_models() lists all names; another library's are such as timm/resnet50"
        )
    return _FACTORIES[name]


def _factory(
    name: str, millions: float, model: Callable[..., Model], size: Mapping[str, Any]
) -> Factory:
    """Makes the function of a model from its class and the arguments that make it this size."""
    own = {
        key: value.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for key, value in inspect.signature(partial(model, **size)).parameters.items()
        if key not in _ARCHITECTURE
    }

    def build(**arguments: Any) -> Model:
        for argument in arguments:
            if argument not in own and argument not in OPTIONS:
                raise unknown_argument(name, argument, [*OPTIONS, *own])
        options = {key: arguments.pop(key, value.default) for key, value in OPTIONS.items()}
        weights = published(name) if options.pop("pretrained") else None
        built = model(**{**size, **arguments})
        if weights is not None:
            built.load_state_dict(weights)
        return put_in_force(built, **options)

    summary, _, details = (inspect.getdoc(model) or "").partition("\n\n")
    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"{summary} {millions} million parameters.\n\n{details}"
    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*OPTIONS.values(), *own.values()], return_annotation=model
    )
    return build


# arguments of every model beside its own
OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(create).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
# these tell the models of a family apart, and are no arguments of a model
_ARCHITECTURE = {"block", "depths", "unit", "units", "small_images"}
_FAMILIES: tuple[tuple[Callable[..., Model], Mapping[str, tuple[float, Mapping[str, Any]]]], ...]
_FAMILIES = (
    (resnet.ResNet, resnet.SIZES),
    (preactivation_resnet.PreactivationResNet, preactivation_resnet.SIZES),
    (densenet.DenseNet, densenet.SIZES),
    (LSTMLanguageModel, {"lstm": (14.0, {})}),
    (GRULanguageModel, {"gru": (13.8, {})}),
    (VNet, {"vnet": (45.6, {})}),
    (UNet, {"unet": (31.2, {})}),
    (vit.ViT, vit.SIZES),
    (gpt2.GPT2, gpt2.SIZES),
    (llama.Llama, llama.SIZES),
)
_FACTORIES = {
    name: _factory(name, millions, model, size)
    for model, sizes in _FAMILIES
    for name, (millions, size) in sizes.items()
}
