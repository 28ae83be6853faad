"""Residual networks (He et al. 2015, arXiv:1512.03385) as chains, torchvision's bit for bit.

torchvision's blocks are forwards: a plan could keep or run again whole blocks only. These list
their parts. Parameter names, initialization draw by draw, outputs and gradients are torchvision's,
those of the wide (arXiv:1605.07146) and the grouped networks (ResNeXt, arXiv:1611.05431) too.

Deviations: as in torchvision, a bottleneck strides in its 3x3 convolution, not in the first 1x1.
Added are `drop_rate`, dropout before `fc`, and `drop_path_rate`, stochastic depth (Huang et al.
2016, arXiv:1603.09382) that rises linearly from the first block to the last.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import islice

from torch import Tensor, nn

from zoo.chain import Chain, Step, Steps, spread
from zoo.layers.checks import check_input, check_positive, check_rate, check_values, only_input
from zoo.layers.drop_path import DropPath, drop_path_rates

Pair = tuple[Tensor, Tensor]
Build = Callable[[int, int, int, float], "ResidualBlock"]


class ResidualBlock(Chain):
    """What both blocks share: (N, inputs, H, W) -> (N, channels, H / stride, W / stride).

    The state is the branch so far and, for the shortcut, the block's input or its projection.
    """

    channels: int
    conv1: nn.Conv2d
    bn1: nn.BatchNorm2d
    conv2: nn.Conv2d
    relu: nn.ReLU
    downsample: nn.Sequential | None
    drop_path: DropPath

    def _convolve1(self, images: Tensor) -> Pair:
        return self.conv1(images), images

    def _normalize1(self, branch: Tensor, images: Tensor) -> Pair:
        return self.relu(self.bn1(branch)), images

    def _convolve2(self, branch: Tensor, images: Tensor) -> Pair:
        return self.conv2(branch), images

    def _close(self, norm: nn.Module) -> list[Step]:
        add = functools.partial(self._add, norm)
        return [add] if self.downsample is None else [self._project, add]

    def _project(self, branch: Tensor, images: Tensor) -> Pair:
        assert self.downsample is not None
        return branch, self.downsample[0](images)

    def _add(self, norm: nn.Module, branch: Tensor, shortcut: Tensor) -> Tensor:
        total: Tensor = self.drop_path(norm(branch))
        total += shortcut if self.downsample is None else self.downsample[1](shortcut)
        total = self.relu(total)
        return total


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions: (N, inputs, H, W) -> (N, width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int = 1, drop_path: float = 0.0) -> None:
        super().__init__()
        downsample = _downsample(inputs, width, stride)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path)
        self.channels = width

    def steps(self) -> Steps:
        """Lists conv1 | bn1+relu | conv2 | projection, if any | bn2+add+relu."""
        return [self._convolve1, self._normalize1, self._convolve2, *self._close(self.bn2)]


class Bottleneck(ResidualBlock):
    """1x1, 3x3, 1x1 convolutions: (N, inputs, H, W) -> (N, 4 width, H / stride, W / stride).

    The 3x3 has `groups` groups of `width * group_width / 64` channels.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int = 1,
        drop_path: float = 0.0,
        *,
        groups: int = 1,
        group_width: int = 64,
    ) -> None:
        super().__init__()
        inner, outputs = width * group_width // 64 * groups, 4 * width
        downsample = _downsample(inputs, outputs, stride)
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.drop_path = DropPath(drop_path)
        self.channels = outputs

    def steps(self) -> Steps:
        """Lists conv1 | bn1+relu | conv2 | bn2+relu | conv3 | projection, if any | bn3+add+relu."""
        reduce: list[Step] = [self._convolve1, self._normalize1]
        expand: list[Step] = [self._convolve2, self._normalize2, self._convolve3]
        return [*reduce, *expand, *self._close(self.bn3)]

    def _normalize2(self, branch: Tensor, images: Tensor) -> Pair:
        return self.relu(self.bn2(branch)), images

    def _convolve3(self, branch: Tensor, images: Tensor) -> Pair:
        return self.conv3(branch), images


