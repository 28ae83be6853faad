"""Planning, proving, taking apart and searching work on any module, and leave it as it was."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.tracing.models import Net, Reader, UNet
from tests.training import images, needs_numpy, real_peak
from zoo.api.checkpoint import outline_of
from zoo.engine.devices import SIZE as STREAM
from zoo.errors import ArgumentError
from zoo.invocation import Invocation
from zoo.planner.plan import Plan
from zoo.policy.budget import StepPlanner
from zoo.policy.training_step import CountedStep, TrainingStep
from zoo.profiling.tensor_spec import tensors_in
from zoo.tracing.isolated_trace import TraceError
from zoo.tracing.planned_forward import patched_forward

pytestmark = pytest.mark.usefixtures("without_fork")


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None


class Said(nn.Module):
    """Names its loss, as the models of transformers do."""

    def __init__(self, kind: Callable[..., Any] = dict) -> None:
        super().__init__()
        self.kind, self.net = kind, Net()

    def forward(self, pixels: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.net(pixels)
        return self.kind(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def named(place: str | None = None) -> dict[str, Tensor]:
    return {"pixels": images(8, 4, 32).to(place), "labels": torch.arange(8).to(place) % 5}


def attributes(model: nn.Module) -> dict[nn.Module, Any]:
    return {module: dict(vars(module)) for module in model.modules()}


def test_a_plan_for_keyword_arguments_keeps_to_its_budget_and_leaves_the_model() -> None:
    model, inputs = Said(), named("meta")
    before, stream = attributes(model), torch.get_rng_state()
    found = zoo.plan(model, inputs, memory_budget=0.6, optimizer=torch.optim.SGD)
    assert attributes(model) == before
    assert torch.equal(torch.get_rng_state(), stream)
    measured = real_peak(model, named(), torch.optim.SGD, plan=found.plan)
    assert measured <= found.predicted_peak <= found.budget < 0.61 * found.baseline_peak


@functools.cache
def said() -> StepPlanner:
    given = Invocation.of(named("meta"))
    with torch.enable_grad():
        steps = outline_of(Said(), given, is_judged=True)
        training = TrainingStep(torch.optim.SGD)
        return StepPlanner(CountedStep(Said(), steps, given.tensors, training).measured())


@pytest.mark.parametrize(
    "text",
    [
        "(0-4) 5-19",
        "0-6 (7-8) 9-19",
        "(0-19)",
        "((0-4) 5-6) 7-19",
        "0-6 ((7-8) 9-12) 13-19",
        "((0-4) 5-6 ((7-8) 9-12)) 13-19",
    ],
)
def test_segments_between_kernels_take_what_is_predicted(text: str) -> None:
    predicted = said().point(Plan.parse(text)).peak
    measured = real_peak(Said(), named(), torch.optim.SGD, plan=Plan.parse(text))
    # four layers of dropout, and the stream that a replay puts back
    assert 0 <= predicted - measured <= 6 * STREAM


def test_a_loss_outside_gets_what_the_model_returns() -> None:
    inputs = {"x": images(2, 4, 16), "weight": torch.ones(1)}
    model = UNet()

    def loss(outputs: dict[str, Tensor]) -> Tensor:
        assert outputs["aux"] is None
        return outputs["logits"].exp().square().sum()

    with_loss = zoo.frontier(model, inputs, loss=loss, optimizer=None, holds_outputs=True)
    assert with_loss.baseline.peak > zoo.frontier(model, inputs, optimizer=None).baseline.peak


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


class Returns(nn.Module):
    """Returns two tensors in a form of its own."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form, self.fc = form, nn.Linear(4, 256)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return self.form(y, y.exp())


FORMS: dict[str, Callable[[], nn.Module]] = {
    "tuple": lambda: Returns(lambda a, b: (a, b)),
    "nested": lambda: Returns(lambda a, b: [a, (b,)]),
    "named tuple": lambda: Returns(Pair),
    "dict": lambda: Returns(lambda a, b: {"a": a, "b": b}),
    "dataclass": lambda: Returns(Output),
}
TAKE_A_LOSS: dict[str, Callable[..., Any]] = {
    "plan": functools.partial(zoo.plan, max_overhead=1.0),
    "frontier": zoo.frontier,
    "plan_rank": functools.partial(zoo.plan_rank, max_overhead=1.0, world_size=2, strategy="ddp"),
    "max_batch_size": functools.partial(zoo.max_batch_size, memory_budget="60KiB", verify=True),
    "anatomy": functools.partial(zoo.anatomy, checkpoint="sqrt"),
    "anatomy on paper": functools.partial(zoo.anatomy, device="meta"),
    "verify": functools.partial(zoo.verify, steps=1),
}


def form_of(outputs: Any) -> Any:
    """Says of what kind outputs are and what is in them, fake tensors being tensors, too."""
    if isinstance(outputs, tuple | list):
        return type(outputs), *map(form_of, outputs)
    if isinstance(outputs, dict):
        return type(outputs), *outputs
    return Tensor if isinstance(outputs, Tensor) else type(outputs)


