"""The very deep residual networks for small images (He et al. 2016, arXiv:1603.05027), as chains.

torchvision has none of them. Norm and activation stand before each convolution, so that the sum
runs through a thousand layers untouched. The source is the paper and the authors' code
(github.com/KaimingHe/resnet-1k-layers): three stages of 16, 32 and 64 channels, four times as many
at the ends of bottlenecks; a bottleneck strides in its first 1x1; weights normal with variance
2 / fan out, no bias but the classifier's, which starts at zero.

The first unit of a stage activates once, for branch and shortcut: in the first stage as the paper
says, in the others as the code has it. Its shortcut is a 1x1 convolution wherever the number of
channels changes; the earlier paper (arXiv:1512.03385) padded with zeros in basic units.

Deviations: the last pooling takes images of any size; `drop_rate` (dropout before `fc`) and
`drop_path_rate` (stochastic depth, arXiv:1603.09382, rising linearly) are added. Parameter names
follow torchvision's ResNet, `downsample` being the bare convolution.
"""

import functools
from collections.abc import Sequence

from torch import Tensor, nn

from zoo.chain import Chain, Step, Steps, spread
from zoo.layers.checks import check_input, check_positive, check_rate, check_values, only_input
from zoo.layers.drop_path import DropPath, drop_path_rates

Pair = tuple[Tensor, Tensor]


