"""`checkpoint=True` takes no more of the allocator than any other option, gradients included."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import images
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.api.plan import planner_for
from zoo.models.densenet import DenseNet
from zoo.models.resnet import ResNet, basic
from zoo.planner.plan import Plan
from zoo.profiling.peak_memory import trace

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans", "traces_once")

OTHERS = ["blocks", "sqrt", "cheap", 2, 4]
FAMILIES: dict[str, tuple[Callable[..., nn.Module], Callable[[], Any]]] = {
    "resnet": (functools.partial(ResNet, basic, (2, 2, 1), 5), lambda: (images(2, 3, 64),)),
    "densenet": (
        functools.partial(DenseNet, growth_rate=12, depths=(3, 4), classes=5),
        lambda: (images(2, 3, 64),),
    ),
    "vit": (
        functools.partial(zoo.vit_tiny_patch16, image_size=64, depth=2),
        lambda: (images(8, 3, 64),),
    ),
    "vnet": (functools.partial(zoo.vnet, width=2), lambda: (torch.rand(1, 1, 32, 32, 32),)),
    "gpt2": (
        functools.partial(zoo.gpt2_small, depth=2, width=64, heads=4, vocabulary=200),
        lambda: (torch.randint(200, (2, 128)), torch.randint(200, (2, 128))),
    ),
    "lstm": (
        functools.partial(zoo.lstm, vocabulary=200, embedding=64, hidden=64),
        lambda: (torch.randint(200, (20, 8)), None, torch.randint(200, (20, 8))),
    ),
}


@functools.cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name][0]()


@functools.cache
def peak(name: str, checkpoint: Any) -> int:
    """Returns the most bytes beside parameters in the second step, gradients dropped before it."""
    model, inputs = put_in_force(model_of(name), checkpoint), FAMILIES[name][1]()
    held: list[Any] = []

    def step() -> None:
        held[:] = [model(*inputs)]
        value = held[0][0] if isinstance(held[0], tuple) else held[0]
        (value if value.ndim == 0 else value.square().mean()).backward()

    model.zero_grad(set_to_none=True)
    step()
    held.clear()
    model.zero_grad(set_to_none=True)
    return trace(step).peak


@pytest.mark.parametrize("name", FAMILIES)
def test_true_takes_the_least(name: str) -> None:
    """By a thousandth, which its search leaves, and what the loss here takes beside the model."""
    least = min(peak(name, option) for option in OTHERS)
    assert peak(name, True) <= least * 1.002


@pytest.mark.parametrize("name", FAMILIES)
def test_true_takes_no_more_than_a_plan_for_a_budget(name: str) -> None:
    """Of those that recompute no step twice: `zoo.plan` knows others, too."""
    frontier = zoo.frontier(model_of(name), FAMILIES[name][1](), optimizer=None)
    plans = [point.plan for point in frontier.points if max(point.plan.runs()) <= 2]
    least = min(peak(name, plan) for plan in (plans[0], plans[len(plans) // 2]))
    assert peak(name, True) <= least * 1.002


class LossAndLogits(nn.Module):
    """Returns the loss and then the logits, which get no gradient but the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2000, 32), nn.Linear(32, 2000)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(24)
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, tokens), logits


def test_logits_beside_the_loss_get_no_gradient_of_their_own() -> None:
    """Their gradients are the peak, so that one too many hides what segments save."""
    tokens, peaks = torch.arange(512), {}
    for option in ("blocks", True):
        model = zoo.checkpoint(LossAndLogits(), option)

        def step(model: nn.Module = model) -> None:
            model.zero_grad()
            loss, logits = model(tokens)
            loss.backward()
            assert logits is not None

        step()
        step()
        peaks[option] = trace(step).peak
    assert peaks[True] <= peaks["blocks"] * 1.002


def test_where_gradients_or_workspaces_are_the_peak_less_is_recomputed() -> None:
    """A wide layer's gradient is more than all activations: no segment makes the peak lower."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)), nn.Linear(8, 20_000)
    )
    zoo.checkpoint(model)
    model(torch.rand(4, 8)).sum().backward()
    model(torch.rand(4, 8)).sum().backward()
    assert max(zoo.plan_of(model).runs()) == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_in_the_backward_has_a_plan_of_its_own(optimizer: Any) -> None:
    """All gradients are more than all activations, one of them is less."""
    model = zoo.checkpoint(
        nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    )

    def runs() -> int:
        model(torch.rand(64, 256)).square().sum().backward()
        updates.step()
        updates.zero_grad()
        return max(zoo.plan_of(model).runs())

    updates = optimizer(model.parameters(), lr=0.01)
    assert runs() == 1
    handle = zoo.optimizer_in_backward(model, updates)
    assert runs() == 2
    handle.remove()
    assert runs() == 1


def test_the_baseline_is_the_least_where_no_plan_takes_less() -> None:
    """Also where the costs of the steps say more of it than it takes."""
    parts = (part for _ in range(3) for part in (nn.Linear(8, 8), nn.Dropout(0.5)))
    planner = planner_for(nn.Sequential(*parts), torch.rand(2, 8), optimizer=None, measured=False)
    judge, steps = planner.judge, len(planner.step.costs)
    judge.keeps_all = dataclasses.replace(judge.keeps_all, peak=10**9)
    whole = planner.step.point(Plan([tuple(range(steps))]))
    assert judge.judged(whole).peak > planner.baseline.peak, "it keeps random states"
    assert planner._lowest_of([whole]).peak == planner.baseline.peak
