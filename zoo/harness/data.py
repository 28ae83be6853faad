"""Real training batches without a download, from data in installed packages.

    data          inputs, targets
    photographs   (N, 3, S, S), (N,)             crops of scikit-learn's two photographs; the class
                                                 is the photograph and its quarter
    digits        (N, 3, S, S), (N,)             scikit-learn's 1797 handwritten digits, enlarged
    volume        (N, 1, D, H, W), (N, D, H, W)  boxes of nibabel's test scan, resampled; the class
                                                 is the intensity, from dark to bright
    text          (N, T), (N, T)                 Python's own reference (`pydoc_data`); the target
                                                 is the next word
    stream        (T, N), (T, N)                 the same text in N columns; each batch goes on
                                                 where the last one ended

The same seed gives the same batches. They are on the CPU.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from zoo.catalog.libraries import is_of_library
from zoo.errors import ConfigError, needed
from zoo.harness.config import ModelConfig
from zoo.harness.default_configs import sample_for
from zoo.invocation import Inputs

# the subject of errors that a package is missing
DATA = "the comparison's data"
PIXEL_MEAN = torch.tensor((0.485, 0.456, 0.406), device="cpu").view(3, 1, 1)
PIXEL_DEVIATION = torch.tensor((0.229, 0.224, 0.225), device="cpu").view(3, 1, 1)


@dataclass(frozen=True)
class Batch:
    """A model's inputs and their targets."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """Returns the batch on a device."""
        return Batch(self.inputs.to(device), self.targets.to(device))

    def arguments(self, model: ModelConfig, state: Any = None) -> Inputs:
        """Returns the arguments of a model for this batch of its data."""
        if is_of_library(model.name):
            sample = sample_for(model.name, model.arguments)
            names = filter(None, (sample.argument, sample.labels))
            return dict.fromkeys(names, self.inputs) or (self.inputs,)
        if model.data == "stream":
            return self.inputs, state, self.targets
        return (self.inputs, self.targets) if model.data == "text" else (self.inputs,)


def batches(
    model: ModelConfig, count: int, seed: int, device: torch.device | str = "cpu"
) -> list[Batch]:
    """Returns `count` batches of a model's data, the same ones for the same seed.

    Raises:
        ConfigError: a package that holds the data is missing, or a size does not fit the data.
    """
    axes = 3 if model.data == "volume" else 1
    sizes = [model.size] * axes if isinstance(model.size, int) else model.size
    if len(sizes) != axes:
        raise ConfigError(
            f"{model.name}: the data {model.data} takes {axes} size(s); got {model.size!r}"
        )
    source = SOURCES[model.data](model, sizes, Generator().manual_seed(seed))
    return [batch.to(device) for batch in itertools.islice(source, count)]


def _photographs(model: ModelConfig, sizes: list[int], random: Generator) -> Iterator[Batch]:
    photographs = needed("sklearn.datasets", DATA, ConfigError).load_sample_images().images
    pixels = [torch.tensor(image).permute(2, 0, 1).float() / 255 for image in photographs]
    images = [(image - PIXEL_MEAN) / PIXEL_DEVIATION for image in pixels]
    while True:
        crops, labels = [], []
        for _ in range(model.batch_size):
            number = _draw(len(images), random)
            crop, quarter = _crop(images[number], random)
            crops.append(F.interpolate(crop[None], sizes * 2, mode="bilinear", antialias=True))
            labels.append(4 * number + quarter)
        targets = torch.tensor(labels) % _classes(model, "classes", 1000)
        yield Batch(_with_channels(model, torch.cat(crops)), targets)


def _crop(image: Tensor, random: Generator) -> tuple[Tensor, int]:
    """Draws a square from (3, H, W); also returns the quarter in which its center lies."""
    height, width = image.shape[1:]
    side = height // 4 + _draw(height // 4, random)
    top, left = _draw(height - side, random), _draw(width - side, random)
    below, right = 2 * top + side > height, 2 * left + side > width
    return image[:, top : top + side, left : left + side], 2 * below + right


