"""Random states: a segment keeps one, and a replay draws what the forward drew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training import generator
from zoo.engine.devices import PackedState
from zoo.engine.recompute import recompute
from zoo.engine.recording import Recording

SIZE = 64


def drops(x: Tensor) -> Tensor:
    for _ in range(5):
        x = F.dropout(x.sin(), 0.5)
    return x


def drops_without_need_of_the_first(x: Tensor) -> Tensor:
    shape = F.dropout(x, 0.5).shape
    return F.dropout(x.sin(), 0.5).reshape(shape).exp()


def drops_with_other_draws_between(x: Tensor) -> Tensor:
    for _ in range(3):
        x = F.dropout(x.sin(), 0.5)
        torch.default_generator.manual_seed(int(torch.randint(100, ()).item()))
    return x


def drops_nothing(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x).sin() * F.dropout(x, 0.0)


def drops_by_two_generators(x: Tensor) -> Tensor:
    own = generator(3)
    for _ in range(3):
        x = x * torch.rand(x.shape, generator=own)
        x = F.dropout(x.sin(), 0.5)
    return x


def drops_few(x: Tensor) -> Tensor:
    return F.dropout(x[0, 0, :4].sin(), 0.5).exp() * F.dropout(x[0, 0, 4:8].sin(), 0.5).sin()


def drops_few_often(x: Tensor) -> Tensor:
    for _ in range(20):
        x = F.dropout(x[..., :4, :].sin(), 0.5).exp().sin()
    return x


def drops_in_an_inner_segment(x: Tensor) -> Tensor:
    x = F.dropout(x.sin(), 0.5)
    x = recompute(drops, x)
    return F.dropout(x.exp(), 0.5).sin()


CASES = [
    (drops, 1),
    (drops_without_need_of_the_first, 1),
    (drops_with_other_draws_between, 3),
    (drops_nothing, 0),
    (drops_by_two_generators, 2),
    (drops_in_an_inner_segment, 2),
    # what takes fewer bytes than a state is kept in its place
    (drops_few, 0),
    (drops_few_often, 1),
]


@pytest.mark.parametrize(("function", "states"), CASES)
def test_one_state_is_kept_for_draws_in_a_row(
    function: Callable[[Tensor], Tensor], states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    close = Recording.close

    def counted(recording: Recording, nodes: list[Any]) -> None:
        kept.append(sum(len(node.draws) for node in nodes))
        close(recording, nodes)

    monkeypatch.setattr(Recording, "close", counted)
    gradients = []
    for run in (function, lambda x: recompute(function, x)):
        torch.manual_seed(1)
        x = torch.rand(1, 1, SIZE, SIZE, requires_grad=True)
        y = run(x)
        y.square().sum().backward()
        gradients.append((x.grad, y, torch.get_rng_state()))
    assert kept[-1] == states
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_second_backward_draws_the_same() -> None:
    torch.manual_seed(1)
    x = torch.rand(SIZE, requires_grad=True)
    y = recompute(drops, x).square().sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_packed_state_is_the_state() -> None:
    stream = generator()
    for seed in (0, 5, 2**63 + 7):
        stream.manual_seed(seed)
        for size in (0, 1, 700):
            torch.randn(size, generator=stream)
            state = stream.get_state()
            packed = PackedState(state, stream.device)
            assert torch.equal(packed.state(), state)
            # the state of another device's stream is a seed and an offset
            assert packed.words.nbytes == (16 if state.nbytes == 16 else state.nbytes // 2)
