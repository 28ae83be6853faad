"""Tiny models of other libraries are planned for and exact; `benchmarks/models.py` tries more."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import zoo
from tests.training import assert_same, images, train
from zoo.tracing.switches import transformers_method, turn_transformers

Made = tuple[nn.Module, list[Tensor]]
SMALL = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name}: {error}")


def resnet() -> Made:
    return library("torchvision").models.resnet18(num_classes=5), [images(3, 3, 32)]


def convnext() -> Made:
    model = library("timm").create_model("convnext_atto", num_classes=5, drop_path_rate=0.2)
    return model, [images(2, 3, 32)]


def gpt2() -> Made:
    transformers = library("transformers")
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=16, n_layer=2, n_head=2, use_cache=False, eos_token_id=1,
        bos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), [torch.randint(99, (2, 8))]


def llama() -> Made:
    transformers = library("transformers")
    config = transformers.LlamaConfig(num_attention_heads=2, use_cache=False, **SMALL)
    return transformers.LlamaForCausalLM(config), [torch.randint(99, (2, 8))]


def bert() -> Made:
    transformers = library("transformers")
    config = transformers.BertConfig(num_attention_heads=2, **SMALL)
    return transformers.BertForMaskedLM(config), [torch.randint(99, (2, 8))]


def unet() -> Made:
    nets = library("monai.networks.nets")
    model = nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, dropout=0.2)
    return model, [torch.randn(1, 1, 8, 8, 8)]


def first(model: nn.Module) -> Callable[..., Tensor]:
    def forward(*inputs: Tensor) -> Tensor:
        leaves = pytree.tree_leaves(model(*inputs))
        return next(leaf for leaf in leaves if isinstance(leaf, Tensor))

    return forward


@pytest.mark.parametrize("build", [resnet, convnext, gpt2, llama, bert, unet])
def test_a_library_s_model_is_planned_for_and_exact(build: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    plain, inputs = build()
    plain.train()
    model = zoo.checkpoint(copy.deepcopy(plain), "blocks")
    one, other = (train(m, lambda: inputs, forward=first(m)) for m in (model, plain))
    assert_same(one, other)
    assert zoo.plan_of(model).depth() == 1
    assert len(zoo.plan_of(model)) > 2


@pytest.mark.parametrize("option", [True, "blocks", "sqrt"])
def test_a_model_that_hands_a_cache_on_is_planned_for_and_exact(option: Any) -> None:
    """`use_cache` | switched off | exact"""
    torch.manual_seed(0)
    plain, inputs = gpt2()
    plain.train().config.use_cache = True
    model = zoo.checkpoint(copy.deepcopy(plain), option)
    one, other = (train(m, lambda: inputs, forward=first(m)) for m in (model, plain))
    assert_same(one, other)
    # where weights are most of a small model no recomputation makes the peak lower
    assert option is True or zoo.plan_of(model).depth() == 1


def test_the_library_s_own_switch_is_refused_and_may_be_turned_off() -> None:
    model, inputs = gpt2()
    turn_transformers(model.train())
    way_off = transformers_method(model, "disable")
    with pytest.raises(zoo.ArgumentError, match=rf"Turn that off by model\.{way_off}\(\)"):
        zoo.checkpoint(model)
    turn_transformers(model, False)
    zoo.checkpoint(model, "blocks")(*inputs)


def test_the_library_s_own_switch_may_be_turned_on_later() -> None:
    plain, inputs = gpt2()
    model = zoo.checkpoint(copy.deepcopy(plain.train()), "blocks")
    for is_on in (False, True, False):
        for each in (model, plain):
            turn_transformers(each, is_on)
        one, other = (train(m, lambda: inputs, forward=first(m)) for m in (model, plain))
        assert_same(one, other)


def test_timm_s_features_and_classifier_go_on_working() -> None:
    model, inputs = convnext()
    zoo.checkpoint(model, "blocks")
    model(*inputs)
    model.reset_classifier(3)
    assert model(*inputs).shape == (2, 3)
    assert model.forward_features(*inputs).shape == (2, 320, 1, 1)
    features = library("timm").create_model("convnext_atto", features_only=True)
    expected = [tuple(part.shape) for part in features(*inputs)]
    zoo.checkpoint(features, "blocks")
    assert [tuple(part.shape) for part in features(*inputs)] == expected
