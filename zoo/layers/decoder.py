"""The layers of Llama-like decoders (Grattafiori et al. 2024, arXiv:2407.21783).

RMSNorm (arXiv:1910.07467), rotary embeddings (arXiv:2104.09864), grouped queries (arXiv:2305.13245)
and SwiGLU (arXiv:2002.05202), with the parameter names and the arithmetic of Hugging Face's layers.
No cache of keys and values and no sliding window.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from zoo.layers.experts import MixtureOfExperts


class RMSNorm(nn.Module):
    """Scales vectors to a root mean square of 1, in float32, then by a weight: (..., C)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class Shared(NamedTuple):
    """Tensors that all layers of a forward read.

    Attributes:
        cos, sin: of the angles by which queries and keys are rotated, (1 or N, 1, T, head width).
        mask: whether a token reads another, (N, 1, T, T); None where it reads itself and all
            before.
        routed: to which routers of experts append their logits (N T, experts).
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    routed: list[Tensor]


class Attention(nn.Module):
    """Causal attention whose heads share keys and values in groups: (N, T, C) -> (N, T, C)."""

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        head_width: int,
        *,
        norm: Any,
        qkv_bias: bool,
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.head_width, self.shared_by, self.drop_rate = head_width, heads // groups, drop_rate
        self.q_proj = nn.Linear(width, heads * head_width, bias=qkv_bias)
        self.k_proj = nn.Linear(width, groups * head_width, bias=qkv_bias)
        self.v_proj = nn.Linear(width, groups * head_width, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_width, width, bias=False)
        self.q_norm, self.k_norm = norm(head_width), norm(head_width)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """(N, T, C) -> (N, T, C)."""
        query, key, value = (
            rearrange(project(x), "n t (h c) -> n t h c", c=self.head_width)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = (
            rearrange(states, "n t h c -> n h t c")
            for states in (self.q_norm(query), self.k_norm(key), value)
        )
        query, key = (rotate(states, shared.cos, shared.sin) for states in (query, key))
        grouped = self.shared_by > 1
        if grouped and shared.mask is not None:
            # no kernel of torch takes both a mask and groups
            key, value = (
                repeat(states, "n g t c -> n (g shared) t c", shared=self.shared_by)
                for states in (key, value)
            )
            grouped = False
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            shared.mask,
            dropout_p=self.drop_rate if self.training else 0.0,
            is_causal=shared.mask is None,
            enable_gqa=grouped,
        )
        return cast(Tensor, self.o_proj(rearrange(mixed, "n h t c -> n t (h c)")))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair of numbers, one in the first half of a head and one in the second."""
    return x * cos + _turned(x) * sin


def _turned(x: Tensor) -> Tensor:
    """Returns each pair turned by 90 degrees."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class MLP(nn.Module):
    """SwiGLU: a gate, by SiLU, times a widened token, narrowed: (..., C) -> (..., C)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each behind a norm: (N, T, C) -> (N, T, C)."""

    def __init__(self, width: int, attention: Attention, mlp: nn.Module, norm: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norm(width), norm(width)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """(N, T, C) -> (N, T, C)."""
        x = x + self.self_attn(self.input_layernorm(x), shared)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            return cast(Tensor, x + self.mlp(normed, shared.routed))
        return cast(Tensor, x + self.mlp(normed))


class Rotary(nn.Module):
    """The angles of the rotary embedding, in float32 whatever type the parameters have.

    A `stretch` above 1 divides the low frequencies, which turn around less than once in `trained`
    tokens, so that texts may be longer; between 1 and 4 turns it passes over to none (Llama 3.1).
    """

    def __init__(self, width: int, base: float, stretch: float, trained: int) -> None:
        super().__init__()
        self.width, self.base, self.stretch, self.trained = width, base, stretch, trained

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (1 or N, T) -> cosines and sines (1 or N, 1, T, width), of x's type."""
        # no matrix product, which autocast and TF32 would round
        angles = positions[:, None, :, None].float() * self._frequencies(x.device)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _frequencies(self, device: torch.device) -> Tensor:
        even = torch.arange(0, self.width, 2, device=device).float()
        high = 1.0 / self.base ** (even / self.width)
        if self.stretch == 1:
            return high
        low, wavelength = high / self.stretch, 2 * math.pi / high
        part = (self.trained / wavelength - 1) / (4 - 1)
        between = (1 - part) * high / self.stretch + part * high
        between = torch.where(wavelength > self.trained, low, between)
        return torch.where(wavelength < self.trained / 4, high, between)


class Decoder(nn.Module):
    """Embedding, layers and the last norm: tokens (N, T) -> hidden (N, T, C)."""

    def __init__(
        self, vocabulary: int, width: int, layers: list[DecoderLayer], rotary: Rotary, norm: Any
    ):
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(vocabulary, width), nn.ModuleList(layers)
        self.norm, self.rotary = norm(width), rotary

    def forward(
        self,
        tokens: Tensor,
        embedding: Callable[[Tensor], Tensor],
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens (N, T) -> hidden (N, T, C), and the logits of each router (N T, experts)."""
        x = embedding(tokens)
        visible = visible_tokens(mask, positions)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = self.rotary(x, positions)
        shared = Shared(cos, sin, visible, [])
        for layer in self.layers:
            x = layer(x, shared)
        return self.norm(x), shared.routed


@torch.no_grad()
def visible_tokens(mask: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """Returns which tokens each token reads, (N, 1, T, T): of its own text, itself or before it.

    `mask` (N, T) is 0 for padding. In `positions` (N, T) a text begins where they do not rise by 1.
    """
    per_token = mask if positions is None else positions
    if per_token is None:
        return None
    order = torch.arange(per_token.shape[1], device=per_token.device)
    visible = (order[:, None] >= order)[None, None]
    if positions is not None:
        begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
        text = begins.cumsum(1)
        visible = visible & (text[:, None, :, None] == text[:, None, None, :])
    if mask is not None:
        visible = visible & mask.bool()[:, None, None, :]
    return visible
