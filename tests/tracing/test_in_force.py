"""A plan is in force where gradients are recorded; one that is not, or saves nothing, says so once.

Which mode the modules are in does not matter: gradients flow through frozen networks in eval mode,
as in textual inversion or perceptual losses.
"""

import asyncio
import copy
import logging
import pickle
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.profiler import ProfilerActivity

import zoo
from tests.tracing.models import Net
from tests.training import assert_same, gradients, images, needs_numpy
from zoo.engine import saved_tensors
from zoo.engine.kernel_segments import Conductor
from zoo.errors import ArgumentError, BudgetError
from zoo.policy.decision import _warn_of_profiler
from zoo.profiling.peak_memory import trace
from zoo.tracing import planned_forward
from zoo.tracing.planned_forward import patched_forward

pytestmark = pytest.mark.usefixtures("without_fork")

OPTIONS: dict[str, dict[str, Any]] = {
    "least": {"checkpoint": True},
    "blocks": {"checkpoint": "blocks"},
    "budget": {"memory_budget": 0.6},
}


class Layers(nn.Module):
    """Layers that are trained by the forward or by another method."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, x: Tensor) -> Tensor:
        return Layers.forward(self, x).square().mean()


def frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def peak_of(model: nn.Module, x: Tensor) -> int:
    """Returns the bytes of the second of two steps, at their most."""
    model(x).square().mean().backward()
    return int(trace(lambda: model(x).square().mean().backward()).peak)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_model_in_eval_mode_is_trained_by_its_plan(option: str, is_frozen: bool) -> None:
    plain = Layers().eval().requires_grad_(not is_frozen)
    model = zoo.checkpoint(copy.deepcopy(plain), **OPTIONS[option])
    one, other = (torch.rand(512, 64, generator=torch.Generator().manual_seed(0)) for _ in "12")
    least, most = (peak_of(m, x.requires_grad_()) for m, x in ((model, one), (plain, other)))
    assert least < 0.8 * most
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    plan = zoo.plan_of(model)
    assert plan is not None
    assert plan.depth() > 0


def test_nothing_is_planned_where_nothing_needs_a_gradient() -> None:
    model, x = zoo.checkpoint(frozen(Layers()), memory_budget="1KiB"), torch.rand(2, 64)
    model(x)
    assert zoo.plan_of(model) is None
    with pytest.raises(BudgetError):
        model(x.requires_grad_())


def test_gradients_that_come_from_elsewhere_are_found() -> None:
    class Prompted(Layers):
        prompt: dict[str, Tensor]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.prompt["added"])

    model = zoo.checkpoint(frozen(Prompted()), "blocks")
    model.prompt = {"added": torch.zeros(64, requires_grad=True)}
    for _ in range(2):
        model(torch.rand(8, 64)).sum().backward()
    plan = zoo.plan_of(model)
    assert plan is not None
    assert plan.depth() > 0


def test_the_mode_of_each_module_is_part_of_what_a_plan_is_for() -> None:
    model, x = zoo.checkpoint(Layers(), memory_budget=0.6), torch.rand(512, 64)
    plans = []
    modes = nn.Module.train, nn.Module.eval, lambda model: model.layers[:4].train(), nn.Module.train
    for change in modes:
        change(model)
        model(x).sum().backward()
        plans.append(zoo.plan_of(model))
    patched = patched_forward(model)
    assert patched is not None
    assert len(patched.cache.kinds) == 3
    assert not any(kind.took_no_branch for kind in patched.cache.kinds.values())
    assert plans[0] == plans[-1]


@pytest.mark.parametrize("what", ["plan", "chain_of", "verify"])
def test_what_is_looked_at_in_eval_mode_says_so(what: str, caplog: Any) -> None:
    model, x = Layers(8, 2).eval(), torch.rand(4, 8)
    look = {
        "plan": lambda: zoo.plan(model, x, memory_budget="1GiB"),
        "chain_of": lambda: zoo.chain_of(model, x),
        "verify": lambda: zoo.verify(model, x),
    }
    found = look[what]()
    (said,) = [text for text in caplog.messages if "eval mode" in text]
    assert "call model.train() first" in said
    if what == "plan":
        assert "Layers in eval mode on 4×8" in str(found)


def test_another_method_than_the_forward_says_that_no_plan_is_in_force(caplog: Any) -> None:
    model = zoo.checkpoint(Layers(), "blocks")
    for _ in range(2):
        model.training_step(torch.rand(4, 64)).backward()
    (said,) = caplog.messages
    assert said.startswith("Layers runs its block layers.0 in another method than its forward")
    assert zoo.plan_of(model) is None


@pytest.mark.parametrize("how", ["forward", "no_grad", "frozen", "gradient inside", "uncheckpoint"])
def test_nothing_is_said_of_a_plan_that_is_in_force_or_not_needed(how: str, caplog: Any) -> None:
    class Inner(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return super().forward(x.detach().requires_grad_())

    model, x = (Inner if how == "gradient inside" else Layers)(), torch.rand(64, 64)
    zoo.checkpoint(model, "cheap")
    for _ in range(2):
        if how == "forward":
            model(x).sum().backward()
        elif how == "frozen":
            frozen(model).training_step(x)
        elif how == "uncheckpoint":
            zoo.uncheckpoint(model).training_step(x).backward()
        else:
            with torch.no_grad():
                model(x) if how == "gradient inside" else model.training_step(x)
    assert caplog.messages == []


@pytest.mark.parametrize("module", [nn.ModuleList([nn.ModuleDict()]), nn.ModuleDict()])
def test_a_module_without_a_forward_is_refused(module: nn.Module) -> None:
    with pytest.raises(ArgumentError, match="has no forward of its own, and a plan is for"):
        zoo.checkpoint(module)


class Sines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().sin().sin()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_model_without_blocks_that_is_compiled_says_that_it_is_not(
    is_given_up: bool, caplog: Any
) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise torch._dynamo.exc.SkipFrame("the backend wants none of it")

    if is_given_up:
        # a frame of the planner, which the compiler leaves alone from then on
        first = torch.compile(zoo.checkpoint(Layers(8, 2), "blocks"), backend=backend)
        first(torch.rand(4, 8)).sum().backward()
        caplog.clear()
    compiled = torch.compile(zoo.checkpoint(Sines(), "cheap"), backend=backend)
    for _ in range(2):
        compiled(torch.rand(512, 8, requires_grad=True)).sum().backward()
    (said,) = [text for text in caplog.messages if "compiled" in text]
    assert said.startswith("Sines has no blocks, and runs uncompiled")


def test_a_model_whose_blocks_are_compiled_says_that_they_are_kept(caplog: Any) -> None:
    model = Layers(8, 2)
    model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)
    zoo.checkpoint(model, "blocks")
    (said,) = caplog.messages
    assert said.startswith("all blocks of Layers are compiled, and what a compiled block saves is")


def test_a_shallow_copy_says_that_it_runs_without_a_plan_until_there_is_one(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: list[int] = []

    def conductor(known: Any, *hooks: Any, **host: Any) -> Conductor:
        scripts.append(len(known))
        return Conductor(known, *hooks, **host)

    monkeypatch.setattr(planned_forward, "Conductor", conductor)
    model = zoo.checkpoint(Layers(), "cheap")
    twin = copy.copy(model)
    with torch.no_grad():
        twin(torch.rand(4, 64))
    assert caplog.messages == []
    for _ in range(2):
        twin(torch.rand(4, 64)).sum().backward()
    (said,) = caplog.messages
    assert said.startswith("a copy of Layers, by copy.copy or nn.DataParallel, runs block by block")
    model(torch.rand(4, 64)).sum().backward()
    twin(torch.rand(4, 64)).sum().backward()
    assert scripts == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("around", "reason"),
    [
        (save_on_cpu, "hooks for saved tensors, such as save_on_cpu, are around it"),
        (
            lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
            "hooks for saved tensors are disabled around it",
        ),
    ],
)
def test_hooks_around_a_model_say_that_no_plan_is_in_force(
    around: Callable[[], Any], reason: str, caplog: Any
) -> None:
    model = zoo.checkpoint(Layers(8, 2), "cheap")
    for _ in range(2):
        with around():
            model(torch.rand(512, 8)).sum().backward()
    (said,) = caplog.messages
    assert reason in said


def test_a_transform_around_a_model_says_that_no_plan_is_in_force(caplog: Any) -> None:
    model = zoo.checkpoint(Layers(8, 2), "cheap").eval()
    torch.func.grad(lambda x: model(x).sum())(torch.rand(4, 8))
    (said,) = caplog.messages
    assert "a transform of torch.func or forward-mode derivatives are around it" in said


@pytest.mark.parametrize("option", [True, "blocks", "cheap", 2])
def test_an_option_that_saves_nothing_says_so_once(option: Any, caplog: Any) -> None:
    # the gradients of weights make the peak
    model, x = zoo.checkpoint(Layers(8, 2), option), torch.rand(3, 8)
    # larger inputs are planned for anew
    for rows in (1, 2, 2, 3):
        model(x[:rows]).sum().backward()
    (said,) = caplog.messages
    assert said.startswith(f"checkpoint={option!r} saves nothing of Layers: a ")


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_optimizer_in_the_backward_is_named_where_it_is_not(
    in_backward: bool, caplog: Any
) -> None:
    model = zoo.checkpoint(Layers(8, 1), "blocks")
    if in_backward:
        zoo.optimizer_in_backward(model, torch.optim.SGD(model.parameters()))
    model(torch.rand(2, 8)).sum().backward()
    (said,) = caplog.messages
    assert ("zoo.optimizer_in_backward" in said) is not in_backward


@pytest.mark.parametrize("option", [True, "blocks", "cheap", 4])
def test_an_option_that_saves_says_nothing(option: Any, caplog: Any) -> None:
    model = zoo.checkpoint(Layers(), option)
    for _ in range(2):
        model(torch.rand(512, 64)).sum().backward()
    assert caplog.messages == []


class Growing(Layers):
    """Does more with each larger input."""

    def __init__(self) -> None:
        super().__init__(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x) // 64):
            x = super().forward(x)
        return x


def test_a_training_that_has_begun_is_not_ended_by_a_budget(caplog: Any) -> None:
    plain = Growing()
    caplog.set_level(logging.WARNING)

    def given(rows: int) -> Tensor:
        torch.manual_seed(0)
        return torch.rand(rows, 32)

    with pytest.raises(BudgetError) as refused:
        zoo.plan(plain, given(64), memory_budget="1KiB")
    model = zoo.checkpoint(copy.deepcopy(plain), memory_budget=int(1.02 * refused.value.least))
    for rows in (64, 256, 64, 256):
        for one in (model, plain):
            torch.manual_seed(rows)
            one(given(rows)).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    (said,) = [text for text in caplog.messages if "breaks its budget" in text]
    assert "goes by the plan of the least peak" in said
    assert "needs at least" in said


def in_another_thread(profiler: Any) -> Iterator[None]:
    """Lets a profiler run in another thread."""
    started, ended = threading.Event(), threading.Event()

    def profile() -> None:
        with profiler:
            started.set()
            ended.wait()

    thread = threading.Thread(target=profile)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


PROFILERS: dict[str, Callable[[], Any]] = {
    "torch.profiler": lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU]),
    "autograd": torch.autograd.profiler.profile,
    "of another thread": lambda: contextmanager(in_another_thread)(
        torch.autograd.profiler.profile()
    ),
}


@pytest.mark.parametrize("name", PROFILERS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_profiler_at_the_first_step_ends_no_training(
    option: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("zoo.profiling.kernel_costs._measured", {})
    _warn_of_profiler.cache_clear()
    plain = Layers()
    model = zoo.checkpoint(copy.deepcopy(plain), **OPTIONS[option])
    with PROFILERS[name]() as profiler:
        for one in (model, plain):
            torch.manual_seed(0)
            one(torch.rand(512, 64)).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert zoo.plan_of(model) is not None
    said = [text for text in caplog.messages if "from estimates" in text]
    assert len(said) == (option == "budget")
    if profiler is not None:
        # planning did not end it
        assert any("Backward" in event.key for event in profiler.key_averages())


def test_threads_plan_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork would wait for locks of the other, and one profiler would end the other."""
    inside, most = list[int](), list[int]()

    def noted(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            inside.append(0)
            time.sleep(0.01)
            most.append(len(inside))
            result = function(*args, **kwargs)
            inside.pop()
            return result

        return called

    # in one call each, since one of them calls the other
    for name in ("planned_forward.step_trace_of", "planned_forward.partition"):
        path = f"zoo.tracing.{name}"
        monkeypatch.setattr(path, noted(pkgutil.resolve_name(path)))
    ready = threading.Barrier(6)

    def step(number: int) -> None:
        # threads draw from one stream
        model = zoo.checkpoint(Layers(layers=2 + number).eval(), **[*OPTIONS.values()][number % 3])
        ready.wait()
        for rows in (512, 1100):
            model(torch.rand(rows, 64)).square().mean().backward()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(step, range(6)))
    assert len(most) > 6
    assert set(most) == {1}


