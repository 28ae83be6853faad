"""What an option takes, and what is refused with the reason and the way out."""

import copy
import functools
import gc
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.tracing.models import Net, Reader
from tests.training import assert_same, images, train
from zoo.tracing.planned_forward import patched_forward


class Switched(Net):
    grad_checkpointing = False


@pytest.mark.parametrize("name", ["grad_checkpointing", "gradient_checkpointing"])
def test_a_model_that_checkpoints_itself_is_refused(name: str) -> None:
    """the library's own checkpointing is on | | raises"""
    model = Net()
    setattr(model.blocks, name, True)
    with pytest.raises(zoo.ArgumentError, match=rf"blocks\.{name} is True.*\(|by model"):
        zoo.checkpoint(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("option", [2, "sqrt", "cheap", True, "blocks"])
def test_every_option_takes_a_forward_that_reads_numbers(option: Any) -> None:
    plain = Reader()
    model = zoo.checkpoint(copy.deepcopy(plain), option)
    assert_same(train(model, lambda: [images()]), train(plain, lambda: [images()]))
    assert zoo.plan_of(model).depth() == 1


def test_a_plan_of_another_number_of_steps_is_refused_at_the_forward() -> None:
    model = zoo.checkpoint(Reader(), zoo.Plan((0,)))
    with pytest.raises(zoo.PlanError, match="the plan covers 1 steps but the model has 19"):
        model(images())


@pytest.mark.usefixtures("without_fork")
def test_more_segments_than_blocks_are_refused_as_by_a_chain() -> None:
    refused = "checkpoint=99 asks for 99 segments; this model has {} blocks, so choose 1 to {}"
    model = zoo.checkpoint(Net(), 99)
    for _ in range(2):
        with pytest.raises(zoo.ArgumentError, match=refused.format(6, 6)):
            model(images())
    with pytest.raises(zoo.ArgumentError, match=refused.format(10, 10)):
        zoo.resnet18(checkpoint=99)(torch.rand(2, 3, 32, 32))


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


def test_what_a_first_call_settles_is_settled_by_the_first_call() -> None:
    model = Settled()
    assert zoo.plan(model, images(), max_overhead=1.0).plan
    assert model.settings.purpose is None
    zoo.checkpoint(model)(images())
    assert model.settings.purpose == "regression"


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


def test_hooks_that_a_forward_needs_or_registers_act() -> None:
    capturing, starting = Capturing(), Starting()
    capturing.capture()
    for plain in (capturing, starting):
        assert zoo.plan(plain, images(), max_overhead=1.0).plan
        assert not plain.seen
    assert not starting.blocks[0]._forward_hooks
    starting.capture()
    for plain in (capturing, starting):
        other = type(plain)()
        other.capture()
        other.load_state_dict(plain.state_dict())
        model = zoo.checkpoint(other)
        assert_same(train(model, lambda: [images()]), train(plain, lambda: [images()]))


def test_a_budget_needs_no_numbers_of_a_small_model() -> None:
    model = zoo.checkpoint(Reader(), memory_budget="1GiB", inputs=images())
    assert zoo.plan_of(model).depth() == 0
    with pytest.raises(zoo.ArgumentError, match=r"have none while.*without a budget traces"):
        zoo.checkpoint(Reader().to("meta"), memory_budget="1GiB", inputs=images().to("meta"))


def test_a_first_forward_under_a_budget_raises_its_own_error() -> None:
    class Refused(Exception):
        pass

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if len(x) == 3:
                raise Refused("three rows")
            return self.layer(x).relu()

    model = zoo.checkpoint(Picky(), memory_budget="1MiB")
    for calls in (1, 2):
        with pytest.raises(Refused, match="three rows") as caught:
            model(torch.rand(3, 4))
        assert model.calls == calls
        assert caught.value.__context__ is None
    model(torch.rand(2, 4)).sum().backward()
    assert zoo.plan_of(model).depth() == 0


@pytest.mark.usefixtures("without_fork")
def test_a_refusal_names_the_optimizer_that_is_assumed_and_how_to_plan_for_another() -> None:
    model, x = nn.Sequential(*(nn.Linear(200, 200) for _ in range(10))), torch.rand(1, 200)
    report = zoo.plan(model, x, memory_budget=1.0, optimizer=torch.optim.SGD)
    zoo.checkpoint(model, memory_budget=report.predicted_peak)
    state = r"assumed to be AdamW, with a state of 3\.07 MiB: pass optimizer= to zoo\.checkpoint"
    with pytest.raises(zoo.BudgetError, match=state) as refusal:
        model(x)
    assert refusal.value.budget == report.predicted_peak < refusal.value.least
    zoo.checkpoint(model, report)(x).sum().backward()
    zoo.checkpoint(model, memory_budget=report.predicted_peak, optimizer=torch.optim.SGD)
    model(x).sum().backward()
    zoo.checkpoint(model, memory_budget=1000)
    zoo.optimizer_in_backward(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(zoo.BudgetError) as refusal:
        model(x)
    assert "AdamW" not in str(refusal.value)


@pytest.mark.usefixtures("without_fork")
def test_an_optimizer_that_is_assumed_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Assuming(Net):
        pass

    given: Any = {"memory_budget": "1GiB", "inputs": images()}
    zoo.checkpoint(Assuming(), **given, optimizer="adamw")
    zoo.checkpoint(Assuming(), max_overhead=0.5, inputs=images())
    assert not caplog.records
    for _ in range(2):
        zoo.checkpoint(Assuming(), **given)
    (record,) = caplog.records
    assert "budget of Assuming: the optimizer is assumed to be AdamW" in record.getMessage()


def half(outputs: Tensor) -> Tensor:
    return outputs.exp().sum() / 2


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "none"},
        {"optimizer": functools.partial(torch.optim.SGD, lr=1, momentum=0.9)},
        {"optimizer": "of the model"},
        {"optimizer": "adam", "loss": half},
        {"optimizer": "sgd", "accumulates": True},
        {"optimizer": "sgd", "holds_outputs": False},
    ],
)
def test_a_budget_counts_what_zoo_plan_counts(given: dict[str, Any]) -> None:
    model, x = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3))), torch.rand(600, 200)
    if given["optimizer"] == "of the model":
        given = {"optimizer": torch.optim.Adam([*model[0].parameters()])}
    least = zoo.plan(model, x, memory_budget=1.0, **given).least_peak
    zoo.checkpoint(model, memory_budget=least, inputs=x, **given)
    zoo.checkpoint(model, memory_budget=least - 1, **given)
    with pytest.raises(zoo.BudgetError, match="needs at least") as refusal:
        model(x)
    assert refusal.value.least == least


