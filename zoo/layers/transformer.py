"""The transformer block (Vaswani et al. 2017, arXiv:1706.03762; normalization first).

`torch.nn.TransformerEncoderLayer` has parameter names unlike any published weights; this block has
timm's. It has no cross attention, no mask but the causal one and no cache of keys and values.
"""

import math
from typing import cast

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zoo.errors import ArgumentError, shortened
from zoo.layers.checks import check_arguments, check_choice
from zoo.layers.drop_path import DropPath

ACTIVATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm: (N, T, C) -> (N, T, C).

    `width` is C, `heads` divides it, the perceptron is `mlp_ratio` times as wide; `causal` masks
    later tokens. `attention_drop_rate` drops attention weights, `drop_rate` what each branch adds,
    `drop_path_rate` whole samples. `activation` is "gelu" or "gelu_tanh". Bits are those of timm's
    `Block(qkv_bias=True)`, without dropout after the activation, as in GPT-2.

    Raises:
        ArgumentError: heads that do not divide the width, an unknown activation, a rate outside
            [0, 1), or a size below 1.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        mlp_ratio: float = 4.0,
        causal: bool = False,
        activation: str = "gelu",
        norm_epsilon: float = 1e-6,
        attention_drop_rate: float = 0.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_arguments("TransformerBlock", width=width, heads=heads)
        if not isinstance(mlp_ratio, int | float) or not math.isfinite(mlp_ratio):
            raise ArgumentError(
                f"TransformerBlock needs mlp_ratio that is a number; got {shortened(mlp_ratio)}"
            )
        hidden = int(width * mlp_ratio)
        check_arguments("TransformerBlock", hidden=hidden)
        if width % heads:
            raise ArgumentError(
                f"TransformerBlock splits its width over the heads; {width} is not divisible by "
                f"{heads}. Choose heads from {[n for n in range(1, width + 1) if width % n == 0]}"
            )
        check_choice("TransformerBlock", "activation", activation, list(ACTIVATIONS))
        check_arguments("TransformerBlock", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        check_arguments("TransformerBlock", attention_drop_rate=attention_drop_rate)
        self.heads, self.causal, self.attention_drop_rate = heads, causal, attention_drop_rate
        self.norm1 = nn.LayerNorm(width, eps=norm_epsilon)
        qkv, proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn = nn.ModuleDict({"qkv": qkv, "proj": proj})
        self.norm2 = nn.LayerNorm(width, eps=norm_epsilon)
        act = nn.GELU(approximate=ACTIVATIONS[activation])
        fc1, fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.mlp = nn.ModuleDict({"fc1": fc1, "act": act, "fc2": fc2})
        self.drop = nn.Dropout(drop_rate)
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention, then the perceptron: (N, T, C) -> (N, T, C)."""
        x = x + self.drop_path(self.drop(self.attention(x)))
        return cast(Tensor, x + self.drop_path(self.drop(self.perceptron(x))))

    def attention(self, x: Tensor) -> Tensor:
        """Lets each token read from others: (N, T, C) -> (N, T, C)."""
        return cast(Tensor, self.attn["proj"](self.mix(self.attn["qkv"](self.norm1(x)))))

    def perceptron(self, x: Tensor) -> Tensor:
        """Widens each token, activates it and narrows it: (N, T, C) -> (N, T, C)."""
        return cast(Tensor, self.mlp["fc2"](self.mlp["act"](self.mlp["fc1"](self.norm2(x)))))

    def mix(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values (N, T, 3C) -> the values that each token reads (N, T, C)."""
        query, key, value = rearrange(qkv, "n t (qkv h c) -> qkv n h t c", qkv=3, h=self.heads)
        drop_rate = self.attention_drop_rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=drop_rate, is_causal=self.causal
        )
        return rearrange(mixed, "n h t c -> n t (h c)")
