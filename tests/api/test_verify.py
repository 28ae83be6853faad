"""`zoo.verify` says exact when it is, names what is not, and leaves its arguments alone."""

import copy
import ctypes
import dataclasses
import functools
import itertools
import os
import pickle
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training import Residuals, assert_same, everything, images
from zoo.api.checkpoint import checkpoint as put_in_force
from zoo.api.verify import verify, weighted_sum
from zoo.engine.segments import thread
from zoo.errors import ArgumentError, DeterminismError, InputError, PlanError, VerifyError
from zoo.models.densenet import DenseNet
from zoo.models.resnet import ResNet, basic
from zoo.optimizer.independence import step_alone
from zoo.tracing.planned_forward import patched_forward
from zoo.verification.state_comparison import first_difference, same_bits

OPTIONS = [True, 2, "sqrt", "blocks", "cheap"]
SOURCES: dict[str, Callable[[], float]] = {
    "entropy": lambda: int.from_bytes(os.urandom(4), "big") / 2**32,
    "clock": lambda: time.perf_counter_ns() % 2**20,
    "counter": itertools.count(1).__next__,
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


# the models whose step ran inside of a segment; no comparison sees this set
INSIDE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Call(nn.Module):
    """Calls a function."""

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)


class Spoiled(Residuals):
    """Does something in its module `spoils`, and may do it only inside of a segment."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__(rate=rate)
        self.spoils = Call()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                if thread.segment is not None:
                    INSIDE.add(self)
                x = self.spoils(x, self.spoil)
        return self.fc(x.mean((2, 3)))

    def spoil(self, y: Tensor) -> Tensor:
        return y


def one_segment(model: nn.Module) -> zoo.Plan:
    """Returns a plan that recomputes all of a model but its last step."""
    last = len(zoo.chain_of(model, images()).names) - 1
    return zoo.Plan([tuple(range(last)), last])


class Scaled(Spoiled):
    """Writes by NumPy through the address, which no replay repeats."""

    def spoil(self, y: Tensor) -> Tensor:
        y = y * 1.0
        memory = (ctypes.c_float * y.numel()).from_address(y.data_ptr())
        numpy.frombuffer(memory, numpy.float32)[...] *= 1.5
        return y


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "residuals": (Residuals, lambda: images().requires_grad_()),
    "resnet": (
        functools.partial(ResNet, basic, (2, 1), 5, drop_rate=0.2, drop_path_rate=0.2),
        lambda: images(2, 3, 32),
    ),
    "densenet": (
        functools.partial(
            DenseNet, growth_rate=4, depths=(2, 2), drop_rate=0.2, classes=5, small_images=True
        ),
        lambda: images(2, 3, 8),
    ),
    "vnet": (functools.partial(zoo.vnet, width=2), lambda: torch.rand(2, 1, 16, 16, 16)),
    "vit": (
        functools.partial(
            zoo.vit_tiny_patch16, image_size=32, depth=2, classes=5, drop_path_rate=0.2
        ),
        lambda: images(2, 3, 32),
    ),
    "gpt2": (
        functools.partial(
            zoo.gpt2_small, depth=2, width=16, heads=2, vocabulary=50, chunk_tokens=7
        ),
        lambda: tuple(torch.randint(50, (2, 2, 12))),
    ),
    "lstm": (
        functools.partial(zoo.lstm, vocabulary=50, embedding=8, hidden=8, chunk_steps=5),
        lambda: (torch.randint(50, (13, 2)), None, torch.randint(50, (13, 2))),
    ),
}


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_in_the_backward_is_exact(kind: str) -> None:
    build, inputs = KINDS[kind]
    adam = torch.optim.AdamW
    report = verify(build(), inputs(), steps=2, optimizer=adam, optimizer_in_backward=True)
    report.check()
    assert report.compared["optimizer state"] == 3 * report.compared["parameter gradient"]
    assert "with checkpoint=True and the optimizer in the backward" in str(report)


def test_an_optimizer_that_steps_twice_in_the_backward_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def twice(*given: Any) -> None:
        for _ in range(2):
            step_alone(*given)

    monkeypatch.setattr("zoo.optimizer.in_backward.step_alone", twice)
    report = verify(Residuals(), images(), False, optimizer_in_backward=True)
    assert not report.exact
    assert report.first is not None
    assert (report.first.kind, report.first.name) == ("parameter", "blocks.0.conv.weight")
    assert verify(Residuals(), images(), False).exact


@pytest.mark.usefixtures("without_fork")
@pytest.mark.parametrize("checkpoint", [True, "blocks", "sqrt"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_is_exact(kind: str, checkpoint: Any) -> None:
    build, inputs = KINDS[kind]
    report = verify(build(), inputs(), checkpoint, steps=2)
    report.check()
    assert report.exact
    assert report.first is None
    # where weights are most of a small model no recomputation makes the peak lower
    assert checkpoint is True or max(report.plan.runs()) == 2


@pytest.mark.parametrize("checkpoint", OPTIONS)
def test_a_report_says_what_was_compared(checkpoint: Any) -> None:
    report = verify(Residuals(), images().requires_grad_(), checkpoint)
    assert list(report.compared.items())[:6] == [
        ("output", 1),
        ("loss", 1),
        ("input gradient", 1),
        ("parameter gradient", 14),
        ("buffer", 9),
        ("parameter", 14),
    ]
    assert report.compared["random state"] >= 2
    assert str(report).startswith(f"exact: Residuals with checkpoint={checkpoint!r}, ")
    assert "of 11 steps recomputed, is bit for bit its baseline after each of 3" in str(report)


def test_a_report_is_plain_data() -> None:
    model = Scaled(rate=0.0)
    report = verify(model, images(), one_segment(model), steps=1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="exact"):
        report.exact = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(report)) == report
    leaves = torch.utils._pytree.tree_leaves(dataclasses.asdict(report))
    assert not any(isinstance(leaf, Tensor) for leaf in leaves)


@pytest.mark.parametrize("checkpoint", [False, 1, "auto"])
def test_where_nothing_is_recomputed_nothing_is_said_about_it(checkpoint: Any) -> None:
    report = verify(Residuals(), images(), checkpoint, steps=1)
    report.check()
    assert (report.plan is None) is (checkpoint is False)
    text = str(report)
    assert text.startswith(f"exact, with nothing recomputed: Residuals with {checkpoint=} keeps ")
    assert text.endswith(
        "says nothing about recomputation; verify another plan, such as checkpoint='blocks'."
    )


def test_a_replay_that_differs_is_found_and_named() -> None:
    model = Scaled(rate=0.0)
    report = verify(model, images(), one_segment(model))
    assert report.exact is False
    assert (report.first.kind, report.first.training_step) == ("parameter gradient", 1)
    assert 0 < report.first.differing <= report.first.elements
    assert 0 < report.first.largest < float("inf")
    assert report.first.module.name == "spoils"
    with pytest.raises(VerifyError, match=r"^not exact: Scaled .* of its modules is spoils, whose"):
        report.check()


def test_a_kept_step_has_no_replay_to_differ() -> None:
    model = Scaled(rate=0.0)
    names = zoo.chain_of(model, images()).names
    (spoiled,) = (step for step, name in enumerate(names) if name.startswith("spoils"))
    kept, last = {spoiled - 1, spoiled, spoiled + 1}, len(names) - 1
    plan = [*(step if step in kept else (step,) for step in range(last)), last]
    verify(model, images(), tuple(plan)).check()


def test_the_first_bad_step_of_training_is_named() -> None:
    class Late(Scaled):
        age = 0

        def forward(self, x: Tensor) -> Tensor:
            self.age += 1
            return super().forward(x)

        def spoil(self, y: Tensor) -> Tensor:
            return super().spoil(y) if self.age == 2 else y * 1.0

    model = Late(rate=0.0)
    report = verify(model, images(), one_segment(model))
    assert report.first.training_step == 2
    assert report.first.module.name == "spoils"


def test_a_wrong_gradient_is_traced_to_its_step() -> None:
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return gradient * ctx.factor, None

    class Unlike(Spoiled):
        def spoil(self, y: Tensor) -> Tensor:
            return Doubling.apply(y, 2.0 if self in INSIDE else 1.0)

    model = Unlike(rate=0.0)
    report = verify(model, images(), one_segment(model), steps=1)
    assert report.first.kind == "parameter gradient"
    assert report.first.module.name == "blocks.1"
    assert report.first.module.what == "whose output's gradient differs"


class Tally(nn.Module):
    """Counts, in front of a block, the steps of training after one in a segment."""

    def __init__(self, block: nn.Module, owner: Any) -> None:
        super().__init__()
        self.block, self.owner = block, [owner]

    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].tally += int(self.owner[0] in INSIDE)
        return self.block(x)


@pytest.mark.parametrize(("kind", "place"), [("buffer", "blocks.0"), ("attribute", None)])
def test_state_that_moves_otherwise_is_named(kind: str, place: str | None) -> None:
    class Tallying(Spoiled):
        def __init__(self) -> None:
            super().__init__()
            if kind == "buffer":
                self.register_buffer("tally", torch.zeros((), dtype=torch.int64))
            else:
                self.tally = 0

            self.blocks[0] = Tally(self.blocks[0], self)

    report = verify(Tallying(), images(), "blocks")
    assert (report.first.kind, report.first.name, report.first.training_step) == (kind, "tally", 3)
    assert (report.first.module and report.first.module.name) == place


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_baseline_that_differs_from_itself_is_not_blamed_on_checkpointing(
    source: Callable[[], float], is_deterministic: bool
) -> None:
    class Clock(Spoiled):
        def spoil(self, y: Tensor) -> Tensor:
            return y + source()

    model = Clock()
    report = verify(model, images(), one_segment(model), deterministic=is_deterministic)
    assert report.exact is None
    assert (report.first.kind, report.first.training_step) == ("output", 1)
    assert report.first.module.name == "spoils"
    assert report.first.module.what == "whose output differs"
    with pytest.raises(
        VerifyError,
        match=r"^the baseline does not repeat its own numbers: two .* first in output after",
    ) as told:
        report.check()
    assert ("Pass deterministic=True (--deterministic)" in str(told.value)) is not is_deterministic
    assert ("algorithms were on; look for the clock" in str(told.value)) is is_deterministic


# a kernel that draws from where no stream is, unless torch is to repeat itself
LIBRARY = torch.library.Library("zoo_tests", "DEF")
LIBRARY.define("unrepeatable(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "unrepeatable", "CompositeExplicitAutograd")
def unrepeatable(x: Tensor) -> Tensor:
    return x * (1.0 if torch.are_deterministic_algorithms_enabled() else 1.0 + SOURCES["entropy"]())


class Unrepeatable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        y.register_hook(torch.ops.zoo_tests.unrepeatable)
        return y


def test_a_kernel_that_does_not_repeat_itself_can_be_compared_by_deterministic_algorithms() -> None:
    x = images()[:, 0, 0, :4]
    report = verify(Unrepeatable(), x, 2)
    assert report.exact is None
    assert report.first.kind == "parameter gradient"
    found = verify(Unrepeatable(), x, 2, deterministic=True)
    assert found.exact
    assert found.deterministic
    assert "2 of 4 steps recomputed" in str(found)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operator_without_a_deterministic_algorithm_is_refused_before_a_plan_is_blamed() -> None:
    class Puts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.put(super().forward(x), torch.tensor([1]), torch.ones(1))

    model, x = Puts(4, 4), torch.rand(2, 4)
    with pytest.raises(DeterminismError, match="no deterministic algorithm for put_, which"):
        verify(model, x, 1, deterministic=True)
    assert verify(model, x, 1).exact


def test_random_modules_count_as_deterministic() -> None:
    class Jitter(Spoiled):
        def spoil(self, y: Tensor) -> Tensor:
            return y * (random.random() + torch.rand(()))

    assert verify(Jitter(), images(), "blocks").exact


def snapshot(model: nn.Module) -> Any:
    flags = [(module.training, sorted(vars(module))) for module in model.modules()]
    grads = [value.requires_grad for value in model.parameters()]
    return flags, grads, [id(value) for value in (*model.parameters(), *model.buffers())]


class Stop(Exception):
    pass


@pytest.mark.parametrize("fault", [None, Stop, KeyboardInterrupt])
def test_the_arguments_are_left_alone(fault: type[BaseException] | None) -> None:
    model, x = put_in_force(Residuals(), "blocks"), images().requires_grad_()
    model.blocks[0].norm.eval()
    model.blocks[0].conv.weight.requires_grad_(False)
    model(x).sum().backward()
    torch.manual_seed(3)
    random.seed(3)
    x_before, gradient, runner = x.detach().clone(), x.grad.clone(), patched_forward(model)
    before, python, other = everything(model), random.getstate(), snapshot(model)
    calls = itertools.count()

    def loss(output: Tensor) -> Tensor:
        torch.rand(1), random.random()
        if fault is not None and next(calls) == 3:
            raise fault("here")
        return output.square().sum()

    if fault is None:
        assert verify(model, x, loss=loss, deterministic=True).exact
    else:
        with pytest.raises(fault, match="here"):
            verify(model, x, loss=loss, deterministic=True)
    assert torch.get_deterministic_debug_mode() == 0
    assert_same(everything(model), before)
    assert random.getstate() == python
    assert snapshot(model) == other
    assert patched_forward(model) is runner
    assert same_bits(x, x_before)
    assert same_bits(x.grad, gradient)


def test_gradients_that_are_none_stay_none() -> None:
    model = Residuals()
    verify(model, images(), steps=1).check()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert zoo.plan_of(model) is None


@pytest.mark.parametrize("make", ["adamw", "none"])
def test_loss_and_optimizer_are_the_user_s(make: str) -> None:
    seen: list[Any] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        seen.append(len(parameters))
        return torch.optim.AdamW(parameters)

    report = verify(Residuals(), images(), optimizer=optimizer if make == "adamw" else None)
    assert report.exact
    assert seen == ([14] * 4 if make == "adamw" else [])


def test_a_loss_that_is_a_method_of_the_model_uses_the_copy() -> None:
    seen: set[bool] = set()

    class Own(Residuals):
        def forward(self, x: Tensor) -> Tensor:
            self.has_run = True
            return super().forward(x)

        def loss(self, output: Tensor) -> Tensor:
            seen.add(self.has_run)
            return output.sum() + self.fc.weight.square().sum()

    model = Own()
    assert verify(model, images(), loss=model.loss).exact
    assert seen == {True}
    assert model.fc.weight.grad is None


def test_inputs_may_come_from_a_function_of_the_step() -> None:
    asked: list[int] = []

    def inputs(step: int) -> Tensor:
        asked.append(step)
        return images(size=6 + step % 2)

    report = verify(Residuals(), inputs, "sqrt", steps=3)
    assert report.exact
    assert asked == [0, 1, 2]


def test_plans_inside_of_a_model_are_ignored() -> None:
    inner = Scaled(rate=0.0)
    model = nn.Sequential(nn.ReLU(), put_in_force(inner, one_segment(inner)), nn.Tanh())
    assert verify(model, images(), False, steps=1).exact


AROUND: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_inside_of_a_mode_both_train(around: Callable[[], Any]) -> None:
    model, x = Residuals(), images()
    with around():
        report = verify(model, x, steps=1)
    assert report.exact
    assert max(report.plan.runs()) == 2


def with_meta_buffer() -> Residuals:
    model = Residuals()
    model.register_buffer("table", torch.empty(3, device="meta"))
    return model


def test_a_random_stream_that_moves_otherwise_is_named() -> None:
    class Drawing(Spoiled):
        """Draws when a gradient comes by, if its step was in a segment."""

        def spoil(self, y: Tensor) -> Tensor:
            y = y.clone()
            if self in INSIDE:
                y.register_hook(lambda gradient: torch.rand(1) and None)
            return y

    model = Drawing()
    report = verify(model, images(), one_segment(model), steps=1)
    assert (report.first.kind, report.first.name) == ("random state", "cpu")


def test_every_training_takes_every_step() -> None:
    taken: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            taken.append(1)
            return super().step(closure)

    assert verify(Residuals(), images(), steps=3, optimizer=lambda p: Counting(p, 0.1)).exact
    assert len(taken) == 4 * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": len}, r"verify needs a torch\.nn\.Module; got builtin"),
        ({"model": Residuals().to("meta")}, r"on the meta device, which has no bits"),
        ({"inputs": 1}, r"inputs are a tensor, a tuple.*got int"),
        ({"inputs": lambda step: None}, r"inputs are a tensor, a tuple.*got NoneType"),
        ({"model": with_meta_buffer()}, r"on the meta device, which has no bits"),
        ({"inputs": images().to("meta")}, r"inputs are on the meta device"),
        ({"optimizer": "no such name"}, r"optimizer='no such name' is no optimizer"),
        ({"steps": 0}, r"at least 1 training step; got steps=0"),
        ({"steps": True}, r"at least 1 training step; got steps=True"),
        ({"checkpoint": "sqr"}, r"is no scheme.*sqrt"),
        ({"loss": lambda output: output}, r"returned a tensor of shape \(4, 5\); return"),
        ({"loss": lambda output: 1.0}, r"loss=<lambda> returned float"),
        ({"loss": lambda output: output.detach().sum()}, r"depends on nothing that requires"),
    ],
)
def test_what_cannot_be_verified_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"model": Residuals(), "inputs": images()} | change
    state = torch.get_rng_state()
    with pytest.raises(ArgumentError, match=message):
        verify(**given)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_optimizer_of_the_original_is_refused() -> None:
    model, x = Residuals(), images()
    before = everything(model)
    with pytest.raises(ArgumentError, match="of other parameters than it was given"):
        verify(model, x, optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=1.0))
    assert_same(everything(model), before)


def test_a_plan_or_an_input_that_does_not_fit_leaves_the_model_alone() -> None:
    model, x, volume = Residuals(), images(), torch.rand(2, 2, 16, 16, 16)
    vnet = zoo.vnet(width=4)
    before = everything(model)
    with pytest.raises(PlanError, match="the plan covers 3 steps but the model has 11"):
        verify(model, x, ((0, 1), 2))
    with pytest.raises(InputError, match="vnet was built for 1 channels; got 2"):
        verify(vnet, volume)
    assert_same(everything(model), before)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Residuals()
    model.kept = model(images())  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"cannot be copied.*before its first forward"):
        verify(model, images())


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0]).double(), False),
        (torch.ones(2, 3), torch.ones(3, 2).t(), True),
        (torch.ones(2, 3), torch.ones(3, 2), False),
        (torch.tensor(True), torch.tensor(True), True),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64).conj(), False),
        (torch.ones(0), torch.ones(0), True),
        (torch.ones(3).to_sparse(), torch.ones(3).to_sparse(), True),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), True),
    ],
)
def test_equality_is_that_of_bits(left: Tensor, right: Tensor, equal: bool) -> None:
    assert same_bits(left, right) is equal


@pytest.mark.parametrize(
    ("expected", "actual", "differing", "largest", "note"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.25]), 2, 0.5, ""),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0, ""),
        (torch.tensor([0.0]), torch.tensor([float("nan")]), 1, float("inf"), ""),
        (torch.tensor(3), torch.tensor(5), 1, 2.0, ""),
        (torch.ones(2), None, 0, 0.0, "none instead of a tensor"),
        ("1", "2", 0, 0.0, "2 instead of 1"),
    ],
)
def test_a_difference_says_how_much(
    expected: Any, actual: Any, differing: int, largest: float, note: str
) -> None:
    found = first_difference({("buffer", "b"): expected}, {("buffer", "b"): actual}, 1)
    assert (found.differing, found.largest, found.note) == (differing, largest, note)


def test_what_only_one_training_left_is_a_difference() -> None:
    one = {("attribute", "cache[0]"): "1"}
    assert first_difference(one, {}, 2).note == "only in the baseline"
    assert first_difference({}, one, 2).note == "only in the other training"
    assert first_difference(one, copy.copy(one), 2) is None


def test_the_default_loss_gives_every_element_a_gradient_of_its_own() -> None:
    x, y = torch.zeros(4, 6, requires_grad=True), torch.zeros((), requires_grad=True)
    weighted_sum({"logits": x, "more": (y, torch.arange(3), None)}).backward()
    assert len(x.grad.unique()) == 24
    assert bool((x.grad != 0).all())
    assert y.grad == 1


def test_the_default_loss_of_outputs_of_every_kind() -> None:
    """Complex numbers have two gradients; half precision could not tell 300 weights apart."""
    waves = torch.zeros(5, dtype=torch.complex64, requires_grad=True)
    weighted_sum(waves).backward()
    assert len(torch.view_as_real(waves.grad).unique()) == 10
    assert weighted_sum(torch.zeros(300, dtype=torch.bfloat16)).dtype == torch.float32
