"""Decoder and cross entropy whose gradients are computed in the forward: no scores are kept.

    for each chunk   scores -> loss, gradient of the scores -> that of hidden, and of the weight

`torch.nn.functional.linear_cross_entropy` (torch 2.13, with options) does the same, but hands each
use of a weight a gradient of its own. Gradients are summed before they are scaled, so they equal
those of the plain operations up to rounding only.

The gradient of the weight is there from the forward on; it is no saved tensor, since a second run
would not free it.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.errors import ArgumentError
from zoo.layers.cross_entropy import cross_entropy, replace_by_gradient
from zoo.layers.modes import is_eager, is_last_backward, is_once_differentiated
from zoo.layers.shared_weight import SharedWeight, Total, is_wanted


def fused_loss(
    shared: SharedWeight, bias: Tensor | None, chunk_tokens: int, hidden: Tensor, targets: Tensor
) -> Tensor:
    """Hidden (tokens, C), targets (tokens) -> summed loss (), `chunk_tokens` scored at a time.

    Plain operations take over without gradients and under `torch.compile`, `torch.func` and
    forward-mode derivatives.

    Raises:
        ArgumentError: in the backward, when it is itself differentiated, or batched.
    """
    weight, kind = shared.weight, hidden.device.type
    if not torch.is_grad_enabled() or not is_eager():
        return _plain_loss(weight, bias, chunk_tokens, hidden, targets)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        bias = bias if bias is None else bias.to(dtype)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(kind, enabled=False):
        found = _FusedLoss.apply(
            shared.token, weight, hidden, bias, targets, chunk_tokens, shared.total
        )
    return cast(Tensor, found)


def _plain_loss(
    weight: Tensor, bias: Tensor | None, chunk_tokens: int, hidden: Tensor, targets: Tensor
) -> Tensor:
    chunks = (slice(start, start + chunk_tokens) for start in range(0, len(hidden), chunk_tokens))
    losses = [cross_entropy(F.linear(hidden[rows], weight, bias), targets[rows]) for rows in chunks]
    return torch.stack(losses).sum()


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, start + size)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  (autograd hands arguments on by position)
        ctx: Any,
        token: Tensor | None,
        weight: Tensor,
        hidden: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_tokens: int,
        total: Total,
    ) -> Tensor:
        sums = _Sums(weight, bias, ctx.needs_input_grad)
        for_hidden = torch.empty_like(hidden)
        losses = [
            _decode(weight, bias, hidden[rows], targets[rows], for_hidden[rows], sums)
            for rows in _chunks(len(hidden), chunk_tokens)
        ]
        ctx.save_for_backward(for_hidden)
        ctx.sums, ctx.total, ctx.shared = sums, total, token is not None
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (for_hidden,) = gradients, ctx.saved_tensors
        if not is_once_differentiated(gradient):
            raise ArgumentError(
                "head='fused' computes its gradients in the forward, so they can be neither "
                "differentiated (create_graph=True) nor batched; build the model with "
                "head='inplace'"
            )
        for_weight, for_bias = ctx.sums.scaled(gradient)
        if ctx.shared and for_weight is not None:
            if is_wanted(ctx):
                ctx.total.add(for_weight)
            for_weight = None
        return None, for_weight, for_hidden * gradient, for_bias, None, None, None


def _decode(  # noqa: PLR0917  (five tensors of one chunk)
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    targets: Tensor,
    for_hidden: Tensor,
    sums: "_Sums",
) -> Tensor:
    """Returns a chunk's summed loss, its gradients written into `for_hidden` and added to sums."""
    scores = F.linear(hidden, weight, bias)
    loss = replace_by_gradient(scores, targets)
    torch.mm(scores, weight, out=for_hidden)
    sums.add(scores, hidden)
    return loss


class _Sums:
    """The gradients of a decoder's weight and bias, summed over chunks; None where not wanted."""

    def __init__(self, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> None:
        self.weight = torch.zeros_like(weight) if wanted[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and wanted[3] else None

    def add(self, scores: Tensor, hidden: Tensor) -> None:
        """Adds what the scores' gradient (tokens, V) gives."""
        if self.weight is not None:
            self.weight.addmm_(scores.t(), hidden)
        if self.bias is not None:
            self.bias += scores.sum(0)

    def scaled(self, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns both times the loss's gradient, in place where no other backward follows."""
        if not is_last_backward():
            return _product(self.weight, gradient), _product(self.bias, gradient)
        found = self.weight, self.bias
        self.weight = self.bias = None
        for tensor in found:
            if tensor is not None:
                tensor.mul_(gradient)
        return found


def _product(tensor: Tensor | None, gradient: Tensor) -> Tensor | None:
    return None if tensor is None else tensor * gradient
