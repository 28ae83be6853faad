"""The blocks of nnU-Net's networks (Isensee et al. 2018, arXiv:1809.10486), of two or three axes.

Parameters have MONAI's names, and values and gradients are MONAI's bit for bit.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

Size = int | Sequence[int]
CONVOLUTIONS: Mapping[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: Mapping[int, Any] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS: Mapping[str, Mapping[int, Any]] = {
    "instance": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
    "batch": {2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
}


@dataclass(frozen=True)
class Layers:
    """Makes the layers of a network's blocks: of so many axes, a norm, dropout behind convolutions.

    A kernel and a stride are a number, or one for each axis.
    """

    axes: int
    norm: str
    drop_rate: float

    def conv(
        self, inputs: int, channels: int, kernel: Size, stride: Size, *, bias: bool = False
    ) -> nn.Sequential:
        """Returns a convolution that divides each axis by its stride."""
        pairs = zip(self.each(kernel), self.each(stride), strict=True)
        padding = [(size - step + 1) // 2 for size, step in pairs]
        form = {"stride": stride, "padding": padding, "bias": bias}
        return self._dropped(CONVOLUTIONS[self.axes](inputs, channels, kernel, **form))

    def scale(self, inputs: int, channels: int, stride: Size) -> nn.Sequential:
        """Returns a transposed convolution that multiplies each axis by its stride."""
        return self._dropped(TRANSPOSED[self.axes](inputs, channels, stride, stride, bias=False))

    def normalize(self, channels: int) -> nn.Module:
        """Returns a norm."""
        return cast(nn.Module, NORMS[self.norm][self.axes](channels, affine=True))

    def each(self, size: Size) -> tuple[int, ...]:
        """Returns a kernel or a stride as one number for each axis."""
        return (size,) * self.axes if isinstance(size, int) else (*size,)

    def _dropped(self, conv: nn.Module) -> nn.Sequential:
        drop = {"dropout": nn.Dropout(self.drop_rate)} if self.drop_rate else {}
        return nn.Sequential(OrderedDict(conv=conv, **drop))


class PlainBlock(nn.Module):
    """Two convolutions, each with a norm and an activation: (N, C, ...) -> (N, channels, ...)."""

    def __init__(
        self, layers: Layers, inputs: int, channels: int, kernel: Size, stride: Size
    ) -> None:
        super().__init__()
        self.conv1 = layers.conv(inputs, channels, kernel, stride)
        self.conv2 = layers.conv(channels, channels, kernel, 1)
        self.lrelu = nn.LeakyReLU(0.01, inplace=True)
        self.norm1, self.norm2 = layers.normalize(channels), layers.normalize(channels)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, channels, ...), each axis divided by the stride."""
        x = self.lrelu(self.norm1(self.conv1(x)))
        return cast(Tensor, self.lrelu(self.norm2(self.conv2(x))))


class ResidualBlock(PlainBlock):
    """A basic block beside a shortcut, which is convolved where its shape changes."""

    def __init__(
        self, layers: Layers, inputs: int, channels: int, kernel: Size, stride: Size
    ) -> None:
        super().__init__(layers, inputs, channels, kernel, stride)
        self.is_resampled = inputs != channels or max(layers.each(stride)) > 1
        if self.is_resampled:
            self.conv3 = layers.conv(inputs, channels, 1, stride)
            self.norm3 = layers.normalize(channels)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, channels, ...), each axis divided by the stride."""
        out = self.norm2(self.conv2(self.lrelu(self.norm1(self.conv1(x)))))
        out += self.norm3(self.conv3(x)) if self.is_resampled else x
        return cast(Tensor, self.lrelu(out))


class UpBlock(nn.Module):
    """Scales up and joins a skip: (N, C, ...), (N, channels, ...) -> (N, channels, ...)."""

    def __init__(
        self, layers: Layers, inputs: int, channels: int, kernel: Size, stride: Size
    ) -> None:
        super().__init__()
        self.transp_conv = layers.scale(inputs, channels, stride)
        self.conv_block = PlainBlock(layers, 2 * channels, channels, kernel, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """(N, C, ...) and (N, channels, ...), larger by the stride -> (N, channels, ...)."""
        return cast(Tensor, self.conv_block(torch.cat((self.transp_conv(x), skip), 1)))


class OutputBlock(nn.Module):
    """Logits: (N, C, ...) -> (N, classes, ...)."""

    def __init__(self, layers: Layers, inputs: int, classes: int) -> None:
        super().__init__()
        self.conv = layers.conv(inputs, classes, 1, 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, classes, ...)."""
        return cast(Tensor, self.conv(x))
