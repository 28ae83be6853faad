"""A language model's decoder and cross entropy as steps, one chunk of tokens after another.

The scores (tokens x vocabulary) are by far the largest tensor of a language model: GPT-2's 1024
tokens x 50257 are 196 MiB a sample. Here every chunk of tokens is a step, so a plan that runs each
again holds the scores of one chunk at a time, and its gradients are those of the plain chain bit
for bit.

    state after            tensors, behind those carried on
    split                  total count | hidden targets | hidden targets | ...
    add_loss               total count | hidden targets | ...
    ...
    mean                   loss

Heads are "inplace" and "plain", which agree in every bit, and "fused": there one step decodes all
chunks and computes their gradients at once, which is equal up to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from zoo.chain import Steps
from zoo.errors import InputError
from zoo.layers.checks import check_range
from zoo.layers.cross_entropy import IGNORED, cross_entropy, cross_entropy_inplace
from zoo.layers.fused_loss import fused_loss
from zoo.layers.shared_weight import SharedWeight

# what `head=` of a model may be
HEADS = ("inplace", "plain", "fused")
# hidden (tokens, C), targets (tokens) -> summed loss ()
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Head:
    """How a model comes from hidden (tokens, C) and targets to their summed loss.

    `chunk_tokens` at a time make a step of their own; None where one step takes them all.
    """

    loss: Loss
    chunk_tokens: int | None


def make_head(
    name: str, weight: SharedWeight, chunk_tokens: int, module: nn.Linear | None = None
) -> Head:
    """Makes one of `HEADS` for a decoder of this weight, or this module with its bias.

    Scores of a module that is more than an `nn.Linear` may be seen by others: its head is plain.
    """
    decoder = weight.decoder(module)
    if name == "plain" or decoder is module:
        return Head(partial(_decoded, decoder, cross_entropy), chunk_tokens)
    if name == "inplace":
        return Head(partial(_decoded, decoder, cross_entropy_inplace), chunk_tokens)
    bias = module.bias if module is not None else None
    return Head(partial(fused_loss, weight, bias, chunk_tokens), None)


def _decoded(
    decoder: Callable[[Tensor], Tensor], loss: Loss, hidden: Tensor, targets: Tensor
) -> Tensor:
    return loss(decoder(hidden), targets)


@dataclass(frozen=True)
class LossChunks:
    """The steps hidden (..., C), targets (...) -> mean loss () over the targets that count.

    `tokens` is the number of targets. The first `carried` tensors of the state are handed on
    untouched and stand before the loss at the end. Targets of -100 are ignored.

    With one chunk and an exact head the loss is that of `F.cross_entropy` bit for bit. Half
    precision is summed in float32: 256 losses of 10 each would round to a few hundredths in
    bfloat16.
    """

    head: Head
    tokens: int
    carried: int = 0

    def steps(self) -> Steps:
        """Lists split, then add_loss for each chunk, then mean."""
        chunks = ceil(self.tokens / self._chunk_tokens)
        return [self.split, *(self.add_loss for _ in range(chunks)), self.mean]

    def split(self, *state: Any) -> tuple[Tensor, ...]:
        """carried, hidden (..., C), targets (...) -> carried, total, count, chunks in pairs."""
        carried, (hidden, targets) = state[: self.carried], state[self.carried :]
        total = hidden.new_zeros(())
        count = (targets != IGNORED).sum()
        chunks = zip(
            hidden.flatten(0, -2).split(self._chunk_tokens),
            targets.flatten().split(self._chunk_tokens),
            strict=True,
        )
        return (*carried, total, count, *(tensor for pair in chunks for tensor in pair))

    def add_loss(self, *state: Any) -> tuple[Tensor, ...]:
        """carried, total, count, hidden (chunk, C), targets, ... -> carried, total, count, ..."""
        total, count, hidden, targets, *rest = state[self.carried :]
        loss = self.head.loss(hidden, targets)
        return (*state[: self.carried], total + loss, count, *rest)

    def mean(self, *state: Any) -> Tensor | tuple[Tensor, ...]:
        """carried, total (), count () -> carried, loss (); nan when every target is ignored."""
        total, count = state[self.carried :]
        loss: Tensor = total / count
        return (*state[: self.carried], loss) if self.carried else loss

    @property
    def _chunk_tokens(self) -> int:
        return self.head.chunk_tokens or self.tokens


def check_targets(model: str, tokens: Tensor, targets: Tensor, vocabulary: int) -> None:
    """Checks that targets are class numbers, one for each token.

    Raises:
        InputError: another shape than the tokens', not int64, or a target that is neither a token
            of the vocabulary nor -100.
    """
    if targets.shape != tokens.shape:
        raise InputError(
            f"{model} needs one target for each token; got targets {tuple(targets.shape)} "
            f"for tokens {tuple(tokens.shape)}. Shift the text by one: text[:-1], text[1:]"
        )
    if targets.dtype != torch.int64:
        raise InputError(
            f"{model} takes targets of int64; got {targets.dtype}. Convert them with .long()"
        )
    if type(targets) is Tensor:
        check_range(model, targets.where(targets != IGNORED, 0), vocabulary)
