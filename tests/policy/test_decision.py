"""Every family, by every option, trains bit for bit as its baseline does."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.traces import Traces, tracing_once
from tests.tracing.models import Net
from tests.training import (
    Record,
    Residuals,
    assert_same,
    everything,
    images,
    needs_numpy,
    train,
)
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.errors import ArgumentError, PlanError
from zoo.models.densenet import DenseNet
from zoo.models.preactivation_resnet import PreactivationResNet
from zoo.models.resnet import ResNet, basic, bottleneck
from zoo.policy import decision
from zoo.policy.goal import goal_for
from zoo.profiling.kernel_costs import is_of_kind
from zoo.profiling.peak_memory import trace

pytestmark = pytest.mark.usefixtures("without_fork")

OPTIONS = [True, 2, "sqrt", "blocks", "cheap"]


def pictures(size: int = 32) -> list[Tensor]:
    return [images(3, 3, size).div_(20).requires_grad_()]


def volumes() -> list[Tensor]:
    return [torch.rand(2, 1, 16, 16, 16)]


def tokens(*shape: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randint(0, 50, shape), torch.randint(0, 50, shape)]


class Carried:
    """Calls a recurrent model with the state that it returned before."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.state: Any = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss, state = self.model(inputs, self.state, targets)
        self.state = self.model.detach(state)
        return loss


PLAN = ((0, 1), (2, 3, (4, 5)), *range(6, 11))


