"""Densely connected networks (Huang et al. 2016, arXiv:1608.06993) as chains.

Every layer reads all features before it in the block, and autograd keeps each concatenation of
them: memory grows with the square of the depth. torchvision's forwards hide the concatenations
inside its layers. Here the state is the tuple of features, so that a segment needs only these,
kept once, and runs the concatenation again. Parameter names, initialization draw by draw, outputs
and gradients are torchvision's.

All networks are DenseNet-BC: bottlenecks of 4 growth_rate channels, transitions that halve the
channels, 2 growth_rate channels at the start. densenet100 and densenet190 are the paper's for
CIFAR, three blocks after one 3x3 convolution; torchvision has neither these nor densenet264, whose
name counts one layer less than the paper's table. Deviations, shared with torchvision: dropout
follows the 3x3 convolutions only, weights are normal with variance 2 / fan in, not fan out.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.chain import Chain, Step, Steps
from zoo.errors import InputError
from zoo.layers.checks import check_input, check_positive, check_rate, check_values, only_input


class DenseLayer(Chain):
    """Adds features to those before it: tensors (N, C_i, H, W) -> the same and (N, growth, H, W).

    Its inputs are handed on as they are; the concatenation of them is nobody's state.
    """

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

    def steps(self) -> Steps:
        """Lists concatenate+norm1+relu1 | conv1 | norm2+relu2 | conv2+dropout."""
        return [self._concatenate, self._reduce, self._normalize, self._grow]

    def _concatenate(self, *features: Tensor) -> tuple[Tensor, ...]:
        return *features, self.relu1(self.norm1(torch.cat(features, 1)))

    def _reduce(self, *state: Tensor) -> tuple[Tensor, ...]:
        return *state[:-1], self.conv1(state[-1])

    def _normalize(self, *state: Tensor) -> tuple[Tensor, ...]:
        return *state[:-1], self.relu2(self.norm2(state[-1]))

    def _grow(self, *state: Tensor) -> tuple[Tensor, ...]:
        return *state[:-1], F.dropout(self.conv2(state[-1]), self.drop_rate, self.training)


class Transition(Chain):
    """Joins a block's features: tensors (N, C_i, H, W) -> (N, outputs, H / 2, W / 2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.pool = nn.AvgPool2d(2, stride=2)

    def steps(self) -> Steps:
        """Lists concatenate+norm+relu | conv | pool."""
        return [self._concatenate, self.conv, self.pool]

    def _concatenate(self, *features: Tensor) -> Tensor:
        joined: Tensor = self.relu(self.norm(torch.cat(features, 1)))
        return joined


