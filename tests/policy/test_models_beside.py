"""A budget counts what other planned models of a step hold, DDP's buckets, and targets."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.training import assert_same, everything, needs_numpy
from zoo.errors import ArgumentError
from zoo.profiling.peak_memory import measure_step
from zoo.tracing.planned_forward import patched_forward

pytestmark = needs_numpy

MIB = 2**20
X = torch.rand(768, 48, generator=torch.Generator().manual_seed(0))
sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def perceptrons(count: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (
        nn.Sequential(nn.Linear(48, 144), nn.GELU(), nn.Linear(144, 48)) for _ in range(count)
    )
    return nn.Sequential(*layers)


def in_turns(models: Sequence[nn.Module], x: Tensor) -> None:
    """Feeds each model what the one before has made."""
    for model in models:
        x = model(x)
    x.square().mean().backward()


def student_and_teacher(models: Sequence[nn.Module], x: Tensor) -> None:
    """Two models of one input, both trained."""
    first, *others = (model(x).square().mean() for model in models)
    (first - torch.stack(others).sum()).square().backward()


def adversaries(models: Sequence[nn.Module], x: Tensor) -> None:
    """A network that judges true and made inputs, and one that makes them."""
    judge, maker = models
    made = maker(x)
    (judge(x).square().mean() - judge(made.detach()).square().mean()).backward()
    judge(made).square().mean().backward()


PROGRAMS: dict[str, Callable[[Sequence[nn.Module], Tensor], None]] = {
    "in turns": in_turns,
    "student and teacher": student_and_teacher,
    "adversaries": adversaries,
}


class Training:
    """A training of two models by one optimizer."""

    def __init__(self, program: str) -> None:
        self.models = nn.ModuleList([perceptrons(seed=0), perceptrons(seed=1)])
        self.optimizer = sgd(self.models.parameters())
        self.program = PROGRAMS[program]

    def step(self) -> None:
        self.program([*self.models], X)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self) -> int:
        return measure_step(self.step, self.models, self.optimizer, [X]).peak


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("program", PROGRAMS)
def test_models_of_one_step_keep_to_the_budget_together_by_the_third_step(
    program: str, share: float
) -> None:
    plain, planned = Training(program), Training(program)
    plain.step()
    budget = int(share * plain.peak())
    for model in planned.models:
        zoo.checkpoint(model, memory_budget=budget, optimizer=planned.optimizer)
    for _ in range(2):
        planned.step()
    plain.step()
    plain.step()
    planned.step()
    assert planned.peak() <= budget
    assert planned.peak() <= budget
    plain.step()
    assert_same(everything(planned.models), everything(plain.models))


@pytest.mark.parametrize("share", [0.8, 0.7])
def test_casts_of_one_model_count_while_another_runs_in_the_same_autocast(share: float) -> None:
    """Weights are large here, and autocast holds their casts until it is left.

    The plans are made without a loss, and the loss of the step takes no memory.
    """
    x = torch.rand(512, 128)

    def wide(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        layers = (
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)
        )
        return nn.Sequential(*layers)

    def step(models: nn.ModuleList) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            first, second = models
            outputs = second(first(x))
        outputs.sum().backward()

    def peak(models: nn.ModuleList) -> int:
        return measure_step(lambda: step(models), models, None, [x]).peak

    plain, planned = (nn.ModuleList([wide(0), wide(1)]) for _ in range(2))
    budget = int(share * peak(plain))
    zoo.checkpoint(planned, memory_budget=budget, optimizer="none")
    for _ in range(3):
        step(planned)
        planned.zero_grad()
    assert peak(planned) <= budget
    assert_same(everything(planned), everything(plain))


def test_a_list_of_models_gets_one_budget_and_different_ones_keep_to_the_least() -> None:
    plain = Training("in turns")
    plain.step()
    budget = int(0.7 * plain.peak())
    together, apart = Training("in turns"), Training("in turns")
    assert zoo.checkpoint(together.models, memory_budget=budget, optimizer="sgd") is together.models
    for model, own in zip(apart.models, (2 * budget, budget), strict=True):
        zoo.checkpoint(model, memory_budget=own, optimizer="sgd")
    for training in (together, apart):
        for _ in range(3):
            training.step()
        assert training.peak() <= budget
    zoo.uncheckpoint([*together.models])
    assert all(patched_forward(model) is None for model in together.models)


def test_a_list_with_something_else_is_refused_and_changes_nothing() -> None:
    models = [zoo.checkpoint(perceptrons(), "sqrt"), perceptrons()]
    before = [patched_forward(model) for model in models]
    with pytest.raises(ArgumentError, match=r"needs a torch\.nn\.Module; got int"):
        zoo.checkpoint([*models, 3], memory_budget="8MiB")  # type: ignore[list-item]
    assert [patched_forward(model) for model in models] == before


def test_other_parameters_of_an_optimizer_count() -> None:
    model, other = perceptrons(), nn.Linear(300, 300)
    optimizer = sgd([*model.parameters(), *other.parameters()])
    alone = zoo.plan(model, X, memory_budget=1.0, optimizer=sgd(model.parameters()))
    both = zoo.plan(model, X, memory_budget=1.0, optimizer=optimizer)
    size = sum(parameter.nbytes for parameter in other.parameters())
    assert both.predicted_peak - alone.predicted_peak == 3 * size
    assert both.at_peak.others == both.fixed.others == 3 * size
    assert "held by others" in both.table()
    assert "held by others" not in alone.table()


def test_a_model_that_another_program_trained_before_counts_nothing() -> None:
    first, second = perceptrons(), perceptrons()
    for model in (first, second):
        zoo.checkpoint(model, memory_budget="64MiB", optimizer="none")
        for _ in range(3):
            model(X).square().mean().backward()
    assert patched_forward(second).training.others == 0


def voxels() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = (nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.PReLU()) for _ in range(3))
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *convolutions, nn.Conv3d(4, 2, 1))


def made_in_the_loss(outputs: Tensor) -> Tensor:
    classes = torch.zeros((len(outputs), *outputs.shape[2:]), dtype=torch.long)
    return F.cross_entropy(outputs, classes)


@pytest.mark.parametrize("share", [1.0, 0.8, 0.0])
def test_targets_that_a_loss_makes_count_as_those_that_a_loop_holds(share: float) -> None:
    x, targets = torch.rand(2, 1, 16, 24, 24), torch.randint(2, (2, 16, 24, 24))
    model = voxels()
    options: dict[str, Any] = {"optimizer": "none", "loss": made_in_the_loss}
    if not share:
        points = zoo.frontier(voxels(), x, **options)
        share = (points[0].peak + 1) / points.baseline.peak
    report = zoo.plan(voxels(), x, memory_budget=share, **options)
    zoo.checkpoint(model, report)

    def step() -> None:
        F.cross_entropy(model(x), targets).backward()
        model.zero_grad()

    step()
    taken = measure_step(step, model, None, [x, targets]).peak
    assert 0.99 * report.predicted_peak <= taken <= 1.001 * report.predicted_peak


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("is_planned_first", [True, False])
@pytest.mark.usefixtures("process_group")
def test_buckets_of_gradients_count(is_planned_first: bool, is_view: bool) -> None:
    """They are as large as the gradients, which may be views of them."""

    def steps(share: float | None) -> tuple[int, int]:
        model, asked = perceptrons(12), 0
        if share is not None:
            asked = int(share * plain)
        options = {"memory_budget": asked, "optimizer": "sgd"}
        if asked and is_planned_first:
            zoo.checkpoint(model, **options)
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=is_view)
        if asked and not is_planned_first:
            zoo.checkpoint(model, **options)
        optimizer = sgd(model.parameters())

        def step() -> None:
            parallel(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        # DDP makes its buckets anew after the first backward
        for _ in range(3):
            step()
        # which sees memory from before, too, when a kernel uses it
        with zoo.track(model, optimizer=optimizer, inputs=X, allocator=True) as timeline:
            step()
        return timeline.peak, asked

    plain, _ = steps(None)
    for share in (0.9, 0.7):
        taken, asked = steps(share)
        assert taken <= asked


def tied() -> nn.ModuleList:
    first, second = perceptrons(seed=0), perceptrons(seed=1)
    second[0][0].weight = first[0][0].weight
    return nn.ModuleList([first, second])


class Outer(nn.Module):
    """A model with a part that a loop also calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rest = perceptrons(seed=0), perceptrons(seed=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.inner(x))


