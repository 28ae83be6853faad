"""A recorder changes nothing, holds nothing, and never breaks a forward."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.tracing.runs import MODELS, Deciding, InPlace, calls_in, names_in, traced
from tests.training import Counting
from zoo._torch import FakeTensorMode
from zoo.errors import ArgumentError
from zoo.invocation import Invocation
from zoo.profiling.step_recorder import StepRecorder
from zoo.profiling.tensor_spec import KernelSpec


@pytest.mark.parametrize("name", ["net", "lstm", "in place", "custom"])
def test_a_traced_forward_is_the_plain_one(name: str) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model, given = build(), inputs()
    found = []
    for around in (StepRecorder(model), torch.enable_grad()):
        model.zero_grad()
        twin = copy.deepcopy(model)
        recorder = StepRecorder(twin) if isinstance(around, StepRecorder) else around
        torch.manual_seed(1)
        with recorder:
            output = given.on(twin)
        output = output if isinstance(output, Tensor) else output[0]
        output.square().sum().backward()
        found.append([output, *(p.grad for p in twin.parameters()), *twin.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_no_tensor_is_kept_alive() -> None:
    model, x = InPlace(), torch.rand(5, 6)
    kept: list[weakref.ref[Tensor]] = []
    model.first.register_forward_hook(lambda *given: kept.append(weakref.ref(given[2])))
    recorder = StepRecorder(model)
    with recorder:
        output = model(x)
    kept += [weakref.ref(output), weakref.ref(x)]
    gc.disable()
    try:
        del output, x
        assert [reference() for reference in kept] == [None] * 3
    finally:
        gc.enable()
    assert calls_in(recorder.events)


def test_a_graph_pickles() -> None:
    model = Deciding()
    events = traced(model, Invocation((torch.rand(4, 6),)))
    assert pickle.loads(pickle.dumps(events)) == events


def test_calls_are_names_and_paths() -> None:
    events = traced(nn.Sequential(nn.Linear(6, 3)), Invocation((torch.rand(4, 6),)))
    transposed, product = calls_in(events)
    assert (transposed.verb, transposed.index, transposed.parameters) == ("linear", 0, {0})
    assert (product.verb, product.index, product.parameters) == ("linear", 1, {1})
    assert product.within == ("", "0")
    assert product.shapes == ((4, 3),)
    assert events.model_operators == 2


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_is_not_named_by_the_backend_of_a_device() -> None:
    x = torch.rand(1, 2, 4, 8, requires_grad=True)
    calls = calls_in(traced(Attends(), Invocation((x,))))
    assert {call.verb for call in calls} == {"scaled_dot_product_attention"}


class Views(nn.Module):
    """Takes the same views again after a kernel that read or wrote one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, found = self.linear(x), torch.ones(4, 4)
        # often enough for a frame to lie where another did
        for _ in range(20):
            torch.mul(h.detach(), 2, out=found)
        for _ in range(20):
            h.t().mul_(2)
        return h * found


def test_views_that_are_taken_in_a_function_mode_are_known() -> None:
    events = traced(Views(), Invocation((torch.rand(4, 6),)))
    with FakeTensorMode(), Counting():
        again = traced(Views(), Invocation((torch.rand(4, 6),)))
    assert names_in(again) == names_in(events)


def test_a_number_that_is_read_is_no_operator_of_the_path() -> None:
    model = Deciding()
    events = traced(model, Invocation((torch.rand(4, 6),)))
    assert "aten.gt.Scalar" in names_in(events)
    assert "aten._local_scalar_dense.default" not in names_in(events)
    assert all(events.operators[call.index].operator == call.operator for call in calls_in(events))


def test_other_threads_are_not_traced() -> None:
    model, x = nn.Linear(6, 6), torch.rand(4, 6)
    recorder = StepRecorder(model)
    with recorder:
        thread = threading.Thread(target=lambda: model(x))
        thread.start()
        thread.join()
    assert recorder.events.operators == []


def test_an_error_of_the_recorder_never_reaches_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such kernel")

    model, x = nn.Linear(6, 6), torch.rand(4, 6)
    expected = model(x)
    monkeypatch.setattr(KernelSpec, "of", fails)
    recorder = StepRecorder(model)
    with recorder:
        output = model(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    with pytest.raises(ArgumentError, match=r"Linear cannot be planned for .*: no such kernel\)"):
        _ = recorder.events