class Yields(Layers):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x)
            yield x


class Awaits(Layers):
    async def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x)
            await asyncio.sleep(0)
        return x


class YieldsAndAwaits(Layers):
    async def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            yield layer(x)
            await asyncio.sleep(0)


class ReturnsAFunction(Layers):
    def forward(self, x: Tensor) -> Any:
        return lambda: Layers.forward(self, x)


async def last_of(values: Any) -> Tensor:
    return [value async for value in values][-1]


LATER: dict[type[Layers], Callable[[Any], Tensor]] = {
    Yields: lambda values: [*values][-1],
    Awaits: asyncio.run,
    YieldsAndAwaits: lambda values: asyncio.run(last_of(values)),
    ReturnsAFunction: lambda function: function(),
}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("option", [*OPTIONS, "a plan"])
def test_a_forward_that_yields_or_awaits_trains_by_blocks_and_says_so_once(
    option: str, kind: type[Layers], caplog: Any
) -> None:
    plain = kind()
    options = OPTIONS.get(option, {"checkpoint": "(0-1) 2"})
    model = zoo.checkpoint(copy.deepcopy(plain), **options)
    for rows in (64, 64, 32):
        for one in (model, plain):
            torch.manual_seed(rows)
            LATER[kind](one(torch.rand(rows, 64))).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    (said,) = [text for text in caplog.messages if "calls no operator before" in text]
    assert "each of its blocks is recomputed as it runs" in said
    x = torch.rand(512, 64)
    peaks = [
        trace(lambda one=one: LATER[kind](one(x)).square().mean().backward()).peak
        for one in (model, plain)
    ]
    assert peaks[0] < 0.7 * peaks[1]
    with pytest.raises(ArgumentError, match="calls no operator before it returns"):
        zoo.plan(plain, x, memory_budget=0.9)


