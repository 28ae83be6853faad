"""Writes that torch does not see are noticed before a gradient is used."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import zoo
from tests.training import Call, assert_exact
from zoo.engine.unseen_writes import (
    fingerprint,
    new_mark,
    read,
    sample,
    without_fingerprints,
    write_mark,
)


def by_numpy(tensor: Tensor) -> None:
    """Writes through the address: what goes through `detach` is followed."""
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    numpy.frombuffer(memory, numpy.float32)[...] *= 2


def by_address(tensor: Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes)


FOREIGN = [by_numpy, by_address]


def written(write: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    """Returns a function that has foreign code write what it made, before others read it."""

    def function(x: Tensor) -> Tensor:
        y = x * 0.5
        write(y)
        return y.exp().sin()

    return function


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("write", FOREIGN)
def test_a_write_by_foreign_code_is_refused(write: Callable[[Tensor], None], size: int) -> None:
    weight, x = torch.rand(size).requires_grad_(), torch.rand(size).requires_grad_()
    loss = (zoo.recompute(written(write), x) * weight).sum()
    with pytest.raises(zoo.RecomputeError, match="has other numbers than in the forward: code"):
        loss.backward()
    assert x.grad is None


def test_a_write_of_a_weight_is_refused_where_its_activations_are_channels_last() -> None:
    layer = torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    x = torch.rand(2, 4, 5, 5).to(memory_format=torch.channels_last)
    loss = zoo.recompute(lambda: layer(x).exp().sin()).sum()
    layer.weight.data.mul_(2)
    with pytest.raises(zoo.RecomputeError, match="has other numbers than in the forward: code"):
        loss.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda image: image.to(memory_format=torch.channels_last),
        lambda image: image.transpose(1, 3),
        # as many numbers as lie from its first to its last one
        lambda image: image[0, 0, :, :1].expand(4, 3),
        lambda image: image.chunk(2, 3)[0],
        lambda image: image[..., 0],
        lambda image: image[1:, ::2, 1:3, 2:],
    ],
)
def test_the_fingerprint_of_any_view_tells_its_first_and_last_number(
    view: Callable[[Tensor], Tensor],
) -> None:
    image = torch.rand(2, 3, 4, 5, requires_grad=True)
    part = view(image)
    memory = part.detach()
    for at in (0, -1):
        before = fingerprint(part)
        assert before is not None
        number = memory.select(0, at)[(at,) * (memory.dim() - 1)]
        number.add_(1)
        assert fingerprint(part) != before


@pytest.mark.parametrize("write", FOREIGN)
def test_a_write_inside_of_a_nested_segment_is_refused(write: Callable[[Tensor], None]) -> None:
    x = torch.rand(5).requires_grad_()
    loss = zoo.recompute(lambda x: zoo.recompute(written(write), x.sin()).cos(), x).sum()
    with pytest.raises(zoo.RecomputeError, match="has other numbers than in the forward"):
        loss.backward()
    assert x.grad is None


@pytest.mark.parametrize("write", FOREIGN)
def test_a_write_after_a_tensor_was_saved_is_refused(write: Callable[[Tensor], None]) -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        write(y)
        kept.append(y)
        return y * 2

    x = torch.rand(5).requires_grad_()
    loss = zoo.recompute(function, x).sum()
    with pytest.raises(zoo.RecomputeError, match="has other numbers than in the forward"):
        loss.backward()


@pytest.mark.parametrize("size", [1, 3, 1000, 5000])
def test_a_mark_is_not_what_the_memory_held(size: int) -> None:
    storage = torch.full((size,), 2.0).untyped_storage()
    found = {sample(storage)}
    for _ in range(2):
        write_mark(storage, new_mark())
        found.add(sample(storage))
    assert len(found) == 3


def test_without_fingerprints_nothing_is_noticed() -> None:
    """`verify`, which compares every bit, asks for that; the numbers are those of the kernels."""
    x = torch.rand(5).requires_grad_()
    with without_fingerprints():
        loss = zoo.recompute(written(by_numpy), x).sum()
    loss.backward()
    found, x.grad = x.grad, None
    written(lambda y: None)(x).sum().backward()
    assert torch.equal(found, x.grad)
    with pytest.raises(zoo.RecomputeError, match="has other numbers"):
        zoo.recompute(written(by_numpy), x).sum().backward()


@pytest.mark.parametrize("write", FOREIGN)
def test_a_write_into_memory_without_content_is_exact(write: Callable[[Tensor], None]) -> None:
    """What NumPy fills is kept, as it was born empty."""

    def program(call: Call) -> Any:
        x = torch.rand(5).requires_grad_()

        def function(x: Tensor) -> Tensor:
            table = torch.zeros(5)
            table.numpy()[...] = 1.5
            write(table)
            return (x * table).sin().exp()

        call(function, x).sum().backward()
        return x.grad

    assert_exact(program)


def test_not_a_number_is_equal_to_itself() -> None:
    def program(call: Call) -> Any:
        x = torch.tensor([1.0, -1.0, math.inf, math.nan]).requires_grad_()
        call(lambda x: (x.log() - x).exp().sin(), x).sum().backward()
        return x.grad

    assert_exact(program)


def test_a_fingerprint_tells_a_change_of_a_whole_tensor() -> None:
    x = torch.rand(1000).requires_grad_() * 1
    assert fingerprint(x) == read(x.clone())
    assert fingerprint(x.view(10, 100)) == fingerprint(x.view(10, 100).t()) == read(x)
    assert fingerprint(x) != read(x + 1)
    assert fingerprint(x[:3]) != read(x[1:4])
    assert fingerprint(x * math.nan) == read(x * math.nan)
    # each end counts
    for place in (0, -1):
        other = x.detach().clone()
        other[place] += 1
        assert fingerprint(x) != read(other)


def test_a_write_that_counts_as_a_version_is_exact() -> None:
    """As torch asks of extensions; what they wrote is kept as it is."""

    def program(call: Call) -> Any:
        x = torch.rand(5).requires_grad_()

        def function(x: Tensor) -> Tensor:
            y = x * 0.5
            by_numpy(y)
            torch.autograd.graph.increment_version(y)
            return y.exp().sin()

        call(function, x).sum().backward()
        return x.grad

    assert_exact(program)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.detach(), lambda x: x.to("meta")],
)
def test_what_does_not_tell_has_no_fingerprint(change: Callable[[Tensor], Tensor]) -> None:
    assert fingerprint(change(torch.rand(3, 4).requires_grad_() * 1)) is None


@pytest.mark.parametrize("size", [4, 5000])
def test_zeros_that_take_no_memory_are_not_read(size: int) -> None:
    def program(call: Call) -> Any:
        weight = torch.rand(size, requires_grad=True)

        def function(x: Tensor) -> Tensor:
            zeros = torch._efficientzerotensor(size) * weight
            assert read(zeros) == b""
            return (zeros * weight + x * weight).exp()

        call(function, torch.rand(size)).sum().backward()
        return weight.grad

    assert_exact(program)
