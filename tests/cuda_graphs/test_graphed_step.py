"""Graphed steps are the eager ones bit for bit, whatever changes around them."""

import copy
import functools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import zoo
from tests.cuda_graphs.software_graphs import SoftwareGraphs
from zoo.cuda_graphs import capture, graphed_step
from zoo.cuda_graphs.guards import Guards

pytestmark = pytest.mark.usefixtures("without_fork")


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has graphs."""
    made = SoftwareGraphs()
    monkeypatch.setattr(graphed_step, "graphs_on", lambda device: made)


class Block(nn.Module):
    """A block with statistics, dropout and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(8))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) -> (N, 8)."""
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        return x + self.gain * self.scale * self.second(hidden)


class Program:
    """A model, its optimizer and its step; `graphed` or eager."""

    def __init__(self, graphed: bool, checkpoint: Any = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
        zoo.checkpoint(self.model, checkpoint)
        options = {"lr": 0.1, "momentum": 0.9} | options
        self.optimizer = torch.optim.SGD(self.model.parameters(), **options)
        self.weight = 1.0
        model, optimizer, program = self.model, self.optimizer, self

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = program.weight * nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.train_by(step, graphed)

    def train_by(self, step: Any, graphed: bool, model: nn.Module | None = None) -> "Program":
        """Makes a function the step, of the model or of one around it."""
        options: Any = {"model": model or self.model, "optimizer": self.optimizer}
        self.step: Any = zoo.make_graphed_step(step, **options) if graphed else step
        return self

    def state(self) -> list[Any]:
        """Returns all that a training leaves."""
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [
            torch.get_rng_state(),
            *(one if one is None else one.clone() for one in (*tensors, *grads)),
        ]


def assert_same(state: list[Any], other: list[Any]) -> None:
    """Holds two trainings to the same bits."""
    assert len(state) == len(other)
    for one, two in zip(state, other, strict=True):
        assert (one is None) is (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=0, atol=0)


def batch(number: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Returns the batch of a number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)


def trained(program: Program, loop: Callable[[Program], Iterator[Tensor]]) -> list[Any]:
    """Returns what a loop leaves, with its losses."""
    torch.manual_seed(1)
    losses = [*loop(program)]
    return [*losses, *program.state()]


def assert_twins(
    loop: Callable[[Program], Iterator[Tensor]], make: Callable[[bool], Program] = Program
) -> Any:
    """Holds the graphed program to its eager twin; returns the graphed step."""
    graphed, eager = make(True), make(False)
    assert_same(trained(graphed, loop), trained(eager, loop))
    return graphed.step


@pytest.mark.parametrize("checkpoint", [False, "blocks", True])
def test_a_program_with_a_scheduler_dropout_and_last_batches_is_its_eager_twin(
    checkpoint: Any,
) -> None:
    def loop(program: Program) -> Iterator[Tensor]:
        scheduler = torch.optim.lr_scheduler.StepLR(program.optimizer, 2, 0.5)
        for epoch in range(4):
            for number in range(17):
                yield program.step(*batch(17 * epoch + number, 6 if number < 16 else 3))
            scheduler.step()

    step = assert_twins(loop, functools.partial(Program, checkpoint=checkpoint))
    # three warm-ups, last batches, and two calls for the other learning rate
    assert (step.eager, step.captures, step.replays + step.audits) == (3 + 4 + 2, 2, 59)
    assert step.audits == 12


def test_micro_batches_with_a_flag_accumulate_as_eagerly() -> None:
    def make(graphed: bool) -> Program:
        program = Program(graphed=False)
        model, optimizer = program.model, program.optimizer

        def step(x: Tensor, y: Tensor, is_last: bool) -> Tensor:
            loss = nn.functional.mse_loss(model(x), y) / 3
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return program.train_by(step, graphed)

    def loop(program: Program) -> Iterator[Tensor]:
        for number in range(36):
            yield program.step(*batch(number), number % 3 == 2)

    step = assert_twins(loop, make)
    # the first, those between and the last of three each have a graph
    assert step.captures == 3
    assert step.replays > 15


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_zeroed_first_are_there_after_each_call(to_none: bool) -> None:
    def make(graphed: bool) -> Program:
        program = Program(graphed=False)
        model, optimizer = program.model, program.optimizer

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            optimizer.step()
            return loss

        return program.train_by(step, graphed)

    def loop(program: Program) -> Iterator[Tensor]:
        for number in range(10):
            yield program.step(*batch(number))
            for parameter in program.model.parameters():
                assert parameter.grad is not None
                yield parameter.grad.clone()

    step = assert_twins(loop, make)
    assert (step.replays, step.audits) == (5, 2)


def test_an_optimizer_in_the_backward_may_leave_its_marks_to_the_next_call() -> None:
    def make(graphed: bool) -> Program:
        program = Program(graphed=False)
        model, optimizer = program.model, program.optimizer
        zoo.optimizer_in_backward(model, optimizer)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return program.train_by(step, graphed)

    def loop(program: Program) -> Iterator[Tensor]:
        for number in range(8):
            yield program.step(*batch(number))
        program.optimizer.zero_grad()

    assert assert_twins(loop, make).replays == 5


def of_blocks(change: Callable[[Block], object]) -> Callable[[Program], object]:
    """Changes the first block of a program's model."""
    return lambda program: change(program.model[0])


