"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

The layers are those of Hugging Face's `GPT2LMHeadModel` under timm's names for the blocks; its
state dicts (and `GPT2Model`'s) load with `load_state_dict`, which renames the keys and transposes
the weights. Scores, loss and gradients are its own bit for bit when it computes the activation with
torch's kernel (`gelu_pytorch_tanh`), as here; its default `gelu_new` spells the same function out
in operations that keep three more tensors of its size, and differs by rounding.

The scores and the loss are steps too, a chunk of tokens at a time (see `layers.language_head`).
Not here: a cache of keys and values, padding masks, token types, cross attention.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.chain import Chain, Steps, spread
from zoo.layers.checks import check_choice, check_positive, check_rate, check_tokens
from zoo.layers.drop_path import drop_path_rates
from zoo.layers.language_head import HEADS, LossChunks, check_targets, make_head
from zoo.layers.shared_weight import SharedWeight
from zoo.layers.transformer import TransformerBlock

# Hugging Face's names and ours; its `c_*` weights are those of a Conv1D, transposed.
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


class GPT2(Chain):
    """Scores the next token: tokens (N, T) -> (N, T, V); with targets (N, T) -> mean loss ().

    Targets are the next tokens, shifted by the caller; those of -100 are ignored. V is `vocabulary`
    and T at most `positions`. `depth` blocks of `width` channels in `heads` heads; the embedding of
    the tokens is also the decoder's weight. `drop_rate` is the dropout of embedding, attention and
    residuals, `drop_path_rate` the stochastic depth of the last block (rising linearly from 0 at
    the first; an addition to the paper). The loss decodes `chunk_tokens` tokens at a time.

    `head` says how. "inplace" writes the gradient of the scores over them; "plain" leaves all to
    `F.cross_entropy`: the same bits, three times a chunk's scores. "fused" computes the gradients
    in the forward and keeps no scores at all: equal up to rounding, and it cannot be differentiated
    twice.

    Weights are drawn as published: normal of 0.02, on the residual paths divided by sqrt(2 depth);
    biases zero.

    Raises:
        ArgumentError: a size below 1, heads that do not divide the width, a rate outside [0, 1).
        InputError: at the call, tokens or targets of another shape or type, too many tokens.
    """

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
        chunk_tokens: int = 64,
        head: str = "inplace",
    ) -> None:
        super().__init__()
        check_positive("GPT2", width=width, depth=depth, vocabulary=vocabulary)
        check_positive("GPT2", positions=positions, chunk_tokens=chunk_tokens)
        check_choice("GPT2", "head", head, HEADS)
        check_rate("GPT2", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.positions = positions
        self.chunk_tokens = chunk_tokens
        self.head = head
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(positions, width)
        self.drop = nn.Dropout(drop_rate)
        self.blocks = nn.Sequential(
            *(
                TransformerBlock(
                    width,
                    heads,
                    causal=True,
                    activation="gelu_tanh",
                    norm_epsilon=1e-5,
                    attention_drop_rate=drop_rate,
                    drop_rate=drop_rate,
                    drop_path_rate=rate,
                )
                for rate in drop_path_rates(drop_path_rate, depth)
            )
        )
        self.norm = nn.LayerNorm(width, eps=1e-5)
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

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        """Returns the scores (N, T, V), or with targets (N, T) the mean loss ()."""
        return super().forward(tokens) if targets is None else super().forward(tokens, targets)

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Checks tokens (N, T) and targets (N, T) and lists the steps for them."""
        tokens, targets = cast(Tensor, inputs[0]), inputs[1] if len(inputs) > 1 else None
        vocabulary = self.token_embedding.num_embeddings
        check_tokens("GPT2", tokens, "N T", vocabulary, self.positions)
        if targets is None:
            return self.steps()
        check_targets("GPT2", tokens, targets, vocabulary)
        weight = SharedWeight(self.token_embedding.weight)
        chunks = LossChunks(make_head(self.head, weight, self.chunk_tokens), tokens.numel())
        embed = partial(self.embed_with, weight.embedding(self.token_embedding))
        return [embed, *spread(self.blocks), self.normalize, *chunks.steps()]

    def steps(self) -> Steps:
        """Lists the embedding, the blocks, the last norm and the decoder."""
        return [self.embed, *spread(self.blocks), self.normalize, self.decode]

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (N, T) -> x (N, T, width), positions added."""
        return self._add_positions(self.token_embedding(tokens))

    def embed_with(
        self, embedding: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens (N, T), targets -> x (N, T, width), targets."""
        return self._add_positions(embedding(tokens)), targets

    def normalize(self, x: Tensor, *rest: Any) -> Any:
        """x (N, T, width) -> hidden (N, T, width)."""
        return self.norm(x), *rest

    def decode(self, hidden: Tensor) -> Tensor:
        """Hidden (..., width) -> scores (..., V)."""
        return F.linear(hidden, self.token_embedding.weight)

    def _add_positions(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        dropped: Tensor = self.drop(x + self.position_embedding(places))
        return dropped

    def translate(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Renames and transposes the weights of Hugging Face's GPT-2; leaves our own alone.

        Left out are the causal masks that it once stored, and the decoder where it is the
        embedding: one of its own stays and is refused as unknown.
        """
        prefix = "transformer." if "transformer.wte.weight" in state_dict else ""
        embedding = state_dict.get(f"{prefix}wte.weight")
        if embedding is None:
            return state_dict
        translated = {}
        for key, value in state_dict.items():
            if key == "lm_head.weight" and _same(value, embedding):
                continue
            if not re.search(r"\.attn\.(masked_)?bias$", key):
                transposed = re.search(r"\.c_\w+\.weight$", key)
                translated[_rename(key.removeprefix(prefix))] = value.t() if transposed else value
        return translated


def gpt2_small(*, width: int = 768, depth: int = 12, heads: int = 12, **arguments: Any) -> GPT2:
    """Builds GPT-2: 12 blocks of 768, 124 million parameters; the arguments are GPT2's."""
    return GPT2(width=width, depth=depth, heads=heads, **arguments)


def gpt2_medium(*, width: int = 1024, depth: int = 24, heads: int = 16, **arguments: Any) -> GPT2:
    """Builds GPT-2 medium: 24 blocks of 1024, 355 million parameters; the arguments are GPT2's."""
    return GPT2(width=width, depth=depth, heads=heads, **arguments)


def gpt2_large(*, width: int = 1280, depth: int = 36, heads: int = 20, **arguments: Any) -> GPT2:
    """Builds GPT-2 large: 36 blocks of 1280, 774 million parameters; the arguments are GPT2's."""
    return GPT2(width=width, depth=depth, heads=heads, **arguments)


def gpt2_xl(*, width: int = 1600, depth: int = 48, heads: int = 25, **arguments: Any) -> GPT2:
    """Builds GPT-2 XL: 48 blocks of 1600, 1558 million parameters; the arguments are GPT2's."""
    return GPT2(width=width, depth=depth, heads=heads, **arguments)


def _rename(key: str) -> str:
    for theirs, ours in RENAMED.items():
        key = re.sub(theirs, ours, key)
    return key


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)
