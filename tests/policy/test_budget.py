"""Plans for a budget: honoured by a real training step, monotonic, and refused when impossible."""

import functools
import gc
import logging
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.planner.chains import nested_plans
from tests.traces import Traces, tracing_once
from tests.tracing.models import Ending, Net
from tests.training import Residuals, assert_same, everything, images
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.api.plan import planner_for
from zoo.errors import ArgumentError, BudgetError, PlanError
from zoo.models.densenet import DenseNet
from zoo.models.preactivation_resnet import PreactivationResNet
from zoo.models.resnet import ResNet, basic
from zoo.planner.costs import simulate
from zoo.planner.plan import Plan
from zoo.policy.budget import StepPlanner
from zoo.policy.goal import parse_budget, parse_overhead
from zoo.policy.plan_report import FixedBytes, PlanReport
from zoo.profiling.caching_allocator import BLOCK, rounded_up
from zoo.profiling.kernel_costs import KernelCosts
from zoo.profiling.peak_memory import measure_step, resident_bytes, trace
from zoo.tracing.planned_forward import goal_of

pytestmark = pytest.mark.usefixtures("without_fork", "few_plans")

sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def scores(*outputs: Any) -> Tensor:
    return outputs[0].square().mean()


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randint(0, 300, (2, 64)), torch.randint(0, 300, (2, 64))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "resnet": (
        functools.partial(ResNet, basic, (2, 2), 10),
        lambda: (torch.rand(4, 3, 64, 64),),
    ),
    "preactivation": (
        functools.partial(PreactivationResNet, basic, 2),
        lambda: (torch.rand(8, 3, 32, 32),),
    ),
    "densenet": (
        functools.partial(DenseNet, 16, (3, 3), 10),
        lambda: (torch.rand(4, 3, 64, 64),),
    ),
    "vnet": (functools.partial(zoo.vnet, width=2), lambda: (torch.rand(1, 1, 32, 32, 32),)),
    "vit": (
        functools.partial(zoo.vit_tiny_patch16, image_size=112, depth=2),
        lambda: (torch.rand(12, 3, 112, 112),),
    ),
    "gpt2": (
        functools.partial(
            zoo.gpt2_small, depth=2, width=64, heads=4, vocabulary=300, chunk_tokens=32
        ),
        tokens,
    ),
    "lstm": (
        functools.partial(zoo.lstm, vocabulary=300, embedding=64, hidden=64, chunk_steps=16),
        lambda: (tokens()[0].T.contiguous(), None, tokens()[1].T.contiguous()),
    ),
}


TRACES: Traces = {}


