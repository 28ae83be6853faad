"""Modules of TorchScript train as parts of a model, and are refused by name where they are all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import assert_same, train
from zoo.errors import ArgumentError

pytestmark = [
    # torch's own: TorchScript is deprecated
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 512).view(32, 16)


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    # with other masks at each call, which the trace cannot check
    return torch.jit.trace(module, batch(), check_trace=False)


def model_of(make: Callable[[nn.Module], Any], whole: bool) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(block() for _ in range(3)))
    parts = [make(blocks), block()] if whole else [*map(make, blocks), block()]
    return nn.Sequential(*parts)


@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("options", [{}, {"checkpoint": "blocks"}, {"memory_budget": 1.0}])
def test_a_model_trains_with_children_of_torchscript(
    options: Any, whole: bool, make: Callable[[nn.Module], Any]
) -> None:
    model = zoo.checkpoint(model_of(make, whole), **options)
    plain = model_of(make, whole)
    # TorchScript compiles anew in the first calls
    assert_same(train(model, lambda: [batch()], 4), train(plain, lambda: [batch()], 4))
    assert zoo.plan_of(model) is not None


@pytest.mark.parametrize("make", [scripted, traced, lambda m: torch.jit.freeze(scripted(m.eval()))])
def test_a_module_of_torchscript_is_refused_and_left_as_it_is(
    make: Callable[[nn.Module], Any],
) -> None:
    module = make(block())
    before = {*vars(module)}
    with pytest.raises(
        ArgumentError, match="is a module of TorchScript, whose forward is compiled"
    ):
        zoo.checkpoint(module, memory_budget=1.0)
    assert {*vars(module)} == before
    assert zoo.checkpoint(module, False) is module


@pytest.mark.parametrize("option", [True, "blocks"])
def test_a_model_with_a_plan_is_not_scripted_without_it(option: Any) -> None:
    model = zoo.checkpoint(nn.Sequential(block(), block()).eval(), option)
    with pytest.raises(ArgumentError, match=r"call zoo\.uncheckpoint before torch\.jit"):
        torch.jit.script(model)
    x = batch()
    assert torch.equal(traced(model)(x), model(x))
    assert torch.equal(torch.jit.script(zoo.uncheckpoint(model))(x), model(x))