class DenseNet(Chain):
    """A densely connected network: (N, in_channels, H, W) -> (N, classes).

    `depths` counts the layers of each block; a transition follows each block but the last. The
    stem divides height and width by 4, for `small_images` by 1, a transition by 2.

    Raises:
        ArgumentError: classes, in_channels or growth_rate below 1, drop_rate outside [0, 1).
        InputError: not floating (N, in_channels, H, W); images of which the transitions leave
            nothing; in training, one of which they leave one value per channel to batch norm.
    """

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
        positive = {"classes": classes, "in_channels": in_channels, "growth_rate": growth_rate}
        check_positive("DenseNet", **positive)
        check_rate("DenseNet", drop_rate=drop_rate)
        self.stem_stride = 1 if small_images else 4
        self.transitions = len(depths) - 1
        channels = 2 * growth_rate
        stem = _small_stem if small_images else _stem
        self.features = nn.ModuleDict(stem(in_channels, channels))
        for number, depth in enumerate(depths, 1):
            self.features[f"denseblock{number}"] = _block(channels, growth_rate, depth, drop_rate)
            channels += depth * growth_rate
            if number < len(depths):
                self.features[f"transition{number}"] = Transition(channels, channels // 2)
                channels //= 2
        self.features["norm5"] = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)
        nn.init.zeros_(self.classifier.bias)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def steps(self) -> Steps:
        """Lists the stem, the dense layers and transitions, and the head."""
        stem: list[Step] = [self.features["conv0"]]
        body: list[nn.Module] = []
        if "pool0" in self.features:
            norm, relu = self.features["norm0"], self.features["relu0"]
            stem += [functools.partial(_normalize, norm, relu), self.features["pool0"]]
        for part in self.features.values():
            if isinstance(part, nn.ModuleDict):
                body += part.values()
            elif isinstance(part, Transition):
                body.append(part)
        last_relu = functools.partial(F.relu, inplace=True)
        normalize = functools.partial(_normalize, self.features["norm5"], last_relu)
        return [stem, *body, [normalize, self._classify]]

    def steps_for(self, *inputs: Tensor | None) -> Steps:
        """Lists the same steps for any images that the network can take."""
        images = only_input("DenseNet", inputs)
        first = cast(nn.Conv2d, self.features["conv0"])
        check_input("DenseNet", images, "N C H W", first.in_channels, first.weight)
        self._check_size(images)
        return self.steps()

    def translate(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Renames the keys of torchvision's published files, `norm.1` for `norm1`."""
        dotted = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
        return {dotted.sub(r"\1", key): value for key, value in state_dict.items()}

    def _classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(F.adaptive_avg_pool2d(features, (1, 1)).flatten(1))
        return logits

    def _check_size(self, images: Tensor) -> None:
        smallest = self.stem_stride * (2**self.transitions - 1) + 1
        shape, (height, width) = tuple(images.shape), images.shape[2:]
        if min(height, width) < smallest:
            raise InputError(
                f"DenseNet with {self.transitions} transitions needs images of at least "
                f"{smallest}x{smallest}; got {height}x{width} in {shape}. Resize or pad them"
            )
        left = [-(-size // self.stem_stride) >> self.transitions for size in (height, width)]
        norm = self.features["norm5"]
        if isinstance(norm, nn.BatchNorm2d) and norm.training:
            check_values("DenseNet", images, len(images) * prod(left))


def _normalize(norm: nn.Module, relu: Callable[[Tensor], Tensor], *features: Tensor) -> Tensor:
    return relu(norm(torch.cat(features, 1) if len(features) > 1 else features[0]))


def _stem(in_channels: int, channels: int) -> dict[str, nn.Module]:
    return {
        "conv0": nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False),
        "norm0": nn.BatchNorm2d(channels),
        "relu0": nn.ReLU(inplace=True),
        "pool0": nn.MaxPool2d(3, stride=2, padding=1),
    }


def _small_stem(in_channels: int, channels: int) -> dict[str, nn.Module]:
    return {"conv0": nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)}


def _block(inputs: int, growth_rate: int, depth: int, drop_rate: float) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            f"denselayer{layer + 1}": DenseLayer(
                inputs + layer * growth_rate, growth_rate, drop_rate
            )
            for layer in range(depth)
        }
    )


def densenet121(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, growth_rate: int = 32
) -> DenseNet:
    """(N, in_channels, H, W) -> (N, classes), from 29x29; 8.0 million parameters."""
    return DenseNet(growth_rate, (6, 12, 24, 16), classes, in_channels, drop_rate)


def densenet161(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, growth_rate: int = 48
) -> DenseNet:
    """(N, in_channels, H, W) -> (N, classes), from 29x29; 28.7 million parameters."""
    return DenseNet(growth_rate, (6, 12, 36, 24), classes, in_channels, drop_rate)


def densenet169(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, growth_rate: int = 32
) -> DenseNet:
    """(N, in_channels, H, W) -> (N, classes), from 29x29; 14.1 million parameters."""
    return DenseNet(growth_rate, (6, 12, 32, 32), classes, in_channels, drop_rate)


def densenet201(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, growth_rate: int = 32
) -> DenseNet:
    """(N, in_channels, H, W) -> (N, classes), from 29x29; 20.0 million parameters."""
    return DenseNet(growth_rate, (6, 12, 48, 32), classes, in_channels, drop_rate)


def densenet264(
    classes: int = 1000, in_channels: int = 3, drop_rate: float = 0.0, growth_rate: int = 32
) -> DenseNet:
    """(N, in_channels, H, W) -> (N, classes), from 29x29; 33.3 million parameters."""
    return DenseNet(growth_rate, (6, 12, 64, 48), classes, in_channels, drop_rate)


def densenet100(
    classes: int = 10, in_channels: int = 3, drop_rate: float = 0.0, growth_rate: int = 12
) -> DenseNet:
    """(N, in_channels, H, W) -> (N, classes), from 4x4; 0.8 million parameters."""
    return DenseNet(growth_rate, (16, 16, 16), classes, in_channels, drop_rate, small_images=True)


def densenet190(
    classes: int = 10, in_channels: int = 3, drop_rate: float = 0.0, growth_rate: int = 40
) -> DenseNet:
    """(N, in_channels, H, W) -> (N, classes), from 4x4; 25.6 million parameters."""
    return DenseNet(growth_rate, (31, 31, 31), classes, in_channels, drop_rate, small_images=True)
