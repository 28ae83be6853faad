"""A plan for one size of the inputs serves smaller ones: nothing is planned or measured again."""

import copy
import dataclasses
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from tests.tracing.models import Net
from tests.training import Residuals, assert_same, everything, images, needs_numpy, train
from zoo._torch import FakeTensorMode
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.errors import BudgetError, PlanError
from zoo.invocation import InputSpec, Invocation
from zoo.policy import training_step
from zoo.profiling.peak_memory import measure_step
from zoo.tracing import planned_forward
from zoo.tracing.plan_cache import PlanCache
from zoo.units import exact_bytes

pytestmark = pytest.mark.usefixtures("without_fork")

Inputs = Callable[[int], tuple[Tensor, ...]]
BUDGET = {"checkpoint": "auto", "memory_budget": "8MiB"}


def tokens(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, shape), torch.randint(0, 50, shape)


def lstm() -> nn.Module:
    return zoo.lstm(vocabulary=50, embedding=8, hidden=8, chunk_steps=5)


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "net": (Net, lambda count: (images(count),)),
    "gpt2": (
        functools.partial(zoo.gpt2_small, depth=2, width=32, heads=2, vocabulary=50),
        lambda count: tokens(count, 12),
    ),
}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the traces that are made to plan, and the times that kernels are measured."""
    done: list[str] = []

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(planned_forward, "step_trace_of")
    count(training_step, "measure_kernels")
    return done


def works(model: nn.Module, inputs: Inputs, counts: Sequence[int], work: list[str]) -> list[bool]:
    """Trains on batches of these sizes; says for each whether anything was planned or measured."""
    found = []
    for count in counts:
        work.clear()
        outputs = model(*inputs(count))
        outputs.square().sum().backward()
        found.append(bool(work))
    return found


@pytest.mark.parametrize(
    "option", [{"checkpoint": True}, pytest.param(BUDGET, marks=needs_numpy)], ids=["true", "auto"]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_last_batch_of_an_epoch_costs_nothing(name: str, option: Any, work: list[str]) -> None:
    """a smaller last batch | | no new plan"""
    build, inputs = MODELS[name]
    model = zoo.checkpoint(build(), **option)
    assert works(model, inputs, (4, 4, 3, 4, 3, 2), work) == [True, *[False] * 5]


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_planned_size_that_covers_a_batch_serves_it(
    name: str, work: list[str]
) -> None:
    build, inputs = MODELS[name]
    model, plans = zoo.checkpoint(build()), {}
    # the plan of a traced forward is in force from the next one on
    for count in (2, 2, 8, 8, 4, 4):
        works(model, inputs, [count], work)
        plans[count] = zoo.plan_of(model)
    assert plans[8] is not plans[2]
    assert plans[4] is plans[8]
    # the logits of one text are made in fewer chunks than those of two, by other kernels
    counts = (2, 3, 5) if name == "gpt2" else (1, 2, 3, 5)
    assert not any(works(model, inputs, counts, work))
    for count in counts:
        works(model, inputs, [count], work)
        assert zoo.plan_of(model) is plans[2 if count <= 2 else 8]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_which_more_is_trained_is_planned_for_anew(name: str, work: list[str]) -> None:
    build, inputs = MODELS[name]
    model = zoo.checkpoint(build())
    first, *_ = model.parameters()
    first.requires_grad_(False)
    assert works(model, inputs, [4, 4], work) == [True, False]
    first.requires_grad_(True)
    assert works(model, inputs, [4, 4], work) == [True, False]


def test_a_new_head_counts_as_trained_and_the_old_one_is_freed(work: list[str]) -> None:
    model = zoo.checkpoint(Net())
    assert works(model, lambda n: (images(n),), [4, 4], work) == [True, False]
    last = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    old = weakref.ref(model.get_submodule(last))
    new = copy.deepcopy(old()).requires_grad_(False)
    model.set_submodule(last, new)
    assert works(model, lambda n: (images(n),), [4, 4], work) == [True, False]
    gc.collect()
    assert old() is None


def test_of_plans_that_overlap_the_smaller_serves(work: list[str]) -> None:
    model = zoo.checkpoint(Net())
    plans = {}
    # (3, 6) goes by the plan for (8, 6), and is no size that a plan was made for
    for count, size, is_planned in (
        (8, 6, True), (3, 6, False), (2, 10, True), (4, 6, False), (2, 6, False),
    ):  # fmt: skip
        inputs = functools.partial(images, size=size)
        assert works(model, lambda n, inputs=inputs: (inputs(n),), [count], work) == [is_planned]
        plans[count, size] = zoo.plan_of(model)
    assert plans[4, 6] is plans[3, 6] is plans[8, 6] is not plans[2, 10]
    assert plans[2, 6] is plans[2, 10]


def test_more_than_twice_as_large_in_one_dimension_is_planned(work: list[str]) -> None:
    model = put_in_force(Residuals(), True)
    for count, size in ((4, 6), (3, 10), (11, 4)):
        assert works(model, lambda n, size=size: (images(n, size=size),), [count], work) == [True]


def test_another_number_of_kernels_is_planned_for_when_it_comes_again(work: list[str]) -> None:
    model = put_in_force(lstm(), True)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, None, targets)[0]

    # of chunks of 5: 13 and 12 are three, 10 is two
    lengths = (13, 12, 10, 10, 10)
    found = [works(loss, lambda _, n=n: tokens(n, 2), [0], work)[0] for n in lengths]
    assert found == [True, False, False, True, False]


def test_a_branch_is_planned_for_when_it_comes_again(work: list[str]) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.short = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sin(x)
            return torch.cos(self.long(x) if len(x) > 2 else self.short(x, x))

    model = put_in_force(Chooses(), True)
    assert works(model, lambda n: (torch.rand(n, 4),), (4, 3, 2, 2, 2), work) == [
        True, False, False, True, False,
    ]  # fmt: skip


@needs_numpy
def test_smaller_batches_keep_to_the_budget() -> None:
    model = Net(16, 12)
    optimizer = torch.optim.AdamW(model.parameters())

    def peak(count: int) -> int:
        inputs = torch.rand(count, 4, 32, 32)

        def step() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return measure_step(step, model, optimizer, [inputs]).peak

    without = {count: peak(count) for count in (8, 7, 4, 1)}
    budget = without[8] * 6 // 10
    zoo.checkpoint(model, memory_budget=budget)
    with_plan = {count: peak(count) for count in without}
    assert max(with_plan.values()) <= budget < without[7]
    assert sorted(with_plan.values(), reverse=True) == list(with_plan.values())


def test_every_bit_is_that_of_the_baseline() -> None:
    def batches() -> Callable[[], list[Tensor]]:
        counts = iter([2, 4, 4, 3, 2, 1])
        return lambda: [images(next(counts) + 1).requires_grad_()]

    plain = Net()
    model = zoo.checkpoint(copy.deepcopy(plain))
    assert_same(train(model, batches(), 6), train(plain, batches(), 6))


def test_ranks_on_devices_of_one_type_ask_for_the_same_plan() -> None:
    with FakeTensorMode():
        here, there = (
            InputSpec.of(Invocation((torch.empty(2, 3, device=f"cuda:{rank}"),)), nn.Identity())
            for rank in range(2)
        )
    assert here == there


MIB = 2**20


@dataclasses.dataclass
class Batch:
    images: Tensor


class Sized(nn.Module):
    """A network whose sizes are decided by an image, an object, a number or an attribute."""

    size = 8

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            for _ in range(6)
        )

    def forward(self, batch: Any, size: int | None = None) -> Tensor:
        x = batch.images if isinstance(batch, Batch) else batch
        if x.shape[-1] == 8:
            x = F.interpolate(x, size=(size or self.size,) * 2)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def of_attribute(model: Sized, size: int) -> tuple[Any, ...]:
    model.size = size
    return (torch.rand(2, 3, 8, 8),)


SIZED: dict[str, Callable[[Any, int], tuple[Any, ...]]] = {
    "tensor": lambda model, size: (torch.rand(2, 3, size, size),),
    "object": lambda model, size: (Batch(torch.rand(2, 3, size, size)),),
    "number": lambda model, size: (torch.rand(2, 3, 8, 8), size),
    "attribute": of_attribute,
}


def peak_of(model: nn.Module, inputs: Sequence[Any]) -> int:
    """Returns the bytes of a training step, the state of AdamW included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    given = [one.images if isinstance(one, Batch) else one for one in inputs]
    return measure_step(step, model, optimizer, [t for t in given if torch.is_tensor(t)]).peak