def outer_and_inner() -> nn.ModuleList:
    outer = Outer()
    return nn.ModuleList([outer, outer.inner])


@pytest.mark.parametrize("build", [tied, outer_and_inner])
def test_models_with_common_parameters_keep_to_the_budget_together(
    build: Callable[[], nn.ModuleList],
) -> None:
    def step(models: nn.ModuleList) -> None:
        models.zero_grad()
        (models[0](X).square().mean() + models[1](X).square().mean()).backward()

    def peak(models: nn.ModuleList) -> int:
        return measure_step(lambda: step(models), models, None, [X]).peak

    plain, planned = build(), build()
    step(plain)
    budget = int(0.7 * peak(plain))
    for model in planned:
        zoo.checkpoint(model, memory_budget=budget, optimizer="none", accumulates=True)
    for _ in range(3):
        step(planned)
    assert peak(planned) <= budget
    step(plain)
    assert_same(everything(planned), everything(plain))


def test_a_model_of_a_list_that_is_not_trained_counts() -> None:
    teacher, student = perceptrons(12).requires_grad_(False), perceptrons()
    models = nn.ModuleList([teacher, student])

    def step() -> None:
        student.zero_grad()
        with torch.no_grad():
            wanted = teacher(X)
        (student(X) - wanted).square().mean().backward()

    step()
    budget = int(0.85 * measure_step(step, models, None, [X]).peak)
    zoo.checkpoint(models, memory_budget=budget, optimizer="none", accumulates=True)
    for _ in range(2):
        step()
    assert measure_step(step, models, None, [X]).peak <= budget


class Stack(nn.ModuleList):
    """A list of modules with a forward of its own, which is one model."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


def test_a_list_of_modules_that_has_a_forward_is_one_model() -> None:
    model = zoo.checkpoint(Stack(perceptrons()), memory_budget="8MiB", optimizer="none")
    model(X).square().mean().backward()
    assert zoo.plan_of(model) is not None
    assert [patched_forward(part) for part in model] == [None] * len(model)


@pytest.mark.parametrize("inner", [list, tuple, nn.ModuleList])
def test_a_list_in_a_list_is_refused_and_changes_nothing(inner: Any) -> None:
    models = [zoo.checkpoint(perceptrons(), "sqrt"), perceptrons()]
    before = [patched_forward(model) for model in models]
    with pytest.raises(ArgumentError, match=r"got (list|tuple)|has no forward of its own"):
        zoo.checkpoint([models[1], inner([models[0]])], memory_budget="8MiB")
    assert [patched_forward(model) for model in models] == before


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ArgumentError, match="list without models"):
        zoo.checkpoint([], memory_budget="8MiB")
