"""Residual networks (arXiv:1512.03385), wide ones (arXiv:1605.07146), ResNeXt (arXiv:1611.05431).

Parameter names, initialization draw by draw, outputs and gradients are torchvision's. Added are a
number of input channels, dropout before `fc`, stochastic depth (arXiv:1603.09382), and errors that
say which images the network takes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar

from torch import Tensor, nn

from zoo.layers.checks import check_arguments, check_images, check_norm
from zoo.layers.drop_path import DropPath, drop_path_rates
from zoo.models.model import Model

Convolutions = Callable[[int, int, int], Sequence[nn.Conv2d]]  # (inputs, width, stride) ->


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Makes a convolution without bias, padded to keep the size at stride 1."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


def basic(inputs: int, width: int, stride: int = 1) -> list[nn.Conv2d]:
    """Makes two 3x3 convolutions -> `width` channels."""
    return [conv(inputs, width, 3, stride), conv(width, width, 3)]


def bottleneck(
    inputs: int, width: int, stride: int = 1, *, groups: int = 1, group_width: int = 64
) -> list[nn.Conv2d]:
    """Makes 1x1, 3x3, 1x1 -> 4 width; the 3x3 has groups of `width * group_width / 64` channels."""
    inner = width * group_width // 64 * groups
    middle = conv(inner, inner, 3, stride, groups)
    return [conv(inputs, inner, 1), middle, conv(inner, 4 * width, 1)]


class Residual(nn.Module):
    """Convolutions beside a shortcut: (N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""

    is_first = False  # in its stage; set by the network
    downsample: Any

    def __init__(self, layers: Sequence[nn.Conv2d], drop_rate: float) -> None:
        super().__init__()
        self.inputs, self.outputs = layers[0].in_channels, layers[-1].out_channels
        self.depth, self.stride = len(layers), prod(layer.stride[0] for layer in layers)
        self.relu = nn.ReLU(inplace=True)
        self.drop_path = DropPath(drop_rate) if drop_rate else nn.Identity()

    def _convolve(self, number: int, branch: Tensor) -> Any:
        return getattr(self, f"conv{number}")(branch)

    def _normalize(self, number: int, branch: Tensor) -> Any:
        return getattr(self, f"bn{number}")(branch)


class Block(Residual):
    """A block of `ResNet`: a norm and an activation behind each convolution."""

    def __init__(self, layers: Sequence[nn.Conv2d], drop_rate: float = 0.0) -> None:
        super().__init__(layers, drop_rate)
        for number, layer in enumerate(layers, 1):
            self.add_module(f"conv{number}", layer)
            self.add_module(f"bn{number}", nn.BatchNorm2d(layer.out_channels))
        self.downsample = None
        if self.stride != 1 or self.inputs != self.outputs:
            projection = conv(self.inputs, self.outputs, 1, self.stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(self.outputs))

    def forward(self, images: Tensor) -> Any:
        """Adds the shortcut to the last norm, in place, and activates the sum."""
        branch = self._convolve(1, images)
        for number in range(1, self.depth):
            branch = self.relu(self._normalize(number, branch))
            branch = self._convolve(number + 1, branch)
        shortcut = images if self.downsample is None else self.downsample[0](images)
        total = self.drop_path(self._normalize(self.depth, branch))
        total += shortcut if self.downsample is None else self.downsample[1](shortcut)
        return self.relu(total)


class ResidualNetwork(Model):
    """Stages of blocks, each twice as wide as the one before, and a classifier behind the last."""

    residual: ClassVar[type[Residual]]
    conv1: nn.Conv2d

    def _add_stages(self, block: Convolutions, depths: Sequence[int], drop_path_rate: float) -> int:
        """Adds `layer1`, `layer2`, ... behind `conv1`; returns the channels of the last."""
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        width = channels = self.conv1.out_channels
        for stage, depth in enumerate(depths):
            blocks: list[Residual] = []
            for number in range(depth):
                layers = block(channels, width << stage, 2 if stage > 0 and number == 0 else 1)
                blocks.append(self.residual(layers, next(rates)))
                channels = blocks[-1].outputs
            blocks[0].is_first = True
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        return channels

    def _add_classifier(self, channels: int, classes: int, drop_rate: float) -> None:
        """Adds the head and draws the weights: normal with variance 2 / fan out."""
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(drop_rate)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stages(self) -> list[Any]:
        return [stage for name, stage in self.named_children() if name.startswith("layer")]

    def _classify(self, features: Tensor) -> Any:
        return self.fc(self.dropout(self.avgpool(features).flatten(1)))


class ResNet(ResidualNetwork):
    """A residual network: (N, in_channels, H, W) of any size -> logits (N, classes).

    A wide_resnet's 3x3 convolutions are twice as wide, a resnext's in 32 groups.

    Raises:
        ArgumentError: classes or in_channels below 1, a rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); in training, one image of at most 32x32,
            of which layer4's batch norms would see one value per channel.
    """

    residual = Block

    def __init__(  # noqa: PLR0917
        self,
        block: Convolutions,
        depths: Sequence[int],
        classes: int = 1000,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_arguments("ResNet", classes=classes, in_channels=in_channels)
        check_arguments("ResNet", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.conv1 = conv(in_channels, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = self._add_stages(block, depths, drop_path_rate)
        self._add_classifier(channels, classes, drop_rate)

    def forward(self, *inputs: Tensor) -> Any:
        """Runs the stem, the stages and the classifier."""
        images = check_images("ResNet", inputs, self.conv1)
        check_norm("ResNet", images, self._stages()[-1][-1].bn2, strides=32)
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in self._stages():
            features = stage(features)
        return self._classify(features)


_WIDE = partial(bottleneck, group_width=128)
_GROUPED4, _GROUPED8 = (partial(bottleneck, groups=32, group_width=width) for width in (4, 8))
# millions of parameters, and arguments
SIZES = {
    "resnet18": (11.7, {"block": basic, "depths": (2, 2, 2, 2)}),
    "resnet34": (21.8, {"block": basic, "depths": (3, 4, 6, 3)}),
    "resnet50": (25.6, {"block": bottleneck, "depths": (3, 4, 6, 3)}),
    "resnet101": (44.5, {"block": bottleneck, "depths": (3, 4, 23, 3)}),
    "resnet152": (60.2, {"block": bottleneck, "depths": (3, 8, 36, 3)}),
    "wide_resnet50_2": (68.9, {"block": _WIDE, "depths": (3, 4, 6, 3)}),
    "wide_resnet101_2": (126.9, {"block": _WIDE, "depths": (3, 4, 23, 3)}),
    "resnext50_32x4d": (25.0, {"block": _GROUPED4, "depths": (3, 4, 6, 3)}),
    "resnext101_32x8d": (88.8, {"block": _GROUPED8, "depths": (3, 4, 23, 3)}),
}