@needs_numpy
@pytest.mark.parametrize("what", SIZED)
def test_whatever_decides_the_sizes_decides_the_plan(what: str, work: list[str]) -> None:
    model, inputs = Sized(), SIZED[what]
    plain = peak_of(model, inputs(model, 64))
    budget = int(0.6 * plain)
    zoo.checkpoint(model, memory_budget=budget)
    # a larger size is planned for when it comes, or known when it has come
    for size in (16, 64, 16, 64, 64):
        model(*inputs(model, size)).backward()
    plans = {}
    for size in (16, 64):
        model(*inputs(model, size)).backward()
        work.clear()
        assert peak_of(model, inputs(model, size)) <= budget
        assert not work
        plans[size] = zoo.plan_of(model)
    assert plans[16] != plans[64]


@needs_numpy
@pytest.mark.parametrize("what", ["tensor", "object"])
def test_the_first_of_larger_tensors_keeps_to_the_budget(what: str) -> None:
    model, inputs = Sized(), SIZED[what]
    budget = int(0.6 * peak_of(model, inputs(model, 64)))
    zoo.checkpoint(model, memory_budget=budget)
    for size in (16, 64):
        batch = inputs(model, size)
        model(*batch).backward()
        assert zoo.plan_of(model) is not None
        assert peak_of(model, batch) <= budget


