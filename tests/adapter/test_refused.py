"""What cannot be had is refused, with the reason and the way out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.adapter.models import Net, Reader
from tests.training import images


class Switched(Net):
    grad_checkpointing = False


@pytest.mark.parametrize("name", ["grad_checkpointing", "gradient_checkpointing"])
def test_a_model_that_checkpoints_itself_is_refused(name: str) -> None:
    model = Net()
    setattr(model.blocks, name, True)
    with pytest.raises(zoo.ArgumentError, match=rf"blocks\.{name} is True.*\(|by model"):
        zoo.checkpoint(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("option", [2, "sqrt", "cheap", zoo.Plan((0,))])
def test_an_option_that_needs_a_tape_is_refused_without_one(option: Any) -> None:
    model = zoo.checkpoint(Reader(), option)
    with pytest.raises(zoo.ArgumentError, match=r"reads a number out of a tensor by item.*blocks"):
        model(images())


class Settled(Net):
    """Settles on its first call what it is for, as classifiers of transformers do."""

    class Settings:
        purpose = None

    def __init__(self) -> None:
        super().__init__()
        self.settings = self.Settings()

    def forward(self, x: Tensor) -> Tensor:
        if self.settings.purpose is None:
            self.settings.purpose = "regression"
        return super().forward(x)


def test_what_a_first_call_settles_is_named_and_may_be_set_before() -> None:
    model = Settled()
    with pytest.raises(zoo.ArgumentError, match=r"changes purpose of a Settings.* Set that before"):
        zoo.plan(model, images(), max_overhead=1.0)
    model.settings.purpose = "regression"
    assert zoo.plan(model, images(), max_overhead=1.0).plan


class Capturing(Net):
    """Needs what a hook on a block sees, as Segformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def capture(self) -> None:
        self.blocks[0].register_forward_hook(lambda *call: self.seen.append(call[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.seen.pop().mean()


class Starting(Capturing):
    """Puts up the hook itself."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.blocks[0]._forward_hooks:
            self.capture()
        return super().forward(x)


def test_hooks_that_a_forward_needs_are_named_and_inputs_not_blamed() -> None:
    with pytest.raises(zoo.ArgumentError, match="its code registers hooks on modules"):
        zoo.plan(Starting(), images(), max_overhead=1.0)
    model = Capturing()
    model.capture()
    with pytest.raises(zoo.ArgumentError, match=r"cannot be planned for.* without the hooks"):
        zoo.plan(model, images(), max_overhead=1.0)


def test_a_budget_needs_a_tape() -> None:
    model = Reader()
    with pytest.raises(zoo.ArgumentError, match="cannot be followed"):
        zoo.checkpoint(model, memory_budget="1GiB", inputs=images())
    assert "forward" not in vars(model)


def test_a_model_without_blocks_that_cannot_be_followed_is_refused() -> None:
    class Lone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * x.sum().item()

    for option in (True, "sqrt"):
        with pytest.raises(zoo.ArgumentError, match=r"no blocks that repeat.*'blocks', steps="):
            zoo.checkpoint(Lone(), option)(torch.rand(2, 4))
    model = zoo.checkpoint(Lone(), steps=["fc"])
    model(torch.rand(2, 4))
    assert [segment.module for segment in model.forward.segments] == [model.fc]


def test_a_wrong_call_raises_what_it_raises_without() -> None:
    model = zoo.checkpoint(Net())
    with pytest.raises(RuntimeError, match="expected input"):
        model(torch.rand(2, 7, 6, 6))
    model(images())
    assert model.forward.plan is not None


@pytest.mark.parametrize("value", [nn.Linear, 3, None])
def test_what_is_no_module_is_refused(value: Any) -> None:
    with pytest.raises(zoo.ArgumentError, match=r"needs a torch\.nn\.Module"):
        zoo.checkpoint(value)
    with pytest.raises(zoo.ArgumentError, match=r"in a torch\.nn\.Module"):
        zoo.chain_of(value, images())


def test_hooks_for_all_modules_are_refused() -> None:
    model = zoo.checkpoint(Net())
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(zoo.ArgumentError, match="hooks for all modules"):
            model(images())
    finally:
        handle.remove()


def test_names_of_steps_must_be_there() -> None:
    with pytest.raises(zoo.ArgumentError, match=r"steps='block\.\*'"):
        zoo.chain_of(Net(), images(), steps=["block.*"])
    found = zoo.chain_of(Net(), images(), steps=["blocks.*"])
    assert len(set(found.blocks)) == 6
    assert zoo.chain_of(Net(), images(), steps="blocks.*") == found
