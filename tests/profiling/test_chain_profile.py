"""The bytes that planning rests on are those that the allocator sees."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import Residuals, assert_same, everything, images
from zoo.chain import Chain, Steps, outline
from zoo.engine.recompute import run_plan
from zoo.layers.weight_sharing import SharedWeight
from zoo.planner.costs import StepCosts, simulate
from zoo.planner.plan import Plan
from zoo.profiling.chain_profile import Profile
from zoo.profiling.peak_memory import trace


def costs_of(model: Chain, *inputs: Tensor) -> StepCosts:
    return Profile(model, outline(model.steps_for(*inputs)), inputs).costs()


class Wide(Residuals):
    """With wide states and without convolutions, whose kernels allocate what nobody sees."""

    def __init__(self) -> None:
        super().__init__(blocks=6)
        self.convs = nn.ModuleList(nn.Linear(64, 64) for _ in self.convs)


@pytest.mark.parametrize("plan", ["0-18", "(0-18)", "(0-5) (6-11) 12-18", "((0-2) 3-8) (9-18)"])
def test_the_simulated_peak_is_the_measured_one(plan: str) -> None:
    torch.manual_seed(0)
    model, x = Wide(), images(8, 4, 64)
    steps = outline(model.steps()).steps

    def step() -> None:
        run_plan(Plan.parse(plan), steps, (x,)).square().sum().backward()

    step()
    measured = trace(step).peak
    predicted = simulate(Plan.parse(plan), costs_of(model, x)).peak
    assert predicted == pytest.approx(measured, rel=0.02)


class Words(Chain):
    """A table whose gradient is sparse: the rows that a batch has, and which they are."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def steps(self) -> Steps:
        yield self.table
        for layer in self.layers:
            yield lambda x, layer=layer: layer(x).tanh()


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("plan", ["0-6", "(0-6)", "(0-2) 3 (4-6)"])
def test_the_simulated_peak_is_the_measured_one_of_sparse_gradients(
    plan: str, sparse: bool
) -> None:
    model, words = Words(sparse), torch.randint(64, (512,))
    steps = outline(model.steps()).steps

    def step() -> None:
        (run_plan(Plan.parse(plan), steps, (words,)) * 2).sum().backward()
        model.zero_grad()

    step()
    measured = trace(step).peak
    costs = costs_of(model, words)
    predicted = simulate(Plan.parse(plan), costs).peak
    assert predicted == pytest.approx(measured, rel=0.02)


def test_profiling_leaves_the_model_and_the_stream_alone() -> None:
    model, x = Residuals(), images()
    fired: list[Any] = []
    model.convs[0].register_forward_hook(lambda *_: fired.append(1))
    before, attributes = everything(model), copy.copy(vars(model.norms[1]))
    buffers = dict(model.named_buffers())
    costs_of(model, x)
    assert_same(everything(model), before)
    assert vars(model.norms[1]).keys() == attributes.keys()
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


