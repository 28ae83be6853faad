"""The summed cross entropy of a language model's scores, in one buffer instead of three.

`F.cross_entropy` of scores (tokens x vocabulary) makes their logarithms, in the backward the
gradient of these and in the end that of the scores: with the scores themselves three buffers of the
size at once. Here the scores alone are kept; the backward computes the logarithms again, a few rows
at a time, with torch's own kernels, and writes the gradient over the scores:

    forward     scores                                    -> loss, one number
    backward    scores        scores        scores
                logarithms -> gradient   -> gradient      rows done
                scores        scores        gradient

All bits are those of `F.cross_entropy`. Half precision is computed in float32, of which no more
than the few rows exists.
"""

from collections.abc import Iterator
from math import ceil
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zoo.layers.modes import is_eager, is_last_backward, is_once_differentiated

IGNORED = -100
# so few that they do not matter beside the scores, so many that no kernel has too little to do
PARTS = 8
SUM = 2  # `reduction="sum"`, as the operators of torch count


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Scores (tokens, V), targets (tokens) -> summed loss (), in float32 for half precision."""
    return F.cross_entropy(_widened(scores), targets, ignore_index=IGNORED, reduction="sum")


def cross_entropy_inplace(scores: Tensor, targets: Tensor) -> Tensor:
    """Computes `cross_entropy`, bit for bit; its backward writes the gradient over the scores.

    So the scores must be the caller's alone: fresh, kept by no hook, read by no other function.
    They are not written in a backward with `retain_graph`, `create_graph` or batched gradients; and
    under `torch.compile`, `torch.func`, forward-mode derivatives and for other kinds of tensors
    this is `cross_entropy` itself.
    """
    if type(scores) not in (Tensor, FakeTensor) or not is_eager():
        return cross_entropy(scores, targets)
    # in this order, so that a second run, which needs what the first line saves, ends there
    zero = cast(Tensor, _Inplace.apply(scores, targets))
    return zero + summed_loss(scores.detach(), targets)


def score_gradient(scores: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of scores (tokens, V) from that of their summed loss ().

    It calls what autograd calls, and can be differentiated.
    """
    logarithms = F.log_softmax(_widened(scores), 1)
    return _gradient_from(logarithms, targets, gradient).to(scores.dtype)


def write_gradient(scores: Tensor, targets: Tensor, gradient: Tensor) -> None:
    """Writes the gradient of scores (tokens, V) over them."""
    for rows in row_parts(len(scores)):
        part = scores[rows]
        part.copy_(score_gradient(part, targets[rows], gradient))


def summed_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Computes the value of `cross_entropy`, without a graph, a few rows at a time."""
    places = _places(targets)
    picked = [
        F.log_softmax(_widened(scores[rows]), 1).gather(1, places[rows])
        for rows in row_parts(len(scores))
    ]
    return _sum(picked, targets)


def replace_by_gradient(scores: Tensor, targets: Tensor) -> Tensor:
    """Computes the value of `cross_entropy` and writes its gradient over the scores."""
    places, picked = _places(targets), []
    one = scores.new_ones((), dtype=_wide(scores))
    for rows in row_parts(len(scores)):
        part = scores[rows]
        logarithms = F.log_softmax(_widened(part), 1)
        picked.append(logarithms.gather(1, places[rows]))
        part.copy_(_gradient_from(logarithms, targets[rows], one))
    return _sum(picked, targets)


def row_parts(rows: int) -> Iterator[slice]:
    """Cuts so many rows into parts."""
    size = max(ceil(rows / PARTS), 1)
    for start in range(0, rows, size):
        yield slice(start, start + size)


class _Inplace(torch.autograd.Function):
    """Zero, whose backward is that of the summed loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(targets, scores)
        return scores.new_zeros((), dtype=_wide(scores))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (targets, scores) = gradients, ctx.saved_tensors
        if not is_once_differentiated(gradient):
            return score_gradient(scores, targets, gradient), None
        found = scores.detach() if is_last_backward() else scores.detach().clone()
        write_gradient(found, targets, gradient)
        return found, None


def _gradient_from(logarithms: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
    unused = logarithms.new_zeros(())  # the number of targets, which a mean would need
    wanted = torch.ops.aten.nll_loss_backward(
        gradient, logarithms, targets, None, SUM, IGNORED, unused
    )
    found: Tensor = torch.ops.aten._log_softmax_backward_data(
        wanted, logarithms, 1, logarithms.dtype
    )
    return found


def _places(targets: Tensor) -> Tensor:
    return targets.where(targets != IGNORED, 0).unsqueeze(1)


def _sum(picked: list[Tensor], targets: Tensor) -> Tensor:
    """Sums the targets' logarithms as torch does: scores of a vocabulary of one word."""
    words = torch.where(targets != IGNORED, 0, IGNORED)
    return F.nll_loss(torch.cat(picked), words, ignore_index=IGNORED, reduction="sum")


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _widened(scores: Tensor) -> Tensor:
    return scores.to(_wide(scores))
