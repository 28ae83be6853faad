"""Families and plans with offloading: exact in every order, in the bytes that were predicted."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.accelerator import software
from tests.training import assert_same, gradients, needs_numpy, outcome, peak_by_own_plan, plain
from zoo.api.plan import planner_for
from zoo.planner.offload_choices import segments_of
from zoo.planner.plan import Plan, first_step
from zoo.tracing.planned_forward import patched_forward
from zoo.units import format_bytes

KIND = torch.get_default_device().type
pytestmark = pytest.mark.skipif(KIND != software.NAME, reason="needs pytest --device soft")


@pytest.fixture
def order() -> Iterator[Callable[..., None]]:
    set_order = torch.get_device_module(KIND).set_order
    yield set_order
    set_order("synchronous")


def tokens(vocabulary: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(vocabulary, (4, 64))
    return drawn, drawn


FAMILIES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "densenet100": lambda: (zoo.densenet100(), (torch.randn(2, 3, 32, 32),)),
    "vit_tiny_patch16": lambda: (
        zoo.vit_tiny_patch16(image_size=64, depth=4, drop_rate=0.1),
        (torch.randn(8, 3, 64, 64),),
    ),
    "gpt2_small": lambda: (
        zoo.gpt2_small(vocabulary=500, width=64, depth=4, heads=4),
        tokens(500),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_the_same_bits_in_every_order(
    name: str, order: Callable[..., None]
) -> None:
    def trained(plan: Plan | None) -> Any:
        torch.manual_seed(0)
        model, inputs = FAMILIES[name]()
        if plan is not None:
            zoo.checkpoint(model, plan, offload=True)

        def program(_: Any) -> Any:
            model(*inputs).float().square().mean().backward()
            return gradients(model), dict(model.named_buffers())

        left = outcome(program, plain)
        host = getattr(patched_forward(model), "host", None)
        assert host is None or host.peak > 0
        return left

    expected, (model, inputs) = trained(None), FAMILIES[name]()
    plan = zoo.plan_of(zoo.checkpoint(model, inputs=inputs))
    for name_of_order, seed in (("late", 0), ("early", 0), ("random", 0), ("random", 1)):
        order(name_of_order, seed)
        assert_same(trained(plan), expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        # what the product saves is made before one segment, and in it, where another begins
        return x + self.down(y.sin().exp() * y)


PLANS = {
    "segments": "(0-5) (6-11) (12-17) (18-23) (24-29) 30",
    "kept steps between": "0-1 (2-3) (4-5) 6 (7-8) 9 (10-11) 12-13 (14-15) 16 (17-29) 30",
    "nested": "((0-1) 2-5) (6 (7-8) 9-11) 12 (13-14) (15-17) ((18-23) 24-29) 30",
    "kept": "0-30",
}
# plans, and the items that are offloaded; none: all segments
OFFLOADED: list[tuple[str, tuple[int, ...]]] = [
    *((name, ()) for name in PLANS if name != "kept"),
    ("kept", tuple(range(31))),
    ("kept", (1, 6, 10, 12, 17, 22)),
    ("kept steps between", tuple(map(first_step, Plan.parse(PLANS["kept steps between"])))),
    ("kept steps between", (0, 4, 6, 9, 13, 14)),
    ("nested", (6, 12, 13, 15, 18)),
    # the item that is the last to hold a storage is not offloaded
    ("nested", (6, 12)),
]


@needs_numpy
@pytest.mark.parametrize(("name", "items"), OFFLOADED)
def test_a_plan_takes_the_bytes_that_were_predicted(name: str, items: tuple[int, ...]) -> None:
    """Here and on the host; the prediction has a margin for numbers such as the loss."""
    model = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(64, 8))
    x, make = torch.randn(2048, 64), functools.partial(torch.optim.SGD, lr=0.1)
    planner, plan = planner_for(model, x, optimizer=make, measured=False), Plan.parse(PLANS[name])

    def taken(offload: bool | tuple[int, ...]) -> tuple[int, int]:
        zoo.checkpoint(model, plan, offload=offload, inputs=x)
        peak = peak_by_own_plan(model, x, make)
        host = getattr(patched_forward(model), "host", None)
        return peak, 0 if host is None else host.peak

    kept = planner.judge.judgement(plan)
    offloaded = planner.judge.judgement(plan, sorted(items or segments_of(plan)))
    assert kept is not None
    assert offloaded is not None
    before, after = taken(False), taken(items or True)
    assert after[1] == offloaded.on_host > 0
    assert before[0] - after[0] == kept.peak - offloaded.peak > 0


@needs_numpy
def test_a_budget_is_kept_by_what_the_host_holds() -> None:
    model = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(64, 8))
    x, make = torch.randn(2048, 64), functools.partial(torch.optim.SGD, lr=0.1)
    kept = zoo.frontier(model, x, optimizer=make)
    report = zoo.plan(model, x, optimizer=make, memory_budget=0.4, offload=True)
    assert report.offloaded == sum(report.on_host) > 0
    assert zoo.PlanReport.from_json(report.to_json()) == report
    assert f"| {format_bytes(report.offloaded)} |" in report.table()
    small = zoo.plan(model, x, optimizer=make, memory_budget=0.4, offload=True, host_budget="1MiB")
    assert small.offloaded <= 1 << 20
    zoo.checkpoint(model, report)
    assert peak_by_own_plan(model, x, make) <= report.predicted_peak
    assert min(point.peak for point in kept) <= report.predicted_peak <= report.budget