def small(build: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Makes a factory like those of the catalog of a size that the catalog lacks."""
    return lambda checkpoint=False: put_in_force(build(*args, **options), checkpoint)


FAMILIES: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]], Any]] = {
    "resnet": (
        small(ResNet, basic, (2, 1), 5, drop_rate=0.2, drop_path_rate=0.2),
        pictures,
        None,
    ),
    "bottleneck": (small(ResNet, bottleneck, (2, 2), 5), pictures, None),
    "preactivation": (
        small(PreactivationResNet, basic, 2, 5),
        functools.partial(pictures, 8),
        None,
    ),
    "densenet": (small(DenseNet, 8, (3, 2), 5, drop_rate=0.2), pictures, None),
    "vnet": (functools.partial(zoo.vnet, width=2, drop_rate=0.3), volumes, None),
    "vit": (
        functools.partial(
            zoo.vit_tiny_patch16,
            image_size=32,
            depth=3,
            classes=5,
            drop_rate=0.1,
            drop_path_rate=0.2,
        ),
        pictures,
        None,
    ),
    "gpt2": (
        functools.partial(
            zoo.gpt2_small, depth=2, width=32, heads=2, vocabulary=50, chunk_tokens=7
        ),
        tokens(2, 12),
        None,
    ),
    "lstm": (
        functools.partial(
            zoo.lstm, vocabulary=50, embedding=8, hidden=8, chunk_steps=5, chunk_tokens=7
        ),
        tokens(13, 2),
        Carried,
    ),
    "gru": (
        functools.partial(zoo.gru, vocabulary=50, embedding=8, hidden=8, tied=True, chunk_steps=4),
        tokens(9, 2),
        Carried,
    ),
}


def run(family: str, checkpoint: Any, steps: int = 3) -> Record:
    build, inputs, wrap = FAMILIES[family]
    torch.manual_seed(1)
    model = build(checkpoint=checkpoint)
    return train(model, inputs, steps, forward=wrap(model) if wrap else None)


@functools.cache
def baseline(family: str) -> Record:
    return run(family, False)


@pytest.fixture
def traces_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces a family once for all options: a trace is data, and knows no weights."""
    trace_of = tracing_once(TRACES, lambda _: family)
    monkeypatch.setattr("zoo.tracing.planned_forward.step_trace_of", trace_of)


TRACES: Traces = {}


@pytest.mark.usefixtures("traces_once")
@pytest.mark.parametrize("checkpoint", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_bitwise_that_of_the_baseline(family: str, checkpoint: Any) -> None:
    assert_same(run(family, checkpoint), baseline(family))


@pytest.mark.parametrize("checkpoint", OPTIONS)
def test_the_plan_is_none_until_the_first_training_forward(checkpoint: Any) -> None:
    model = put_in_force(Residuals(), checkpoint)
    assert zoo.plan_of(model) is None
    with torch.no_grad():
        model(images())
    assert zoo.plan_of(model) is None
    model.train()(images())
    assert isinstance(zoo.plan_of(model), zoo.Plan)
    assert len(zoo.plan_of(model).flatten()) == 11


def test_a_plan_is_made_once_for_each_kind_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        decision,
        "least_memory",
        lambda costs, real=decision.least_memory: (made.append(1), real(costs))[1],
    )
    model = put_in_force(Residuals(), True)
    for size in (6, 6, 9, 6, 9):
        model(images(size=size)).sum().backward()
    assert len(made) == 2
    model(images().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        model(images())
        model(images())
    assert len(made) == 4


def test_true_runs_no_step_more_than_twice_and_holds_less() -> None:
    model = put_in_force(Residuals(blocks=8), True)
    model(images(8, 4, 32))
    assert zoo.plan_of(model) is not None
    assert max(zoo.plan_of(model).runs()) == 2


@pytest.mark.parametrize("checkpoint", OPTIONS)
def test_bfloat16_autocast_is_exact(checkpoint: Any) -> None:
    def record(option: Any) -> Record:
        torch.manual_seed(1)
        model = put_in_force(Residuals(), option)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images()).square().mean()
        loss.backward()
        return everything(model) | {"loss": loss.detach()}

    assert_same(record(checkpoint), record(False))


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("sqr", "'sqr' is no scheme.*Did you mean sqrt"),
        (0, "checkpoint=0: choose 1 segment or more"),
        (0.5, "checkpoint=0.5 is no scheme; choose True, False, .auto., a number of segments"),
        (None, "checkpoint=None is no scheme; choose True"),
    ],
)
def test_an_option_that_is_none_is_refused(checkpoint: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        goal_for(checkpoint)


@pytest.mark.parametrize(
    ("checkpoint", "error", "message"),
    [
        ((0, 1), PlanError, "covers 2 steps but the model has 11; make it end with step 10"),
        (9, ArgumentError, "asks for 9 segments; this model has 4 blocks"),
    ],
)
def test_a_plan_that_does_not_fit_leaves_the_model_unchanged(
    checkpoint: Any, error: type[Exception], message: str
) -> None:
    model, x = put_in_force(Residuals(), checkpoint), images()
    before = everything(model)
    with pytest.raises(error, match=message):
        model(x)
    assert_same(everything(model), before)


def test_of_a_plan_inside_of_another_the_outer_one_is_in_force() -> None:
    class Outer(nn.Module):
        def __init__(self, checkpoint: Any) -> None:
            super().__init__()
            self.inner = put_in_force(Residuals(), checkpoint)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(torch.relu(x)))

    def record(inner: Any, outer: Any) -> Record:
        torch.manual_seed(1)
        model = Outer(inner)
        if outer:
            put_in_force(model, outer)
        result = train(model, lambda: [images()], steps=2)
        assert (zoo.plan_of(model.inner) is not None) == (bool(inner) and not outer)
        return result

    expected = record(False, False)
    assert_same(record(True, False), expected)
    assert_same(record(2, ((0, (1, 2)), *range(3, 13))), expected)


compiled: Any = functools.partial(torch.compile, backend="aot_eager")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.parametrize("checkpoint", [2, True, PLAN])
def test_a_compiled_model_is_exact(checkpoint: Any) -> None:
    def results(option: Any) -> list[Record]:
        torch.manual_seed(1)
        model = put_in_force(Residuals(rate=0.4), option)
        if torch.torch_version.TorchVersion(torch.__version__) < "2.13":
            # before, the compiler breaks the graph in a norm that averages over all steps
            for norm in (block.norm for block in model.blocks):
                norm.momentum = 0.1  # type: ignore[assignment]
        forward = compiled(model)
        found = []
        for _ in range(2):
            model.zero_grad()
            forward(images()).square().sum().backward()
            found.append(everything(model))
        return found

    for actual, expected in zip(results(checkpoint), results(False), strict=True):
        assert_same(actual, expected)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_saves_what_it_would_uncompiled() -> None:
    def peak(option: Any) -> int:
        model = put_in_force(nn.Sequential(Sines(), Sines()), option)
        forward = compiled(model)
        x = torch.rand(1 << 16, requires_grad=True)
        forward(x).sum().backward()
        return trace(lambda: forward(x).sum().backward()).peak

    assert peak("blocks") < 0.7 * peak(False)


