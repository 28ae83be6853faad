"""U-Net (Ronneberger et al. 2015, arXiv:1505.04597) as nnU-Net has it (Isensee et al. 2018,
arXiv:1809.10486), with plain or residual blocks (arXiv:2404.09556).

    after            the volume's channels and size     skips not yet used
    input_block      32    1
    downsamples 0-3  64    1/2  ...  320  1/16          32  64  128  256  320
    bottleneck       320   1/32
    upsamples 0-4    320   1/16  ...  32  1             one less each
    output_block     classes

Parameters have the names of `monai.networks.nets.DynUNet`, whose weights load; values and gradients
are its own bit for bit, those of supervised levels too, which come stacked.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ArgumentError, InputError
from zoo.layers.checks import (
    check_arguments,
    check_choice,
    check_images,
    check_norm,
    multiples_around,
)
from zoo.layers.unet_blocks import (
    NORMS,
    Layers,
    OutputBlock,
    PlainBlock,
    ResidualBlock,
    Size,
    UpBlock,
)
from zoo.models.model import Model

# letters of the axes, and the most channels of a level
AXES = {2: "NCHW", 3: "NCDHW"}
WIDEST = {2: 512, 3: 320}


class UNet(Model):
    """U-Net: (N, in_channels, D, H, W), or without D -> logits (N, classes, ...).

    `axes` is 2 or 3. Each level has a stride and a kernel, a number or one for each axis. `width`
    channels double at each level, up to 512 for two axes and 320 for three. The encoder's blocks
    are plain or `residual`. `supervised` levels below the last have heads: in training, the result
    is a stack (N, 1 + supervised, classes, ...) of the logits and theirs, scaled up. `drop_rate`
    is the dropout behind each convolution.

    Raises:
        ArgumentError: an argument is out of range, or kernels and strides do not fit each other.
        InputError: in the forward, inputs of another shape or type, or of a size that the strides
            do not divide.
    """

    block_patterns = ("input_block", "downsamples.*", "bottleneck", "upsamples.*")

    def __init__(
        self,
        classes: int = 2,
        in_channels: int = 1,
        *,
        axes: int = 3,
        width: int = 32,
        strides: Sequence[Size] = (1, 2, 2, 2, 2, 2),
        kernels: Sequence[Size] = (3, 3, 3, 3, 3, 3),
        residual: bool = False,
        norm: str = "instance",
        supervised: int = 0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_arguments("unet", in_channels=in_channels, width=width, drop_rate=drop_rate)
        check_arguments("unet", minimum=2, classes=classes)
        check_arguments("unet", minimum=0, supervised=supervised)
        check_choice("unet", "norm", norm, list(NORMS))
        if axes not in AXES:
            raise ArgumentError(f"unet takes axes=2 or axes=3; got {axes!r}")
        layers = Layers(axes, norm, drop_rate)
        steps, sizes = list(map(layers.each, strides)), list(map(layers.each, kernels))
        _check_levels(axes, sizes, steps, supervised)
        # the total stride of each axis
        self.divisors = [prod(of_axis) for of_axis in zip(*steps, strict=True)]
        self.supervised = supervised
        widths = [min(width << level, WIDEST[axes]) for level in range(len(steps))]
        encoder = ResidualBlock if residual else PlainBlock
        down = zip([in_channels, *widths], widths, sizes, steps, strict=False)
        self.input_block, *middle, self.bottleneck = (encoder(layers, *level) for level in down)
        up = [*zip(widths[1:], widths, sizes[1:], steps[1:], strict=False)]
        self.downsamples = nn.ModuleList(middle)
        self.upsamples = nn.ModuleList(UpBlock(layers, *level) for level in reversed(up))
        self.output_block = OutputBlock(layers, widths[0], classes)
        if supervised:
            below = widths[1 : supervised + 1]
            heads = (OutputBlock(layers, channels, classes) for channels in below)
            self.deep_supervision_heads = nn.ModuleList(heads)
        for module in self.modules():
            if isinstance(module, nn.modules.conv._ConvNd):
                nn.init.kaiming_normal_(module.weight, a=0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the logits (N, classes, ...); of supervised levels, too, as the class says."""
        axes = AXES[len(self.divisors)]
        images = check_images("unet", inputs, self.input_block.conv1[0], axes)
        _check_sizes(images, self.divisors)
        check_norm("unet", images, self.bottleneck.norm2, self.divisors)
        skips = [self.input_block(images)]
        for block in self.downsamples:
            skips.append(block(skips[-1]))
        x, coarse = self.bottleneck(skips[-1]), []
        for level, up in zip(reversed(range(len(skips))), self.upsamples, strict=True):
            x = up(x, skips.pop())
            if self.training and 0 < level <= self.supervised:
                coarse.append(self.deep_supervision_heads[level - 1](x))
        logits = cast(Tensor, self.output_block(x))
        if not coarse:
            return logits
        larger = [F.interpolate(of_level, logits.shape[2:]) for of_level in reversed(coarse)]
        return torch.stack([logits, *larger], dim=1)

    def translate(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leaves out the second names that MONAI has for each parameter."""
        return {key: v for key, v in state_dict.items() if not key.startswith("skip_layers.")}


def _check_levels(
    axes: int, kernels: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], supervised: int
) -> None:
    """Raises ArgumentError where kernels and strides do not make a U-Net of so many axes."""
    sizes = [*kernels, *strides]
    if len(kernels) != len(strides) or len(strides) < 3 or any(len(s) != axes for s in sizes):
        raise ArgumentError(
            f"unet takes a kernel and a stride for each of 3 or more levels, a number or {axes} of "
            f"them; got {len(kernels)} kernels {[*kernels]} and {len(strides)} strides {[*strides]}"
        )
    for kernel, stride in zip(kernels, strides, strict=True):
        if any(not 1 <= step <= size + 1 for size, step in zip(kernel, stride, strict=True)):
            raise ArgumentError(
                f"unet needs strides from 1 to one more than the kernel; got {stride} for {kernel}"
            )
    if supervised > len(strides) - 2:
        raise ArgumentError(
            f"unet of {len(strides)} levels has {len(strides) - 2} to supervise below the last; "
            f"got supervised={supervised}"
        )


def _check_sizes(images: Tensor, divisors: Sequence[int]) -> None:
    for size, divisor in zip(images.shape[2:], divisors, strict=True):
        if size % divisor:
            raise InputError(
                f"unet divides its axes by {(*divisors,)}; {tuple(images.shape)} has one of "
                f"{size}, which {divisor} does not divide. Crop or pad it to "
                f"{multiples_around(size, divisor)}"
            )