def jagged(rows: int) -> Tensor:
    parts = torch.rand(rows, 64), torch.rand(2 * rows, 64)
    return torch.nested.nested_tensor([*parts], layout=torch.jagged)


def test_jagged_tensors_train_by_blocks_and_say_so(caplog: Any) -> None:
    plain = Layers(layers=3)
    model = zoo.checkpoint(copy.deepcopy(plain))
    for rows in (8, 8, 5):
        for one in (model, plain):
            torch.manual_seed(rows)
            one(jagged(rows)).values().square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert "jagged layout are no numbers" in caplog.messages[0]
    with pytest.raises(ArgumentError, match="jagged layout are no numbers"):
        zoo.checkpoint(plain, memory_budget=0.9)(jagged(8))


class Copied(nn.Module):
    """Writes rows by an operator without a derivative, which no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        rows = x * 2
        torch._foreach_copy_([rows[:2], rows[2:]], [x[2:], x[:2]])
        return self.third(self.second(x + rows.mean().detach()).tanh())


def test_an_operator_without_a_derivative_is_planned_for(caplog: Any) -> None:
    plain, x = Copied(), torch.rand(4, 6)
    options: list[dict[str, Any]] = [{"checkpoint": 2}, {"checkpoint": True}, {"max_overhead": 1.0}]
    planned = [zoo.checkpoint(copy.deepcopy(plain), **option) for option in options]
    for _ in range(2):
        for model in (plain, *planned):
            model(x).square().mean().backward()
    for model in planned:
        assert zoo.plan_of(model) is not None
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert not [text for text in caplog.messages if "block by block" in text]


class Averaging(nn.Module):
    """Writes one of several views of a tensor, which autograd allows without gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        waves = x.cos()
        with torch.no_grad():
            row = waves.unbind(0)[2]
            row.mul_(0.9).unsqueeze_(0)
            scale = row.exp()
        return self.second(x * scale)


