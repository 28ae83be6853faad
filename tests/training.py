"""What the tests share: train a model for some steps and note every bit that training leaves."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.api.track import CopiedStep, mean_of
from zoo.chain import Chain, Steps
from zoo.invocation import Invocation

Record = dict[str, Tensor]
# `make oldest` and `make newest` run where `pip install .` brought no extras
needs_numpy = pytest.mark.skipif(
    importlib.util.find_spec("numpy") is None, reason="planning for a budget needs NumPy"
)


class Residuals(Chain):
    """A small chain with all that recomputation can get wrong: statistics, masks, skips, views."""

    def __init__(self, blocks: int = 3, channels: int = 4, rate: float = 0.3) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(channels, momentum=None if block % 2 else 0.1) for block in range(blocks)
        )
        self.dropout = nn.Dropout(rate)
        self.fc = nn.Linear(channels, 5)

    def steps(self) -> Steps:
        body = [
            [
                functools.partial(self.convolve, block),
                functools.partial(self.normalize, block),
                self.drop_and_add,
            ]
            for block in range(len(self.convs))
        ]
        return [*body, self.classify]

    def convolve(self, block: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.convs[block](x), x

    def normalize(self, block: int, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu_(self.norms[block](y)), x

    def drop_and_add(self, y: Tensor, x: Tensor) -> Tensor:
        return self.dropout(y) + x

    def classify(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def images(count: int = 4, channels: int = 4, size: int = 6) -> Tensor:
    """Batches whose channels and samples differ in scale, so that wrong statistics show."""
    scale = torch.tensor([1.0, 10.0, 100.0, 0.1])[:channels].view(1, -1, 1, 1)
    shift = torch.arange(count, dtype=torch.float32).view(-1, 1, 1, 1)
    return torch.randn(count, channels, size, size) * scale + shift


def train(
    model: nn.Module,
    inputs: Callable[[], Sequence[Any]],
    steps: int = 3,
    forward: Callable[..., Any] | None = None,
    seed: int = 0,
) -> Record:
    """Trains and records, per step: output, loss, all gradients (inputs' too), buffers, RNG."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=0.05,
        momentum=0.9,
        foreach=False,
    )
    record: Record = {}
    for step in range(steps):
        optimizer.zero_grad()
        batch = inputs()
        output = (forward or model)(*batch)
        loss = output.float().square().mean()
        loss.backward()
        record |= {f"{step} output": output.detach().clone(), f"{step} loss": loss.detach().clone()}
        record |= everything(model, f"{step} ")
        for number, value in enumerate(batch):
            if isinstance(value, Tensor) and value.grad is not None:
                record[f"{step} input {number}"] = value.grad.clone()
        optimizer.step()
    return record | everything(model, "end ")


def generator(seed: int = 0) -> torch.Generator:
    """Returns a random stream for the device that tests run on."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def real_peak(
    model: nn.Module, inputs: Any, make: Any, loss: Any = None, *, plan: Any = None
) -> int:
    """The allocator's peak bytes in a steady training step of a copy of a model."""
    step = CopiedStep(model, Invocation.of(inputs), make, loss or mean_of, fake=False)
    return step.peak(plan)


def everything(model: nn.Module, prefix: str = "") -> Record:
    """Copies parameters, gradients, buffers and the states of the generators."""
    record = {f"{prefix}parameter {k}": v.detach().clone() for k, v in model.named_parameters()}
    record |= {
        f"{prefix}gradient {k}": v.grad.clone()
        for k, v in model.named_parameters()
        if v.grad is not None
    }
    record |= {f"{prefix}buffer {k}": v.clone() for k, v in model.named_buffers()}
    return record | {f"{prefix}{key}": value for key, value in _streams().items()}


def _streams() -> Record:
    device = torch.get_default_device()
    found = {"rng": torch.get_rng_state()}
    if device.type != "cpu":
        found[f"rng of {device}"] = torch.get_device_module(device).get_rng_state()
    return found


def assert_same(actual: Record, expected: Record) -> None:
    """Asserts that two records agree in every bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
