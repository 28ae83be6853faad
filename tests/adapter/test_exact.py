"""Any module trains by any option bit for bit as it trains without."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.adapter.models import Net, Reader, Skipper, Tagger, UNet
from tests.training import assert_same, images, needs_numpy, train
from zoo.adapter.steps import Part
from zoo.measure.memory import measure_step, trace


def pictures() -> list[Tensor]:
    return [images().requires_grad_()]


def pairs() -> list[Tensor]:
    return [images(2, size=16), torch.rand(2, 1, 1, 1)]


def tokens() -> list[Tensor]:
    return [torch.randint(20, (6, 3))]


def sequences() -> list[Tensor]:
    return [torch.randn(2, 5, 16), torch.randn(2, 4, 16)]


def first(model: nn.Module) -> Callable[..., Tensor]:
    def forward(*inputs: Tensor) -> Any:
        output = model(*inputs)
        if isinstance(output, dict):
            return output["logits"]
        return output[0] if isinstance(output, tuple) else output

    return forward


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sequence[Tensor]]]] = {
    "net": (Net, pictures),
    "unet": (UNet, pairs),
    "lstm": (Tagger, tokens),
    "layer drop, off": (Skipper, pictures),
    "transformer": (lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True), sequences),
}


def check(model: nn.Module, inputs: Callable[[], Sequence[Tensor]], option: Any) -> None:
    other = zoo.checkpoint(copy.deepcopy(model), option)
    assert_same(
        train(other, inputs, forward=first(other)), train(model, inputs, forward=first(model))
    )


@pytest.mark.parametrize("option", [True, 2, "sqrt", "blocks", "cheap"])
@pytest.mark.parametrize("name", MODELS)
def test_every_option_is_exact(name: str, option: Any) -> None:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    check(build(), inputs, option)


@pytest.mark.parametrize("option", [True, "blocks"])
def test_a_forward_that_cannot_be_followed_is_exact_by_blocks(option: Any) -> None:
    check(Reader(), pictures, option)
    model = zoo.checkpoint(Reader(), option)
    model(images())
    assert len(model.forward.segments) == 4


class Rows(nn.Module):
    """Its blocks are Sequentials in a list, and it keeps what they returned on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.means = []
        for row in self.rows:
            x = x + row(x)
            self.means.append(x.mean())
        return x * sum(self.means)


def test_sequentials_in_a_row_are_blocks_where_there_are_no_others() -> None:
    check(Rows(), pictures, True)
    assert zoo.chain_of(Rows(), images()).segments == ("rows.0", "rows.1", "rows.2")


@pytest.mark.parametrize("rate", [0.5, 1.0, 1e-9])
def test_a_branch_that_a_draw_decides_is_exact_by_blocks(rate: float) -> None:
    found = zoo.chain_of(Skipper(rate), images())
    assert found.reason == "reads a number out of a tensor by __bool__ (in rows)"
    check(Skipper(rate), pictures, True)


def test_layer_drop_may_be_switched_on_later() -> None:
    model = zoo.checkpoint(Skipper())
    model(images())
    assert model.forward.plan is not None
    model.rows.rate = 0.5
    model(images())
    assert model.forward.reason is not None


def test_a_plan_of_steps_that_were_found_is_exact() -> None:
    steps = len(zoo.chain_of(Net(), images()).names)
    check(Net(), pictures, zoo.Plan([0, tuple(range(1, 9)), tuple(range(9, steps))]))


def test_inputs_that_another_model_made_warn_of_nothing() -> None:
    # as in a GAN's step of the generator; torch warns of the `.grad` of what is no leaf
    made = images() * torch.ones((), requires_grad=True)
    first(zoo.checkpoint(Net()))(made).sum().backward()


def test_less_memory_is_taken() -> None:
    def peak(model: nn.Module) -> int:
        inputs = torch.rand(4, 4, 32, 32)
        model(inputs).sum().backward()  # plans
        return trace(lambda: model(inputs).sum().backward()).peak

    plain, planned = (peak(Net(blocks=12)), peak(zoo.checkpoint(Net(blocks=12))))
    assert planned < 0.5 * plain


@needs_numpy
def test_a_budget_is_kept_to() -> None:
    model, inputs = Net(16, blocks=12), torch.rand(4, 4, 32, 32)
    for block in model.blocks:
        # a plan does not count the random state that each drawing segment keeps, 5 KiB
        block.drop = nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()

    step()
    budget = measure_step(step, model, optimizer, [inputs]).peak * 6 // 10
    zoo.checkpoint(model, memory_budget=budget, inputs=inputs)
    step()
    assert measure_step(step, model, optimizer, [inputs]).peak <= budget
    with pytest.raises(zoo.BudgetError, match="needs at least"):
        zoo.checkpoint(model, memory_budget=1, inputs=inputs)
    assert model.forward.option.memory_budget == budget


def test_steps_that_do_other_work_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(part: Part, *given: Any) -> Any:
        return tuple(value + 0 for value in run(part, *given))

    run = Part.__call__
    monkeypatch.setattr(Part, "__call__", twice)
    check(Net(), pictures, "blocks")
    model = zoo.checkpoint(Net())
    model(images())
    assert "other work" in model.forward.reason
