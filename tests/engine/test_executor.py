"""Steps in segments, nested by any plan, train bit for bit as the plain steps do."""

import copy
import functools
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import zoo
from tests.engine.kernels import bytes_left
from tests.engine.plans import run_plan
from tests.planner.test_plan import plans
from tests.training import Residuals, assert_same, elsewhere, everything, images, train
from zoo.errors import PlanError
from zoo.layers.drop_path import DropPath
from zoo.planner.plan import DEEPEST, Plan

PLANS = [
    "0-9",
    "(0-9)",
    "(0-2) (3-5) (6-9)",
    "0 (1-3) (4-6) (7) 8-9",
    "(0-3 (4-6)) 7-9",
    "((0-2) 3-5) 6 ((7) 8 (9))",
    "(((0-1) 2-3) 4 (5-6 (7 (8)))) 9",
]


def by(plan: str | Plan, model: Any) -> Any:
    """Returns the forward of a chain by a plan."""
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    return lambda *inputs: run_plan(parsed, model.steps(), inputs)


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

    def forward(self, x: Tensor) -> Any:
        return run_plan(Plan.keep_all(10), self.steps(), (x,))

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


def batch() -> list[Tensor]:
    return [images().requires_grad_()]


@pytest.mark.parametrize("plan", PLANS)
def test_training_is_bitwise_that_of_the_plain_chain(plan: str) -> None:
    expected = train(residuals(), batch)
    model = residuals()
    assert_same(train(model, batch, forward=by(plan, model)), expected)


@pytest.mark.parametrize("plan", PLANS)
def test_the_statistics_move_once(plan: str) -> None:
    model = residuals()
    train(model, batch, steps=1, forward=by(plan, model))
    assert [int(block.norm.num_batches_tracked) for block in model.blocks] == [1, 1, 1]


@pytest.mark.parametrize("plan", PLANS)
def test_buffers_stay_the_same_objects(plan: str) -> None:
    model = residuals()
    before = dict(model.named_buffers())
    train(model, batch, steps=1, forward=by(plan, model))
    assert all(value is before[name] for name, value in model.named_buffers())


@pytest.mark.parametrize("plan", PLANS)
def test_each_step_runs_once(plan: str) -> None:
    calls: list[int] = []

    class Counting(Steps):
        def steps(self) -> Any:
            steps = enumerate(super().steps())
            return [functools.partial(self.count, number, step) for number, step in steps]

        def count(self, number: int, step: Any, *state: Tensor) -> Any:
            calls.append(number)
            return step(*state)

    model = Counting()
    train(model, batch, steps=1, forward=by(plan, model))
    assert calls == [*range(10)]


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


@settings(deadline=None, max_examples=100)
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


