"""Densely connected networks (Huang et al. 2016, arXiv:1608.06993).

Every layer reads all features before it in the block, and autograd saves each concatenation of
them: memory grows with the square of the depth. Concatenation, norm and activation are cheap to
compute twice (Pleiss et al. 2017, arXiv:1707.06990), which a plan finds among the kernels; nothing
here switches it on. Parameter names, initialization draw by draw, outputs and gradients are
torchvision's.

All networks are DenseNet-BC: bottlenecks of 4 growth_rate channels, transitions that halve the
channels, 2 growth_rate channels at the start. densenet100 and densenet190 are the paper's for
CIFAR, three blocks after one 3x3 convolution; torchvision lacks these and densenet264, whose name
counts one layer less than the paper's table. Deviations, shared with torchvision: dropout follows
the 3x3 convolutions only, weights are normal with variance 2 / fan in, not fan out.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.errors import InputError
from zoo.layers.checks import check_arguments, check_images, check_norm
from zoo.models.model import Model


class DenseLayer(nn.Module):
    """Makes features of those before: tensors (N, C_i, H, W) -> (N, growth_rate, H, W)."""

    def __init__(self, inputs: int, growth_rate: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        inner = 4 * growth_rate
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inner, growth_rate, 3, padding=1, bias=False)
        self.drop_rate = drop_rate

    def forward(self, features: list[Tensor]) -> Tensor:
        """Concatenates; then norm, activation and convolution twice, 1x1 and 3x3."""
        new = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        new = self.relu2(self.norm2(new))
        return F.dropout(self.conv2(new), self.drop_rate, self.training)


class DenseBlock(nn.ModuleDict):
    """Layers that read all before: (N, C, H, W) -> it and (N, growth_rate, H, W) of each layer."""

    def __init__(self, depth: int, inputs: int, growth_rate: int, drop_rate: float) -> None:
        super().__init__()
        for number in range(depth):
            layer = DenseLayer(inputs + number * growth_rate, growth_rate, drop_rate)
            self[f"denselayer{number + 1}"] = layer

    def forward(self, images: Tensor) -> list[Tensor]:
        """Returns the input and the features of each layer, which their reader concatenates."""
        features = [images]
        for layer in self.values():
            features = [*features, layer(features)]
        return features


class Transition(nn.Module):
    """Joins a block's features: tensors (N, C_i, H, W) -> (N, outputs, H / 2, W / 2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.pool = nn.AvgPool2d(2, stride=2)

    def forward(self, features: list[Tensor]) -> Any:
        """Concatenates; then norm, activation, convolution and pooling."""
        return self.pool(self.conv(self.relu(self.norm(torch.cat(features, 1)))))


class DenseNet(Model):
    """A densely connected network: (N, in_channels, H, W) -> logits (N, classes).

    `depths` counts the layers of each block; a transition follows each block but the last. The
    stem divides height and width by 4, for `small_images` by 1, a transition by 2: images are at
    least 29x29, small ones 4x4.

    Raises:
        ArgumentError: classes, in_channels or growth_rate below 1, drop_rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); images of which the transitions leave
            nothing; in training, one of which they leave one value per channel to batch norm.
    """

    # torchvision's published files have `norm.1` for `norm1`
    renames: ClassVar = {r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)": r"\1"}

    def __init__(
        self,
        growth_rate: int,
        depths: Sequence[int],
        classes: int = 1000,
        in_channels: int = 3,
        drop_rate: float = 0.0,
        *,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        check_arguments("DenseNet", classes=classes, in_channels=in_channels)
        check_arguments("DenseNet", growth_rate=growth_rate, drop_rate=drop_rate)
        self.stem_stride = 1 if small_images else 4
        self.transitions = len(depths) - 1
        channels = 2 * growth_rate
        kernel, stride = (3, 1) if small_images else (7, 2)
        stem = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, bias=False)
        self.features = features = nn.ModuleDict({"conv0": stem})
        if not small_images:
            features["norm0"] = nn.BatchNorm2d(channels)
            features["relu0"] = nn.ReLU(inplace=True)
            features["pool0"] = nn.MaxPool2d(3, stride=2, padding=1)
        for number, depth in enumerate(depths, 1):
            block = DenseBlock(depth, channels, growth_rate, drop_rate)
            features[f"denseblock{number}"] = block
            channels += depth * growth_rate
            if number < len(depths):
                features[f"transition{number}"] = Transition(channels, channels // 2)
                channels //= 2
        features["norm5"] = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)
        nn.init.zeros_(self.classifier.bias)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, *inputs: Tensor) -> Any:
        """Runs the stem, the dense blocks and transitions, and the classifier."""
        *parts, norm = self.features.values()
        features: Any = self._checked(inputs)
        for part in parts:
            features = part(features)
        features = F.relu(norm(torch.cat(features, 1)), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(features, (1, 1)).flatten(1))

    def _checked(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the images; raises InputError unless the network takes them."""
        images = check_images("DenseNet", inputs, self.features["conv0"])
        height, width = images.shape[2:]
        smallest = self.stem_stride * (2**self.transitions - 1) + 1
        if min(height, width) < smallest:
            raise InputError(
                f"DenseNet with {self.transitions} transitions needs images of at least {smallest}x"
                f"{smallest}; got {height}x{width} in {tuple(images.shape)}. Resize or pad them"
            )
        norm = self.features["norm5"]
        check_norm("DenseNet", images, norm, self.stem_stride, self.transitions)
        return images


_SMALL = {"classes": 10, "small_images": True}
# millions of parameters, and arguments
SIZES = {
    "densenet121": (8.0, {"growth_rate": 32, "depths": (6, 12, 24, 16)}),
    "densenet161": (28.7, {"growth_rate": 48, "depths": (6, 12, 36, 24)}),
    "densenet169": (14.1, {"growth_rate": 32, "depths": (6, 12, 32, 32)}),
    "densenet201": (20.0, {"growth_rate": 32, "depths": (6, 12, 48, 32)}),
    "densenet264": (33.3, {"growth_rate": 32, "depths": (6, 12, 64, 48)}),
    "densenet100": (0.8, {"growth_rate": 12, "depths": (16, 16, 16), **_SMALL}),
    "densenet190": (25.6, {"growth_rate": 40, "depths": (31, 31, 31), **_SMALL}),
}