@pytest.mark.parametrize("name", TAKE_A_LOSS)
def test_a_loss_is_called_with_what_the_model_returns_and_no_more(name: str) -> None:
    inputs = (torch.ones(2, 4),)
    for build in FORMS.values():
        model = build()
        expected = form_of(model(*inputs))

        def loss(*outputs: Any, expected: Any = expected) -> Tensor:
            # planning puts back what a list got meanwhile, so it is looked at here
            assert (*map(form_of, outputs),) == (expected,)
            return sum(tensor.mean() for tensor in tensors_in(outputs))

        TAKE_A_LOSS[name](model, inputs, loss=loss)


@pytest.mark.parametrize("kind", [dict, Output])
@pytest.mark.parametrize("checkpoint", [True, "blocks"])
def test_a_model_is_verified_whatever_it_returns(kind: Any, checkpoint: Any) -> None:
    report = zoo.verify(Said(kind), named(), checkpoint, steps=2)
    assert report.exact
    assert report.compared["output"] == 2
    assert report.plan.depth() == 1


def test_what_reads_numbers_is_verified_too() -> None:
    report = zoo.verify(Reader(), images(), steps=2)
    assert report.exact
    assert max(report.plan.runs()) == 2
    assert "of 19 steps recomputed" in str(report)


def test_an_anatomy_on_paper_is_that_of_a_plan() -> None:
    model = Said()
    before = attributes(model)
    found = zoo.anatomy(model, named("meta"), checkpoint="sqrt", optimizer=torch.optim.SGD)
    real = zoo.anatomy(model, named(), checkpoint="sqrt", optimizer=torch.optim.SGD)
    assert attributes(model) == before
    assert found.plan == real.plan
    assert found.planned.peak < found.baseline.peak
    assert found.planned.blocks().keys() >= {"net.blocks.1", "net.blocks.2"}
    # the fake step lacks only what kernels allocate inside
    assert 0.8 * real.planned.tensor_peak < found.planned.peak <= real.planned.tensor_peak + 64


@pytest.mark.parametrize("build", [Net, Reader])
def test_an_anatomy_takes_the_option_in_force(build: type[nn.Module]) -> None:
    model = zoo.checkpoint(build(), 2)
    found = zoo.anatomy(model, images(8, 4, 32))
    assert found.planned.peak < found.baseline.peak
    assert found.plan == zoo.plan_of(zoo.checkpoint(model, 2, inputs=images(8, 4, 32)))


def test_the_largest_batch_is_found_by_named_inputs_and_a_named_loss() -> None:
    sample = {"pixels": torch.empty(1, 4, 32, 32), "labels": torch.zeros(1).long()}
    found = zoo.largest(
        Said(), sample, memory_budget="1MiB", optimizer=torch.optim.SGD, checkpoint="auto"
    )
    assert found.measured_peak <= found.predicted_peak <= found.budget < found.next_peak