def test_double_backward_is_exact() -> None:
    def record(forward: Any, model: Residuals) -> Any:
        torch.manual_seed(0)
        x = images().requires_grad_()
        (gradient,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return everything(model) | {"x": x.grad}

    model, other = residuals(), residuals()
    assert_same(record(by("(0-3 (4-6)) (7-9)", other), other), record(model, model))


def test_a_second_backward_without_retain_graph_raises_as_in_the_plain_chain() -> None:
    model = residuals()
    loss = by("(0-4) (5-9)", model)(images()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("plan", PLANS)
def test_no_gradient_mode_keeps_nothing_and_moves_statistics_once(plan: str) -> None:
    model, other = residuals(), residuals()
    x = images()
    torch.manual_seed(3)
    with torch.no_grad():
        expected = model(x)
    torch.manual_seed(3)
    with torch.no_grad():
        actual = by(plan, other)(x)
    assert not actual.requires_grad
    assert_same(everything(other) | {"y": actual}, everything(model) | {"y": expected})


class Interrupt(BaseException):
    """Stands for Ctrl-C."""


@pytest.mark.parametrize("plan", PLANS)
def test_an_interrupt_anywhere_leaves_everything_as_a_baseline_would(plan: str) -> None:
    """Counts calls and gradients on their way, and raises at each in turn."""

    class Faulty(Steps):
        left = -1

        def convolve(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            self.tick()
            y, x = super().convolve(block, x)
            y.register_hook(self.tick)
            return y, x

        def drop_and_add(self, block: Any, y: Tensor, x: Tensor) -> Tensor:
            result = super().drop_and_add(block, y, x)
            self.tick()
            return result

        def tick(self, *gradient: Tensor) -> None:
            self.left -= 1
            if self.left == 0:
                raise Interrupt

    for fault in range(1, 30):
        torch.manual_seed(1)
        model = Faulty()
        buffers = dict(model.named_buffers())
        torch.manual_seed(0)
        output = None
        model.left = fault
        try:
            output = by(plan, model)(images())
            after_forward = everything(model)
            output.square().sum().backward()
        except Interrupt:
            pass
        else:
            break
        assert all(value is buffers[name] for name, value in model.named_buffers())
        if output is not None:  # the fault came in the backward: statistics and RNG stay
            now = everything(model)
            for name, value in after_forward.items():
                if name.startswith(("buffer", "random state")):
                    assert_same(now[name], value, name)
        del model.left
        model.zero_grad()
        torch.manual_seed(0)
        expected_model = Faulty()
        expected_model.load_state_dict(model.state_dict())
        expected = train(expected_model, batch, steps=1)
        assert_same(train(model, batch, steps=1, forward=by(plan, model)), expected)
    else:
        pytest.fail("the fault was never the last")


def test_intermediates_are_freed_after_the_forward_and_after_the_backward() -> None:
    """Nothing inside a segment, and after the backward nothing but gradients."""
    found: list[StorageWeakRef] = []

    class Watched(Steps):
        def normalize(self, block: Any, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            found.append(StorageWeakRef(y.untyped_storage()))
            return super().normalize(block, y, x)

    def step(forward: Any) -> None:
        # what is compared on a device stays until the block ends
        with zoo.check_replays():
            forward(images()).sum().backward()

    def left(forward: Any) -> int:
        return bytes_left(functools.partial(step, forward))

    model = Watched()
    forward = by("(0-2) (3-5) (6-8) 9", model)
    out = forward(images())
    assert [ref.expired() for ref in found] == [True, True, True]
    del out
    gc.collect()
    gc.disable()
    try:
        # the first one on a device may leave a library's workspace
        _, gradients = left(Watched()), left(plain := Watched())
        assert gradients >= sum(parameter.nbytes for parameter in plain.parameters())
        assert left(forward) == gradients
    finally:
        gc.enable()


def test_a_segment_that_ends_with_a_convolution_does_not_convolve_again() -> None:
    class Pair(Steps):
        def steps(self) -> Any:
            return [self.blocks[0].norm, self.blocks[0].conv]

    def flops(plan: str) -> int:
        model = Pair()
        with FlopCounterMode(display=False) as counter:
            by(plan, model)(images()).sum().backward()
        return counter.get_total_flops()

    assert flops("(0-1)") == flops("0-1")


def test_backward_on_another_thread_is_exact() -> None:
    model, other = residuals(), residuals()
    torch.manual_seed(0)
    model(images()).square().sum().backward()
    torch.manual_seed(0)
    loss = by("(0-4 (5-6)) (7-9)", other)(images()).square().sum()
    elsewhere(loss.backward)
    expected = everything(model)
    assert_same(everything(other), expected)


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


def test_a_plan_for_another_chain_is_refused_before_anything_runs() -> None:
    model, x = residuals(), images()
    before = everything(model)
    with pytest.raises(PlanError, match="covers 3 steps but the model has 10"):
        by("(0-2)", model)(x)
    assert_same(everything(model), before)


def test_a_segment_may_reach_a_buffer_that_another_step_moves() -> None:
    """The code of each step names the list of all convolutions, one of which moves its vectors."""

    def model() -> Steps:
        torch.manual_seed(0)
        chain = Steps()
        nn.utils.parametrizations.spectral_norm(chain.blocks[1].conv)
        return chain

    expected = train(model(), batch)
    chain = model()
    assert_same(train(chain, batch, forward=by("(0-2) 3-5 (6-8) 9", chain)), expected)


@pytest.mark.parametrize("plan", ["(0-2)", "0 (1-2)", "(0 (1-2))"])
def test_a_step_that_counts_counts_once(plan: str) -> None:
    class Counting(nn.Module):
        """Scales by how often it was called."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.linear(x) * self.calls)

    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Counting())

    def batch() -> list[Tensor]:
        return [torch.randn(5, 4).requires_grad_()]

    model, parsed = make(), Plan.parse(plan)
    forward = functools.partial(run_plan, parsed, list(model))
    actual = train(model, batch, forward=lambda *inputs: forward(inputs))
    assert_same(actual, train(make(), batch))
    assert model[2].calls == 3