def replace_memory(program: Program) -> None:
    """Gives a parameter other memory, as a conversion does."""
    weight = program.model[2].weight
    weight.data = weight.data.clone()


def reload(program: Program) -> None:
    """Saves and loads the optimizer, whose state is then in other memory."""
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))


def leave_gradients(program: Program) -> None:
    """Runs a backward outside of the step, to whose gradients the step adds."""
    program.model(batch(99)[0]).sum().backward()


def hook(program: Program) -> None:
    """Hooks a module."""
    program.model[1].register_forward_hook(lambda module, args, output: output * 2)


def unfreeze(program: Program) -> None:
    """Trains all but one parameter."""
    program.model[2].bias.requires_grad_(False)


def plan(program: Program) -> None:
    """Puts another plan in force."""
    zoo.checkpoint(program.model, 2)


CHANGES = {
    "learning rate": lambda program: program.optimizer.param_groups[0].update(lr=0.01),
    "momentum": lambda program: program.optimizer.param_groups[0].update(momentum=0.5),
    "eval": lambda program: program.model.eval(),
    "eval of a module": of_blocks(lambda block: block.norm.eval()),
    "rate of a dropout": of_blocks(lambda block: setattr(block.dropout, "p", 0.1)),
    "attribute": of_blocks(lambda block: setattr(block, "gain", 0.5)),
    "buffer replaced": of_blocks(lambda block: setattr(block, "scale", 2 * torch.ones(8))),
    "module replaced": of_blocks(lambda block: setattr(block, "norm", nn.Identity())),
    "frozen": unfreeze,
    "memory": replace_memory,
    "optimizer loaded": reload,
    "gradients left": leave_gradients,
    "hook": hook,
    "plan": plan,
    "variable of the step": lambda program: setattr(program, "weight", 0.5),
    "group added": lambda program: program.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "setting": lambda program: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_can_be_named_is_noticed_at_once(name: str) -> None:
    replays = []

    def loop(program: Program) -> Iterator[Tensor]:
        for number in range(14):
            if number == 6:
                CHANGES[name](program)
                replays.append(getattr(program.step, "replays", 3))
            yield program.step(*batch(number))
            if number == 6:
                replays.append(getattr(program.step, "replays", 3))

    count = torch.get_num_threads()
    graphed, eager = Program(graphed=True), Program(graphed=False)
    found = trained(graphed, loop)
    torch.set_num_threads(count)
    assert_same(found, trained(eager, loop))
    # the call after the change was none, and later ones are again
    assert replays == [3, 3, 3, 3]
    assert graphed.step.replays > 3


def test_a_stale_learning_rate_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # a mutant: what the optimizer's groups say is not compared
    change = Guards.change

    def without_rates(self: Guards, by_step: bool = False) -> Any:
        found = change(self, by_step)
        return None if found is not None and "].lr (" in found else found

    monkeypatch.setattr(Guards, "change", without_rates)
    # an audit notices it, and says so
    with pytest.raises(zoo.GraphError, match=r"aten\.add_\.Tensor is given -0\.1, and -0\.01 now"):
        test_a_change_that_can_be_named_is_noticed_at_once("learning rate")


def test_a_rate_in_a_tensor_is_filled_by_a_scheduler_in_each_step() -> None:
    def make(graphed: bool) -> Program:
        return Program(graphed, lr=torch.tensor(0.1), fused=True)

    def loop(program: Program) -> Iterator[Tensor]:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(program.optimizer, 10)
        for number in range(12):
            yield program.step(*batch(number))
            scheduler.step()

    step = assert_twins(loop, make)
    assert (step.eager, step.captures, step.replays, step.audits) == (3, 1, 7, 2)


def test_a_scaler_that_decides_on_the_device_is_captured() -> None:
    def make(graphed: bool) -> Program:
        program = Program(graphed=False, fused=True)
        model, optimizer = program.model, program.optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return torch.stack([loss, scaler._scale])

        return program.train_by(step, graphed)

    def loop(program: Program) -> Iterator[Tensor]:
        for number in range(14):
            x, y = batch(number)
            # some gradients are infinite, and the step is left out
            yield program.step(x * (1e30 if number in (6, 11) else 1.0), y)

    assert assert_twins(loop, make).replays > 7


def test_a_rate_that_changes_in_each_step_runs_eagerly_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(program: Program) -> Iterator[Tensor]:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(program.optimizer, 10)
        for number in range(40):
            yield program.step(*batch(number))
            if number < 14:
                scheduler.step()

    with caplog.at_level("WARNING", logger="zoo"):
        step = assert_twins(loop)
    (record,) = caplog.records
    assert "optimizer.param_groups[0].lr (0." in record.getMessage()
    assert "changes from call to call" in record.getMessage()
    # once it is constant
    assert step.replays > 0


def test_a_plan_that_is_made_anew_is_no_rate_that_changes_in_each_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program(graphed=True, checkpoint="blocks")
    for number in range(16):
        if number == 8:
            hook(program)
        program.step(*batch(number))
    assert program.step.captures == 2
    assert not [text for text in caplog.messages if "runs eagerly" in text]


def test_a_training_is_resumed_from_a_checkpoint() -> None:
    def loop(program: Program) -> Iterator[Tensor]:
        for number in range(6):
            yield program.step(*batch(number))
        saved = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))
        for number in range(3):
            yield program.step(*batch(number))
        program.model.load_state_dict(saved[0])
        program.optimizer.load_state_dict(saved[1])
        torch.manual_seed(7)
        for number in range(6):
            yield program.step(*batch(number))

    assert assert_twins(loop).captures == 2


