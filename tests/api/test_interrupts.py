"""Ctrl-C ends what takes long with what it has, and leaves all as it was."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.cli.conftest import Told
from tests.traces import tracing_once
from tests.training import Residuals, assert_same, everything, images
from zoo.cli.main import run
from zoo.errors import Interrupted
from zoo.profiling import progress
from zoo.profiling.progress import WorkPart

pytestmark = pytest.mark.usefixtures("few_plans")

Interrupt = Callable[[str, int], list[str]]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Presses Ctrl-C when so many of what is counted by a name are done, or so many parts begun.

    Returns the list of the parts that began.
    """

    def at(name: str, number: int) -> list[str]:
        begun: list[str] = []

        class Interrupting(WorkPart):
            def __setattr__(self, attribute: str, value: Any) -> None:
                super().__setattr__(attribute, value)
                if attribute == "name":
                    begun.append(value)
                    if not name and len(begun) == number:
                        raise KeyboardInterrupt
                if attribute == "done" and value == number and self.label and self.label == name:
                    raise KeyboardInterrupt

        monkeypatch.setattr(progress, "WorkPart", Interrupting)
        return begun

    return at


def state(model: nn.Module) -> Any:
    hooks = [
        (
            name,
            [*vars(module)],
            [len(vars(module)[kind]) for kind in vars(module) if "hooks" in kind],
        )
        for name, module in model.named_modules()
    ]
    return hooks, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), zoo.plan_of(model)


INPUTS = images()
FUNCTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "zoo.plan": lambda model: zoo.plan(model, INPUTS, max_overhead=1.0),
    "zoo.frontier": lambda model: zoo.frontier(model, INPUTS),
    "zoo.largest": lambda model: zoo.largest(model, INPUTS, memory_budget="1MiB"),
    "zoo.plan_rank": lambda model: zoo.plan_rank(
        model, INPUTS, world_size=2, max_overhead=1.0, strategy="ddp"
    ),
    "zoo.anatomy": lambda model: zoo.anatomy(model, INPUTS, checkpoint=2),
    "zoo.verify": lambda model: zoo.verify(model, INPUTS, 2, steps=2),
    # its first step plans
    "zoo.checkpoint": lambda model: model(INPUTS),
}
# a place in the middle, for each
MIDDLE = {
    "zoo.plan_rank": ("steps by plans", 1),
    "zoo.anatomy": ("tracked steps", 1),
    "zoo.verify": ("steps of training", 1),
    "zoo.largest": ("", 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_shows_progress_and_leaves_all_as_it_was(name: str, interrupt: Interrupt) -> None:
    torch.manual_seed(0)
    model = zoo.checkpoint(Residuals(2), memory_budget="1GiB" if name == "zoo.checkpoint" else None)
    before, bits = state(model), everything(model)
    # where a first or a second part begins, and in the middle of a loop
    for place in ("", 1), ("", 2), MIDDLE.get(name, ("searching plans", 1)):
        begun = interrupt(*place)
        with pytest.raises(KeyboardInterrupt):
            FUNCTIONS[name](model)
        assert begun[0] == name
        assert state(model) == before
        assert_same(everything(model), bits)
        assert progress._local.parts == []
    interrupt("nothing", 0)
    FUNCTIONS[name](model)


@pytest.mark.parametrize("function", [zoo.frontier, functools.partial(zoo.plan, max_overhead=1.0)])
def test_the_plans_found_so_far_are_on_the_exception(
    function: Callable[..., Any], interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.policy.budget.SHOWN", 1000)
    model, inputs = Residuals(blocks=4), images(8, 4, 16)
    interrupt("plans for budgets", 6)
    with pytest.raises(
        Interrupted, match=r"interrupted; \d+ of the best plans of Residuals"
    ) as told:
        function(model, inputs, device="a100")
    found = told.value.found
    interrupt("nothing", 0)
    whole = zoo.frontier(model, inputs, device="a100")
    assert 1 < len(found.optimal) < len(whole.optimal)
    assert found.baseline == whole.baseline
    assert found.schemes == whole.schemes
    for point in found.optimal:
        assert any(p.peak <= point.peak and p.time_ratio <= point.time_ratio for p in whole.optimal)
    assert set(found.optimal[:-1]) & set(whole.optimal)


def test_an_interrupt_while_offloading_is_searched_loses_no_plan(
    interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.policy.budget.SHOWN", 1000)
    model, inputs = Residuals(blocks=4), images(64, 4, 32)
    kept = zoo.frontier(model, inputs, device="a100")
    interrupt("plans with offloading", 12)
    with pytest.raises(Interrupted, match="best plans of Residuals") as told:
        zoo.frontier(model, inputs, device="a100", offload=True)
    found = told.value.found
    assert any(point.offloaded for point in found.optimal)
    for point in kept.optimal:
        # what is judged is the best by costs, which are some thousandths off
        assert any(
            p.peak <= 1.01 * point.peak and p.time_ratio <= point.time_ratio for p in found.optimal
        )


def test_before_a_first_plan_there_is_nothing(interrupt: Interrupt) -> None:
    interrupt("searching plans", 2)
    with pytest.raises(KeyboardInterrupt) as told:
        zoo.frontier(Residuals(), images(), device="a100")
    assert type(told.value) is KeyboardInterrupt


def test_the_largest_size_known_to_fit_is_on_the_exception(
    interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.api.checkpoint.step_trace_of", tracing_once({}, id))
    model = Residuals()
    # cuBLAS alone holds 16.25 MiB there
    ask = functools.partial(zoo.largest, model, images(), memory_budget="17.25MiB", device="a100")
    whole = ask()
    seen: list[int] = []
    begun = interrupt("", 10**6)
    ask()
    sizes = [place for place, name in enumerate(begun, 1) if name.startswith("size ")]
    for place in sizes[1:]:
        begun = interrupt("", place)
        with pytest.raises(Interrupted, match="interrupted; of the sizes so far, size") as told:
            ask()
        known = [int(name.split()[1]) for name in begun if name.startswith("size ")][:-1]
        assert told.value.found == max(size for size in known if size <= whole.size)
        seen.append(told.value.found)
    assert seen == sorted(seen)
    assert seen[-1] == whole.size
    interrupt("", sizes[0])
    with pytest.raises(Interrupted, match="none is known to fit yet") as told:
        ask()
    assert told.value.found is None


def test_a_size_that_a_real_step_refuted_is_not_known_to_fit(
    interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> int:
        interrupt("", 1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr("zoo.api.track.CopiedStep.peak", out_of_memory)
    with pytest.raises(Interrupted, match="none is known to fit yet"):
        zoo.largest(Residuals(), images(), memory_budget="1MiB", verify=True)


def test_the_command_prints_the_plans_found_so_far(
    interrupt: Interrupt, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt("plans for budgets", 6)
    asked = ["frontier", "resnet18", "--input", "2,3,64,64", "--device", "a100"]
    code = run(asked)
    told = Told(code, *capsys.readouterr())
    assert told.code == 130
    assert told.err.startswith("zoo frontier: interrupted; ")
    assert "best plan" in told.out
    assert "optimal" in told.out
    interrupt("searching plans", 2)
    assert run(asked) == 130
    assert Told(code, *capsys.readouterr()) == Told(130, "", "zoo frontier: interrupted\n")
