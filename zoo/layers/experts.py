"""A mixture of experts in the place of a decoder's MLP (Shazeer et al. 2017, arXiv:1701.06538).

A router gives each token to the few experts that it rates highest. Everything has one shape
whatever the router decides: tokens are sorted by expert, and one kernel multiplies each group by
its own matrix. No token is dropped, and nothing waits for the device. Names and arithmetic are
those of Hugging Face's `Qwen3MoeSparseMoeBlock` with `experts_implementation="grouped_mm"`.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class Router(nn.Module):
    """Rates experts: tokens (R, C) -> logits (R, experts)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """(R, C) -> (R, experts)."""
        return F.linear(tokens, self.weight)


class Experts(nn.Module):
    """SwiGLUs of as many groups of tokens: (R, C) -> (R, C).

    `ends` (experts) are the rows behind each expert's group.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """(R, C) -> (R, C)."""
        gate, up = _grouped(tokens, self.gate_up_proj, ends).chunk(2, -1)
        return _grouped(F.silu(gate) * up, self.down_proj, ends)


def _grouped(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    # autocast does not know this kernel
    return F.grouped_mm(tokens.to(weights.dtype), weights.transpose(-2, -1), offs=ends)


class MixtureOfExperts(nn.Module):
    """The weighted sum of the experts that a router chooses for each token: (N, T, C) -> same.

    Attributes:
        load: how many tokens each expert got in training, (experts).
    """

    load: Tensor

    def __init__(self, width: int, hidden: int, experts: int, per_token: int) -> None:
        super().__init__()
        self.gate, self.experts = Router(width, experts), Experts(width, hidden, experts)
        self.per_token = per_token
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, routed: list[Tensor]) -> Tensor:
        """(N, T, C) -> (N, T, C); appends the router's logits (N T, experts) to `routed`."""
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        routed.append(logits)
        shares, chosen = F.softmax(logits, -1, dtype=torch.float32).topk(self.per_token)
        shares = (shares / shares.sum(-1, keepdim=True)).to(logits.dtype).flatten()
        experts, order = chosen.flatten().sort()
        numbers = torch.arange(len(self.load), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).int()
        if self.training:
            self.load += ends.diff(prepend=ends.new_zeros(1))
        mixed = self.experts(tokens[order // self.per_token], ends) * shares[order][:, None]
        # back in the tokens' order
        mixed = rearrange(mixed[order.argsort()], "(r k) c -> r k c", k=self.per_token).sum(1)
        return cast(Tensor, mixed.to(x.dtype).view_as(x))


def balance_loss(routed: Sequence[Tensor], per_token: int, mask: Tensor | None) -> Tensor:
    """Returns a loss () that is least where all experts get as much (arXiv:2101.03961, eq. 4 to 6).

    `routed` are the logits of all layers' routers, (N T, experts); `mask` (N, T) is 0 for padding.
    """
    first = routed[0]
    real = torch.ones_like(first[:, 0]) if mask is None else mask.flatten()
    real = real.float()
    counts, rated = first.new_zeros((2, first.shape[1]), dtype=torch.float32)
    for logits in routed:
        shares = F.softmax(logits, -1)
        chosen = F.one_hot(shares.topk(per_token).indices, first.shape[1]).sum(1)
        counts = counts + (chosen * real[:, None]).sum(0)
        rated = rated + (shares.float() * real[:, None]).sum(0)
    rows = len(routed) * real.sum()
    loss: Tensor = (counts / rows * (rated / rows)).sum() * first.shape[1]
    return loss
