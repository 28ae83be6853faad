"""A language model's decoder and cross entropy as steps, one chunk of tokens after another.

The scores (tokens x vocabulary) are by far the largest tensor of a language model: GPT-2's 1024
tokens x 50257 are 196 MiB a sample. `torch.nn.functional.linear_cross_entropy` avoids them by
computing gradients in the forward, equal up to rounding only. Here every chunk is a pair of steps,
so a plan that runs each pair again holds the scores of one chunk at a time, and its gradients are
those of the plain chain bit for bit.

    state after            tensors, behind those carried on
    split                  total count | hidden targets | hidden targets | ...
    decode                 total count | scores targets | hidden targets | ...
    add_loss               total count | hidden targets | ...
    ...
    mean                   loss

It does not fuse the two. Take the decoder from a `SharedWeight`, or each chunk's backward makes a
gradient of the whole weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.chain import Steps
from zoo.errors import InputError
from zoo.layers.checks import check_range

IGNORED = -100


@dataclass(frozen=True)
class LossChunks:
    """The steps hidden (..., C), targets (...) -> mean loss () over the targets that count.

    `decoder` maps hidden (tokens, C) -> scores (tokens, V); `tokens` is the number of targets,
    `chunk_tokens` how many of them are decoded at a time. The first `carried` tensors of the state
    are handed on untouched and stand before the loss at the end. Targets of -100 are ignored.

    With one chunk the loss is that of `F.cross_entropy` bit for bit. Half precision is summed in
    float32: 256 losses of 10 each would round to a few hundredths in bfloat16.
    """

    decoder: Callable[[Tensor], Tensor]
    tokens: int
    chunk_tokens: int
    carried: int = 0

    def steps(self) -> Steps:
        """Lists split, then decode and add_loss for each chunk as a block, then mean."""
        chunks = ceil(self.tokens / self.chunk_tokens)
        return [self.split, *([self.decode, self.add_loss] for _ in range(chunks)), self.mean]

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

    def decode(self, *state: Any) -> tuple[Tensor, ...]:
        """..., hidden (chunk, C), targets, ... -> ..., scores (chunk, V), targets, ..."""
        first = self.carried + 2
        return (*state[:first], self.decoder(state[first]), *state[first + 1 :])

    def add_loss(self, *state: Any) -> tuple[Tensor, ...]:
        """carried, total, count, scores (chunk, V), targets, ... -> carried, total, count, ..."""
        total, count, scores, targets, *rest = state[self.carried :]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        loss = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")
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
