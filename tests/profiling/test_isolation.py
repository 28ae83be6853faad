"""Planning runs steps before the first training forward does: nothing that they reach may show it.

The model here computes with what it moves, so that a plan that moved it once more is seen in every
gradient.
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import zoo
from tests.training import assert_same, everything, frozen
from zoo.errors import ArgumentError
from zoo.profiling.isolation import PLANNING, ForkedCall, in_fork, isolated_service
from zoo.tracing.isolated_trace import TraceError

# its stream is one of those that planning moves
np = pytest.importorskip("numpy", reason="planning for a budget needs NumPy")

COUNTS = {"calls": 0}


class Counter:
    def __init__(self) -> None:
        self.calls = 0


class Moving(nn.Module):
    """Moves all that it can reach, those of its own and, where told to, what is outside of it."""

    calls = 0

    def __init__(self, reaches_out: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.reaches_out = nn.Linear(4, 4), nn.Linear(4, 4), reaches_out
        self.counter, self.counts, self.log = Counter(), {"calls": 0}, [0.0]
        self.average, self.own = torch.zeros(4), torch.Generator().manual_seed(1)
        self.numbers = iter(range(1, 100))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(self.move(torch.sin(self.first(x)))))

    def move(self, x: Tensor) -> Tensor:
        if self.reaches_out:
            COUNTS["calls"] += 1
            Moving.calls += 1
        self.log.append(1.0)
        self.counts["calls"] += 1
        self.counter.calls += 1
        self.average.mul_(0.5).add_(x.detach().mean(0))
        with torch.no_grad():
            self.scale.mul_(0.9)
        x = (x - self.average) * self.scale.clone() * random.random() * float(np.random.rand())
        calls = len(self.log) + self.counts["calls"] + self.counter.calls + next(self.numbers)
        calls += COUNTS["calls"] + Moving.calls
        return x * torch.rand(x.shape, generator=self.own) * calls


def moved(reaches_out: bool = True) -> tuple[Moving, Tensor]:
    Moving.calls = COUNTS["calls"] = 0
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    return Moving(reaches_out), torch.rand(3, 4)


def left(model: Moving) -> dict[str, Any]:
    """Everything that a training may have moved."""
    others = [
        COUNTS["calls"], Moving.calls, model.counter.calls, model.counts, model.log,
        next(model.numbers), model.average, model.own, random.random(), np.random.rand(),
    ]  # fmt: skip
    return everything(model) | {"others": frozen(others)}


@pytest.mark.parametrize("options", [{"checkpoint": True}, {"max_overhead": 0.5}])
def test_the_first_forward_with_a_plan_is_that_of_the_baseline(options: dict[str, Any]) -> None:
    def trained(**chosen: Any) -> dict[str, Any]:
        model, x = moved()
        zoo.checkpoint(model, **chosen)
        model(x).square().sum().backward()
        return left(model)

    options = {"checkpoint": "auto", **options}
    assert_same(trained(**options), trained(checkpoint=False))


@pytest.mark.parametrize("reaches_out", [False, True])
def test_planning_ahead_leaves_what_steps_move(reaches_out: bool) -> None:
    model, x = moved(reaches_out)
    zoo.plan(model, x, max_overhead=0.5)
    planned = left(model)
    assert_same(planned, left(moved(reaches_out)[0]))


def test_no_hook_fires_and_all_are_there_afterwards() -> None:
    model, x = moved()
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

    model, x = moved()
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
def test_without_a_fork_copies_of_the_modules_run() -> None:
    test_planning_ahead_leaves_what_steps_move(reaches_out=False)


@pytest.mark.usefixtures("without_fork")
def test_without_a_fork_what_cannot_be_copied_is_refused() -> None:
    model, x = moved()
    model.numbers = (number for number in range(100))  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"generator.*zoo.checkpoint without a budget"):
        zoo.plan(model, x, max_overhead=0.5)
    assert next(model.numbers) == 0


def test_what_a_step_gives_a_kernel_need_not_be_made_again() -> None:
    class Setting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            other = torch.empty(0)
            other.set_(torch.ones(4).untyped_storage())
            return super().forward(x) * other[:4]

    assert zoo.plan(Setting(4, 4), torch.rand(3, 4), max_overhead=0.5).predicted_peak > 0


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


def test_a_child_holds_no_lock_of_another_thread_that_plans() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with PLANNING:
            held.set()
            done.wait()

    def is_free() -> bool:
        return PLANNING.acquire(blocking=False)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert (is_free(), in_fork(is_free)) == (False, True)
    done.set()
    thread.join()


def test_a_child_may_wait_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.profiling.isolation.PATIENCE", 1)

    def function() -> int:
        return subprocess.run(["sleep", "3"], check=True).returncode

    assert in_fork(function) == 0


def test_each_request_finds_what_the_function_has_left() -> None:
    """It is served in a fork of its own; one that ends its process ends no other."""
    kept: list[int] = []

    def serve(request: int) -> list[int]:
        kept.append(request)
        return kept if request else os._exit(3)

    answer, ask = isolated_service(lambda _: kept.append(1), serve, ArgumentError)
    assert answer is None
    assert (ask(2), ask(3)) == ([1, 2], [1, 3])
    assert "status 3" in ask(0).text
    assert (ask(4), kept) == ([1, 4], [])


def test_a_process_that_serves_ends_with_its_last_user() -> None:
    """Also if another process that was forked meanwhile holds the pipe to it."""
    child = ForkedCall(lambda: 1, lambda request: request + 1)
    assert (child.receive(), child.ask(4)) == (1, 5)
    other = os.fork()
    if not other:
        time.sleep(60)
        os._exit(0)
    number = child.child
    del child
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_process_that_has_ended_answers_no_request() -> None:
    call = ForkedCall(lambda: "first", lambda request: request)
    assert call.receive() == "first"
    assert call.ask("second") == "second"
    call.close()
    assert "has ended" in call.ask("third").text