def _digits(model: ModelConfig, sizes: list[int], random: Generator) -> Iterator[Batch]:
    digits = needed("sklearn.datasets", DATA, ConfigError).load_digits()
    images = torch.from_numpy(digits.images).float()[:, None]
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(digits.target).long() % _classes(model, "classes", 10)
    while True:
        chosen = torch.randint(len(images), (model.batch_size,), generator=random)
        enlarged = F.interpolate(images[chosen], sizes * 2, mode="bilinear")
        in_color = enlarged.expand(-1, 3, -1, -1).contiguous()
        yield Batch(_with_channels(model, in_color), labels[chosen])


def _volume(model: ModelConfig, sizes: list[int], random: Generator) -> Iterator[Batch]:
    nibabel = needed("nibabel", DATA, ConfigError)
    path = Path(nibabel.__file__).parent / "tests" / "data" / "example4d.nii.gz"
    voxels = torch.from_numpy(nibabel.load(path).get_fdata()[..., 0])
    scan = voxels.float().permute(2, 1, 0).contiguous()
    classes = _classes(model, "classes", 2)
    # class 0 is the dark background; the other classes have equal numbers of voxels
    bounds = torch.quantile(scan[scan > 0.25 * scan.std()], torch.linspace(0, 1, classes)[:-1])
    while True:
        boxes = [_box(scan, random) for _ in range(model.batch_size)]
        inputs = torch.cat([F.interpolate(box, sizes, mode="trilinear") for box in boxes])
        targets = torch.bucketize(inputs[:, 0].contiguous(), bounds)
        yield Batch(_with_channels(model, (inputs - scan.mean()) / scan.std()), targets)


def _box(scan: Tensor, random: Generator) -> Tensor:
    # the scan has only 24 slices, so a box has three quarters of each axis and is resampled
    for axis, size in enumerate(scan.shape):
        side = 3 * size // 4
        scan = scan.narrow(axis, _draw(size - side, random), side)
    return scan[None, None]


def _text(model: ModelConfig, sizes: list[int], random: Generator) -> Iterator[Batch]:
    (length,) = sizes
    words = _words(model, length + 1)
    while True:
        starts = torch.randint(len(words) - length, (model.batch_size, 1), generator=random)
        windows = words[starts + torch.arange(length + 1)]
        yield Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def _stream(model: ModelConfig, sizes: list[int], random: Generator) -> Iterator[Batch]:
    (length,) = sizes
    words = _words(model, (length + 1) * model.batch_size)
    rows = len(words) // model.batch_size
    columns = words[: rows * model.batch_size].view(model.batch_size, rows).t()
    for start in itertools.count(0, length):
        # columns are read downward, and from the top again after their end
        window = columns[torch.arange(start, start + length + 1) % rows]
        yield Batch(window[:-1].contiguous(), window[1:].contiguous())


SOURCES: dict[str, Callable[[ModelConfig, list[int], Generator], Iterator[Batch]]] = {
    "photographs": _photographs,
    "digits": _digits,
    "volume": _volume,
    "text": _text,
    "stream": _stream,
}


def _words(model: ModelConfig, count: int) -> Tensor:
    """Returns the text's words as numbers (words,); raises ConfigError if it has too few."""
    numbers = _word_numbers()
    if count > len(numbers):
        raise ConfigError(
            f"{model.name}: size {model.size} with batch size {model.batch_size} needs {count} "
            f"words; the text has {len(numbers)}. Make either smaller"
        )
    # words are numbered by falling frequency; the last in a small vocabulary is "any rarer word"
    return numbers.clamp(max=_classes(model, "vocabulary", len(numbers)) - 1)


@cache
def _word_numbers() -> Tensor:
    topics = import_module("pydoc_data.topics").topics
    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics.values()).lower())
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ranks[word] for word in words])


def _with_channels(model: ModelConfig, images: Tensor) -> Tensor:
    """Returns images or volumes with as many channels as another library's model takes."""
    if not is_of_library(model.name):
        return images
    channels = sample_for(model.name, model.arguments).shape[0]
    if images.shape[1] == channels:
        return images
    return images.mean(1, keepdim=True).repeat_interleave(channels, 1)


def _classes(model: ModelConfig, argument: str, default: int) -> int:
    """Returns the number of classes or words; another library's model may have other words."""
    if is_of_library(model.name):
        # one class alone would leave nothing to train
        return max(2, sample_for(model.name, model.arguments).classes)
    return model.arguments.get(argument, default)  # type: ignore[no-any-return]


def _draw(limit: int, random: Generator) -> int:
    return int(torch.randint(max(limit, 1), (), generator=random))
