"""The models that `benchmarks/gpu.py` trains: each as people train it on a GPU, and a small one.

The small ones show on the software accelerator that all of it runs. Data are random numbers.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import peers
import torch
import torch.nn.functional as F
from einops import rearrange
from peers import Built
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import zoo


@dataclass(frozen=True)
class Case:
    """A model with its inputs, at the size of a GPU and at a small one.

    `dtype` is that of autocast, which in software convolutions of volumes lack. `share` is the
    fraction of the baseline's peak that a plan is asked for where speed is measured: half, unless
    weights and optimizer state alone take more.
    `only_on` names the kinds of devices that have its kernels; nothing stands for all.
    """

    size: str
    large: Callable[[], Built]
    small: Callable[[], Built]
    optimizer: str = "sgd"
    switch: Callable[[Any], object] | None = None
    dtype: torch.dtype | None = torch.bfloat16
    small_dtype: torch.dtype | None = torch.bfloat16
    share: float = 0.5
    only_on: tuple[str, ...] = ()

    def model(self, *, small: bool) -> peers.Model:
        """Returns it as `peers` trains it."""
        build, dtype = (self.small, self.small_dtype) if small else (self.large, self.dtype)
        return peers.Model(build, self.size, "", self.optimizer, self.switch, dtype=dtype)


def images(name: str, batch: int, side: int, **arguments: Any) -> Built:
    return peers.classifier(zoo.create(name, classes=100, **arguments), (batch, 3, side, side))


def volumes(batch: int, *sides: int, loss: Callable[..., Tensor], **arguments: Any) -> Built:
    model = zoo.create("vnet", classes=3, **arguments)
    targets = torch.randint(0, 3, (batch, *sides))
    return model, (torch.randn(batch, 1, *sides),), {}, partial(loss, target=targets)


def loss_of_voxels(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the cross entropy of voxels in a row, whose sum repeats its bits on CUDA."""
    return F.cross_entropy(rearrange(logits, "n c ... -> (n ...) c"), target.flatten())


def tokens(batch: int, length: int, vocabulary: int, **arguments: Any) -> Built:
    model = zoo.create("gpt2_small", vocabulary=vocabulary, **arguments)
    drawn = torch.randint(vocabulary, (batch, length))
    # the model returns its loss
    return model, (drawn, drawn), {}, torch.Tensor.sum


def words(name: str, length: int, batch: int, vocabulary: int, **arguments: Any) -> Built:
    model = zoo.create(name, vocabulary=vocabulary, **arguments)
    drawn = torch.randint(vocabulary, (length, batch))
    # the model returns its loss and its state
    return model, (drawn, None, drawn), {}, operator.itemgetter(0)


