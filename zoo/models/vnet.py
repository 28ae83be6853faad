"""V-Net (Milletari et al. 2016, arXiv:1606.04797), as `monai.networks.nets.VNet` computes it.

MONAI's skips are locals of one forward; here they are tensors handed on:

    after     the volume's channels and size     skips not yet used
    stem      x16      1
    down 0-3  x32      1/2  ...  x256  1/16      x16  x32  x64  x128
    up 0-3    x256     1/8  ...  x32   1         one less each
    logits    classes  1

The last level up holds half of the activations, so each operation is a step. MONAI's weights load,
values and gradients are MONAI's bit for bit. Deviations: `drop_rate` rules every dropout (MONAI's
two last skips always have 0.5); instance norm and `width` are ours.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from zoo.chain import Chain, State, Steps, spread
from zoo.errors import ArgumentError, InputError
from zoo.layers.checks import check_arguments, check_choice, check_images, check_norm

STRIDE = 16
NORMS = {"batch": nn.BatchNorm3d, "instance": nn.InstanceNorm3d}
# parts of MONAI's names and ours
FROM_MONAI = {
    r"out_tr\.conv2": "logits",
    r"out_tr\.act_function1": "head.act",
    r"out_tr\.": "head.",
    r"in_tr\.": "stem.unit.",
    **{rf"down_tr{32 << level}\.": f"down.{level}." for level in range(4)},
    **{rf"up_tr{256 >> level}\.": f"up.{level}." for level in range(4)},
    r"\.(down|up)_conv": ".resample.conv",
    r"\.bn1": ".resample.norm",
    r"\.act_function1": ".resample.act",
    r"\.ops\.": ".units.",
    r"\.act_function2": ".act",
    r"\.conv_block\.conv": ".conv",
    r"\.conv_block\.adn\.N": ".norm",
    r"\.act_function": ".act",
}


class ELU(nn.Module):
    """ELU that saves its output, which the next convolution saves anyway; `F.elu` saves its input.

    Values and gradients are those of `nn.ELU(inplace=True)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Computes ELU in place on a copy: any shape -> the same shape."""
        return F.elu(x.clone(), inplace=True)


def _activation(name: str, channels: int) -> nn.Module:
    return ELU() if name == "elu" else nn.PReLU(channels)


class ConvNormAct(Chain):
    """Convolution, norm, activation, each a step: x (N, C, D, H, W), ... -> (N, channels, ...)."""

    def __init__(self, conv: Any, activation: str, norm: str) -> None:
        super().__init__()
        self.conv = conv
        self.norm = NORMS[norm](conv.out_channels, affine=True)
        self.act = _activation(activation, conv.out_channels)

    def steps(self) -> Steps:
        """Lists convolve, normalize, activate."""
        return [self._convolve, self._normalize, self._activate]

    def _convolve(self, x: Tensor, *held: Tensor) -> State:
        return self.conv(x), *held

    def _normalize(self, x: Tensor, *held: Tensor) -> State:
        return self.norm(x), *held

    def _activate(self, x: Tensor, *held: Tensor) -> State:
        return self.act(x), *held


def _unit(in_channels: int, channels: int, *parts: str) -> ConvNormAct:
    """Returns the 5 x 5 x 5 convolution that V-Net repeats, with this activation and norm."""
    return ConvNormAct(nn.Conv3d(in_channels, channels, 5, padding=2, bias=False), *parts)


class Stem(Chain):
    """Adds a unit to the repeated input: (N, C, D, H, W) -> (N, channels, D, H, W)."""

    def __init__(self, in_channels: int, channels: int, *parts: str) -> None:
        super().__init__()
        self.unit = _unit(in_channels, channels, *parts)

    def steps(self) -> Steps:
        """Lists convolve, normalize, add, activate."""
        return [self._convolve, self.unit._normalize, self._add, self.unit._activate]

    def _convolve(self, x: Tensor) -> State:
        return self.unit.conv(x), x

    def _add(self, out: Tensor, x: Tensor) -> Tensor:
        times = out.shape[1] // x.shape[1]
        return out + repeat(x, "n c d h w -> n (times c) d h w", times=times)


class Level(Chain):
    """A convolution that resamples, dropout, and units in whose state a shortcut follows x."""

    def __init__(self, conv: Any, channels: int, depth: int, drop: float, *parts: str) -> None:
        super().__init__()
        self.resample = ConvNormAct(conv, *parts)
        self.units = nn.Sequential(*(_unit(channels, channels, *parts) for _ in range(depth)))
        self.act = _activation(parts[0], channels)
        self.dropout = nn.Dropout3d(drop)

    def _add(self, x: Tensor, shortcut: Tensor, *skips: Tensor) -> State:
        return x + shortcut, *skips

    def _activate(self, x: Tensor, *skips: Tensor) -> State:
        return self.act(x), *skips


class Down(Level):
    """Halves the size and keeps its input: x (N, C, D, ...), ... -> (N, 2 C, D / 2, ...), x, ..."""

    def __init__(self, channels: int, depth: int, drop_rate: float, *parts: str) -> None:
        conv = nn.Conv3d(channels, 2 * channels, 2, stride=2, bias=False)
        super().__init__(conv, 2 * channels, depth, drop_rate, *parts)

    def steps(self) -> Steps:
        """Lists the convolution's steps, drop, the units' steps, add, activate."""
        convolution = (self._convolve, self.resample._normalize, self.resample._activate)
        return [convolution, self._drop, self.units, self._add, self._activate]

    def _convolve(self, x: Tensor, *skips: Tensor) -> State:
        return self.resample.conv(x), x, *skips

    def _drop(self, x: Tensor, *skips: Tensor) -> State:
        return self.dropout(x), x, *skips


class Up(Level):
    """Doubles the size and uses a skip: x (N, C, D, ...), skip, ... -> (N, channels, 2 D, ...)."""

    def __init__(  # as a row of the table in `VNet`
        self, inputs: int, channels: int, depth: int, drop: float, drop_skip: float, *parts: str
    ) -> None:
        conv = nn.ConvTranspose3d(inputs, channels // 2, 2, stride=2)
        super().__init__(conv, channels, depth, drop, *parts)
        self.skip_dropout = nn.Dropout3d(drop_skip)

    def steps(self) -> Steps:
        """Lists drop, the convolution's steps, drop_skip, join, the units' steps, add, activate."""
        joined = (self._drop, self.resample, self._drop_skip, self._join)
        return [joined, self.units, self._add, self._activate]

    def _drop(self, x: Tensor, *skips: Tensor) -> State:
        return self.dropout(x), *skips

    def _drop_skip(self, x: Tensor, skip: Tensor, *skips: Tensor) -> State:
        return x, self.skip_dropout(skip), *skips

    def _join(self, x: Tensor, skip: Tensor, *skips: Tensor) -> State:
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

    renames = FROM_MONAI

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
        check_arguments("vnet", in_channels=in_channels, width=width, drop_rate=drop_rate)
        check_arguments("vnet", minimum=2, classes=classes)
        check_choice("vnet", "activation", activation, ("elu", "prelu"))
        check_choice("vnet", "norm", norm, list(NORMS))
        if width % in_channels:
            raise ArgumentError(
                f"vnet repeats its input to {width} channels; {in_channels} does not divide {width}"
                ". Append channels of zeros, or take another width"
            )
        parts = activation, norm
        self.stem = Stem(in_channels, width, *parts)
        self.down = nn.Sequential(
            Down(width, 1, 0.0, *parts),
            Down(2 * width, 2, 0.0, *parts),
            Down(4 * width, 3, drop_rate, *parts),
            Down(8 * width, 2, drop_rate, *parts),
        )
        self.up = nn.Sequential(
            Up(16 * width, 16 * width, 2, drop_rate, drop_rate, *parts),
            Up(16 * width, 8 * width, 2, drop_rate, drop_rate, *parts),
            Up(8 * width, 4 * width, 1, 0.0, drop_rate, *parts),
            Up(4 * width, 2 * width, 1, 0.0, drop_rate, *parts),
        )
        self.head = _unit(2 * width, classes, *parts)
        self.logits = nn.Conv3d(classes, classes, 1)

    def steps(self) -> Steps:
        """Lists stem, four levels down, four up, head with logits; each is a block."""
        return [self.stem, *spread(self.down, self.up), [self.head, self.logits]]

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the steps once the volume is known to fit."""
        volume = check_images("vnet", inputs, self.stem.unit.conv, "NCDHW")
        for axis, size in zip("DHW", volume.shape[2:], strict=True):
            if size % STRIDE:
                below, above = size // STRIDE * STRIDE, -(-size // STRIDE) * STRIDE
                raise InputError(
                    f"vnet halves each axis four times; axis {axis} of {tuple(volume.shape)} has "
                    f"size {size}, which {STRIDE} does not divide. Crop or pad it to "
                    f"{f'{below} or ' if below else ''}{above}"
                )
        check_norm("vnet", volume, self.down[-1].resample.norm, STRIDE)
        return self.steps()