@pytest.fixture
def traces_of_families(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces the model of a family once for all cases of a test."""
    trace_of = tracing_once(TRACES, lambda _: (request.function, family))
    for module in ("zoo.tracing.planned_forward", "zoo.api.checkpoint"):
        monkeypatch.setattr(f"{module}.step_trace_of", trace_of)


@functools.cache
def prospect(family: str) -> StepPlanner:
    build, inputs = FAMILIES[family]
    torch.manual_seed(1)
    loss = None if family in ("gpt2", "lstm") else scores
    return planner_for(build(), inputs(), optimizer=sgd, loss=loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_larger_budget_is_never_slower_and_each_is_kept_on_paper(family: str) -> None:
    found = prospect(family)
    least, baseline = found.points[0].peak, found.points[-1].peak
    budgets = [least + (baseline - least) * part // 19 for part in range(20)]
    reports = [found.report(budget, None) for budget in budgets]
    for budget, report in zip(budgets, reports, strict=True):
        assert report.predicted_peak <= budget
        assert report.plan.flatten() == tuple(range(found.step.steps))
    ratios = [report.predicted_time_ratio for report in reports]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == 1, "all of the baseline's memory costs no time"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_is_told_apart_to_the_byte(family: str) -> None:
    found = prospect(family)
    for point in found.points[:: max(len(found.points) // 20, 1)]:
        report = found.report(point.peak, None)
        peak, fixed = report.at_peak, report.fixed
        assert peak.total == report.predicted_peak
        assert min(peak.by_name().values()) >= 0
        assert peak.gradients <= fixed.gradients
        if peak.moment != "step of the optimizer":
            moving = peak.gradients + peak.kept + peak.recomputed + peak.between + peak.work
            taken = found.judge.judgement(report.plan)
            assert taken is not None
            assert moving == taken.peak


def test_for_a_cuda_device_each_storage_takes_whole_blocks_and_on_the_cpu_its_bytes() -> None:
    model, x = nn.Sequential(nn.Linear(13, 515), nn.GELU(), nn.Linear(515, 3)), torch.rand(31, 13)
    here, there = (planner_for(model, x, device=device).step for device in ("cpu", "a100"))
    assert there.costs.sizes == tuple(rounded_up(size, BLOCK) for size in here.costs.sizes)
    assert here.fixed.parameters == sum(p.nbytes for p in model.parameters())
    assert there.fixed.parameters == sum(rounded_up(p.nbytes, BLOCK) for p in model.parameters())
    assert there.fixed.gradients == there.fixed.parameters
    counted = (*there.costs.forward, *there.costs.backward, *there.costs_with_gradients.gradients)
    assert not any(size % 512 for size in (*counted, *vars(there.fixed).values()))
    assert any(size % 512 for size in (*here.costs.forward, *here.costs.backward))


def test_where_blocks_leave_gaps_an_error_names_the_setting_that_closes_them() -> None:
    model, x = nn.Sequential(nn.Linear(13, 515), nn.GELU(), nn.Linear(515, 3)), torch.rand(31, 13)
    for device, is_named in (("a100", True), ("cpu", False)):
        with pytest.raises(BudgetError, match="needs at least") as caught:
            zoo.plan(model, x, memory_budget="1KiB", device=device)
        assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in str(caught.value)) is is_named


def test_outputs_that_no_variable_holds_do_not_count_in_the_backward() -> None:
    """The backward of a wide last layer, with its output and without."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4000)), torch.rand(50, 8)
    held, dropped = (
        planner_for(model, x, optimizer=None, device="small-cpu", holds_outputs=holds)
        for holds in (True, False)
    )
    assert held.baseline.peak - dropped.baseline.peak == 4 * 50 * 4000


class Words(nn.Module):
    """Returns logits, which are most of its memory and which cross-entropy does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(900, 48), nn.Linear(48, 900)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        for layer in self.layers:
            y = y + F.silu(layer(y))
        return self.head(y)


def word_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize("holds", [None, True])
@pytest.mark.parametrize("gradients", ["none", "accumulated", "zeroed"])
def test_a_step_is_counted_as_it_trains(gradients: str, holds: bool | None) -> None:
    torch.manual_seed(1)
    model, x = Words(), torch.randint(900, (400,))
    given: Any = {"optimizer": sgd, "loss": word_loss, "accumulates": gradients != "none"}
    found = zoo.frontier(model, x, **given, holds_outputs=holds)
    optimizer = sgd(model.parameters())

    def step() -> None:
        if gradients == "zeroed":
            optimizer.zero_grad(set_to_none=False)
        if holds:
            logits = model(x)
            word_loss(logits).backward()
        else:
            word_loss(model(x)).backward()
        optimizer.step()

    for point in found.optimal[:: max(len(found.optimal) // 3, 1)]:
        zoo.checkpoint(model, point.plan)
        if gradients == "none":
            model.zero_grad()
        step()
        if gradients == "none":
            model.zero_grad()
        there = sum(vars(resident_bytes(model, optimizer, [x])).values())
        assert 0.995 * point.peak <= there + trace(step).peak <= point.peak


def test_gradients_that_are_accumulated_are_told_apart_and_named() -> None:
    model, x = Words(), torch.randint(900, (400,))
    given: Any = {"optimizer": "sgd", "loss": word_loss, "memory_budget": 0.9}
    report = zoo.plan(model, x, **given, accumulates=True)
    assert report.at_peak.gradients >= report.fixed.gradients > 0
    assert report.at_peak.total == report.predicted_peak
    assert "one training step with SGD, gradients accumulated\n" in str(report)
    assert (report.holds_outputs, zoo.plan(model, x, **given).accumulates) == (False, False)
    with pytest.raises(ArgumentError, match="accumulates=True keeps gradients over several"):
        zoo.plan(model, x, **given, accumulates=True, optimizer_in_backward=True)
    with pytest.raises(BudgetError) as refusal:
        zoo.plan(model, x, **{**given, "memory_budget": 1000}, accumulates=True)
    assert "in the backward" not in str(refusal.value)


class Forked(Words):
    """Takes one kernel more from some step on."""

    is_late = False

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits * 2 if self.is_late else logits


def test_a_path_that_comes_later_is_planned_for_as_from_the_first_step_on() -> None:
    torch.manual_seed(1)
    model, x = Forked(), torch.randint(900, (400,))
    model.is_late = True
    given: Any = {"optimizer": "sgd", "loss": word_loss}
    given["memory_budget"] = zoo.plan(model, x, **given, memory_budget=0.9).budget
    plans = []
    for path in ([True], [False, True, True]):
        model = zoo.checkpoint(Forked(), **given)
        for model.is_late in path:
            word_loss(model(x)).backward()
        plans.append(zoo.plan_of(model))
    assert plans[0] == plans[1] is not None


def test_no_batch_is_held_until_another_takes_its_path() -> None:
    model, x = Forked(), torch.randint(900, (400,))
    zoo.checkpoint(model, memory_budget="64MiB", optimizer="sgd")
    word_loss(model(x)).backward()
    model.is_late, late = True, x.clone()
    batch = weakref.ref(late)
    word_loss(model(late)).backward()
    del late
    gc.collect()
    assert batch() is None


class Equal(nn.Module):
    """Steps that each save as much as they return: the less is kept, the deeper a plan nests."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = torch.tanh(x)
        return x


def equal(count: int) -> tuple[StepPlanner, Tensor]:
    x = torch.linspace(-1, 1, 2560).requires_grad_()
    return planner_for(Equal(count), x, optimizer=None, device="a100"), x


def test_of_110_equal_steps_the_least_peak_holds_but_one_state() -> None:
    found, x = equal(110)
    for point in (found.points[0], found.least):
        # with what the caller was given, the gradient that a step gets, and the one that it gives
        assert simulate(point.plan, found.step.costs_with_gradients).peak == 4 * x.nbytes
    assert found.report(found.points[0].peak, None).least_peak == found.least.peak


def test_a_deep_plan_of_least_peak_trains_as_the_plain_chain_does() -> None:
    found, x = equal(70)
    model, plan = Equal(70), found.least.plan
    assert plan.depth() > 64
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    put_in_force(model, plan)(x).sum().backward()
    assert torch.equal(x.grad, expected)


class Uneven(nn.Module):
    """Layers of unlike sizes, which may drop."""

    def __init__(self, sizes: Sequence[int], rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), self.rate) if self.rate else layer(x)
        return x


def test_the_least_peak_is_that_of_the_best_of_all_plans() -> None:
    for batch in (50, 5000):
        for sizes, rate in (((3, 40, 5, 60, 20), 0.0), ((3, 40, 20), 0.5)):
            model, x = Uneven(sizes, rate), torch.rand(batch, 3)
            found = planner_for(model, x, optimizer=None, device="a100")
            best = min(found.point(plan).peak for plan in nested_plans(found.step.steps))
            assert best <= found.lowest().peak <= 1.001 * best
            assert best <= found.least.peak <= 1.004 * best
            assert best < found.baseline.peak


