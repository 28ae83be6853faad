"""What the examples share: scikit-learn's 1,797 digits, a small network, equal to the last bit.

Stands in for your own data and model; nothing here knows of checkpointing.
"""

from collections.abc import Iterator, Mapping

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset


class Block(nn.Module):
    """Has statistics, a mask and a skip: what a careless recomputation gets wrong."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Classifier(nn.Module):
    """(N, 1, 8, 8) -> (N, 10)."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Shuffled(Sampler[int]):
    """Another order in each epoch, and the same one whenever that epoch is run."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.count, generator=generator).tolist())


def digits(count: int = 256) -> Dataset[tuple[Tensor, ...]]:
    """Returns images (1, 8, 8) in [0, 1] with their labels."""
    found = load_digits()
    images = torch.tensor(found.images[:count], dtype=torch.float32)[:, None] / 16
    return TensorDataset(images, torch.tensor(found.target[:count]))


def loader(count: int = 256, batch_size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    """Returns batches of digits."""
    # an iterator draws a seed as it is made: not from the stream that masks come from
    seeds = torch.Generator()
    return DataLoader(digits(count), batch_size, sampler=Shuffled(count), generator=seeds)


def report(runs: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Says whether trainings ended with the same weights, bit for bit; returns the exit code."""
    (first, expected), *others = runs.items()
    code = 0
    for name, found in others:
        unequal = [key for key, value in expected.items() if not torch.equal(value, found[key])]
        code |= bool(unequal)
        said = f"differs in {unequal[0]}" if unequal else f"bit for bit as {first}"
        print(f"{name}: {said} ({len(expected)} tensors)")
    return code
