"""Planning runs steps before the first training forward does: nothing that they reach may show it.

Each step here computes with what it moves, so that a plan that moved it once more is seen in every
gradient.
"""

import random
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import zoo
from tests.chains import Chain, Steps
from tests.training import assert_same, everything, frozen
from zoo.errors import ArgumentError, PlanError
from zoo.profiling.isolation import in_fork, isolated
from zoo.tracing.isolated_trace import TraceError

# its stream is one of those that planning moves
np = pytest.importorskip("numpy", reason="planning for a budget needs NumPy")

COUNTS = {"calls": 0}


class Counter:
    def __init__(self) -> None:
        self.calls = 0


class Moving(Chain):
    """Its second step is one of its methods: each moves something else."""

    calls = 0

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.name = name
        self.counter, self.counts, self.log = Counter(), {"calls": 0}, [0.0]
        self.average, self.own = torch.zeros(4), torch.Generator().manual_seed(1)
        self.numbers = iter(range(1, 100))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def steps(self) -> Steps:
        return [self.first, torch.sin, getattr(self, self.name), torch.sin, self.last]

    def draw_from_python(self, x: Tensor) -> Tensor:
        return x * random.random()

    def draw_from_numpy(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())

    def draw_from_its_own(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.own)

    def append(self, x: Tensor) -> Tensor:
        self.log.append(1.0)
        return x * len(self.log)

    def count_in_a_dictionary(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return x * self.counts["calls"]

    def count_in_an_object(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        return x * self.counter.calls

    def count_in_a_global(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return x * COUNTS["calls"]

    def count_in_its_class(self, x: Tensor) -> Tensor:
        Moving.calls += 1
        return x * Moving.calls

    def average_over_calls(self, x: Tensor) -> Tensor:
        self.average.mul_(0.5).add_(x.detach().mean(0))
        return x - self.average

    def shrink(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
        return x * self.scale.clone()

    def take_the_next(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


NAMES = [
    name
    for name, value in vars(Moving).items()
    if callable(value) and name not in ("__init__", "steps")
]
# what no copy of a module keeps apart
OUTSIDE = ("count_in_a_global", "count_in_its_class")


def moved(name: str) -> tuple[Moving, Tensor]:
    Moving.calls = COUNTS["calls"] = 0
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    return Moving(name), torch.rand(3, 4)


def left(model: Moving) -> dict[str, Any]:
    """Everything that a training may have moved."""
    others = [
        COUNTS["calls"], Moving.calls, model.counter.calls, model.counts, model.log,
        next(model.numbers), model.average, model.own,
    ]  # fmt: skip
    return everything(model) | {"others": frozen(others)}


@pytest.mark.parametrize("options", [{"checkpoint": True}, {"max_overhead": 0.5}])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_forward_with_a_plan_is_that_of_the_baseline(
    name: str, options: dict[str, Any]
) -> None:
    def trained(**chosen: Any) -> dict[str, Any]:
        model, x = moved(name)
        zoo.checkpoint(model, **chosen)
        model(x).square().sum().backward()
        return left(model)

    options = {"checkpoint": "auto", **options}
    assert_same(trained(**options), trained(checkpoint=False))


@pytest.mark.parametrize("name", NAMES)
def test_planning_ahead_leaves_what_steps_move(name: str) -> None:
    model, x = moved(name)
    zoo.plan(model, x, max_overhead=0.5)
    planned = left(model)
    assert_same(planned, left(moved(name)[0]))


def test_no_hook_fires_and_all_are_there_afterwards() -> None:
    model, x = moved("append")
    fired: list[str] = []
    model.first.weight.register_hook(lambda gradient: fired.append("weight"))
    handle = register_module_forward_hook(lambda *_: fired.append("everywhere"))
    try:
        zoo.plan(model.train(), x, max_overhead=0.5)
        assert fired in ([], ["everywhere"]), "the model itself may be called"
        fired.clear()
        model(x).sum().backward()
    finally:
        handle.remove()
    assert set(fired) == {"weight", "everywhere"}


def test_a_generator_is_where_it_was() -> None:
    def numbers() -> Iterator[int]:
        yield from range(100)

    model, x = moved("take_the_next")
    model.numbers = numbers()
    zoo.plan(model, x, max_overhead=0.5)
    assert next(model.numbers) == 0


def test_a_forward_that_branches_by_chance_is_traced_as_it_runs_next() -> None:
    random.seed(2)
    expected = random.random()
    for _ in range(2):
        random.seed(2)
        assert in_fork(random.random) == expected


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in OUTSIDE])
def test_without_a_fork_copies_of_the_modules_run(name: str) -> None:
    test_planning_ahead_leaves_what_steps_move(name)


@pytest.mark.usefixtures("without_fork")
def test_without_a_fork_what_cannot_be_copied_is_refused() -> None:
    model, x = moved("take_the_next")
    model.numbers = (number for number in range(100))  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"generator.*zoo.checkpoint without a budget"):
        zoo.plan(model, x, max_overhead=0.5)
    assert next(model.numbers) == 0


@pytest.mark.usefixtures("without_fork")
def test_without_a_fork_hooks_for_all_modules_fire_on_other_threads_only() -> None:
    fired: list[int] = []
    module, x = nn.Identity(), torch.ones(1)

    def planned(is_apart: bool) -> None:
        module(x)
        other = threading.Thread(target=module, args=(x,))
        other.start()
        other.join()

    handle = register_module_forward_hook(lambda *_: fired.append(threading.get_ident()))
    try:
        isolated(planned, PlanError)
        assert len(fired) == 1
        assert threading.get_ident() not in fired
        module(x)
    finally:
        handle.remove()
    assert fired[1:] == [threading.get_ident()]


@pytest.mark.usefixtures("without_fork")
def test_without_a_fork_steps_that_share_a_weight_are_planned() -> None:
    """What they share is a tensor of one forward's graph, which cannot be copied."""
    model = zoo.gpt2_small(vocabulary=50, width=8, heads=2, depth=2, checkpoint=True)
    tokens = torch.randint(0, 50, (2, 16))
    model(tokens, tokens).backward()
    assert zoo.plan_of(model) is not None


@pytest.mark.usefixtures("without_fork")
def test_without_a_fork_a_traced_model_is_planned() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    report = zoo.plan(model, torch.rand(3, 4), max_overhead=0.5)
    assert report.predicted_peak <= report.baseline_peak


def test_what_a_step_gives_a_kernel_need_not_be_made_again() -> None:
    class Setting(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def steps(self) -> Steps:
            return [self.first, self.step]

        def step(self, x: Tensor) -> Tensor:
            other = torch.empty(0)
            other.set_(torch.ones(4).untyped_storage())
            return x * other[:4]

    assert zoo.plan(Setting(), torch.rand(3, 4), max_overhead=0.5).predicted_peak > 0


class Locked(nn.Linear):
    """Waits for a lock of the process, which a logger or a prefetcher may hold."""

    lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


def test_a_child_that_waits_for_a_lock_of_another_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zoo.profiling.isolation.PATIENCE", 2)
    model, x = zoo.checkpoint(Locked(3, 3), memory_budget="64MiB"), torch.rand(2, 3)
    why = r"for 2 s nothing has run at .*test_isolation.py:\d+.*without a budget traces a real"
    with Locked.lock, pytest.raises(TraceError, match=why):
        model(x)
    assert torch.equal(model(x), zoo.uncheckpoint(model)(x))


def test_a_child_may_wait_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.profiling.isolation.PATIENCE", 1)

    def function() -> int:
        return subprocess.run(["sleep", "3"], check=True).returncode

    assert in_fork(function) == 0