class Sines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin()
        return x


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_model_with_a_plan_compiles_whole() -> None:
    forward = compiled(put_in_force(nn.Sequential(Sines(), Sines()), 2), fullgraph=True)
    x = torch.rand(3, requires_grad=True)
    forward(x).sum().backward()
    gradient, x.grad = x.grad, None
    nn.Sequential(Sines(), Sines())(x).sum().backward()
    assert torch.equal(gradient, x.grad)


@needs_numpy
@pytest.mark.parametrize(
    ("made_for", "warnings"),
    [("a100", 1), ("NVIDIA H100 80GB HBM3", 1), ("cpu", 0), ("", 0)],
)
def test_a_plan_of_another_device_warns_once(
    made_for: str, warnings: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    decision._warn_of_device.cache_clear()
    file = tmp_path / "plan.json"
    replace(zoo.plan(Net(), images(8), max_overhead=9.0), device=made_for).save(file)
    model = zoo.checkpoint(Net(), str(file))
    for _ in range(2):
        model(images(8)).sum().backward()
    text = f"made for {made_for}, and the model is on cpu"
    told = [record.message for record in caplog.records if text in record.message]
    assert len(told) == len(caplog.records) == warnings
    assert all("Make the plan here: zoo.plan(" in message for message in told)


@needs_numpy
def test_a_plan_of_another_device_is_verified_and_looked_at_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decision._warn_of_device.cache_clear()
    report = zoo.plan(Residuals(), images(8), max_overhead=9.0, device="a100")
    assert report.device == "a100"
    assert zoo.verify(Residuals(), images(8), report, steps=1).exact
    zoo.anatomy(Residuals(), images(8), checkpoint=report)
    assert not caplog.records


@pytest.mark.parametrize(
    ("made_for", "here", "is_like"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("rtx-4090", "NVIDIA GeForce RTX 4090", True),
        ("l4", "NVIDIA L4", True),
        ("l4", "NVIDIA L40S", False),
        ("h100", "NVIDIA H200", False),
        ("cpu", "NVIDIA H200", False),
        ("NVIDIA H200", "NVIDIA H200", True),
    ],
)
def test_a_device_of_the_table_is_known_by_its_makers_name(
    made_for: str, here: str, is_like: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.engine.devices.name_of", lambda kind: here)
    assert is_of_kind(made_for, "cuda") is is_like


@pytest.mark.parametrize("text", ["true", "2", "sqrt", "(0-3) 4-10"])
def test_an_option_may_be_the_text_of_a_command_line(text: str) -> None:
    options = {"true": True, "2": 2, "(0-3) 4-10": zoo.Plan([(0, 1, 2, 3), *range(4, 11)])}
    written, given = (zoo.checkpoint(Residuals(), way) for way in (text, options.get(text, text)))
    for model in (written, given):
        model(images(8)).sum().backward()
    assert zoo.plan_of(written) == zoo.plan_of(given) is not None


class Alternating(nn.Module):
    """Takes another path at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x).tanh() if self.calls % 2 else layer(x).sin().exp()
        return x


@needs_numpy
def test_a_budget_that_no_dry_step_judged_says_so(caplog: pytest.LogCaptureFixture) -> None:
    decision._warn_of_costs.cache_clear()
    model = put_in_force(Alternating(), memory_budget="1GiB", optimizer="sgd")
    model(torch.rand(64, 32)).sum().backward()
    assert "is chosen by the costs of its steps" in caplog.text
    assert "calls other operators in its second step" in caplog.text