def test_a_copy_of_a_graphed_step_has_graphs_of_its_own() -> None:
    program = Program(True)
    for number in range(6):
        program.step(*batch(number))
    one, other = copy.copy(program.step), copy.deepcopy(program.step)
    counts = program.step.captures, program.step.replays
    for number in range(6, 12):
        one(*batch(number))
        other(*batch(number))
    assert (one.captures, one.replays) == (2, 6)
    assert (other.captures, other.replays) == (2, 6)
    assert (program.step.captures, program.step.replays) == counts
    program.step(*batch(12))
    assert program.step.replays == counts[1] + 1


def test_what_is_returned_does_not_change() -> None:
    program = Program(graphed=True)
    losses = [program.step(*batch(number)) for number in range(8)]
    kept = [loss.clone() for loss in losses]
    for number in range(8, 12):
        program.step(*batch(number))
    assert_same(losses, kept)
    assert not any(loss.requires_grad for loss in losses)


def test_a_device_without_graphs_runs_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_step, "graphs_on", capture.graphs_on)

    def loop(program: Program) -> Iterator[Tensor]:
        for number in range(6):
            yield program.step(*batch(number)).detach()

    step = assert_twins(loop)
    assert (step.eager, step.replays) == (6, 0)


class Counter:
    """Counts."""

    value = 0

    def __init__(self) -> None:
        self.value = 0


