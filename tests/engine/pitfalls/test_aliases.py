"""Kernels that write several views of one storage, or read what they write."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.training import Call, assert_exact


def add_to_halves(h: Tensor, _: Tensor) -> None:
    torch._foreach_add_([h[:2], h[2:]], 1.0)


def multiply_halves_in_turn(h: Tensor, _: Tensor) -> None:
    torch._foreach_mul_([h[:2], h[2:]], [h[2:], h[:2]])


def split(h: Tensor, _: Tensor) -> None:
    torch.split_copy(h * 1.5, 2, out=[h[:2], h[2:]])


def unbind(h: Tensor, _: Tensor) -> None:
    torch.unbind_copy(h.sin(), out=[h[3], h[2], h[1], h[0]])


def least_and_highest(h: Tensor, _: Tensor) -> None:
    torch.aminmax(h.sin(), dim=0, out=(h[0], h[1]))


def maximum_and_place(h: Tensor, _: Tensor) -> None:
    numbers = torch.empty(4, 6)
    torch.max(h.sin(), dim=0, out=(numbers[0, :3], numbers[:2].view(torch.int64)[1, :3]))
    h += numbers[0, :3]


def half_from_the_other(h: Tensor, _: Tensor) -> None:
    torch.mul(h[2:], 3.0, out=h[:2])


def write_two_and_read_them(h: Tensor, own: Tensor) -> None:
    torch._foreach_add_([h[:2], own[2:], own[:2]], [own[2:], h[:2], h[:2]])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "write",
    [
        add_to_halves,
        multiply_halves_in_turn,
        split,
        unbind,
        least_and_highest,
        maximum_and_place,
        half_from_the_other,
        write_two_and_read_them,
    ],
)
def test_arguments_of_one_kernel_that_share_memory(
    write: Callable[[Tensor, Tensor], None], depth: int
) -> None:
    """a kernel that writes several views of a tensor | exact | exact

    At depth 1 the memory is of code outside of the segment, deeper of a segment around it.
    """

    def program(call: Call) -> object:
        def inside(x: Tensor, h: Tensor) -> Tensor:
            own = h.cos()
            with torch.no_grad():
                write(h, own)
            return x * h * own

        def around(depth: int, x: Tensor, h: Tensor) -> Tensor:
            return call(around, depth - 1, x, h * 2) if depth else inside(x, h)

        x = torch.rand(4, 3, requires_grad=True)
        loss = around(depth, x, torch.rand(4, 3)).sum()
        loss.backward()
        return loss, x.grad

    assert_exact(program)
