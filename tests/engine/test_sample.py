"""What reading a function does not show is told by the numbers that it saved."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.engine.pitfalls.program import net, rows
from zoo.engine.sample import same_numbers, same_values, sample

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


def test_equal_values_may_be_nan() -> None:
    x = torch.tensor([math.nan, 1.0])
    assert same_values(x, x.clone())
    assert not same_values(x, torch.ones(2))
    assert not same_values(x, x[:1])
    assert not same_values(torch.ones(2).int(), torch.zeros(2).int())


def test_a_nan_may_be_written_again() -> None:
    """In-place ReLU at the start of a segment leaves it."""
    x = torch.tensor([math.nan, 1.0, -1.0])
    weight = torch.ones(3, requires_grad=True)
    zoo.recompute(lambda x: torch.relu_(x) * weight, x).sum().backward()
    assert weight.grad is not None
    assert weight.grad[1:].tolist() == [1.0, 0.0]


def test_a_sample_is_spread_over_a_tensor_in_any_order_of_axes() -> None:
    x = torch.arange(320.0, requires_grad=True) * 1
    expected = [20.0 * number for number in range(16)]
    assert sample(x) == sample(x.view(16, 20)) == expected
    assert sample(x.view(16, 20).t()) == expected
    assert sample(x[:5]) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_of_a_tensor_with_gaps_its_longest_axis_is_sampled() -> None:
    x = torch.arange(320.0, requires_grad=True) * 1
    assert sample(x.view(16, 20)[:, ::2]) == [20.0 * number for number in range(16)]
    assert sample(x[:2].expand(9, 2)) == [0.0, 1.0]
    assert sample(x[:1].expand(9)) == [0.0]


@pytest.mark.parametrize(
    "change",
    [lambda x: x.cfloat(), lambda x: x[:0], lambda x: x.to_sparse(), lambda x: x.to("meta")],
)
def test_what_does_not_tell_is_not_sampled(change: Any) -> None:
    assert sample(change(torch.rand(1, 4, requires_grad=True) * 1)) is None


class Masked(nn.Module):
    """Ends with a product with what has no history: nothing else shows what it was."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.slots, self.inner, self.make = Slotted(), nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Tensor:
        self.slots.number += 1
        return self.inner(x) * self.make(int(self.slots.number))


def of_numbers(number: int) -> Tensor:
    return torch.full((4,), float(number))


def of_bits(number: int) -> Tensor:
    return torch.arange(4) % number == 0


def of_a_view(number: int) -> Tensor:
    return (torch.arange(8.0) * number)[::2]


def of_a_common_number(number: int) -> Tensor:
    return torch.tensor(float(number)).expand(6, 4)


@pytest.mark.parametrize("make", [of_numbers, of_bits, of_a_view, of_a_common_number])
def test_a_saved_tensor_without_history_is_sampled(make: Callable[[int], Tensor]) -> None:
    output = zoo.recompute(Masked(make), *rows())
    with pytest.raises(zoo.RecomputeError, match="computed other numbers than the first"):
        output.sum().backward()


def test_a_mask_of_an_input_that_is_emptied_after_it_is_sampled() -> None:
    """Emptied again it is the same, so that only what was read before tells."""
    weight, x = torch.rand(4, requires_grad=True), torch.rand(4) + 1

    def function(x: Tensor) -> Tensor:
        mask = x > 0
        x.zero_()
        return weight * mask

    output = zoo.recompute(function, x)
    with pytest.raises(zoo.RecomputeError, match="computed other numbers than the first"):
        output.sum().backward()


def test_what_an_operation_makes_for_itself_is_not_sampled() -> None:
    """It may be written after it was saved, as RReLU's noise is, or in parts never."""
    found: list[Any] = []

    class Hook:
        def pack(self, tensor: Tensor) -> Tensor:
            references = sys.getrefcount(tensor)
            found.append(sample(tensor, references))
            return tensor

    x = torch.rand(6, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Hook().pack, lambda tensor: tensor):
        nn.functional.rrelu(x, training=True)
        assert found[0] is None
        (x * torch.ones(4)).sum()
        assert found[-1] == [1.0] * 4