def test_a_peak_in_the_optimizers_step_is_told_apart_too() -> None:
    model = ResNet(basic, (1, 1, 1, 1), 10)
    report = zoo.plan(model, torch.empty(2, 3, 32, 32), max_overhead=9.0, device="a100")
    assert report.at_peak.moment == "step of the optimizer"
    assert report.at_peak.total == report.predicted_peak
    assert report.at_peak.work == report.fixed.scratch > 0
    assert report.at_peak.gradients == report.fixed.gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_no_plan_goes_below_the_bound(family: str) -> None:
    curve = prospect(family).frontier()
    assert 0.5 * curve[0].peak < curve.lower_bound <= min(point.peak for point in curve)
    assert min(point.time_ratio for point in curve) == curve.baseline.time_ratio == 1


@pytest.mark.usefixtures("traces_of_families")
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_step_keeps_to_budgets_over_the_whole_range(family: str, in_backward: bool) -> None:
    build, make_inputs = FAMILIES[family]
    found = StepPlanner(prospect(family).step.in_backward()) if in_backward else prospect(family)
    least, baseline = found.points[0].peak, found.points[-1].peak
    torch.manual_seed(1)
    model, inputs = build(), make_inputs()
    given = [value for value in inputs if value is not None]
    optimizer = sgd(model.parameters())
    if in_backward:
        zoo.optimizer_in_backward(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        (outputs[0] if family in ("gpt2", "lstm") else scores(*outputs)).backward()
        optimizer.step()

    budgets = [least + (baseline - least) * part // 3 for part in range(4)]
    reports = {report.plan: report for report in (found.report(b, None) for b in budgets[::-1])}
    # makes the optimizer's state, which each report counts
    step()
    for plan, report in reports.items():
        zoo.checkpoint(model, plan)
        measured = measure_step(step, model, optimizer, given).peak
        assert report.budget is not None
        assert measured <= report.budget, "the smallest of the budgets that get this plan"
        # the random states of an LSTM's segments are counted as if each drew
        assert measured >= (0.98 if family == "lstm" else 0.985) * report.predicted_peak


SMALL_GPT2 = functools.partial(zoo.gpt2_small, heads=4, chunk_tokens=32, drop_rate=0)
HALF: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (functools.partial(ResNet, basic, (2, 1), 10), (4, 3, 96, 96)),
    "vit": (functools.partial(zoo.vit_tiny_patch16, depth=1, classes=10), (2, 3, 224, 224)),
    "gpt2": (functools.partial(SMALL_GPT2, depth=1, width=128, vocabulary=300), ()),
    # chunks add up gradients of a cast of a weight that is larger than all else
    "wide gpt2": (functools.partial(SMALL_GPT2, depth=1, width=64, vocabulary=6000), ()),
    "traced": (lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), (64, 256)),
}


def half_scores(output: Tensor) -> Tensor:
    return output.float().square().mean()


BFLOAT16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)


def half_step(
    model: nn.Module, inputs: tuple[Any, ...], loss: Any, optimizer: torch.optim.Optimizer
) -> None:
    """Trains a step under autocast; without a loss function the model returns its loss."""
    optimizer.zero_grad()
    with BFLOAT16():
        output = model(*inputs)
        value = output if loss is None else loss(output)
    value.backward()
    optimizer.step()


