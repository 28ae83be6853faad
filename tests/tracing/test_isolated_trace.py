"""Tracing ahead records what a real forward does, and leaves nothing behind."""

import functools
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zoo
from tests.tracing.runs import Deciding, calls_in, names_in, traced
from zoo.errors import ArgumentError
from zoo.invocation import Invocation
from zoo.planner.step_events import Allocated, Gradient, KernelRun, StepEvents
from zoo.profiling.isolation import FailedCall
from zoo.tracing import isolated_trace
from zoo.tracing.isolated_trace import StepTrace, step_trace_of

TABLE: list[int] = []


@functools.lru_cache
def scale_of(count: int) -> Tensor:
    TABLE.append(count)
    return torch.full((), float(count))


def events_of(model: nn.Module, given: Invocation, loss: Any = None) -> StepEvents:
    return step_trace_of(model, given, loss).events


def divisors_in(trace: StepTrace) -> list[Any]:
    """The numbers that tensors are divided by, in order."""
    specs = [spec for spec in trace.specs if spec and "div" in spec.operator]
    return [leaf for spec in specs for leaf in spec.leaves if isinstance(leaf, int)]


class Busy(nn.Module):
    """Does in its forward all that a second call of it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.counts: Counter[str] = Counter()
        self.numbers: Iterator[int] = itertools.count()
        self.random = random.Random(0)
        self.generator = np.random.default_rng(0)
        self.seen = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.counts["forward"] += 1
        self.seen += 1
        print("forward", next(self.numbers))
        x = x * self.random.random() * random.random() * float(np.random.rand())
        x = x * float(self.generator.random()) * scale_of(6)
        x = nn.functional.dropout(self.norm(self.layer(x)), 0.5)
        x.mark = self.counts  # type: ignore[attr-defined]
        return x


def state_of(model: Busy) -> list[Any]:
    return [
        dict(model.counts), repr(model.numbers), model.random.getstate(), random.getstate(),
        model.generator.bit_generator.state, model.seen.tolist(), list(TABLE),
        scale_of.cache_info(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(),
        [value.tolist() for value in model.state_dict().values()], torch.get_num_threads(),
        [type(value) for value in model.parameters()], model.norm.num_batches_tracked.item(),
    ]  # fmt: skip


def test_nothing_of_a_look_is_left_behind(capfd: pytest.CaptureFixture[str]) -> None:
    model, given = Busy(), Invocation((torch.rand(4, 6),))
    before = state_of(model)
    events = events_of(model, given)
    assert state_of(model) == before
    assert capfd.readouterr().out == ""
    assert names_in(events) == names_in(events_of(model, given))
    first = traced(model, given)
    assert model.counts["forward"] == 1
    assert len(calls_in(first)) >= len(calls_in(events)) > 5


def test_on_a_copy_streams_and_parameters_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    model, given = Deciding(), Invocation((torch.rand(4, 6),))
    before = torch.get_rng_state(), [value.clone() for value in model.parameters()]
    events = events_of(model, given)
    assert "aten.gt.Scalar" in names_in(events)
    assert torch.equal(before[0], torch.get_rng_state())
    assert all(map(torch.equal, before[1], model.parameters()))
    assert names_in(events) == names_in(events_of(model, given))


class Reading(nn.Module):
    """Reads numbers that are made of no data, and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("times", torch.tensor(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.times.add_(1)
        sizes = torch.arange(1, 4)
        sizes[0] = 5
        for size in (sizes * 2).tolist():
            x = self.layer(x) / size
        count = torch.tensor([1, 2, 3]).numpy().sum() + self.times.item()
        for _ in range(int(count)):
            x = torch.tanh(x)
        return x if mask is None or mask.all() else x * mask


@pytest.mark.parametrize("kept", [True, False])
def test_numbers_made_without_data_are_known(kept: bool) -> None:
    model = Reading()
    mask = torch.ones(4, 1, dtype=torch.bool)
    mask[0] = kept
    trace = step_trace_of(model, Invocation((torch.rand(4, 6, device="meta"), mask)))
    events, divisors = trace.events, divisors_in(trace)
    assert names_in(events).count("aten.tanh.default") == 9
    assert divisors[:3] == [10, 4, 6]
    # which the forward reads
    assert names_in(events)[-1] == ("aten.all.default" if kept else "aten.mul.Tensor")
    assert model.times == 2


class Writing(nn.Module):
    """Hands its results on through what it shares with another module."""

    def __init__(self, results: list[Tensor], named: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.results, self.nested = results, (named,)

    def forward(self, x: Tensor) -> None:
        self.results[0] = self.layer(x)
        self.nested[0]["result"] = self.results[0].tanh()


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # a list that holds itself, and a weight that is replaced in both
        weight = nn.Parameter(torch.rand(6))
        self.results: list[Any] = [weight]
        self.results.append(self.results)
        self.named = {"result": weight}
        self.first = Writing(self.results, self.named)

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        one, other = self.results[0], self.named["result"]
        assert one.shape == other.shape == x.shape, "they are the weights of before"
        assert self.results[1] is self.results
        return one * other


@pytest.mark.parametrize("forks", [True, False])
def test_lists_that_modules_share_stay_shared(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not forks:
        monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    # real tensors would hide what fails on fakes
    monkeypatch.setattr(isolated_trace, "LARGEST", 0)
    model = Sharing()
    held = model.results[0]
    events = events_of(model, Invocation((torch.rand(4, 6),)))
    assert names_in(events)[-1] == "aten.mul.Tensor"
    assert model.results[0] is held is model.named["result"]


class Guarded(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        try:
            value = x.sum().item()
        except Exception:
            value = 0.5
        return self.first(x) * value


def test_numbers_that_are_not_there_are_those_of_zeros_where_all_is_small() -> None:
    trace = step_trace_of(Guarded(), Invocation((torch.empty(4, 6, device="meta"),)))
    product = next(spec for spec in trace.specs if spec and "mul.Tensor" in spec.operator)
    assert 0.0 in product.leaves, "not what the forward falls back to"


@pytest.mark.parametrize("kind", [Guarded, Deciding])
def test_numbers_that_are_not_there_are_refused_where_it_is_large(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_trace, "LARGEST", 10)
    with pytest.raises(ArgumentError, match=r"reads numbers out of tensors.*first training step"):
        events_of(kind(), Invocation((torch.empty(4, 6, device="meta"),)))
    monkeypatch.setattr(isolated_trace, "LARGEST", 1 << 20)
    monkeypatch.setattr(isolated_trace, "MOST_MADE", 10)
    with pytest.raises(ArgumentError, match="reads numbers out of tensors"):
        events_of(kind(), Invocation((torch.empty(4, 6, device="meta"),)))


class Picky(nn.Module):
    """Fails on fake tensors, or in any other process."""

    def __init__(self, anywhere: bool = False) -> None:
        super().__init__()
        self.layer, self.process = nn.Linear(6, 6), os.getpid() if anywhere else 0

    def forward(self, x: Tensor) -> Tensor:
        assert type(x) is Tensor or self.process, "no FakeTensor"
        assert self.process in (0, os.getpid()), "another process"
        y: Tensor = self.layer(x)
        return y


def test_what_fails_on_fakes_alone_is_traced_on_real_tensors() -> None:
    given = Invocation((torch.rand(4, 6),))
    assert names_in(events_of(Picky(), given)) == names_in(events_of(nn.Linear(6, 6), given))


def test_what_fails_on_fakes_and_is_large_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_trace, "LARGEST", 10)
    text = r"ahead on fake tensors, on which it raises AssertionError: no FakeT.*\(.*trace.py:\d+\)"
    with pytest.raises(ArgumentError, match=text):
        events_of(Picky(), Invocation((torch.rand(4, 6),)))


def test_a_trace_that_fails_where_the_forward_does_not_is_no_matter_of_inputs() -> None:
    model = zoo.checkpoint(Picky(anywhere=True), memory_budget="1GiB")
    with pytest.raises(ArgumentError, match=r"of Picky runs, and its trace.*another process"):
        model(torch.rand(4, 6))


class OnAGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.eye(4).to_sparse() @ self.layer(x).exp()


def test_tensors_without_strides_are_logged() -> None:
    trace = step_trace_of(OnAGraph(), Invocation((torch.empty(4, 6, device="meta"),)))
    gradients = [e for run in trace.events.backward for e in run.events if isinstance(e, Gradient)]
    assert len(gradients) == 2


def test_errors_of_a_trace_name_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_trace, "LARGEST", 10)
    text = r"reads numbers out of tensors \(tests/tracing/test_isolated_trace.py:\d+\)"
    with pytest.raises(ArgumentError, match=text):
        events_of(Guarded(), Invocation((torch.empty(4, 6, device="meta"),)))


def test_inputs_may_be_real_fake_or_meta() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    with FakeTensorMode():
        fake = torch.rand(4, 6)
    found = [events_of(model, Invocation((x,))) for x in (torch.rand(4, 6), fake, fake.to("meta"))]
    assert found[0] == found[1] == found[2]


def test_a_model_on_the_meta_device_is_traced_as_one_on_the_cpu() -> None:
    """Meta tensors would run other kernels of LSTMs and attention than any device."""
    traces = [
        events_of(nn.LSTM(6, 6, device=device), Invocation((torch.rand(4, 6, device=device),)))
        for device in ("meta", "cpu")
    ]
    on_meta, on_cpu = ([str(call.operator) for call in calls_in(events)] for events in traces)
    assert on_meta == on_cpu


class Failing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "raises":
            raise KeyError("no such word")
        if self.how == "dies":
            os.abort()
        return self.layer(x)


def test_what_a_forward_raises_is_told_with_its_line() -> None:
    given = Invocation((torch.rand(4, 5),))
    with pytest.raises(
        ArgumentError,
        match=r"Failing does not take.*KeyError: 'no such word' \(.*isolated_trace.py:\d+",
    ):
        events_of(Failing("raises"), given)
    with pytest.raises(ArgumentError, match=r"RuntimeError: .*\(4x5 and 6x6\)"):
        events_of(Failing("no"), given)
    with pytest.raises(ArgumentError, match="ended the process"):
        events_of(Failing("dies"), given)
    with pytest.raises(ArgumentError, match=r"loss=wrong fails on what the model returns"):
        events_of(nn.Linear(5, 6), given, wrong)


def wrong(output: Tensor) -> Tensor:
    raise ValueError(output.shape)


def test_the_loss_is_behind_the_model() -> None:
    model = zoo.checkpoint(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), steps=["0", "1"])
    events = events_of(model, Invocation((torch.rand(4, 6),)), lambda y: y.square().sum())
    verbs = [call.verb for call in calls_in(events)]
    assert verbs[: events.model_operators][-1] == "tanh"
    assert verbs[events.model_operators :] == ["square", "sum"]
    assert events.visits == {("0", 0): 0, ("1", 0): names_in(events).index("aten.tanh.default")}


class Penalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)
        return slope.square().sum()


def test_a_backward_inside_of_the_forward_is_seen() -> None:
    model, given = Penalty(), Invocation((torch.rand(4, 6),))
    # threads of a backward, which a fork does not take along
    given.on(model).backward()
    assert "aten.tanh_backward.default" in names_in(events_of(model, given))


@pytest.mark.parametrize("forks", [True, False])
def test_hooks_for_all_modules_act(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not forks:
        monkeypatch.setattr("zoo.profiling.isolation.can_fork", lambda: False)
    handle = nn.modules.module.register_module_forward_hook(lambda *call: call[-1].sin())
    try:
        events = events_of(nn.Linear(6, 6), Invocation((torch.rand(4, 6),)))
    finally:
        handle.remove()
    assert names_in(events)[-1] == "aten.sin.default"


def test_parameters_without_a_size_are_refused() -> None:
    with pytest.raises(ArgumentError, match="lazy parameters, which have no size yet; call"):
        events_of(nn.LazyLinear(3), Invocation((torch.rand(4, 6),)))


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.masked_select(y, y > 0) * 2


def test_the_backward_of_what_depends_on_numbers_is_logged() -> None:
    trace = step_trace_of(Collecting(), Invocation((torch.rand(4, 6),)))
    assert "aten.masked_select.default" in names_in(trace.events)
    gradients = [e for run in trace.events.backward for e in run.events if isinstance(e, Gradient)]
    assert len(gradients) == 2


def test_an_answer_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = FailedCall("PicklingError: no such answer")
    monkeypatch.setattr("zoo.profiling.isolation.ForkedCall.receive", lambda _: raised)
    with pytest.raises(ArgumentError, match=r"Linear cannot be traced ahead \(PicklingError: no"):
        zoo.plan(nn.Linear(3, 3), torch.rand(2, 3), max_overhead=0.5)


class Shifts(nn.Module):
    """`<<` and `>>` end in an underscore as operators, and write nothing."""

    def forward(self, x: Tensor) -> Tensor:
        packed = (x * 16).long() << 1
        return x * (packed >> 2)


def test_a_shift_makes_a_tensor_of_its_own() -> None:
    x = torch.rand(3, 4, requires_grad=True)
    trace = step_trace_of(Shifts(), Invocation.of(x))
    shifts = [call.index for call in calls_in(trace.events) if "shift" in call.operator]
    assert len(shifts) == 2
    of_shifts = [event for operator, event in trace.events.forward if operator in shifts]
    assert sum(isinstance(event, Allocated) for event in of_shifts) == 2
    assert not any(event.writes for event in of_shifts if isinstance(event, KernelRun))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (layer(x).tanh(),))
        return x


# torch compiles the branches, and its compiler warns
@pytest.mark.filterwarnings("ignore")
def test_a_higher_order_operator_is_stood_in_for() -> None:
    gradients = []
    for plans in (False, True):
        torch.manual_seed(0)
        model, x = Branching(), torch.rand(9, 6)
        if plans:
            zoo.checkpoint(model, inputs=(x,), memory_budget="1MiB")
        model(x).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


class WritesAView(nn.Module):
    """Reads a view, in two ways, after what it lies in was written through another view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        view = y.view(-1, 2, 3).transpose(1, 2)
        view[:, :2].copy_(x.view(-1, 3, 2)[:, :2])
        parts = view.sin() * view
        view[:, 2:].zero_()
        return (parts @ view.transpose(1, 2)).sum() + view[0].sum()


def test_views_that_autograd_makes_again_for_fakes_are_no_operators_of_the_forward() -> None:
    model, x = WritesAView(), torch.rand(4, 6)
    ahead, real = events_of(model, Invocation.of(x)), traced(model, Invocation.of(x))
    count = len(names_in(real))
    assert names_in(ahead)[:count] == names_in(real)
    calls = [[(call.operator, call.index) for call in calls_in(events)] for events in (ahead, real)]
    assert calls[0][: len(calls[1])] == calls[1]
