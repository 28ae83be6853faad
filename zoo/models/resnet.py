"""Residual networks as chains: torchvision's bit for bit, and very deep ones for small images.

`ResNet` (He et al. 2015, arXiv:1512.03385) has torchvision's parameter names, initialization draw
by draw, outputs and gradients, those of the wide (arXiv:1605.07146) and the grouped networks
(ResNeXt, arXiv:1611.05431) too. torchvision's blocks are forwards: a plan could keep or recompute
whole blocks only. These list their parts. As there, a bottleneck strides in its 3x3 convolution.

`PreactivationResNet` (He et al. 2016, arXiv:1603.05027), which torchvision lacks, has norm and
activation before each convolution, so that the sum runs through a thousand layers untouched. It
follows the paper and the authors' code (github.com/KaimingHe/resnet-1k-layers): a bottleneck
strides in its first 1x1; no bias but the classifier's, which starts at zero. The first unit of a
stage activates once, for branch and shortcut: in the first stage as the paper says, in the others
as the code has it. Its shortcut is a 1x1 convolution wherever the number of channels changes; the
earlier paper padded with zeros in basic units. `downsample` is that bare convolution.

Deviations: the last pooling takes images of any size. Added are `drop_rate`, dropout before `fc`,
and `drop_path_rate`, stochastic depth (arXiv:1603.09382) that rises linearly from the first block
to the last.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import cast

from torch import Tensor, nn

from zoo.chain import Chain, State, Step, Steps, spread
from zoo.layers.checks import check_input, check_integers, check_norm, check_rates
from zoo.layers.drop_path import DropPath, drop_path_rates

Pair = tuple[Tensor, Tensor]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class Residual(Chain):
    """A block or unit: (N, inputs, H, W) -> (N, channels, H / stride, W / stride).

    The state is the branch so far and the shortcut, which is added to it in the last step.
    """

    conv1: nn.Conv2d
    conv2: nn.Conv2d
    conv3: nn.Conv2d
    bn1: nn.BatchNorm2d
    bn2: nn.BatchNorm2d
    bn3: nn.BatchNorm2d
    is_first = False  # of its stage; the network says so

    def __init__(self, channels: int, drop_path: float) -> None:
        super().__init__()
        self.channels = channels
        self.relu = nn.ReLU(inplace=True)
        self.drop_path = DropPath(drop_path)

    def _convolve2(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.conv2(branch), shortcut

    def _convolve3(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.conv3(branch), shortcut

    def _normalize2(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.relu(self.bn2(branch)), shortcut

    def _normalize3(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.relu(self.bn3(branch)), shortcut


class Block(Residual):
    """A block of `ResNet`: a norm and an activation behind each convolution."""

    def __init__(
        self, inputs: int, stride: int, drop_path: float, *convolutions: nn.Conv2d
    ) -> None:
        outputs = convolutions[-1].out_channels
        super().__init__(outputs, drop_path)
        for number, convolution in enumerate(convolutions, 1):
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", nn.BatchNorm2d(convolution.out_channels))
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            projection = _conv(inputs, outputs, 1, stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def steps(self) -> Steps:
        """Lists conv1 | bn1+relu | conv2 [| bn2+relu | conv3] [| projection] | norm+add+relu."""
        steps: list[Step] = [self._convolve1, self._normalize1, self._convolve2]
        last = self.bn2
        if hasattr(self, "conv3"):
            steps += [self._normalize2, self._convolve3]
            last = self.bn3
        steps += [] if self.downsample is None else [self._project]
        return [*steps, partial(self._add, last)]

    def _convolve1(self, images: Tensor) -> Pair:
        return self.conv1(images), images

    def _normalize1(self, branch: Tensor, images: Tensor) -> Pair:
        return self.relu(self.bn1(branch)), images

    def _project(self, branch: Tensor, images: Tensor) -> Pair:
        assert self.downsample is not None
        return branch, self.downsample[0](images)

    def _add(self, norm: nn.Module, branch: Tensor, shortcut: Tensor) -> Tensor:
        total: Tensor = self.drop_path(norm(branch))
        total += shortcut if self.downsample is None else self.downsample[1](shortcut)
        total = self.relu(total)
        return total


class BasicBlock(Block):
    """Two 3x3 convolutions: (N, inputs, H, W) -> (N, width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int = 1, drop_path: float = 0.0) -> None:
        convolutions = _conv(inputs, width, 3, stride), _conv(width, width, 3)
        super().__init__(inputs, stride, drop_path, *convolutions)


