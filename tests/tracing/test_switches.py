"""Each library's own checkpointing is found, turned on and off, and refused while it is on."""

from typing import Any

import pytest
import torch
from torch import nn

import zoo
from zoo.tracing.switches import switch_of, transformers_method


def library(name: str) -> Any:
    return pytest.importorskip(name, exc_type=(ImportError, RuntimeError))


def resnet() -> Any:
    return library("timm").create_model("resnet10t"), "set_grad_checkpointing()"


def densenet() -> Any:
    layers = {"growth_rate": 4, "block_config": (2, 2), "num_init_features": 8}
    return library("torchvision").models.DenseNet(**layers), "memory_efficient=True"


def gpt2() -> Any:
    transformers = library("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    return model, f"{transformers_method(model, 'enable')}()"


def swin_unetr() -> Any:
    nets = library("monai.networks.nets")
    return nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), "use_checkpoint=True"


@pytest.mark.parametrize("make", [resnet, densenet, gpt2, swin_unetr])
def test_the_switch_of_a_library_is_turned_on_and_off(make: Any) -> None:
    model, words = make()
    switch = switch_of(model)
    assert switch is not None
    assert switch.words == words
    zoo.checkpoint(model)  # it is off
    switch.turn(True)
    with pytest.raises(zoo.ArgumentError, match="checkpoints itself"):
        zoo.checkpoint(model)
    switch.turn(False)
    zoo.checkpoint(model)


def test_a_model_without_a_switch_or_that_refuses_it_has_none() -> None:
    assert switch_of(nn.Linear(2, 2)) is None
    with torch.device("meta"):
        assert switch_of(library("torchvision").models.resnet18()) is None
        refusing = library("timm").create_model("crossvit_9_240")
    assert switch_of(refusing) is None


@pytest.mark.parametrize("names", [["activation", "gradient"], ["gradient"]])
def test_the_newer_name_is_called_where_there_are_two(names: list[str]) -> None:
    """As of transformers 5.24, whose older name warns, and before."""
    called, model = [], nn.Linear(2, 2)
    for name in names:
        for verb in ("enable", "disable"):
            note = f"{name} {verb}"
            setattr(model, f"{name}_checkpointing_{verb}", lambda *_, n=note: called.append(n))
    switch_of(model)
    assert called == [f"{names[0]} enable", f"{names[0]} disable"]
