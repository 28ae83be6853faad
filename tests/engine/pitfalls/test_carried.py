"""What a forward leaves on its modules for others and for the next one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import WAYS, Call, Way, assert_exact, assert_trains, net, rows, state_of


class Logging(nn.Module):
    """Appends an auxiliary loss, with its history, to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.losses.append(y.softmax(1).mean(0).square().sum())
        return torch.tanh(y)


class Balanced(Logging):
    """Leaves it as an attribute, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = self.losses.pop()
        return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Logging, Balanced])
def test_an_auxiliary_loss_left_on_the_module(kind: type[Logging], way: Way) -> None:
    """logs and auxiliary losses | appended twice | once

    Megatron-LM#1330: appended twice; without a gradient where a forward has no graph.
    """

    def program(call: Call) -> Any:
        model = kind()
        output = way(call, model, *rows())
        losses = [*model.losses, *([model.loss] if kind is Balanced else [])]
        (output.square().sum() + 5 * sum(losses)).backward()
        return state_of(model), len(losses)

    assert_exact(program)


class Carrying(nn.Module):
    """Carries hidden and cell from call to call on itself."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.cut = cut
        self.carried: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.cell(x, self.carried)
        self.carried = (hidden.detach(), cell.detach()) if self.cut else (hidden, cell)
        return hidden


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [True, False])
def test_a_hidden_state_carried_on_the_module(way: Way, cut: bool) -> None:
    """hidden state on the module | starts from the next state | exact

    LSTM language models: truncated backpropagation, and one that goes through all calls.
    """

    def program(call: Call) -> Any:
        model = Carrying(cut)
        inputs = [rows() for _ in range(3)]
        sum(way(call, model, *x).sum() for x in inputs).backward()
        return state_of(model), [x.grad for (x,) in inputs]

    assert_exact(program)


class MakingItsParameter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.rand(4, 4))
        return torch.tanh(x @ self.weight)


class MakingItsLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "layer"):
            self.layer = net(nn.BatchNorm1d(4))
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [MakingItsParameter, MakingItsLayer])
def test_what_the_first_call_makes_is_made_once(kind: type[nn.Module], way: Way) -> None:
    """lazy layers, caches | made again, or found filled | once

    Parameters drawn and layers built inside, and trained from then on.
    """
    assert_trains(lambda: net(kind(), nn.Linear(3 if kind is MakingItsLayer else 4, 4)), way=way)


def test_batch_norm_reached_through_a_closure_over_several_inputs() -> None:
    """norms in a closure, as in DenseNet | updated twice | once

    bn_function of torchvision's DenseNet and of efficient_densenet_pytorch.
    """

    def factory(norm: nn.Module, linear: nn.Module) -> Any:
        def function(*parts: Tensor) -> Any:
            return linear(torch.relu(norm(torch.cat(parts, 1))))

        return function

    def program(call: Call) -> Any:
        norm, linear = nn.BatchNorm1d(8), nn.Linear(8, 4)
        parts = [*rows(), *rows()]
        call(factory(norm, linear), *parts).square().sum().backward()
        return state_of(norm), state_of(linear), [part.grad for part in parts]

    assert_exact(program)
