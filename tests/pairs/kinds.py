"""Kinds of networks that programs put in a row: three blocks each, (N, T, D) -> (N, T, D)."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo.models.unet import UNet

WIDTH, LENGTH, BATCH = 16, 4, 3
BLOCKS = 3


class Blocks(nn.Module):
    """Three blocks of a kind in a row."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch, self.layer = nn.BatchNorm1d(LENGTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.batch(x)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.back = nn.ConvTranspose2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.relu(self.norm(self.conv(x.unsqueeze(1))))).squeeze(1) + x


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)


class Recurrent(nn.Module):
    """A recurrent layer; both directions together are as wide as one."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 1, directions: int = 1) -> None:
        super().__init__()
        self.layer = kind(
            WIDTH,
            WIDTH // directions,
            num_layers=layers,
            bidirectional=directions == 2,
            batch_first=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Cells(nn.Module):
    """An LSTM as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1)


class Embedding(nn.Module):
    """Looks up a vector for the largest feature of each, as a codebook does."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.codes(x.argmax(-1)))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y, scale)
        return y * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = ctx.saved_tensors
        return gradient * scale * (1 - y * y), (gradient * y).sum((0, 1)).to(scale.dtype)


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.scale)


class Pictures(UNet):
    """A family of zoo."""

    def __init__(self) -> None:
        super().__init__(
            2, 1, axes=2, width=4, strides=(1, 2, 2), kernels=(3, 3, 3), norm="batch", drop_rate=0.1
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(1))[:, 0]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=8,
            use_cache=False,
        )
        self.net = transformers.LlamaModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(inputs_embeds=x).last_hidden_state


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Blocks(linear),
    "norms": lambda: Blocks(Norms),
    "convolution": lambda: Blocks(Convolution),
    "attention": lambda: Blocks(attention),
    "gru": lambda: Blocks(lambda: Recurrent(nn.GRU)),
    "lstm": lambda: Blocks(lambda: Recurrent(nn.LSTM)),
    "lstm of two layers": lambda: Blocks(lambda: Recurrent(nn.LSTM, layers=2)),
    "lstm in both directions": lambda: Blocks(lambda: Recurrent(nn.LSTM, directions=2)),
    "rnn": lambda: Blocks(lambda: Recurrent(nn.RNN)),
    "cells": lambda: Blocks(Cells),
    "embedding": lambda: Blocks(Embedding),
    "function": lambda: Blocks(Function),
    "unet": Pictures,
    "llama": Llama,
}


def batch(step: int) -> Tensor:
    """Returns the batch of a step, (N, T, D)."""
    return torch.rand(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