@pytest.mark.usefixtures("traces_of_families")
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("family", HALF)
def test_the_copies_of_weights_that_autocast_holds_are_counted(
    family: str, in_backward: bool
) -> None:
    build, shape = HALF[family]
    torch.manual_seed(1)
    model, is_text = build(), "gpt2" in family
    inputs = tokens() if is_text else (torch.rand(shape),)
    loss = None if is_text else half_scores
    with BFLOAT16():
        options: dict[str, Any] = {"optimizer": sgd, "optimizer_in_backward": in_backward}
        found = planner_for(model, inputs, loss=loss, **options)
    optimizer = sgd(model.parameters())
    if in_backward:
        zoo.optimizer_in_backward(model, optimizer)

    step = functools.partial(half_step, model, inputs, loss, optimizer)
    for point in found.points[:: max(len(found.points) // 2, 1)]:
        zoo.checkpoint(model, found.step.of_model(point).plan)
        step()
        measured = measure_step(step, model, optimizer, inputs).peak
        assert 0.995 * point.peak <= measured <= point.peak


class Tied(nn.Module):
    """Uses a layer four times; the backward of its last layer takes more than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(256, 256), nn.Linear(256, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.layer(x))
        return self.head(x)


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize(
    "nested",
    [
        "((0-1) (2-3) (4-5) (6-7) 8)",
        "(0 (1-2) (3 (4-5)) (6) 7 8)",
        "((0 1) (2 (3 4)) (5 (6 7)) 8)",
        "0 (1 (2) 3 (4) 5 (6-7)) 8",
        "(((0) 1 (2)) (3-5) (6) 7 8)",
        "((0) (1) (2) (3) (4) (5) (6) (7) (8))",
        "(((0-1) (2 (3 4) 5) 6-7) 8)",
    ],
)
def test_a_cast_that_inner_segments_wait_for_is_counted(nested: str) -> None:
    torch.manual_seed(1)
    model, x, plan = Tied(), torch.rand(4, 256), Plan.parse(nested)
    with BFLOAT16():
        found = planner_for(model, x, loss=half_scores, optimizer=sgd)
    optimizer = sgd(model.parameters())
    step = functools.partial(half_step, model, (x,), half_scores, optimizer)
    zoo.checkpoint(model, plan)
    step()
    predicted = found.point(plan).peak
    assert 0.995 * predicted <= measure_step(step, model, optimizer, [x]).peak <= predicted


def test_a_cast_that_autocast_holds_is_no_step_of_its_own() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert zoo.chain_of(model, x).names == ("0", "1")


class Naming(nn.Module):
    """Names hold what no kernel reads again: `wide`, `spare`, which none ever reads, and `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 300)
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(4))

    def forward(self, x: Tensor, *, frees: bool) -> Tensor:
        wide = x.repeat(1, 64).cos()
        spare = wide.exp()
        if frees:
            del spare
        out = self.first(wide.view(-1, 64, 16).sum(1))
        if frees:
            del wide
        for layer in self.layers:
            out = layer(out.tanh())
        return out


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize("frees", [False, True])
def test_what_names_in_a_forward_hold_is_counted(frees: bool) -> None:
    torch.manual_seed(1)
    model, given = Naming(), {"x": torch.rand(2000, 16), "frees": frees}
    found = planner_for(model, given, optimizer=sgd, loss=scores)
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(**given)  # a name, as in assert_close
        scores(outputs).backward()
        optimizer.step()

    for point in found.points[:: max(len(found.points) // 4, 1)]:
        zoo.checkpoint(model, found.step.of_model(point).plan)
        step()
        measured = measure_step(step, model, optimizer, [given["x"]]).peak
        assert 0.985 * point.peak <= measured <= point.peak


class Turned(nn.Module):
    """Two gradients meet behind a pooling; that which arrives first has channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        wide = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.second = nn.Sequential(*wide, nn.Conv2d(16, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.interpolate(self.first(x), scale_factor=2), 2)
        return self.norm((x + self.second(x)).permute(0, 2, 3, 1)).mean((1, 2))


class Alike(nn.Module):
    """Uses a large tensor three times; the gradients meet where no other large tensor was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = x.flatten(2)
        alike = torch.bmm(y, y.mT).softmax(-1)
        return self.last((alike @ y).view_as(x).mean((2, 3)))


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize("kind", [Turned, Alike])
def test_a_sum_of_gradients_is_counted_as_it_is_laid_out(kind: type[nn.Module]) -> None:
    """It is there beside both, in the layout of the first.

    The pooling's backward takes room for a copy, since it saved a tensor of another layout.
    """
    torch.manual_seed(1)
    assert_close(kind(), torch.rand(4, 3, 32, 32))


class Offsets(nn.Module):
    """A sum hands one gradient to two parameters, of which autograd copies the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 100)
        self.one, self.other = (nn.Parameter(torch.rand(100, 100)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.one + self.other).sin()


def test_a_gradient_that_several_parameters_get_is_counted_for_each() -> None:
    assert_close(Offsets(), torch.rand(100, 100), least=0.999)


class Columns(nn.Module):
    """The gradient of the columns is in more memory than it needs, until another is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = x + y + y.tanh()
        return y + F.unfold(x.view(-1, 1, 8, 16), 3, padding=1).mean(1)


def test_a_gradient_that_keeps_the_memory_of_columns_is_counted_with_it() -> None:
    x = torch.rand(64, 128)
    model = nn.Sequential(Columns(), Columns(), nn.Linear(128, 10))
    found = planner_for(model, x, optimizer=sgd, loss=scores)
    columns = [place for place, name in enumerate(found.step.outline.names) if "unfold" in name]
    assert found.step.costs.gradients[columns[-1] - 1] >= 9 * x.nbytes


class Stacked(nn.Module):
    """Turns what it stacked in place, as torch's GRU does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(128, 128), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.first(x).view(-1, 4, 32).unbind(1)
        x = torch.stack([step.sigmoid() for step in steps]).transpose_(0, 1)
        return self.last(x.contiguous() * 1.0).flatten(1)


@pytest.mark.usefixtures("traces_once")
def test_no_plan_keeps_what_is_turned_in_place_and_is_not_saved() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Stacked(), Stacked(), Stacked(), nn.Linear(128, 10))
    assert_close(model, torch.rand(256, 128), least=0.85)


class Potential(nn.Module):
    """Returns energies and forces, which are gradients that its forward takes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = pairwise([3, *[128] * 5])
        layers = (part for pair in sizes for part in (nn.Linear(*pair), nn.SiLU()))
        self.layers = nn.Sequential(*layers, nn.Linear(128, 1))

    def forward(self, x: Tensor) -> Tensor:
        places = x.detach().requires_grad_()
        energies = self.layers(places)
        (forces,) = torch.autograd.grad(energies.sum(), places, create_graph=True)
        return torch.cat([energies, forces], 1)


@pytest.mark.usefixtures("traces_once")
def test_a_gradient_that_the_forward_takes_is_counted() -> None:
    # a segment that is open then would be replayed within the forward
    plans = "0-37", "0-12 (13-16) (17-21) (22-26) (27-31) 32-37"
    assert_close(Potential(), torch.rand(512, 3), plans=plans)


class Cells(nn.Module):
    """Stacks the outputs of all times, which nothing reads before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = x.new_zeros(x.shape[0], 32), []
        for part in x.unbind(1):
            state = self.cell(part, state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


class Skips(nn.Module):
    """Adds to its state what comes out of frozen layers and of trained ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(96, 96).requires_grad_(False) for _ in range(6))
        self.trained = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first = x = x * 2
        for frozen, trained in zip(self.frozen, self.trained, strict=True):
            x = x + F.gelu(frozen(x) + trained(x).tanh())
        return x * first


class Hourglass(nn.Module):
    """Hands the result of each of its layers to one behind the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1)).tanh()
        return x


UNEVEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "cells": (Cells, (8, 8, 16), 0.96),
    "skips": (Skips, (256, 96), 0.99),
    "u-net": (Hourglass, (8, 8, 16, 16), 0.99),
}


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize("kind", UNEVEN)
def test_any_nested_plan_takes_what_is_predicted(kind: str) -> None:
    build, shape, least = UNEVEN[kind]
    torch.manual_seed(1)
    model, x = build(), torch.rand(shape)
    steps = planner_for(model, x, optimizer=sgd, loss=scores).step.steps
    plans = [any_plan(random.Random(seed), range(steps)).text() for seed in range(5)]
    assert_close(model, x, least, plans)


def any_plan(numbers: random.Random, steps: Sequence[int], depth: int = 3) -> Plan:
    """Draws a plan whose segments nest up to `depth` deep."""

    def items(steps: Sequence[int], depth: int) -> Iterator[Any]:
        while steps:
            length = numbers.randint(1, max(len(steps) // 2, 1))
            if depth and numbers.random() < 0.4:
                yield tuple(items(steps[:length], depth - 1))
            else:
                yield from steps[:length]
            steps = steps[length:]

    return Plan(tuple(items(steps, depth)))


KEEPS: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {
    "a result": lambda wide, x: wide,
    "a view of it": lambda wide, x: wide[:, :1],
    "a detached one": lambda wide, x: wide.detach(),
    "the input": lambda wide, x: x.detach(),
    "nothing": lambda wide, x: None,
}


class Remembering(nn.Module):
    """Keeps a wide tensor, which its gradient needs or not, until the next step replaces it.

    Either at once or, `is_late`, when others as wide have come and gone.
    """

    def __init__(self, keep: str, *, is_trained: bool = False, is_late: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.keep, self.is_trained, self.is_late = KEEPS[keep], is_trained, is_late
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        given = x
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        with torch.set_grad_enabled(self.is_trained):
            wide = x.repeat(1, 16).sin()
        kept, wide = self.keep(wide, given), wide[:, :64]
        if not self.is_late:
            self.seen = kept
        x = torch.tanh(self.layers[2](x + wide))
        with torch.no_grad():
            wide = x.repeat(1, 24).view(-1, 24, 64).mean(1)
        self.seen = kept
        return self.layers[3](x + wide)


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize(
    ("keep", "options"),
    [*((keep, {}) for keep in KEEPS), ("a result", {"is_trained": True}),
     ("a result", {"is_late": True}), ("a detached one", {"is_late": True, "is_trained": True})],
)  # fmt: skip
def test_what_a_model_keeps_from_step_to_step_is_counted(
    keep: str, options: dict[str, bool]
) -> None:
    torch.manual_seed(1)
    found = assert_two_steps_close(Remembering(keep, **options), torch.rand(2000, 64))
    assert len(found.step.profile.remaining) == (keep not in ("the input", "nothing"))


class Queueing(nn.Module):
    """Makes a large buffer anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("queue", torch.zeros(8000, 64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.queue = torch.cat([x, self.queue[: -len(x)]])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_buffer_that_each_step_makes_anew_counts_as_the_buffer() -> None:
    found = planner_for(Queueing(), torch.rand(1000, 64), optimizer=sgd, loss=scores)
    assert found.step.fixed.buffers == 8000 * 64 * 4
    assert found.step.costs.held_until_end == found.step.profile.returned


def assert_two_steps_close(model: Remembering, x: Tensor) -> StepPlanner:
    """Asserts what the second step takes by a plan, with what the first has left."""
    found = planner_for(model, x, optimizer=sgd, loss=scores)
    optimizer = sgd(model.parameters())

    def two_steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            scores(model(x)).backward()
            optimizer.step()

    for point in found.points[:: max(len(found.points) // 3, 1)]:
        zoo.checkpoint(model, found.step.of_model(point).plan)
        two_steps()
        optimizer.zero_grad()
        model.seen = None
        measured = measure_step(two_steps, model, optimizer, [x]).peak
        assert 0.97 * point.peak <= measured <= point.peak
    return found


class Pooling(nn.Module):
    """Adds up a wide tensor, which no backward needs and whose gradient is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.tanh(self.first(x)) * number for number in range(3)]
        return torch.stack(parts).sum(0) + self.shift.weight.mean()


@pytest.mark.usefixtures("traces_once")
def test_a_segment_holds_what_it_read_until_its_forward_ends() -> None:
    """Also the wide tensor, which its recomputation does not need."""
    torch.manual_seed(1)
    assert_close(Pooling(), torch.rand(5000, 16), plans=["0-8 (9-11)", "(0-8) (9-11)"])


class Averaging(nn.Module):
    """Reads an average before and after it moves, and a view of a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(96, 96), nn.Linear(96, 96), torch.rand(96)
        self.register_buffer("average", torch.zeros(96))
        # no segment copies what kernels only write, nor the statistics of a norm
        self.register_buffer("counts", torch.zeros(96))
        self.norm = nn.BatchNorm1d(96)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.average
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.counts.add_(1)
        x = torch.tanh((x - self.average) * self.scale[None])
        return torch.tanh(self.last(self.norm(x)))


@pytest.mark.usefixtures("traces_once")
def test_the_copies_of_small_buffers_and_constants_are_counted() -> None:
    torch.manual_seed(1)
    assert_close(Averaging(), torch.rand(1000, 96), least=0.9999, plans=["0-1 (2-7)"])


def assert_close(
    model: nn.Module, x: Tensor, least: float = 0.95, plans: Sequence[str] = ()
) -> None:
    """Asserts that none of the plans, by default the best, takes more than predicted or less."""
    found = planner_for(model, x, optimizer=sgd, loss=scores)
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(x)  # which is there beyond the backward, as in a training loop
        scores(outputs).backward()
        optimizer.step()

    given = [found.point(Plan.parse(plan)) for plan in plans]
    inputs = [x, *(value for value in vars(model).values() if isinstance(value, Tensor))]
    for point in given or found.points:
        zoo.checkpoint(model, found.step.of_model(point).plan)
        step()
        measured = measure_step(step, model, optimizer, inputs).peak
        assert least * point.peak <= measured <= point.peak


@torch.library.custom_op("zoo_tests::wave", mutates_args=())
def wave(x: Tensor) -> Tensor:
    """Is no kernel of torch's, so that no plan runs it again."""
    return x.sin()


@wave.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _of_wave(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient * ctx.saved_tensors[0].cos()


wave.register_autograd(_of_wave, setup_context=_save)


class Between(nn.Module):
    """A function between convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.function = nn.Conv2d(8, 8, 1), function

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return torch.tanh(self.last(self.function(x)))


def as_step(x: Tensor) -> Tensor:
    return torch.tanh(wave(x))


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize("function", [as_step, functools.partial(F.rrelu, training=True)])
def test_what_no_recomputation_makes_is_counted(function: Callable[[Tensor], Tensor]) -> None:
    """A custom operator runs once; a noise is saved before it is drawn, so it and a copy stay."""
    torch.manual_seed(1)
    assert_close(Between(function), torch.rand(8, 3, 64, 64))


def test_with_the_optimizer_in_the_backward_gradients_are_not_counted_twice() -> None:
    """Of equal layers two gradients: that of the layer, and one that a product is about to make."""
    model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(10)))
    size, x = 200 * 200 * 4, torch.rand(1, 200)
    first = planner_for(model, x, optimizer=sgd, loss=scores, device="a100")
    other = planner_for(
        model, x, optimizer=sgd, loss=scores, device="a100", optimizer_in_backward=True
    )
    for planner in (other, StepPlanner(first.step.in_backward())):
        assert first.least.peak - planner.least.peak >= 8 * size
        assert planner.step.fixed.gradients == planner.step.fixed.scratch == 0
    model[5].weight = model[0].weight
    tied = planner_for(
        model, x, optimizer=sgd, loss=scores, device="a100", optimizer_in_backward=True
    )
    assert tied.least.peak - other.least.peak >= -2 * size + size, "it lives until the first layer"


def test_a_budget_that_only_an_optimizer_in_the_backward_meets_is_told() -> None:
    model, x = nn.Sequential(*(nn.Linear(200, 200) for _ in range(10))), torch.rand(1, 200)
    with pytest.raises(BudgetError, match=r"zoo\.optimizer_in_backward") as refusal:
        zoo.plan(model, x, memory_budget=0.85, optimizer=sgd, loss=scores)
    assert "least" in str(refusal.value)
    report = zoo.plan(
        model, x, memory_budget=0.999, optimizer=sgd, loss=scores, optimizer_in_backward=True
    )
    assert report.fixed.gradients == 0
    with pytest.raises(BudgetError) as refusal:
        zoo.plan(model, x, memory_budget=100, optimizer=sgd, loss=scores)
    assert "optimizer_in_backward" not in str(refusal.value)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RAdam])
def test_a_peak_in_a_real_optimizers_step_keeps_to_the_budget(make: Any) -> None:
    """Also to the byte: a learning rate is a tensor in C++.

    Without convolutions: what oneDNN's take inside themselves differs from processor to processor,
    and on one without AVX-512 puts ResNet-18's peak in a backward.
    """
    torch.manual_seed(1)
    layers = (part for _ in range(6) for part in (nn.Linear(256, 256), nn.BatchNorm1d(256)))
    model, x = nn.Sequential(*layers), torch.rand(2, 256)
    given: Any = {"optimizer": make, "loss": scores, "holds_outputs": True}
    report = zoo.plan(model, x, max_overhead=9.0, **given)
    optimizer = make(model.parameters())

    def step() -> None:
        outputs = model(x)
        scores(outputs).backward()
        optimizer.step()

    for _ in range(6):
        step()
    measured = measure_step(step, model, optimizer, [x]).peak
    assert report.at_peak.moment == "step of the optimizer"
    assert 0.999 * report.predicted_peak <= measured <= report.predicted_peak


def test_what_is_impossible_is_refused_with_the_least() -> None:
    found = prospect("resnet")
    least, baseline = found.points[0].peak, found.points[-1].peak
    with pytest.raises(BudgetError, match=rf"at least .*{least} bytes.*baseline") as refusal:
        found.report(least - 1, None)
    assert str(baseline) in str(refusal.value)
    # an error is sent from one process to another
    for error in (refusal.value, pickle.loads(pickle.dumps(refusal.value))):
        assert (error.budget, error.least, error.baseline) == (least - 1, least, baseline)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_peak_is_known_without_the_other_plans(family: str) -> None:
    found = prospect(family)
    assert found.lowest().peak <= found.points[0].peak
    assert found.lowest().peak <= found.least.peak <= 1.004 * found.lowest().peak


def test_a_refusal_names_a_budget_that_is_granted() -> None:
    found = prospect("resnet")
    with pytest.raises(BudgetError, match=r"Raise the budget to '.*', lower the batch") as error:
        found.report(1 << 20, None)
    budget = str(error.value).split("Raise the budget to '")[1].split("'")[0]
    granted = found.report(parse_budget(budget), None)
    assert granted.predicted_peak <= 1.01 * found.points[0].peak


def test_a_model_that_trains_nothing_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a kernel measured for it."""
    frozen = Residuals().requires_grad_(False)
    with monkeypatch.context() as patch:
        patch.delattr("zoo.policy.training_step.measure_kernels")
        with pytest.raises(ArgumentError, match="depends on nothing that requires a gradient"):
            planner_for(frozen, images())
    assert planner_for(frozen, images().requires_grad_()).points


@pytest.mark.parametrize("function", [torch.detach, torch.argmax, lambda output: None])
def test_a_model_that_returns_nothing_to_train_is_not_planned_for(function: Any) -> None:
    for ask in (functools.partial(zoo.plan, memory_budget=1.0), zoo.frontier):
        with pytest.raises(ArgumentError, match="loss of this Ending depends on nothing"):
            ask(Ending(function), torch.rand(2, 4))
    assert zoo.plan(Ending(torch.relu), torch.rand(2, 4), memory_budget=1.0)


def test_what_is_free_here_is_no_budget_of_another_device() -> None:
    with pytest.raises(ArgumentError, match=r"device, cpu, but device= plans for another"):
        planner_for(Residuals(), images(), device="a100").report("device", None)


def test_a_refusal_offers_no_optimizer_of_less_state_to_one_without_state() -> None:
    with pytest.raises(BudgetError, match=r"Raise the budget to '[^']+' or lower the batch size"):
        planner_for(Residuals(), images(), optimizer=None).report(1 << 10, None)


def test_no_optimizer_counts_no_state() -> None:
    model, x = Residuals(), images()
    with_state = planner_for(model, x).step.fixed
    without = planner_for(model, x, optimizer=None).step.fixed
    assert with_state.optimizer > without.optimizer == 0
    assert isinstance(without, FixedBytes)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 16, 2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0])


class Recurrent(nn.Module):
    """Its layers compare devices before anything is dispatched; two share their weights."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.LSTM, nn.GRU, nn.RNN)
        self.layers = nn.ModuleList(kind(16, 8, bidirectional=True) for kind in kinds)
        self.layers.append(self.layers[1])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (functools.partial(PreactivationResNet, basic, 2), (8, 3, 32, 32)),
        (
            functools.partial(zoo.vit_tiny_patch16, image_size=64, depth=2, classes=10),
            (2, 3, 64, 64),
        ),
        (attention, (2, 64, 32)),
        (Tagger, (20, 4, 16)),
        (Recurrent, (3, 4, 16)),
    ],
)
def test_meta_inputs_give_the_plans_of_real_ones(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Also where the kernels of meta tensors are others: of attention and of LSTMs."""
    model, x = build(), torch.rand(shape)
    with torch.device("meta"):
        nowhere = build()
    given = ((model, x), (model, x.to("meta")), (nowhere, x.to("meta")))
    options: Any = {"device": "a100", "optimizer": torch.optim.AdamW}
    real, on_meta, all_on_meta = (planner_for(*some, **options) for some in given)
    for bounds in ((None, 0.2), (1.0, None)):
        assert on_meta.report(*bounds) == all_on_meta.report(*bounds) == real.report(*bounds)


def test_overhead_asks_for_the_least_memory_in_that_time() -> None:
    found = prospect("preactivation")
    report = found.report(None, 0.2)
    assert report.predicted_time_ratio <= 1.2
    assert report.predicted_peak <= min(p.peak for p in found.points if p.time_ratio <= 1.2)
    assert found.report(None, 0.0).predicted_time_ratio == 1


def test_the_frontier_holds_no_dominated_plan_and_the_classic_schemes() -> None:
    found = prospect("resnet")
    points = found.frontier().optimal
    assert [p.peak for p in points] == sorted({p.peak for p in points})
    assert [p.time_ratio for p in points] == sorted({p.time_ratio for p in points}, reverse=True)
    assert [p.name for p in found.frontier().schemes] == ["sqrt", "blocks", "cheap"]


def test_the_plans_on_the_frontier_are_the_models_without_its_loss() -> None:
    found = prospect("resnet")
    curve = found.frontier()
    for point in (*curve, curve.baseline):
        assert point.plan.flatten() == tuple(range(found.step.steps))
    assert curve.baseline.plan == Plan.keep_all(found.step.steps)


def test_a_report_survives_a_file(tmp_path: Any) -> None:
    report = prospect("resnet").report(0.98, None)
    report.save(tmp_path / "plan.json")
    assert PlanReport.load(tmp_path / "plan.json") == report
    assert str(report.plan) in str(report) == report.table()
    with pytest.raises(PlanError, match="no report of a plan"):
        PlanReport.from_json("{}")


@pytest.mark.parametrize(
    ("budget", "overhead", "message"),
    [
        (None, None, "one of memory_budget and max_overhead"),
        ("1GiB", 0.2, "one of memory_budget and max_overhead"),
        ("lots", None, "memory_budget='lots' is no size"),
        ("150%", None, "memory_budget='150%' is no share .* '8GB' .* 0.6 or '60%', or 'device'"),
        (0, None, "memory_budget=0 must be above 0"),
        (1.5, None, r"memory_budget=1\.5 is no share"),
        (None, -0.1, r"max_overhead=-0\.1 must be a number, 0 or more"),
        (None, "much", "max_overhead='much' must be a number, 0 or more; 0.2 or '20%'"),
        (None, True, "max_overhead=True must be a number, 0 or more"),
        (None, float("nan"), "max_overhead=nan must be a number, 0 or more"),
    ],
)
def test_what_is_no_budget_is_refused(budget: Any, overhead: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        zoo.plan(Residuals(), images(), memory_budget=budget, max_overhead=overhead)
    if (budget, overhead) != (None, None):
        with pytest.raises(ArgumentError, match=message):
            zoo.checkpoint(Residuals(), "auto", memory_budget=budget, max_overhead=overhead)


@pytest.mark.parametrize(
    "ways",
    [
        (0.99, "99%", "0.99", " 99 % ", np.float32(0.99), Fraction(99, 100)),
        ("1G", "1g", "1GiB", "1gib", 1 << 30, str(1 << 30), np.int64(1 << 30)),
        ("1GB", "1gb", "1 GB", 10**9),
    ],
    ids=str,
)
def test_a_budget_is_one_value_in_whatever_way_it_is_written(ways: Any) -> None:
    budgets = {round(float(parse_budget(way)), 6) for way in ways}
    assert len(budgets) == 1
    for way in ways[:2]:
        option = goal_of(zoo.checkpoint(Residuals(), memory_budget=way))
        assert option is not None
        assert option.memory_budget == parse_budget(way)


@pytest.mark.parametrize(
    "plan",
    [
        lambda: zoo.checkpoint(Residuals(), memory_budget="1G"),
        lambda: zoo.checkpoint(Net(), max_overhead=0.2),
        lambda: zoo.checkpoint(Net(), "auto"),
        lambda: zoo.plan(Net(), "no inputs", memory_budget="1G"),  # type: ignore[arg-type]
        lambda: zoo.frontier(Net(), "no inputs"),  # type: ignore[arg-type]
        lambda: zoo.plan_rank(Net(), "no inputs", world_size=2, max_overhead=1.0),  # type: ignore[arg-type]
        lambda: zoo.largest(Net(), images(8), memory_budget="1G", checkpoint="auto"),
    ],
)
def test_a_package_that_planning_needs_is_missed_before_any_work(
    plan: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("zoo.planner.optimal", "zoo.planner.search_space"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ArgumentError, match=r"needs numpy: pip install 'zoo-checkpoint\[plan\]'"):
        plan()


@pytest.mark.parametrize("overhead", [0.2, "0.2", "20%", "20 %", np.float64(0.2)])
def test_an_overhead_is_one_value_in_whatever_way_it_is_written(overhead: Any) -> None:
    assert parse_overhead(overhead) == 0.2


def test_a_plan_is_for_training_also_where_gradients_are_off() -> None:
    planned = functools.partial(zoo.plan, Residuals(), images(8), max_overhead=0.2, device="a100")
    assert torch.no_grad()(planned)() == torch.inference_mode()(planned)() == planned()


def test_auto_trains_the_bits_of_the_baseline_and_says_what_it_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trained(**options: Any) -> Any:
        torch.manual_seed(1)
        model = zoo.checkpoint(Residuals(rate=0.3), **options)
        model(images(8, 4, 64)).square().sum().backward()
        return model

    with caplog.at_level(logging.INFO, "zoo"):
        model = trained(checkpoint="auto", max_overhead=10.0)
    assert "planned peak" in caplog.text
    assert isinstance(zoo.plan_of(model), Plan)
    assert max(zoo.plan_of(model).runs()) > 1
    assert_same(everything(model), everything(trained(checkpoint=False)))


def test_a_budget_alone_means_auto_and_no_other_option() -> None:
    model = zoo.vit_tiny_patch16(image_size=32, depth=1, memory_budget="1GiB")
    model(torch.rand(2, 3, 32, 32))
    assert zoo.plan_of(model) == Plan.keep_all(len(zoo.plan_of(model).flatten()))
    with pytest.raises(
        ArgumentError, match="memory_budget= goes with checkpoint='auto'; got check"
    ):
        zoo.resnet18(checkpoint="sqrt", memory_budget="1GiB")


def test_kernel_workspaces_are_said_to_be_left_out_where_no_kernel_was_measured() -> None:
    model, x = Residuals(), images(8, 4, 32)
    words = "\nestimated for small-cpu, without kernel workspaces: no kernel was measured\n"
    here, paper = (
        zoo.plan(model, x, max_overhead=0.1, device=name) for name in (None, "small-cpu")
    )
    assert (here.kernels_measured, paper.kernels_measured) == (True, False)
    assert words in str(paper)
    assert words not in str(here)
    assert zoo.PlanReport.from_json(paper.to_json()) == paper
    curves = (zoo.frontier(model, x, device=name) for name in (None, "small-cpu"))
    assert [words.strip() in str(curve) for curve in curves] == [False, True]


def test_the_loss_is_kept_and_its_bytes_count() -> None:
    model, x = Residuals(), images(8, 4, 32)
    with_loss = planner_for(model, x, loss=scores)
    assert all(isinstance(point.plan[-1], int) for point in with_loss.points)
    assert with_loss.points[-1].peak >= planner_for(model, x).points[-1].peak
    assert with_loss.report(None, 0.1).plan.flatten() == tuple(range(with_loss.step.steps))


def test_a_loss_may_know_its_targets() -> None:
    model, x, targets = Residuals(), images(8, 4, 32), torch.randint(5, (8,))

    def loss(scores: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(scores, targets)

    report = zoo.plan(model, x, max_overhead=0.1, loss=loss)
    assert report.plan.flatten() == tuple(range(len(report.names)))
    assert len(report.saved) == len(report.blocks) == len(report.names)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.nn.functional.cross_entropy, r"loss=cross_entropy fails on .* shape \(8, 5\) \(Typ"),
        (lambda scores: scores.mean().item(), "loss=<lambda> returned float"),
        (lambda scores: scores, r"loss=<lambda> returned a tensor of shape \(8, 5\)"),
        (lambda scores: 1.0, "loss=<lambda> returned float; return a tensor of one element"),
    ],
)
def test_what_is_no_loss_is_said_to_be_the_loss(loss: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        zoo.plan(Residuals(), images(8, 4, 32), max_overhead=0.1, loss=loss)


def test_targets_that_the_loss_holds_are_counted_as_inputs() -> None:
    model, x, targets = Residuals(), images(8, 4, 32), torch.zeros(8, dtype=torch.long)
    loss = functools.partial(F.cross_entropy, target=targets)
    first, other = (planner_for(model, x, loss=one) for one in (loss, scores))
    assert first.step.fixed.inputs == other.step.fixed.inputs + targets.nbytes


def test_targets_may_be_on_meta() -> None:
    model, x, targets = Residuals(), images(8, 4, 32), torch.zeros(8, dtype=torch.long)

    def costs_with(known: Tensor) -> Any:
        def loss(scores: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(scores, known)

        return planner_for(model, x, loss=loss, device="small-cpu").step.costs

    meta, real = costs_with(targets.to("meta")), costs_with(targets)
    assert meta.flops == real.flops
    assert (meta.forward[:-1], meta.gradients) == (real.forward[:-1], real.gradients)
    assert 0 <= meta.forward[-1] - real.forward[-1] <= targets.nbytes


def test_other_kernels_make_another_planner_and_leave_the_first() -> None:
    first = planner_for(Residuals(), images(), optimizer=sgd, device="small-cpu")
    step, peak, seconds = first.step, first.baseline.peak, sum(first.step.costs.seconds)
    kernels = [KernelCosts(1.0, 1 << 20)] * len(step.profile.specs)
    slow = StepPlanner(step.with_kernels(kernels))
    assert slow.baseline.peak > peak
    assert sum(slow.step.costs.seconds) > seconds
    assert (step.kernels, first.baseline.peak, sum(step.costs.seconds)) == ((), peak, seconds)
    assert slow.step.optimizer_bytes is first.step.optimizer_bytes, "it is counted once"