class Cast(Chain):
    """Casts the weight of a layer in three steps, of which two are equal; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.twin, self.frozen = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def steps(self) -> Steps:
        return [self.shared, nn.Tanh(), self.shared, self.frozen, self.twin, self.exact]

    def exact(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.shared.weight)


def test_casts_are_those_that_autocast_caches_each_once() -> None:
    model, x, size = Cast(), torch.rand(3, 8, requires_grad=True), 2 * 8 * 8
    for is_cached in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            costs = costs_of(model, x)
        found = [list(map(costs.sizes.__getitem__, casts)) for casts in costs.casts]
        if is_cached:
            assert found == [[size], [], [size], [], [size], [size]]
            shared = frozenset.intersection(*(costs.casts[step] for step in (0, 2, 5)))
            assert shared.isdisjoint(costs.casts[4])
            assert all(shared <= costs.saved[step] for step in (0, 2, 5))
        else:
            assert found == [], "of no step"
            assert not costs.saved[0] & costs.saved[2]


# a convolution has a list among its settings
@pytest.mark.parametrize("layer", [nn.Tanh, lambda: nn.Conv2d(1, 1, 1)])
def test_equal_steps_are_run_once(layer: Callable[[], nn.Module]) -> None:
    class Many(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(20))

        def steps(self) -> Steps:
            return list(self.layers)

    model, x = Many(), torch.rand(1, 1, 3, 3).requires_grad_()
    found = Profile(model, outline(model.steps()), (x,))
    assert len(set(map(id, found.runs))) == 1
    assert len(found.costs()) == 20


def test_a_weight_that_a_step_uses_twice_makes_another_step_of_it() -> None:
    class Blocks(Chain):
        def __init__(self) -> None:
            super().__init__()
            one, *others = (nn.Linear(4, 4, bias=False) for _ in range(3))
            self.blocks = nn.ModuleList([nn.Sequential(*others), nn.Sequential(one, one)])

        def steps(self) -> Steps:
            return [block.__call__ for block in self.blocks]

    costs, weight = costs_of(Blocks(), torch.rand(2, 4, requires_grad=True)), 4 * 4 * 4
    # before the backward of the second step, of the first, and after it
    assert costs.parameter_gradients == (3 * weight, weight, 0)


class Listed(Chain):
    """A chain of the steps that it is given."""

    def __init__(self, *steps: Any) -> None:
        super().__init__()
        self.listed = steps

    def steps(self) -> Steps:
        return self.listed


def test_functions_written_in_c_are_steps() -> None:
    x = torch.rand(8).requires_grad_()
    costs = costs_of(Listed(F.gelu, torch.tanh, F.gelu), x)
    assert costs.forward == (32, 32, 32)


@pytest.mark.parametrize("timed", [False, True])
def test_a_replay_that_ends_with_dropout_is_counted_to_its_end(timed: bool) -> None:
    """Its mask may still be written when it is saved."""
    x = torch.rand(1 << 16).requires_grad_()
    model = Listed(torch.sin, nn.Dropout(0.5), torch.sin)
    found = Profile(model, outline(model.steps()), (x,))
    costs = found.costs(kernels=found.kernels() if timed else ())
    assert costs.forward_until_saved[1] == costs.forward[1] >= 2 * x.nbytes
    assert costs.seconds_until_saved[1] == costs.seconds[1]
    steps = outline(model.steps()).steps

    def step() -> None:
        run_plan(Plan.parse("(0-1) 2"), steps, (x,)).sum().backward()

    step()
    x.grad = None
    assert costs.flops_until_saved == costs.flops
    assert trace(step).peak <= simulate(Plan.parse("(0-1) 2"), costs).peak


def test_views_and_handed_on_tensors_share_their_storage() -> None:
    class Views(Chain):
        def steps(self) -> Steps:
            return [self.split, self.swap, self.use]

        def split(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x * 2).chunk(2)

        def swap(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return b, a, a

        def use(self, b: Tensor, a: Tensor, again: Tensor) -> Tensor:
            return (a * b).sum() + again.sum()

    costs = costs_of(Views(), torch.rand(8).requires_grad_())
    assert costs.live[1] == costs.live[2] == costs.saved[2]
    assert costs.bytes_of(costs.live[1]) == 32
    assert costs.gradients[2] == 32, "two distinct tensors of four numbers"


def test_an_addition_gives_both_its_inputs_one_gradient() -> None:
    class Sum(Chain):
        def steps(self) -> Steps:
            return [self.split, self.hand_on, self.add, self.use]

        def split(self, x: Tensor) -> tuple[Tensor, ...]:
            return x * 2, x * 3

        def hand_on(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return a, b, a * b

        def add(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
            return a + b, c

        def use(self, total: Tensor, c: Tensor) -> Tensor:
            return (total * c).sum()

    x = torch.rand(8).requires_grad_()
    # x; a and b, used and handed on; a and b with one gradient, c; total, c; the sum
    assert costs_of(Sum(), x).gradients == (32, 64, 64, 64, 4)


@pytest.mark.parametrize("adds", [True, False])
def test_a_gradient_that_is_that_of_another_tensor_is_not_freed_after_its_use(adds: bool) -> None:
    class Branch(Chain):
        def steps(self) -> Steps:
            yield lambda x: (x, x.sin())
            yield lambda x, y: (x, y.sigmoid() * 2)
            yield torch.add if adds else torch.mul

    size, x = 64 * 4, torch.rand(64, requires_grad=True)
    # the product's backward frees the incoming gradient, unless it is that of x, too
    assert costs_of(Branch(), x).backward[1] == size * (2 if adds else 1)


def test_weights_are_not_counted_and_a_gradient_that_steps_share_is_by_the_last() -> None:
    class Decoder(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(8, 1000, bias=False)

        def steps_for(self, *inputs: Tensor | None) -> Steps:
            decoder = SharedWeight(self.decoder.weight).decoder(self.decoder)
            return [decoder, self.narrow, decoder, self.square]

        def narrow(self, scores: Tensor) -> Tensor:
            return scores[:, :8]

        def square(self, scores: Tensor) -> Tensor:
            return scores.square()

    costs = costs_of(Decoder(), torch.rand(2, 8).requires_grad_())
    assert costs.forward[0] == 2 * 1000 * 4, "the scores"
    assert costs.backward[0] <= 2 * 8 * 4 + 4, "the gradient of the input and what starts it"
    assert costs.bytes_of(costs.saved[0]) == 0, "the chain's input and the weight"
    size = 8 * 1000 * 4
    assert costs.parameter_gradients == (size, size, size, 0, 0)
    assert size <= costs.backward[2] <= size + 2 * 8 * 4 + 4


def test_gradients_of_a_cast_are_summed_as_they_are_and_converted_once() -> None:
    class Twice(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(100, 100, bias=False)

        def steps(self) -> Steps:
            return [self.layer, torch.tanh, self.layer, torch.tanh, self.layer]

    x, size = torch.rand(1, 100, requires_grad=True), 2 * 100 * 100
    with torch.autocast("cpu", torch.bfloat16):
        costs = costs_of(Twice(), x)
    state = 2 * 100
    # from the last step on, until the first step converts the sum
    assert costs.gradients == (2 * state, *[size + state] * 4, state)
    assert costs.parameter_gradients == (2 * size, *[0] * 5)
    # a gradient; beside it a new sum, since the gradient before is a view; no cast nor sum any more
    for step, expected in ((4, size), (2, 2 * size), (0, 2 * size - size)):
        assert 0 <= costs.backward[step] - expected <= 4 * state


def test_tensors_that_a_function_holds_are_counted_apart_from_what_it_does() -> None:
    x, targets = torch.rand(50, 10, requires_grad=True), torch.rand(5, 100)

    class Compare(Chain):
        def steps(self) -> Steps:
            return [torch.tanh, self.compare, lambda state: state * targets[0, 0] * x.detach()]

        def compare(self, state: Tensor) -> Tensor:
            return F.mse_loss(state, targets.view(50, 10), reduction="none")

    model = Compare()
    profile = Profile(model, outline(model.steps_for(x)), (x,))
    assert profile.found.outside == targets.nbytes
    costs = profile.costs()
    assert costs.bytes_of(costs.saved[1]) == x.nbytes, "the output of tanh"
    assert costs.forward[1] == x.nbytes