@needs_numpy
@pytest.mark.parametrize("what", SIZED)
def test_sizes_for_which_a_known_plan_has_room_are_not_searched_for(
    what: str, work: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes that arguments show are judged, with their kernels' workspaces."""
    searches, original = [], planned_forward.plans_for

    def searched(*args: Any, **kwargs: Any) -> Any:
        searches.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(planned_forward, "plans_for", searched)
    model, inputs = Sized(), SIZED[what]
    budget = int(0.7 * peak_of(model, inputs(model, 44)))
    zoo.checkpoint(model, memory_budget=budget)
    plans, peaks = {}, []
    for size in (36, 37, 40, 42, 44, 36):
        batch = inputs(model, size)
        work.clear()
        peaks.append(peak_of(model, batch))
        is_new = size not in plans
        assert bool(work) is (is_new and (what in ("tensor", "object") or not plans))
        assert len(searches) == 1
        plans.setdefault(size, zoo.plan_of(model))
        plans["last"] = zoo.plan_of(model)
    assert max(peaks) <= budget
    assert plans[44] != plans[36]
    assert plans["last"] is plans[36] or what in ("number", "attribute")
    assert not caplog.records


@needs_numpy
def test_a_rare_larger_kind_is_planned_for_although_others_come_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Sized()
    # no plan for the small ones has room for the large ones
    budget = int(0.4 * peak_of(model, of_attribute(model, 64)))
    zoo.checkpoint(model, memory_budget=budget)
    for size in (9, 64, 9):
        model(*of_attribute(model, size)).backward()
    assert peak_of(model, of_attribute(model, 64)) <= budget
    (said,) = caplog.messages
    assert "makes larger tensors than its plan has room for" in said


@needs_numpy
@pytest.mark.parametrize("option", [{"checkpoint": True}, {"memory_budget": "8MiB"}])
def test_planning_that_does_not_pay_stops_and_says_so_once(
    option: Any, work: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.depth = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.depth += 1
            for _ in range(self.depth):
                x = self.layer(x).sin()
            return x

    monkeypatch.setattr(PlanCache, "most_plannings", 3)
    caplog.set_level(logging.INFO, "zoo")
    model = zoo.checkpoint(Looping(), **option)
    found = works(model, lambda n: (torch.rand(n, 8),), [4] * 12, work)
    assert not any(found[-4:])
    again = [text for text in caplog.messages if "planned again" in text]
    assert [text[-8:] for text in again] == ["(2 of 3)", "(3 of 3)"]
    (said,) = [record for record in caplog.records if "Few more paths" in record.message]
    assert said.levelno == logging.WARNING


def test_sizes_that_are_planned_for_no_more_go_by_the_plan_of_the_largest(
    monkeypatch: pytest.MonkeyPatch, work: list[str]
) -> None:
    monkeypatch.setattr(PlanCache, "most_plannings", 2)
    model = zoo.checkpoint(Net())
    found = works(model, lambda n: (images(n),), (2, 5, 5, 11, 11), work)
    assert found == [True, True, False, False, False]
    plan = zoo.plan_of(model)
    works(model, lambda n: (images(n),), (5,), work)
    assert zoo.plan_of(model) is plan is not None


@needs_numpy
def test_a_training_that_has_begun_goes_by_the_least_plan_where_a_budget_cannot_be_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = Sized(), SIZED["tensor"]
    budget = zoo.frontier(model, inputs(model, 16))[0].peak
    zoo.checkpoint(model, memory_budget=budget, optimizer="adamw")
    with pytest.raises(BudgetError, match="needs at least"):
        model(*inputs(model, 48))
    model(*inputs(model, 16)).backward()
    kept = zoo.plan_of(model)
    for _ in range(2):
        model(*inputs(model, 48)).backward()
    (said,) = caplog.messages
    assert "goes by the plan of the least peak, which breaks its budget" in said
    least = zoo.frontier(Sized(), inputs(model, 48))[0]
    assert f"needs at least {exact_bytes(least.peak)}" in said
    assert zoo.plan_of(model) == least.plan
    model(*inputs(model, 16)).backward()
    assert zoo.plan_of(model) == kept


@needs_numpy
def test_a_report_for_smaller_inputs_is_refused_by_its_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = Sized(), SIZED["tensor"]
    report = zoo.plan(model, inputs(model, 16), memory_budget=0.8)
    zoo.checkpoint(model, report)
    with pytest.raises(BudgetError, match=r"is for Sized on 2×3×16×16 .* takes at least"):
        model(*inputs(model, 32))
    model(*inputs(model, 16)).backward()
    assert zoo.plan_of(model) == report.plan
    assert not caplog.records
    # a training that has begun goes on
    for _ in range(2):
        model(*inputs(model, 32)).backward()
    (said,) = caplog.messages
    assert "runs block by block" in said
    model(*inputs(model, 12)).backward()
    assert zoo.plan_of(model) == report.plan


@needs_numpy
def test_a_report_whose_sizes_no_argument_tells_says_so_when_they_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Sized()
    report = zoo.plan(model, of_attribute(model, 16), memory_budget=0.8)
    zoo.checkpoint(model, report)
    for size in (16, 64, 64, 16):
        model(*of_attribute(model, size)).backward()
    first, then = caplog.messages
    assert "makes larger tensors than its plan has room for" in first
    assert "takes at least" in then
    assert zoo.plan_of(model) == report.plan


class Counts(Net):
    """Divides its loss by a number that a trainer may pass."""

    def forward(self, x: Tensor, items: Tensor | None = None) -> Tensor:
        loss = super().forward(x).square().mean()
        return loss if items is None else loss * len(x) / items.clamp(min=1)


@needs_numpy
def test_a_report_and_a_first_step_by_another_path_go_block_by_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, x, items = Counts(), images(4), torch.tensor(2.0)
    model = copy.deepcopy(plain)
    report = zoo.plan(model, x, memory_budget=1.0)
    zoo.checkpoint(model, report)
    for trained in (plain, model):
        torch.manual_seed(0)
        for _ in range(2):
            trained(x, items=items).backward()
    (said,) = caplog.messages
    assert "runs block by block: its forward cannot be planned for (the plan covers" in said
    assert_same(everything(model), everything(plain))
    model(x).backward()
    assert zoo.plan_of(model) == report.plan
    with pytest.raises(PlanError, match="covers"):
        zoo.checkpoint(model, report.plan)(x, items=items)


@pytest.mark.parametrize(
    ("size", "growth"),
    [((4, 6), 1.0), ((2, 6), 1.0), ((2, 9), 1.5), ((8, 9), 3.0), ((4, 6, 1), float("inf"))],
)
def test_growth_is_that_of_the_sizes_that_are_larger(size: Any, growth: float) -> None:
    one, other = (
        InputSpec.of(Invocation((torch.empty(shape), torch.empty(3))), nn.Identity())
        for shape in (size, (4, 6))
    )
    assert one.growth_over(other) == growth
