"""What the tests of the integrations train: statistics, masks and batches in one order."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Network(nn.Module):
    """(N, 8) -> (N, 4): has statistics and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block() for _ in range(4)))
        self.head = nn.Linear(8, 4)

    @staticmethod
    def block() -> nn.Sequential:
        layers = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 8)
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def data() -> DataLoader[tuple[Tensor, ...]]:
    """Returns four batches of 256, the same ones in each epoch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1024, 8, generator=generator)
    labels = torch.randint(4, (1024,), generator=generator)
    # an iterator draws a seed as it is made: not from the stream that masks come from
    return DataLoader(TensorDataset(images, labels), 256, generator=torch.Generator())


def same(one: nn.Module, other: nn.Module) -> bool:
    """Returns whether two models have the same weights and buffers, bit for bit."""
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
