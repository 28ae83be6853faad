"""A function runs once: what cannot be had a second time, and what happens while it is replayed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import WAYS, Call, Way, assert_exact, plain, rows


class Outside(nn.Module):
    """Scales by numbers that nobody can seed."""

    def __init__(self, numbers: Callable[[], list[int]]) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(4, 4), numbers
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.numbers())
        return torch.tanh(self.linear(x) * torch.tensor(self.seen[-1]) / 256)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_the_outside_are_asked_for_once(way: Way) -> None:
    """The gradient is that of the numbers seen."""

    def trained(call: Call, numbers: Callable[[], list[int]]) -> Any:
        torch.manual_seed(0)
        model, (x,) = Outside(numbers), rows()
        way(call, model, x).square().sum().backward()
        assert len(model.seen) == 1
        return model.seen[0], [x.grad, model.linear.weight.grad, model.linear.bias.grad]

    seen, found = trained(zoo.recompute, lambda: [*os.urandom(4)])
    _, expected = trained(plain, lambda: seen)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_read_and_written_once(way: Way, tmp_path: Path) -> None:
    """files read or written | twice | once

    A stream of data, and a log.
    """
    data, log = tmp_path / "data", tmp_path / "log"
    data.write_bytes(bytes(range(1, 9)))

    def program(call: Call) -> Any:
        model, (x,) = nn.Module(), rows()
        with data.open("rb") as file, log.open("w") as lines:

            def forward(x: Tensor) -> Tensor:
                scale = file.read(1)[0]
                lines.write(f"{scale}\n")
                return (x * scale).sin().exp()

            model.forward = forward  # type: ignore[assignment]
            for _ in range(3):
                way(call, model, x).sum().backward()
        return x.grad, log.read_text()

    assert_exact(program)


def test_a_segment_that_runs_inside_of_a_backward() -> None:
    """A hook of a gradient that runs a segment of its own, with a backward, between replays."""

    def program(call: Call) -> Any:
        (x,), other, calls = rows(), torch.rand(3).requires_grad_(), [0]

        def inner(x: Tensor) -> Tensor:
            calls[0] += 1
            return x.exp().sin()

        def hook(gradient: Tensor) -> None:
            with torch.enable_grad():
                call(inner, other).sum().backward()

        def function(x: Tensor) -> Tensor:
            y = x.sin()
            y.register_hook(hook)
            return y.exp().sin()

        call(lambda x: call(function, x).tanh(), x).sum().backward()
        return x.grad, other.grad, calls

    assert_exact(program)