AVERAGE = torch.optim.swa_utils.AveragedModel(nn.Linear(8, 4))
HOST = (random.Random(0), numpy.random.default_rng(0))


def refused(body: Callable[[Program, Counter, Tensor], object]) -> None:
    """Holds a step to being refused before any of it has run."""
    program, counter = Program(graphed=False), Counter()
    model, optimizer = program.model, program.optimizer

    def step(x: Tensor, y: Tensor) -> Tensor:
        counter_of_step, output = counter, model(x)
        body(program, counter_of_step, output)
        loss = nn.functional.mse_loss(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graphed = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
    for number in range(3):
        graphed(*batch(number))
    before, count = program.state(), counter.value
    try:
        graphed(*batch(3))
    except zoo.GraphError:
        assert_same(program.state(), before)
        assert counter.value == count
        raise
    assert graphed.replays == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            lambda program, counter, output: output.sum().item(),
            r"step cannot be a CUDA graph: aten\._local_scalar_dense\.default at .*test_graphed_"
            r"step\.py:\d+ reads numbers of a tensor and waits .*; keep it on the device",
        ),
        (
            lambda program, counter, output: output.nonzero(),
            r"aten\.nonzero\.default at .* reads numbers of a tensor",
        ),
        (
            lambda program, counter, output: AVERAGE.update_parameters(program.model[2]),
            "reads numbers of a tensor .*; call update_parameters after the step",
        ),
        (
            lambda program, counter, output: random.random(),
            "it draws random numbers on the host, which replays would not draw again; draw them",
        ),
        (
            lambda program, counter, output: HOST[0].random(),
            "it draws random numbers on the host",
        ),
        (
            lambda program, counter, output: HOST[1].random(),
            "it draws random numbers on the host",
        ),
        (
            lambda program, counter, output: numpy.random.rand(),
            "it draws random numbers on the host",
        ),
        (
            lambda program, counter, output: setattr(counter, "value", counter.value + 1),
            r"it changes counter\.value \(2, now 3\), which replays would leave as it is; change",
        ),
    ],
    ids=["item", "nonzero", "average", "random", "Random", "Generator", "numpy", "counter"],
)
def test_what_no_replay_would_do_is_refused(
    body: Callable[[Program, Counter, Tensor], object], text: str
) -> None:
    with pytest.raises(zoo.GraphError, match=text):
        refused(body)


def test_a_step_that_is_allowed_is_captured_in_the_same_way() -> None:
    refused(lambda program, counter, output: output + counter.value)


def test_a_step_that_returns_an_object_is_refused_before_it_has_run() -> None:
    program = Program(graphed=False)
    graphed = zoo.make_graphed_step(
        lambda x, y: Counter(), model=program.model, optimizer=program.optimizer
    )
    results = [graphed(*batch(number)) for number in range(3)]
    assert [type(result) for result in results] == 3 * [Counter]
    with pytest.raises(zoo.GraphError, match=r"it returns .*Counter.*; return its tensors"):
        graphed(*batch(3))
    assert (graphed.eager, graphed.captures) == (3, 0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda x: x.requires_grad_(), r"a tensor \(6, 8\) that requires one"),
        (lambda x: x.to("meta"), r"on cpu; got a tensor \(6, 8\) on meta.*batch\.to\('cpu'"),
        (lambda x: x.to_sparse(), r"takes dense tensors; got one \(6, 8\) \(torch\.sparse_coo\)"),
        (lambda x: Counter(), "takes tensors and plain values; got <.*Counter object"),
    ],
    ids=["gradient", "device", "sparse", "object"],
)
def test_a_batch_that_cannot_be_copied_is_refused(
    given: Callable[[Tensor], Any], text: str
) -> None:
    program, (x, y) = Program(graphed=True), batch(0)
    before = program.state()
    with pytest.raises(zoo.GraphError, match=text):
        program.step(given(x), y)
    assert_same(program.state(), before)


