"""Steps in segments, nested by any plan, train bit for bit as the plain steps do."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import zoo
from tests.planner.test_plan import plans
from tests.training import Residuals, assert_same, everything, images, train
from zoo.layers.drop_path import DropPath
from zoo.planner.plan import DEEPEST, Item, Plan

PLANS = ["(0-2) (3-5) (6-9)", "((0-2) 3-5) 6 ((7) 8 (9))", "(((0-1) 2-3) 4 (5-6 (7 (8)))) 9"]


def by(plan: str | Plan, model: Any) -> Any:
    """Returns the forward of a model by a plan: each segment is a call of `zoo.recompute`."""
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    parsed.check(len(model.steps()))
    return functools.partial(run, parsed, model.steps())


def run(items: Sequence[Item], steps: Sequence[Any], *state: Any) -> Any:
    value: Any = state
    for item in items:
        state = value if isinstance(value, tuple) else (value,)
        if isinstance(item, int):
            value = steps[item](*state)
        else:
            value = zoo.recompute(run, item, steps, *state)
    return value


class Steps(Residuals):
    """The same by its steps."""

    def steps(self) -> list[Any]:
        body = [
            step
            for block in self.blocks
            for step in (
                functools.partial(self.convolve, block),
                functools.partial(self.normalize, block),
                functools.partial(self.drop_and_add, block),
            )
        ]
        return [*body, self.classify]

    def convolve(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return block.conv(x), x

    def normalize(self, block: Any, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu_(block.norm(y)), x

    def drop_and_add(self, block: Any, y: Tensor, x: Tensor) -> Tensor:
        return block.dropout(y) + x

    def classify(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def residuals() -> Steps:
    torch.manual_seed(1)
    return Steps()


class Varied(nn.Module):
    """Every norm and every dropout of torch, one after the other, as steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv3d(2, 4, 3, padding=1),
                nn.BatchNorm3d(4, momentum=None),
                nn.Dropout3d(0.5),
                nn.FeatureAlphaDropout(0.3),
                nn.Flatten(2, 3),
                nn.BatchNorm2d(4, affine=False),
                nn.Dropout2d(0.5),
                nn.InstanceNorm2d(4, track_running_stats=True),
                nn.RReLU(),
                DropPath(0.4),
                nn.Flatten(2),
                nn.BatchNorm1d(4, track_running_stats=False),
                nn.Dropout1d(0.2),
                nn.AlphaDropout(0.2),
                nn.GroupNorm(2, 4),
                nn.Linear(32, 3),
            ]
        )

    def steps(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def volumes() -> list[Tensor]:
    return [torch.randn(3, 2, 4, 2, 4) * torch.tensor([1.0, 50.0]).view(1, 2, 1, 1, 1)]


@pytest.mark.parametrize(
    "plan", ["(0-15)", "(0-3) (4-9) (10-15)", "(0 (1-5) 6 (7-8)) ((9-12) 13-15)"]
)
def test_every_norm_and_dropout_is_exact(plan: str) -> None:
    torch.manual_seed(2)
    model = Varied()
    other = copy.deepcopy(model)
    expected = train(model, volumes)
    assert_same(train(other, volumes, forward=by(plan, other)), expected)


@settings(deadline=None, max_examples=50)
@given(plan=plans(most=10), frozen=st.booleans(), eval_mode=st.booleans(), grad=st.booleans())
def test_random_plans_are_exact(plan: Plan, frozen: bool, eval_mode: bool, grad: bool) -> None:
    plan = Plan([*plan, *range(len(plan.flatten()), 10)])

    def make() -> Residuals:
        model = residuals().train(not eval_mode)
        model.blocks[0].conv.requires_grad_(not frozen)
        model.blocks[1].norm.weight.requires_grad_(not frozen)
        return model

    def inputs() -> list[Tensor]:
        return [images().requires_grad_(grad)]

    model = make()
    expected = train(make(), inputs, steps=2)
    assert_same(train(model, inputs, steps=2, forward=by(plan, model)), expected)


@pytest.mark.parametrize("plan", PLANS)
def test_autocast_is_exact_with_the_backward_outside_and_inside(plan: str) -> None:
    def record(forward: Any, model: Residuals, inside: bool) -> Any:
        torch.manual_seed(0)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss = forward(images()).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return everything(model) | {"loss": loss.detach()}

    for inside in (False, True):
        model, other = residuals(), residuals()
        assert_same(record(by(plan, other), other, inside), record(model, model, inside))


@pytest.mark.parametrize("plan", PLANS)
def test_retained_graphs_accumulation_and_partial_gradients(plan: str) -> None:
    def record(forward: Any, model: Residuals) -> Any:
        torch.manual_seed(0)
        x = images().requires_grad_()
        out = forward(x)
        out.sum().backward(retain_graph=True)
        torch.rand(3)
        (out * out).sum().backward(retain_graph=True)
        partial = torch.autograd.grad(out[:, 0].sum(), [x, model.blocks[1].conv.weight])
        forward(images()).mean().backward()
        return everything(model) | {"x": x.grad, "0": partial[0], "1": partial[1]}

    model, other = residuals(), residuals()
    assert_same(record(by(plan, other), other), record(model, model))


def one_in_another(steps: int) -> Plan:
    """Nests to the right, `(0 (1 (2 ...)))`: each step runs again once."""
    item: tuple[Any, ...] = (steps - 1,)
    for step in reversed(range(steps - 1)):
        item = (step, item)
    return Plan([item])


def test_segments_nest_deeper_than_pythons_stack_is_to_begin_with() -> None:
    class Sines(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(DEEPEST):
                x = x.sin()
            return x

    x = torch.linspace(0.1, 0.9, 7, dtype=torch.float64).requires_grad_()
    zoo.checkpoint(Sines(), one_in_another(DEEPEST))(x).sum().backward()
    found, x.grad = x.grad, None
    Sines()(x).sum().backward()
    assert torch.equal(found, x.grad)
