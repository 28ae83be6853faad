"""Pre-activation residual networks (He et al. 2016, arXiv:1603.05027) for small images.

Norm and activation stand before each convolution, so that the sum runs through a thousand layers
unchanged. torchvision lacks them. This follows the authors' code
(github.com/KaimingHe/resnet-1k-layers): a bottleneck strides in its first 1x1; no bias but the
classifier's, which starts at zero. The first unit of a stage activates once, for branch and
shortcut, which is a 1x1 convolution, `downsample`, wherever the number of channels changes. Added
is what `resnet` adds.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zoo.layers.checks import check_arguments, check_images, check_norm
from zoo.models.resnet import Convolutions, Residual, ResidualNetwork, basic, conv


def bottleneck(inputs: int, width: int, stride: int = 1) -> list[nn.Conv2d]:
    """Makes 1x1, 3x3, 1x1 convolutions -> 4 width channels."""
    return [conv(inputs, width, 1, stride), conv(width, width, 3), conv(width, 4 * width, 1)]


class Unit(Residual):
    """A unit of `PreactivationResNet`: a norm and an activation before each convolution."""

    def __init__(self, layers: Sequence[nn.Conv2d], drop_rate: float = 0.0) -> None:
        super().__init__(layers, drop_rate)
        self.bn1 = nn.BatchNorm2d(self.inputs)
        self.downsample = None
        if self.inputs != self.outputs:
            self.downsample = conv(self.inputs, self.outputs, 1, self.stride)
        self.conv1 = layers[0]
        for number, layer in enumerate(layers[1:], 2):
            self.add_module(f"bn{number}", nn.BatchNorm2d(layer.in_channels))
            self.add_module(f"conv{number}", layer)

    def forward(self, images: Tensor) -> Any:
        """Adds the shortcut to the last convolution, in place; nothing follows the sum."""
        branch = self.relu(self._normalize(1, images))
        shortcut = branch if self.is_first else images
        for number in range(1, self.depth):
            branch = self._convolve(number, branch)
            branch = self.relu(self._normalize(number + 1, branch))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        total = self.drop_path(self._convolve(self.depth, branch))
        total += shortcut
        return total


class PreactivationResNet(ResidualNetwork):
    """A pre-activation network: (N, in_channels, H, W) of any size -> logits (N, classes).

    Each of three stages has `units` units: 6 units + 2 layers deep when basic, 9 units + 2 with
    bottlenecks. The paper's images are 32x32.

    Raises:
        ArgumentError: classes or in_channels below 1, a rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); in training, one image of at most 4x4, of
            which the last batch norms would see one value per channel.
    """

    residual = Unit

    def __init__(  # noqa: PLR0917
        self,
        unit: Convolutions,
        units: int,
        classes: int = 10,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_arguments("PreactivationResNet", classes=classes, in_channels=in_channels)
        check_arguments("PreactivationResNet", drop_rate=drop_rate, drop_path_rate=drop_path_rate)
        self.conv1 = conv(in_channels, 16, 3)
        channels = self._add_stages(unit, (units,) * 3, drop_path_rate)
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self._add_classifier(channels, classes, drop_rate)
        nn.init.zeros_(self.fc.bias)

    def forward(self, *inputs: Tensor) -> Any:
        """Runs the first convolution, the stages, the last norm and the classifier."""
        images = check_images("PreactivationResNet", inputs, self.conv1)
        check_norm("PreactivationResNet", images, self.bn, strides=4)
        features = self.conv1(images)
        for stage in self._stages():
            features = stage(features)
        return self._classify(self.relu(self.bn(features)))


# millions of parameters, and arguments
SIZES = {
    "resnet110": (1.7, {"unit": basic, "units": 18}),
    "resnet164": (1.7, {"unit": bottleneck, "units": 18}),
    "resnet1001": (10.3, {"unit": bottleneck, "units": 111}),
    "resnet1202": (19.4, {"unit": basic, "units": 200}),
}
