"""All models by name, each with `checkpoint=` added to its own arguments.

As torchvision's registry, but a name maps to one function for baseline and checkpointed variant.
"""

import fnmatch
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from zoo.chain import Chain
from zoo.checkpointing import Checkpoint, attach
from zoo.errors import ArgumentError, ModelNameError, nearest, shortened
from zoo.models import densenet, gpt2, preactivation_resnet, resnet, vit
from zoo.models import lstm as language_model
from zoo.models import vnet as volumetric
from zoo.planning import Budget
from zoo.weights import published

Builder = Callable[..., Chain]
# what every model takes beside its own arguments, with the defaults
OPTIONS = {
    "checkpoint": False,
    "memory_budget": None,
    "max_overhead": None,
    "pretrained": False,
}
_FACTORIES: dict[str, Builder] = {}


def create(
    name: str,
    *,
    checkpoint: Checkpoint = False,
    memory_budget: Budget | None = None,
    max_overhead: float | None = None,
    pretrained: bool = False,
    **model_arguments: Any,
) -> Chain:
    """Builds a model by name: `create("vnet", checkpoint="blocks", in_channels=1, classes=3)`.

    `memory_budget` and `max_overhead` are those of `zoo.checkpoint`. `pretrained` loads the weights
    that torchvision, timm or transformers publish (`zoo.weights`), through that library.

    Raises:
        ModelNameError: no such model; the message offers the nearest names.
        ArgumentError: an argument that this model does not take, or a value out of range.
        WeightsError: there are no such weights, or no way to fetch them.
    """
    if not isinstance(name, str) or name not in _FACTORIES:
        raise ModelNameError(
            f"there is no model {shortened(name)}.{nearest(str(name), _FACTORIES)} "
            "zoo.list_models() lists all names."
        )
    return _FACTORIES[name](
        checkpoint=checkpoint,
        memory_budget=memory_budget,
        max_overhead=max_overhead,
        pretrained=pretrained,
        **model_arguments,
    )


def list_models(pattern: str = "*") -> list[str]:
    """Lists the names that match a shell pattern: `list_models("resnet*")`.

    Raises:
        ArgumentError: the pattern is no text.
    """
    if not isinstance(pattern, str):
        raise ArgumentError(
            f"list_models takes a pattern such as 'resnet*'; got {shortened(pattern)}"
        )
    return sorted(fnmatch.filter(_FACTORIES, pattern))


def model_arguments(name: str) -> dict[str, inspect.Parameter]:
    """Returns the arguments of a model by name, `checkpoint` left out.

    Raises:
        ModelNameError: no such model.
    """
    if name not in _FACTORIES:
        raise ModelNameError(f"there is no model {shortened(name)}.{nearest(name, _FACTORIES)}")
    return _arguments(inspect.unwrap(_FACTORIES[name]))


def _factory(builder: Builder) -> Builder:
    known = _arguments(builder)

    @functools.wraps(builder)
    def build(
        *,
        checkpoint: Checkpoint = False,
        memory_budget: Budget | None = None,
        max_overhead: float | None = None,
        pretrained: bool = False,
        **arguments: Any,
    ) -> Chain:
        for argument in arguments:
            if argument not in known:
                raise ArgumentError(
                    f"{builder.__name__} takes no argument {shortened(argument)}."
                    f"{nearest(argument, known)} It takes {', '.join([*OPTIONS, *known])}."
                )
        weights = published(builder.__name__) if pretrained else None
        chain = builder(**arguments)
        if weights is not None:
            chain.load_state_dict(weights)
        return attach(chain, checkpoint, memory_budget=memory_budget, max_overhead=max_overhead)

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in OPTIONS.items()
    ]
    build.__signature__ = inspect.Signature([*options, *known.values()])  # type: ignore[attr-defined]
    _FACTORIES[builder.__name__] = build
    return build


def _arguments(builder: Builder) -> dict[str, inspect.Parameter]:
    """Finds a builder's arguments, those that it passes on to its class included."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(builder).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            passed_on = inspect.signature(get_type_hints(builder)["return"]).parameters
            found |= {key: value for key, value in passed_on.items() if key not in found}
        else:
            found[name] = parameter
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in found.items()
    }


resnet18 = _factory(resnet.resnet18)
resnet34 = _factory(resnet.resnet34)
resnet50 = _factory(resnet.resnet50)
resnet101 = _factory(resnet.resnet101)
resnet152 = _factory(resnet.resnet152)
wide_resnet50_2 = _factory(resnet.wide_resnet50_2)
wide_resnet101_2 = _factory(resnet.wide_resnet101_2)
resnext50_32x4d = _factory(resnet.resnext50_32x4d)
resnext101_32x8d = _factory(resnet.resnext101_32x8d)
resnet110 = _factory(preactivation_resnet.resnet110)
resnet164 = _factory(preactivation_resnet.resnet164)
resnet1001 = _factory(preactivation_resnet.resnet1001)
resnet1202 = _factory(preactivation_resnet.resnet1202)
densenet121 = _factory(densenet.densenet121)
densenet161 = _factory(densenet.densenet161)
densenet169 = _factory(densenet.densenet169)
densenet201 = _factory(densenet.densenet201)
densenet264 = _factory(densenet.densenet264)
densenet100 = _factory(densenet.densenet100)
densenet190 = _factory(densenet.densenet190)
lstm = _factory(language_model.lstm)
gru = _factory(language_model.gru)
vnet = _factory(volumetric.vnet)
vit_tiny_patch16 = _factory(vit.vit_tiny_patch16)
vit_small_patch16 = _factory(vit.vit_small_patch16)
vit_base_patch16 = _factory(vit.vit_base_patch16)
vit_large_patch16 = _factory(vit.vit_large_patch16)
gpt2_small = _factory(gpt2.gpt2_small)
gpt2_medium = _factory(gpt2.gpt2_medium)
gpt2_large = _factory(gpt2.gpt2_large)
gpt2_xl = _factory(gpt2.gpt2_xl)
