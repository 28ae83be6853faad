"""Custom functions, transforms of functions, and hooks of saved tensors."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from tests.training import WAYS, Call, Way, assert_exact, gradients, net, rows, state_of


def mixed() -> nn.Sequential:
    return net(nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4))


class Twice(torch.autograd.Function):
    """Reads its saved tensors twice, and keeps other things on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.power = power
        ctx.save_for_backward(x, x.exp())
        return x.exp() ** power

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> Any:
        (_, y), (x, _) = ctx.saved_tensors, ctx.saved_tensors
        return found[0] * ctx.power * y ** (ctx.power - 1) * x.exp(), None


def test_custom_functions_that_read_their_tensors_twice() -> None:
    """a custom function that reads its tensors twice | raises | exact

    pytorch#82156, OLMo#639: torch's checkpoint raises; here it is exact.
    """

    def program(call: Call) -> Any:
        (x,) = rows()
        call(lambda x: Twice.apply(Twice.apply(x.sin(), 2).sin(), 3), x).sum().backward()
        return x.grad

    assert_exact(program)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev", "hessian", "vjp"])
def test_function_transforms(transform: str) -> None:
    """`torch.func.grad`, `vmap` around a segment | raises | exact, nothing saved

    pytorch#122729, pytorch#141845, pytorch#146036, pytorch#165880.
    """

    def program(call: Call) -> Any:
        model, (x,) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), rows()
        x = x.detach()

        def loss(x: Tensor) -> Any:
            return call(model, x).square().sum()

        results = {
            "grad": lambda: torch.func.grad(loss)(x),
            "vmap": lambda: torch.func.vmap(torch.func.grad(loss))(x),
            "jvp": lambda: torch.func.jvp(loss, (x,), (x.sin(),)),
            "jacrev": lambda: torch.func.jacrev(lambda x: call(model, x))(x),
            "hessian": lambda: torch.func.hessian(loss)(x[0]),
            "vjp": lambda: torch.func.vjp(loss, x)[1](torch.tensor(2.0)),
        }
        return results[transform]()

    assert_exact(program)


@pytest.mark.parametrize("backward", [False, True])
def test_forward_mode(backward: bool) -> None:
    """Forward-mode derivatives through a segment, by dual numbers; and a backward after it."""

    def program(call: Call) -> Any:
        model, (x,) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), rows()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.detach().sin())
            output, tangent = torch.autograd.forward_ad.unpack_dual(call(model, dual))
            if backward:
                (output.square().sum() + tangent.sum()).backward()
        return output, tangent, gradients(model), x.grad

    assert_exact(program)


def test_vmap_around_forward_and_backward_with_autograd() -> None:
    """torch.autograd.functional and is_grads_batched: vmap over the backward."""

    def program(call: Call) -> Any:
        model, (x,) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), rows()
        y = call(model, x)
        (found,) = torch.autograd.grad(y, x, torch.eye(18).view(18, 6, 3), is_grads_batched=True)
        jacobian = torch.autograd.functional.jacobian(lambda x: call(model, x), x.detach())
        return found, jacobian

    assert_exact(program)


@pytest.mark.parametrize(
    "draw", [torch.rand_like, lambda x: torch.bernoulli(x.sigmoid()), torch.randn_like]
)
def test_gradients_in_a_batch_that_replay_draws(draw: Callable[[Tensor], Tensor]) -> None:
    def program(call: Call) -> Any:
        (x,) = rows(200)
        y = call(lambda x: (x.sin() * draw(x.detach())).cos().sum(0), x)
        return torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)

    assert_exact(program)


def test_vmap_around_a_backward_that_replays_draws() -> None:
    """As the documents of torch.vmap compute a Jacobian matrix."""

    def program(call: Call) -> Any:
        model = nn.Sequential(nn.Linear(4, 100), nn.Dropout(0.5), nn.Tanh(), nn.Linear(100, 3))
        x = torch.rand(20, 4, requires_grad=True)
        y = call(model, x)

        def product(vector: Tensor) -> Tensor:
            return torch.autograd.grad(y, x, vector, retain_graph=True)[0]

        found = torch.vmap(product)(torch.rand(5, 20, 3))
        y.sum().backward()
        return found, gradients(model)

    assert_exact(program)


class Offloading(nn.Module):
    """Saves what its inside saves on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mixed()

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return self.model(x)


@pytest.mark.parametrize("kind", [mixed, Offloading])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_saved_tensors(way: Way, outside: bool, kind: Any) -> None:
    """`save_on_cpu` and other saved-tensor hooks | exact | exact

    pytorch#190581, pytorch#115255: save_on_cpu around the forward, and in the segment.
    """

    def program(call: Call) -> Any:
        model, (x,) = kind(), rows()
        with save_on_cpu() if outside else nullcontext():
            output = way(call, model, x)
        output.square().sum().backward()
        return output, x.grad, state_of(model)

    assert_exact(program)