def test_a_loss_is_asked_for_each_new_size() -> None:
    targets = torch.zeros(600, dtype=torch.long)
    model, x = nn.Linear(200, 200), torch.rand(600, 200)
    given: Any = {"memory_budget": "1GiB", "optimizer": "sgd"}
    zoo.checkpoint(model, loss=lambda found: F.cross_entropy(found, targets), **given)
    with pytest.raises(zoo.ArgumentError, match=r"loss=<lambda> fails.*makes targets of the size"):
        model(x[:5])
    F.cross_entropy(model(x), targets).backward()
    # a training that has begun goes on
    model(torch.rand(700, 200)).sum().backward()


@pytest.mark.usefixtures("without_fork")
def test_an_optimizer_is_counted_without_its_state_and_copied_with_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    zoo.checkpoint(model, memory_budget="1GiB", optimizer=optimizer, loss=half)
    half(model(torch.rand(5, 20))).backward()
    optimizer.step()
    state = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    del optimizer
    gc.collect()
    assert state() is None
    for other in copies:
        patched = patched_forward(other)
        assert patched is not None
        optimizer_of_copy: Any = patched.training.optimizer
        assert optimizer_of_copy.param_groups[0]["params"][0] is other[0].weight
        half(other(torch.rand(5, 20))).backward()


@pytest.mark.parametrize("through_report", [True, False])
@pytest.mark.parametrize("holds", [True, False])
def test_outputs_that_a_variable_holds_are_said_to_be_left_out(
    holds: bool, through_report: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 600)), torch.rand(500, 20)
    given: Any = {"memory_budget": "1GiB", "loss": half, "optimizer": "sgd"}
    if through_report:
        zoo.checkpoint(model, zoo.PlanReport.from_json(zoo.plan(model, x, **given).to_json()))
    else:
        zoo.checkpoint(model, **given)
    for _ in range(2):
        if holds:
            outputs = model(x)
            half(outputs).backward()
        else:
            half(model(x)).backward()
    told = [record.getMessage() for record in caplog.records]
    text = r"Sequential returned is held by a variable in the backward \(1\.14 MiB\)"
    assert len(told) == holds
    assert all(re.search(text, message) for message in told)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accumulates": True}, "say what a budget counts; got checkpoint=True, which has none"),
        ({"checkpoint": "sqrt", "loss": half}, "got checkpoint='sqrt'"),
        ({"memory_budget": "1GiB", "loss": 3}, "loss= is a function of what the model returns"),
        ({"memory_budget": "1GiB", "optimizer": "adamx"}, "optimizer='adamx' is no optimizer"),
        (
            {"memory_budget": "1GiB", "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])},
            "holds 1 parameter that this model does not train",
        ),
    ],
)
def test_a_wrong_step_is_refused_and_changes_nothing(given: Any, message: str) -> None:
    model = zoo.checkpoint(Net(), "sqrt")
    before = {module: dict(vars(module)) for module in model.modules()}
    with pytest.raises(zoo.ArgumentError, match=re.escape(message)):
        zoo.checkpoint(model, **given)
    assert {module: dict(vars(module)) for module in model.modules()} == before


