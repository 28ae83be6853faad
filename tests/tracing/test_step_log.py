"""The costs from the log of a step against those of its steps, each run alone on fake tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.api.plan import planner_for
from zoo.invocation import Invocation
from zoo.models.densenet import DenseNet
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.log_costs import Rates, costs_of
from zoo.planner.optimal import least
from zoo.planner.plan import Plan
from zoo.policy.budget import BudgetPlanner
from zoo.profiling.kernel_costs import DEVICES
from zoo.tracing.isolated_trace import step_trace_of
from zoo.tracing.partition import partition, paths_of

TOKENS = torch.zeros(2, 16, dtype=torch.long)
SMALL_GPT2: dict[str, Any] = {
    "depth": 2, "width": 32, "heads": 2, "vocabulary": 300, "chunk_tokens": 8
}  # fmt: skip
SMALL_LSTM: dict[str, Any] = {
    "vocabulary": 200, "embedding": 16, "hidden": 16, "chunk_steps": 8
}  # fmt: skip
BYTES = ("live", "saved", "reads", "writes", "copied", "kept")
NUMBERS = ("forward", "gradients", "parameter_gradients", "gradients_made", "flops", "draws")


class Wrapped(nn.Module):
    """One of zoo's models inside of another module, where it is no chain."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


def mean_of(outputs: Any) -> Tensor:
    found = outputs[0] if isinstance(outputs, tuple) else outputs
    return found.float().mean()  # type: ignore[no-any-return]


def logged(model: nn.Module, inputs: Any, planner: BudgetPlanner) -> StepCosts:
    """The costs of the steps that a planner plans for, by the log of one training step."""
    trace = step_trace_of(model, Invocation.of(inputs), mean_of)
    graph, log = trace.graph, trace.log.counted(planner.rounding)
    steps = partition(model, graph, paths_of(model, None))
    blocks = steps.outline.blocks
    loss = graph.calls[graph.model_calls].index
    rates = Rates(lambda kernel: DEVICES["a100"].start)
    updates = planner.optimizer.updates
    costs = costs_of(log, [*steps.boundaries, loss], [*blocks, blocks[-1] + 1], rates, updates)
    return replace(costs, returned=log.outputs | log.ends)


def bytes_of(costs: StepCosts, name: str) -> list[int]:
    return [costs.bytes_of(storages) for storages in getattr(costs, name)]


def planned(model: nn.Module, inputs: Any, **options: Any) -> BudgetPlanner:
    return planner_for(model, inputs, loss=mean_of, device="a100", **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "resnet18": (lambda: zoo.resnet18(classes=5), (torch.rand(2, 3, 32, 32),)),
    "densenet": (lambda: DenseNet(8, (2, 3), 16), (torch.rand(2, 3, 32, 32),)),
    "vnet": (lambda: zoo.vnet(width=4), (torch.rand(2, 1, 16, 16, 16),)),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_log_has_the_costs_of_each_step_alone(name: str, in_backward: bool) -> None:
    make, inputs = MODELS[name]
    model = Wrapped(make())
    planner = planned(model, inputs, optimizer_in_backward=in_backward)
    costs, known = logged(model, inputs, planner), planner.costs
    for field in BYTES:
        assert bytes_of(costs, field)[:-1] == bytes_of(known, field)[:-1], field
    for field in NUMBERS:
        assert getattr(costs, field)[:-1] == getattr(known, field)[:-1], field
    whole = costs.with_parameter_gradients()
    for point in planner.points:
        assert simulate(point.plan, whole).peak == simulate(point.plan, planner.whole).peak


def test_the_log_has_the_peaks_of_plans_under_autocast() -> None:
    make, inputs = MODELS["resnet18"]
    model = Wrapped(make())
    with torch.autocast("cpu", torch.bfloat16):
        planner = planned(model, inputs)
        costs = logged(model, inputs, planner).with_parameter_gradients()
    assert any(costs.casts)
    for point in planner.points:
        peak = simulate(point.plan, planner.whole).peak
        assert simulate(point.plan, costs).peak == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: zoo.gpt2_small(**SMALL_GPT2), (TOKENS, TOKENS)),
        (lambda: zoo.gpt2_small(head="fused", **SMALL_GPT2), (TOKENS, TOKENS)),
        (lambda: zoo.lstm(**SMALL_LSTM), (TOKENS.t(), None, TOKENS.t())),
    ],
    ids=["gpt2-inplace", "gpt2-fused", "lstm"],
)
def test_functions_with_a_backward_of_their_own_are_logged(
    make: Callable[[], nn.Module], inputs: Any
) -> None:
    planner = planned(make(), inputs)
    costs = logged(Wrapped(make()), inputs, planner).with_parameter_gradients()
    whole = planner.whole
    baseline = simulate(Plan.keep_all(len(whole)), whole).peak
    assert simulate(Plan.keep_all(len(costs)), costs).peak == pytest.approx(baseline, rel=0.01)
    # between the kernels of a step there are more places to cut at
    fewest = simulate(least(costs), costs).peak
    assert fewest <= 1.01 * simulate(planner.least.plan, whole).peak


class Summed(nn.Module):
    """Reads a number, so that it is traced on real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        assert float(x.detach().sum()) < 1000
        return self.layers(x)  # type: ignore[no-any-return]


def test_a_forward_on_real_tensors_has_the_log_of_fake_ones() -> None:
    x = torch.rand(4, 8, requires_grad=True)
    model = Summed()
    real = step_trace_of(model, Invocation.of(x), mean_of)
    # numbers of the input are known nowhere else
    fake = step_trace_of(model.layers, Invocation.of(x), mean_of)
    of_real, of_fake = ([e for _, e in trace.log.forward] for trace in (real, fake))
    kinds = [[type(event) for event in events] for events in (of_real, of_fake)]
    assert kinds[0][-len(kinds[1]) :] == kinds[1]
    backwards = [[list(map(type, run.events)) for run in t.log.backward] for t in (real, fake)]
    assert backwards[0] == backwards[1]
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_log_leaves_the_model_and_the_modes_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.rand(3, 4)
    state = torch.random.get_rng_state()
    step_trace_of(model, Invocation.of(x), mean_of)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert torch.equal(state, torch.random.get_rng_state())
