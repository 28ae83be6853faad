"""Snapshots of modules: every change is seen, and none that is kept keeps anything alive."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zoo
from zoo.engine.snapshot import snapshot


class Numbers(nn.Module):
    """Holds what a snapshot is kept of: numbers, a tuple and a list of some."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Any = 1
        self.count = 1000
        self.rate = float("nan")
        self.pair: Any = (1, 2)
        self.sizes: Any = [1, 2]
        self.name: str | None = "numbers"
        self.nothing = None
        self.zero = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.number).sin().exp()


CHANGES: dict[str, Callable[[Any], object]] = {
    "another number": lambda m: setattr(m, "number", 2),
    "the same as a float": lambda m: setattr(m, "number", 1.0),
    "the same as a flag": lambda m: setattr(m, "number", True),
    "a tuple of the same as floats": lambda m: setattr(m, "pair", (1.0, 2)),
    "none": lambda m: setattr(m, "name", None),
    "an attribute more": lambda m: setattr(m, "more", None),
    "an attribute less": lambda m: delattr(m, "name"),
    "another attribute": lambda m: (delattr(m, "name"), setattr(m, "more", "numbers")),
    "eval": lambda m: m.eval(),
    "appended": lambda m: m.sizes.append(3),
    "written": lambda m: m.sizes.__setitem__(0, 3),
    "written as a float": lambda m: m.sizes.__setitem__(0, 1.0),
    "another list": lambda m: setattr(m, "sizes", [1, 2]),
    "no list": lambda m: setattr(m, "sizes", None),
    "a method": lambda m: setattr(m, "forward", m.forward),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change: Callable[[Any], object]) -> None:
    module = Numbers()
    before = snapshot(module)
    change(module)
    assert not before.holds(module)
    assert snapshot(module) is not before


HARD_TO_SEE: dict[str, Callable[[Any], object]] = {
    "another attribute for one that was None": lambda m: (
        delattr(m, "nothing"),
        setattr(m, "more", 1),
    ),
    "minus zero": lambda m: setattr(m, "zero", -0.0),
}


@pytest.mark.parametrize("change", HARD_TO_SEE.values(), ids=HARD_TO_SEE)
def test_these_changes_are_seen(change: Callable[[Any], object]) -> None:
    test_every_change_is_seen(change)


@pytest.mark.parametrize("lists", [True, False])
def test_a_snapshot_of_numbers_is_kept_while_they_stay(lists: bool) -> None:
    """Also where they are equal and other objects, and through a step of training."""
    module = Numbers()
    module.sizes = [1, 2] if lists else None
    before = snapshot(module)
    module.count = int("1000")
    zoo.recompute(module, torch.rand(3).requires_grad_()).sum().backward()
    assert snapshot(module) is before


ROUNDABOUT: list[Callable[[nn.Module], Any]] = [
    lambda module: [module],
    lambda module: {"it": (1, module)},
    lambda module: functools.partial(print, module),
    lambda module: lambda: module,
    lambda module: module.forward,
]


@pytest.mark.parametrize("lead", ROUNDABOUT)
def test_a_module_that_leads_to_itself_is_freed(lead: Callable[[nn.Module], Any]) -> None:
    module = Numbers()
    module.other = lead(module)
    zoo.recompute(module, torch.rand(3).requires_grad_()).sum().backward()
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("place", [lambda y: y, lambda y: [y], lambda y: {"y": y}])
def test_a_tensor_that_a_module_lets_go_is_freed(place: Callable[[Tensor], Any]) -> None:
    module, tensor = Numbers(), torch.rand(3).requires_grad_().exp()
    module.last = place(tensor)
    alive = StorageWeakRef(tensor.untyped_storage())
    zoo.recompute(module, torch.rand(3).requires_grad_()).sum().backward()
    del tensor, module.last
    assert alive.expired()
