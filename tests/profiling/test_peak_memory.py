"""The measured bytes are those of the tensors that were allocated, in the order they were."""

import pytest
import torch
from torch import nn

import zoo
from tests.profiling.models import KIB, Exponentials
from tests.training import Residuals, images, needs_numpy
from zoo.errors import ArgumentError
from zoo.profiling.peak_memory import (
    MemoryTrace,
    gradient_addresses,
    history_events,
    measure_step,
    resident_bytes,
    spending,
    trace,
)


def floats(kib):
    return torch.empty(kib * KIB // 4)


def test_peak_is_what_was_alive_at_once():
    def function():
        first = floats(100)
        second = floats(50)
        del first
        third = floats(30)
        return second, third

    assert trace(function).peak == 150 * KIB


def test_memory_that_runs_out_as_the_profiler_ends_is_the_error_raised(monkeypatch):
    end = torch.autograd.profiler._disable_profiler

    def run_out():
        end()
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(torch.autograd.profiler, "_disable_profiler", run_out)
    with pytest.raises(MemoryError, match="bad_alloc"):
        trace(lambda: floats(20))
    monkeypatch.undo()
    assert trace(lambda: floats(20)).peak == 20 * KIB


def test_only_what_outlives_the_callable_is_kept():
    held = []
    record = trace(lambda: (floats(70), held.append(floats(20))))
    assert record.peak == 90 * KIB
    assert sum(size for _, size in record.events) == 20 * KIB


def test_the_end_of_a_block_from_before_does_not_count_as_negative():
    held = [floats(100)]
    record = trace(lambda: (held.clear(), held.append(floats(10))))
    assert record.peak == 10 * KIB


def test_views_cost_nothing_and_copies_cost_their_size():
    source = floats(64)
    assert trace(lambda: source.view(2, -1)[1]).peak == 0
    assert trace(source.clone).peak == 64 * KIB


def test_two_traces_of_the_same_work_agree():
    def work():
        return floats(8).neg().exp()

    assert trace(work).peak == trace(work).peak == 16 * KIB


@pytest.mark.parametrize(
    ("events", "gradients", "peak"),
    [
        # an activation of 8, the gradient 1 of 6, the activation freed, the gradient 2 of 5
        pytest.param(((1, 8), (2, 6), (1, -8), (3, 5)), [2, 3], 8, id="from when they exist"),
        pytest.param(((1, 8), (2, 6), (1, -8), (3, 5)), [], 14, id="no gradients"),
        pytest.param(((7, 9), (7, -9), (7, 4), (8, 2)), [7], 9, id="the last at its address"),
        pytest.param(((7, 9), (7, -9)), [7], 9, id="one that was freed is none"),
    ],
)
def test_gradients_that_outlive_a_step_are_not_its_activations(events, gradients, peak):
    record = MemoryTrace(events)
    assert record.activation_peak(gradients) == peak
    assert record.activation_peak() == record.peak


def training_step(model, optimizer):
    def step():
        optimizer.zero_grad(set_to_none=True)
        model().backward(gradient=seed)
        optimizer.step()

    seed = torch.ones_like(model.weight)
    step()
    return step


@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_steps_activations_are_the_saved_results_and_the_flowing_gradients(count):
    model = Exponentials(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    memory = measure_step(training_step(model, optimizer), model, optimizer, [])
    # one result per exp, and in the backward the gradient that flows into one and out of it; the
    # last one that flows out is the parameter's own, which is no activation
    assert memory.activation_peak == (count + min(count - 1, 2)) * 16 * KIB
    assert memory.resident.gradients == memory.resident.optimizer == 16 * KIB
    assert memory.resident.buffers == 2 * KIB
    assert memory.peak == (2 + count + min(count, 2)) * 16 * KIB + 2 * KIB


def test_each_storage_is_counted_once_and_in_its_first_place():
    model = nn.Linear(32, 32, bias=False)
    tied = nn.Linear(32, 32, bias=False)
    tied.weight = model.weight
    both = nn.ModuleList([model, tied])
    batch = torch.zeros(8, 32)
    resident = resident_bytes(both, inputs=[batch, batch[2:], model.weight])
    assert resident.parameters == 4 * KIB
    assert resident.inputs == KIB


def test_gradient_addresses_are_those_of_the_storages():
    model = nn.Linear(3, 3)
    assert gradient_addresses(model) == frozenset()
    model(torch.ones(1, 3)).sum().backward()
    assert len(gradient_addresses(model)) == 2


def test_a_history_counts_requested_frees_and_ignores_segments():
    entries = [
        {"action": "segment_alloc", "addr": 0, "size": 2048},
        {"action": "alloc", "addr": 0, "size": 512},
        {"action": "alloc", "addr": 512, "size": 1024},
        {"action": "free_requested", "addr": 0, "size": 512},
        {"action": "free_completed", "addr": 0, "size": 512},
        {"action": "free_requested", "addr": 9999, "size": 4096},
    ]
    record = MemoryTrace.within(history_events(entries))
    assert record.events == ((0, 512), (512, 1024), (0, -512))
    assert record.peak == 1536


def test_other_devices_are_refused():
    with pytest.raises(
        ArgumentError, match="on devices that count it; got meta, whose peak neither"
    ):
        trace(lambda: None, "meta")


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
def test_a_plan_that_is_made_inside_is_made_from_estimates_and_no_number_is_wrong(monkeypatch):
    """Its kernels would be measured by the same profiler."""
    monkeypatch.setattr("zoo.profiling.kernel_costs._measured", {})
    model = zoo.checkpoint(Residuals(), memory_budget=1.0)
    with spending(), pytest.raises(ArgumentError, match="run that step before"):
        zoo.plan(model, images(), memory_budget=1.0)
    for _ in range(2):
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