class ResNet(Chain):
    """A residual network: (N, in_channels, H, W) -> (N, classes), for images of any size.

    `block(inputs, width, stride, drop_path)` builds a block, `depths` counts them per stage.

    Raises:
        ArgumentError: classes or in_channels below 1, a rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); in training, one image of at most 32x32,
            of which layer4's batch norms would see one value per channel.
    """

    def __init__(  # noqa: PLR0917  # nine builders below hand their arguments on in this order
        self,
        block: Build,
        depths: Sequence[int],
        classes: int = 1000,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_positive("ResNet", classes=classes, in_channels=in_channels)
        check_rate("ResNet", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        rising = iter(drop_path_rates(drop_path_rate, sum(depths)))
        rates = [list(islice(rising, depth)) for depth in depths]
        self.layer1, channels = _stage(block, 64, 64, 1, rates[0])
        self.layer2, channels = _stage(block, channels, 128, 2, rates[1])
        self.layer3, channels = _stage(block, channels, 256, 2, rates[2])
        self.layer4, channels = _stage(block, channels, 512, 2, rates[3])
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(drop_rate)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def steps(self) -> Steps:
        """Lists the stem, the blocks and the head."""
        stem: Steps = [self.conv1, self._normalize, self.maxpool]
        return [stem, *spread(self.layer1, self.layer2, self.layer3, self.layer4), self._classify]

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the same steps for any images that the network can take."""
        images = only_input("ResNet", inputs)
        check_input("ResNet", images, "N C H W", self.conv1.in_channels, self.conv1.weight)
        values = len(images) * -(-images.shape[2] // 32) * -(-images.shape[3] // 32)
        norm = self.layer4[-1].bn2
        if isinstance(norm, nn.BatchNorm2d) and norm.training:
            check_values("ResNet", images, values)
        return self.steps()

    def _normalize(self, images: Tensor) -> Tensor:
        features: Tensor = self.relu(self.bn1(images))
        return features

    def _classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.dropout(self.avgpool(features).flatten(1)))
        return logits


def _stage(
    block: Build, inputs: int, width: int, stride: int, rates: Sequence[float]
) -> tuple[nn.Sequential, int]:
    first = block(inputs, width, stride, rates[0])
    rest = [block(first.channels, width, 1, rate) for rate in rates[1:]]
    return nn.Sequential(first, *rest), first.channels


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def resnet18(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 11.7 million parameters."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, in_channels, drop_rate, drop_path_rate)


def resnet34(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 21.8 million parameters."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, in_channels, drop_rate, drop_path_rate)


def resnet50(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 25.6 million parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, in_channels, drop_rate, drop_path_rate)


def resnet101(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 44.5 million parameters."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes, in_channels, drop_rate, drop_path_rate)


def resnet152(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 60.2 million parameters."""
    return ResNet(Bottleneck, (3, 8, 36, 3), classes, in_channels, drop_rate, drop_path_rate)


def wide_resnet50_2(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 68.9 million parameters, the 3x3 twice as wide."""
    block = functools.partial(Bottleneck, group_width=128)
    return ResNet(block, (3, 4, 6, 3), classes, in_channels, drop_rate, drop_path_rate)


def wide_resnet101_2(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 126.9 million parameters, the 3x3 twice as wide."""
    block = functools.partial(Bottleneck, group_width=128)
    return ResNet(block, (3, 4, 23, 3), classes, in_channels, drop_rate, drop_path_rate)


def resnext50_32x4d(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 25.0 million parameters, 3x3 in 32 groups."""
    block = functools.partial(Bottleneck, groups=32, group_width=4)
    return ResNet(block, (3, 4, 6, 3), classes, in_channels, drop_rate, drop_path_rate)


def resnext101_32x8d(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> ResNet:
    """(N, in_channels, H, W) -> (N, classes); 88.8 million parameters, 3x3 in 32 groups."""
    block = functools.partial(Bottleneck, groups=32, group_width=8)
    return ResNet(block, (3, 4, 23, 3), classes, in_channels, drop_rate, drop_path_rate)
