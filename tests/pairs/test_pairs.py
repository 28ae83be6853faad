"""Planned modules that feed one another train to the bits of the baseline, whatever they are.

Alone each kind is exact; what is new here is the graph that lies in front of a planned forward. The
whole product of kinds, options and precisions is `make pairs`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pairs.kinds import KINDS, WIDTH, Blocks, Convolution, Embedding, batch
from tests.pairs.programs import OPTIONS, PRECISIONS, assert_plans_change_nothing

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")
PAIRS = [*itertools.product(KINDS, KINDS)]
# those by which a module in front came to hold fake tensors
RECURRENT = ["gru", "lstm", "lstm in both directions", "rnn", "cells"]


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[f"{a}-{b}" for a, b in PAIRS])
def test_one_module_in_front_of_another(number: int) -> None:
    first, second = PAIRS[number]
    # three cycles whose lengths share no factor
    options = OPTIONS[number % 5], OPTIONS[number // 7 % 5]
    assert_plans_change_nothing((KINDS[first], KINDS[second]), options, PRECISIONS[number % 2])


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_three_modules_in_a_row(number: int) -> None:
    kinds = [*KINDS.values()]
    makes = [kinds[(number + turn) % len(kinds)] for turn in (0, 3, 7)]
    options = [OPTIONS[(number + turn) % 5] for turn in range(3)]
    assert_plans_change_nothing(makes, options, PRECISIONS[number % 2])


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_a_module_on_its_own_output(number: int) -> None:
    def loss_of(modules: Sequence[nn.Module], step: int) -> Tensor:
        (module,) = modules
        return module(module(batch(step))).float().square().mean()

    kind, option = [*KINDS.values()][number], OPTIONS[number % 4]
    assert_plans_change_nothing([kind], [option], PRECISIONS[number % 2], loss_of)


class Stateful(nn.Module):
    """A recurrent layer that is given its state, as in truncated backpropagation through time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer: nn.Module = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}[kind](
            WIDTH, WIDTH, batch_first=True
        )
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.layer(x, state)
        return torch.tanh(self.mix(y)), state


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("option", OPTIONS[:4])
@pytest.mark.parametrize("kind", ["gru", "lstm", "rnn"])
def test_a_state_that_is_carried_with_its_graph(kind: str, option: Any, calls: int) -> None:
    def loss_of(modules: Sequence[nn.Module], step: int) -> Tensor:
        total, state = torch.zeros(()), None
        for call in range(calls):
            y, state = modules[0](batch(10 * step + call), state)
            total = total + y.float().square().mean()
        return total

    dtype = PRECISIONS[calls % 2]
    assert_plans_change_nothing([lambda: Stateful(kind)], [option], dtype, loss_of)


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("kind", ["gru", "lstm", "rnn"])
def test_a_state_that_is_carried_over_backwards(kind: str, calls: int) -> None:
    def loss_of(modules: Sequence[nn.Module], step: int) -> Tensor:
        state = None
        for call in range(calls - 1):
            y, state = modules[0](batch(10 * step + call), state)
            y.float().square().mean().backward(retain_graph=True)
        return modules[0](batch(10 * step + calls), state)[0].float().square().mean()

    option, dtype = OPTIONS[calls % 2], PRECISIONS[calls % 2]
    assert_plans_change_nothing([lambda: Stateful(kind)], [option], dtype, loss_of)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("option", OPTIONS[:4])
@pytest.mark.parametrize("generator_first", [True, False])
def test_a_generator_and_a_discriminator(
    generator_first: bool, option: Any, dtype: torch.dtype
) -> None:
    def loss_of(modules: Sequence[nn.Module], step: int) -> Tensor:
        generator, discriminator = modules
        fooled = -discriminator(generator(batch(step))).float().mean()
        fake = generator(batch(step + 10)).detach()
        told = F.relu(1 + discriminator(fake).float()).mean()
        told = told + F.relu(1 - discriminator(batch(step + 20)).float()).mean()
        return fooled + told if generator_first else told + fooled

    makes = [lambda: Blocks(Convolution)] * 2
    assert_plans_change_nothing(makes, [option, option], dtype, loss_of)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("kind", ["lstm", "convolution", "attention"])
def test_a_student_behind_the_layers_of_its_teacher(kind: str, dtype: torch.dtype) -> None:
    def loss_of(modules: Sequence[nn.Module], step: int) -> Tensor:
        teacher, student = modules
        taught = teacher(batch(step))
        return F.mse_loss(student(taught).float(), taught.detach().float())

    assert_plans_change_nothing([KINDS[kind], KINDS["gru"]], [True, "blocks"], dtype, loss_of)


WAYS: dict[str, Callable[[nn.Module, Tensor], Callable[[], Tensor]]] = {
    "attribute": lambda module, x: lambda: vars(module)["found"],
    "closure": lambda module, x: lambda: x,
    "dict": lambda module, x: lambda: vars(module)["held"]["deep"][0],
    "view": lambda module, x: lambda: x.transpose(1, 2).transpose(1, 2),
}


class Reads(nn.Module):
    """Reads what no argument has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(Embedding)

    def forward(self, x: Tensor, read: Callable[[], Tensor]) -> Tensor:
        return self.blocks(x + read())


@pytest.mark.parametrize("option", OPTIONS[:3])
@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_comes_in_by_another_way(way: str, kind: str, option: Any) -> None:
    def loss_of(modules: Sequence[nn.Module], step: int) -> Tensor:
        first, second = modules
        found = first(batch(step))
        vars(second).update(found=found, held={"deep": [found]})
        loss: Tensor = second(batch(step + 1), WAYS[way](second, found)).float().square().mean()
        return loss

    assert_plans_change_nothing([KINDS[kind], Reads], [option, option], torch.float32, loss_of)
