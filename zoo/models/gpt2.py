"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

The layers are those of Hugging Face's `GPT2LMHeadModel` under timm's names for the blocks; its
state dicts (and `GPT2Model`'s) load, renamed and transposed. Logits, loss and gradients are its own
bit for bit with the activation `gelu_pytorch_tanh`, torch's kernel; its default `gelu_new` is the
same function in operations that save three more tensors of its size, and differs by rounding.

With targets, a chunk of tokens is decoded at a time (see `layers.language_head`).
Not here: a cache of keys and values, padding masks, token types, cross attention.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.checks import IGNORED, check_arguments, check_choice, check_tokens
from zoo.layers.drop_path import drop_path_rates
from zoo.layers.language_head import HEADS, ChunkedLoss, choose_chunk_tokens, make_head
from zoo.layers.transformer import TransformerBlock
from zoo.layers.weight_sharing import SharedWeight
from zoo.models.model import Model

# Hugging Face's names and ours; its `c_*` weights are transposed
RENAMED = {
    r"^wte\.": "token_embedding.",
    r"^wpe\.": "position_embedding.",
    r"^h\.": "blocks.",
    r"^ln_f\.": "norm.",
    r"\.ln_": ".norm",
    r"attn\.c_attn": "attn.qkv",
    r"attn\.c_proj": "attn.proj",
    r"mlp\.c_fc": "mlp.fc1",
    r"mlp\.c_proj": "mlp.fc2",
}


class GPT2(Model):
    """GPT-2: tokens (N, T) -> logits (N, T, V); with targets (N, T) -> mean loss ().

    Targets are the next tokens, shifted by the caller; those of -100 are ignored. V is `vocabulary`
    and T at most `positions`. The embedding of the tokens is also the decoder's weight. `drop_rate`
    is the dropout of embedding, attention and residuals, `drop_path_rate` the stochastic depth of
    the last block, rising linearly from 0 at the first (not in the paper). The loss decodes
    `chunk_tokens` tokens at a time; None chooses by the tokens of each input, so that a chunk's
    logits take no more than a block's activations (`layers.language_head.choose_chunk_tokens`).

    `head` "inplace" writes the gradient of the logits over them; "plain" is `F.cross_entropy`, the
    same bits in three times the memory; "fused" computes the gradients in the forward and saves no
    logits: equal up to rounding, and not differentiable twice.

    Weights are drawn as published: normal of 0.02, on the residual paths divided by sqrt(2 depth).

    Raises:
        ArgumentError: a size below 1, heads that do not divide the width, a rate outside [0, 1).
        InputError: at the call, tokens or targets of another shape or type, too many tokens.
    """

    renames = RENAMED
    block_patterns: ClassVar = ("blocks.*", "loss.chunk")

    def __init__(
        self,
        *,
        width: int,
        depth: int,
        heads: int,
        vocabulary: int = 50257,
        positions: int = 1024,
        drop_rate: float = 0.1,
        drop_path_rate: float = 0.0,
        chunk_tokens: int | None = None,
        head: str = "inplace",
    ) -> None:
        super().__init__()
        check_arguments("GPT2", width=width, depth=depth, vocabulary=vocabulary)
        check_arguments("GPT2", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        check_arguments("GPT2", positions=positions, chunk_tokens=chunk_tokens)
        check_choice("GPT2", "head", head, HEADS)
        self.positions, self.chunk_tokens, self.head = positions, chunk_tokens, head
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(positions, width)
        self.drop = nn.Dropout(drop_rate)
        form: Any = {"causal": True, "activation": "gelu_tanh", "norm_epsilon": 1e-5}
        drops: Any = {"attention_drop_rate": drop_rate, "drop_rate": drop_rate}
        block = partial(TransformerBlock, width, heads, **form, **drops)
        depths = drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.Sequential(*(block(drop_path_rate=rate) for rate in depths))
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.loss = ChunkedLoss()
        self.initialize()

    def initialize(self) -> None:
        """Draws the weights as the class describes."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(("attn.proj", "mlp.fc2"))
                scale = sqrt(2 * len(self.blocks)) if residual else 1.0
                nn.init.normal_(module.weight, std=0.02 / scale)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the logits (N, T, V), or with targets (N, T) the mean loss ()."""
        vocabulary, width = self.token_embedding.weight.shape
        limits = {"vocabulary": vocabulary, "longest": self.positions}
        check_tokens("GPT2", tokens, targets, "NT", **limits)
        if targets is None:
            return self.decode(self.encode(self.token_embedding, tokens))
        weight = SharedWeight(self.token_embedding.weight)
        hidden = self.encode(weight.embedding(self.token_embedding), tokens)
        chunk = self.chunk_tokens or choose_chunk_tokens(tokens.numel(), width, vocabulary)
        head = make_head(self.head, weight, chunk)
        total: Tensor = self.loss(hidden.new_zeros(()), head, hidden, targets)
        return total / (targets != IGNORED).sum()

    def encode(self, embedding: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Tokens (N, T) -> hidden (N, T, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(embedding(tokens) + self.position_embedding(places))
        return cast(Tensor, self.norm(self.blocks(x)))

    def decode(self, hidden: Tensor) -> Tensor:
        """Hidden (..., width) -> logits (..., V)."""
        return F.linear(hidden, self.token_embedding.weight)

    def translate(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Renames and transposes Hugging Face's weights, without its masks and tied decoder."""
        prefix = "transformer." if "transformer.wte.weight" in state_dict else ""
        embedding = state_dict.get(f"{prefix}wte.weight")
        if embedding is None:
            return state_dict
        translated = {}
        for key, value in state_dict.items():
            is_tied = key == "lm_head.weight" and torch.equal(value, embedding)
            if not is_tied and not re.search(r"\.attn\.(masked_)?bias$", key):
                is_transposed = re.search(r"\.c_\w+\.weight$", key)
                translated[key.removeprefix(prefix)] = value.t() if is_transposed else value
        return super().translate(translated)


# millions of parameters, and arguments
SIZES = {
    "gpt2_small": (124, {"width": 768, "depth": 12, "heads": 12}),
    "gpt2_medium": (355, {"width": 1024, "depth": 24, "heads": 16}),
    "gpt2_large": (774, {"width": 1280, "depth": 36, "heads": 20}),
    "gpt2_xl": (1558, {"width": 1600, "depth": 48, "heads": 25}),
}