def test_a_refused_call_leaves_the_plan_that_was_in_force() -> None:
    model = zoo.checkpoint(Net(), "sqrt")
    before = {module: dict(vars(module)) for module in model.modules()}
    with pytest.raises(zoo.ArgumentError, match="does not take these inputs"):
        zoo.checkpoint(model, memory_budget="1GiB", inputs=images(2, 3))
    assert {module: dict(vars(module)) for module in model.modules()} == before


@pytest.mark.usefixtures("without_fork")
def test_a_model_is_planned_for_inputs_before_its_first_forward() -> None:
    model = zoo.checkpoint(zoo.resnet18(classes=3), "sqrt", inputs=torch.rand(2, 3, 32, 32))
    plan = zoo.plan_of(model)
    assert plan is not None
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert zoo.plan_of(model) is plan
    with pytest.raises(zoo.BudgetError):
        zoo.checkpoint(model, memory_budget="1KiB", inputs=torch.rand(2, 3, 32, 32))
    assert zoo.plan_of(model) is plan


class Lone(nn.Module):
    """Has no blocks that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).sin() * x.sum().item()


@pytest.mark.parametrize("option", [True, "sqrt", "blocks", 2])
@pytest.mark.parametrize("steps", [None, ["fc"]])
def test_a_model_without_blocks_is_planned_for(option: Any, steps: Any) -> None:
    plain = Lone()
    model = zoo.checkpoint(copy.deepcopy(plain), option, steps=steps)
    assert_same(train(model, lambda: [torch.rand(2, 4)]), train(plain, lambda: [torch.rand(2, 4)]))
    assert len(zoo.chain_of(model, torch.rand(2, 4), steps=steps).names) == 3


def test_a_wrong_call_raises_what_it_raises_without() -> None:
    model = zoo.checkpoint(Net())
    with pytest.raises(RuntimeError, match="expected input"):
        model(torch.rand(2, 7, 6, 6))
    model(images())
    with pytest.raises(RuntimeError, match="expected input"):
        model(torch.rand(2, 7, 6, 6))
    model(images()).sum().backward()
    assert zoo.plan_of(model) is not None


class Faulty(Net):
    """Raises in the middle where it is told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[:2](self.stem(x))
        if self.fails:
            raise ValueError("no")
        return self.fc(self.blocks[2:](x).mean((2, 3)))


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_forward_that_raises_leaves_training_as_it_is_without(when: int) -> None:
    def batches(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        for step in range(4):
            model.fails = step == when
            try:
                loss = model(images()).square().mean()
            except ValueError:
                continue
            loss.backward()
            found += [loss, *(parameter.grad.clone() for parameter in model.parameters())]
        return [*found, *model.state_dict().values(), torch.get_rng_state()]

    plain = Faulty()
    model = zoo.checkpoint(copy.deepcopy(plain))
    for one, other in zip(batches(model), batches(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("value", [nn.Linear, 3, None])
def test_what_is_no_module_is_refused(value: Any) -> None:
    with pytest.raises(zoo.ArgumentError, match=r"needs a torch\.nn\.Module"):
        zoo.checkpoint(value)
    with pytest.raises(zoo.ArgumentError, match=r"chain_of needs a torch\.nn\.Module"):
        zoo.chain_of(value, images())


def test_hooks_for_all_modules_act() -> None:
    seen: list[nn.Module] = []

    def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        seen.append(module)
        return output * 0.5 if isinstance(module, nn.Conv2d) else None

    plain = Net()
    model = zoo.checkpoint(copy.deepcopy(plain))
    handle = nn.modules.module.register_module_forward_hook(halve)
    try:
        one, count = train(model, lambda: [images()]), len(seen)
        assert_same(one, train(plain, lambda: [images()]))
        assert count == len(seen) / 2
    finally:
        handle.remove()


def test_names_of_steps_must_be_there() -> None:
    with pytest.raises(zoo.ArgumentError, match=r"steps='block\.\*'"):
        zoo.chain_of(Net(), images(), steps=["block.*"])
    found = zoo.chain_of(Net(), images(), steps=["blocks.*"])
    assert len(set(found.blocks)) == 6
    assert zoo.chain_of(Net(), images(), steps="blocks.*") == found