class PreactivationUnit(Chain):
    """What both units share: (N, inputs, H, W) -> (N, outputs, H / stride, W / stride).

    The state is the branch so far and what will be added to it: the unit's input, or where
    `shared` its activation or, by `downsample`, the projection of that.
    """

    conv1: nn.Conv2d
    conv2: nn.Conv2d
    bn2: nn.BatchNorm2d

    def __init__(
        self, inputs: int, outputs: int, stride: int, shared: bool, drop_path: float
    ) -> None:
        super().__init__()
        self.shared = shared
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Conv2d | None = None
        if inputs != outputs:
            self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.drop_path = DropPath(drop_path)

    def _normalize1(self, images: Tensor) -> Pair:
        active = self.relu(self.bn1(images))
        return active, active if self.shared else images

    def _convolve1(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.conv1(branch), shortcut

    def _normalize2(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.relu(self.bn2(branch)), shortcut

    def _close(self, convolution: nn.Conv2d) -> list[Step]:
        add = functools.partial(self._add, convolution)
        return [add] if self.downsample is None else [self._project, add]

    def _project(self, branch: Tensor, shortcut: Tensor) -> Pair:
        assert self.downsample is not None
        return branch, self.downsample(shortcut)

    def _add(self, convolution: nn.Conv2d, branch: Tensor, shortcut: Tensor) -> Tensor:
        total: Tensor = self.drop_path(convolution(branch))
        total += shortcut
        return total


class BasicUnit(PreactivationUnit):
    """Two 3x3 convolutions: (N, inputs, H, W) -> (N, width, H / stride, W / stride)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, first: bool, drop_path: float) -> None:
        super().__init__(inputs, width, stride, first, drop_path)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def steps(self) -> Steps:
        """Lists bn1+relu | conv1 | bn2+relu | projection, if any | conv2+add."""
        opening: list[Step] = [self._normalize1, self._convolve1, self._normalize2]
        return [*opening, *self._close(self.conv2)]


class BottleneckUnit(PreactivationUnit):
    """1x1, 3x3, 1x1 convolutions: (N, inputs, H, W) -> (N, 4 width, H / stride, W / stride)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, first: bool, drop_path: float) -> None:
        super().__init__(inputs, 4 * width, stride, first, drop_path)
        self.conv1 = nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)

    def steps(self) -> Steps:
        """Lists bn1+relu | conv1 | bn2+relu | conv2 | bn3+relu | projection, if any | conv3+add."""
        opening: list[Step] = [self._normalize1, self._convolve1, self._normalize2]
        return [*opening, self._convolve2, self._normalize3, *self._close(self.conv3)]

    def _convolve2(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.conv2(branch), shortcut

    def _normalize3(self, branch: Tensor, shortcut: Tensor) -> Pair:
        return self.relu(self.bn3(branch)), shortcut


class PreactivationResNet(Chain):
    """A pre-activation network: (N, in_channels, H, W) -> (N, classes), for images of any size.

    Each of three stages has `units` units: 6 units + 2 layers deep when basic, 9 units + 2 with
    bottlenecks. The paper's images are 32x32.

    Raises:
        ArgumentError: classes or in_channels below 1, a rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); in training, one image of at most 4x4, of
            which the last batch norms would see one value per channel.
    """

    def __init__(  # noqa: PLR0917  # the builders below hand their arguments on in this order
        self,
        unit: type[BasicUnit] | type[BottleneckUnit],
        units: int,
        classes: int = 10,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        name, channels = type(self).__name__, 64 * unit.expansion
        check_positive(name, classes=classes, in_channels=in_channels)
        check_rate(name, drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        rates = drop_path_rates(drop_path_rate, 3 * units)
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.layer1 = _stage(unit, 16, 16, 1, rates[:units])
        self.layer2 = _stage(unit, 16 * unit.expansion, 32, 2, rates[units : 2 * units])
        self.layer3 = _stage(unit, 32 * unit.expansion, 64, 2, rates[2 * units :])
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(drop_rate)
        self.fc = nn.Linear(channels, classes)
        nn.init.zeros_(self.fc.bias)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def steps(self) -> Steps:
        """Lists the stem, the units and the head."""
        head: Steps = [self._normalize, self._classify]
        return [self.conv1, *spread(self.layer1, self.layer2, self.layer3), head]

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the same steps for any images that the network can take."""
        images = only_input("PreactivationResNet", inputs)
        conv = self.conv1
        check_input("PreactivationResNet", images, "N C H W", conv.in_channels, conv.weight)
        values = len(images) * -(-images.shape[2] // 4) * -(-images.shape[3] // 4)
        if self.bn.training:
            check_values("PreactivationResNet", images, values)
        return self.steps()

    def _normalize(self, features: Tensor) -> Tensor:
        active: Tensor = self.relu(self.bn(features))
        return active

    def _classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.dropout(self.avgpool(features).flatten(1)))
        return logits


def _stage(
    unit: type[BasicUnit] | type[BottleneckUnit],
    inputs: int,
    width: int,
    stride: int,
    rates: Sequence[float],
) -> nn.Sequential:
    first = unit(inputs, width, stride, True, rates[0])
    rest = [unit(unit.expansion * width, width, 1, False, rate) for rate in rates[1:]]
    return nn.Sequential(first, *rest)


def resnet110(
    classes: int = 10, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> PreactivationResNet:
    """(N, in_channels, H, W) -> (N, classes); 54 basic units, 1.7 million parameters."""
    return PreactivationResNet(BasicUnit, 18, classes, in_channels, drop_rate, drop_path_rate)


def resnet164(
    classes: int = 10, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> PreactivationResNet:
    """(N, in_channels, H, W) -> (N, classes); 54 bottleneck units, 1.7 million parameters."""
    return PreactivationResNet(BottleneckUnit, 18, classes, in_channels, drop_rate, drop_path_rate)


def resnet1001(
    classes: int = 10, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> PreactivationResNet:
    """(N, in_channels, H, W) -> (N, classes); 333 bottleneck units, 10.3 million parameters."""
    return PreactivationResNet(BottleneckUnit, 111, classes, in_channels, drop_rate, drop_path_rate)


def resnet1202(
    classes: int = 10, in_channels: int = 3, drop_rate: float = 0.0, drop_path_rate: float = 0.0
) -> PreactivationResNet:
    """(N, in_channels, H, W) -> (N, classes); 600 basic units, 19.4 million parameters."""
    return PreactivationResNet(BasicUnit, 200, classes, in_channels, drop_rate, drop_path_rate)
