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

Take the decoder from a `SharedWeight`, or each chunk's backward makes a gradient of the whole
weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from zoo.chain import Steps
from zoo.errors import InputError
from zoo.layers.checks import check_range
from zoo.layers.cross_entropy import IGNORED, cross_entropy, cross_entropy_inplace

Loss = Callable[[Tensor, Tensor], Tensor]
# what a chunk's loss is computed by, for each `head=` of a model
LOSSES: dict[str, Loss] = {"inplace": cross_entropy_inplace, "plain": cross_entropy}


@dataclass(frozen=True)
class LossChunks:
    """The steps hidden (..., C), targets (...) -> mean loss () over the targets that count.

    `decoder` maps hidden (tokens, C) -> scores (tokens, V); `tokens` is the number of targets,
    `chunk_tokens` how many of them are decoded at a time. The first `carried` tensors of the state
    are handed on untouched and stand before the loss at the end. Targets of -100 are ignored.

    `loss` maps scores, targets (tokens) -> summed loss (); `cross_entropy_inplace` needs a decoder
    whose scores nobody else holds. With one chunk the mean is that of `F.cross_entropy` bit for
    bit. Half precision is summed in float32: 256 losses of 10 each would round to a few hundredths
    in bfloat16.
    """

    decoder: Callable[[Tensor], Tensor]
    tokens: int
    chunk_tokens: int
    carried: int = 0
    loss: Loss = cross_entropy

    def steps(self) -> Steps:
        """Lists split, then add_loss for each chunk, then mean."""
        chunks = ceil(self.tokens / self.chunk_tokens)
        return [self.split, *(self.add_loss for _ in range(chunks)), self.mean]

    def split(self, *state: Any) -> tuple[Tensor, ...]:
        """carried, hidden (..., C), targets (...) -> carried, total, count, chunks in pairs."""
        carried, (hidden, targets) = state[: self.carried], state[self.carried :]
        total = hidden.new_zeros(())
        count = (targets != IGNORED).sum()
        chunks = zip(
            hidden.flatten(0, -2).split(self.chunk_tokens),
            targets.flatten().split(self.chunk_tokens),
            strict=True,
        )
        return (*carried, total, count, *(tensor for pair in chunks for tensor in pair))

    def add_loss(self, *state: Any) -> tuple[Tensor, ...]:
        """carried, total, count, hidden (chunk, C), targets, ... -> carried, total, count, ..."""
        total, count, hidden, targets, *rest = state[self.carried :]
        loss = self.loss(self.decoder(hidden), targets)
        return (*state[: self.carried], total + loss, count, *rest)

    def mean(self, *state: Any) -> Tensor | tuple[Tensor, ...]:
        """carried, total (), count () -> carried, loss (); nan when every target is ignored."""
        total, count = state[self.carried :]
        loss: Tensor = total / count
        return (*state[: self.carried], loss) if self.carried else loss


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
