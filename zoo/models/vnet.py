"""V-Net (Milletari et al. 2016, arXiv:1606.04797), as `monai.networks.nets.VNet` computes it.

    after     the volume's channels and size     skips not yet used
    stem      x16      1
    down 0-3  x32      1/2  ...  x256  1/16      x16  x32  x64  x128
    up 0-3    x256     1/8  ...  x32   1         one less each
    logits    classes  1

The last level up holds half of the activations. Initialization, values and gradients are MONAI's
bit for bit. Deviations: `drop_rate` rules every dropout (MONAI's two last skips always have 0.5);
instance norm and `width` are ours.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from zoo.errors import ArgumentError, InputError
from zoo.layers.checks import (
    check_arguments,
    check_choice,
    check_images,
    check_norm,
    multiples_around,
)
from zoo.models.model import Model

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
    """ELU that saves its output, as the next convolution does anyway; `F.elu` saves its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes what `nn.ELU(inplace=True)` does, on a copy: any shape -> the same shape."""
        return F.elu(x.clone(), inplace=True)


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {"elu": lambda _: ELU(), "prelu": nn.PReLU}


class ConvNormAct(nn.Module):
    """Convolution, norm, activation: (N, C, D, H, W) -> (N, channels, ...)."""

    def __init__(self, conv: Any, activation: str, norm: str) -> None:
        super().__init__()
        self.conv, channels = conv, conv.out_channels
        self.norm, self.act = NORMS[norm](channels, affine=True), ACTIVATIONS[activation](channels)

    def forward(self, x: Tensor) -> Any:
        """Convolves, normalizes, activates."""
        return self.act(self.norm(self.conv(x)))


def _unit(in_channels: int, channels: int, *parts: str) -> ConvNormAct:
    """Returns the 5 x 5 x 5 convolution that V-Net repeats, with this activation and norm."""
    return ConvNormAct(nn.Conv3d(in_channels, channels, 5, padding=2, bias=False), *parts)


class Stem(nn.Module):
    """Adds a unit to the repeated input: (N, C, D, H, W) -> (N, channels, D, H, W)."""

    def __init__(self, in_channels: int, channels: int, *parts: str) -> None:
        super().__init__()
        self.unit = _unit(in_channels, channels, *parts)

    def forward(self, x: Tensor) -> Any:
        """Convolves and normalizes, adds the input, activates the sum."""
        out = self.unit.norm(self.unit.conv(x))
        times = out.shape[1] // x.shape[1]
        return self.unit.act(out + repeat(x, "n c d h w -> n (times c) d h w", times=times))


class Level(nn.Module):
    """A convolution that resamples, dropout, and units beside a shortcut."""

    def __init__(self, conv: Any, channels: int, depth: int, drop: float, *parts: str) -> None:
        super().__init__()
        self.resample = ConvNormAct(conv, *parts)
        self.units = nn.Sequential(*(_unit(channels, channels, *parts) for _ in range(depth)))
        self.act = ACTIVATIONS[parts[0]](channels)
        self.dropout = nn.Dropout3d(drop)


class Down(Level):
    """Halves the size: (N, C, D, H, W) -> (N, 2 C, D / 2, H / 2, W / 2)."""

    def __init__(self, channels: int, depth: int, drop_rate: float, *parts: str) -> None:
        conv = nn.Conv3d(channels, 2 * channels, 2, stride=2, bias=False)
        super().__init__(conv, 2 * channels, depth, drop_rate, *parts)

    def forward(self, x: Tensor) -> Any:
        """Resamples, adds what the units make of it after dropout, activates the sum."""
        x = self.resample(x)
        return self.act(self.units(self.dropout(x)) + x)


class Up(Level):
    """Doubles the size: (N, C, D, ...), skip (N, C', 2 D, ...) -> (N, 2 C', 2 D, ...)."""

    def __init__(  # as a row of the table in `VNet`
        self, inputs: int, channels: int, depth: int, drop: float, drop_skip: float, *parts: str
    ) -> None:
        conv = nn.ConvTranspose3d(inputs, channels // 2, 2, stride=2)
        super().__init__(conv, channels, depth, drop, *parts)
        self.skip_dropout = nn.Dropout3d(drop_skip)

    def forward(self, x: Tensor, skip: Tensor) -> Any:
        """Drops and resamples, joins the skip, adds the units' output, activates the sum."""
        x = self.resample(self.dropout(x))
        x = torch.cat((x, self.skip_dropout(skip)), 1)
        return self.act(self.units(x) + x)


class VNet(Model):
    """V-Net: (N, in_channels, D, H, W) -> logits (N, classes, D, H, W).

    D, H and W are multiples of 16; `width` channels at full size double at each halving.

    Raises:
        ArgumentError: an argument is out of range, or `in_channels` does not divide `width`.
        InputError: in the forward, a volume of another shape or type.
    """

    renames = FROM_MONAI
    block_patterns = ("down.*", "up.*")  # most of which hold a row of units themselves

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
        check_choice("vnet", "activation", activation, list(ACTIVATIONS))
        check_choice("vnet", "norm", norm, list(NORMS))
        if width % in_channels:
            raise ArgumentError(
                f"vnet repeats its input to {width} channels; {in_channels} does not divide {width}"
                ". Append channels of zeros, or take another width"
            )
        parts = activation, norm
        self.stem = Stem(in_channels, width, *parts)
        down = (
            Down(width, 1, 0.0, *parts),
            Down(2 * width, 2, 0.0, *parts),
            Down(4 * width, 3, drop_rate, *parts),
            Down(8 * width, 2, drop_rate, *parts),
        )
        up = (
            Up(16 * width, 16 * width, 2, drop_rate, drop_rate, *parts),
            Up(16 * width, 8 * width, 2, drop_rate, drop_rate, *parts),
            Up(8 * width, 4 * width, 1, 0.0, drop_rate, *parts),
            Up(4 * width, 2 * width, 1, 0.0, drop_rate, *parts),
        )
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.head = _unit(2 * width, classes, *parts)
        self.logits = nn.Conv3d(classes, classes, 1)

    def forward(self, *inputs: Tensor) -> Any:
        """Runs stem, four levels down, four up with the skips, the latest first, and the head."""
        volume = check_images("vnet", inputs, self.stem.unit.conv, "NCDHW")
        for axis, size in zip("DHW", volume.shape[2:], strict=True):
            if size % STRIDE:
                raise InputError(
                    f"vnet halves each axis four times; axis {axis} of {tuple(volume.shape)} has "
                    f"size {size}, which {STRIDE} does not divide. Crop or pad it to "
                    f"{multiples_around(size, STRIDE)}"
                )
        check_norm("vnet", volume, self.down[-1].resample.norm, STRIDE)
        skips = [self.stem(volume)]
        for level in self.down:
            skips.append(level(skips[-1]))
        x = skips.pop()
        for level in self.up:
            x = level(x, skips.pop())
        return self.logits(self.head(x))