def test_views_that_are_made_and_written_without_gradients_are_planned_for() -> None:
    plain, x = Averaging(), torch.rand(4, 6)
    model = zoo.checkpoint(copy.deepcopy(plain), max_overhead=1.0)
    for one in (plain, model, plain, model):
        one(x).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_a_copy_has_not_begun() -> None:
    model = zoo.checkpoint(Growing(), memory_budget="400KiB")
    model(torch.rand(64, 32))
    with pytest.raises(BudgetError):
        pickle.loads(pickle.dumps(model))(torch.rand(256, 32))


def test_a_backward_that_makes_a_graph_says_what_it_keeps(caplog: Any) -> None:
    saved_tensors.warn_of_graph.cache_clear()
    model, x = Layers(8, 2), torch.rand(4, 8, requires_grad=True)
    zoo.recompute(model, x).sum().backward()
    assert caplog.messages == []
    for _ in range(2):
        (found,) = torch.autograd.grad(zoo.recompute(model, x).sum(), x, create_graph=True)
        found.sum().backward()
    (said,) = caplog.messages
    assert said.startswith("this backward makes a graph (create_graph=True)")


def test_gradients_inside_of_a_segment_are_no_graph_of_the_backward(caplog: Any) -> None:
    saved_tensors.warn_of_graph.cache_clear()

    def descend(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
        return x - found

    zoo.recompute(descend, torch.rand(4, 8, requires_grad=True)).sum().backward()
    assert caplog.messages == []


def test_a_net_in_eval_mode_is_exact() -> None:
    plain = Net().eval()
    model = zoo.checkpoint(copy.deepcopy(plain), "blocks")
    for _ in range(2):
        for one in (model, plain):
            one(images(1) * 0 + 1).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@needs_numpy
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("options", [{"memory_budget": 0.9}, {"max_overhead": 0.5}, {}])
def test_blocks_may_be_added_and_removed_between_steps(
    options: dict[str, Any], is_replaced: bool
) -> None:
    def trained(is_planned: bool) -> Any:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4)]
        model, *added = nn.Sequential(*blocks[:2]), blocks[2], blocks[3]
        if is_planned:
            zoo.checkpoint(model, **options)
        found = []
        for step in range(6):
            if step == 2:
                model.append(added[0])
            if step == 3:
                # the step before was traced with the block that goes
                model.pop(-1)
                model.extend(added[1:] if is_replaced else [])
            model.zero_grad()
            model(torch.ones(64, 8)).square().sum().backward()
            found.append(gradients(model))
        return found

    assert_same(trained(True), trained(False))
