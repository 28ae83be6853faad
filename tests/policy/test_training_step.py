"""The bytes that planning rests on are those that the allocator sees."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.profiling.models import Repeated, profile
from tests.training import Residuals, assert_same, everything, images
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.plan import Plan
from zoo.profiling.peak_memory import trace


def costs_of(model: nn.Module, *inputs: Tensor) -> StepCosts:
    return profile(model, *inputs).costs()


def nested(steps: int) -> list[Plan]:
    a, b, c = steps // 3, steps // 2, steps * 5 // 6
    return [
        Plan.keep_all(steps),
        Plan([tuple(range(steps))]),
        Plan([tuple(range(a)), tuple(range(a, c)), *range(c, steps)]),
        Plan([(tuple(range(a)), *range(a, b)), tuple(range(b, steps))]),
    ]


class Wide(Residuals):
    """With wide states and without convolutions, whose kernels allocate what nobody sees."""

    def __init__(self) -> None:
        super().__init__(blocks=6)
        for block in self.blocks:
            block.conv = nn.Linear(64, 64)  # type: ignore[assignment]


class Words(nn.Module):
    """A table whose gradient is sparse: the rows that a batch has, and which they are."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("plan", range(4))
@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (Wide, lambda: images(8, 4, 64)),
        (lambda: Words(sparse=True), lambda: torch.randint(64, (512,))),
        (lambda: Words(sparse=False), lambda: torch.randint(64, (512,))),
    ],
)
def test_the_simulated_peak_is_the_measured_one(
    build: Callable[[], nn.Module], inputs: Callable[[], Tensor], plan: int
) -> None:
    torch.manual_seed(0)
    model, x = build(), inputs()
    costs = costs_of(model, x)
    chosen = nested(len(costs))[plan]
    zoo.checkpoint(model, chosen)

    def step() -> None:
        (model(x) * 2).sum().backward()
        model.zero_grad()

    step()
    predicted = simulate(chosen, costs.with_parameter_gradients()).peak
    assert predicted == pytest.approx(trace(step).peak, rel=0.02)


def test_profiling_leaves_the_model_and_the_stream_alone() -> None:
    model, x = Residuals(), images()
    fired: list[Any] = []
    model.blocks[0].conv.register_forward_hook(lambda *_: fired.append(1))
    before, attributes = everything(model), copy.copy(vars(model.blocks[1].norm))
    buffers = dict(model.named_buffers())
    costs_of(model, x)
    assert_same(everything(model), before)
    assert vars(model.blocks[1].norm).keys() == attributes.keys()
    assert all(value is buffers[name] for name, value in model.named_buffers())
    assert not fired
    model(x)
    assert fired == [1]


def test_profiling_under_autocast_leaves_no_fake_weights_in_its_cache() -> None:
    model, x = Residuals(), images()
    with torch.autocast("cpu", torch.bfloat16):
        costs_of(model, x)
        model(x).sum().backward()
    assert type(model.fc.weight.grad) is Tensor


def test_casts_are_those_that_autocast_caches_each_once() -> None:
    shared, twin, frozen = (nn.Linear(8, 8, bias=False) for _ in range(3))
    frozen.requires_grad_(False)
    model = Repeated(shared, nn.Tanh(), shared, frozen, twin)
    x, size = torch.rand(3, 8, requires_grad=True), 2 * 8 * 8
    for is_cached in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            of_step = profile(model, x)
        costs, found = of_step.costs(), of_step.events.casts
        # the second use of the shared weight casts nothing, a frozen weight is not cached, and an
        # input that needs a gradient is
        cached = [2 * 3 * 8, size, size] if is_cached else []
        assert sorted(costs.sizes[cast] for cast in found) == cached
        held = [step for step, saved in enumerate(costs.saved) if found & saved]
        assert len(held) == (3 if is_cached else 0)


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("timed", [False, True])
def test_a_replay_that_ends_with_dropout_is_counted_to_its_end(timed: bool) -> None:
    """Its mask may still be written when it is saved."""
    x = torch.rand(1 << 16).requires_grad_()
    model = Repeated(torch.sin, nn.Dropout(0.5), torch.sin)
    found = profile(model, x)
    costs = found.costs(kernels=found.kernels() if timed else ())
    plan = Plan([tuple(range(len(costs) - 1)), len(costs) - 1])
    zoo.checkpoint(model, plan)

    def step() -> None:
        model(x).sum().backward()

    step()
    x.grad = None
    assert trace(step).peak <= simulate(plan, costs).peak


def test_gradients_of_a_weight_that_is_used_twice_are_counted_to_the_last_use() -> None:
    one, *others = (nn.Linear(4, 4, bias=False) for _ in range(3))
    model, weight = Repeated(*others, one, one), 4 * 4 * 4
    costs = costs_of(model, torch.rand(2, 4, requires_grad=True))
    # after the backward of each step, and before that of the last
    assert costs.parameter_gradients == (3 * weight, 2 * weight, weight, 0, 0)
    # that of the last use waits for the other as a gradient between steps, beside the state's
    assert costs.gradients[3] == weight + 2 * 4 * 4


def test_tensors_that_a_function_holds_are_counted_apart_from_what_it_does() -> None:
    x, targets = torch.rand(50, 10, requires_grad=True), torch.rand(5, 100)
    model = Repeated(
        torch.tanh, lambda state: F.mse_loss(state, targets.view(50, 10), reduction="none")
    )
    found = profile(model, x)
    assert found.constants == targets.nbytes
    costs = found.costs()
    assert costs.bytes_of(costs.saved[1]) == x.nbytes, "the output of tanh"
    assert costs.forward[1] == x.nbytes
