"""Slices of memory of which other parts are written between the forward and the backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.training import assert_same, plain

ROWS, WIDTH = 4096, 16
Part = Callable[[Tensor], Tensor]
# what the forward reads of a cache, (ROWS, WIDTH)
READS: dict[str, Part] = {
    "nothing": lambda cache: cache[:0],
    "few rows": lambda cache: cache[:8],
    "many rows": lambda cache: cache[:2048],
    "columns": lambda cache: cache[:, :7],
    "each third row": lambda cache: cache[:3000:3],
    "a row for all": lambda cache: cache[5].expand(64, WIDTH),
    "a slice turned": lambda cache: cache[:100].t(),
    "windows": lambda cache: cache[:200, :8].unfold(0, 4, 1),
    "windows of all rows": lambda cache: cache[:3000].unfold(0, 4, 1),
}
# writes that leave all of these as they are
WRITES: dict[str, Callable[[Tensor], object]] = {
    "a view": lambda cache: cache[3000:3064, 8:].fill_(1),
    "an index": lambda cache: cache.index_copy_(
        0, torch.tensor([1, 4000]), cache[[1, 4000]] + PAST
    ),
    "data": lambda cache: cache.data[3000:, 8:].fill_(1),
    "NumPy": lambda cache: cache.detach().numpy()[3000:, 8:].fill(1),
    "the same numbers": lambda cache: cache.copy_(cache.clone()),
}
PAST = torch.tensor([[0.0], [1.0]]) * (torch.arange(WIDTH) > 7)


def gradient(call: Callable[..., Tensor], read: Part, write: Callable[[Tensor], object]) -> Tensor:
    """Returns a gradient of a function that reads a part of what is written before the backward."""
    torch.manual_seed(0)
    cache, x = torch.rand(ROWS, WIDTH), torch.rand(64, WIDTH, requires_grad=True)
    # a sum saves nothing, so that autograd itself refuses no write
    loss = call(lambda x: (torch.cat([read(cache).reshape(-1), x.sin().reshape(-1)]) + 1).sin(), x)
    with torch.no_grad():
        write(cache)
    loss.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_bytes_that_nobody_wrote(read: str, write: str) -> None:
    expected = gradient(plain, READS[read], WRITES[write])
    assert_same(gradient(zoo.recompute, READS[read], WRITES[write]), expected)


@pytest.mark.parametrize("read", [read for read in READS if read != "nothing"])
@pytest.mark.parametrize("write", ["by an operator", "by data"])
def test_one_number_of_a_slice_that_is_written_is_refused(read: str, write: str) -> None:
    def one(cache: Tensor) -> None:
        # another part, which counts a version in any case
        cache[-1].add_(1)
        READS[read](cache.data if write == "by data" else cache)[-1:, -1:].add_(1)

    with pytest.raises(zoo.RecomputeError, match="changed in place after it was used"):
        gradient(zoo.recompute, READS[read], one)


def test_a_slice_that_cannot_be_read_at_once_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as on an accelerator, whose memory is not read for this
    monkeypatch.setattr("zoo.engine.storages.digest", lambda tensor: None)
    with pytest.raises(zoo.RecomputeError, match="or other bytes of the memory that it is a slice"):
        gradient(zoo.recompute, READS["many rows"], WRITES["a view"])
    # there is nothing that could have been written
    gradient(zoo.recompute, READS["nothing"], WRITES["a view"])


class WritesWhatItSaved(torch.autograd.Function):
    """Its backward writes, unseen, what its forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        result = gradient * y
        y.data.mul_(2)
        return result


def test_a_copy_that_is_written_by_data_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(
            WritesWhatItSaved.apply(x).sum() * x.sum(), x, create_graph=True
        )
        return first.sin()

    x = torch.rand(4, requires_grad=True)
    with pytest.raises(zoo.RecomputeError, match="changed in place after it was"):
        zoo.recompute(body, x).sum().backward()


@pytest.mark.parametrize("restores", ["copies back", "subtracts"])
@pytest.mark.parametrize("kind", ["grad", "views", "vjp", "hessian"])
def test_an_argument_that_is_written_by_data_and_restored(kind: str, restores: str) -> None:
    """As a check of gradients by differences does, in a segment around a graph of gradients."""

    def function(x: Tensor, v: Tensor) -> Tensor:
        if kind == "vjp":
            return torch.autograd.functional.vjp(lambda x: x * x, x, v, create_graph=True)[1]
        if kind == "hessian":
            found: Tensor = torch.autograd.functional.hessian(
                lambda x: (x**3 * v).sum(), x, create_graph=True
            )
            return found
        y = x.view_as(x) * x.view_as(x) if kind == "views" else x * x
        return torch.autograd.grad(y, x, v, create_graph=True)[0]

    def body() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x = torch.rand(2, dtype=torch.double, requires_grad=True)
        v = torch.tensor([1.0, 0.5], dtype=torch.double, requires_grad=True)
        y = function(x, v)
        for part in (x.data, v.data):
            before = part.clone()
            part.add_(1e-6)
            function(x, v)
            part.copy_(before) if restores == "copies back" else part.sub_(1e-6)
        return torch.autograd.grad(y.sum(), (x, v))

    assert_same(zoo.recompute(body), body())
