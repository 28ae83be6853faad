"""The peak of a block is what it allocated at once, above what was there, on each device."""

import pytest
import torch

import zoo
from tests.training import Residuals, images, needs_numpy
from zoo.errors import ArgumentError
from zoo.profiling.allocator_events import MemoryTrace, trace
from zoo.profiling.block_peak import spending

KIB = 1024


def floats(kib):
    return torch.empty(kib * KIB // 4)


def test_the_peak_is_what_was_there_at_once():
    with spending() as spent:
        first = floats(100)
        second = floats(50)
        del first
        third = floats(30)
    assert spent.peaks == {"cpu": 150 * KIB}
    assert spent.largest == {"cpu": [100 * KIB, 50 * KIB]}
    del second, third


def test_what_is_freed_of_earlier_blocks_does_not_count():
    with spending():  # the profiler tells of the end of what it saw begin
        held = [floats(100)]
    with spending("cpu") as spent:
        held.clear()
        held.append(floats(110))
    assert spent.peak == 110 * KIB


def test_nothing_is_nothing():
    with spending() as spent:
        pass
    assert (spent.peak, spent.largest["cpu"]) == (0, [])


def test_it_agrees_with_the_trace_of_a_step():
    model, images = torch.nn.Conv2d(3, 8, 3), torch.rand(2, 3, 32, 32)

    def step():
        model.zero_grad()
        model(images).square().sum().backward()

    step()
    with spending() as spent:
        step()
    assert spent.peak == trace(step).peak > 0


def test_a_block_at_an_address_used_twice_is_the_later_one():
    record = MemoryTrace(((1, 8), (1, -8), (1, 4), (2, 6)))
    assert (record.peak, record.blocks_at_peak()) == (10, [6, 4])


def test_an_exception_ends_the_recording():
    with pytest.raises(KeyError), spending():
        raise KeyError
    with spending() as spent:
        floats(1)
    assert spent.peak == KIB


def test_one_inside_of_another_is_refused():
    with spending(), pytest.raises(ArgumentError, match="at work already"), spending():
        pass


@needs_numpy
def test_a_plan_that_is_made_inside_is_refused_and_not_a_wrong_number(monkeypatch):
    """Its kernels are measured by the same profiler."""
    monkeypatch.setattr("zoo.profiling.kernel_costs._known", {})
    model = zoo.checkpoint(Residuals(), memory_budget=1.0)
    with spending(), pytest.raises(ArgumentError, match="run that step before"):
        model(images())
    model(images()).sum().backward()
    with spending() as spent:
        model(images()).sum().backward()
    assert spent.peak > images().nbytes


def test_another_kind_of_device_is_refused():
    with pytest.raises(
        ArgumentError, match="on devices that count it; got meta, whose peak neither"
    ):
        spending("meta").__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no cuda here"):
        spending("cuda:0").__enter__()