def test_a_batch_that_the_step_writes_is_refused() -> None:
    program = Program(graphed=False)

    def step(x: Tensor) -> Tensor:
        x.mul_(2)
        return program.step(x, x[:, :4])  # type: ignore[no-any-return]

    graphed = zoo.make_graphed_step(step, model=program.model, optimizer=program.optimizer)
    for number in range(3):
        graphed(batch(number)[0])
    before = program.state()
    with pytest.raises(zoo.GraphError, match=r"writes a tensor \(6, 8\) of its batch in place"):
        graphed(batch(3)[0])
    assert_same(program.state(), before)


def test_an_optimizer_that_counts_on_the_host_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zoo.GraphError, match=r"AdamW counts .* AdamW\(\.\.\., capturable=True\)"):
        zoo.make_graphed_step(print, model=model, optimizer=optimizer)


def test_a_model_on_several_devices_or_of_sharded_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(zoo.GraphError, match="the model is on cpu, meta, and a graph is one of"):
        zoo.make_graphed_step(print, model=model, optimizer=optimizer)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    with pytest.raises(zoo.GraphError, match="parameters of Linear are spread over processes"):
        zoo.make_graphed_step(print, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"step": 3}, "needs a function of a batch; got 3"),
        ({"model": 3}, "needs a torch Module, or several; got 3"),
        ({"optimizer": [3]}, "needs a torch Optimizer, or several; got 3"),
        ({"model": []}, "needs the model that the step trains"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], text: str) -> None:
    model = nn.Linear(4, 4)
    right = {"step": print, "model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with pytest.raises(zoo.ArgumentError, match=text):
        zoo.make_graphed_step(**right | given)


def test_autocast_around_a_call_is_refused() -> None:
    program = Program(graphed=True)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(zoo.GraphError, match=r"enter torch\.autocast inside of the step"),
    ):
        program.step(*batch(0))


def test_views_and_expanded_tensors_are_copied_with_their_strides() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    seen = []

    def step(x: Tensor, rest: dict[str, Tensor]) -> Tensor:
        return torch.stack([x.sum(), rest["y"].sum()])

    graphed = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
    for number in range(6):
        x, y = batch(number)
        seen.append(
            (graphed(x[:, ::2], {"y": y[:1].expand(5, 4)}), x[:, ::2].sum(), 5 * y[:1].sum())
        )
    assert graphed.replays == 3
    for found, *sums in seen:
        torch.testing.assert_close(found, torch.stack(sums))


def test_at_most_eight_graphs_are_kept() -> None:
    program = Program(graphed=True)
    for size in range(2, 12):
        for number in range(5):
            program.step(*batch(number, size))
    assert program.step.captures == 10
    assert len(program.step._graphs) == 8
    program.step.reset()
    assert not program.step._graphs


def new_class() -> Any:
    """Returns an object that has its value as a class."""
    kind = type("OfClass", (), {"value": 1.0})
    return kind()


def default(values: Any = [1.0]) -> float:  # noqa: B006 - it is what is changed
    """Returns what its default has."""
    return values[0]  # type: ignore[no-any-return]


KEEPERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "namespace": (
        lambda: SimpleNamespace(value=1.0),
        lambda one: one.value,
        lambda one: setattr(one, "value", 0.5),
    ),
    "class": (
        new_class,
        lambda one: one.value,
        lambda one: setattr(type(one), "value", 0.5),
    ),
    "module": (
        lambda: vars(module := ModuleType("settings")).update(value=1.0) or module,
        lambda one: one.value,
        lambda one: setattr(one, "value", 0.5),
    ),
    "list": (lambda: [1.0], lambda one: one[0], lambda one: operator.setitem(one, 0, 0.5)),
    "deque": (lambda: deque([1.0]), lambda one: one[0], lambda one: one.appendleft(0.5)),
    "nested": (
        lambda: {"loss": {"weights": ([1.0],)}},
        lambda one: one["loss"]["weights"][0][0],
        lambda one: operator.setitem(one["loss"]["weights"][0], 0, 0.5),
    ),
    "default": (
        lambda: None,
        lambda one: default(),
        lambda one: operator.setitem(default.__defaults__[0], 0, 0.5),
    ),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_number_that_code_names_is_noticed_at_once_wherever_it_is_kept(name: str) -> None:
    make, read, change = KEEPERS[name]

    def losses(graphed: bool) -> list[Tensor]:
        default.__defaults__[0][0] = 1.0  # type: ignore[index]
        program, keeper = Program(graphed=False), make()

        def step(x: Tensor, y: Tensor) -> Tensor:
            return read(keeper) * program.step(x, y)  # type: ignore[no-any-return]

        train: Any = step
        if graphed:
            model, optimizer = program.model, program.optimizer
            train = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
        found = [train(*batch(number)) for number in range(6)]
        change(keeper)
        found += [train(*batch(number)) for number in range(6)]
        assert not graphed or train.replays == 3 + 4
        return found

    assert_same(losses(graphed=True), losses(graphed=False))


EXECUTED = """
class Settings:
    weight = 1.0

settings = Settings()

def weighted(loss):
    return abs(settings.weight) * loss
"""


def test_a_program_that_is_executed_without_a_name_is_walked() -> None:
    # as some tools run a program: its functions and classes are of no module then
    names: dict[str, Any] = {}
    exec(EXECUTED, names)
    weighted, program = names["weighted"], Program(graphed=False)
    model, optimizer = program.model, program.optimizer
    eager = copy.deepcopy(model)

    def step(x: Tensor) -> Tensor:
        return weighted(model.eval()(x).sum())  # type: ignore[no-any-return]

    graphed = zoo.make_graphed_step(step, model=model, optimizer=optimizer)
    weights, replays = [1.0] * 6 + [0.5] * 6 + [0.25] * 6, []
    for number, weight in enumerate(weights):
        if number == 6:
            # in front of that of the class
            names["settings"].weight = 0.5
        elif number == 12:
            # in front of the built-in function
            names["abs"] = lambda weight: weight / 2
        expected = weight * eager.eval()(batch(number)[0]).sum()
        torch.testing.assert_close(graphed(batch(number)[0]), expected, rtol=0, atol=0)
        replays.append(graphed.replays)
    assert replays[5] == replays[6] < replays[11] == replays[12] < replays[17]


def test_a_process_group_of_one_is_captured_after_eleven_steps() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:

        def make(graphed: bool, **options: Any) -> Program:
            program = Program(graphed=False)
            model = DistributedDataParallel(program.model, **options)
            optimizer = program.optimizer

            def step(x: Tensor, y: Tensor) -> Tensor:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            return program.train_by(step, graphed, model)

        def loop(program: Program) -> Iterator[Tensor]:
            for number in range(20):
                yield program.step(*batch(number))

        step = assert_twins(loop, make)
        assert (step.eager, step.captures, step.replays, step.audits) == (11, 1, 7, 2)
        with pytest.raises(zoo.GraphError, match="find_unused_parameters=True"):
            make(graphed=True, find_unused_parameters=True)
    finally:
        distributed.destroy_process_group()
