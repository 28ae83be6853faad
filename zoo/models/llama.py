"""Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783) and Qwen3 (Yang et al. 2025, 2505.09388).

Parameters have the names of Hugging Face's `LlamaForCausalLM` and `Qwen3ForCausalLM`, whose weights
load. Logits, loss and gradients are theirs bit for bit, with `attn_implementation="sdpa"`, in
float32 and bfloat16.

With targets, a chunk of tokens is decoded at a time (see `layers.language_head`). Not here: a cache
of keys and values, sliding windows.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from zoo.errors import ArgumentError
from zoo.layers.checks import IGNORED, check_arguments, check_choice, check_per_token, check_tokens
from zoo.layers.decoder import MLP, Attention, Decoder, DecoderLayer, RMSNorm, Rotary
from zoo.layers.experts import MixtureOfExperts, balance_loss
from zoo.layers.language_head import HEADS, ChunkedLoss, choose_chunk_tokens, make_head
from zoo.layers.weight_sharing import SharedWeight
from zoo.models.model import Model


class Llama(Model):
    """Llama 3 and Qwen3: tokens (N, T) -> logits (N, T, V); with targets (N, T) -> mean loss ().

    Targets are the next tokens, shifted by the caller; those of -100 are ignored. V is `vocabulary`
    and T at most `positions`. `heads` queries of `head_width` share the keys and values of `groups`
    (a divisor); `mlp_width` is that of SwiGLU. `tied` decodes by the embedding's weight. `qk_norm`
    (Qwen3) normalizes queries and keys, `qkv_bias` (Qwen2) adds biases to queries, keys and values;
    `drop_rate` drops attention weights. With `experts` (Qwen3-MoE) there are so many in the place
    of each MLP, `experts_per_token` of which a token goes through (see `layers.experts`), and
    `balance` times their balance loss is part of the loss.
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
        experts: int = 0,
        experts_per_token: int = 2,
        balance: float = 0.001,
        drop_rate: float = 0.0,
        chunk_tokens: int | None = None,
        head: str = "inplace",
    ) -> None:
        super().__init__()
        check_arguments("Llama", width=width, depth=depth, heads=heads, groups=groups)
        check_arguments("Llama", head_width=head_width, mlp_width=mlp_width, vocabulary=vocabulary)
        check_arguments("Llama", positions=positions, chunk_tokens=chunk_tokens)
        check_arguments("Llama", drop_rate=drop_rate, experts_per_token=experts_per_token)
        check_arguments("Llama", minimum=0, experts=experts)
        check_choice("Llama", "head", head, HEADS)
        if heads % groups or head_width % 2:
            raise ArgumentError(
                f"Llama needs groups that divide the heads and an even head_width; got "
                f"groups={groups}, heads={heads}, head_width={head_width}"
            )
        if experts and experts_per_token > experts:
            raise ArgumentError(
                f"Llama needs experts_per_token of at most its experts={experts}; got "
                f"{experts_per_token}"
            )
        self.positions, self.chunk_tokens, self.head = positions, chunk_tokens, head
        self.experts_per_token, self.balance = experts_per_token, balance

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, norm_epsilon)

        def layer() -> DecoderLayer:
            form: Any = {"qkv_bias": qkv_bias, "drop_rate": drop_rate}
            form["norm"] = norm if qk_norm else nn.Identity
            attention = Attention(width, heads, groups, head_width, **form)
            if not experts:
                return DecoderLayer(width, attention, MLP(width, mlp_width), norm)
            mixture = MixtureOfExperts(width, mlp_width, experts, experts_per_token)
            return DecoderLayer(width, attention, mixture, norm)

        rotary = Rotary(head_width, rotary_base, rotary_stretch, 8192)
        self.model = Decoder(vocabulary, width, [layer() for _ in range(depth)], rotary, norm)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02)
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
            hidden, _ = self.model(tokens, words, mask, positions)
            return cast(Tensor, self.lm_head(hidden))
        weight = SharedWeight(words.weight)
        hidden, routed = self.model(tokens, weight.embedding(words), mask, positions)
        is_tied = self.lm_head.weight is words.weight
        decoder = weight if is_tied else SharedWeight(self.lm_head.weight)
        chunk = self.chunk_tokens or choose_chunk_tokens(tokens.numel(), width, vocabulary)
        head = make_head(self.head, decoder, chunk, self.lm_head)
        total: Tensor = self.loss(hidden.new_zeros(()), head, hidden, targets)
        loss = total / (targets != IGNORED).sum()
        if routed:
            loss = loss + self.balance * balance_loss(routed, self.experts_per_token, mask)
        return loss


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
         "mlp_width": 128, "vocabulary": 512, "positions": 1024},
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
