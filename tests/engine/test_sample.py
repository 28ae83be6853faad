"""What reading a function does not show is told by the numbers that it saved."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.engine.pitfalls.program import net, rows
from zoo.engine.sample import same_numbers, sample

hidden: dict[str, Any] = {}


class Slotted:
    """Keeps a number where no engine looks."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1.0


class OfSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots, self.inner = Slotted(), net(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.slots.number += 1
        return (self.inner(x) * self.slots.number).sin()


class OfTheTable(OfSlots):
    """Finds its state by name in a table of the interpreter."""

    def forward(self, x: Tensor) -> Tensor:
        table = vars(__import__(__name__, fromlist=["hidden"]))["hid" + "den"]
        table["count"] = table.get("count", 0) + 1
        return (self.inner(x) * table["count"]).sin()


@pytest.mark.parametrize("model", [OfSlots, OfTheTable])
def test_a_second_run_with_other_numbers_is_refused(model: type[nn.Module]) -> None:
    (x,) = rows()
    part = model()
    output = zoo.recompute(part, x)
    with pytest.raises(zoo.RecomputeError, match="computed other numbers than the first"):
        output.sum().backward()
    assert all(parameter.grad is None for parameter in part.parameters())


def test_nan_is_equal_to_nan_and_to_nothing_else() -> None:
    assert same_numbers([math.nan, 1.0], [math.nan, 1.0])
    assert not same_numbers([math.nan, 1.0], [0.0, 1.0])
    assert same_numbers(None, [1.0])


def test_a_sample_is_spread_over_a_tensor_in_any_order_of_axes() -> None:
    x = torch.arange(320.0, requires_grad=True) * 1
    expected = [20.0 * number for number in range(16)]
    assert sample(x) == sample(x.view(16, 20)) == expected
    assert sample(x.view(16, 20).t()) == expected
    assert sample(x[:5]) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.detach, lambda x: x.expand(3, 4), lambda x: x[:, ::2], lambda x: x.cfloat()],
)
def test_what_does_not_tell_is_not_sampled(change: Any) -> None:
    assert sample(change(torch.rand(1, 4, requires_grad=True) * 1)) is None
