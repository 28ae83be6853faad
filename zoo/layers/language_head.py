"""Chunked cross entropy: a language model's decoder and loss, a chunk of tokens at a time.

The logits (tokens x vocabulary) are by far the largest tensor of a language model: GPT-2's 1024
tokens x 50257 are 196 MiB a sample. A plan that recomputes each chunk's logits holds those of one
chunk at a time, with the baseline's gradients bit for bit.

    total = 0
    for each chunk of tokens
        total = total + loss(decoder(hidden), targets)
    loss  = total / count

- "plain" is `F.cross_entropy`: three buffers of a chunk's size at once, for the logits and the
  gradients of their logarithms and their own;
- "inplace" has the same bits in one buffer. Only the logits are saved; the backward recomputes the
  logarithms, a few rows at a time, by torch's own kernels and writes the gradient over the logits;
- "fused" is one function, which decodes all chunks, computes their gradients at once and saves no
  logits. Equal up to rounding, since gradients are summed before they are scaled. It is like torch
  2.13's `F.linear_cross_entropy`, but a weight's gradient is that of `SharedWeight`.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo._torch import FakeTensor
from zoo.errors import ArgumentError
from zoo.layers.apply import Apply
from zoo.layers.checks import IGNORED
from zoo.layers.weight_sharing import (
    SharedWeight,
    Total,
    is_eager,
    is_first_order,
    is_last_backward,
)

HEADS = ("inplace", "plain", "fused")
# the widths of a token that a layer's backward holds at least: of a transformer's MLP 4 before its
# activation and 4 behind it, of an LSTM 4 gates, cell, hidden, input and mask
WIDTHS = 8
# below so many rows a matrix product does little but read the decoder's weight
ROWS = 32
# rows are processed in so many parts: small beside the logits, large enough to keep kernels busy
PARTS = 8
SUM = 2  # `reduction="sum"`, as the operators of torch count


Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Head:
    """The `loss` of one forward: hidden (tokens, C), targets (tokens) -> their summed loss ().

    It takes `chunk_tokens` at a time; None is all of them.
    """

    loss: Loss
    chunk_tokens: int | None


class ChunkedLoss(nn.Module):
    """Adds losses to a total (), a chunk at a time: hidden (..., C), targets (...) -> total ().

    Targets of -100 are ignored. With one chunk, the total by their count is `F.cross_entropy` bit
    for bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.chunk = Apply()

    def forward(self, total: Tensor, head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
        """Adds the losses of the chunks in order."""
        size = head.chunk_tokens or targets.numel()
        rows = hidden.flatten(0, -2), targets.flatten()
        for part, wanted in zip(*(torch.split(tensor, size) for tensor in rows), strict=True):
            total = total + self.chunk(head.loss, part, wanted)
        return total


def choose_chunk_tokens(tokens: int, width: int, vocabulary: int) -> int:
    """Returns how many of the tokens that a layer holds at once are decoded at a time.

    A chunk's logits take about as many bytes as `WIDTHS` widths of all these tokens, which the
    layer's backward holds too: so they do not raise the peak, and smaller chunks would hardly lower
    it. The number is rounded up to a multiple of `ROWS`. It depends on shapes alone, never on a
    plan: other chunks sum in another order.

        tokens  width  vocabulary   chunk   its logits
          1024    384       50257      64     12.3 MiB
         16384    768       50257    2016      387 MiB
            60     64         101      60       24 KiB    one chunk
    """
    rows = WIDTHS * width * tokens // vocabulary
    return min(tokens, ROWS * max(ceil(rows / ROWS), 1))


def make_head(
    name: str, weight: SharedWeight, chunk_tokens: int, module: nn.Linear | None = None
) -> Head:
    """Makes one of `HEADS` for a decoder of this weight, or this module with its bias.

    The head of a module that does more than `nn.Linear` is plain: others may see its logits.
    """
    decoder = weight.decoder(module)
    if name == "fused" and decoder is not module:
        bias = None if module is None else module.bias
        return Head(partial(fused_loss, weight, bias, chunk_tokens), None)
    loss = cross_entropy if name == "plain" or decoder is module else cross_entropy_inplace
    return Head(lambda hidden, targets: loss(decoder(hidden), targets), chunk_tokens)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits (tokens, V), targets (tokens) -> summed loss (), in float32 for half precision.

    In bfloat16, 256 losses of 10 would round to a few hundredths.
    """
    return F.cross_entropy(_widened(logits), targets, ignore_index=IGNORED, reduction="sum")


def cross_entropy_inplace(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes `cross_entropy`, bit for bit; its backward writes the gradient over the logits.

    So nothing else may use the logits, hooks included. A backward that is differentiated, batched
    or followed by another does not write them.
    """
    if type(logits) not in (Tensor, FakeTensor) or not is_eager():
        return cross_entropy(logits, targets)
    # first the line that saves tensors: a recomputation stops behind it
    zero = cast(Tensor, _InplaceLoss.apply(logits, targets))
    return zero + _summed_loss(logits.detach(), targets)


def fused_loss(
    shared: SharedWeight, bias: Tensor | None, chunk_tokens: int, hidden: Tensor, targets: Tensor
) -> Tensor:
    """Hidden (tokens, C), targets (tokens) -> summed loss (), `chunk_tokens` decoded at a time.

    Without gradients and under `torch.compile` and `torch.func` it is computed by plain operations.
    """
    weight, device = shared.weight, hidden.device.type
    if not torch.is_grad_enabled() or not is_eager():
        pairs = zip(*(torch.split(x, chunk_tokens) for x in (hidden, targets)), strict=True)
        losses = [cross_entropy(F.linear(x, weight, bias), wanted) for x, wanted in pairs]
        return torch.stack(losses).sum()
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        bias = bias if bias is None else bias.to(dtype)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    arguments = shared.token, weight, hidden, bias, targets, chunk_tokens, shared.total
    with torch.autocast(device, enabled=False):
        return cast(Tensor, _FusedLoss.apply(*arguments))


class _InplaceLoss(torch.autograd.Function):
    """Zero, whose backward is that of the summed loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(targets, logits)
        return _widened(logits.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (targets, logits) = gradients, ctx.saved_tensors
        if not is_first_order(gradient):  # by operations that autograd can differentiate
            return _gradient(_log_softmax(logits), targets, gradient).to(logits.dtype), None
        written = logits.detach() if is_last_backward() else logits.detach().clone()
        for rows in _parts(len(written)):
            part = written[rows]
            part.copy_(_gradient(_log_softmax(part), targets[rows], gradient))
        return written, None


class _FusedLoss(torch.autograd.Function):
    """Computes the gradients in the forward.

    Those of weight and bias are no saved tensors: a recomputation would not free them.
    """

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
        for_hidden = torch.empty_like(hidden)
        for_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[3] else None
        losses = []
        chunks = (torch.split(tensor, chunk_tokens) for tensor in (hidden, targets, for_hidden))
        for x, wanted, for_x in zip(*chunks, strict=True):
            logits = F.linear(x, weight, bias)
            losses.append(_summed_loss(logits, wanted, replace_logits=True))
            torch.mm(logits, weight, out=for_x)
            if for_weight is not None:
                for_weight.addmm_(logits.t(), x)
            if for_bias is not None:
                for_bias += logits.sum(0)
            del logits  # before those of the next chunk
        ctx.save_for_backward(for_hidden)
        ctx.sums, ctx.total, ctx.shared = (for_weight, for_bias), total, token is not None
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (for_hidden,) = gradients, ctx.saved_tensors
        if not is_first_order(gradient):
            raise ArgumentError(
                "head='fused' computes its gradients in the forward, so they can be neither "
                "differentiated (create_graph=True) nor batched; build the model with "
                "head='inplace'"
            )
        sums, scale = ctx.sums, operator.mul
        if is_last_backward():
            ctx.sums, scale = None, operator.imul
        for_weight, for_bias = (None if total is None else scale(total, gradient) for total in sums)
        if ctx.shared and for_weight is not None:
            own = for_weight
            for_weight = ctx.total.add(ctx, gradient, lambda: own, lambda total: total.add_(own))
        return None, for_weight, for_hidden * gradient, for_bias, None, None, None


def _summed_loss(logits: Tensor, targets: Tensor, replace_logits: bool = False) -> Tensor:
    """Computes `cross_entropy` a few rows at a time; can write its gradient over the logits."""
    columns = targets.where(targets != IGNORED, 0).unsqueeze(1)
    unit = _widened(logits.new_ones(()))
    picked = []
    for rows in _parts(len(logits)):
        logarithms = _log_softmax(logits[rows])
        picked.append(logarithms.gather(1, columns[rows]))
        if replace_logits:
            logits[rows] = _gradient(logarithms, targets[rows], unit)
    # summed by torch's kernel, as logits of a vocabulary of one word
    words = torch.where(targets != IGNORED, 0, IGNORED)
    return F.nll_loss(torch.cat(picked), words, ignore_index=IGNORED, reduction="sum")


def _gradient(logarithms: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of the logits from that of the summed loss."""
    unused = logarithms.new_zeros(())  # the number of targets, which a mean would need
    aten: Any = torch.ops.aten
    of_logs = aten.nll_loss_backward(gradient, logarithms, targets, None, SUM, IGNORED, unused)
    of_logits: Tensor = aten._log_softmax_backward_data(of_logs, logarithms, 1, logarithms.dtype)
    return of_logits


def _parts(rows: int) -> Iterator[slice]:
    size = max(ceil(rows / PARTS), 1)
    return (slice(start, start + size) for start in range(0, rows, size))


def _log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(_widened(logits), 1)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
