"""Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783) and Qwen3 (Yang et al. 2025, 2505.09388).

Parameters have the names of Hugging Face's `LlamaForCausalLM` and `Qwen3ForCausalLM`, whose weights
load. Logits, loss and gradients are theirs bit for bit, with `attn_implementation="sdpa"`, in
float32 and bfloat16.

With targets, a chunk of tokens is decoded at a time (see `layers.language_head`). Not here: a cache
of keys and values, sliding windows.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from zoo.errors import ArgumentError
from zoo.layers.checks import IGNORED, check_arguments, check_choice, check_per_token, check_tokens
from zoo.layers.decoder import MLP, Attention, Layer, RMSNorm, Rotary, Shared, visible_tokens
from zoo.layers.language_head import HEADS, ChunkedLoss, choose_chunk_tokens, make_head
from zoo.layers.weight_sharing import SharedWeight
from zoo.models.model import Model


class Decoder(nn.Module):
    """Embedding, layers and the last norm: tokens (N, T) -> hidden (N, T, C)."""

    def __init__(self, vocabulary: int, width: int, layers: list[Layer], rotary: Rotary, norm: Any):
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(vocabulary, width), nn.ModuleList(layers)
        self.norm, self.rotary = norm(width), rotary

    def forward(
        self,
        tokens: Tensor,
        embedding: Callable[[Tensor], Tensor],
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """Tokens (N, T) -> hidden (N, T, C)."""
        x = embedding(tokens)
        visible = visible_tokens(mask, positions)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = self.rotary(x, positions)
        shared = Shared(cos, sin, visible)
        for layer in self.layers:
            x = layer(x, shared)
        return cast(Tensor, self.norm(x))


class Llama(Model):
    """Llama 3 and Qwen3: tokens (N, T) -> logits (N, T, V); with targets (N, T) -> mean loss ().

    Targets are the next tokens, shifted by the caller; those of -100 are ignored. V is `vocabulary`
    and T at most `positions`. `heads` queries of `head_width` share the keys and values of `groups`
    (a divisor); `mlp_width` is that of SwiGLU. `tied` decodes by the embedding's weight. `qk_norm`
    (Qwen3) normalizes queries and keys, `qkv_bias` (Qwen2) adds biases to queries, keys and values;
    `drop_rate` drops attention weights.
    The rotary embedding's longest wavelength is about 2 pi `rotary_base`; see `Rotary` for
    `rotary_stretch`, and `layers.language_head` for `chunk_tokens` and `head`, as of GPT-2.

    Weights are drawn as Hugging Face's: normal of 0.02, norms 1, biases 0.

    Raises:
        ArgumentError: a size below 1, groups that do not divide the heads, an odd `head_width`.
        InputError: at the call, tokens, targets, mask or positions of another shape or type, or too
            many tokens.
    """

    block_patterns: ClassVar = ("model.layers.*", "loss.chunk")

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        groups: int,
        head_width: int,
        mlp_width: int,
        vocabulary: int = 128256,
        positions: int = 131072,
        tied: bool = True,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_epsilon: float = 1e-5,
        rotary_base: float = 500000.0,
        rotary_stretch: float = 1.0,
        drop_rate: float = 0.0,
        chunk_tokens: int | None = None,
        head: str = "inplace",
    ) -> None:
        super().__init__()
        check_arguments("Llama", width=width, depth=depth, heads=heads, groups=groups)
        check_arguments("Llama", head_width=head_width, mlp_width=mlp_width, vocabulary=vocabulary)
        check_arguments("Llama", positions=positions, chunk_tokens=chunk_tokens)
        check_arguments("Llama", drop_rate=drop_rate)
        check_choice("Llama", "head", head, HEADS)
        if heads % groups or head_width % 2:
            raise ArgumentError(
                f"Llama needs groups that divide the heads and an even head_width; got "
                f"groups={groups}, heads={heads}, head_width={head_width}"
            )
        self.positions, self.chunk_tokens, self.head = positions, chunk_tokens, head

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, norm_epsilon)

        form: Any = {"norm": norm if qk_norm else nn.Identity, "qkv_bias": qkv_bias}
        form["drop_rate"] = drop_rate
        layers = [
            Layer(
                width,
                Attention(width, heads, groups, head_width, **form),
                MLP(width, mlp_width),
                norm,
            )
            for _ in range(depth)
        ]
        rotary = Rotary(head_width, rotary_base, rotary_stretch, 8192)
        self.model = Decoder(vocabulary, width, layers, rotary, norm)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.loss = ChunkedLoss()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Returns the logits (N, T, V), or with targets (N, T) the mean loss ().

        `mask` (N, T) is 0 or False for padding, which no token reads. `positions` (N, T) are for
        several texts in a row: each begins where they do not rise by 1, and reads itself alone.
        """
        words = self.model.embed_tokens
        vocabulary, width = words.weight.shape
        limits = {"vocabulary": vocabulary, "longest": self.positions}
        check_tokens("Llama", tokens, targets, "NT", **limits)
        check_per_token("Llama", tokens, mask=mask, positions=positions)
        if targets is None:
            return cast(Tensor, self.lm_head(self.model(tokens, words, mask, positions)))
        weight = SharedWeight(words.weight)
        hidden = self.model(tokens, weight.embedding(words), mask, positions)
        is_tied = self.lm_head.weight is words.weight
        decoder = weight if is_tied else SharedWeight(self.lm_head.weight)
        chunk = self.chunk_tokens or choose_chunk_tokens(tokens.numel(), width, vocabulary)
        head = make_head(self.head, decoder, chunk, self.lm_head)
        total: Tensor = self.loss(hidden.new_zeros(()), head, hidden, targets)
        return total / (targets != IGNORED).sum()


_LLAMA: Any = {"groups": 8, "rotary_stretch": 32.0}
_QWEN: Any = {
    "depth": 28, "heads": 16, "groups": 8, "head_width": 128, "vocabulary": 151936,
    "positions": 40960, "qk_norm": True, "norm_epsilon": 1e-6, "rotary_base": 1e6,
}  # fmt: skip
# millions of parameters, and arguments
SIZES: Mapping[str, tuple[float, Mapping[str, Any]]] = {
    "llama_tiny": (
        0.1,
        {**_LLAMA, "width": 64, "depth": 2, "heads": 4, "groups": 2, "head_width": 16,
         "mlp_width": 128, "vocabulary": 512, "positions": 256},
    ),
    "llama3_2_1b": (
        1236,
        {**_LLAMA, "width": 2048, "depth": 16, "heads": 32, "head_width": 64, "mlp_width": 8192},
    ),
    "llama3_2_3b": (
        3213,
        {**_LLAMA, "width": 3072, "depth": 28, "heads": 24, "head_width": 128, "mlp_width": 8192},
    ),
    "llama3_1_8b": (
        8030,
        {"width": 4096, "depth": 32, "heads": 32, "groups": 8, "head_width": 128,
         "mlp_width": 14336, "tied": False, "rotary_stretch": 8.0},
    ),
    "qwen3_0_6b": (596, {**_QWEN, "width": 1024, "mlp_width": 3072}),
    "qwen3_1_7b": (1721, {**_QWEN, "width": 2048, "mlp_width": 6144}),
}  # fmt: skip
