"""A profile with trials: the bytes that only a real run shows, and a model that it leaves alone."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.training import Residuals, images
from zoo.chain import Chain, Steps, outline
from zoo.measure.profile import profile
from zoo.measure.step import kind_of
from zoo.measure.trial import run_trial
from zoo.planner.costs import StepCosts


class Median(Chain):
    """Its kernel sorts a copy that no tensor of Python shows."""

    def steps(self) -> Steps:
        return [self.median]

    def median(self, x: Tensor) -> Tensor:
        return torch.median(x)


def costs(chain: Chain, *inputs: Tensor, timed: bool = True) -> StepCosts:
    return profile(chain, outline(chain.steps_for(*inputs)), inputs, timed=timed)


def test_what_a_kernel_allocates_inside_is_seen_by_a_trial_only() -> None:
    x = torch.rand(1 << 16, requires_grad=True)
    assert costs(Median(), x, timed=False).forward[0] == 4
    assert costs(Median(), x).forward[0] == x.nbytes + 4


def test_a_profile_with_trials_leaves_everything_as_it_was() -> None:
    model, x = Residuals(), images().requires_grad_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    costs(model, x)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), x))


def test_bytes_without_hidden_kernels_are_those_of_fake_tensors() -> None:
    model, x = Residuals(), images().requires_grad_()
    fake, real = costs(model, x, timed=False), costs(model, x)
    assert fake.sizes == real.sizes
    assert fake.saved == real.saved
    pairs = zip(fake.forward + fake.backward, real.forward + real.backward, strict=True)
    assert all(one <= other for one, other in pairs)
    assert all(map(float.__gt__, real.seconds, [0.0] * len(real)))
    assert all(map(float.__ge__, real.seconds, real.seconds_until_saved))


class Expanded(Chain):
    """Hands an expanded tensor on, which has fewer numbers than it shows."""

    def steps(self) -> Steps:
        return [self.expand, self.add]

    def expand(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:1].sum().expand(8, 8)

    def add(self, x: Tensor, more: Tensor) -> Tensor:
        return x + more


def test_a_state_of_an_expanded_tensor_is_tried() -> None:
    x = torch.rand(8, 8, requires_grad=True)
    assert costs(Expanded(), x).forward[1] == x.nbytes


class Scratch(torch.autograd.Function):
    """Keeps a block for the backward, which frees it before it makes a gradient of that size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = torch.empty_like(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        places = [ctx.kept.data_ptr()]
        del ctx.kept
        # the allocator may give the place to the gradient, or to one of these
        made = [torch.zeros(1 << 14) for _ in range(20)]
        places += [tensor.data_ptr() for tensor in made]
        again = next((tensor for tensor in made if tensor.data_ptr() == places[0]), made[0])
        return gradient * 2, again


def test_a_gradient_where_a_saved_block_was_is_not_taken_for_the_forward_s() -> None:
    x, weight = torch.rand(8, requires_grad=True), nn.Parameter(torch.rand(1 << 14))

    def step(x: Tensor) -> Any:
        return Scratch.apply(x, weight)

    trial = run_trial(step, (kind_of(x, 0, 0),), (x.nbytes,), (), x.device)
    assert trial.kept == weight.nbytes + x.nbytes
