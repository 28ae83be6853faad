"""What cannot be done is said in an error of zoo's: what was given, and what to write instead."""

import functools
import runpy
import sys
from typing import Any

import pytest
import torch
from torch import nn

import zoo
import zoo._torch
from tests.training import real_peak
from zoo.errors import ArgumentError, BudgetError
from zoo.invocation import Invocation

images, meta = torch.rand(3, 4), torch.empty(3, 4, device="meta")
DIGITS = "9" * 400


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def frozen() -> nn.Module:
    return network().requires_grad_(False)


def nothing(parameters: Any) -> None:
    """Forgets to return an optimizer."""


plan = functools.partial(zoo.plan, memory_budget=1.0)
largest = functools.partial(zoo.largest, memory_budget="1MiB")
rank = functools.partial(zoo.plan_rank, memory_budget=1.0)
MAKES_NONE = "optimizer= made no optimizer but a value of type NoneType; return one, as lambda"
NOT_TAKEN = "does not take these inputs: RuntimeError: .*(shapes cannot|reduction dim)"
NO_LOSS = "loss= is a function of what the model returns; got 5"
NO_NAME = r"steps=1 is no name of a module; write names as in steps=\['encoder"
WRONG = {
    "uncheckpoint": (lambda: zoo.uncheckpoint(None), "uncheckpoint needs a torch.nn.Module; got"),  # type: ignore[type-var]
    "number as a step": (lambda: zoo.checkpoint(network(), steps=[1]), NO_NAME),  # type: ignore[list-item]
    "number as steps": (lambda: zoo.checkpoint(network(), steps=1), NO_NAME),  # type: ignore[arg-type]
    "number as a block": (lambda: zoo.chain_of(network(), images, steps=[1]), NO_NAME),  # type: ignore[list-item]
    "text to track": (lambda: zoo.track(network(), optimizer="a"), "steps in the block; got 'a'"),  # type: ignore[arg-type]
    "class to track": (
        lambda: zoo.track(network(), optimizer=torch.optim.AdamW),  # type: ignore[arg-type]
        "optimizer= takes the optimizer that steps in the block; got AdamW",
    ),
    "track a number": (lambda: zoo.track(network())(5), "a decorator, track takes a function; got"),
    "plan by none": (lambda: plan(network(), images, optimizer=nothing), MAKES_NONE),
    "plan by text": (lambda: plan(network(), images, optimizer=str), "a value of type str"),
    "plan by no function of parameters": (
        lambda: plan(network(), images, optimizer=lambda: None),
        "is called with a list of parameters, which it does not take: .*0 positional",
    ),
    "frontier by none": (lambda: zoo.frontier(network(), images, optimizer=nothing), MAKES_NONE),
    "verify by none": (lambda: zoo.verify(network(), images, optimizer=nothing), MAKES_NONE),
    "verify a frozen model by a number": (
        lambda: zoo.verify(frozen(), images, optimizer=3), "optimizer=3 is no optimizer"  # type: ignore[arg-type]
    ),
    "anatomy by none": (lambda: zoo.anatomy(network(), images, optimizer=nothing), MAKES_NONE),
    "largest by none": (lambda: largest(network(), images, optimizer=nothing), MAKES_NONE),
    "a rank by none": (
        lambda: rank(network(), images, world_size=2, optimizer=nothing), MAKES_NONE
    ),
    "largest of nothing trained": (lambda: largest(frozen(), images), "has no training step"),
    "anatomy of nothing trained": (lambda: zoo.anatomy(frozen(), images), "no training step"),
    "largest of what is always the same": (
        lambda: largest(network(), vary=lambda size: images, verify=False),
        "sizes 1 and 4294967296 need the same .*pass vary= a dimension or a function",
    ),
    "more ranks than there are": (
        lambda: rank(network(), images, world_size=10**12), "must be a number from 1 to 65536"
    ),
    "digits of ranks": (lambda: rank(network(), images, world_size=10**5000), "from 1 to 65536"),
    "digits of a budget": (lambda: plan(network(), images, memory_budget=DIGITS), "any memory"),
    "number of a budget": (lambda: plan(network(), images, memory_budget=10**400), "any memory"),
    "digits for auto": (lambda: zoo.checkpoint(network(), memory_budget=DIGITS), "any memory"),
    "verify other inputs": (lambda: zoo.verify(network(), torch.rand(3, 7)), NOT_TAKEN),
    "anatomy of other inputs": (lambda: zoo.anatomy(network(), torch.rand(3, 7)), NOT_TAKEN),
    "anatomy of other fakes": (lambda: zoo.anatomy(network(), meta.new_empty(3, 7)), NOT_TAKEN),
    "plan other inputs": (lambda: plan(network(), torch.rand(3, 7)), NOT_TAKEN),
    "verify another name": (
        lambda: zoo.verify(network(), {"y": images}), "these inputs: TypeError: .*argument 'y'"
    ),
    "verify by a number": (lambda: zoo.verify(network(), images, loss=5), NO_LOSS),  # type: ignore[arg-type]
    "anatomy by a number": (lambda: zoo.anatomy(network(), images, loss=5), NO_LOSS),  # type: ignore[arg-type]
    "plan by a number": (lambda: plan(network(), images, loss=5), NO_LOSS),
    "largest by a number": (lambda: largest(network(), images, loss=5), NO_LOSS),
    "auto without a device": (
        lambda: zoo.anatomy(network().to("meta"), meta, checkpoint="auto"),
        "need the CPU or a device that counts its memory; this model is on meta",
    ),
    "list by a number": (lambda: zoo.list_models(5), r"a pattern such as 'resnet\*'; got 5"),  # type: ignore[arg-type]
    "text as a width": (
        lambda: zoo.TransformerBlock("32", heads=4),  # type: ignore[arg-type]
        "needs width of at least 1; got '32', which is no whole number",
    ),
    "text as a ratio": (
        lambda: zoo.TransformerBlock(32, heads=4, mlp_ratio="4"),  # type: ignore[arg-type]
        "mlp_ratio that is a number; got '4'",
    ),
    "no number as a ratio": (
        lambda: zoo.TransformerBlock(32, heads=4, mlp_ratio=float("nan")), "a number; got nan"
    ),
    "a float of classes": (lambda: zoo.resnet18(classes=1e99), "got 1e[+]99, which is no whole"),
    "digits of classes": (lambda: zoo.resnet18(classes=10**30), "classes of at most 1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_told_in_an_error_of_ours(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message) as caught:
        call()  # type: ignore[no-untyped-call]
    assert len(str(caught.value)) < 600


def test_errors_of_ours_and_of_memory_pass_through_a_call_of_a_model() -> None:
    class Raises(nn.Module):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def forward(self, x: Any) -> Any:
            raise self.error

    for error in (BudgetError("too small"), MemoryError(), torch.OutOfMemoryError("full")):
        with pytest.raises(type(error)) as caught:
            Invocation.of(images).taken_by(Raises(error))
        assert caught.value is error
    with pytest.raises(ArgumentError, match="Raises does not take these inputs: KeyError: 'a'"):
        Invocation.of(images).taken_by(Raises(KeyError("a")))


def test_a_frozen_model_trains_its_inputs() -> None:
    given = images.clone().requires_grad_()
    found = real_peak(frozen(), given, torch.optim.AdamW)
    assert found >= 4 * (4 * 4 + 4 + 4 * 2 + 2 + 3 * 4)
    assert largest(frozen(), given, verify=False).size > 1


def test_an_optimizer_need_not_be_one_of_torchs() -> None:
    class Plain:
        def __init__(self, parameters: Any) -> None:
            self.param_groups, self.state = [{"params": list(parameters)}], {}  # type: ignore[var-annotated]

        def step(self) -> None:
            pass

        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    assert zoo.verify(network(), images, optimizer=Plain).exact  # type: ignore[arg-type]
    assert plan(network(), images, optimizer=Plain).fixed.optimizer == 0


def test_planning_for_ranks_leaves_how_errors_are_reported(monkeypatch: Any) -> None:
    for hook in (sys.__excepthook__, lambda *_: None):
        monkeypatch.setattr(sys, "excepthook", hook)
        rank(network(), images, world_size=2)
        assert sys.excepthook is hook
        with pytest.raises(ArgumentError, match="made no optimizer"):
            rank(network(), images, world_size=2, optimizer=nothing)
        assert sys.excepthook is hook


def test_an_older_torch_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or later; this is 2\.10\.1"):
        runpy.run_path(str(zoo._torch.__file__))


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0a0+nv26.06", "2.15.0"])
def test_later_ones_and_prereleases_are_not(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert "OLDEST" in runpy.run_path(str(zoo._torch.__file__))
