"""Guards look at all values of a training in few calls, and notice what is no longer the same."""

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo.cuda_graphs.guards import Guards

pytestmark = pytest.mark.usefixtures("without_fork")


def trained(depth: int) -> tuple[nn.Sequential, torch.optim.Optimizer, Guards]:
    """Returns a model of `depth` blocks and its optimizer after a step, and their guards."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(depth))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.rand(3, 4)).square().mean().backward()
    optimizer.step()
    return model, optimizer, Guards({"model": model, "opt": optimizer}, torch.device("cpu"))


def calls_of(function: Callable[[], Any]) -> int:
    """Returns how many functions of Python a call runs."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_no_python_runs_for_each_parameter_of_what_is_unchanged() -> None:
    _, _, guards = trained(50)
    assert guards.change() is None
    # of 200 parameters; the garbage collector may call some more
    assert calls_of(guards.change) < 50


def test_a_number_that_is_computed_anew_is_looked_at_alone() -> None:
    _, optimizer, guards = trained(50)
    few = calls_of(guards.change)
    optimizer.param_groups[0]["lr"] = float("0.1")
    assert guards.change() is None
    assert calls_of(guards.change) < few + 20
    optimizer.param_groups[0]["lr"] = 0.2
    assert guards.change() == "opt.param_groups[0].lr (0.1, now 0.2)"


def transpose(parameter: nn.Parameter) -> None:
    """Transposes a parameter in its memory."""
    parameter.data = parameter.data.t()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model, _: setattr(model[1][0].weight, "data", torch.zeros(4, 4)), "1.0.weight"),
        (lambda model, _: model[1][0].weight.requires_grad_(False), "1.0.weight"),
        (lambda model, _: transpose(model[1][0].weight), "1.0.weight"),
        (lambda model, _: setattr(model[1][0].weight, "grad", torch.zeros(4, 4)), "the gradient"),
        (lambda model, _: setattr(model[1][0].weight, "grad", None), "the gradient of"),
        (lambda model, _: model[1][1].running_mean.resize_(2), "1.1.running_mean"),
        (lambda model, _: model[1][1].running_mean.data.untyped_storage().resize_(0), "1.1.runn"),
        (lambda model, _: setattr(model[1][1], "running_mean", torch.zeros(4)), "1.1.running_mean"),
        (lambda model, optimizer: optimizer.state[model[1][0].bias].pop("exp_avg"), "opt.state["),
        (lambda model, _: model.double(), "0.0.weight"),
        (lambda model, _: vars(model[1]).update(other=vars(model[1]).pop("training")), "model.1"),
    ],
)
def test_a_change_is_named(change: Any, name: str) -> None:
    model, optimizer, guards = trained(2)
    assert guards.change() is None
    change(model, optimizer)
    assert name in str(guards.change())


def test_a_value_that_moves_on_to_the_next_list_is_noticed() -> None:
    waiting, done = [3.0, 2.0], [1.0]
    guards = Guards({"lists": {"done": done, "waiting": waiting}}, torch.device("cpu"))
    assert guards.change() is None
    # all values are the same in the same order
    done.append(waiting.pop(0))
    assert guards.change() == "lists.done"
    waiting.insert(0, done.pop())
    assert guards.change() is None
    waiting.pop()
    assert guards.change() == "lists.waiting (other entries)"


def test_a_key_that_moves_on_to_the_next_dict_is_noticed() -> None:
    one, two = {1: 2, 2: 5}, {7: 3}
    guards = Guards({"dicts": [one, two]}, torch.device("cpu"))
    assert guards.change() is None
    # all values and keys are the same in the same order
    one.clear()
    two.clear()
    one[5] = 2
    two.update({3: 1, 7: 2})
    assert guards.change() is not None


def test_a_container_that_is_no_longer_empty_is_named_also_if_the_step_has_filled_it() -> None:
    filled: dict[str, list[float]] = {"first": [], "second": []}
    guards = Guards({"lists": filled}, torch.device("cpu"))
    assert guards.change() is None
    filled["second"].append(1.0)
    assert guards.change() == guards.change(by_step=True) == "lists.second (other entries)"


class Endless:
    """Asks itself for an attribute that is not there, without end; it may be called."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self, f"{name}_")

    def __call__(self, holder: Any) -> Any:
        return holder


def test_what_is_wrapped_is_reached_without_asking_it() -> None:
    kept = {"weight": 1.0}
    method = types.MethodType(Endless(), kept)
    partial = functools.partial(method, weights=(kept,))
    guards = Guards({"partial": partial}, torch.device("cpu"))
    assert guards.change() is None
    kept["weight"] = 0.5
    assert guards.change() == "partial.weight (1.0, now 0.5)"


def test_another_tensor_in_the_same_memory_is_no_change() -> None:
    model, _, guards = trained(2)
    model[0][1].running_mean = model[0][1].running_mean.detach()
    assert guards.change() is None
    model[0][1].running_mean = model[0][1].running_mean[:2]
    assert "0.1.running_mean" in str(guards.change())


def test_another_tensor_at_the_address_of_one_that_was_freed_is_a_change() -> None:
    model, *_ = trained(1)
    memory = bytearray(16)
    model[0][1].running_mean = torch.frombuffer(memory, dtype=torch.float32)
    guards = Guards({"model": model}, torch.device("cpu"))
    model[0][1].running_mean = model[0][1].running_mean.detach()
    assert guards.change() is None
    # as an allocator that hands out memory again
    model[0][1].running_mean = torch.frombuffer(memory, dtype=torch.float32)
    assert guards.change() == "model.0.1.running_mean"


def test_a_forgotten_gradient_is_not_compared_and_others_are() -> None:
    model, _, guards = trained(2)
    names = {location.name for location in guards.tensors if location.watched.is_free}
    model.zero_grad()
    assert "the gradient of" in str(guards.change())
    guards.forget(names)
    assert guards.change() is None
    model[0][0].bias.data = torch.zeros(4)
    assert "0.0.bias" in str(guards.change())


def test_guards_keep_no_tensor_alive() -> None:
    model, _, guards = trained(1)
    gone = weakref.ref(model[0][1].running_mean)
    assert guards.change() is None
    model[0][1].running_mean = torch.zeros(4)
    assert gone() is None