def test_a_model_on_the_meta_device_is_planned_for() -> None:
    model, x = Net().to("meta"), torch.empty(8, 4, 32, 32, device="meta")
    on_paper = zoo.plan(model, x, max_overhead=0.3, device="small-cpu")
    assert on_paper.plan == zoo.plan(Net(), x, max_overhead=0.3, device="small-cpu").plan


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: zoo.plan(Reader().to("meta"), images().to("meta"), max_overhead=1),
            "the forward of Reader reads numbers .*zoo.checkpoint without a budget traces",
        ),
        # of sizes at which nothing runs for real
        (
            lambda: zoo.largest(Reader(), images(), memory_budget="4GiB"),
            "the forward of Reader reads numbers",
        ),
        (lambda: zoo.plan(Net(), 3, max_overhead=1), "a dict of keyword arguments; got int"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (images(2, 3, 16), r"Net does not take these inputs: RuntimeError: .*channels"),
        ({"pixel": images()}, "Net does not take these inputs: TypeError: .*'pixel'"),
        ({}, "Net does not take these inputs: TypeError: .*missing 1 required positional"),
    ],
)
def test_wrong_inputs_are_not_blamed_on_the_model(inputs: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        zoo.plan(Net(), inputs, memory_budget=0.9)
    assert "checkpoint=" not in str(error.value)
    given = inputs if isinstance(inputs, dict) else {"x": inputs}
    for options in ({"memory_budget": 0.9}, {"checkpoint": "sqrt"}):
        # what the model raises by itself
        with pytest.raises((RuntimeError, TypeError), match=message.rpartition(": ")[2]):
            zoo.checkpoint(Net(), **options)(**given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_a_buffer_that_has_no_strides_does_not_end_the_first_step(kind: str) -> None:
    rows = [torch.ones(2), torch.ones(3)]
    buffers = {"sparse": torch.eye(2).to_sparse(), "nested": torch.nested.nested_tensor(rows)}

    def trained(checkpoint: bool) -> Tensor:
        torch.manual_seed(1)
        model = Net()
        model.register_buffer("rows", buffers[kind])
        outputs: Tensor = zoo.checkpoint(model, checkpoint)(images())
        return outputs

    assert torch.equal(trained(True), trained(False))


class Drops(Net):
    """Computes with what real numbers only tell: how many are above 0."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.nonzero().shape[0]


class Recovers(Net):
    """Gets over an error of its own before it reads a number."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            raise KeyError("cache")
        except KeyError:
            return super().forward(x) * x.sum().item()


class Guesses(Net):
    """Goes another way where a number cannot be read, as on fake tensors."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x) * x.sum().item()
        except Exception:
            return super().forward(x)


@pytest.mark.parametrize("build", [Reader, Drops, Recovers, Guesses])
def test_a_model_that_reads_numbers_is_planned_for_and_keeps_to_its_budget(
    build: type[nn.Module],
) -> None:
    model, x = build(), images(8, 4, 32)
    found = zoo.plan(model, x, memory_budget=0.6, optimizer=torch.optim.SGD)
    assert len(found.names) >= len(zoo.chain_of(Net(), x).names) or build is Guesses
    measured = real_peak(model, x, torch.optim.SGD, plan=found.plan)
    assert measured <= found.predicted_peak <= found.budget


@pytest.mark.parametrize(
    ("inputs", "may_take_others"), [((images(2, 3, 16),), True), ((), True), ((images(),), False)]
)
def test_what_a_forward_raised_is_known_apart_from_the_reason(
    inputs: Any, may_take_others: bool
) -> None:
    model = Net() if may_take_others else Reader().to("meta")
    given = Invocation(tuple(x if may_take_others else x.to("meta") for x in inputs), {})
    with pytest.raises(TraceError) as refused:
        outline_of(model, given)
    assert refused.value.raised is may_take_others


def test_the_plan_of_any_model_can_be_seen() -> None:
    model = zoo.checkpoint(Net(), "sqrt")
    assert zoo.plan_of(model) is None, "not before the first training forward"
    names = set(dir(model))
    model(images(8, 4, 32)).sum().backward()
    found = zoo.plan_of(model)
    assert isinstance(found, zoo.Plan)
    assert len(found.flatten()) == len(zoo.chain_of(model, images(8, 4, 32)).names)
    assert set(dir(model)) == names
    assert zoo.plan_of(zoo.uncheckpoint(model)) is None
    with pytest.raises(ArgumentError, match=r"plan_of needs a torch\.nn\.Module; got list"):
        zoo.plan_of([])  # type: ignore[arg-type]


class Forces(Net):
    """Goes on from its own gradient, as potentials between atoms do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.blocks(x).square().sum(), x)
        return super().forward(x.detach() + force)


def test_what_a_backward_in_the_forward_replays_moves_no_cut() -> None:
    x = images(4, 4, 8)
    ahead, real = zoo.checkpoint(Forces(), "sqrt", inputs=x), zoo.checkpoint(Forces(), "sqrt")
    real(x)
    scripts = [patch.latest for patch in map(patched_forward, (ahead, real)) if patch]
    # those behind the backward, in which a replayed tensor is one from outside
    found = [(len(script.operators), script.boundaries[-9:]) for script in scripts if script]
    assert found[0] == found[1]


class Packed(nn.Module):
    """Runs an LSTM over sentences of unequal lengths, without their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], True)
        return self.head(outputs)


def test_packed_sequences_are_planned_for() -> None:
    inputs = torch.randn(4, 6, 16), torch.tensor([6, 2, 4, 2])
    ahead, real = zoo.checkpoint(Packed(), "sqrt", inputs=inputs), zoo.checkpoint(Packed(), "sqrt")
    real(*inputs)
    assert zoo.plan_of(real) == zoo.plan_of(ahead) is not None
    assert zoo.verify(Packed(), inputs, "sqrt", steps=2).exact


class Frozen(Packed):
    """Runs the LSTM without gradients, where its kernel on the CPU makes no workspace."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            outputs, _ = self.lstm(x)
        return self.head(outputs)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_lstm_without_gradients_is_planned_for(ahead: bool) -> None:
    x = torch.randn(4, 6, 16)
    model = zoo.checkpoint(Frozen(), inputs=x if ahead else None)
    model(x)
    assert zoo.plan_of(model) is not None


class WritesAView(nn.Module):
    """Ends blocks with an in-place function of a view, as instance norms return one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x + torch.relu_(self.norm(self.layer(x)))).relu()
        return x


@needs_numpy
def test_the_backward_of_a_view_that_was_written_is_counted() -> None:
    x = torch.rand(4, 8, 32, 32)
    found = zoo.plan(WritesAView(), x, optimizer=torch.optim.SGD, max_overhead=0.5)
    measured = real_peak(WritesAView(), x, torch.optim.SGD)
    assert 0 <= found.baseline_peak - measured <= 6 * STREAM


class WritesAPart(nn.Module):
    """Writes the imaginary parts of complex numbers, a view of another data type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(self.layer(x).view(-1, 3, 2).clone())
        numbers.imag.mul_(0.5)
        return torch.cat([numbers.real, numbers.imag], 1).exp()


def test_views_of_complex_numbers_that_were_written_are_planned_for() -> None:
    model = zoo.checkpoint(WritesAPart(), True, inputs=torch.rand(4, 6))
    assert zoo.plan_of(model) is not None