GPT2 = partial(peers.from_transformers, GPT2LMHeadModel, GPT2Config)
SMALL_GPT2 = partial(GPT2, 2, 16, vocabulary=100, n_embd=32, n_layer=2, n_head=2)
# queries share keys and values by four; 16 layers are 1.1 billion parameters
LLAMA = partial(
    peers.from_transformers, LlamaForCausalLM, LlamaConfig, vocabulary=32000, hidden_size=2048,
    intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
SMALL_LLAMA = partial(
    LLAMA, 2, 16, vocabulary=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
SMALL = {
    "vit": {"image_size": 32, "width": 32, "depth": 2, "heads": 2},
    "gpt2": {"vocabulary": 100, "width": 32, "depth": 2, "heads": 2},
    "lstm": {"vocabulary": 100, "embedding": 16, "hidden": 16},
}
# torch's kernel of an LSTM's cell is for them
RECURRENT: dict[str, Any] = {"dtype": None, "only_on": ("cuda", "xpu")}


def resnet50(batch: int, **options: Any) -> Case:
    large, small = partial(images, "resnet50", batch, 224), partial(images, "resnet18", 2, 32)
    return Case(f"{batch}×3×224×224", large, small, **options)


def densenet121(batch: int) -> Case:
    large, small = partial(images, "densenet121", batch, 224), partial(images, "densenet100", 2, 32)
    return Case(f"{batch}×3×224×224", large, small)


def resnet1001(batch: int) -> Case:
    large, small = partial(images, "resnet1001", batch, 32), partial(images, "resnet110", 2, 32)
    return Case(f"{batch}×3×32×32", large, small)


def vit(batch: int) -> Case:
    large = partial(images, "vit_base_patch16", batch, 224)
    small = partial(images, "vit_base_patch16", 2, 32, **SMALL["vit"])
    return Case(f"{batch}×3×224×224", large, small, "adamw")


def vnet(batch: int, loss: Callable[..., Tensor] = F.cross_entropy) -> Case:
    large = partial(volumes, batch, 128, 128, 64, loss=loss)
    small = partial(volumes, 1, 32, 32, 32, loss=loss, width=8)
    return Case(f"{batch}×1×128×128×64", large, small, small_dtype=None, share=0.75)


def gpt2(batch: int, length: int) -> Case:
    large = partial(tokens, batch, length, 50257)
    return Case(f"{batch}×{length} tokens", large, partial(tokens, 2, 16, **SMALL["gpt2"]), "adamw")


def recurrent(name: str, length: int, batch: int) -> Case:
    large = partial(words, name, length, batch, 33278)
    small = partial(words, name, 8, 2, **SMALL["lstm"])
    return Case(f"{length}×{batch} words", large, small, **RECURRENT)


def timm(name: str, small_name: str, batch: int, optimizer: str, **options: Any) -> Case:
    large = partial(peers.from_timm, name, batch, 3, 224, 224)
    small = partial(peers.from_timm, small_name, 2, 3, 32, 32)
    return Case(f"{batch}×3×224×224", large, small, optimizer, peers.turn_on, **options)


def timm_resnet50(batch: int, **options: Any) -> Case:
    return timm("resnet50", "resnet10t", batch, "sgd", **options)


def timm_convnext(batch: int) -> Case:
    return timm("convnext_tiny", "convnext_atto", batch, "adamw")


def hf_gpt2(batch: int, length: int, share: float) -> Case:
    large = partial(GPT2, batch, length, vocabulary=50257)
    switch = peers.turn_on
    return Case(f"{batch}×{length} tokens", large, SMALL_GPT2, "adamw", switch, share=share)


def hf_llama(batch: int, length: int, layers: int = 16) -> Case:
    large = partial(LLAMA, batch, length, num_hidden_layers=layers)
    switch = peers.turn_on
    return Case(f"{batch}×{length} tokens", large, SMALL_LLAMA, "adamw", switch, share=0.8)


TIMM_RESNET, HF_GPT2, HF_LLAMA = "timm ResNet-50", "HF GPT-2", "HF Llama 1B (GQA)"
# the most telling first: a limit of time leaves out the last
SPEED: dict[str, Case] = {
    TIMM_RESNET: timm_resnet50(256),
    HF_GPT2: hf_gpt2(16, 1024, 0.6),
    "ViT-B/16": vit(128),
    HF_LLAMA: hf_llama(4, 2048),
    f"{TIMM_RESNET}, small batch": timm_resnet50(8, share=0.75),
    f"{HF_GPT2}, small batch": hf_gpt2(1, 256, 1.0),
    "LSTM": recurrent("lstm", 100, 80),
    "V-Net": vnet(2),
    "DenseNet-121": densenet121(128),
    "ResNet-1001": resnet1001(128),
    "timm ConvNeXt-T": timm_convnext(64),
}
# their small ones have states of more than 64 KiB, since smaller ones are not offloaded
OFFLOAD: dict[str, Case] = {
    HF_GPT2: replace(
        SPEED[HF_GPT2],
        small=partial(GPT2, 8, 64, vocabulary=100, n_embd=64, n_layer=4, n_head=2),
    ),
    HF_LLAMA: replace(
        SPEED[HF_LLAMA],
        small=partial(
            LLAMA, 8, 64, vocabulary=100, hidden_size=64, intermediate_size=128,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        ),
    ),
    "ViT-B/16": replace(
        SPEED["ViT-B/16"],
        small=partial(
            images, "vit_base_patch16", 8, 128, image_size=128, width=64, depth=4, heads=2
        ),
    ),
    TIMM_RESNET: replace(
        SPEED[TIMM_RESNET], small=partial(peers.from_timm, "resnet10t", 16, 3, 64, 64)
    ),
}  # fmt: skip
# asked for as shares of the baseline's peak
BUDGETS: dict[str, tuple[Case, tuple[float, ...]]] = {
    HF_GPT2: (hf_gpt2(16, 1024, 0.7), (0.7,)),
    "ResNet-50": (resnet50(256), (0.7, 0.45)),
    "LSTM": (recurrent("lstm", 100, 80), (0.7,)),
    HF_LLAMA: (hf_llama(4, 2048), (0.8,)),
    "ViT-B/16": (vit(128), (0.5,)),
    "V-Net": (vnet(2), (0.75,)),
    "DenseNet-121": (densenet121(128), (0.4,)),
    "timm ConvNeXt-T": (timm_convnext(64), (0.5,)),
    "ResNet-50, float32": (resnet50(128, dtype=None), (0.6,)),
}
FAMILIES: dict[str, Case] = {
    "resnet50": resnet50(32),
    "lstm": recurrent("lstm", 35, 20),
    "gpt2_small": gpt2(4, 512),
    "vnet": vnet(1, loss_of_voxels),
    "densenet121": densenet121(16),
    "vit_base_patch16": vit(16),
    "gru": recurrent("gru", 35, 20),
    "resnet1001": resnet1001(16),
    TIMM_RESNET: timm_resnet50(8),
    HF_GPT2: hf_gpt2(1, 256, 0.95),
    "HF Llama (GQA), 2 layers": hf_llama(1, 512, layers=2),
    "timm ConvNeXt-T": timm_convnext(16),
}
