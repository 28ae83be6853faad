"""Models as people write them, each with what a graph must get right."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Statistics, a mask, a skip, in-place writes and a norm in a row."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels, momentum=None)
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        y = self.drop(y) * self.scale
        y += x
        return F.relu_(y)


class Net(nn.Module):
    def __init__(self, channels: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, channels, 1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.fc = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Skips over the whole depth, two inputs, a keyword and a dict with a None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, weight: Tensor, *, scale: float = 1.0) -> dict[str, Tensor | None]:
        skips = []
        for conv in self.down:
            x = F.gelu(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.gelu(conv(torch.cat([x, skips.pop()], 1)))
        return {"logits": self.head(x) * weight * scale, "aux": None}


class Tagger(nn.Module):
    """An LSTM that takes a state or none and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2)
        self.head = nn.Linear(8, 5)

    def forward(
        self, tokens: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, state = self.lstm(self.embed(tokens), state)
        return self.head(outputs), state


class Reader(Net):
    """Reads a number out of a tensor before each block, to decide whether it runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if x.mean().item() < 1e9:
                x = block(x)
        return self.fc(x.mean((2, 3)))


class Skipper(Net):
    """Skips each block with some probability, as layer drop does, here in a part of its own."""

    class Blocks(nn.ModuleList):
        def __init__(self, blocks: nn.Sequential, rate: float) -> None:
            super().__init__(blocks)
            self.rate = rate

        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                if torch.rand([]) < self.rate:
                    continue
                x = block(x)
            return x

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rows = Skipper.Blocks(self.blocks, rate)
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rows(self.stem(x)).mean((2, 3)))


class Teacher(nn.Module):
    """Writes, where its forward ends, what segments before read: a queue, a moving average.

    As contrastive learning with a momentum teacher does.
    """

    def __init__(self, averages: str) -> None:
        super().__init__()
        self.averages = averages
        self.student, self.teacher = _encoder(), _encoder().requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, 4000))

    def forward(self, x: Tensor) -> Tensor:
        made = self.student(x)
        with torch.no_grad():
            wanted = self.teacher(x + 0.1)
            weights = (self.queue.T[:8] @ self.queue).softmax(1)
        loss = ((made @ self.queue.clone()) @ weights.T).logsumexp(1).mean()
        loss = loss + (made * wanted.tanh()).mean()
        with torch.no_grad():
            self.queue[:, : len(x)] = wanted.T
            self.update([*self.teacher.parameters()], [*self.student.parameters()])
        return loss

    def update(self, averages: list[nn.Parameter], parameters: list[nn.Parameter]) -> None:
        if self.averages == "list":
            torch._foreach_lerp_(averages, parameters, 0.1)
        else:
            for average, parameter in zip(averages, parameters, strict=True):
                average.lerp_(parameter, 0.1)


def _encoder() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))
    return nn.Sequential(*blocks)


class Ending(nn.Module):
    """Ends with a function of a layer's output."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))
