"""V-Net (Milletari et al. 2016, arXiv:1606.04797), as `monai.networks.nets.VNet` computes it.

MONAI's skips are locals of one forward; here they are tensors handed on:

    after     the volume's channels and size     skips not yet used
    stem      x16      1
    down 0-3  x32      1/2  ...  x256  1/16      x16  x32  x64  x128
    up 0-3    x256     1/8  ...  x32   1         one less each
    logits    classes  1

Half of what a training step holds belongs to the last level up, so each operation is a step of its
own: what the backward of an activation needs is then not held beside what that of a norm needs.

MONAI's weights load, values and gradients are MONAI's bit for bit. Deviations: `drop_rate` rules
every dropout (MONAI's two last skips always have 0.5); instance norm and `width` are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from zoo.chain import Chain, State, Steps, spread
from zoo.errors import ArgumentError, InputError
from zoo.layers.checks import (
    check_choice,
    check_classes,
    check_input,
    check_positive,
    check_rate,
    check_values,
    only_input,
)

STRIDE = 16
# Parts of MONAI's names and ours, replaced in this order; none of MONAI's stands in a name of ours.
FROM_MONAI = {
    "out_tr.conv2": "logits",
    "out_tr.act_function1": "head.act",
    "out_tr.": "head.",
    "in_tr.": "stem.unit.",
    **{f"down_tr{32 << level}.": f"down.{level}." for level in range(4)},
    **{f"up_tr{256 >> level}.": f"up.{level}." for level in range(4)},
    ".down_conv": ".resample.conv",
    ".up_conv": ".resample.conv",
    ".bn1": ".resample.norm",
    ".act_function1": ".resample.act",
    ".ops.": ".units.",
    ".act_function2": ".act",
    ".conv_block.conv": ".conv",
    ".conv_block.adn.N": ".norm",
    ".act_function": ".act",
}


class ELU(nn.Module):
    """ELU that keeps its output for the backward: any shape -> the same shape.

    The next convolution keeps that tensor anyway; `F.elu` out of place would keep its input, one
    more. Values and gradients are those of `nn.ELU(inplace=True)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Computes ELU in place on a copy."""
        return F.elu(x.clone(), inplace=True)


class ConvNormAct(Chain):
    """Convolution, norm, activation, each a step: x (N, C, D, H, W), ... -> (N, channels, ...)."""

    def __init__(self, conv: nn.Module, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm
        self.act = act

    def steps(self) -> Steps:
        """Lists convolve, normalize, activate."""
        return [self.convolve, self.normalize, self.activate]

    def convolve(self, x: Tensor, *held: Tensor) -> State:
        """x, ... -> conv(x), ..."""
        return self.conv(x), *held

    def normalize(self, x: Tensor, *held: Tensor) -> State:
        """x, ... -> norm(x), ..."""
        return self.norm(x), *held

    def activate(self, x: Tensor, *held: Tensor) -> State:
        """x, ... -> act(x), ..."""
        return self.act(x), *held


@dataclass(frozen=True)
class Parts:
    """Makes the layers of a V-Net with this activation and norm."""

    activation: str
    norm: str

    def act(self, channels: int) -> nn.Module:
        """Returns an activation for so many channels."""
        return ELU() if self.activation == "elu" else nn.PReLU(channels)

    def around(self, conv: nn.Conv3d | nn.ConvTranspose3d) -> ConvNormAct:
        """Returns a convolution with a norm and an activation behind it."""
        channels = conv.out_channels
        norms = {"batch": nn.BatchNorm3d, "instance": nn.InstanceNorm3d}
        return ConvNormAct(conv, norms[self.norm](channels, affine=True), self.act(channels))

    def unit(self, in_channels: int, channels: int) -> ConvNormAct:
        """Returns the 5 x 5 x 5 convolution that V-Net repeats, with norm and activation."""
        return self.around(nn.Conv3d(in_channels, channels, 5, padding=2, bias=False))


class Stem(Chain):
    """Adds a unit to the repeated input: (N, C, D, H, W) -> (N, channels, D, H, W)."""

    def __init__(self, in_channels: int, channels: int, parts: Parts) -> None:
        super().__init__()
        self.unit = parts.unit(in_channels, channels)

    def steps(self) -> Steps:
        """Lists convolve, normalize, add, activate."""
        return [self.convolve, self.unit.normalize, self.add, self.unit.activate]

    def convolve(self, x: Tensor) -> State:
        """x -> conv(x), x"""
        return self.unit.conv(x), x

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """out, x -> out + x repeated along its channels"""
        times = out.shape[1] // x.shape[1]
        return out + repeat(x, "n c d h w -> n (times c) d h w", times=times)


class Level(Chain):
    """What a level of V-Net consists of: a convolution that resamples, dropout, residual units."""

    def __init__(self, resample: ConvNormAct, channels: int, depth: int, parts: Parts) -> None:
        super().__init__()
        self.resample = resample
        self.units = nn.Sequential(*(parts.unit(channels, channels) for _ in range(depth)))
        self.act = parts.act(channels)

    def add(self, x: Tensor, shortcut: Tensor, *skips: Tensor) -> State:
        """x, shortcut, ... -> x + shortcut, ..."""
        return x + shortcut, *skips

    def activate(self, x: Tensor, *skips: Tensor) -> State:
        """x, ... -> act(x), ..."""
        return self.act(x), *skips


class Down(Level):
    """Halves the size and keeps its input: x (N, C, D, ...), ... -> (N, 2 C, D / 2, ...), x, ..."""

    def __init__(self, channels: int, depth: int, drop_rate: float, parts: Parts) -> None:
        conv = nn.Conv3d(channels, 2 * channels, 2, stride=2, bias=False)
        super().__init__(parts.around(conv), 2 * channels, depth, parts)
        self.dropout = nn.Dropout3d(drop_rate)

    def steps(self) -> Steps:
        """Lists the convolution's steps, drop, the units' steps, add, activate."""
        convolution = (self.convolve, self.resample.normalize, self.resample.activate)
        return [convolution, self.drop, self.units, self.add, self.activate]

    def convolve(self, x: Tensor, *skips: Tensor) -> State:
        """x, ... -> conv(x), x, ..."""
        return self.resample.conv(x), x, *skips

    def drop(self, x: Tensor, *skips: Tensor) -> State:
        """x, ... -> dropout(x), x, ..."""
        return self.dropout(x), x, *skips


class Up(Level):
    """Doubles the size and uses a skip: x (N, C, D, ...), skip, ... -> (N, channels, 2 D, ...)."""

    def __init__(
        self, ends: tuple[int, int], depth: int, rates: tuple[float, float], parts: Parts
    ) -> None:
        conv = nn.ConvTranspose3d(ends[0], ends[1] // 2, 2, stride=2)
        super().__init__(parts.around(conv), ends[1], depth, parts)
        self.dropout = nn.Dropout3d(rates[0])
        self.skip_dropout = nn.Dropout3d(rates[1])

    def steps(self) -> Steps:
        """Lists drop, the convolution's steps, drop_skip, join, the units' steps, add, activate."""
        joined = (self.drop, self.resample, self.drop_skip, self.join)
        return [joined, self.units, self.add, self.activate]

    def drop(self, x: Tensor, *skips: Tensor) -> State:
        """x, ... -> dropout(x), ..."""
        return self.dropout(x), *skips

    def drop_skip(self, x: Tensor, skip: Tensor, *skips: Tensor) -> State:
        """x, skip, ... -> x, dropout(skip), ..."""
        return x, self.skip_dropout(skip), *skips

    def join(self, x: Tensor, skip: Tensor, *skips: Tensor) -> State:
        """x, skip, ... -> joined, joined, ..."""
        joined = torch.cat((x, skip), 1)
        return joined, joined, *skips


class VNet(Chain):
    """V-Net: (N, in_channels, D, H, W) -> logits (N, classes, D, H, W).

    D, H and W are multiples of 16; `width` channels at full size double at each halving. Layers are
    initialized as torch does by default, like MONAI's.

    Raises:
        ArgumentError: an argument is out of range, or `in_channels` does not divide `width`.
        InputError: in the forward, a volume of another shape or type.
    """

    def __init__(
        self,
        classes: int = 2,
        in_channels: int = 1,
        *,
        drop_rate: float = 0.5,
        activation: str = "elu",
        norm: str = "batch",
        width: int = 16,
    ) -> None:
        super().__init__()
        check_positive("vnet", in_channels=in_channels, width=width)
        check_classes("vnet", classes)
        check_rate("vnet", drop_rate=drop_rate)
        check_choice("vnet", "activation", activation, ("elu", "prelu"))
        check_choice("vnet", "norm", norm, ("batch", "instance"))
        if width % in_channels:
            raise ArgumentError(
                f"vnet repeats its input to {width} channels; {in_channels} does not divide "
                f"{width}. Append channels of zeros, or take another width"
            )
        self.in_channels, self.norm = in_channels, norm
        parts = Parts(activation, norm)
        self.stem = Stem(in_channels, width, parts)
        self.down = nn.Sequential(
            Down(width, 1, 0.0, parts),
            Down(2 * width, 2, 0.0, parts),
            Down(4 * width, 3, drop_rate, parts),
            Down(8 * width, 2, drop_rate, parts),
        )
        self.up = nn.Sequential(
            Up((16 * width, 16 * width), 2, (drop_rate, drop_rate), parts),
            Up((16 * width, 8 * width), 2, (drop_rate, drop_rate), parts),
            Up((8 * width, 4 * width), 1, (0.0, drop_rate), parts),
            Up((4 * width, 2 * width), 1, (0.0, drop_rate), parts),
        )
        self.head = parts.unit(2 * width, classes)
        self.logits = nn.Conv3d(classes, classes, 1)

    def steps(self) -> Steps:
        """Lists stem, four levels down, four up, head with logits; each is a block."""
        return [self.stem, *spread(self.down, self.up), [self.head, self.logits]]

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the steps once the volume is known to fit."""
        volume = only_input("vnet", inputs)
        weight = self.stem.unit.conv.weight
        check_input("vnet", volume, "N C D H W", self.in_channels, cast(Tensor, weight))
        _check_size(volume)
        if self.training or self.norm == "instance":
            least = prod(size // STRIDE for size in volume.shape[2:])
            check_values("vnet", volume, least * (len(volume) if self.norm == "batch" else 1))
        return self.steps()

    def translate(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Renames MONAI's keys; this model's own stay."""
        return {_translated(key): value for key, value in state_dict.items()}


def vnet(classes: int = 2, in_channels: int = 1, **arguments: Any) -> VNet:
    """Builds `VNet` with these arguments: 45.6 million parameters at width 16."""
    return VNet(classes, in_channels, **arguments)


def _translated(key: str) -> str:
    for theirs, ours in FROM_MONAI.items():
        key = key.replace(theirs, ours)
    return key


def _check_size(volume: Tensor) -> None:
    for axis, size in zip("DHW", volume.shape[2:], strict=True):
        if size % STRIDE:
            below, above = size // STRIDE * STRIDE, -(-size // STRIDE) * STRIDE
            raise InputError(
                f"vnet halves each axis four times; axis {axis} of {tuple(volume.shape)} has size "
                f"{size}, which {STRIDE} does not divide. Crop or pad it to "
                f"{f'{below} or ' if below else ''}{above}"
            )