class Bottleneck(Block):
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
        inner = width * group_width // 64 * groups
        reduce, expand = _conv(inputs, inner, 1), _conv(inner, 4 * width, 1)
        middle = _conv(inner, inner, 3, stride, groups)
        super().__init__(inputs, stride, drop_path, reduce, middle, expand)


class Unit(Residual):
    """A unit of `PreactivationResNet`: a norm and an activation before each convolution.

    In the first of a stage the shortcut is activated, too.
    """

    def __init__(self, stride: int, drop_path: float, *convolutions: nn.Conv2d) -> None:
        inputs, outputs = convolutions[0].in_channels, convolutions[-1].out_channels
        super().__init__(outputs, drop_path)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.downsample = None if inputs == outputs else _conv(inputs, outputs, 1, stride)
        self.conv1 = convolutions[0]
        for number, convolution in enumerate(convolutions[1:], 2):
            self.add_module(f"bn{number}", nn.BatchNorm2d(convolution.in_channels))
            self.add_module(f"conv{number}", convolution)

    def steps(self) -> Steps:
        """Lists bn1+relu | conv1 | bn2+relu [| conv2 | bn3+relu] [| projection] | conv+add."""
        steps: list[Step] = [self._normalize1, self._convolve1, self._normalize2]
        last = self.conv2
        if hasattr(self, "conv3"):
            steps += [self._convolve2, self._normalize3]
            last = self.conv3
        steps += [] if self.downsample is None else [self._project]
        return [*steps, partial(self._add, last)]

    def _normalize1(self, images: Tensor) -> Pair:
        active = self.relu(self.bn1(images))
        return active, active if self.is_first else images

    def _convolve1(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.conv1(branch), shortcut

    def _project(self, branch: Tensor, shortcut: Tensor) -> Pair:
        assert self.downsample is not None
        return branch, self.downsample(shortcut)

    def _add(self, convolution: nn.Module, branch: Tensor, shortcut: Tensor) -> Tensor:
        total: Tensor = self.drop_path(convolution(branch))
        total += shortcut
        return total


class BasicUnit(Unit):
    """Two 3x3 convolutions: (N, inputs, H, W) -> (N, width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int = 1, drop_path: float = 0.0) -> None:
        convolutions = _conv(inputs, width, 3, stride), _conv(width, width, 3)
        super().__init__(stride, drop_path, *convolutions)


class BottleneckUnit(Unit):
    """1x1, 3x3, 1x1 convolutions: (N, inputs, H, W) -> (N, 4 width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int = 1, drop_path: float = 0.0) -> None:
        reduce, expand = _conv(inputs, width, 1, stride), _conv(width, 4 * width, 1)
        super().__init__(stride, drop_path, reduce, _conv(width, width, 3), expand)


Build = Callable[[int, int, int, float], Residual]


class ResidualNetwork(Chain):
    """What both networks share: stages of blocks, and the classifier behind the last."""

    conv1: nn.Conv2d

    def _add_stages(
        self, block: Build, depths: Sequence[int], width: int, drop_path_rate: float
    ) -> int:
        """Adds `layer1`, `layer2`, ..., each twice as wide as the last; returns their channels."""
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        channels = width
        for stage, depth in enumerate(depths):
            blocks: list[Residual] = []
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(channels, width << stage, stride, next(rates)))
                channels = blocks[-1].channels
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

    def _stages(self) -> list[nn.Sequential]:
        stages = [stage for name, stage in self.named_children() if name.startswith("layer")]
        return cast(list[nn.Sequential], stages)

    def _check(self, inputs: State, stride: int, last_norm: Tensor | nn.Module) -> None:
        """Checks images for a network that divides height and width by `stride`."""
        name = type(self).__name__
        images = check_input(name, inputs, "N C H W", self.conv1.in_channels, self.conv1.weight)
        if isinstance(last_norm, nn.BatchNorm2d) and last_norm.training:
            left = prod(-(-size // stride) for size in images.shape[2:])
            check_norm(name, images, len(images) * left)

    def _classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.dropout(self.avgpool(features).flatten(1)))
        return logits


class ResNet(ResidualNetwork):
    """A residual network: (N, in_channels, H, W) of any size -> logits (N, classes).

    `block(inputs, width, stride, drop_path)` builds a block, `depths` counts them per stage. A
    wide_resnet's 3x3 convolutions are twice as wide, a resnext's in 32 groups.

    Raises:
        ArgumentError: classes or in_channels below 1, a rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); in training, one image of at most 32x32,
            of which layer4's batch norms would see one value per channel.
    """

    def __init__(  # noqa: PLR0917
        self,
        block: Build,
        depths: Sequence[int],
        classes: int = 1000,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_integers("ResNet", classes=classes, in_channels=in_channels)
        check_rates("ResNet", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = self._add_stages(block, depths, 64, drop_path_rate)
        self._add_classifier(channels, classes, drop_rate)

    def steps(self) -> Steps:
        """Lists the stem, the blocks and the head."""
        stem: Steps = [self.conv1, self._normalize, self.maxpool]
        return [stem, *spread(*self._stages()), self._classify]

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the same steps for any images that the network can take."""
        self._check(inputs, 32, self._stages()[-1][-1].bn2)
        return self.steps()

    def _normalize(self, images: Tensor) -> Tensor:
        features: Tensor = self.relu(self.bn1(images))
        return features


class PreactivationResNet(ResidualNetwork):
    """A pre-activation network: (N, in_channels, H, W) of any size -> logits (N, classes).

    Each of three stages has `units` units: 6 units + 2 layers deep when basic, 9 units + 2 with
    bottlenecks. The paper's images are 32x32.

    Raises:
        ArgumentError: classes or in_channels below 1, a rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); in training, one image of at most 4x4, of
            which the last batch norms would see one value per channel.
    """

    def __init__(  # noqa: PLR0917
        self,
        unit: type[BasicUnit] | type[BottleneckUnit],
        units: int,
        classes: int = 10,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_integers("PreactivationResNet", classes=classes, in_channels=in_channels)
        check_rates("PreactivationResNet", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.conv1 = _conv(in_channels, 16, 3)
        channels = self._add_stages(unit, (units,) * 3, 16, drop_path_rate)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self._add_classifier(channels, classes, drop_rate)
        nn.init.zeros_(self.fc.bias)

    def steps(self) -> Steps:
        """Lists the stem, the units and the head."""
        return [self.conv1, *spread(*self._stages()), [self._normalize, self._classify]]

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the same steps for any images that the network can take."""
        self._check(inputs, 4, self.bn)
        return self.steps()

    def _normalize(self, features: Tensor) -> Tensor:
        active: Tensor = self.relu(self.bn(features))
        return active


# the 3x3 twice as wide; in 32 groups
_WIDE = partial(Bottleneck, group_width=128)
_GROUPED4, _GROUPED8 = (partial(Bottleneck, groups=32, group_width=width) for width in (4, 8))
# millions of parameters, and arguments
SIZES = {
    "resnet18": (11.7, {"block": BasicBlock, "depths": (2, 2, 2, 2)}),
    "resnet34": (21.8, {"block": BasicBlock, "depths": (3, 4, 6, 3)}),
    "resnet50": (25.6, {"block": Bottleneck, "depths": (3, 4, 6, 3)}),
    "resnet101": (44.5, {"block": Bottleneck, "depths": (3, 4, 23, 3)}),
    "resnet152": (60.2, {"block": Bottleneck, "depths": (3, 8, 36, 3)}),
    "wide_resnet50_2": (68.9, {"block": _WIDE, "depths": (3, 4, 6, 3)}),
    "wide_resnet101_2": (126.9, {"block": _WIDE, "depths": (3, 4, 23, 3)}),
    "resnext50_32x4d": (25.0, {"block": _GROUPED4, "depths": (3, 4, 6, 3)}),
    "resnext101_32x8d": (88.8, {"block": _GROUPED8, "depths": (3, 4, 23, 3)}),
}
PREACTIVATION_SIZES = {
    "resnet110": (1.7, {"unit": BasicUnit, "units": 18}),
    "resnet164": (1.7, {"unit": BottleneckUnit, "units": 18}),
    "resnet1001": (10.3, {"unit": BottleneckUnit, "units": 111}),
    "resnet1202": (19.4, {"unit": BasicUnit, "units": 200}),
}
